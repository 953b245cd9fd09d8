"""The page of a study: one HTML file with charts, tables, style and scripts; nothing is fetched."""

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from html import escape
from importlib.metadata import version as version_of
from pathlib import Path
from statistics import median
from string import Template
from types import MappingProxyType

from gradsurg.effects.tables import number as plain
from gradsurg.report.answer import SHARED, alone_rows, outcome_table
from gradsurg.report.charts import (
    CONFIG,
    DARK,
    Columns,
    Grid,
    Panel,
    Spec,
    Table,
    columns_of,
    short,
)
from gradsurg.report.compare import ABOUT_SHARES
from gradsurg.report.conflicts import (
    LOSES,
    ConflictSeries,
    about_tasks,
    lost_most,
    measured_steps,
    pair_name,
    sharpest,
)
from gradsurg.report.load import LoadedRun
from gradsurg.report.outcome_charts import (
    MAX_PAIRS,
    cost_panel,
    dose_panel,
    front_panel,
    of_metric,
    outcome_panel,
)
from gradsurg.report.pareto import Front
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
    map_name,
    norm_panel,
    task_panel,
)
from gradsurg.report.wording import count, is_share, title, unbroken, value
from gradsurg.training.run_directory import CONFIG as CONFIG_FILE
from gradsurg.training.run_reader import read_text

PARTS = Path(__file__).parent / "page"
EMPTY: Mapping[str, bytes] = MappingProxyType({})
MAX_RADIOS = 5  # metrics; more are a drop-down list
MISSING = "\u2013"
HINTS = {"cosine": "cosine", "ratio": "norm ratio", "changed": "fraction changed"}
TITLES = {**HINTS, "flipped": "sign flips", "zeroed": "zeroed"}


def page(
    report: StudyReport, refresh: float | None = None, pictures: Mapping[str, bytes] = EMPTY
) -> str:
    """Return the page as HTML; with `refresh` it reloads itself every so many seconds.

    `pictures` are PNG files to show, by the names that they have beside the page.
    """
    data = _PageData(report)
    sections = [
        _outcome(report, data),
        _fronts(report, data),
        _trajectories(pictures),
        _alone(report),
        _shares(report, data),
        _doses(report, data),
        _curves(report, data),
        _effects(report, data),
        _conflicts(report, data),
        _updates(report),
        _costs(report, data),
        _runs(report),
    ]
    shown = [section for section in sections if section]
    content = {**data.json(), "refresh": refresh}
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(
        study=escape(report.folder.name),
        answer=escape(unbroken(report.answer)),
        cautions=_items(report.cautions),
        states=_states(report),
        links="".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _ in shown),
        sections="\n".join(text for *_, text in shown),
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        # "</script>" in a name must not end the script
        data=json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        library=_library(),
        script=(PARTS / "page.js").read_text(encoding="utf-8"),
    )


class _PageData:
    """The data of the page's script: charts, with their views and tables written once each."""

    def __init__(self, report: StudyReport) -> None:
        self.charts: dict[str, dict[str, object]] = {}
        self.texts: dict[str, str] = {}
        self.shown: dict[str, int] = {}
        self.configs = {run.name: _config(run) for run in report.runs}
        self._views: dict[int, tuple[int, Spec]] = {}
        self._tables: dict[int, tuple[int, Table]] = {}

    def add(
        self, key: str, panel: Panel, numbers: Table | None = None, like: str = "", name: str = ""
    ) -> None:
        """Add a chart; `numbers` is its table, the first of its data unless given.

        A chart that is `like` another has the data and the texts of that one.
        """
        view = self._views.setdefault(id(panel.view), (len(self._views), panel.view))[0]
        limits = {key: _short(limit) for key, limit in panel.limits.items()}
        chart: dict[str, object] = {"view": view, "limits": limits}
        if like:
            chart["like"] = like
        else:
            table = next(iter(panel.data.values())) if numbers is None else numbers
            hidden = ("clear", "shape", "best", "control")
            names = table.labels if isinstance(table, Grid) else table
            columns = [column for column in names if column not in hidden]
            if isinstance(table, Grid):
                columns += ["step", *table.values]
            chart |= {
                "title": name or panel.title,
                "summary": panel.summary,
                "height": panel.height,
                "data": {name: self.table(data) for name, data in panel.data.items()},
                "numbers": [self.table(table), columns],
            }
        self.charts[key] = chart

    def table(self, table: Table) -> int:
        """The place of a table, which is written once however many charts show it."""
        return self._tables.setdefault(id(table), (len(self._tables), table))[0]

    def json(self) -> dict[str, object]:
        tables = [table for _, table in self._tables.values()]
        return {
            "charts": self.charts,
            "views": [view for _, view in self._views.values()],
            "tables": [asdict(one) if isinstance(one, Grid) else one for one in tables],
            "texts": self.texts,
            "shown": self.shown,
            "configs": self.configs,
            "config": CONFIG,
            "dark": DARK,
        }


