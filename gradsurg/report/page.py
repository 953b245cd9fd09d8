"""The page of a study: one HTML file with charts, tables, style and scripts; nothing is fetched."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import polars as pl

from gradsurg.report import charts, tables
from gradsurg.report.arms import Arm, value_text
from gradsurg.report.measures import costs, link_shares, times_to_target
from gradsurg.report.study import Study
from gradsurg.report.sweeps import best_arms, doses, first_trends
from gradsurg.report.tuning import HEADS, read_tunings, tuning_frames
from gradsurg.report.verdict import best_sentence, reached, trend_sentence
from gradsurg.report.wording import count, title

PARTS = Path(__file__).parent / "page"
MAX_DRAWN = 60  # arms of a forest plot
MAX_CURVES = 24  # arms with learning curves, and with a map of effects
MAX_ROWS = 100  # of a table
MAX_SAID = 12  # sentences above a table
STEP_MS = "time/step_ms"
MAX_RUN_METRICS = 4  # columns of the table of runs
SAME = "The same as numbers"
DARK = dict(zip(charts.LIGHT, charts.DARK, strict=True))
OF_METRIC = [head for head in tables.COLUMNS if head != "metric"]
NUMBER = re.compile(r"[-+\u2212]?\d|< 0")


@dataclass(frozen=True)
class Table:
    """A table of texts with its caption; it is folded unless `is_open`."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_open: bool = False

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The heads, each with the class `num` if its column has numbers, aligned to the right."""
        columns = [
            [cell for cell in cells if cell not in ("", "-")]
            for cells in zip(*self.rows, strict=True)
        ]
        kinds = ["num" if cells and all(map(NUMBER.match, cells)) else "" for cells in columns]
        return list(zip(self.heads, kinds or [""] * len(self.heads), strict=True))


@dataclass(frozen=True)
class Section:
    """A section of the page: how to read it, its charts, and the same as numbers."""

    key: str
    title: str
    how: str = ""
    charts: Sequence[Any] = ()  # Any: kinds of charts
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def frame_table(caption: str, frame: pl.DataFrame, is_open: bool = False) -> Table:
    """Return a frame as a table of texts."""
    texts = [
        ["" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in row]
        for row in frame.iter_rows()
    ]
    return Table(caption, frame.columns, texts, is_open)


def page(
    study: Study,
    frame: pl.DataFrame,
    verdict: str,
    cautions: Sequence[str] = (),
    experiment: Sequence[tuple[str, str]] = (),
    more: Sequence[Section] = (),
    effort: Sequence[str] = (),
) -> str:
    """Return the page of a study as HTML.

    `frame` is the comparison of its arms, `experiment` names and texts, `more` further sections,
    `effort` sentences on time and hardware.
    """
    parts = (_outcomes(study, frame), _sweeps(study, frame), _training(study), _effects(study))
    built = [one for part in (*parts, more, _costs(study, effort)) for one in part]
    specs = [chart.to_dict() for one in built for chart in one.charts]
    places = iter(range(len(specs)))
    loader = jinja2.FileSystemLoader(PARTS)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, loader=loader)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    metrics = [key for key in study.metrics_of if key in study.runs.columns][:MAX_RUN_METRICS]
    return environment.get_template("page.html").render(
        study=study,
        experiment=experiment,
        failures=_failures(study.arms),
        verdict=verdict,
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


def _outcomes(study: Study, frame: pl.DataFrame) -> Iterator[Section]:
    known = pl.col("difference").is_not_null()
    frame = frame.filter(known | ~pl.col("not_compared").str.contains("without a control"))
    shown, notes = _first(frame.filter(known), MAX_DRAWN)
    numbers = []
    for (metric, block), rows in frame.group_by(
        "metric", pl.col("block").is_not_null(), maintain_order=True
    ):
        caption = f"Differences in {title(str(metric))}{', block by block' if block else ''}"
        table = tables.outcome_table(rows.to_dicts(), columns=OF_METRIC)
        numbers.append(Table(caption, *table, is_open=not numbers))
    if numbers:
        how = (
            "Treated minus control, paired by seed: the mean, the 95 % interval that inverts the "
            "exact sign-flip test (dashed: too few seeds for a test, the range instead), and each "
            "seed as a small mark. Filled: a clear difference. Runs that did not finish are "
            "counted, never averaged. The verdict is that of p, and of q where there are several "
            "arms; median, t interval and effect size (the mean over the standard deviation) are "
            "details."
        )
        drawn = [charts.outcome_chart(shown)] if len(shown) else []
        yield Section("outcome", "Outcome compared with the control", how, drawn, numbers, notes)
    if arms := tables.uncompared(study, frame):
        how = "Finished runs without a finished control: the mean, and the least to the greatest."
        table = Table("Arms not compared", *tables.alone_table(study, arms), is_open=True)
        yield Section("alone", "Not compared", how, tables=[table])
    drawn, numbers = [], []
    for (arm,), rows in link_shares(study).group_by("arm", maintain_order=True):
        drawn += [charts.outcome_chart(rows, "link")] if rows["difference"].count() else []
        table = tables.outcome_table(rows.to_dicts(), tables.SHARED)
        numbers.append(Table(f"Share of each link of {arm}", *table, is_open=True))
    if numbers:
        how = (
            "The whole chain minus the chain without a link, seed by seed. Shares need not add up: "
            "two links that do the same have a share of zero each."
        )
        yield Section("shares", "Share of each link", how, drawn, numbers)


def _sweeps(study: Study, frame: pl.DataFrame) -> Iterator[Section]:
    if best := best_arms(study).to_dicts():
        how = (
            "Each arm at its best value of a number that was swept for both. Usable: no seed "
            "diverged, and the mean is close to the best."
        )
        table = Table("Best arm against best arm", *tables.outcome_table(best), is_open=True)
        notes = [best_sentence(row) for row in best[:MAX_SAID]]
        yield Section("best", "Best against best", how, (), [table], notes)
    rows, notes = _first(doses(study, frame), MAX_DRAWN)
    if len(rows):
        groups = rows.partition_by("label", "key", maintain_order=True)
        heads = ("arm", "metric", "difference", tables.INTERVAL, "verdict", "n")
        table = Table(SAME, *tables.outcome_table(rows.to_dicts(), columns=heads))
        found = first_trends(study, frame)
        how = "Arms that differ in one number only: the difference to the control over that number."
        drawn, said = (
            [*map(charts.dose_chart, groups)],
            [*notes, *map(trend_sentence, found[:MAX_SAID])],
        )
        yield Section("doses", "Dose and response", how, drawn, [table], said)
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
    shown, notes = _first(charts.reached_frame(study.runs), MAX_CURVES)
    if len(shown):
        how = "The share of seeds that have reached the stopping condition, over the steps."
        table = frame_table(SAME, times_to_target(study).drop("both"))
        drawn, said = [charts.reached_chart(shown)], [*notes, *reached(study)]
        yield Section("reached", "Steps to the target", how, drawn, [table], said)
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
        "Values far from most others are outside the axis; a log scale shows them. With Shift, "
        "dragging moves the axes and scrolling zooms; a double click resets them."
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
        frame, norms = charts.effect_frame(rows), charts.norms_frame(rows)
        drawn = [charts.effect_map(frame)] if frame["cosine"].count() else []
        drawn += [charts.norms_chart(norms)] if len(norms) else []
        whole = frame.filter(pl.col("step").is_null()).drop("step")
        whole = whole.rename({"name": "arm", **charts.MEASURES})
        table = frame_table(f"{SAME}: means of the whole training", whole)
        yield Section("effects", "Effect on the gradients", how, drawn, [table], notes)


def _costs(study: Study, effort: Sequence[str]) -> Iterator[Section]:
    how = (
        "Step time divided by that of the plain control, of steps that measure no effect if there "
        "are such: the median over pairs of runs and their range. Runs that shared their machine "
        "with other work are slower than necessary."
    )
    rows = costs(study)
    shown, notes = _first(rows, MAX_DRAWN)
    heads = {f"{key}_ms": f"{key} step, ms" for key in ("treated", "control", "measured")}
    table = frame_table("Step times", rows.drop("ratios").rename(heads), is_open=True)
    drawn = [charts.cost_chart(shown)] if len(shown) else []
    nothing = ["No pair of a treated and a plain run with step times."] * rows.is_empty()
    said = [*nothing, *notes, *effort]
    yield Section("cost", "Cost", how, drawn, [table] if drawn else [], said)


def _runs(study: Study, metrics: Sequence[str]) -> dict[str, Any]:  # Any: what JSON can hold
    """The runs as columns of the table that the script makes; repeated texts are written once."""
    runs, states = study.all_runs, list(study.states)
    notes = [" ".join([run.reason, *((run.summary or {}).get("notes") or [])]) for run in runs]
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
    """The configs of the arms without their seeds: the lines of all, and those of each arm."""
    configs = [{k: value_text(x) for k, x in arm.config.items() if k != "seed"} for arm in arms]
    known = [set(config.items()) for config in configs if config]  # a missing run has none
    shared = dict(sorted(set.intersection(*known))) if known else {}
    rest = [dict(sorted(one.items() - shared.items())) if one else None for one in configs]
    return {"arms": [arm.name for arm in arms], "common": shared, "configs": rest}
