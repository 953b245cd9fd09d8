"""Tuning: each arm chooses its values on validation data, with seeds that no comparison uses."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.experiment.compose import GROUPS
from gradsurg.experiment.files import finite, replace_file
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.instantiate import Config
from gradsurg.experiment.run import VALIDATION, Run
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.runs import Pair, Plan
from gradsurg.experiment.settings import Settings
from gradsurg.plugins.messages import nearest

FIRST_SEED = 1_000_000
"""The first tuning seed; compared seeds are 0, 1 .. or the one given."""
FOLDER = "tuning"
"""The folder of the tuning runs in that of their study."""
TUNABLE = ("lr", "batch_size", "accumulate", "steps", "precision", "shared")
"""The short keys that can be tuned, beside the fields of groups."""
HEADLINE = ("accuracy", "loss")
Values = dict[str, Any]  # Any: what a YAML file can hold


@dataclass(frozen=True)
class Candidate:
    """The values of one point of the grid, and the plan of the runs with them."""

    values: Values
    plan: Plan

    def trial(self, seed: int) -> Pair:
        """Return the tuning runs of a seed: in a folder of their own, without measurements."""
        return _each(self.plan.pair(seed), _trial)


@dataclass(frozen=True)
class Choice:
    """The values that one arm has chosen, with the score of every value and tuning seed."""

    role: str
    rows: tuple[Mapping[str, object], ...]
    candidate: Candidate


@dataclass(frozen=True)
class Tuning:
    """The tuning of an experiment: `metric` on validation data, less is better if `lower`."""

    grid: Grid
    metric: str
    lower: bool
    seeds: Sequence[int]
    candidates: tuple[Candidate, ...]

    @property
    def runs(self) -> list[Run]:
        """All tuning runs, each once."""
        pairs = (each.trial(seed) for each in self.candidates for seed in self.seeds)
        return list({run.name: run for pair in pairs for run in pair.runs}.values())

    def pairs(self, settings: Settings) -> tuple[Pair, ...] | None:
        """Return the compared runs, each arm with its chosen values; None before tuning ended."""
        out = Path(settings.out)
        if not all(RunDirectory(run.directory(out)).finished for run in self.runs):
            return None
        chosen = {choice.role: choice.candidate for choice in self.choices(out)}
        return tuple(self._pair(seed, chosen) for seed in settings.all_seeds)

    def choices(self, out: Path) -> list[Choice]:
        """Return each arm's choice, once all tuning runs have ended.

        The best mean score; a value with a diverged seed is worse than any without, and of equal
        values the one with the lower loss, then the first, is chosen.
        """
        first = self.candidates[0].plan.pair(self.seeds[0])
        return [self._choice(role, out) for role in _roles(first)]

    def write(self, settings: Settings) -> list[Path]:
        """Write the choice of each arm beside the tuning runs, for reports; return the files."""
        folder = Path(settings.out) / settings.study / FOLDER
        pairs = self.pairs(settings) or ()
        return [self._write(choice, folder, pairs) for choice in self.choices(Path(settings.out))]

    def budget(self, compared: Sequence[int]) -> str:
        """Return the number of tuning runs and how it comes about."""
        arms = len(_roles(self.candidates[0].plan.pair(self.seeds[0])))
        count, values, num_seeds = len(self.runs), len(self.candidates), len(self.seeds)
        product = f"{values} values x {num_seeds} seeds x {arms} arms"
        product += " = " if values * num_seeds * arms == count else ", each once: "
        seeds, others = (
            f"seeds {one[0]} to {one[-1]}" if len(one) > 1 else f"seed {one[0]}"
            for one in (self.seeds, compared)
        )
        then = f"then {len(compared) * arms} with the chosen values ({others})"
        return f"{product}{count} runs ({seeds}), {then}"

    def _pair(self, seed: int, chosen: Mapping[str, Candidate]) -> Pair:
        runs = {role: _roles(each.plan.pair(seed))[role] for role, each in chosen.items()}
        treated, control = runs.get("treated"), runs.get("control")
        if treated is not None and control is not None:
            kind = next(iter(treated.controls))
            treated = replace(treated, controls={kind: control.name})
        without = {role: run for role, run in runs.items() if role not in ("treated", "control")}
        return Pair(seed, treated, control, without)

    def _choice(self, role: str, out: Path) -> Choice:
        rows: list[dict[str, object]] = []
        ranks: dict[int, tuple[int, float, float]] = {}
        distinct, keys = self._distinct(role), self._keys(role)
        for place, each in enumerate(distinct):
            runs = [_roles(each.trial(seed))[role] for seed in self.seeds]
            summaries = [RunDirectory(run.directory(out)).read_summary() for run in runs]
            scores = [_score(summary, self.metric) for summary in summaries]
            losses = [_score(summary, f"{VALIDATION}loss") for summary in summaries]
            mean, loss = _mean(scores), _mean(losses)
            ranks[place] = (scores.count(None), mean if self.lower else -mean, loss)
            values = {key: each.values[key] for key in keys}
            rows += [
                {"place": place, "values": values, "seed": seed, "score": score}
                for seed, score in zip(self.seeds, scores, strict=True)
            ]
        best = min(ranks, key=lambda place: (ranks[place], place))
        return Choice(role, tuple(rows), distinct[best])

    def _distinct(self, role: str) -> list[Candidate]:
        """Return the candidates whose runs of an arm differ: a control has no transform to tune."""
        seed = self.seeds[0]
        by_name: dict[str, Candidate] = {}
        for each in self.candidates:
            by_name.setdefault(_roles(each.plan.pair(seed))[role].name, each)
        return list(by_name.values())

    def _keys(self, role: str) -> list[str]:
        """Return the tuned keys that change the runs of an arm."""
        distinct = self._distinct(role)
        keys = [axis.key for axis in self.grid.axes]
        return [
            key
            for key in keys
            if any(each.values[key] != distinct[0].values[key] for each in distinct)
        ]

    def _write(self, choice: Choice, folder: Path, pairs: Sequence[Pair]) -> Path:
        runs = [_roles(pair)[choice.role] for pair in pairs]
        keys = self._keys(choice.role)
        content = {
            "label": runs[0].label,
            "role": choice.role,
            "metric": self.metric,
            "lower": self.lower,
            "axes": [
                {"key": axis.key, "values": list(axis.values), "by_log": axis.by_log}
                for axis in self.grid.axes
                if axis.key in keys
            ],
            "rows": [dict(row) for row in choice.rows],
            "chosen": {key: choice.candidate.values[key] for key in keys},
            "runs": [run.name for run in runs],
        }
        file = folder / f"{runs[0].label}-{self._arm_hash(choice.role)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(content), indent=1)
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            replace_file(file, text.encode())
        return file

    def _arm_hash(self, role: str) -> str:
        """Return a hash of an arm without the values of its grid: a wider grid replaces a file."""
        identity = dict(_roles(self.candidates[0].plan.pair(0))[role].identity)
        for key in (axis.key for axis in self.grid.axes):
            identity = _with(identity, "optimizer.lr" if key == "lr" else key, None, known=False)
        text = json.dumps([role, identity], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def configs(config: Config, grid: Grid, settings: Settings) -> Iterator[tuple[Values, Config]]:
    """Yield the values of each point of a grid, and the config with them instead of a tuning.

    Raises ValueError for a key that the config does not have, or that cannot be tuned.
    """
    for axis in grid.axes:
        _check_key(axis.key, config)
    for values in grid.combinations():
        changed: dict[str, Any] = {**config, "tune": None, "validation": settings.set_aside}
        for key, value in values.items():
            changed = _with(changed, key, value)
        yield values, changed


def tuning_metric(settings: Settings, names: Sequence[str]) -> tuple[str, bool]:
    """Return the metric to choose by, and whether less is better.

    `names` are the task's metrics. It is that of the verdict, on validation data. Raises ValueError
    if it cannot be one.
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
        raise ValueError(f"there is no key '{key}'. {nearest(group, [*groups, *TUNABLE])}")
    nested = isinstance(config[group], Mapping)
    if (nested and ("." not in key or group == "logger")) or (not nested and group not in TUNABLE):
        rule = f"a field of a group, as optimizer.lr, or one of {', '.join(TUNABLE[:-1])}"
        raise ValueError(f"{key} cannot be tuned; needs {rule}")
    if key == "optimizer.lr" and config.get("lr") is not None:
        raise ValueError(f"optimizer.lr is replaced by lr={config['lr']:g}; tune lr instead")
    try:
        _with(config, key, None)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _with(config: Mapping[str, Any], path: str, value: object, known: bool = True) -> Values:
    """Return a config with another value at a path; ValueError if it is not there and `known`."""
    key, _, rest = path.partition(".")
    if key not in config and known:
        raise ValueError(f"'{key}' is not a key there. {nearest(key, [*map(str, config)])}")
    if not rest:
        return {**config, key: value}
    inside = config.get(key)
    if not isinstance(inside, Mapping):
        if known:
            raise ValueError(f"'{key}' is {inside!r}, with no keys below")
        return dict(config)
    return {**config, key: _with(inside, rest, value, known)}