def _library() -> str:
    """Vega, Vega-Lite and vega-embed as one script.

    To bundle it takes seconds, so it is stored beside the byte code, where that can be written.
    """
    import vl_convert

    version = version_of("vl-convert-python")
    file = Path(__file__).parent / "__pycache__" / f"vega-{version}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # its names are its own, and nothing in it ends the script
    script = "(() => {" + script.replace("</script", "<\\/script") + "})();"
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(script, encoding="utf-8")
        draft.replace(file)
    return script


# Sections: each has its id, its title and its HTML; None if there is nothing to show ------------

Section = tuple[str, str, str]


def _section(key: str, name: str, how: str, *parts: str) -> Section:
    about = f'<p class="how">{how}</p>' if how else ""
    body = "\n".join(part for part in parts if part)
    head = f'<h2 id="h-{key}">{escape(name)}</h2>'
    text = f'<section aria-labelledby="h-{key}" id="{key}">\n{head}\n{about}\n{body}\n</section>'
    return key, name, text


def _outcome(report: StudyReport, data: _PageData) -> Section | None:
    if not _has_controls(report):
        return None
    known = [outcome for outcome in report.outcomes if outcome.is_known]
    how = (
        "Treated minus control, seed by seed: mean, 95&nbsp;% paired <i>t</i> interval (an arrow "
        f"where it is cut), and each seed as a small mark. {escape(report.about_tests)} Runs that "
        "did not finish are counted, never averaged."
    )
    name = "Outcome compared with the control"
    if not report.metrics:
        rows = [
            [o.arm.name, str(o.planned), ", ".join(f"{n} {state}" for state, n in o.states.items())]
            for o in known
        ]
        table = _table(
            "Arms without an outcome yet", ["arm", "seeds planned", "runs"], rows, ["runs"]
        )
        return _section("outcome", name, how, table)
    parts = [_choice("metric", "Metric", report.metrics)]
    for metric in report.metrics:
        own = of_metric(known, metric)
        if any(outcome.difference for outcome in own):
            data.add(f"outcome|{metric}", outcome_panel(own, metric))
        caption = f"Differences in {title(metric)} by arm"
        table = _table(caption, *outcome_table(own, without=["metric"]))
        parts.append(_when("metric", metric, table))
    parts.insert(1, _chart("outcome|{metric}", with_numbers=False))
    return _section("outcome", name, how, *parts)


def _has_controls(report: StudyReport) -> bool:
    """Whether any run has a control to be compared with, finished or not."""
    known = [outcome for outcome in report.outcomes if outcome.is_known]
    reasons = {state for outcome in known for state in outcome.states}
    return any(o.difference for o in known) or bool(reasons - {"without a control"})


