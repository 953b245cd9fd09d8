"""Tuning of a script: each arm chooses its values, with seeds that no comparison uses."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

from gradsurg.experiment.controls import ArmKind
from gradsurg.experiment.run_directory import TUNING
from gradsurg.experiment.tuning import FIRST_SEED, Values, tuned_arms
from gradsurg.report.arms import value_text
from gradsurg.script.numbers import Metric
from gradsurg.script.runs import Ended, ScriptRun
from gradsurg.script.words import Command


@dataclass(frozen=True)
class Point:
    """The values of one configuration, and the command with them."""

    values: Values
    command: Command
    kinds: Sequence[ArmKind]

    def names(self, seed: int) -> dict[str, str]:
        return {kind: ScriptRun(self.command, kind, seed).name for kind in self.kinds}


@dataclass
class Tuning:
    """The grid of a command, tried by each of its arms."""

    command: Command
    kinds: Sequence[ArmKind]

    def __post_init__(self) -> None:
        assert self.command.tune is not None
        self._seeds = range(FIRST_SEED, FIRST_SEED + self.command.settings.tune_seeds)
        self._arms = tuned_arms(self.command.tune, FIRST_SEED, self._point)

    def _point(self, values: Values) -> Point:
        return Point(values, self.command.with_values(values), self.kinds)

    @property
    def runs(self) -> list[ScriptRun]:
        """All tuning runs."""
        return [run for points in self._runs.values() for runs in points for run in runs]

    @cached_property
    def _runs(self) -> dict[ArmKind, list[list[ScriptRun]]]:
        """The runs of each arm by point."""
        runs = {}
        for kind in self.kinds:
            keys, points = [axis.key for axis in self._arms[kind].grid.axes], []
            for each in self._arms[kind].candidates:
                text = ", ".join(f"{key}={value_text(each.values[key])}" for key in keys) or "all"
                points.append([ScriptRun(each.command, kind, seed, text) for seed in self._seeds])
            runs[kind] = points
        return runs

    def choose(self, ended: Mapping[str, Ended], metric: Metric) -> dict[ArmKind, Command]:
        """Return the arms with the values that each has chosen: those with the best mean."""
        self._about = metric.key, metric.better == "lower"
        self._choices = {}
        for kind, points in self._runs.items():
            scores = [[_score(ended.get(run.name), metric) for run in runs] for runs in points]
            self._choices[kind] = self._arms[kind].choose(self._seeds, scores, self._about[1])
        return {kind: choice.candidate.command for kind, choice in self._choices.items()}

    def write(self, runs: Sequence[ScriptRun]) -> list[Path]:
        """Write the choice of each arm beside the tuning runs, for reports; return the files."""
        folder, files = self.command.settings.study_folder / TUNING, []
        for kind, choice in self._choices.items():
            text = json.dumps([kind, self.command.typed])
            arm_hash = hashlib.sha256(text.encode()).hexdigest()[:8]
            own = {run.name: run for run in runs if run.kind == kind}
            files.append(choice.write(folder, arm_hash, *self._about, own))
        return files


def _score(ended: Ended | None, metric: Metric) -> float | None:
    value = metric.value(ended.seen) if ended is not None else None
    return value if value is not None and isfinite(value) else None
