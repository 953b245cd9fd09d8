"""Conflicts between tasks: means over steps and runs, their course, tables and sentences."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from gradsurg.effects.numbers import CONFLICT_NUMBERS, CONFLICT_TASK_NAMES
from gradsurg.effects.tables import aligned
from gradsurg.report.load import Arm
from gradsurg.report.wording import count, filled, listed
from gradsurg.stats import t_critical
from gradsurg.training.frames import read_conflicts
from gradsurg.training.run_reader import BrokenFile

NUM_INTERVALS = 30  # into which a run's steps are cut
MAX_NUMBERS = 110_000  # of all series together, so that a page stays small
MAX_PAIRS = 28  # of a map: all of eight tasks
MAX_TASKS = 8  # lines of a panel that are told apart
ROUNDING = 1e-6  # of a cosine, in float32
HIDDEN = ("condition", "weight_entropy")  # in the Parquet file, in no table
GROUP_NUMBERS = [number for number in CONFLICT_NUMBERS if number.name not in HIDDEN]

Floats = NDArray[np.float64]
Pair = tuple[int, int]


@dataclass(frozen=True)
class ConflictMeans:
    """Conflict numbers of the tasks in one group, averaged over the steps of a run, then over runs.

    `lost` is the share of steps at which the update, to first order, raises the loss of each task:
    at which it has a cosine below -`ROUNDING` with the gradient. `weights` is empty where there are
    none. `others` has for other aggregators the cosine of their update to the one that was made,
    and their weights; the nearest comes first. A star after an aggregator's name: it has no result
    at some steps (for example where a loss is negative), so its mean is over fewer steps than the
    others'.
    """

    tasks: list[str]
    measured: list[int]  # steps of each run
    not_finite: int  # steps of all runs at which a gradient was not finite
    single: Mapping[str, float]
    cosines: Floats
    norms: Floats
    weights: Floats
    decrease: Floats
    lost: Floats
    others: Mapping[str, tuple[float, Floats]]

    @property
    def runs(self) -> int:
        return len(self.measured)

    @property
    def steps(self) -> int:
        """Measured steps of all runs."""
        return sum(self.measured)

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of tasks, the most conflicting first."""
        return _by_cosine(self.cosines)


@dataclass(frozen=True)
class Lines:
    """Over intervals of steps, a line for each task: the mean over runs and its interval."""

    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class ConflictSeries:
    """The conflicts of one arm in one group, interval by interval.

    `name` is the arm's name, followed by the group if the study has several. `cosines` has a row
    for each of `pairs`; `weights` (if any) and `decrease` have a line for each task in `shown`,
    which are indices into `means.tasks`.
    """

    name: str
    arm: Arm
    group: str
    means: ConflictMeans
    ends: list[int]
    pairs: list[Pair]
    cosines: Floats
    shown: list[int]
    weights: Lines | None
    decrease: Lines


def pair_name(tasks: Sequence[str], pair: Pair) -> str:
    return f"{tasks[pair[0]]} ~ {tasks[pair[1]]}"


def load_conflicts(arms: Sequence[Arm]) -> tuple[pl.DataFrame, list[str]]:
    """Return the conflicts of all runs, with the directory's name in `run`, and read errors."""
    frames, faults = [read_conflicts([])], []
    for run in (run for arm in arms for run in arm.runs if run.is_readable):
        try:
            frame = read_conflicts([run.path])
        except BrokenFile as error:
            faults.append(f"{run.name}: {error}")
            continue
        if len(frame):
            frames.append(frame.with_columns(pl.lit(run.name).alias("run")))
    return pl.concat(frames, how="diagonal_relaxed"), faults


