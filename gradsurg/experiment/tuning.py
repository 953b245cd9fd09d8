"""Tuning: each arm chooses its values on validation data, with seeds that no comparison uses."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.experiment.compose import GROUPS
from gradsurg.experiment.files import finite, locked, replace_file
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.run import Pair, Run, paired
from gradsurg.experiment.run_directory import LOCK, TUNING, RunDirectory
from gradsurg.experiment.run_reader import read_bytes
from gradsurg.experiment.settings import VALIDATION, Config, Settings
from gradsurg.plugins.messages import no_key, unknown
from gradsurg.plugins.registry import HYDRAS

FIRST_SEED = 1_000_000
"""The first tuning seed; compared seeds are 0, 1 .. or the one given."""
TUNABLE = ("lr", "batch_size", "accumulate", "steps", "precision", "shared")
"""The short keys that can be tuned, beside the fields of groups."""
HEADLINE = ("accuracy", "loss")
Values = dict[str, Any]  # Any: what a YAML file can hold
Scores = Sequence[float | None]
"""A number for each tuning seed; None diverged."""


class ComparedRun(Protocol):
    """A run of a task or of a script."""

    @property
    def label(self) -> str: ...
    @property
    def arm(self) -> str: ...


class Configuration(Protocol):
    """The values of one point of a grid; `names` are the names of its runs, by role."""

    @property
    def values(self) -> Values: ...
    def names(self, seed: int) -> Mapping[str, str]: ...


Tried = TypeVar("Tried", bound=Configuration)


@dataclass(frozen=True)
class Candidate:
    """The values of one configuration; `pair` makes the runs of a seed with them."""

    values: Values
    pair: Callable[[int], Pair]

    def names(self, seed: int) -> Mapping[str, str]:
        return {role: run.name for role, run in self.pair(seed).roles.items()}


@dataclass(frozen=True)
class Choice(Generic[Tried]):
    """The candidate that one arm has chosen, with the score of every candidate and tuning seed."""

    grid: Grid
    candidate: Tried
    rows: Sequence[Mapping[str, object]]

    def write(
        self,
        folder: Path,
        arm_hash: str,
        metric: str,
        lower: bool,
        runs: Mapping[str, ComparedRun],
    ) -> Path:
        """Write the choice for reports; `runs` are those with the chosen values, by name."""
        axes, first = self.grid.axes, next(iter(runs.values()))
        content = {
            "label": first.label,
            "role": first.arm,
            "metric": metric,
            "lower": lower,
            "axes": [
                {"key": axis.key, "values": list(axis.values), "by_log": axis.by_log}
                for axis in axes
            ],
            "rows": self.rows,
            "chosen": {axis.key: self.candidate.values[axis.key] for axis in axes},
            "runs": [*runs],
        }
        file = folder / f"{first.label}-{arm_hash}.json"
        text = json.dumps(finite(content), indent=1).encode()
        if file.is_symlink() or read_bytes(file) != text:
            with locked(folder / LOCK, wait=True):
                replace_file(file, text)
        return file


@dataclass(frozen=True)
class TunedArm(Generic[Tried]):
    """The configurations that an arm tries; `grid` has the keys that change its runs.

    `is_finer`: it has more rates than the grid of the command, to try as many as the others.
    """

    grid: Grid
    candidates: tuple[Tried, ...]
    is_finer: bool = False

    def choose(
        self,
        seeds: Sequence[int],
        scores: Sequence[Scores],
        lower: bool,
        losses: Sequence[Scores] = (),
    ) -> Choice[Tried]:
        """Return the candidate with the best mean score; `scores` has a list for each.

        A candidate with a diverged seed is worse than any without. Among equal candidates the
        lower mean of `losses` decides, then the order.
        """
        ranks, rows = [], []
        for place, (each, own) in enumerate(zip(self.candidates, scores, strict=True)):
            mean = _mean(own) * (1 if lower else -1)
            loss = _mean(losses[place]) if losses else inf
            ranks.append((own.count(None), mean, loss, place))
            values = {axis.key: each.values[axis.key] for axis in self.grid.axes}
            rows += [
                {"place": place, "values": values, "seed": seed, "score": score}
                for seed, score in zip(seeds, own, strict=True)
            ]
        return Choice(self.grid, self.candidates[min(ranks)[-1]], rows)


@dataclass(frozen=True)
class Tuning:
    """The tuning of an experiment: `metric` on validation data, less is better if `lower`.

    `arms` are by their role in a pair of runs.
    """

    metric: str
    lower: bool
    seeds: Sequence[int]
    arms: Mapping[str, TunedArm[Candidate]]

    @cached_property
    def runs(self) -> list[Run]:
        """All tuning runs, each once: in a folder of their own, without measurements."""
        runs = {
            run.name: run
            for role, arm in self.arms.items()
            for each in arm.candidates
            for run in (each.pair(seed).roles[role] for seed in self.seeds)
        }
        return [*map(_tuning_run, runs.values())]

    def pairs(self, settings: Settings) -> tuple[Pair, ...] | None:
        """Return the compared runs, each arm with its chosen values; None before tuning ended."""
        out = settings.out_folder
        if not all(RunDirectory(run.directory(out)).finished for run in self.runs):
            return None
        chosen = {role: choice.candidate for role, choice in self.choices(out).items()}
        return tuple(_compared(seed, chosen) for seed in settings.all_seeds)

    def choices(self, out: Path) -> dict[str, Choice[Candidate]]:
        """Return each arm's choice, once all tuning runs have ended."""
        summaries = {run.name: RunDirectory(run.directory(out)).read_summary() for run in self.runs}
        choices = {}
        for role, arm in self.arms.items():
            scores, losses = (
                [
                    [score(summaries[each.names(seed)[role]], key) for seed in self.seeds]
                    for each in arm.candidates
                ]
                for key in (self.metric, f"{VALIDATION}loss")
            )
            choices[role] = arm.choose(self.seeds, scores, self.lower, losses)
        return choices

    def write(self, settings: Settings) -> list[Path]:
        """Write the choice of each arm beside the tuning runs, for reports; return the files."""
        folder, pairs = settings.study_folder / TUNING, self.pairs(settings) or ()
        files = []
        for role, choice in self.choices(settings.out_folder).items():
            runs = {run.name: run for run in (pair.roles[role] for pair in pairs)}
            about = self._arm_hash(role), self.metric, self.lower
            files.append(choice.write(folder, *about, runs))
        return files

    def budget(self, compared: Sequence[int]) -> str:
        """Return the number of tuning runs and how it comes about: of each arm, if they differ."""
        sizes = {self._name(role): len(arm.candidates) for role, arm in self.arms.items()}
        own, others = (
            f"seeds {one[0]} to {one[-1]}" if len(one) > 1 else f"seed {one[0]}"
            for one in (self.seeds, compared)
        )
        least, most = min(sizes.values()), max(sizes.values())
        tried = f"{most} configurations x {len(self.seeds)} seeds x {len(sizes)} arms"
        if least < most:
            each = ", ".join(f"{size} of {name}" for name, size in sizes.items())
            tried = f"unequal budgets, as no rate is tuned: {len(self.seeds)} seeds x ({each})"
        then = f"then {len(compared) * len(sizes)} with the chosen values ({others})"
        texts = [f"{tried} = {len(self.runs)} runs ({own}), {then}"]
        for role in (role for role, arm in self.arms.items() if arm.is_finer):
            axes = self.arms[role].grid.axes
            rates = next(axis.values for axis in axes if axis.is_rate)
            text = f"{self._name(role)} tries {len(rates)} rates from {rates[0]:g} to {rates[-1]:g}"
            texts.append(f"{text}, to have as many configurations as the others")
        return "; ".join(texts)

    def _run(self, role: str) -> Run:
        """Return the run of an arm at its first values with seed 0."""
        return self.arms[role].candidates[0].pair(0).roles[role]

    def _name(self, role: str) -> str:
        label = self._run(role).label
        return "the control" if label == "none" else label

    def _arm_hash(self, role: str) -> str:
        """Return a hash of an arm without its grid's values, so a wider grid replaces the file.

        An arm with a finer grid is tuned for one treatment, so its hash depends on it too.
        """
        run, arm = self._run(role), self.arms[role]
        identity: Mapping[str, object] = run.identity
        for axis in arm.grid.axes:
            identity = _with(identity, "optimizer.lr" if axis.key == "lr" else axis.key, None)
        beside = [self._arm_hash("treated")] if arm.is_finer else []
        text = json.dumps([run.arm, identity, *beside], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def tuned_arms(
    grid: Grid, seed: int, candidate: Callable[[Values], Tried]
) -> dict[str, TunedArm[Tried]]:
    """Return the configurations that each arm tries; `candidate` makes one from a point of the
    grid.

    Only points whose runs differ count: a plain control has no transform to tune. If a rate is
    tuned, such an arm tries more rates in the same range, so that all choose among as many.
    """
    points = [candidate(values) for values in grid.combinations()]
    arms: dict[str, dict[str, Tried]] = {}
    for each in points:
        for role, name in each.names(seed).items():
            arms.setdefault(role, {}).setdefault(name, each)
    most = max(map(len, arms.values()))
    return {role: _tuned_arm(grid, [*own.values()], most, candidate) for role, own in arms.items()}


def _tuned_arm(
    grid: Grid, own: Sequence[Tried], most: int, candidate: Callable[[Values], Tried]
) -> TunedArm[Tried]:
    first = own[0].values
    acting = [
        axis for axis in grid.axes if any(each.values[axis.key] != first[axis.key] for each in own)
    ]
    part = Grid(tuple(acting))
    if len(own) == most or (finer := part.finer(most)) is None:
        return TunedArm(part, tuple(own))
    points = (candidate({**first, **values}) for values in finer.combinations())
    return TunedArm(finer, tuple(points), is_finer=True)


def tuned_grid(config: Config, settings: Settings) -> Grid:
    """Return the grid of `tune`, with values for `lr` alone.

    Raises ValueError for a key that the config does not have, or that cannot be tuned.
    """
    assert settings.tune is not None
    for axis in settings.tune.axes:
        _check_key(axis.key, config)
    given = settings.lr
    return settings.tune.around(config["optimizer"].get("lr") if given is None else given)


def tuned_config(config: Config, settings: Settings, values: Values) -> Config:
    """Return the config with the values of one point of the grid instead of a tuning."""
    changed: Values = {**config, "tune": None, "validation": settings.set_aside}
    for key, value in values.items():
        changed = _with(changed, key, value)
    return changed


def tuning_metric(settings: Settings, names: Sequence[str]) -> tuple[str, bool]:
    """Return the metric to choose by, and whether less is better.

    `names` are the task's metrics. It is the verdict's metric, on validation data. Raises
    ValueError if it cannot be one.
    """
    given = settings.metric
    if given is not None and not given.startswith("test/"):
        rule = "chooses by the metric of the verdict, on validation data: needs metric=test/.."
        raise ValueError(f"{rule}, found metric={given}")
    name = given.removeprefix("test/") if given else next(x for x in HEADLINE if x in names)
    if name not in names:
        tested = ", ".join(f"test/{name}" for name in names)
        raise ValueError(f"the task has no metric={given}, it has {tested}")
    for metric in TASK_METRICS:
        if name == metric.name or name.startswith(f"{metric.name}_"):
            return f"{VALIDATION}{name}", metric.better == "lower"
    known = ", ".join(metric.name for metric in TASK_METRICS)
    raise ValueError(f"whether more {name} is better is not known; metric= can be {known}")


def _check_key(key: str, config: Config) -> None:
    """Refuse a key that is not there, that has no effect on training, or that is replaced."""
    group = key.partition(".")[0]
    if group not in config:
        groups = [each for each in GROUPS if each != "logger"]
        raise ValueError(unknown(f"there is no key '{key}'", group, [*groups, *TUNABLE]))
    nested = isinstance(config[group], Mapping)
    if (nested and ("." not in key or group == "logger")) or (not nested and group not in TUNABLE):
        rule = f"a field of a group, as optimizer.lr, or one of {', '.join(TUNABLE[:-1])}"
        raise ValueError(f"{key} cannot be tuned; needs {rule}")
    if key == "optimizer.lr" and config.get("lr") is not None:
        raise ValueError(f"optimizer.lr is replaced by lr={config['lr']:g}; tune lr instead")
    inside: Any = config
    for part in key.split("."):
        if not isinstance(inside, Mapping):
            raise ValueError(f"{key}: '{part}' has no place in {inside!r}, with no keys below")
        if part not in inside:
            known = [str(one) for one in inside if one not in HYDRAS]
            raise ValueError(f"{key}: {no_key(part, known)}")
        inside = inside[part]


def _with(config: Mapping[str, Any], path: str, value: object) -> Values:
    """Return a config with another value at a path, if it goes so deep."""
    key, _, rest = path.partition(".")
    if not rest:
        return {**config, key: value}
    inside = config.get(key)
    changed = {key: _with(inside, rest, value)} if isinstance(inside, Mapping) else {}
    return {**config, **changed}


def score(summary: Mapping[str, object], key: str) -> float | None:
    """Return a number of a run; None if it has diverged."""
    value = summary.get(key)
    if summary.get("state") != "finished" or not isinstance(value, int | float):
        return None
    return float(value)


def _mean(scores: Scores) -> float:
    """Return the mean of the numbers that there are; infinity without any."""
    known = [score for score in scores if score is not None]
    return fmean(known) if known else inf


def _compared(seed: int, chosen: Mapping[str, Candidate]) -> Pair:
    """Return the runs of a seed, each arm with the values that it has chosen."""
    runs = {role: each.pair(seed).roles[role] for role, each in chosen.items()}
    like = next(iter(chosen.values())).pair(seed)
    controls = {kind: runs[f"control {kind}"] for kind in like.controls}
    without = {link: runs[f"without {link}"] for link in like.without}
    return paired(seed, runs.get("treated"), controls, without)


def _tuning_run(run: Run) -> Run:
    """Return a run as a tuning run: nothing is measured that the choice does not need."""
    every = run.schedule.eval_every if run.schedule.until else 0
    schedule = replace(run.schedule, effects_every=0, eval_every=every)
    return replace(run, study=f"{run.study}/{TUNING}", schedule=schedule, controls={})
