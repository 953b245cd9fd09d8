"""Tuning: the values that each arm chose on validation data, in sentences, a table and frames."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import polars as pl

from gradsurg.experiment.run_directory import TUNING
from gradsurg.experiment.run_reader import BrokenFile, read
from gradsurg.report.arms import Arm, value_text
from gradsurg.report.wording import OUTCOME, count, listed, title, value

MIN_FOR_EDGE = 3  # values of a grid, one of which lies inside
HEADS = ["arm", "chosen", "validation", "values", "seeds", "diverged", "remarks"]
RATE = "optimizer.lr"
Scores = Mapping[int, float | None]  # by seed; None diverged


@dataclass(frozen=True)
class Tuning:
    """The grid of one arm, the scores of each of its points, and the chosen point."""

    name: str
    metric: str
    axes: Mapping[str, Sequence[Any]]  # Any: what JSON can hold
    points: Sequence[tuple[Mapping[str, Any], Scores]]
    chosen: Mapping[str, Any]
    runs: Sequence[str]

    @property
    def best(self) -> Scores:
        return next(scores for values, scores in self.points if values == self.chosen)

    @property
    def has_rate(self) -> bool:
        """Whether the learning rate was among the values to choose."""
        return not {"lr", RATE}.isdisjoint(self.chosen)

    @property
    def others(self) -> str:
        """The chosen values except the rate, such as `value 0.01`."""
        named = {key: item for key, item in self.chosen.items() if key not in ("lr", RATE)}
        return ", ".join(
            f"{key.rpartition('.')[2]} {value_text(item)}" for key, item in named.items()
        )

    @property
    def edges(self) -> list[str]:
        """The chosen values that are the smallest or the largest of their grid, with advice."""
        told = []
        for key, values in self.axes.items():
            numeric = all(isinstance(one, int | float) for one in values)
            ends = {min(values): "smallest", max(values): "largest"} if numeric else {}
            if len(values) >= MIN_FOR_EDGE and (at := self.chosen[key]) in ends:
                told.append(f"{key}={value_text(at)} is the {ends[at]} of the grid: widen it")
        return told

    @property
    def remarks(self) -> list[str]:
        """Reasons to widen the grid, or not to trust the choice."""
        mean, lost = _mean_and_lost(self.best)
        if mean is None:
            return ["all values diverged; widen the grid"]
        remarks = self.edges
        same = [values for values, scores in self.points if _mean_and_lost(scores) == (mean, lost)]
        if equal := [
            ", ".join(map(value_text, one.values())) for one in same if one != self.chosen
        ]:
            remarks.append(f"as good on {title(self.metric)}: {listed(equal)}")
        if lost:
            remarks.append(f"{lost} of {len(self.best)} seeds diverged with it")
        return remarks

    @property
    def row(self) -> list[str]:
        """The cells of `HEADS`."""
        chosen = ", ".join(f"{key}={value_text(item)}" for key, item in self.chosen.items())
        score = value(self.metric, _mean_and_lost(self.best)[0])
        lost = sum(_mean_and_lost(scores)[1] for _, scores in self.points)
        numbers = [str(number) for number in (len(self.points), len(self.best), lost)]
        return [self.name, chosen, score, *numbers, "; ".join(self.remarks)]

    @property
    def sentence(self) -> str:
        """The choice and its remarks in one line."""
        name, chosen, score, values, seeds, lost, remarks = self.row
        grid = f"{count(int(values), 'value')} x {count(int(seeds), 'seed')}"
        diverged = f", {lost} diverged" if lost != "0" else ""
        text = f"{name}: {chosen} ({title(self.metric)} {score}; {grid}{diverged})"
        return "; ".join([text, remarks] if remarks else [text])


def read_tunings(
    files: Path | Iterable[Path], arms: Sequence[Arm] = ()
) -> tuple[list[Tuning], list[str]]:
    """Return the tunings in a study's folder, or in these files, and a line for each broken one.

    They have the names of their `arms`, and their order.
    """
    if isinstance(files, Path):
        files = sorted((files / TUNING).glob("*.json"))
    tunings, faults = [], []
    for file in files:
        try:
            if (content := read(file)) is not None:
                tunings.append(_parsed(file, content))
        except BrokenFile as error:
            faults.append(str(error))
    places = {run.name: place for place, arm in enumerate(arms) for run in arm.runs}
    ordered = []
    for one in tunings:
        place = next((places[run] for run in one.runs if run in places), len(arms))
        named = replace(one, name=arms[place].name) if place < len(arms) else one
        ordered.append((place, named))
    return [one for _, one in sorted(ordered, key=lambda pair: pair[0])], faults


def tuned_keys(tunings: Iterable[Tuning], names: Iterable[str]) -> set[str]:
    """Return the keys of the config that were tuned, if they were in each of these runs.

    `lr` is short for `optimizer.lr`.
    """
    tunings = list(tunings)
    if not {*names} <= {run for one in tunings for run in one.runs}:
        return set()
    return {RATE if key == "lr" else key for one in tunings for key in one.axes}


def tuning_text(tunings: Sequence[Tuning], faults: Sequence[str] = ()) -> list[str]:
    """Return a line for each arm under a heading, and one for each fault; [] without a tuning."""
    by_script = any(one.metric.startswith(OUTCOME) for one in tunings)
    on = "by the script's metric" if by_script else "on validation data"
    heading = [f"Chosen {on}, with seeds that are not compared:"]
    return [*heading * bool(tunings), *(f"  {one.sentence}" for one in tunings), *faults]


def tuning_frames(tunings: Sequence[Tuning]) -> list[pl.DataFrame]:
    """Return a frame for each tuned key and metric: a row for each arm, value and seed.

    The columns are arm, key, metric, value, seed, score (null if it diverged) and is_chosen. With
    several keys, of the points that have the chosen values of the others.
    """
    frames: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in tunings:
        for key, axis in one.axes.items():
            are_numbers = all(isinstance(item, int | float) for item in axis)
            rows = frames.setdefault((key, one.metric), [])
            for values, scores in one.points:
                if {**values, key: None} == {**one.chosen, key: None}:
                    at = values[key] if are_numbers else value_text(values[key])
                    about = {"arm": one.name, "key": key, "metric": one.metric, "value": at}
                    chosen = {"is_chosen": values == one.chosen}
                    rows += [about | {"seed": s, "score": x} | chosen for s, x in scores.items()]
    return [pl.DataFrame(rows, infer_schema_length=None, strict=False) for rows in frames.values()]


def _mean_and_lost(scores: Scores) -> tuple[float | None, int]:
    known = [score for score in scores.values() if score is not None]
    return fmean(known) if known else None, len(scores) - len(known)


def _parsed(file: Path, content: Mapping[str, Any]) -> Tuning:
    try:
        points: dict[int, tuple[dict[str, Any], dict[int, float | None]]] = {}
        for row in content["rows"]:
            _, scores = points.setdefault(row["place"], (dict(row["values"]), {}))
            scores[row["seed"]] = None if row["score"] is None else float(row["score"])
        is_control = content["role"] == "control" and content["label"] == "none"
        one = Tuning(
            "control" if is_control else str(content["label"]),
            str(content["metric"]),
            {axis["key"]: list(axis["values"]) for axis in content["axes"]},
            list(points.values()),
            dict(content["chosen"]),
            [*map(str, content["runs"])],
        )
        if one.best and one.sentence:
            return one
    except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration, AttributeError):
        pass
    raise BrokenFile(file, "is not the choice of an arm")
