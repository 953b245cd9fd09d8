"""The page of a study: one HTML file with charts, tables, style and scripts; nothing is fetched."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import chain
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

import jinja2
import polars as pl

from gradsurg.report import charts, tables
from gradsurg.report.arms import Arm, value_text
from gradsurg.report.measures import costs, link_shares, times_to_target
from gradsurg.report.study import Study
from gradsurg.report.sweeps import best_arms, doses
from gradsurg.report.tuning import HEADS, read_tunings, tuning_frames
from gradsurg.report.verdict import Row, rows_of
from gradsurg.report.wording import count, digits, is_share, title

PARTS = Path(__file__).parent / "page"
MAX_CURVES = 24  # arms with learning curves, with a map of effects, and with doses
MAX_ROWS = 100  # of a table
STEP_MS = "time/step_ms"
MAX_RUN_METRICS = 3  # columns of the table of runs
SAME = "The same as numbers"
DARK = dict(zip(charts.LIGHT, charts.DARK, strict=True))
DETAILS = ("arm", "metric", "median", "t interval", "effect size")
OF_METRIC = ["arm", *(head for head in tables.COLUMNS if head not in (*DETAILS, "link", "block"))]
OF_LINK = ["link", *OF_METRIC[1:]]
OF_BLOCK = ("arm", "metric", "block", "difference", tables.INTERVAL, "treated", "control", "n")
WIDE_ONLY = {"higher", "treated", "control", "with it", "without it", "n"}
"""Heads of columns that a narrow window leaves out."""
NUMBER = re.compile(r"[-+\u2212]?\d(?!.*, )|< 0")  # no list of numbers
FOREST = (
    "Treated minus control, paired by seed: the mean, the 95 % interval that inverts the exact "
    "sign-flip test (dashed: too few seeds for a test, the range instead), and each seed as a "
    "small mark. Filled: a clear difference. Runs that did not finish are counted, never averaged. "
    "The verdict is that of p, and of q where there are several arms; median, t interval and "
    "effect size (the mean over the standard deviation) are details."
)


@dataclass(frozen=True)
class Mark:
    """An estimate with its interval and its seeds, in per cent of the width of the plot."""

    middle: float
    ends: tuple[float, float] | None
    seeds: Sequence[float]
    look: str  # classes: clear, range


@dataclass(frozen=True)
class Forest:
    """The marks of the rows of a table, None for a row without a number, and the axis of all.

    It is drawn before the column `head`.
    """

    head: str
    marks: Sequence[Mark | None]
    ticks: Sequence[tuple[float, str]]
    zero: float


@dataclass(frozen=True)
class Table:
    """A table of texts with its caption, a column of it drawn; it is folded unless `is_open`."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_open: bool = False
    forest: Forest | None = None

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The heads with classes: `num` for a column of numbers, which are aligned to the right,
        `more` for one that a narrow window leaves out."""
        columns = [
            [cell for cell in cells if cell not in ("", "-")]
            for cells in zip(*self.rows, strict=True)
        ] or [[] for _ in self.heads]
        return [
            (head, f"{'num' if is_number else ''} {'more' if head in WIDE_ONLY else ''}".strip())
            for head, cells in zip(self.heads, columns, strict=True)
            for is_number in [head not in tables.WORDS and cells and all(map(NUMBER.match, cells))]
        ]


@dataclass(frozen=True)
class Section:
    """A section of the page: how to read it, its charts, tables, and names with texts."""

    key: str
    title: str
    how: str = ""
    charts: Sequence[Any] = ()  # Any: kinds of charts
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()


def frame_table(caption: str, frame: pl.DataFrame, is_open: bool = False) -> Table:
    """Return a frame as a table of texts, without columns that are empty in all rows."""
    frame = frame.select(one for one in frame.iter_columns() if {*one} - {None, ""})
    texts = [
        ["" if x is None else digits(x) if isinstance(x, float) else str(x) for x in row]
        for row in frame.iter_rows()
    ]
    heads = [name.replace("_", " ") for name in frame.columns]
    return Table(caption, heads, texts, is_open)


def page(
    study: Study,
    frame: pl.DataFrame,
    verdict: Sequence[str],
    cautions: Sequence[str] = (),
    experiment: Sequence[tuple[str, str]] = (),
    more: Sequence[Section] = (),
    effort: Sequence[str] = (),
    swept: Sequence[str] = (),
) -> str:
    """Return the page of a study as HTML.

    `verdict` are the sentences that come first, `frame` is the comparison of the arms,
    `experiment` names and texts, `more` further sections, `effort` sentences on time and hardware,
    `swept` those on swept numbers, below the arms.
    """
    setup = [Section("experiment", "The experiment", facts=experiment)] * bool(experiment)
    parts = (_outcomes(study, frame), _sweeps(study, frame), setup, _training(study))
    parts = (*parts, _effects(study), more, _costs(study, effort))
    built = [one for part in parts for one in part]
    specs = [chart.to_dict() for one in built for chart in one.charts]
    places = iter(range(len(specs)))
    loader = jinja2.FileSystemLoader(PARTS)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, loader=loader)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    alone = {arm.name for arm in tables.uncompared(study, frame)}
    metrics = [key for key in study.metrics_of if key in study.runs.columns][:MAX_RUN_METRICS]
    return environment.get_template("page.html").render(
        study=study,
        failures=_failures(study.arms),
        verdict=verdict,
        swept=swept,
        answer=_by_metric([row for row in rows_of(frame) if row["arm"] not in alone]),
        cautions=cautions,
        sections=[(one, [(next(places), chart) for chart in one.charts]) for one in built],
        most=MAX_ROWS,
        heads=["run", "arm", "seed", "state", "steps", *map(title, metrics), "step, ms"],
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        data={"charts": specs, "dark": DARK, "runs": _runs(study, metrics)} | _configs(study.arms),
        library=_library(),
        **{end: (PARTS / f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js")},
    )


def _library() -> str:
    """Vega, Vega-Lite and vega-embed as one script.

    Bundling takes seconds, so the script is stored in the folder of the byte code, if that can be
    written.
    """
    file = PARTS.parent / "__pycache__" / f"vega-{version('vl-convert-python')}.js"
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


def _failures(arms: Sequence[Arm]) -> Iterator[str]:
    """The failed runs of each arm, and those in which a transform made a NaN or an infinity."""
    for arm in arms:
        of = f"of {count(len(arm.runs), 'run')} of {arm.name}"
        if failed := [run.reason for run in arm.runs if run.state == "failed"]:
            yield f"{len(failed)} {of} failed: {failed[0]}"
        if made := [x for run in arm.runs if (x := (run.summary or {}).get("nonfinite"))]:
            where = f"first at site '{made[0]['site']}', step {made[0]['step']}"
            what = f"{made[0]['transform']} had returned NaN or infinity for a finite gradient"
            yield f"{len(made)} {of} diverged after {what}, {where}."


def _first(
    frame: pl.DataFrame, most: int, names: Iterable[str] = ()
) -> tuple[pl.DataFrame, list[str]]:
    """Return the rows of the first arms, and a note if there are more."""
    every = list(names) or frame["arm"].cast(pl.String).unique(maintain_order=True).to_list()
    note = f"The first {most} of {len(every)} arms are drawn; the Parquet files have all."
    return frame.filter(pl.col("arm").is_in(every[:most])), [note] * (len(every) > most)


def forest(rows: Sequence[Row], head: str, scale: float) -> Forest | None:
    """Return differences with their intervals and seeds on one axis with 0; None if all are 0.

    The numbers of the axis are the differences times `scale`.
    """
    spans = [
        [x for x in (row["difference"], row["low"], row["high"]) if x is not None and isfinite(x)]
        for row in rows
    ]
    seeds = [[one for one in row["differences"] or () if isfinite(one)] for row in rows]
    ends = [*chain(*spans, *seeds)]
    if not any(ends):
        return None
    low, high = min(0, *ends), max(0, *ends)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def at(number: float) -> float:
        return round(100 * (number - low) / (high - low), 2)

    marks = [
        Mark(
            at(span[0]),
            (at(span[1]), at(span[2])) if len(span) == 3 else None,
            [*map(at, each)],
            "clear " * (row["verdict"] in charts.CLEAR) + "range" * (row["interval"] == "range"),
        )
        if span
        else None
        for row, span, each in zip(rows, spans, seeds, strict=True)
    ]
    rough = scale * (high - low) / 5
    power = 10 ** floor(log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough)
    places = range(ceil(scale * low / step), floor(scale * high / step) + 1)
    ticks = [(at(k * step / scale), f"{k * step:+.10g}" if k else "0") for k in places]
    # the number of a tick at the right end would touch the next head
    return Forest(head, marks, [each for each in ticks if each[0] < 93], at(0))


def _by_metric(
    rows: Sequence[Row], heads: Collection[str] = OF_METRIC, about: str = "Difference in"
) -> list[Table]:
    """A table for each metric with the interval of each row drawn."""
    built = []
    called = tables.SHARED if "link" in heads else {}
    for metric in dict.fromkeys(row["metric"] for row in rows if row["difference"] is not None):
        some = [row for row in rows if row["metric"] == metric]
        drawn = forest(some, called.get("difference", "difference"), 100 if is_share(metric) else 1)
        table = tables.outcome_table(some, called, heads)
        built.append(Table(f"{about} {title(metric)}", *table, is_open=True, forest=drawn))
    return built


def _outcomes(study: Study, frame: pl.DataFrame) -> Iterator[Section]:
    if len(times := times_to_target(study)):
        how = (
            "The steps at which a seed reached the stopping condition, compared with its control: "
            "a seed that never did counts as latest. p is that of the exact sign test, the median "
            "that of the differences in steps over the seeds that reached it in both arms."
        )
        table = frame_table("Sooner or later than the control", times.drop("both"), is_open=True)
        yield Section("reached", "Steps to the target", how, tables=[table])
    first = {(row["arm"], row["metric"]) for row in rows_of(frame)}
    rows = list(frame.filter(pl.col("difference").is_not_null()).iter_rows(named=True))
    whole = [row for row in rows if row["block"] is None]
    built = _by_metric([row for row in whole if (row["arm"], row["metric"]) not in first])
    if blocks := [row for row in rows if row["block"] is not None]:
        built.append(Table("Block by block", *tables.outcome_table(blocks, columns=OF_BLOCK)))
    if whole:
        details = tables.outcome_table(whole, columns=DETAILS)
        built.append(Table("Medians, t intervals and effect sizes", *details))
        note = (
            "The verdict is about the metric above: p and q know nothing of the number of metrics."
        )
        yield Section("outcome", "Further outcomes", FOREST, tables=built, notes=[note])
    if arms := tables.uncompared(study, frame):
        how = "Finished runs without a finished control: the mean, and the least to the greatest."
        table = Table("Arms not compared", *tables.alone_table(study, arms), is_open=True)
        yield Section("alone", "Not compared", how, tables=[table])
    shares = [
        table
        for (arm,), part in link_shares(study).group_by("arm", maintain_order=True)
        for table in _by_metric(part.to_dicts(), OF_LINK, f"Share of each link of {arm} in")
    ]
    if shares:
        how = (
            "The whole chain minus the chain without a link, seed by seed. Shares need not add up: "
            "two links that do the same have a share of zero each."
        )
        yield Section("shares", "Share of each link", how, tables=shares)


def _sweeps(study: Study, frame: pl.DataFrame) -> Iterator[Section]:
    if best := best_arms(study).to_dicts():
        how = (
            "Each arm at its best value of a number that was swept for both. Usable: no seed "
            "diverged, and the mean is close to the best."
        )
        yield Section("best", "Best against best", how, tables=_by_metric(best))
    rows, notes = _first(doses(study, frame), MAX_CURVES)
    if len(rows):
        groups = rows.partition_by("label", "key", maintain_order=True)
        heads = ("arm", "metric", "difference", tables.INTERVAL, "n")
        table = Table(SAME, *tables.outcome_table(rows.to_dicts(), columns=heads))
        how = "Arms that differ in one number only: the difference to the control over that number."
        drawn = [*map(charts.dose_chart, groups)]
        yield Section("doses", "Dose and response", how, drawn, [table], notes)
    tunings, _ = read_tunings(study.folder, study.arms)
    if tunings:
        how = (
            "Each arm chose its values on validation data, with seeds that are not compared: a dot "
            "is a seed, the line their mean, a ring the chosen value, a cross a value with which "
            "seeds diverged. With several keys, a chart shows the points with the chosen values of "
            "the others."
        )
        drawn = [*map(charts.tuning_chart, tuning_frames(tunings))]
        table = Table("Chosen values", HEADS, [one.row for one in tunings], is_open=True)
        yield Section("tuning", "Tuning", how, drawn, [table])


def _training(study: Study) -> Iterator[Section]:
    controls = [arm.name for arm in study.arms if arm.is_control]
    ordered = dict.fromkeys([*controls[: MAX_CURVES // 4], *(arm.name for arm in study.arms)])
    logged, notes = _first(study.metrics, MAX_CURVES, ordered)
    if not charts.has_curves(logged):
        why = "All runs diverged before they logged a number."
        none = "Nothing has been logged yet." if logged.is_empty() else why
        yield Section("curves", "Learning curves", none)
        return
    how = (
        "Means over seeds with their 95 % t interval, from three seeds on; controls are dashed. An "
        "arm that is chosen shows its seeds; thin red lines diverged, and are part of no mean. "
        "Values far from most others are outside the axis; a log scale shows them."
    )
    by_arm = charts.curve_frames(logged)[0].group_by("arm", "metric", maintain_order=True)
    at = {f"{k} of 4": pl.col("mean").get((pl.len() - 1) * k // 4) for k in (1, 2, 3, 4)}
    table = frame_table(
        f"{SAME}: means at quarters of the steps", by_arm.agg(**at, n=pl.col("n").last())
    )
    drawn = [charts.curves_chart(logged, controls)]
    yield Section("curves", "Learning curves", how, drawn, [table], notes)


def _effects(study: Study) -> Iterator[Section]:
    acted = pl.col("transform").cast(pl.String) != "none"
    rows, notes = _first(study.effects.filter(acted & (pl.col("sampled") > 0)), MAX_CURVES)
    if len(rows):
        how = (
            "The effect of each transform at each site over the training: means over runs. No "
            "colour is no change, and the colours mean the same for all arms. Norm ratio: norm "
            "after over norm before; changed, sign flips and zeroed are shares of the entries of a "
            "gradient."
        )
        frame = charts.effect_frame(rows)
        drawn = [charts.effect_map(frame)] if frame["cosine"].count() else []
        whole = frame.filter(pl.col("step").is_null()).drop("step")
        whole = whole.rename({"name": "arm", **charts.MEASURES})
        table = frame_table(f"{SAME}: means of the whole training", whole)
        yield Section("effects", "Effect on the gradients", how, drawn, [table], notes)


def _costs(study: Study, effort: Sequence[str]) -> Iterator[Section]:
    how = (
        "Step time compared with that of the plain control, of steps that measure no effect if "
        "there are such: the median over pairs of runs and their range, each pair as a small mark. "
        "Runs that shared their machine with other work are slower than necessary."
    )
    rows = costs(study)
    as_differences = rows.select(
        *(pl.col(key) - 1 for key in ("low", "high")),
        difference=pl.col("ratio") - 1,
        differences=pl.col("ratios").list.eval(pl.element() - 1),
        verdict=pl.lit("higher"),
        interval=pl.lit(""),
    )
    drawn = forest(as_differences.to_dicts(), tables.STEP_TIME, 100)
    table = Table("Step times", *tables.cost_table(rows.to_dicts()), is_open=True, forest=drawn)
    nothing = ["No pair of a treated and a plain run with step times."] * rows.is_empty()
    yield Section("cost", "Cost", how, (), [table] * len(table.rows[:1]), [*nothing, *effort])


def _runs(study: Study, metrics: Sequence[str]) -> dict[str, Any]:  # Any: what JSON can hold
    """The runs as columns of the table that the script makes; repeated texts are written once."""
    runs, states = study.all_runs, list(study.states)
    notes = [" ".join([run.reason, *run.notes.values()]) for run in runs]
    texts = {note: place for place, note in enumerate(dict.fromkeys(notes))}
    numbers = [[charts.short(run.number(key)) for run in runs] for key in (*metrics, STEP_MS)]
    return {
        "columns": [
            [run.name for run in runs],
            [place for place, arm in enumerate(study.arms) for _ in arm.runs],
            [run.seed if run.seed >= 0 else None for run in runs],
            [states.index(run.state) for run in runs],
            [run.done for run in runs],
            *numbers,
        ],
        "states": states,
        "planned": [run.steps for run in runs],
        "notes": {"texts": list(texts), "at": [texts[note] for note in notes]},
        "shares": [5 + place for place, key in enumerate(metrics) if charts.is_share(key)],
    }


def _configs(arms: Sequence[Arm]) -> dict[str, Any]:  # Any: what JSON can hold
    """The configs of the arms without their seeds: lines common to all, then each arm's."""
    configs = [{k: value_text(x) for k, x in arm.config.items() if k != "seed"} for arm in arms]
    known = [set(config.items()) for config in configs if config]  # a missing run has none
    shared = dict(sorted(set.intersection(*known))) if known else {}
    rest = [dict(sorted(one.items() - shared.items())) if one else None for one in configs]
    return {"arms": [arm.name for arm in arms], "common": shared, "configs": rest}
