"""Where points went: the losses over the plane, as runs wrote them, and the ways through it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import polars as pl

from gradsurg.report.grouping import Arm, group
from gradsurg.report.reading import Found, canonical
from gradsurg.training.run_directory import RunDirectory

X1, X2 = "test/x1", "test/x2"
MAX_PLACES = 400  # of a way: more are not seen


@dataclass(frozen=True)
class Way:
    """Where one run was, from its start to the last place known."""

    seed: int
    x1: list[float]
    x2: list[float]


@dataclass(frozen=True)
class Ways:
    """Those of one arm, from all starts."""

    name: str
    ways: list[Way]


@dataclass(frozen=True)
class Landscape:
    """The losses of a task on a grid, rows along x2, its Pareto set, and the ways of each arm."""

    task: str
    x1: list[float]
    x2: list[float]
    values: Mapping[str, list[list[float]]]
    pareto: list[list[float]]
    arms: list[Ways]

    @property
    def mean(self) -> list[list[float]]:
        """The mean of the losses on the grid."""
        tables = zip(*self.values.values(), strict=True)
        count = len(self.values)
        return [[sum(cells) / count for cells in zip(*rows, strict=True)] for rows in tables]


def landscapes(arms: Sequence[Arm], metrics: pl.DataFrame) -> tuple[list[Landscape], list[str]]:
    """One for each task that has one, and what could not be read.

    Runs that differ in where they start, or in their seed, stand together under one name.
    """
    told: dict[str, dict[str, Any]] = {}  # Any: what JSON can hold
    runs: dict[str, list[tuple[Found, list[float]]]] = {}
    faults: list[str] = []
    for run in (run for arm in arms for run in arm.runs if run.state != "missing"):
        try:
            found = RunDirectory(run.path).read_landscape()
            if found is None:
                continue
            start = [float(number) for number in found.pop("start")]
            key = canonical(found)
            Landscape("", found["x1"], found["x2"], found["values"], found["pareto"], [])
            if not all(map(isfinite, start)):
                raise ValueError("its start is not finite")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append(f"{run.name}: landscape.json: {type(error).__name__}: {error}")
            continue
        told[key] = found
        runs.setdefault(key, []).append((run, start))
    return [_landscape(told[key], own, metrics) for key, own in runs.items()], faults


def _landscape(
    told: Mapping[str, Any],  # Any: what JSON can hold
    runs: Sequence[tuple[Found, list[float]]],
    metrics: pl.DataFrame,
) -> Landscape:
    starts = {run.name: start for run, start in runs}
    arms = []
    for arm in group([replace(run, config=_startless(run.config)) for run, _ in runs]):
        ways = [_way(run, starts[run.name], metrics) for run in arm.runs]
        arms.append(Ways(arm.name, sorted(ways, key=lambda way: (way.x1[0], way.x2[0], way.seed))))
    pareto = [*told["pareto"], told["pareto"][0]] if told.get("closed") else told["pareto"]
    config = (runs[0][0].config or {}).get("task")
    task = str(config.get("name", "")) if isinstance(config, Mapping) else ""
    return Landscape(task, told["x1"], told["x2"], told["values"], pareto, arms)


def _startless(config: Mapping[str, Any] | None) -> dict[str, Any] | None:  # Any: YAML's values
    if not config or not isinstance(config.get("task"), Mapping):
        return dict(config) if config else None
    task = {key: item for key, item in config["task"].items() if key != "start"}
    return {**config, "task": task}


def _way(run: Found, start: list[float], metrics: pl.DataFrame) -> Way:
    """Its start, what was logged of it, and its end; one that left the numbers ends before."""
    places = [(start[0], start[1])]
    if X1 in metrics.columns and X2 in metrics.columns:
        rows = metrics.filter(pl.col("run") == run.name).select("step", X1, X2)
        logged = rows.drop_nulls().unique("step").sort("step")
        places += [(x1, x2) for _, x1, x2 in logged.iter_rows()]
    summary = run.summary or {}
    x1, x2 = summary.get(X1), summary.get(X2)
    if isinstance(x1, int | float) and isinstance(x2, int | float) and (x1, x2) != places[-1]:
        places.append((x1, x2))
    whole = [place for place in places if isfinite(place[0]) and isfinite(place[1])]
    if len(whole) > MAX_PLACES:
        last = len(whole) - 1
        whole = [whole[round(k * last / (MAX_PLACES - 1))] for k in range(MAX_PLACES)]
    return Way(run.seed, [x1 for x1, _ in whole], [x2 for _, x2 in whole])