def _fronts(report: StudyReport, data: _PageData) -> Section | None:
    if not report.fronts:
        return None
    how = (
        "Two tasks at a time: each run as a small dot, each arm as its mean with 95&nbsp;% "
        "intervals. A filled mark: no arm has a mean that is better in one task and no worse in "
        "the others. The numbers are those of the table."
    )
    several = len({front.task for front in report.fronts}) > 1
    names = {
        front.key: f"{front.task} {front.metric}" if several else front.metric
        for front in report.fronts
    }
    parts = [_choice("front", "Metric", names)]
    for front in report.fronts:
        shown = front.pairs[:MAX_PAIRS]
        charts = []
        for place, pair in enumerate(shown):
            key = f"front|{front.key}|{place}"
            data.add(key, front_panel(front, *pair), _front_numbers(front, pair))
            charts.append(_chart(key))
        of = f"The first {len(shown)} of {len(front.pairs)} pairs; the table has all tasks."
        note = f'<p class="muted">{of}</p>' if len(shown) < len(front.pairs) else ""
        parts.append(_when("front", front.key, _panels(charts), note, _front_table(front)))
    return _section("fronts", "Trade-off between the tasks", how, *parts)


def _front_numbers(front: Front, pair: tuple[int, int]) -> Columns:
    rows = [
        (mark.arm.name, seed, *(short(mark.values[task][k]) for task in pair))
        for mark in front.marks
        for k, seed in enumerate(mark.seeds)
    ]
    return columns_of(("arm", "seed", *(f"{front.metric} {front.names[k]}" for k in pair)), rows)


def _front_table(front: Front) -> str:
    tasks = [f"{front.metric} {name}" for name in front.names]
    rows = []
    for place, mark in enumerate(front.marks, 1):
        means = [_number(mean.mean, front.metric, mean.low, mean.high) for mean in mark.means]
        beaten = mark.beaten_by[:3]
        if len(mark.beaten_by) > 3:
            beaten.append(f"{len(mark.beaten_by) - 3} more")
        cells = [mark.arm.name, str(place), str(len(mark.seeds))]
        rows.append([*cells, *means, ", ".join(beaten) or "none"])
    heads = ["arm", "number", "runs", *tasks, "dominated by"]
    return _table(f"{front.metric} of each task by arm", heads, rows, words=["dominated by"])


def _trajectories(pictures: Mapping[str, bytes]) -> Section | None:
    if not pictures:
        return None
    how = (
        "Contours of each loss and of their mean; then each arm&rsquo;s trajectories from all "
        "starts, over the contours of the mean."
    )
    parts = []
    for name, content in pictures.items():
        links = "".join(f' <a href="{name}.{end}">{end.upper()}</a>' for end in ("png", "svg"))
        address = f"data:image/png;base64,{b64encode(content).decode()}"
        parts.append(
            f'<figure class="picture"><img alt="{name}: trajectories over the contours of the '
            f'losses" src="{address}"><figcaption>{name}:{links}</figcaption></figure>'
        )
    return _section("trajectories", "Trajectories", how, *parts)


def _alone(report: StudyReport) -> Section | None:
    if not report.alone:
        return None
    how = "Finished runs without a finished control: the mean, and the least to the greatest value."
    heads = ["arm", "runs", *report.metrics.values()]
    rows = alone_rows(report.alone, list(report.metrics))
    return _section("alone", "Not compared", how, _table("Arms not compared", heads, rows))


def _shares(report: StudyReport, data: _PageData) -> Section | None:
    if not report.shares:
        return None
    how = (
        f"{ABOUT_SHARES[:1].upper()}{ABOUT_SHARES[1:]}, seed by seed. Shares need not add up: two "
        "links that do the same have a share of zero each."
    )
    parts = []
    if not _has_controls(report):
        parts.append(_choice("metric", "Metric", report.metrics))
    for metric in report.metrics:
        own = of_metric(report.shares, metric)
        blocks = []
        for name in dict.fromkeys(outcome.arm.name for outcome in own):
            links = [outcome for outcome in own if outcome.arm.name == name]
            key = f"share|{metric}|{name}"
            if any(outcome.difference for outcome in links):
                data.add(key, outcome_panel(links, metric, lambda outcome: outcome.link))
            caption = f"Share of each link of {name} in {title(metric)}"
            table = _table(caption, *outcome_table(links, SHARED, ["metric", "arm"]))
            heading = f"<h3>{escape(name)}: {escape(title(metric))}</h3>"
            blocks += [heading, _chart(key, with_numbers=False), table]
        parts.append(_when("metric", metric, *blocks))
    return _section("shares", "Share of each link", how, *parts)


