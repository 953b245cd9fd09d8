"""Trade-off between tasks: the means of each arm in every task, and which arms dominate which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log10

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.report.load import Arm, LoadedRun, canonical
from gradsurg.stats import Difference, paired_difference

PART, LOSS = "test/", "loss"
SIGNS = {metric.name: 1 if metric.better == "lower" else -1 for metric in TASK_METRICS}
"""The metrics that are better lower (1) or higher (-1); of others this is not known."""

WIDE = 10  # an axis that goes from 1 to 10 or further is by logarithms
ROOM, CLOSE = 0.08, 0.05  # shares of an axis
LEAST = 1e-3  # of what the arms span: runs that end in one place differ by less


@dataclass(frozen=True)
class Mark:
    """One arm: the values of its runs in each task, and their mean with its interval.

    `beaten_by` are the arms whose means are no worse in any task and in one better, by more than a
    thousandth of the arms' range.
    """

    arm: Arm
    seeds: list[int]
    values: list[list[float]]
    means: list[Difference]
    beaten_by: list[str]


@dataclass(frozen=True)
class Front:
    """One metric for every task, and the arms that were trained on these tasks."""

    task: str
    metric: str
    names: list[str]
    marks: list[Mark]

    @property
    def key(self) -> str:
        """The name of the front, distinct in a study."""
        return f"{self.task}/{self.metric}"

    @property
    def lower_is_better(self) -> bool:
        return SIGNS[self.metric] > 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The tasks two by two, as places in `names`."""
        return list(combinations(range(len(self.names)), 2))


def fronts(arms: Sequence[Arm]) -> list[Front]:
    """Return one for each multi-loss task that two arms have, and each metric that all its losses
    have."""
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        names = _names(arm)
        if len(names) > 1:
            groups.setdefault(canonical([_task(arm), names]), []).append(arm)
    task_fronts = []
    for members in groups.values():
        names = _names(members[0])
        title = next(
            (str(t) for key in ("name", "_target_") if (t := _task(members[0]).get(key))), ""
        )
        for metric in SIGNS:
            marks = [_mark(arm, [f"{PART}{metric}_{name}" for name in names]) for arm in members]
            known = [mark for mark in marks if mark is not None]
            if len(known) > 1:
                task_fronts.append(Front(title, metric, names, _ranked(known, SIGNS[metric])))
    return task_fronts


def ends_of(front: Front, task: int) -> tuple[float, float, bool]:
    """Return the ends of a task's axis, with room for all runs, and whether it is logarithmic."""
    seen = [value for mark in front.marks for value in mark.values[task]]
    low, high = min(seen), max(seen)
    if low > 0 and high >= WIDE * low:
        room = ROOM * log10(high / low)
        return 10 ** (log10(low) - room), 10 ** (log10(high) + room), True
    room = ROOM * ((high - low) or abs(high) or 1)
    return low - room, high + room, False


def clusters(front: Front, first: int, second: int) -> list[tuple[tuple[float, float], str]]:
    """Return the positions of the arms' numbers, counted from 1; numbers close together share a
    text.
    """
    groups: list[tuple[Mark, list[int]]] = []
    axes = [(task, *ends_of(front, task)) for task in (first, second)]
    for number, mark in enumerate(front.marks, 1):
        for other, numbers in groups:
            if all(abs(_at(mark, *axis) - _at(other, *axis)) < CLOSE for axis in axes):
                numbers.append(number)
                break
        else:
            groups.append((mark, [number]))
    return [
        ((mark.means[first].mean, mark.means[second].mean), ", ".join(map(str, numbers)))
        for mark, numbers in groups
    ]


def _at(mark: Mark, task: int, low: float, high: float, by_log: bool) -> float:
    """The position of an arm's mean on an axis, from 0 to 1."""
    mean = mark.means[task].mean
    if by_log:
        return log10(mean / low) / log10(high / low)
    return (mean - low) / (high - low)


def _names(arm: Arm) -> list[str]:
    """Return the names of the tasks, as in the keys of their losses."""
    keys = dict.fromkeys(key for run in arm.whole for key in run.summary or {})
    begins = f"{PART}{LOSS}_"
    return [key.removeprefix(begins) for key in keys if key.startswith(begins)]


def _task(arm: Arm) -> Mapping[str, object]:
    """The fields of the arm's task without its start."""
    task = (arm.runs[0].config or {}).get("task")
    items = task.items() if isinstance(task, Mapping) else ()
    return {key: item for key, item in items if key != "start"}


def _mark(arm: Arm, keys: Sequence[str]) -> Mark | None:
    whole = [run for run in arm.whole if all(_number(run, key) is not None for key in keys)]
    if not whole:
        return None
    values = [[float(_number(run, key) or 0) for run in whole] for key in keys]
    means = [paired_difference(task_values, [0.0] * len(task_values)) for task_values in values]
    return Mark(arm, [run.seed for run in whole], values, means, [])


def _number(run: LoadedRun, key: str) -> float | None:
    value = (run.summary or {}).get(key)
    return value if isinstance(value, int | float) else None


def _ranked(marks: Sequence[Mark], sign: int) -> list[Mark]:
    """Return the marks with the arms that dominate each."""
    costs = [[sign * mean.mean for mean in mark.means] for mark in marks]
    least = [LEAST * (max(column) - min(column)) for column in zip(*costs, strict=True)]
    return [
        Mark(
            mark.arm,
            mark.seeds,
            mark.values,
            mark.means,
            [
                other.arm.name
                for other, theirs in zip(marks, costs, strict=True)
                if all(a <= b for a, b in zip(theirs, mark_costs, strict=True))
                and any(a < b - gap for a, b, gap in zip(theirs, mark_costs, least, strict=True))
            ],
        )
        for mark, mark_costs in zip(marks, costs, strict=True)
    ]
