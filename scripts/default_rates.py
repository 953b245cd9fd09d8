"""Measure plain training at several learning rates, and choose the default rate of each task.

python scripts/default_rates.py [--task digits ..] [--optimizer sgd adam ..] [--out runs/rates]
python scripts/default_rates.py --write    the files of conf/rate/ and the table of docs/rates.md

Rates are the optimizer's own times powers of two, and more of them where the best is the least or
the greatest. The score is measured on validation data; finished runs in `--out` are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean

import yaml

ROOT = Path(__file__).resolve().parents[1]
RATES, PAGE = ROOT / "conf" / "rate", ROOT / "docs" / "rates.md"
TASKS = {  # the model, and the number of runs at each rate
    "digits": ("mlp", "seeds=2 splits=4"),
    "diabetes": ("mlp", "seeds=2 splits=4"),
    "overlay": ("multi_head", "seeds=2 splits=2"),
    "quadratics_toy": ("point", "seeds=1"),
    "temporal_order": ("lstm", "seeds=3"),
    "modular": ("gpt", "seeds=2"),
    "char_lm": ("gpt", "seeds=1"),
}
CLASSES = {"digits": 10, "overlay": 10, "temporal_order": 4, "modular": 97}
CHANCE = 1.5  # times the chance of the classes: a run that is not better has learned nothing
POWERS = range(-2, 5)  # of two, at first
MOST = 16  # rates of a pair
ACCURACY, LOSS = 0.002, 0.02  # how far from its best the default may be: absolute, relative
HEAD = """\
| task | model | optimizer | own rate | default | score of own | of default | best | at |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Pair:
    """The scores of a task and an optimizer by learning rate; None where a run diverged or learned
    nothing.
    """

    task: str
    optimizer: str
    metric: str
    scores: Mapping[float, float | None]

    @property
    def own(self) -> float:
        """The rate in the optimizer's own file."""
        return own_rate(self.optimizer)

    @property
    def known(self) -> dict[float, float]:
        """The scores, more is better, of the rates that have one."""
        sign = -1 if "loss" in self.metric else 1
        return {rate: sign * score for rate, score in self.scores.items() if score is not None}

    @property
    def best(self) -> float:
        """The rate with the best score, the least of several; the optimizer's own without one."""
        return max(sorted(self.known), key=self.known.__getitem__, default=self.own)

    @property
    def default(self) -> float:
        """The optimizer's own rate if it is near the best, otherwise the middle of the near rates,
        the better of two. The best may be the last before training diverges.
        """
        if self.best == self.own:
            return self.own
        best = self.known[self.best]
        room = LOSS * abs(best) if "loss" in self.metric else ACCURACY
        near = sorted(rate for rate, score in self.known.items() if best - score <= room)
        if self.own in near:
            return self.own
        return max(near[(len(near) - 1) // 2 : len(near) // 2 + 1], key=self.known.__getitem__)

    @property
    def row(self) -> str:
        """The row of the table."""
        rates = [self.own, self.default]
        scores = [self.shown(rate) for rate in (*rates, self.best)]
        cells = [self.task, TASKS[self.task][0], self.optimizer, *(f"{rate:g}" for rate in rates)]
        return f"| {' | '.join([*cells, *scores, f'{self.best:g}'])} |"

    def shown(self, rate: float) -> str:
        score = self.scores.get(rate)
        if score is None:
            return "-"
        return f"{score:.4g}" if "loss" in self.metric else f"{score:.2%}".replace("%", " %")


def own_rate(optimizer: str) -> float:
    """Return the rate in the optimizer's own file."""
    file = ROOT / "conf" / "optimizer" / f"{optimizer}.yaml"
    return float(yaml.safe_load(file.read_text(encoding="utf-8"))["lr"])


def measured(task: str, optimizer: str, out: Path) -> Pair:
    """Train at more rates until the best is neither the least nor the greatest."""
    rates = sorted(float(f"{own_rate(optimizer) * 2.0**power:.3g}") for power in POWERS)
    while True:
        _train(task, optimizer, rates, out)
        pair = _read(task, optimizer, out)
        rates = sorted({*rates, *pair.scores})  # an earlier command may have tried more
        is_low = not pair.known or pair.best == rates[0]
        if len(rates) >= MOST or not (is_low or pair.best == rates[-1]):
            return pair
        ends = [rates[0] / 4, rates[0] / 2] if is_low else [2 * rates[-1]]
        rates = sorted([*rates, *(float(f"{rate:.3g}") for rate in ends)])


def _train(task: str, optimizer: str, rates: list[float], out: Path) -> None:
    model, numbers = TASKS[task]
    words = [f"task={task}", f"model={model}", f"optimizer={optimizer}", *numbers.split()]
    words += [f"validation={'null' if task == 'quadratics_toy' else 0.2}", f"out={out}"]
    words += [f"study={task}-{optimizer}", f"lr={','.join(f'{rate:g}' for rate in rates)}"]
    words += ["transform=none", "logger=none", "report=false", "effects_every=0"]
    command = [sys.executable, "-m", "gradsurg.run", "-m", *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if found.returncode not in (0, 1):  # 1: a run diverged
        raise SystemExit(found.stderr)


def _read(task: str, optimizer: str, out: Path) -> Pair:
    """Return the mean score at each rate of the runs in a folder."""
    scores = defaultdict(list)
    metric = "train/loss"
    for file in sorted((out / f"{task}-{optimizer}").glob("*/summary.json")):
        summary = json.loads(file.read_text(encoding="utf-8"))
        config = yaml.safe_load(file.with_name("config.yaml").read_text(encoding="utf-8"))
        names = [f"validation/{name}" for name in ("accuracy", "loss")]
        metric = next((name for name in names if name in summary), metric)
        is_finished = summary["state"] == "finished"
        scores[config["optimizer"]["lr"]].append(summary if is_finished else None)
    found = {}
    for rate, runs in sorted(scores.items()):
        values = [run[metric] if run else float("nan") for run in runs]
        least = CHANCE / CLASSES[task] if task in CLASSES else 0
        is_known = all(isfinite(value) and value > least for value in values)
        found[rate] = mean(values) if is_known else None
    return Pair(task, optimizer, metric, found)


def write(pairs: list[Pair]) -> None:
    """Write the table, and the file of each pair whose default is not the optimizer's own rate."""
    text = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    rows = "".join(f"{pair.row}\n" for pair in pairs)
    PAGE.write_text(text + HEAD + rows, encoding="utf-8")
    for pair in pairs:
        file = RATES / f"{pair.task}_{pair.optimizer}.yaml"
        file.unlink(missing_ok=True)
        if pair.default != pair.own:
            words = f"task={pair.task} model={TASKS[pair.task][0]} optimizer={pair.optimizer}"
            text = f"# python -m gradsurg.run {words}\nlr: {pair.default:g}\n"
            file.write_text(text, encoding="utf-8")


def main() -> None:
    optimizers = sorted(file.stem for file in (ROOT / "conf" / "optimizer").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--optimizer", nargs="+", choices=optimizers, default=optimizers)
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.write:
        places = [(task, one) for task in arguments.task for one in arguments.optimizer]
        pairs = [_read(*place, out) for place in places if (out / "-".join(place)).is_dir()]
        write(pairs)
        return
    for task in arguments.task:
        for optimizer in arguments.optimizer:
            pair = measured(task, optimizer, out)
            shown = [f"{rate:g}: {pair.shown(rate)}" for rate in pair.scores]
            print(f"{pair.row}   {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