def _doses(report: StudyReport, data: _PageData) -> Section | None:
    if not report.doses or not report.metrics:
        return None
    how = (
        "Arms that differ in one number only: the difference to the control over that number, "
        "with 95&nbsp;% intervals."
    )
    for metric in report.metrics:
        own = of_metric(report.outcomes, metric)
        for place, doses in enumerate(report.doses):
            panel = dose_panel(doses, own, metric)
            arms = panel.data["arms"]
            assert isinstance(arms, dict)
            names = {"dose": "dose", "said": "difference", "interval": "95 % interval"}
            numbers = {name: arms[key] for key, name in names.items()}
            data.add(f"dose|{metric}|{place}", panel, numbers)
    charts = [_chart(f"dose|{{metric}}|{place}") for place in range(len(report.doses))]
    return _section("doses", "Dose and response", how, _panels(charts))


def _curves(report: StudyReport, data: _PageData) -> Section:
    name = "Learning curves"
    if not report.curves:
        return _section("curves", name, "", "<p>Nothing has been logged yet.</p>")
    how = (
        "Mean over seeds with its 95&nbsp;% interval; thin lines are single seeds, dashed red ones "
        "diverged and are not part of any mean. Lines that leave the scale are cut at its edge."
    )
    metrics = dict.fromkeys(curve.metric for curve in report.curves)
    most, control = 0, False
    for metric in metrics:
        found = curve_data(report, metric)
        most, control = max(most, len(found)), control or any(one.control for one in found)
        last = max(one.curve.steps[-1] for one in found)
        every = [curve for one in found for curve in one.both]
        shared = {by_log: curve_limits(every, by_log) for by_log in (False, True)}
        for place, one in enumerate(found):
            first = f"curve|{metric}|{place}|linear|shared"
            for by_log, scale in ((False, "linear"), (True, "log")):
                for own, whose in ((False, "shared"), (True, "own")):
                    limits = curve_limits(one.both, by_log) if own else shared[by_log]
                    key = f"curve|{metric}|{place}|{scale}|{whose}"
                    panel = curve_panel(one, limits, last, by_log)
                    data.add(key, panel, like=first if key != first else "")
    key = '<span><i></i>treated</span><span><i class="control"></i>control</span>'
    choices = [
        _choice("curve", "Metric", {metric: title(metric) for metric in metrics}),
        _checkbox("scale", "log", "linear", "log scale"),
        _checkbox("limits", "own", "shared", "a scale for each panel"),
        f'<p class="key">{key if control else "<span><i></i>mean</span>"}</p>',
    ]
    charts = [_chart(f"curve|{{curve}}|{place}|{{scale}}|{{limits}}") for place in range(most)]
    return _section("curves", name, how, _choices(*choices), _panels(charts))


def _effects(report: StudyReport, data: _PageData) -> Section | None:
    if report.conflicts and all(one.transform == "none" for one in report.maps):
        return None
    name = "Effect on the gradients"
    if not report.maps:
        text = "No effect was measured: effects_every=0, nothing ran yet, or no transform acted."
        return _section("effects", name, "", f"<p>{text}</p>")
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
            panel = effect_panel(one, measure, limits[measure])
            data.add(f"effect|{place}|{measure}", panel, numbers, name=TITLES[measure])
        found = norms.get((one.arm.name, one.transform))
        if found is not None:
            caption = "Gradient norms, all sites and measured steps"
            data.add(
                f"norms|{place}", norm_panel(found), name=f"{caption}: {norm_panel(found).title}"
            )
    slider = _slider("map", "Arm and transform", len(report.maps))
    measures = _choice("measure", "Measure", {key: TITLES[key] for key in MEASURES})
    charts = [_chart("effect|{map}|{measure}"), _chart("norms|{map}")]
    return _section("effects", name, how, slider, measures, *charts)