def conflict_series(arms: Sequence[Arm], rows: pl.DataFrame) -> list[ConflictSeries]:
    """Return one for each arm and group; those of the same tasks show the same selection of
    them."""
    parts = [
        (arm, *key, group_rows)
        for arm in arms
        for *key, group_rows in by_group(
            rows.filter(pl.col("run").is_in([r.name for r in arm.runs]))
        )
    ]
    means = [conflict_means(group_rows) for *_, group_rows in parts]
    keys = dict.fromkeys(tuple(one.tasks) for one in means)
    chosen = {key: _chosen([one for one in means if tuple(one.tasks) == key]) for key in keys}
    sizes = [[len(part) for part in chosen[tuple(one.tasks)]] for one in means]
    size = sum(pairs + 6 * tasks for pairs, tasks in sizes)  # of two panels three lines each
    intervals = max(4, min(NUM_INTERVALS, MAX_NUMBERS // max(1, size)))
    several = any(group != "shared" for _, _, group, _ in parts)
    return [
        _series(
            f"{arm.name} at {group}" if several else arm.name,
            arm,
            group,
            group_rows,
            mean,
            *chosen[tuple(mean.tasks)],
            intervals,
        )
        for (arm, _, group, group_rows), mean in zip(parts, means, strict=True)
    ]


def by_group(rows: pl.DataFrame) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """Group rows by aggregator, group and list of tasks."""
    keys = ["aggregator", "group", pl.col("tasks").list.join("\n").alias("of")]
    for (aggregator, group, _), group_rows in rows.group_by(keys, maintain_order=True):
        yield str(aggregator), str(group), group_rows


def conflict_means(rows: pl.DataFrame) -> ConflictMeans:
    """Average the rows of one aggregator, group and set of tasks."""
    tasks = rows["tasks"][0].to_list()
    runs = [frame for _, frame in rows.group_by("run", maintain_order=True)]
    per_run = [_numbers(frame, len(tasks)) for frame in runs]
    numbers = {
        key: _mean(
            np.stack([_mean(run_numbers[key]) for run_numbers in per_run if len(run_numbers[key])])
        )
        for key in per_run[0]
        if any(len(run_numbers[key]) for run_numbers in per_run)
    }
    others = {
        name: (float(numbers[f"others.{key}.cosine"]), numbers[f"others.{key}.weights"])
        for key, name in _answering(per_run).items()
    }
    empty = np.zeros(0)
    return ConflictMeans(
        tasks,
        [*map(len, runs)],
        sum(int((~np.isfinite(run_numbers["norms"])).any(axis=1).sum()) for run_numbers in per_run),
        {number.name: float(numbers[number.name]) for number in GROUP_NUMBERS},
        numbers["cosines"],
        numbers["norms"],
        numbers.get("weights", empty),
        numbers["decrease"],
        numbers["lost"],
        dict(sorted(others.items(), key=lambda item: -item[1][0])),
    )


def _answering(per_run: Sequence[Mapping[str, Floats]]) -> dict[str, str]:
    """Return the other aggregators with a cosine at some step, starred if it is missing where
    another has one.
    """
    keys = [key for key in per_run[0] if key.endswith(".cosine")]
    known = {
        key: np.concatenate([np.isfinite(run_numbers[key]) for run_numbers in per_run])
        for key in keys
    }
    asked = sum(known.values()) > 0
    names = {}
    for key, there in known.items():
        if there.any():
            name = key.split(".")[1]
            names[name] = name if np.array_equal(there, asked) else f"{name}*"
    return names


def _numbers(rows: pl.DataFrame, count: int) -> dict[str, Floats]:
    """Return each number of a run's rows, step by step; empty for lists that are missing."""
    numbers = {
        number.name: rows[number.name].to_numpy().astype(np.float64) for number in GROUP_NUMBERS
    }
    wide = [name for name in rows.columns if name.endswith(".weights")]
    for name in (*CONFLICT_TASK_NAMES, *wide):
        lists = rows[name].to_list()
        whole = [values if values and len(values) == count else [None] * count for values in lists]
        there = any(values for values in lists)
        numbers[name] = np.array(whole if there or name in wide else [], np.float64)
    numbers["cosines"] = np.array(rows["cosines"].to_list(), np.float64)
    for name in (name for name in rows.columns if name.endswith(".cosine")):
        numbers[name] = rows[name].cast(pl.Float64).to_numpy().astype(np.float64)
    numbers["lost"] = _lost(numbers)
    return numbers


def _lost(numbers: Mapping[str, Floats]) -> Floats:
    """1 where the update has a negative cosine with a task's gradient, beyond rounding."""
    norms, decrease = numbers["norms"], numbers["decrease"]
    products = numbers["cosines"] * norms[:, :, None] * norms[:, None, :]
    mean = np.sqrt(np.maximum(products.mean(axis=(1, 2)), 0.0))
    length = np.nan_to_num(mean * numbers["norm_to_mean"])  # 0 where the mean is
    lost = decrease < -ROUNDING * np.nan_to_num(norms) * length[:, None]
    return np.where(np.isfinite(decrease), lost, np.nan)


def _mean(values: Floats) -> Floats:
    """Mean over the first axis of the finite values; NaN if there is none."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _chosen(means: Sequence[ConflictMeans]) -> tuple[list[Pair], list[int]]:
    """Select the pairs that conflict most, and the tasks that gain least and most."""
    pairs = _by_cosine(_mean(np.stack([one.cosines for one in means])))
    gains = np.nan_to_num(_mean(np.stack([one.decrease for one in means])))
    order = np.argsort(gains, kind="stable").tolist()
    half = MAX_TASKS // 2
    shown = order if len(order) <= MAX_TASKS else [*order[:half], *order[-half:]]
    return pairs[:MAX_PAIRS], sorted(shown)


def _by_cosine(cosines: Floats) -> list[Pair]:
    """The pairs, least cosine first; one that is not known stands last."""
    pairs = [(first, second) for second in range(len(cosines)) for first in range(second)]
    return sorted(pairs, key=lambda pair: np.nan_to_num(cosines[pair[1], pair[0]], nan=2.0))


def _series(
    name: str,
    arm: Arm,
    group: str,
    rows: pl.DataFrame,
    means: ConflictMeans,
    pairs: list[Pair],
    shown: list[int],
    num_intervals: int,
) -> ConflictSeries:
    steps = rows["step"].unique().sort().to_list()
    count = min(num_intervals, len(steps))
    ends = [steps[(k + 1) * len(steps) // count - 1] for k in range(count)]
    runs = [frame for _, frame in rows.group_by("run", maintain_order=True)]
    cut = {name: [] for name in ("cosines", "weights", "decrease")}
    for frame in runs:
        numbers = _numbers(frame, len(means.tasks))
        places = np.searchsorted(ends, frame["step"].to_numpy())
        for key, parts in cut.items():
            if len(numbers[key]):
                parts.append(np.stack([_mean(numbers[key][places == k]) for k in range(count)]))
    first, second = ([pair[end] for pair in pairs] for end in (0, 1))
    cosines = _mean(np.stack(cut["cosines"]))[:, second, first].T
    return ConflictSeries(
        name,
        arm,
        group,
        means,
        ends,
        pairs,
        cosines,
        shown,
        _lines(np.stack(cut["weights"])[:, :, shown]) if cut["weights"] else None,
        _lines(np.stack(cut["decrease"])[:, :, shown]),
    )


def _lines(values: Floats) -> Lines:
    """Return the lines of numbers by run, interval and task."""
    mean = _mean(values)
    known = np.isfinite(values).sum(axis=0)
    spread = np.sqrt(_mean((values - mean) ** 2) * known / np.maximum(known - 1, 1))
    reaches = {n: t_critical(n) if n > 1 else np.nan for n in range(len(values) + 1)}
    reach = np.vectorize(reaches.__getitem__, otypes=[float])(known)
    reach = reach * spread / np.sqrt(np.maximum(known, 1))
    return Lines(mean.T, (mean - reach).T, (mean + reach).T)


FEW_PAIRS = 6  # are all shown: those of four tasks
MAX_TASKS_LISTED = 8
SINGLE_NUMBERS = 6  # columns of a study's table, the arm among them, before those of tasks
EXTREMES = 3  # of many tasks or pairs, at each end
LOSES = f"the cosine of its gradient and the update is below {-ROUNDING:g}"
STEPS = {
    "shared": "a plain step lowers the loss of a task, to first order and a learning rate of 1",
    "representation": "the loss of a task falls, to first order, where the representation itself "
    "is moved by the update: not what a step of the parameters does",
}
PART = (
    "a plain step of these parameters alone lowers the loss of a task, to first order and a "
    "learning rate of 1"
)
SHARPEST = "the one with the sharpest conflict"


def conflict_text(arms: Sequence[tuple[str, Sequence[Path]]]) -> str:
    """Return the conflict tables of a job: arms side by side, their tasks, and the other
    aggregators.

    An arm is a name and the directories of its runs, the treated one first. Of several groups,
    shows the one with the lowest cosine. Empty without conflicts.
    """
    by_arm = [(name, groups) for name, paths in arms if (groups := _by_group(paths))]
    if not by_arm:
        return ""
    first, groups = by_arm[0]
    group, means = min(groups.items(), key=lambda item: _sharpest(item[1]))
    beside = [_beside(group, name, others) for name, others in by_arm[1:]]
    whole = group == "shared" or len(groups) > 1  # of several the caption tells
    columns = [(first if whole else f"{first} at {group}", means)]
    columns += [(name, one) for name, one in beside if one.tasks == means.tasks]
    of = measured_steps(means)
    where = f" at {group}, of {len(groups)} groups {SHARPEST}" if len(groups) > 1 else ""
    caption = f"How the tasks conflict{where}, means over {count(means.runs, 'run')}, {of}:"
    parts = [filled(caption), _table(columns), _task_table(columns)]
    notes = [_lost_elsewhere(group, groups), about_tasks(group)]
    notes.append(others_line(first, means) if first != "control" else "")
    return "\n\n".join([*parts, *(filled(text) for text in notes if text)])


def about_tasks(group: str) -> str:
    """Explain the columns of a table of tasks."""
    return (
        f"decrease: by how much {STEPS.get(group, PART)}; would have lost: at which share of the "
        f"measured steps {LOSES}"
    )


def _lost_elsewhere(group: str, groups: Mapping[str, ConflictMeans]) -> str:
    """The task that would have lost most often, if that is in a group that is not shown."""
    where = _most_lost(groups, group)
    if where in ("", group):
        return ""
    return f"Would have lost most often, of all groups: {_loser(groups[where])} at {where}."


def measured_steps(means: ConflictMeans) -> str:
    """Return the number of measured steps of each run; stopped runs have fewer."""
    least, most = min(means.measured), max(means.measured)
    text = f"{least} to " * (least < most) + count(most, "measured step")
    text += " each" * (means.runs > 1)
    if means.not_finite:
        text += f", of which {means.not_finite} had a gradient that is not finite, and no number"
    return text


def _by_group(paths: Sequence[Path]) -> dict[str, ConflictMeans]:
    """Return the means of each group; if its tasks varied, of the set with the most steps."""
    means = [
        (group, conflict_means(group_rows))
        for _, group, group_rows in by_group(read_conflicts(paths))
    ]
    return dict(sorted(means, key=lambda item: item[1].steps))


def _beside(
    group: str, name: str, groups: Mapping[str, ConflictMeans]
) -> tuple[str, ConflictMeans]:
    """Return an arm's means of the same group, or of its first group, then named."""
    if group in groups:
        return name, groups[group]
    other = next(iter(groups))
    return f"{name} at {other}", groups[other]


def others_line(name: str, means: ConflictMeans) -> str:
    """The cosine of every other's update to the one that was made, the nearest first."""
    named: dict[str, list[str]] = {}
    for other, (cosine, _) in means.others.items():
        named.setdefault(number_of(cosine), []).append(other)
    text = "; ".join(f"{cosine} {', '.join(others)}" for cosine, others in named.items())
    if not text:
        return ""
    starred = " *: at some of these steps alone." if "*" in text else ""
    return f"What the others would have done, cosine to the update of {name}: {text}.{starred}"


def number_of(value: float) -> str:
    """Format with three digits; `-` for NaN."""
    return f"{value:.3g}" if value == value else "-"


def _sharpest(means: ConflictMeans) -> float:
    return min((means.cosines[b, a] for a, b in means.pairs), default=1.0)


def _table(arms: Sequence[tuple[str, ConflictMeans]]) -> str:
    """Pairs and single numbers down, arms across."""
    means = arms[0][1]
    pairs = means.pairs
    many = len(pairs) > FEW_PAIRS
    shown = [*pairs[:EXTREMES], *pairs[-1:]] if many else pairs
    cells = [["", *(name for name, _ in arms)]]
    for a, b in shown:
        if many and (a, b) == shown[-1]:
            between = len(pairs) - len(shown)
            cells.append([f".. {count(between, 'pair')} between ..", *("" for _ in arms)])
        name = f"cosine {pair_name(means.tasks, (a, b))}"
        cells.append([name, *(number_of(arm_means.cosines[b, a]) for _, arm_means in arms)])
    for number in GROUP_NUMBERS:
        show = _share if number.unit == "fraction" else number_of
        cells.append(
            [number.label, *(show(arm_means.single[number.name]) for _, arm_means in arms)]
        )
    return aligned(cells)


def _task_table(arms: Sequence[tuple[str, ConflictMeans]]) -> str:
    cells = [["arm", "task", "norm", "weight", "decrease", "would have lost"]]
    for name, means in arms:
        rows = [_task_row(means, task) for task in range(len(means.tasks))]
        if len(rows) > MAX_TASKS_LISTED:
            order = sorted(range(len(rows)), key=lambda task: means.decrease[task])
            left_out = ["", f".. {len(rows) - 2 * EXTREMES} between ..", "", "", "", ""]
            rows = [rows[task] for task in order]
            rows = [*rows[:EXTREMES], left_out, *rows[-EXTREMES:]]
        rows[0][0] = name
        cells += rows
    return aligned(cells, left=2)


def _task_row(means: ConflictMeans, task: int) -> list[str]:
    weight = means.weights[task] if len(means.weights) else float("nan")
    numbers = [number_of(float(one)) for one in (means.norms[task], weight, means.decrease[task])]
    return ["", means.tasks[task], *numbers, _share(float(means.lost[task]))]


def _share(share: float) -> str:
    return f"{share:.1%}" if share == share else "-"


def conflict_rows(series: Sequence[ConflictSeries]) -> tuple[list[str], list[list[str]]]:
    """Heads and a row an arm: of several groups that with the sharpest conflict."""
    heads = ["arm", "n", "cosines", "conflict\nrate", "norm\nspread", "norm to\nmean"]
    heads += ["weights", "decrease", "lost"]
    rows = []
    for one in sharpest(series):
        means = one.means
        pairs = [float(means.cosines[b, a]) for a, b in means.pairs]
        single = [means.single[key] for key in ("conflict_rate", "norm_spread", "norm_to_mean")]
        numbers = [_share(single[0]), *(_ends([one]) for one in single[1:])]
        spreads = [_ends(means.weights.tolist()), _ends(means.decrease.tolist())]
        rows.append(
            [one.name, str(means.runs), _ends(pairs), *numbers, *spreads, lost_most(one, series)]
        )
    return heads, rows


def about_conflicts(series: Sequence[ConflictSeries]) -> str:
    """Name the tasks of the rows and explain their columns."""
    sets = dict.fromkeys(tuple(one.means.tasks) for one in series)
    tasks = "; ".join(listed(list(names), MAX_TASKS_LISTED) for names in sets)
    several = len(sharpest(series)) < len(series)
    return (
        f"Means over steps and runs; of the tasks {tasks} the least and the greatest. Lost: the "
        f"task that most often would have lost ({LOSES}), and at which share of the steps."
        + f" Of several groups {SHARPEST} is shown; lost is of all."
        * several
    )


def others_lines(series: Sequence[ConflictSeries]) -> list[str]:
    """Return a line on the other aggregators for each treated arm."""
    lines = [others_line(one.name, one.means) for one in sharpest(series) if not one.arm.is_control]
    return [line for line in lines if line]


def about_lengths(series: Sequence[ConflictSeries]) -> list[str]:
    """Return a caution if updates are longer or shorter than the control's by a factor above
    1.25."""
    of_control = {tuple(one.means.tasks): one for one in series if one.arm.is_control}
    ratios = []
    for one in series:
        control = of_control.get(tuple(one.means.tasks))
        if control is None or control is one or one.arm.is_control or one.group != control.group:
            continue
        ratio = one.means.single["norm_to_mean"] / control.means.single["norm_to_mean"]
        if not 1 / 1.25 <= ratio <= 1.25 and ratio == ratio:
            ratios.append(f"{ratio:.2g} ({one.arm.name})")
    if not ratios:
        return []
    return [
        f"Relative to the mean gradient, updates are {listed(ratios)} times as long as the "
        "control's, which acts like another learning rate: control=norm_matched compares "
        "directions alone, or a learning rate of its own for what weighs losses."
    ]


def sharpest(series: Sequence[ConflictSeries]) -> list[ConflictSeries]:
    """Return for each arm the group in which tasks conflict most."""
    by_arm: dict[str, ConflictSeries] = {}
    for one in series:
        other = by_arm.get(one.arm.name)
        if other is None or _sharpest(one.means) < _sharpest(other.means):
            by_arm[one.arm.name] = one
    return list(by_arm.values())


def _ends(values: Sequence[float]) -> str:
    known = sorted(value for value in values if value == value)
    if not known:
        return "-"
    low, high = f"{known[0]:.2g}", f"{known[-1]:.2g}"
    return low if low == high else f"{low} .. {high}"


def lost_most(one: ConflictSeries, series: Sequence[ConflictSeries]) -> str:
    """The task that would have lost most often in any group of an arm; `none` if none has."""
    groups = {other.group: other.means for other in series if other.arm.name == one.arm.name}
    where = _most_lost(groups, one.group)
    if not where:
        return "none"
    task = _loser(groups[where])
    return task if where == one.group else f"{task} at {where}"


def _most_lost(groups: Mapping[str, ConflictMeans], shown: str) -> str:
    """The group in which a task would have lost most often; empty if none has."""
    worst = {name: float(np.nan_to_num(means.lost).max()) for name, means in groups.items()}
    most = max(worst, key=lambda name: (worst[name], name == shown))
    return most if worst[most] > 0 else ""


def _loser(means: ConflictMeans) -> str:
    shares = np.nan_to_num(means.lost)
    most = int(shares.argmax())  # the first of several
    return f"{means.tasks[most]} {_share(float(shares[most]))}"
