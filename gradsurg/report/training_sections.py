"""Sections of the page on the training: curves, effects on gradients, conflicts, updates."""

from collections.abc import Sequence
from html import escape

from gradsurg.effects.tables import number as plain
from gradsurg.report import elements
from gradsurg.report.charts import (
    Columns,
    columns_of,
    short,
)
from gradsurg.report.conflicts import (
    LOSES,
    ConflictSeries,
    about_tasks,
    lost_most,
    measured_steps,
    pair_name,
    sharpest,
)
from gradsurg.report.series import ABOUT as ABOUT_UPDATES
from gradsurg.report.series import MEASURES, NUMBERS, of_how_much
from gradsurg.report.study import StudyReport
from gradsurg.report.training_charts import (
    conflict_panel,
    conflict_reach,
    curve_data,
    curve_limits,
    curve_panel,
    effect_limits,
    effect_panel,
    last_step,
    map_name,
    norm_panel,
    overlay_panel,
    task_panel,
)
from gradsurg.report.wording import count, title, value

HINTS = {"cosine": "cosine", "ratio": "norm ratio", "changed": "fraction changed"}
TITLES = {**HINTS, "flipped": "sign flips", "zeroed": "zeroed"}


def curves_section(report: StudyReport, data: elements.PageData) -> elements.Section:
    name = "Learning curves"
    if not report.curves:
        return elements.section("curves", name, "", "<p>Nothing has been logged yet.</p>")
    how = (
        "Mean over seeds with its 95&nbsp;% interval, from three seeds on; thin lines are single "
        "seeds, dashed red ones diverged and are not part of any mean. An arrow marks where a "
        "curve leaves the axis."
    )
    metrics = dict.fromkeys(curve.metric for curve in report.curves)
    most, control = 0, False
    for metric in metrics:
        curves = curve_data(report, metric)
        if len(curves) > 1:
            for scale in ("linear", "log"):
                data.add(f"curves|{metric}|{scale}", overlay_panel(report, metric, scale == "log"))
        most, control = max(most, len(curves)), control or any(one.control for one in curves)
        last = last_step(curves)
        every = [curve for one in curves for curve in one.both]
        shared = {by_log: curve_limits(every, by_log) for by_log in (False, True)}
        for place, one in enumerate(curves):
            first = f"curve|{metric}|{place}|linear|shared"
            for by_log, scale in ((False, "linear"), (True, "log")):
                for own_scale, whose in ((False, "shared"), (True, "own")):
                    limits = curve_limits(one.both, by_log) if own_scale else shared[by_log]
                    key = f"curve|{metric}|{place}|{scale}|{whose}"
                    panel = curve_panel(one, limits, last, by_log)
                    data.add(key, panel, like=first if key != first else "")
    key = '<span><i></i>treated</span><span><i class="control"></i>control</span>'
    choices = [
        elements.choice("curve", "Metric", {metric: title(metric) for metric in metrics}),
        elements.checkbox("scale", "log", "linear", "log scale"),
        elements.checkbox("limits", "own", "shared", "a scale for each panel"),
        f'<p class="key">{key if control else "<span><i></i>mean</span>"}</p>',
    ]
    charts = [
        elements.chart(f"curve|{{curve}}|{place}|{{scale}}|{{limits}}") for place in range(most)
    ]
    each = elements.panels(charts)
    if most > 1:
        parts = [
            elements.arms_choice(_curve_arms(report)),
            elements.chart("curves|{curve}|{scale}"),
        ]
        each = "".join([*parts, "<h3>Each arm with its seeds</h3>", each])
    return elements.section("curves", name, how, elements.choices(*choices), each)


def _curve_arms(report: StudyReport) -> list[str]:
    return list(dict.fromkeys(curve.arm.name for curve in report.curves))