def _conflicts(report: StudyReport, data: _PageData) -> Section | None:
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
    lines = [_chart("weight|{conflict}"), _chart("decrease|{conflict}")]
    parts = [
        _conflict_overview(series),
        _slider("conflict", label, len(series)),
        _chart("conflict|{conflict}"),
        _text("pairs|{conflict}"),
        _text("weightless|{conflict}"),
        _panels(lines),
        _shown_table("tasks|{conflict}", "Tasks"),
        _text("about|{conflict}"),
        _shown_table(
            "others|{conflict}", "Updates of the other aggregators", "others-of|{conflict}"
        ),
    ]
    return _section("conflicts", "Conflict between the tasks", how, *parts)


def _add_conflict(data: _PageData, place: int, one: ConflictSeries, reach: float) -> None:
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
    tasks: Columns = {"task": means.tasks, "norm": _shorts(means.norms.tolist())}
    if len(means.weights):
        tasks["weight"] = _shorts(means.weights.tolist())
    tasks["decrease"] = _shorts(means.decrease.tolist())
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
    """A table of the other aggregators; those equal in all digits shown are one row."""
    equal: dict[str, list[str]] = {}
    rows: dict[str, list[object]] = {}
    tasks = one.means.tasks if len(one.means.tasks) <= 8 else []
    for name, (cosine, weights) in one.means.others.items():
        shown = _shorts(weights.tolist()) or [None] * len(tasks)
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
                pair_name(means.tasks, pair) if pair else MISSING,
                _plain(means.cosines[pair[1], pair[0]] if pair else None),
                *(_plain(single[key]) for key in ("norm_spread", "norm_to_mean")),
                lost_most(one, series),
            ]
        )
    words = ["sharpest pair", "most often lost"]
    table = _table("Conflict of each arm", [*heads, "most often lost"], rows, words)
    if len(sharpest(series)) == len(series):
        return table
    text = (
        "Of several groups the one with the sharpest conflict is shown; most often lost is of all."
    )
    return f'{table}<p class="how">{text}</p>'


def _updates(report: StudyReport) -> Section | None:
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
    table = _table("Effect on the updates", ["arm", "steps", *NUMBERS.values()], rows, ["sampled"])
    return _section("updates", "Effect on the updates", how, table)


def _costs(report: StudyReport, data: _PageData) -> Section:
    how = (
        "Time of a step whose effect is not measured divided by the control's, which mostly has no "
        "hooks at such a step: the median over pairs of runs and their range. Runs that shared "
        "their machine with other work are slower than necessary."
    )
    label = "Time and hardware"
    effort = f'<ul class="cautions" id="effort" aria-label="{label}">{_items(report.effort)}</ul>'
    if not report.costs:
        text = "<p>No pair of runs with step times yet.</p>"
        return _section("cost", "Cost", how, text, effort)
    data.add("cost", cost_panel(report.costs))
    rows = []
    for cost in report.costs:
        low, high = min(cost.ratios), max(cost.ratios)
        measured = MISSING if cost.measured_ms is None else f"{_plain(cost.measured_ms)} ms"
        row = [cost.arm.name, str(len(cost.ratios))]
        row += [f"{_plain(ms)} ms" for ms in (cost.treated_ms, cost.control_ms)]
        row += [f"{_plain(median(cost.ratios))}×"]  # noqa: RUF001 - the sign of multiplication
        row += [
            f"{_plain(low)} to {_plain(high)}" if len(cost.ratios) > 1 else "one pair",
            measured,
        ]
        rows.append(row)
    heads = ["arm", "pairs", "step", "control's", "ratio", "range", "measured step"]
    table = _table("Step times", heads, rows)
    return _section("cost", "Cost", how, _chart("cost", with_numbers=False), table, effort)


