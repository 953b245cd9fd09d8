"""The page of a study: one HTML file with charts, tables, style and scripts; nothing is fetched."""

import json
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import escape
from importlib.metadata import version as version_of
from pathlib import Path
from statistics import median
from string import Template
from types import MappingProxyType

from gradsurg.report import elements
from gradsurg.report.answer import SHARED, alone_rows, outcome_table, short_verdict
from gradsurg.report.charts import (
    Columns,
    columns_of,
    short,
)
from gradsurg.report.compare import ABOUT_SHARES
from gradsurg.report.load import Arm, LoadedRun
from gradsurg.report.outcome_charts import (
    MAX_PAIRS,
    cost_panel,
    dose_groups,
    dose_panel,
    front_panel,
    of_metric,
    outcome_panel,
    reached_panel,
)
from gradsurg.report.pareto import Front
from gradsurg.report.study import StudyReport
from gradsurg.report.training_sections import (
    conflicts_section,
    curves_section,
    effects_section,
    updates_section,
)
from gradsurg.report.tuning import tuning_panels, tuning_rows
from gradsurg.report.wording import count, is_share, title, unbroken, value
from gradsurg.training.run_directory import CONFIG as CONFIG_FILE

PARTS = Path(__file__).parent / "page"
EMPTY: Mapping[str, bytes] = MappingProxyType({})


