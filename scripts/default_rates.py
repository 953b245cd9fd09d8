"""Measure plain training at several learning rates, and choose the default rate of each task.

python scripts/default_rates.py [--task digits ..] [--optimizer sgd adam ..] [--out runs/rates]

Writes the files of conf/rate/ and the cells of docs/rates.md. Rates are the optimizer's own times
powers of two, and more of them where the best is the least or the greatest. The score is measured
on validation data; finished runs in `--out` are not repeated.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean

import yaml

from gradsurg.report.load import read_runs

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
OWN = {  # the rate in each optimizer's own file
    file.stem: float(yaml.safe_load(file.read_text(encoding="utf-8"))["lr"])
    for file in sorted((ROOT / "conf" / "optimizer").glob("*.yaml"))
}
CLASSES = {"digits": 10, "overlay": 10, "temporal_order": 4, "modular": 97}
CHANCE = 1.5  # times the chance of the classes: a run that is not better has learned nothing
METRICS = ("validation/accuracy", "validation/loss", "train/loss")  # the first that a task has
POWERS = range(-2, 5)  # of two, at first
MOST = 16  # rates of a pair
ACCURACY, LOSS = 0.002, 0.02  # how far from its best the default may be: absolute, relative


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
    def known(self) -> dict[float, float]:
        """The scores, more is better, of the rates that have one."""
        sign = -1 if "loss" in self.metric else 1
        return {rate: sign * score for rate, score in self.scores.items() if score is not None}

    @property
    def best(self) -> float:
        """The rate with the best score, the least of several; the optimizer's own without one."""
        return max(sorted(self.known), key=self.known.__getitem__, default=OWN[self.optimizer])

    @property
    def default(self) -> float:
        """The optimizer's own rate if it is near the best, otherwise the middle of the near rates,
        the better of two. The best may be the last before training diverges.
        """
        own = OWN[self.optimizer]
        if self.best == own:
            return own
        best = self.known[self.best]
        room = LOSS * abs(best) if "loss" in self.metric else ACCURACY
        near = sorted(rate for rate, score in self.known.items() if best - score <= room)
        if own in near:
            return own
        return max(near[(len(near) - 1) // 2 : len(near) // 2 + 1], key=self.known.__getitem__)

    @property
    def cell(self) -> str:
        """The cell of the table: the default rate, its score, and that of another own rate."""
        own, text = OWN[self.optimizer], f"{self.default:g}: {self.shown(self.default)}"
        return text if self.default == own else f"{text}\N{NO-BREAK SPACE}({self.shown(own)})"

    def shown(self, rate: float) -> str:
        score = self.scores.get(rate)
        if score is None:
            return "-"
        return f"{score:.4g}" if "loss" in self.metric else f"{100 * score:.2f}"


def measured(task: str, optimizer: str, out: Path) -> Pair:
    """Train at more rates until the best is neither the least nor the greatest."""
    rates = [OWN[optimizer] * 2.0**power for power in POWERS]
    while True:
        pair = trained(task, optimizer, rates, out)
        tried = sorted(pair.scores)  # an earlier command may have tried more
        is_low = not pair.known or pair.best == tried[0]
        if len(tried) >= MOST or not (is_low or pair.best == tried[-1]):
            return pair
        rates = [tried[0] / 4, tried[0] / 2] if is_low else [2 * tried[-1]]


def trained(task: str, optimizer: str, rates: list[float], out: Path) -> Pair:
    """Train at these rates, and return the mean score at each rate in the folder."""
    model, numbers = TASKS[task]
    study = f"{task}-{optimizer}"
    words = [f"task={task}", f"model={model}", f"optimizer={optimizer}", *numbers.split()]
    words += [f"validation={'null' if task == 'quadratics_toy' else 0.2}", f"out={out}"]
    words += [f"study={study}", f"lr={','.join(f'{rate:.3g}' for rate in rates)}"]
    words += ["transform=none", "logger=none", "report=false", "effects_every=0"]
    command = [sys.executable, "-m", "gradsurg.run", "-m", *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if found.returncode not in (0, 1):  # 1: a run diverged
        raise SystemExit(found.stderr)
    runs = read_runs(out / study)
    metric = next(name for name in METRICS if any(name in (run.summary or {}) for run in runs))
    scores = defaultdict(list)
    for run in runs:
        score = run.number(metric) or 0
        has_learned = run.state == "finished" and score > CHANCE / CLASSES.get(task, inf)
        scores[run.lr].append(score if has_learned else None)
    means = {rate: None if None in scores[rate] else fmean(scores[rate]) for rate in sorted(scores)}
    return Pair(task, optimizer, metric, means)


def write(pair: Pair) -> None:
    """Write the cell of a pair, and its file if its default is not the optimizer's own rate."""
    head, table = re.split(r"\n(?=\|)", PAGE.read_text(encoding="utf-8"), maxsplit=1)
    rows = [re.split(r" *\| *", row)[1:-1] for row in table.splitlines()]
    title = f"{pair.task}, {TASKS[pair.task][0]}"
    if title not in rows[0]:
        rows = [
            [*row, cell] for row, cell in zip(rows, (title, "---", *[""] * len(OWN)), strict=True)
        ]
    next(row for row in rows if row[0] == pair.optimizer)[rows[0].index(title)] = pair.cell
    lines = (f"| {' | '.join(row)} |" for row in rows)
    PAGE.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    file = RATES / f"{pair.task}_{pair.optimizer}.yaml"
    file.unlink(missing_ok=True)
    if pair.default != OWN[pair.optimizer]:
        words = f"task={pair.task} model={TASKS[pair.task][0]} optimizer={pair.optimizer}"
        text = f"# python -m gradsurg.run {words}\nlr: {pair.default:g}\n"
        file.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--optimizer", nargs="+", choices=[*OWN], default=[*OWN])
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    asked = parser.parse_args()
    for task in asked.task:
        for optimizer in asked.optimizer:
            write(pair := measured(task, optimizer, asked.out.absolute()))
            scores = (f"  {rate:g}: {pair.shown(rate)}" for rate in pair.scores)
            print(f"{task}, {optimizer}: {pair.cell}", *scores, sep="\n")


if __name__ == "__main__":
    main()
