"""Figures and a LaTeX table of a study for a paper, in the widths of one and of two columns."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev

from gradsurg.report.charts import CONFIG, Panel, Spec
from gradsurg.report.compare import Outcome, arms_named
from gradsurg.report.figures import Figure, figure_spec
from gradsurg.report.load import Arm
from gradsurg.report.outcome_charts import dose_groups, dose_panel, of_metric, outcome_panel
from gradsurg.report.study import StudyReport
from gradsurg.report.training_charts import effect_limits, effect_panel, overlay_panel
from gradsurg.report.wording import is_share, p_text, title
from gradsurg.stats import paired_difference

WIDTHS = (3.3, 6.8)
"""Inches: one column, and both, of a page in two columns."""
STYLES = {
    "sans": "Arial, Liberation Sans, Helvetica, sans-serif",
    "serif": "Times New Roman, Liberation Serif, Times, serif",
}
POINTS, DPI, FONT, BAR = 72, 300, 8, 110
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "·": r"$\cdot$",
        "-": "{-}",
    }
)


def write_paper(
    report: StudyReport,
    folder: Path,
    metric: str = "",
    arms: Sequence[str] = (),
    style: str = "sans",
    spread: str = "interval",
) -> list[Path]:
    """Write each figure in both widths as PDF, SVG and PNG, and a table for each metric; return the
    files.

    `arms` are names of arms, drawn with their controls; without any all are. Raises LookupError for
    a metric or an arm that the study does not have.
    """
    import vl_convert

    shown = _of_arms(report, arms)
    metric = _metric(report, metric)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panel in _panels(shown, metric).items():
        for width in WIDTHS:
            svg = vl_convert.vegalite_to_svg(_sized(panel, width, STYLES[style]))
            stem = folder / f"{name}-{width}in"
            paths = [stem.with_name(f"{stem.name}.{end}") for end in ("pdf", "svg", "png")]
            paths[0].write_bytes(vl_convert.svg_to_pdf(svg))
            paths[1].write_text(_in_inches(svg, width), encoding="utf-8")
            paths[2].write_bytes(vl_convert.svg_to_png(svg, scale=1, ppi=DPI))
            written += paths
    for place, key in enumerate([metric] if metric else list(shown.metrics) or [""]):
        table = folder / (f"table-{_label(key)}.tex" if place else "table.tex")
        table.write_text(latex(shown, key, spread, numbered=place > 0), encoding="utf-8")
        written.append(table)
    return written


def _metric(report: StudyReport, name: str) -> str:
    """The key of a metric that is named by its key or its title; the first one without a name."""
    keys = list(dict.fromkeys([*report.metrics, *(curve.metric for curve in report.curves)]))
    if not name:
        return ""
    for key in keys:
        if name in (key, title(key)):
            return key
    raise LookupError(f"no metric is named {name!r}; the metrics are: {', '.join(keys)}")


def _of_arms(report: StudyReport, names: Sequence[str]) -> StudyReport:
    """The report of some arms and their controls."""
    if not names:
        return report
    chosen = arms_named(report.arms, names)
    beside = {control for arm in chosen for run in arm.runs for control in run.controls.values()}
    beside |= {run.control for arm in chosen for run in arm.runs if run.control}
    arms = [arm for arm in report.arms if arm in chosen or {run.name for run in arm.runs} & beside]
    kept = {arm.name for arm in arms}
    return replace(
        report,
        arms=arms,
        outcomes=[one for one in report.outcomes if one.arm.name in kept],
        curves=[one for one in report.curves if one.arm.name in kept],
        maps=[one for one in report.maps if one.arm.name in kept],
        doses=[one for one in report.doses if all(arm.name in kept for arm in one.arms)],
    )


def _panels(report: StudyReport, metric: str) -> dict[str, Panel]:
    """The figures that have data, by the stem of their files."""
    first = metric or next(iter(report.metrics), "")
    outcomes = [one for one in of_metric(report.outcomes, first) if one.difference]
    panels = {}
    if outcomes:
        panels["outcome"] = outcome_panel(outcomes, first)
    logged = {curve.metric: None for curve in report.curves}
    if logged:
        curve = metric if metric in logged else next(iter(logged))
        panels["curves"] = overlay_panel(report, curve)
    for place, group in enumerate(dose_groups(report.doses), 1):
        panels["doses" if place == 1 else f"doses-{place}"] = dose_panel(group, outcomes, first)
    maps = [one for one in report.maps if one.transform != "none"]
    for place, one in enumerate(maps, 1):
        limits = effect_limits(maps, "cosine")
        panels["effects" if place == 1 else f"effects-{place}"] = effect_panel(
            one, "cosine", limits
        )
    return panels


def _sized(panel: Panel, width: float, font: str) -> Spec:
    """A specification that is `width` inches wide with all its labels; a pixel is a point."""
    spec = figure_spec(Figure("", [replace(panel, title="")], 1))
    (view,) = spec.pop("concat")
    text = {"labelFontSize": FONT, "titleFontSize": FONT, "labelLimit": 0, "titleLimit": 0}
    legend = {**CONFIG["legend"], **text, "symbolSize": 40, "columnPadding": 6}
    config = {
        **CONFIG,
        "font": font,
        "axis": {**CONFIG["axis"], **text, "labelPadding": 3},
        "legend": legend,
    }
    if width == min(WIDTHS):  # a long title in the middle of the axis would leave the figure
        config["axisX"] = {"titleAnchor": "end"}
    if colour := view.get("encoding", {}).get("color"):  # the colour bar fits a column
        legend_of_map = {**colour["legend"], "gradientLength": BAR}
        view["encoding"] = {**view["encoding"], "color": {**colour, "legend": legend_of_map}}
    height = min(max(panel.height, 60), 200)
    for key in ("columns", "spacing", "resolve", "title"):
        spec.pop(key, None)
    sizes = {"width": width * POINTS, "height": height, "padding": 2}
    fit = {"type": "fit-x", "contains": "padding"}
    view.pop("title")
    return {**spec, **view, **sizes, "autosize": fit, "config": config}


def _in_inches(svg: str, width: float) -> str:
    """An SVG whose width is given in inches."""
    head, mark, rest = svg.partition(">")
    words = head.split(" ")
    height = next(word for word in words if word.startswith("height=")).split('"')[1]
    inches = f"{float(height) / POINTS:.4g}in"
    replaced = {"width": f'width="{width}in"', "height": f'height="{inches}"'}
    return " ".join(replaced.get(word.partition("=")[0], word) for word in words) + mark + rest


def latex(
    report: StudyReport, metric: str = "", spread: str = "interval", numbered: bool = False
) -> str:
    """Return a table of one metric for a paper, a row for each arm; it needs the package booktabs.

    The mean with its 95 % interval, or with the standard deviation over seeds, and the difference
    to the control, with its interval and p or q. The first metric of the study by default; its
    label is that of the study, and with `numbered` that of the study and the metric.
    """
    key = metric or next(iter(report.metrics), "")
    arms = [arm for arm in report.arms if arm.whole]
    beside = {one.arm.name: one for one in of_metric(report.outcomes, key) if one.difference}
    kind = "q" if any(one.q_value is not None for one in beside.values()) else "p"
    heads = ["arm", "$n$", f"{_tex(title(key))}{_unit(key)}"]
    heads += [f"difference{_unit(key, 'pp')}", f"${kind}$"] if beside else []
    rows = []
    for arm in arms:
        cells = [_tex(arm.name), str(len(arm.whole)), _mean(arm, key, spread)]
        rows.append([*cells, *(_difference(beside.get(arm.name)) if beside else ())])
    about = f"{_tex(title(key))}, mean over seeds with " + (
        "its 95\\,\\% interval" if spread == "interval" else "the standard deviation over seeds"
    )
    if beside:
        about += (
            "; difference to the control, paired by seed, with its "
            f"95\\,\\% $t$ interval; ${kind}$ of the sign-flip test"
        )
    label = f"{report.folder.name}-{key}" if numbered else report.folder.name
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{_tex(report.folder.name)}: {about}.}}",
        rf"\label{{tab:{_label(label)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        " & ".join(heads) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    return text.translate(LATEX)


def _label(name: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in name)


def _unit(key: str, unit: str = r"\%") -> str:
    return f" ({unit})" if is_share(key) else ""


def _mean(arm: Arm, key: str, spread: str) -> str:
    values = [run.summary[key] for run in arm.whole if run.summary and key in run.summary]
    if not values:
        return "--"
    mean = paired_difference(values, [0.0] * len(values))
    if spread == "sd":
        around = rf" \pm {_number(key, stdev(values))}" if len(values) > 1 else ""
        return f"${_number(key, mean.mean)}{around}$"
    return _with_ends(key, mean.mean, mean.low, mean.high)


def _difference(outcome: Outcome | None) -> list[str]:
    if outcome is None or outcome.difference is None:
        return ["--", "--"]
    one, key = outcome.difference, outcome.metric
    p_value = p_text(outcome.p_value if outcome.q_value is None else outcome.q_value)
    return [_with_ends(key, one.mean, one.low, one.high, "+"), f"${p_value}$" if p_value else "--"]


def _with_ends(key: str, mean: float, low: float | None, high: float | None, sign: str = "") -> str:
    text = _number(key, mean, sign)
    if low is None or high is None:
        return f"${text}$"
    return f"${text}$ [${_number(key, low, sign)}$, ${_number(key, high, sign)}$]"


def _number(key: str, number: float, sign: str = "") -> str:
    """A number in math mode, where a hyphen is a minus."""
    if is_share(key):
        return f"{100 * number:{sign}.2f}"
    digits, _, power = f"{number:{sign}#.3g}".partition("e")
    digits = digits.removesuffix(".")
    return rf"{digits} \cdot 10^{{{int(power)}}}" if power else digits