def _score(summary: Mapping[str, object], key: str) -> float | None:
    """Return a number of a run; None if it has diverged."""
    value = summary.get(key)
    if summary.get("state") != "finished" or not isinstance(value, int | float):
        return None
    return float(value)


def _mean(scores: Sequence[float | None]) -> float:
    """Return the mean of the numbers that there are; infinity without any."""
    known = [score for score in scores if score is not None]
    return fmean(known) if known else inf


def _roles(pair: Pair) -> dict[str, Run]:
    """Return the runs of a seed by what they are in a comparison."""
    both = {"control": pair.control, "treated": pair.treated}
    return {role: run for role, run in {**both, **pair.without}.items() if run is not None}


def _each(pair: Pair, change: Callable[[Run], Run]) -> Pair:
    """Return the pair with each run changed."""
    treated = change(pair.treated) if pair.treated else None
    control = change(pair.control) if pair.control else None
    return Pair(pair.seed, treated, control, {k: change(run) for k, run in pair.without.items()})


def _trial(run: Run) -> Run:
    """Return a run as a tuning run: nothing is measured that the choice does not need."""
    every = run.schedule.eval_every if run.schedule.until else 0
    schedule = replace(run.schedule, effects_every=0, update_effect_every=0, eval_every=every)
    return replace(run, study=f"{run.study}/{FOLDER}", schedule=schedule, controls={})