def effects_section(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    if report.conflicts and all(one.transform == "none" for one in report.maps):
        return None
    name = "Effect on the gradients"
    if not report.maps:
        text = "No effect was measured: effects_every=0, nothing ran yet, or no transform acted."
        return elements.section("effects", name, "", f"<p>{text}</p>")
    how = (
        "The effect of each transform at each site over the training: means over runs. The slider "
        "selects an arm and a transform; the colour scale is the same for all."
    )
    limits = {measure: effect_limits(report.maps, measure) for measure in MEASURES}
    norms = {(one.arm.name, one.transform): one for one in report.norms}
    for place, one in enumerate(report.maps):
        numbers = {"site": one.sites}
        numbers |= {TITLES[key]: [short(v, 3) for v in one.overall[key]] for key in MEASURES}
        label = f"{map_name(one)}, n = {count(one.n, 'run')}"
        data.texts[f"map|{place}"] = label
        for measure in MEASURES:
            if all(number is None for row in one.means[measure] for number in row):
                text = "There is no finite number: all gradients were NaN or infinite, or zero."
                data.texts[f"nothing|{place}|{measure}"] = text
                continue
            panel = effect_panel(one, measure, limits[measure])
            data.add(f"effect|{place}|{measure}", panel, numbers, name=TITLES[measure])
        arm_norms = norms.get((one.arm.name, one.transform))
        if arm_norms is not None and any([*arm_norms.before, *(arm_norms.after or ())]):
            caption = "Gradient norms, all sites and measured steps"
            data.add(
                f"norms|{place}",
                norm_panel(arm_norms),
                name=f"{caption}: {norm_panel(arm_norms).title}",
            )
    slider = elements.slider("map", "Arm and transform", len(report.maps))
    measures = elements.choice("measure", "Measure", {key: TITLES[key] for key in MEASURES})
    nothing = elements.text_of("nothing|{map}|{measure}")
    charts = [elements.chart("effect|{map}|{measure}"), nothing, elements.chart("norms|{map}")]
    return elements.section("effects", name, how, slider, measures, *charts)


def conflicts_section(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    series = report.conflicts
    if not series:
        return None
    how = (
        "Means over measured steps and runs of each arm. Two tasks conflict where the cosine of "
        f"their gradients is below zero. A task would have lost where {escape(LOSES)}. Norm to "
        "mean: the norm of the update divided by that of the mean gradient."
    )
    reach = conflict_reach(series)
    for place, one in enumerate(series):
        _add_conflict(data, place, one, reach)
    label = "Arm" if len(sharpest(series)) == len(series) else "Arm and group"
    lines = [elements.chart("weight|{conflict}"), elements.chart("decrease|{conflict}")]
    parts = [
        _conflict_overview(series),
        elements.slider("conflict", label, len(series)),
        elements.chart("conflict|{conflict}"),
        elements.text_of("pairs|{conflict}"),
        elements.text_of("weightless|{conflict}"),
        elements.panels(lines),
        elements.data_table("tasks|{conflict}", "Tasks"),
        elements.text_of("about|{conflict}"),
        elements.data_table(
            "others|{conflict}", "Updates of the other aggregators", "others-of|{conflict}"
        ),
    ]
    return elements.section("conflicts", "Conflict between the tasks", how, *parts)


def _add_conflict(data: elements.PageData, place: int, one: ConflictSeries, reach: float) -> None:
    means = one.means
    measured = measured_steps(means)
    data.texts[f"conflict|{place}"] = f"{one.name}, n = {count(means.runs, 'run')}, {measured}"
    data.texts[f"about|{place}"] = f"{about_tasks(one.group)}."
    if one.pairs:
        name = "Cosine of the gradients of two tasks"
        data.add(f"conflict|{place}", conflict_panel(one, reach), name=name)
    if len(means.pairs) > len(one.pairs):
        text = f"Of {len(means.pairs)} pairs, the {len(one.pairs)} that conflict most."
        data.texts[f"pairs|{place}"] = text
    if one.weights is None:
        text = f"{one.name} has no weights: it is not a weighted sum of the gradients."
        data.texts[f"weightless|{place}"] = text
    else:
        panel = task_panel(one, one.weights, "weight")
        data.add(f"weight|{place}", panel, name="Weight of each task")
    panel = task_panel(one, one.decrease, "decrease")
    of = "" if len(one.shown) == len(means.tasks) else " (those that gain least and most)"
    data.add(f"decrease|{place}", panel, name=f"Decrease of each task{of}")
    tasks: Columns = {"task": means.tasks, "norm": elements.shorts(means.norms.tolist())}
    if len(means.weights):
        tasks["weight"] = elements.shorts(means.weights.tolist())
    tasks["decrease"] = elements.shorts(means.decrease.tolist())
    tasks["would have lost"] = [value("accuracy", lost) for lost in means.lost.tolist()]
    data.shown[f"tasks|{place}"] = data.table(tasks)
    if means.others and not one.arm.is_control:
        weighted = len(means.tasks) <= 8
        data.shown[f"others|{place}"] = data.table(other_aggregators(one))
        starred = " *: at some of these steps only." if any("*" in n for n in means.others) else ""
        weights = ", and its weight for each task" if weighted else ""
        data.texts[f"others-of|{place}"] = (
            "From the same gradients, each aggregator at its first step: the cosine of its update "
            f"to that of {one.name}{weights}. Means over steps and runs.{starred}"
        )


def other_aggregators(one: ConflictSeries) -> Columns:
    """A table of the other aggregators; aggregators equal in all digits shown share a row."""
    equal: dict[str, list[str]] = {}
    rows: dict[str, list[object]] = {}
    tasks = one.means.tasks if len(one.means.tasks) <= 8 else []
    for name, (cosine, weights) in one.means.others.items():
        shown = elements.shorts(weights.tolist()) or [None] * len(tasks)
        key = repr((short(cosine, 3), shown))
        equal.setdefault(key, []).append(name)
        rows.setdefault(key, [short(cosine, 5), *shown[: len(tasks)]])
    lines = [(", ".join(names), *rows[key]) for key, names in equal.items()]
    return columns_of(("aggregator", "cosine", *tasks), lines)


def _conflict_overview(series: Sequence[ConflictSeries]) -> str:
    heads = ["arm", "n", "conflict rate", "sharpest pair", "cosine", "norm spread", "norm to mean"]
    rows = []
    for one in sharpest(series):
        means, pair = one.means, next(iter(one.means.pairs), None)
        single = means.single
        rows.append(
            [
                one.name,
                str(means.runs),
                value("accuracy", single["conflict_rate"]),
                pair_name(means.tasks, pair) if pair else elements.MISSING,
                elements.number_text(means.cosines[pair[1], pair[0]] if pair else None),
                *(elements.number_text(single[key]) for key in ("norm_spread", "norm_to_mean")),
                lost_most(one, series),
            ]
        )
    words = ["sharpest pair", "most often lost"]
    table = elements.table("Conflict of each arm", [*heads, "most often lost"], rows, words)
    if len(sharpest(series)) == len(series):
        return table
    text = (
        "Of several groups the one with the sharpest conflict is shown; most often lost is of all."
    )
    return f'{table}<p class="how">{text}</p>'


def updates_section(report: StudyReport) -> elements.Section | None:
    if not report.updates:
        return None
    how = (
        f"{escape(ABOUT_UPDATES)} Means over runs, with 95&nbsp;% intervals; their course over the "
        "steps is among the learning curves."
    )
    rows = []
    for effect in report.updates:
        row = [effect.arm.name, of_how_much(effect.summaries)]
        for key in NUMBERS:
            mean = effect.means.get(key)
            ends = [end for end in (mean.low, mean.high) if end is not None] if mean else []
            between = f"\n{' to '.join(plain(end) for end in ends)}" if ends else ""
            row.append(f"{plain(mean.mean)}{between}" if mean else "-")
        rows.append(row)
    table = elements.table(
        "Effect on the updates", ["arm", "steps", *NUMBERS.values()], rows, ["sampled"]
    )
    return elements.section("updates", "Effect on the updates", how, table)
