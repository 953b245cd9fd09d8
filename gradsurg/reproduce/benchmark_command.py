"""The command of the benchmark: tune and train what is lacking, keep it, and print the tables."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import polars as pl
import yaml

from gradsurg.effects.tables import aligned
from gradsurg.experiment.files import replace_file
from gradsurg.experiment.run_directory import TUNING
from gradsurg.experiments import ROOT
from gradsurg.plugins.fields import FieldError
from gradsurg.report.arms import SPLIT, split_of
from gradsurg.report.wording import table_width
from gradsurg.reproduce.benchmark import (
    ALONE,
    GAINS,
    LARGER,
    MIN_SPLITS,
    SUM,
    TUNED_SUM,
    Benchmark,
    Cell,
    FormSpec,
    Level,
    with_tuned_sum,
)
from gradsurg.reproduce.expected import WrongExperiment
from gradsurg.reproduce.record import markdown
from gradsurg.reproduce.studies import FinishedStudy, plan_study, read_study, train
from gradsurg.stats import Difference, paired_difference

FOLDER = "experiments/conflict"
SWEEP = "hydra.mode=MULTIRUN"
Rows = list[list[str]]
Words = tuple[str, ...]


class Measurement:
    """The cells of a form, read from its file, which is rewritten after each new cell.

    A cell of the file is used if the same words would make it today.
    """

    def __init__(
        self, spec: Benchmark, form: str, root: Path, overrides: Sequence[str], jobs: int = 1
    ) -> None:
        self.spec, self.form, self.overrides = spec, spec.forms[form], overrides
        self.jobs = jobs
        self.methods = _methods(root, self.form)
        self.path = root / FOLDER / f"{form}.json"
        self.config_dir = f"--config-dir={root / FOLDER / 'conf'}"
        rows = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else []
        self.cells = [
            Cell(**{**row, "words": (*row["words"],), "rows": (*map(tuple, row["rows"]),)})
            for row in rows
        ]

    def levels(self) -> Iterator[tuple[str, float]]:
        """Yield the levels of the form."""
        for task, one in self.spec.tasks.items():
            yield from ((task, level) for level in one.levels[: self.form.levels])

    def known(self, task: str, level: float) -> dict[str, Cell]:
        """Return the cells of a level that are measured, by method."""
        words = self._words(task, level)
        return {
            one.method: one
            for one in self.cells
            if (one.task, one.level, one.words) == (task, level, words.get(one.method))
            and one.digest == self._digest(task, one.method)
        }

    def _digest(self, task: str, method: str) -> str:
        """Return a hash of the files that a cell depends on, in the benchmark's folder."""
        names = f"conf/experiment/conflict_{task}.yaml", f"conf/method/{method}.yaml"
        files = [self.path.parent / name for name in (*names, "task.py", "model.py")]
        content = b"".join(file.read_bytes() for file in files if file.is_file())
        return sha256(content).hexdigest()[:12]

    def titled(self) -> dict[str, Level]:
        """Return the levels with all their cells, by task and level."""
        return {f"{task} {level:g}": self.level(task, level) for task, level in self.levels()}

    def level(self, task: str, level: float) -> Level:
        """Return a level with all its cells; WrongExperiment if a loss alone learns nothing."""
        cells = with_tuned_sum([*self.known(task, level).values()])
        constant = self.spec.tasks[task].losses
        one = Level({one.method: one for one in cells}, [*constant.values()], self.spec.margin)
        for split, losses in one.single.items():
            for (name, most), loss in zip(constant.items(), losses, strict=True):
                if loss >= most:
                    where = f"{task} {level:g}, split {split}: {name} trained alone"
                    raise WrongExperiment(f"{where} must be below {most:g}, found {loss:.4g}")
        return one

    def _words(self, task: str, level: float) -> dict[str, Words]:
        """Return the words of each method's tuning."""
        one = self.spec.tasks[task]
        name = f"conflict_{task}"
        study = f"study={name}-{level:g}-{self.path.stem}"
        common = (f"experiment={name}", f"{one.key}={level:g}", study, "report=false")
        common += (f"tune_seeds={self.form.tune_seeds}", *self.overrides)
        sums: dict[str, Words] = {
            name: ("aggregator=fixed_weights", f"aggregator.weights={json.dumps(weights)}")
            for name, weights in self.spec.sums(task).items()
        }
        for i, loss in enumerate(one.losses):
            sums[f"{ALONE}{i}"] += (f"metric=test/{loss}",)
        tune = self.form.tune or self.spec.tune
        words = {name: (*common, *own, f"tune='{tune}'") for name, own in sums.items()}
        other = (f"tune='{self.form.tune}'",) if self.form.tune else ()
        return words | {name: (*common, f"+method={name}", *other) for name in self.methods}

    def measure(self, task: str, level: float) -> None:
        """Tune and train the methods of a level that are lacking, `jobs` commands at a time."""
        known, words = self.known(task, level), self._words(task, level)
        lacking = {name: own for name, own in words.items() if name not in known}
        tunings = {name: [self.config_dir, *own, "seeds=1"] for name, own in lacking.items()}
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(train, tunings.values()))
            tuned = {x: _chosen(read_study(own, plan_study(own))) for x, own in tunings.items()}
            finals = {name: self._final(own, tuned[name][0]) for name, own in lacking.items()}
            list(pool.map(train, finals.values()))
        old = {(task, level, name) for name in lacking}
        kept = [one for one in self.cells if (one.task, one.level, one.method) not in old]
        new = [
            self._cell(task, level, name, own, tuned[name], read_study(final, plan_study(final)))
            for (name, own), final in zip(lacking.items(), finals.values(), strict=True)
        ]
        self.cells = [*kept, *new]
        rows = [asdict(one) for one in self.cells]
        replace_file(self.path, (json.dumps(rows, indent=1) + "\n").encode())

    def _final(self, words: Words, chosen: dict[str, object]) -> list[str]:
        """Return the words that train the chosen values on the splits after the tuning's."""
        splits = ",".join(str(1 + split) for split in range(self.form.splits))
        final = [word for word in words if not word.startswith("tune")]
        final += [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        return [
            self.config_dir,
            *final,
            SWEEP,
            "tune=null",
            f"seeds={self.form.seeds}",
            f"task.{SPLIT}={splits}",
        ]

    def _cell(
        self,
        task: str,
        level: float,
        method: str,
        words: Words,
        tuned: tuple[dict[str, object], bool, float],
        ended: FinishedStudy,
    ) -> Cell:
        constant = self.spec.tasks[task].losses
        rows, seconds = [], []
        for one in ended.study.all_runs:
            if one.state not in ("finished", "diverged"):
                raise WrongExperiment(f"{task}, {method}: the run {one.name} is {one.state}")
            found = one.summary if one.state == "finished" else None  # diverged: learned nothing
            losses = [found[f"test/{x}"] if found else y for x, y in constant.items()]
            rows.append((float(split_of(one) or 0), float(one.seed), *losses))
            seconds.append(one.number("time/train_s") or 0.0)
        conflicts = ended.study.conflicts
        lost = (
            None
            if conflicts.is_empty()
            else conflicts.select((pl.col("decrease").list.min() < 0).mean()).item()
        )
        made = task, level, method, words, self._digest(task, method)
        diverged = sum(one.state == "diverged" for one in ended.study.all_runs)
        return Cell(*made, *tuned, (*rows,), diverged, fmean(seconds), lost)


def _methods(root: Path, form: FormSpec) -> list[str]:
    there = sorted(path.stem for path in (root / FOLDER / "conf/method").glob("*.yaml"))
    if unknown := [name for name in form.methods if name not in there]:
        raise WrongExperiment(f"there is no method '{unknown[0]}'. There are: {', '.join(there)}")
    return list(form.methods) or there


def _chosen(ended: FinishedStudy) -> tuple[dict[str, object], bool, float]:
    """Return the values that a tuning chose, if one is an end of its range, and their mean score.

    A value of 0 is not an end: there is none below.
    """
    own = {run.name for run in ended.study.all_runs}
    files = (ended.study.folder / TUNING).glob("*.json")
    tuned = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    found = next(one for one in tuned if own & {*one["runs"]})
    chosen, scores = found["chosen"], [r for r in found["rows"] if r["values"] == found["chosen"]]
    at_edge = any(
        (value := chosen[axis["key"]]) and value in (min(axis["values"]), max(axis["values"]))
        for axis in found["axes"]
    )
    return chosen, at_edge, fmean(row["score"] for row in scores)


def admission(levels: Mapping[str, Level]) -> Rows:
    """Return the table of levels: the numbers that decide whether a level is admitted."""
    rows = [["task", "each loss: tuned sum minus alone", "conflict", "enters"]]
    for name, one in levels.items():
        gaps = "; ".join(map(_with_half_width, one.gaps))
        enters = "yes" if one.is_admitted else "control"
        rows.append([name, gaps, f"{one.cells[SUM].lost or 0:.0%}", enters])
    return rows


def powers(levels: Mapping[str, Level]) -> Rows:
    """Return the table of levels: what the protocol can find."""
    rows = [["task", *(f"power at {gain:g}" for gain in GAINS), "equivalent at 0"]]
    for name, one in levels.items():
        rows.append([name, *(f"{chance:.0%}" for chance in one.chances())])
    return rows


def comparisons(levels: Mapping[str, Level]) -> list[Rows]:
    """Return a table for each level: the methods' excess, alone and minus the excess of the two
    sums."""
    others, tables, shown = (SUM, TUNED_SUM), [], _shown(levels)
    for title, one in levels.items():
        tables.append([[title, "excess", *(f"minus {other}'s" for other in others)]])
        for name in shown:
            compared = (_compared(one, name, other) for other in others)
            tables[-1].append([name, f"{one.mean_excess(name):.3f}", *compared])
    return tables


def _compared(level: Level, method: str, other: str) -> str:
    found = level.difference(method, other)
    told = f"{level.verdict(method, other)} {_with_half_width(found)}"
    return told if any(found.differences) else "same"


def _with_half_width(found: Difference) -> str:
    width = "" if found.t_high is None else f" \u00b1{found.t_high - found.mean:.3f}"
    return f"{found.mean:.3f}{width}"


def summary(levels: Mapping[str, Level]) -> Rows:
    """Return the table of methods over the levels: rank and front of those that enter, and time."""
    entered = [one for one in levels.values() if one.is_admitted]
    shown = _shown(levels)
    rows = [["method", "mean rank", "front", "time", "diverged", "at an edge"]]
    for name in shown:
        ranks = [_rank(one, name, shown) for one in entered]
        front = fmean(one.front_gain(name) for one in entered) if entered else 0.0
        cells = [one.cells[name] for one in levels.values()]
        sums = [one.cells[SUM] for one in levels.values()]
        time = fmean(a.seconds / b.seconds for a, b in zip(cells, sums, strict=True))
        diverged = f"{sum(a.diverged for a in cells)} of {sum(len(a.rows) for a in cells)}"
        edges = f"{sum(a.at_edge for a in cells)} of {len(cells)}"
        rank = _rank_text(ranks, len(shown)) if ranks else "-"
        rows.append([name, rank, f"{front:+.3f}", f"{time:.2f}", diverged, edges])
    return rows


def _shown(levels: Mapping[str, Level]) -> list[str]:
    """The methods, and the plain and the tuned sum, by their rank."""
    shown = [n for n in next(iter(levels.values())).cells if not n.startswith((ALONE, LARGER))]
    entered = [one for one in levels.values() if one.is_admitted]
    return sorted(shown, key=lambda name: (sum(_rank(one, name, shown) for one in entered), name))


def _rank(level: Level, method: str, methods: Sequence[str]) -> float:
    means = {name: level.mean_excess(name) for name in methods}
    below = sum(means[name] < means[method] for name in methods)
    ties = sum(means[name] == means[method] for name in methods)
    return below + (ties + 1) / 2


def _rank_text(ranks: Sequence[float], most: int) -> str:
    """The mean rank, with its interval if there are three levels, within 1 and `most`."""
    mean = paired_difference(ranks, [0.0] * len(ranks))
    if len(ranks) < MIN_SPLITS or mean.t_low is None or mean.t_high is None:
        return f"{mean.mean:.1f}"
    low, high = max(1.0, mean.t_low), min(most, mean.t_high)
    return f"{mean.mean:.1f} ({low:.1f} to {high:.1f})"


def read_benchmark(root: Path) -> Benchmark:
    """Read `benchmark.yaml`; WrongExperiment if it is wrong."""
    path = root / FOLDER / "benchmark.yaml"
    try:
        return Benchmark(**yaml.safe_load(path.read_text(encoding="utf-8")))
    except (FieldError, yaml.YAMLError) as error:
        raise WrongExperiment(f"{path.relative_to(root)}: {error}") from error


def main(words: Sequence[str] | None = None, root: Path | None = ROOT) -> int:
    """Run the command on the checkout `root` and return the exit code, 2 for a wrong input."""
    made = argparse.ArgumentParser("python scripts/benchmark.py", allow_abbrev=False)
    text = "quick or full, and overrides for the runner, as hydra/launcher=joblib"
    made.add_argument("words", nargs="*", metavar="form", help=text)
    made.add_argument("--list", action="store_true", help="the tasks, levels, forms and methods")
    text = "commands at a time; all of the processor's cores by default"
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help=text)
    arguments = made.parse_intermixed_args(words)
    forms = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word]
    try:
        if root is None:
            raise WrongExperiment("the benchmark needs a checkout of gradsurg")
        spec = read_benchmark(root)
        if arguments.list:
            print(_list(spec, root))
            return 0
        if len(forms) != 1 or forms[0] not in spec.forms:
            raise WrongExperiment(f"name one form of {', '.join(spec.forms)}, or --list")
        measured = Measurement(spec, forms[0], root, overrides, arguments.jobs)
        for task, level in measured.levels():
            measured.measure(task, level)
        levels = measured.titled()
        tables = [admission(levels), powers(levels), *comparisons(levels), summary(levels)]
    except WrongExperiment as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    for rows in tables:
        print(aligned(rows, left=(0, 1), width=table_width()) + "\n")
    path = root / FOLDER / f"{forms[0]}.md"
    path.write_text("\n\n".join(map(markdown, tables)) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(root)}, and the runs' losses beside it")
    return 0


def _list(spec: Benchmark, root: Path) -> str:
    rows = [["task", "losses", "levels, the quick one first"]]
    for name, one in spec.tasks.items():
        levels = ", ".join(f"{level:g}" for level in one.levels)
        rows.append([name, ", ".join(one.losses), f"{one.key}={levels}"])
    forms = [["form", "levels", "splits x seeds", "tuning seeds", "methods"]]
    for name, form in spec.forms.items():
        runs = f"{form.splits} x {form.seeds}"
        numbers = [str(form.levels), runs, str(form.tune_seeds)]
        forms.append([name, *numbers, ", ".join(_methods(root, form))])
    tables = (aligned(rows, left=(0, 1, 2)), aligned(forms, left=(0, 4), width=table_width()))
    return "\n\n".join(tables)
