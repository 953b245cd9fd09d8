"""Further comparisons of a study: cost, steps to the target, links of a chain."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any

import polars as pl

from gradsurg.experiment.run_directory import UNTIL, UNTIL_REACHED, UNTIL_STEP
from gradsurg.report.compare import (
    ENDED,
    PLAIN,
    compared,
    plain_name,
    rows_of_arms,
    vacuous,
    why_not,
    with_q,
)
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import Study
from gradsurg.stats import benjamini_hochberg, sign_test_p_value


def costs(study: Study) -> pl.DataFrame:
    """Compare step times with the plain control's, where both are known.

    `ratio` is the median over pairs of runs, `low` and `high` are the least and the greatest.
    Other controls run a surgery themselves, and so give no cost.
    """
    keys = ("time/step_ms", "time/measured_step_ms")
    rows = [
        (arm.name, *map(run.number, keys), other.number(keys[0]))
        for arm in study.arms
        for run in ([] if arm.is_control else arm.whole)
        if (other := study.by_name.get(run.controls.get("plain") or run.control or ""))
        and (other.label, other.state) == ("none", "finished")
    ]
    names = ("treated_ms", "measured_ms", "control_ms")
    schema = {"arm": pl.String} | dict.fromkeys(names, pl.Float64)
    pairs = pl.DataFrame(rows, schema=schema, orient="row").filter(
        pl.col("treated_ms") > 0, pl.col("control_ms") > 0
    )
    ratio = pl.col("treated_ms") / pl.col("control_ms")
    return pairs.group_by("arm", maintain_order=True).agg(
        pairs=pl.len(),
        ratio=ratio.median(),
        low=ratio.min(),
        high=ratio.max(),
        **{name: pl.col(name).median() for name in names},
        ratios=ratio,
    )


TIMES = {
    **dict.fromkeys(("arm", "against", "until"), pl.String),
    **dict.fromkeys(("n", "sooner", "later"), pl.Int64),
    **dict.fromkeys(("p", "q", "median", "treated", "control"), pl.Float64),
    **dict.fromkeys(("every", "examples"), pl.Int64),
    "both": pl.List(pl.Float64),
    "not_compared": pl.String,
}


def times_to_target(study: Study) -> pl.DataFrame:
    """Compare the steps at which an arm and its control reached the stopping condition.

    A seed that did not reach it, or diverged before, counts as later than all that did. p is by
    the exact sign test of `sooner` against `later`. `both` are the differences in steps of the
    seeds that reached it in both arms, `median` is the median of these, and `treated` and `control`
    are the medians of the steps of these seeds. The target is decided `every` so many steps, on so
    many `examples`.
    """
    rows: list[dict[str, Any]] = []  # Any: the values of a row
    for arm in study.arms:
        lost: Counter[str] = Counter()
        steps, against, until = [], PLAIN, ""
        for run in () if arm.is_control else arm.runs:
            other = study.by_name.get(run.control or "")
            if (why := why_not(run, other, "control", ENDED)) or other is None:
                lost[why] += 1
            elif UNTIL_REACHED in (run.summary or {}) and UNTIL_REACHED in (other.summary or {}):
                against, until = plain_name(other), str((run.summary or {})[UNTIL])
                steps.append((_step_reached(run), _step_reached(other)))
        if steps:
            ends = [(inf if a is None else a, inf if b is None else b) for a, b in steps]
            sooner, later = sum(a < b for a, b in ends), sum(a > b for a, b in ends)
            reached = [(a, b) for a, b in steps if a is not None and b is not None]
            both = [a - b for a, b in reached]
            each = zip(*reached, strict=True) if reached else (None, None)
            treated, control = (median(side) if side else None for side in each)
            one = arm.runs[0]
            part = "validation" if until.startswith("validation/") else "test"
            examples = one.number(f"{part}_examples")
            rows.append(
                {
                    "arm": arm.name,
                    "against": against,
                    "until": until,
                    "n": len(steps),
                    "sooner": sooner,
                    "later": later,
                    "p": sign_test_p_value(sooner, later),
                    "median": median(both) if both else None,
                    "treated": treated,
                    "control": control,
                    "every": one.measured.get("eval_every") or None,
                    "examples": None if examples is None else int(examples),
                    "both": both,
                    "not_compared": ", ".join(f"{n} {why}" for why, n in lost.items()),
                }
            )
    tested = [row for row in rows if row["sooner"] or row["later"]]
    if len(tested) > 1:
        for row, q in zip(tested, benjamini_hochberg([row["p"] for row in tested]), strict=True):
            row["q"] = q
    return pl.DataFrame(rows, schema=TIMES)


def _step_reached(run: LoadedRun) -> float | None:
    """Return the step at which a run reached its stopping condition; None if it did not."""
    return run.number(UNTIL_STEP) if (run.summary or {}).get(UNTIL_REACHED) else None


PARTS = ("norm_matched", "update_norm_matched")
"""Kinds of controls that split an effect: they have the direction of the plain gradient or update,
and the length of the treated one."""


def parts(study: Study) -> pl.DataFrame:
    """Split the effect of each arm that has a plain and a norm-matched control: three rows an arm.

    The columns are a comparison's and `part`: `total`, treated minus plain; `direction`,
    treated minus matched; `size`, matched minus plain. Of the seeds that finished in all three, so
    that the means add up, and of the metric of the verdict alone. q is among the directions and
    sizes of all arms. An arm that turned no gradient has no row: all of its effect is size.
    """
    metric = next(iter(study.metrics_of), "")
    totals, halves = [], []
    for arm in study.arms:
        kind = next((kind for run in arm.runs for kind in PARTS if kind in run.controls), "")
        triples = [
            (run, *others)
            for run in (arm.whole if kind and not arm.is_control else ())
            if len(others := _finished(study, run, ("plain", kind))) == 2
        ]
        if not triples or vacuous(study, arm):
            continue
        runs, plain, matched = zip(*triples, strict=True)
        for part, (one, other) in {
            "total": (runs, plain),
            "direction": (runs, matched),
            "size": (matched, plain),
        }.items():
            pairs = {arm.name: {a.name: b.name for a, b in zip(one, other, strict=True)}}
            found = rows_of_arms(study, [replace(arm, runs=one)], pairs, kind="control run")
            kept = [
                row | {"part": part}
                for row in found
                if row["metric"] == metric and row["block"] is None and row["n"]
            ]
            (totals if part == "total" else halves).extend(kept)
    names = pl.Series("part", [row["part"] for row in (*totals, *halves)], pl.String)
    frame = pl.concat([with_q(totals), with_q(halves)]).with_columns(names)
    order = pl.col("arm").rank("dense").over(pl.lit(0))
    return frame.sort(order, maintain_order=True)


def _finished(study: Study, run: LoadedRun, kinds: Sequence[str]) -> list[LoadedRun]:
    """Return the finished controls of these kinds of a run."""
    found = [study.by_name.get(run.controls.get(kind, "")) for kind in kinds]
    return [other for other in found if other and other.state == "finished"]


def link_shares(study: Study) -> pl.DataFrame:
    """Return the share of each link of a chain: the whole chain minus the chain without it.

    The columns are a comparison's and `link`. Shares need not sum to the effect of the
    chain: two links with the same effect can both have share 0. q is among the links of a chain.
    """
    shorter = left_out(study)
    empty = compared(study, [], {}).with_columns(link=pl.lit(None, pl.String))
    frames = [empty]
    for arm in study.arms:
        links = {link: None for run in arm.runs for name, link in shorter if name == run.name}
        arms = [replace(arm, name=link) for link in links]
        others = {
            link: {run.name: shorter.get((run.name, link)) for run in arm.runs} for link in links
        }
        frame = compared(study, arms, others, kind="shorter chain")
        frames.append(frame.with_columns(link=pl.col("arm"), arm=pl.lit(arm.name)))
    return pl.concat(frames)


def left_out(study: Study) -> dict[tuple[str, str], str]:
    """Return the run of the chain without a link, by the names of the whole chain's run and link.

    Found by comparing configs, since a run of a shorter chain may belong to several longer chains
    and to a sweep. A link is a key of `transform`: a `chain` or a `scheduled` transform is one link
    with all that is inside.
    """
    configs = {
        run.name: run.config for run in study.all_runs if run.config and run.arm != "control"
    }
    names = {_text(config): name for name, config in configs.items()}
    found = {}
    for whole, config in configs.items():
        order = config.get("order") or []
        for link in order if len(order) > 1 else []:
            rest = {key: fields for key, fields in config["transform"].items() if key != link}
            keys = [key for key in order if key != link]
            name = names.get(_text({**config, "transform": rest, "order": keys}))
            # A dotted path has one source in both, or it was edited in between.
            if name and _sources(configs[name]) <= _sources(config):
                found[whole, link] = name
    return found


def _text(config: Mapping[str, Any]) -> str:  # Any: YAML's values
    kept = {key: item for key, item in config.items() if key != "sources"}
    return json.dumps(kept, sort_keys=True, default=str)


def _sources(config: Mapping[str, Any]) -> set[tuple[str, str]]:  # Any: YAML's values
    return set((config.get("sources") or {}).items())
