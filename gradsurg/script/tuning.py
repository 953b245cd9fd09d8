"""Tuning of a script: each arm chooses its values, with seeds that no comparison uses."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from gradsurg.experiment.controls import ArmKind
from gradsurg.experiment.files import finite, locked, replace_file
from gradsurg.experiment.run_directory import LOCK, TUNING
from gradsurg.experiment.tuning import FIRST_SEED
from gradsurg.report.arms import value_text
from gradsurg.script.numbers import Metric
from gradsurg.script.runs import Ended, ScriptRun
from gradsurg.script.words import SURGERY, Command

Values = Mapping[str, Any]  # Any: what YAML can hold


@dataclass
class Tuning:
    """The grid of a command, tried by each of its arms."""

    command: Command
    arms: Mapping[ArmKind, Command]

    def __post_init__(self) -> None:
        assert self.command.tune is not None
        self.grid = self.command.tune
        self._chosen: dict[ArmKind, Values] = {}
        self._rows: dict[ArmKind, list[dict[str, object]]] = {}
        self._metric: Metric | None = None

    @cached_property
    def points(self) -> dict[ArmKind, list[tuple[Values, list[ScriptRun]]]]:
        """For each arm its distinct values with their runs: a control has no transform to tune."""
        points = {}
        for kind in self.arms:
            distinct: dict[str, tuple[Values, list[ScriptRun]]] = {}
            for values in self.grid.combinations():
                command = self.command.with_values(values)
                own = self._of(kind, values)
                text = ", ".join(f"{key}={value_text(one)}" for key, one in own.items()) or "all"
                runs = [ScriptRun(command, kind, seed, text) for seed in self._seeds]
                distinct.setdefault(runs[0].name, (own, runs))
            points[kind] = [*distinct.values()]
        return points

    @property
    def runs(self) -> list[ScriptRun]:
        """All tuning runs."""
        return [run for points in self.points.values() for _, runs in points for run in runs]

    @property
    def _seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.command.settings.tune_seeds)

    def _of(self, kind: ArmKind, values: Values) -> Values:
        """The values that change an arm's runs."""
        if kind != "control":
            return values
        return {key: one for key, one in values.items() if key.partition(".")[0] not in SURGERY}

    def chosen(self, ended: Mapping[str, Ended], metric: Metric) -> dict[ArmKind, Command]:
        """Return the arms with the values that each has chosen: those with the best mean."""
        self._metric = metric
        arms = {}
        for kind, points in self.points.items():
            ranks, rows = [], list[dict[str, object]]()
            for place, (values, runs) in enumerate(points):
                scores = [_score(ended.get(run.name), metric) for run in runs]
                known = [score for score in scores if score is not None]
                sign = 1 if metric.better == "lower" else -1
                mean = sign * fmean(known) if known else inf
                ranks.append((scores.count(None), mean, place))
                rows += [
                    {"place": place, "values": values, "seed": run.seed, "score": score}
                    for run, score in zip(runs, scores, strict=True)
                ]
            self._chosen[kind], self._rows[kind] = points[min(ranks)[-1]][0], rows
            arms[kind] = self.command.with_values(self._chosen[kind])
        return arms

    def write(self, arms: Mapping[ArmKind, Command], runs: Sequence[ScriptRun]) -> list[Path]:
        """Write the choice of each arm beside the tuning runs, for reports; return the files."""
        assert self._metric is not None
        folder, files = self.command.settings.study_folder / TUNING, []
        for kind in arms:
            chosen, own = self._chosen[kind], [run for run in runs if run.kind == kind]
            axes = [axis for axis in self.grid.axes if axis.key in chosen]
            if not axes:
                continue
            content = {
                "label": own[0].label,
                "role": "treated" if kind == "treated" else "control",
                "metric": self._metric.key,
                "lower": self._metric.better == "lower",
                "axes": [
                    {"key": axis.key, "values": list(axis.values), "by_log": axis.by_log}
                    for axis in axes
                ],
                "rows": self._rows[kind],
                "chosen": chosen,
                "runs": [run.name for run in own],
            }
            about = [kind, self.command.typed]
            name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]
            file = folder / f"{own[0].label}-{name}.json"
            with locked(folder / LOCK, wait=True):
                replace_file(file, json.dumps(finite(content), indent=1).encode())
            files.append(file)
        return files


def _score(ended: Ended | None, metric: Metric) -> float | None:
    value = metric.value(ended.seen) if ended is not None else None
    return value if value is not None and isfinite(value) else None