def _runs(report: StudyReport) -> Section:
    metrics = list(report.metrics.items())[:4]
    heads = {"run": "", "arm": "", "seed": "num", "state": "", "steps": "num"}
    heads |= {name: "num" for _, name in metrics} | {"step, ms": "num"}
    places = {arm.name: place for place, arm in enumerate(report.arms)}
    rows = [
        _run_row(run, arm.name, places[arm.name], [key for key, _ in metrics])
        for arm in report.arms
        for run in arm.runs
    ]
    sorters = "".join(
        f'<th scope="col" class="{cls}"><button type="button">{escape(name)}</button></th>'
        for name, cls in heads.items()
    )
    states = {state: state for state in report.states}
    arms = {str(place): name for name, place in places.items()}
    choices = _choices(
        '<label class="line" for="find">Find <input type="search" id="find" '
        'placeholder="name, arm, reason, config"></label>',
        _select("by-state", "State", {"": "all states", **states}),
        _select("by-arm", "Arm", {"": "all arms", **arms}),
    )
    table = _scroll(
        "Table of runs",
        f'<table><thead><tr>{sorters}<th scope="col">config</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>",
    )
    shown = f'<p class="muted" role="status" id="shown">{len(rows)} of {len(rows)} runs</p>'
    return _section("runs", "Runs", "", choices, shown, table)


def _run_row(run: LoadedRun, arm: str, place: int, metrics: Sequence[str]) -> str:
    summary = run.summary or {}
    reason = "; ".join(part for part in (run.reason, *(summary.get("notes") or [])) if part)
    about = f'<span class="reason">{escape(reason)}</span>' if reason else ""
    done = f"{run.done}" if run.done == run.steps else f"{run.done} of {run.steps}"
    name = escape(run.name)
    cells = [
        f'<th scope="row">{name}</th><td>{escape(arm)}</td>',
        _sortable(run.seed if run.seed >= 0 else None, str(run.seed)),
        f'<td><span class="state {run.state}">{run.state}</span>{about}</td>',
        _sortable(run.done, done),
    ]
    for key in metrics:
        number = _float(summary.get(key))
        cells.append(_sortable(number, value(key, number) if number is not None else ""))
    step_ms = _float(summary.get("time/step_ms"))
    cells.append(_sortable(step_ms, _plain(step_ms)))
    links = (
        f'<a href="../{name}/{CONFIG_FILE}" aria-label="{CONFIG_FILE} of {name}">{CONFIG_FILE}</a>'
        f'<button type="button" aria-label="Show the config of {name}">Show</button>'
    )
    cells.append(f'<td class="links">{links if run.config else MISSING}</td>')
    facts = f'data-run="{name}" data-state="{run.state}" data-arm="{place}"'
    return f"<tr {facts}>{''.join(cells)}</tr>"


# Parts of a section ------------------------------------------------------------------------------


def _chart(key: str, with_numbers: bool = True) -> str:
    """Return a place for a chart and its table, both filled by the script.

    In `key` a name in braces stands for what is chosen in the input of that name.
    """
    key = escape(key)
    numbers = (
        f'<details class="numbers" data-of="{key}"><summary>The same as numbers</summary>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart"></div>'
        "</details>"
    )
    return (
        f'<figure><figcaption></figcaption><div class="chart" role="img" aria-label="chart" '
        f'data-chart="{key}"></div>{numbers if with_numbers else ""}</figure>'
    )


def _panels(charts: Iterable[str]) -> str:
    return f'<div class="panels">{"".join(charts)}</div>'


def _when(name: str, choice: str, *parts: str) -> str:
    """Parts that are shown while `choice` is chosen in the inputs of that name."""
    body = "\n".join(part for part in parts if part)
    return f'<div data-when="{name}" data-is="{escape(choice)}">{body}</div>'


def _text(key: str) -> str:
    return f'<p class="how" data-text="{escape(key)}"></p>'


def _shown_table(key: str, caption: str, text: str = "") -> str:
    """A table that the script fills."""
    about = f"<h3>{escape(caption)}</h3>{_text(text)}" if text else ""
    scroll = _scroll(caption, "")
    return f'<div data-table="{escape(key)}">{about}{scroll}</div>'