def page(
    report: StudyReport, refresh: float | None = None, pictures: Mapping[str, bytes] = EMPTY
) -> str:
    """Return the page as HTML; with `refresh` it reloads itself every so many seconds.

    `pictures` are PNG files to show, by their names in the page's folder.
    """
    data = elements.PageData(report)
    sections = [
        _outcome(report, data),
        _reached(report, data),
        _tuning(report, data),
        _fronts(report, data),
        _trajectories(pictures),
        _alone(report),
        _shares(report, data),
        _doses(report, data),
        curves_section(report, data),
        effects_section(report, data),
        conflicts_section(report, data),
        updates_section(report),
        _costs(report, data),
        _runs(report),
    ]
    shown = [section for section in sections if section]
    content = {**data.json(), "refresh": refresh}
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(
        study=escape(report.folder.name),
        experiment="".join(
            f"<dt>{escape(name)}</dt><dd>{_code(name, text)}</dd>"
            for name, text in report.experiment
        ),
        failures="".join(map(_failure, report.arms)),
        verdict=escape(unbroken(short_verdict(report.outcomes, report.arms) or report.answer)),
        answer=escape(unbroken(report.answer)),
        cautions=elements.items(report.cautions),
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


def _failure(arm: Arm) -> str:
    """The failed runs of an arm with the reason of the first, and the first NaN or infinity that a
    transform made; empty without any.
    """
    of = f"of {count(len(arm.runs), 'run')} of {arm.name}"
    failed = [run.reason for run in arm.runs if run.state == "failed"]
    made = [(run.seed, one) for run in arm.runs if (one := (run.summary or {}).get("nonfinite"))]
    texts = [f"{len(failed)} {of} failed: {failed[0]}"] if failed else []
    if made:
        seed, one = made[0]
        texts.append(
            f"{len(made)} {of} diverged after {one['transform']} had returned NaN or infinity for "
            f"a finite gradient; seed {seed} at site '{one['site']}', step {one['step']}."
        )
    return "".join(f'<p class="answer state failed">{escape(text)}</p>' for text in texts)


def _code(name: str, text: str) -> str:
    is_command = name == "command" and text.startswith("python")
    return f"<code>{escape(text)}</code>" if is_command else escape(text)


def _library() -> str:
    """Vega, Vega-Lite and vega-embed as one script.

    Bundling takes seconds, so the script is stored in the folder of the byte code, if that can be
    written.
    """
    version = version_of("vl-convert-python")
    file = Path(__file__).parent / "__pycache__" / f"vega-{version}.js"
    with suppress(OSError):
        return file.read_text(encoding="utf-8")
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # its names are its own, and nothing in it ends the script
    script = "(() => {" + script.replace("</script", "<\\/script") + "})();"
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(script, encoding="utf-8")
        draft.replace(file)
    return script


def _outcome(report: StudyReport, data: elements.PageData) -> elements.Section | None:
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
        table = elements.table(
            "Arms without an outcome yet", ["arm", "seeds planned", "runs"], rows, ["runs"]
        )
        return elements.section("outcome", name, how, table)
    parts = [elements.choice("metric", "Metric", report.metrics)]
    for metric in report.metrics:
        outcomes = of_metric(known, metric)
        if any(outcome.difference for outcome in outcomes):
            data.add(f"outcome|{metric}", outcome_panel(outcomes, metric))
        caption = f"Differences in {title(metric)} by arm"
        table = elements.table(caption, *outcome_table(outcomes, without=["metric"]))
        parts.append(elements.shown_when("metric", metric, table))
    parts.insert(1, elements.chart("outcome|{metric}", with_numbers=False))
    return elements.section("outcome", name, how, *parts)


def _has_controls(report: StudyReport) -> bool:
    """Whether any run has a control to be compared with, finished or not."""
    known = [outcome for outcome in report.outcomes if outcome.is_known]
    reasons = {state for outcome in known for state in outcome.states}
    return any(o.difference for o in known) or bool(reasons - {"without a control"})


def _fronts(report: StudyReport, data: elements.PageData) -> elements.Section | None:
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
    parts = [elements.choice("front", "Metric", names)]
    for front in report.fronts:
        shown = front.pairs[:MAX_PAIRS]
        charts = []
        for place, pair in enumerate(shown):
            key = f"front|{front.key}|{place}"
            data.add(key, front_panel(front, *pair), _front_numbers(front, pair))
            charts.append(elements.chart(key))
        of = f"The first {len(shown)} of {len(front.pairs)} pairs; the table has all tasks."
        note = f'<p class="muted">{of}</p>' if len(shown) < len(front.pairs) else ""
        parts.append(
            elements.shown_when(
                "front", front.key, elements.panels(charts), note, _front_table(front)
            )
        )
    return elements.section("fronts", "Trade-off between the tasks", how, *parts)


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
    return elements.table(
        f"{front.metric} of each task by arm", heads, rows, words=["dominated by"]
    )


def _trajectories(pictures: Mapping[str, bytes]) -> elements.Section | None:
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
    return elements.section("trajectories", "Trajectories", how, *parts)


def _alone(report: StudyReport) -> elements.Section | None:
    if not report.alone:
        return None
    how = "Finished runs without a finished control: the mean, and the least to the greatest value."
    heads = ["arm", "runs", *report.metrics.values()]
    rows = alone_rows(report.alone, list(report.metrics))
    return elements.section(
        "alone", "Not compared", how, elements.table("Arms not compared", heads, rows)
    )


def _reached(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    panel = reached_panel(report.arms)
    if panel is None:
        return None
    data.add("reached", panel)
    how = "The share of seeds that have reached the stopping condition, over the steps."
    return elements.section("reached", "Steps to the target", how, elements.chart("reached"))


def _tuning(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    if not report.tunings:
        return None
    how = (
        "Each arm chose its values on validation data, with seeds that are not compared: a dot is "
        "a seed, the line their mean, a ring the chosen value, a cross a value with which seeds "
        "diverged. With several keys, a chart shows the points with the chosen values of the "
        "others."
    )
    charts = []
    for place, panel in enumerate(tuning_panels(report.tunings)):
        data.add(f"tuning|{place}", panel)
        charts.append(elements.chart(f"tuning|{place}"))
    heads, rows = tuning_rows(report.tunings)
    table = elements.table("Chosen values", heads, rows, words=["chosen", "remarks"])
    return elements.section("tuning", "Tuning", how, elements.panels(charts), table)


def _shares(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    if not report.shares:
        return None
    how = (
        f"{ABOUT_SHARES[:1].upper()}{ABOUT_SHARES[1:]}, seed by seed. Shares need not add up: two "
        "links that do the same have a share of zero each."
    )
    parts = []
    if not _has_controls(report):
        parts.append(elements.choice("metric", "Metric", report.metrics))
    for metric in report.metrics:
        outcomes = of_metric(report.shares, metric)
        blocks = []
        for name in dict.fromkeys(outcome.arm.name for outcome in outcomes):
            links = [outcome for outcome in outcomes if outcome.arm.name == name]
            key = f"share|{metric}|{name}"
            if any(outcome.difference for outcome in links):
                data.add(key, outcome_panel(links, metric, lambda outcome: outcome.link))
            caption = f"Share of each link of {name} in {title(metric)}"
            table = elements.table(caption, *outcome_table(links, SHARED, ["metric", "arm"]))
            heading = f"<h3>{escape(name)}: {escape(title(metric))}</h3>"
            blocks += [heading, elements.chart(key, with_numbers=False), table]
        parts.append(elements.shown_when("metric", metric, *blocks))
    return elements.section("shares", "Share of each link", how, *parts)


def _doses(report: StudyReport, data: elements.PageData) -> elements.Section | None:
    if not report.doses or not report.metrics:
        return None
    how = (
        "Arms that differ in one number only: the difference to the control over that number, "
        "with 95&nbsp;% intervals."
    )
    groups = dose_groups(report.doses)
    for metric in report.metrics:
        outcomes = of_metric(report.outcomes, metric)
        for place, group in enumerate(groups):
            panel = dose_panel(group, outcomes, metric)
            arms = panel.data["arms"]
            assert isinstance(arms, dict)
            names = {"arm": "arm", "said": "difference", "interval": "95 % interval"}
            numbers = {name: arms[key] for key, name in names.items()}
            data.add(f"dose|{metric}|{place}", panel, numbers)
    charts = [elements.chart(f"dose|{{metric}}|{place}") for place in range(len(groups))]
    return elements.section("doses", "Dose and response", how, elements.panels(charts))


def _costs(report: StudyReport, data: elements.PageData) -> elements.Section:
    how = (
        "Step time divided by that of the plain control, of steps that measure no effect if there "
        "are such: the median over pairs of runs and their range. Runs that shared "
        "their machine with other work are slower than necessary."
    )
    lines, label = elements.items(report.effort), "Time and hardware"
    effort = f'<ul class="cautions" id="effort" aria-label="{label}">{lines}</ul>'
    if not report.costs:
        text = "<p>No pair of a treated and a plain run with step times.</p>"
        return elements.section("cost", "Cost", how, text, effort)
    data.add("cost", cost_panel(report.costs))
    rows = []
    for cost in report.costs:
        low, high = min(cost.ratios), max(cost.ratios)
        measured = (
            elements.MISSING
            if cost.measured_ms is None
            else f"{elements.number_text(cost.measured_ms)} ms"
        )
        row = [cost.arm.name, str(len(cost.ratios))]
        row += [f"{elements.number_text(ms)} ms" for ms in (cost.treated_ms, cost.control_ms)]
        row += [f"{elements.number_text(median(cost.ratios))}×"]  # noqa: RUF001 - the sign of multiplication
        row += [
            f"{elements.number_text(low)} to {elements.number_text(high)}"
            if len(cost.ratios) > 1
            else "one pair",
            measured,
        ]
        rows.append(row)
    heads = ["arm", "pairs", "step", "control's", "ratio", "range", "measured step"]
    table = elements.table("Step times", heads, rows)
    return elements.section(
        "cost", "Cost", how, elements.chart("cost", with_numbers=False), table, effort
    )


def _runs(report: StudyReport) -> elements.Section:
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
    choices = elements.choices(
        '<label class="line" for="find">Find <input type="search" id="find" '
        'placeholder="name, arm, reason, config"></label>',
        elements.select("by-state", "State", {"": "all states", **states}),
        elements.select("by-arm", "Arm", {"": "all arms", **arms}),
    )
    table = elements.scroll(
        "Table of runs",
        f'<table><thead><tr>{sorters}<th scope="col">config</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>",
    )
    shown = f'<p class="muted" role="status" id="shown">{len(rows)} of {len(rows)} runs</p>'
    return elements.section("runs", "Runs", "", choices, shown, table)


def _run_row(run: LoadedRun, arm: str, place: int, metrics: Sequence[str]) -> str:
    summary = run.summary or {}
    about = f'<span class="reason">{escape(run.reason)}</span>' if run.reason else ""
    if notes := "; ".join(summary.get("notes") or []):
        about += f'<details class="reason"><summary>note</summary>{escape(notes)}</details>'
    done = f"{run.done}" if run.done == run.steps else f"{run.done} of {run.steps}"
    name = escape(run.name)
    cells = [
        f'<th scope="row">{name}</th><td>{escape(arm)}</td>',
        elements.sortable(run.seed if run.seed >= 0 else None, str(run.seed)),
        f'<td><span class="state {run.state}">{run.state}</span>{about}</td>',
        elements.sortable(run.done, done),
    ]
    for key in metrics:
        number = _float(summary.get(key))
        cells.append(elements.sortable(number, value(key, number) if number is not None else ""))
    step_ms = _float(summary.get("time/step_ms"))
    cells.append(elements.sortable(step_ms, elements.number_text(step_ms)))
    links = (
        f'<a href="../{name}/{CONFIG_FILE}" aria-label="{CONFIG_FILE} of {name}">{CONFIG_FILE}</a>'
        f'<button type="button" aria-label="Show the config of {name}">Show</button>'
    )
    cells.append(f'<td class="links">{links if run.config else elements.MISSING}</td>')
    facts = f'data-run="{name}" data-state="{run.state}" data-arm="{place}"'
    return f"<tr {facts}>{''.join(cells)}</tr>"


def _states(report: StudyReport) -> str:
    shown = [
        f'<li class="state {state}"><b>{number}</b> {state}</li>'
        for state, number in report.states.items()
    ]
    runs = f"<li><b>{len(report.runs)}</b> {count(len(report.runs), 'run').split()[1]}</li>"
    return runs + "".join(shown)


def _number(mean: float, metric: str, low: float | None, high: float | None) -> str:
    def show(number: float) -> str:
        return value(metric, number) if is_share(metric) else elements.number_text(number)

    between = "" if low is None or high is None else f"\n{show(low)} to {show(high)}"
    return f"{show(mean)}{between}"


def _float(item: object) -> float | None:
    return float(item) if isinstance(item, int | float) else None
