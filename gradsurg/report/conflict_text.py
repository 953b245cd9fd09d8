"""How the tasks conflict, as words and tables for the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

import numpy as np

from gradsurg.effects.tables import aligned
from gradsurg.report.conflicts import (
    ROUNDING,
    SINGLE,
    ConflictMeans,
    ConflictSeries,
    by_group,
    conflict_means,
    pair_name,
)
from gradsurg.report.wording import count, listed
from gradsurg.training.frames import read_conflicts

WIDTH = 100
FEW_PAIRS = 6  # are all shown: those of four tasks
MAX_TASKS = 8
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
    """A table of the arms side by side, one of their tasks, and what others would have done.

    An arm is a name and the directories of its runs, the treated one first. Where gradients are
    made one in several groups, that with the sharpest conflict is told. Nothing without conflicts.
    """
    found = [(name, own) for name, paths in arms if (own := _by_group(paths))]
    if not found:
        return ""
    first, groups = found[0]
    group, means = min(groups.items(), key=lambda item: _sharpest(item[1]))
    beside = [_beside(group, name, own) for name, own in found[1:]]
    whole = group == "shared" or len(groups) > 1  # of several the caption tells
    own = [(first if whole else f"{first} at {group}", means)]
    own += [(name, one) for name, one in beside if one.tasks == means.tasks]
    of = measured_steps(means)
    where = f" at {group}, of {len(groups)} groups {SHARPEST}" if len(groups) > 1 else ""
    caption = f"How the tasks conflict{where}, means over {count(means.runs, 'run')}, {of}:"
    parts = [fill(caption, WIDTH), _table(own), _task_table(own)]
    said = [_lost_elsewhere(group, groups), about_tasks(group)]
    said.append(others_line(first, means) if first != "control" else "")
    return "\n\n".join([*parts, *(fill(text, WIDTH) for text in said if text)])


def about_tasks(group: str) -> str:
    """What the columns of a table of tasks say."""
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
    """How many of each run; runs that were stopped have fewer."""
    least, most = min(means.measured), max(means.measured)
    said = f"{least} to " * (least < most) + count(most, "measured step")
    said += " each" * (means.runs > 1)
    if means.not_finite:
        said += f", of which {means.not_finite} had a gradient that is not finite, and no number"
    return said


def _by_group(paths: Sequence[Path]) -> dict[str, ConflictMeans]:
    """Of each group; where its tasks were not always the same, of those that were met most."""
    means = [(group, conflict_means(own)) for _, group, own in by_group(read_conflicts(paths))]
    return dict(sorted(means, key=lambda item: item[1].steps))


def _beside(
    group: str, name: str, groups: Mapping[str, ConflictMeans]
) -> tuple[str, ConflictMeans]:
    """That of the same group; a control is measured as a whole, and is called so."""
    if group in groups:
        return name, groups[group]
    other = next(iter(groups))
    return f"{name} at {other}", groups[other]


def others_line(name: str, means: ConflictMeans) -> str:
    """The cosine of every other's update to the one that was made, the nearest first."""
    named: dict[str, list[str]] = {}
    for other, (cosine, _) in means.others.items():
        named.setdefault(number_of(cosine), []).append(other)
    said = "; ".join(f"{cosine} {', '.join(others)}" for cosine, others in named.items())
    if not said:
        return ""
    starred = " *: at some of these steps alone." if "*" in said else ""
    return f"What the others would have done, cosine to the update of {name}: {said}.{starred}"


def number_of(found: float) -> str:
    """Three digits, `-` for what is not known."""
    return f"{found:.3g}" if found == found else "-"


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
        cells.append([name, *(number_of(own.cosines[b, a]) for _, own in arms)])
    for key in SINGLE:
        show = _share if key == "conflict_rate" else number_of
        cells.append([key.replace("_", " "), *(show(own.single[key]) for _, own in arms)])
    return aligned(cells)


def _task_table(arms: Sequence[tuple[str, ConflictMeans]]) -> str:
    cells = [["arm", "task", "norm", "weight", "decrease", "would have lost"]]
    for name, means in arms:
        rows = [_task_row(means, task) for task in range(len(means.tasks))]
        if len(rows) > MAX_TASKS:
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


def _share(found: float) -> str:
    return f"{found:.1%}" if found == found else "-"


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
    """Which tasks the rows are of, and what their columns say."""
    sets = dict.fromkeys(tuple(one.means.tasks) for one in series)
    tasks = "; ".join(listed(list(own), MAX_TASKS) for own in sets)
    several = len(sharpest(series)) < len(series)
    return (
        f"Means over steps and runs; of the tasks {tasks} the least and the greatest. Lost: the "
        f"task that most often would have lost ({LOSES}), and at which share of the steps."
        + f" Of several groups {SHARPEST} is shown; lost is of all."
        * several
    )


def others_lines(series: Sequence[ConflictSeries]) -> list[str]:
    """For each treated arm what the others would have done."""
    lines = [others_line(one.name, one.means) for one in sharpest(series) if not one.arm.is_control]
    return [line for line in lines if line]


def about_lengths(series: Sequence[ConflictSeries]) -> list[str]:
    """That updates are longer or shorter than the control's, where some are by more than 1.25."""
    of_control = {tuple(one.means.tasks): one for one in series if one.arm.is_control}
    said = []
    for one in series:
        control = of_control.get(tuple(one.means.tasks))
        if control is None or control is one or one.arm.is_control or one.group != control.group:
            continue
        ratio = one.means.single["norm_to_mean"] / control.means.single["norm_to_mean"]
        if not 1 / 1.25 <= ratio <= 1.25 and ratio == ratio:
            said.append(f"{ratio:.2g} ({one.arm.name})")
    if not said:
        return []
    return [
        f"Relative to the mean gradient, updates are {listed(said)} times as long as the "
        "control's, which acts like another learning rate: control=norm_matched compares "
        "directions alone, or a learning rate of its own for what weighs losses."
    ]


def sharpest(series: Sequence[ConflictSeries]) -> list[ConflictSeries]:
    """Of each arm the group in which tasks conflict most."""
    found: dict[str, ConflictSeries] = {}
    for one in series:
        other = found.get(one.arm.name)
        if other is None or _sharpest(one.means) < _sharpest(other.means):
            found[one.arm.name] = one
    return list(found.values())


def _ends(values: Sequence[float]) -> str:
    known = sorted(value for value in values if value == value)
    if not known:
        return "-"
    low, high = f"{known[0]:.2g}", f"{known[-1]:.2g}"
    return low if low == high else f"{low} .. {high}"


def lost_most(one: ConflictSeries, series: Sequence[ConflictSeries]) -> str:
    """The task that would have lost most often in any group of an arm; `none` if none has."""
    groups = {own.group: own.means for own in series if own.arm.name == one.arm.name}
    where = _most_lost(groups, one.group)
    if not where:
        return "none"
    said = _loser(groups[where])
    return said if where == one.group else f"{said} at {where}"


def _most_lost(groups: Mapping[str, ConflictMeans], shown: str) -> str:
    """The group in which a task would have lost most often; empty if none has."""
    worst = {name: float(np.nan_to_num(own.lost).max()) for name, own in groups.items()}
    most = max(worst, key=lambda name: (worst[name], name == shown))
    return most if worst[most] > 0 else ""


def _loser(means: ConflictMeans) -> str:
    shares = np.nan_to_num(means.lost)
    most = int(shares.argmax())  # the first of several
    return f"{means.tasks[most]} {_share(float(shares[most]))}"