def _choice(name: str, legend: str, options: Mapping[str, str]) -> str:
    """Radio buttons, or a drop-down list for many options."""
    if len(options) > MAX_RADIOS:
        return _choices(_select(name, legend, options, f'name="{name}" data-choice'))
    radios = [
        f'<label><input type="radio" name="{name}" value="{escape(key)}" data-choice'
        f"{'' if place else ' checked'}><span>{escape(label)}</span></label>"
        for place, (key, label) in enumerate(options.items())
    ]
    return _choices(f"<fieldset><legend>{legend}</legend>{''.join(radios)}</fieldset>")


def _select(key: str, label: str, options: Mapping[str, str], more: str = "") -> str:
    items = [f'<option value="{escape(k)}">{escape(text)}</option>' for k, text in options.items()]
    select = f'<select id="{key}" {more}>{"".join(items)}</select>'
    return f'<label class="line" for="{key}">{label} {select}</label>'


def _checkbox(name: str, on: str, off: str, label: str) -> str:
    box = f'<input type="checkbox" id="{name}" name="{name}" value="{on}"'
    return f'<label class="line">{box} data-off="{off}" data-choice>{label}</label>'


def _slider(name: str, label: str, number: int) -> str:
    """A slider over places, and the name of the chosen one."""
    return (
        f'<div class="slider"><label for="{name}">{label}</label><input type="range" id="{name}" '
        f'name="{name}" min="0" max="{number - 1}" step="1" value="0" data-choice '
        f'data-names="{name}-name"><output id="{name}-name" for="{name}" '
        f'data-text="{name}|{{{name}}}"></output></div>'
    )


def _choices(*inputs: str) -> str:
    return f'<div class="choices">{"".join(inputs)}</div>'


def _table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()
) -> str:
    """A table with numbers to the right; a second line of a cell is an interval."""
    text = {"arm", "link", "95 % interval", "BCa bootstrap", "reading", "not compared", "range"}
    classes = ["" if head in text or head in words else "num" for head in heads]
    top = "".join(
        f'<th scope="col" class="{cls}">{escape(head)}</th>'
        for head, cls in zip(heads, classes, strict=True)
    )
    body = []
    for first, *cells in rows:
        line = [f'<th scope="row">{escape(first)}</th>']
        for cell, cls in zip(cells, classes[1:], strict=True):
            shown, _, between = (cell or MISSING).partition("\n")
            more = f'<span class="between">{escape(between)}</span>' if between else ""
            line.append(f'<td class="{cls}">{escape(shown)}{more}</td>')
        body.append(f"<tr>{''.join(line)}</tr>")
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return _scroll(caption, table)


def _scroll(label: str, body: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'
    )


def _sortable(number: float | None, text: str) -> str:
    """A cell with a number to sort by; a missing one sorts last."""
    sort = "" if number is None or number != number else f"{number!r}"
    return f'<td class="num" data-value="{sort}">{escape(text) if sort else MISSING}</td>'


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _states(report: StudyReport) -> str:
    shown = [
        f'<li class="state {state}"><b>{number}</b> {state}</li>'
        for state, number in report.states.items()
    ]
    runs = f"<li><b>{len(report.runs)}</b> {count(len(report.runs), 'run').split()[1]}</li>"
    return runs + "".join(shown)


def _number(mean: float, metric: str, low: float | None, high: float | None) -> str:
    def show(number: float) -> str:
        return value(metric, number) if is_share(metric) else _plain(number)

    between = "" if low is None or high is None else f"\n{show(low)} to {show(high)}"
    return f"{show(mean)}{between}"


def _plain(number: float | None) -> str:
    return MISSING if number is None or number != number else f"{number:.3g}"


def _shorts(numbers: Sequence[float]) -> list[float | None]:
    return [short(number, 3) for number in numbers]


def _short(limit: object) -> object:
    return short(limit, 6) if isinstance(limit, float) else limit


def _float(item: object) -> float | None:
    return float(item) if isinstance(item, int | float) else None


def _config(run: LoadedRun) -> str:
    return read_text(run.path / CONFIG_FILE) if run.config else ""
