"""Compare the arms of a study with their controls: one row an arm and metric."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import polars as pl

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.report.arms import Arm, split_of
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import AREA, Study
from gradsurg.stats import (
    Direction,
    Margin,
    benjamini_hochberg,
    finding,
    margin_verdict,
    paired_difference,
    sign_test_p_value,
)

Others = Mapping[str, Mapping[str, str | None]]
"""By the names of an arm and of its run, the name of the run that this is compared with."""
FINISHED, DIVERGED = "finished", "diverged"
ENDED = (FINISHED, DIVERGED)
SCALE_FREE = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"}
SCALE_FREE |= {"RAdam", "RMSprop", "Rprop"}
"""Optimizers of torch.optim in whose update a constant scale of the gradients cancels."""
PARALLEL = 1 - 1e-6
"""Smallest mean cosine of a transform that turns no gradient, up to rounding."""
SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    **dict.fromkeys(("arm", "against", "metric", "block", "unit"), pl.String),
    **dict.fromkeys(("n", "planned"), pl.Int64),
    **dict.fromkeys(("splits", "test_examples", "steps"), pl.Int64),
    "optimizer": pl.String,
    "scale_free": pl.Boolean,
    **dict.fromkeys(("lr", "lr_control"), pl.Float64),
    **dict.fromkeys(("tuned", "rate_tuned"), pl.Boolean),
    **dict.fromkeys(("chosen", "chosen_control"), pl.String),
    **dict.fromkeys(("configurations", "configurations_control"), pl.Int64),
    **dict.fromkeys(("cosine", "norm_low", "norm_high"), pl.Float64),
    **dict.fromkeys(("treated", "control", "difference", "low", "high"), pl.Float64),
    "interval": pl.String,
    **dict.fromkeys(("p", "q"), pl.Float64),
    "family": pl.Int64,
    **dict.fromkeys(("higher", "lower"), pl.Int64),
    **dict.fromkeys(("median", "t_low", "t_high", "effect_size"), pl.Float64),
    **dict.fromkeys(("ended", "diverged", "diverged_control"), pl.Int64),
    "p_diverged": pl.Float64,
    **dict.fromkeys(("verdict", "margin", "vacuous"), pl.String),
    "repeats": pl.Int64,
    "not_compared": pl.String,
    "differences": pl.List(pl.Float64),
    "seeds": pl.List(pl.Int64),
}
"""The columns of a comparison.

`steps` to `norm_high` are about the treated arm and, with `_control`, about the other: `scale_free`
(a constant scale of its gradients has no effect), the rate, whether values were `tuned`, and the
values `chosen` beside the rate. `configurations` is the number to choose from. The change of the
gradients is in the columns of `Study.changes`. `family` is the number of arms of this study among
which q is corrected. All are null where they are not known.
"""


@dataclass(frozen=True)
class Pair:
    """A seed of an arm in one block: the values of both arms, None where there is none yet.

    `state` and `beside` are the states of the two runs; `why` says why they cannot be compared.
    """

    seed: int
    block: str = ""
    treated: float | None = None
    control: float | None = None
    state: str = FINISHED
    beside: str = FINISHED
    why: str = ""
    same: bool = False  # as all other seeds: nothing in these runs is drawn at random


def compare(study: Study, margin: Margin | None = None) -> pl.DataFrame:
    """Compare each treated arm with its control, metric by metric; q is computed by `with_q`.

    The columns are listed in `SCHEMA`. Each task and each model has arms of its own. Where an arm
    has several splits, its row is over these blocks, each with the mean over its seeds, and a row
    with a `block` has the details of one. Without a `margin`, the study's is used.
    """
    return with_q(_with_controls(study, margin or study.margin))


def compare_job(job: Study, whole: Study) -> pl.DataFrame:
    """Compare the arms of a job; q is among these and the other arms of its `whole` study.

    A job that has not the controls of that study has a q among its own arms.
    """
    own, control = _with_controls(job, job.margin), {run.name: run.control for run in job.all_runs}
    if any(control.get(run.name, run.control) not in (None, run.control) for run in whole.all_runs):
        return with_q(own)
    others = _with_controls(whole, whole.margin, control)
    return with_q([*others, *own]).tail(len(own))


def _with_controls(
    study: Study, margin: Margin | None, left_out: Collection[str] = ()
) -> list[dict[str, Any]]:  # Any: the values of a row
    """Return the rows of the treated arms without those that have a run of these names."""
    arms = [
        arm
        for arm in study.arms
        if not arm.is_control and not any(run.name in left_out for run in arm.runs)
    ]
    controls = {arm.name: {run.name: run.control for run in arm.runs} for arm in arms}
    return rows_of_arms(study, arms, controls, margin)


def compare_pairs(study: Study, names: Sequence[str], margin: Margin | None = None) -> pl.DataFrame:
    """Compare each two of these arms seed by seed, the first minus the second.

    Raises LookupError for a name that no arm has, or fewer than two names.
    """
    chosen = arms_named(study, names)
    if len(chosen) < 2:
        raise LookupError(f"name at least two arms to compare; {names_of(study)}")
    arms, against = [], {}
    others: dict[str, dict[str, str | None]] = {}
    for first, second in combinations(chosen, 2):
        pair = Arm(f"{first.name} - {second.name}", first.runs, first.config)
        places = {(run.seed, study.block_of[run.name]): run.name for run in second.runs}
        others[pair.name] = {
            run.name: places.get((run.seed, study.block_of[run.name])) for run in first.runs
        }
        against[pair.name] = second.name
        arms.append(pair)
    frame = compared(study, arms, others, margin, "run of that seed")
    return frame.with_columns(
        against=pl.col("arm").replace_strict(against), family=pl.lit(None, pl.Int64)
    )


def arms_named(study: Study, names: Sequence[str]) -> list[Arm]:
    """Return the arms of these names, in their order; LookupError for a name that no arm has."""
    by_name = {arm.name: arm for arm in study.arms}
    for name in names:
        if name not in by_name:
            raise LookupError(f"no arm is named {name!r}; {names_of(study)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def names_of(study: Study) -> str:
    """Return a text with the names of all arms."""
    return f"the arms are: {'; '.join(repr(arm.name) for arm in study.arms)}"


def compare_values(
    metrics: Mapping[str, Sequence[Pair]],
    about: Mapping[str, object],
    unit: str = "",
    margin: Margin | None = None,
) -> list[dict[str, Any]]:  # Any: the values of a row
    """Return the rows of one arm: for each metric the comparison, then one for each block.

    `about` has the arm, `against` and other facts of the rows; `unit` is what blocks are, such as
    "split". `with_q` makes a frame of the rows of several arms.
    """
    rows = []
    first = next(iter(metrics), "")
    for metric, pairs in metrics.items():
        if not pairs:
            continue  # the arm's task does not have this metric
        pairs = sorted(pairs, key=lambda pair: (len(pair.block), pair.block, pair.seed))
        blocks = list(dict.fromkeys(pair.block for pair in pairs))
        several = len(blocks) > 1
        good = about.get("better") if metric == first else None
        facts = {**about, "metric": metric, "better": good}
        if metric != first and margin and not margin.is_share:
            margin = None  # it has the unit of the first metric
        rows.append(facts | {"block": None} | _row(pairs, unit if several else "", margin))
        for block in blocks if several else ():
            inside = [pair for pair in pairs if pair.block == block]
            rows.append(facts | {"block": block} | _row(inside, "", margin))
    return rows


def with_q(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:  # Any: the values of a row
    """Return rows of several arms as a frame, with q and the verdict.

    q is the p after the correction of Benjamini and Hochberg, among the arms that differ from their
    control at all; a single one has none. The first metrics of all arms, which arms of different
    tasks need not share, are one family; further metrics have one each.
    """
    first: dict[str, str] = {}
    families: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        is_first = row["metric"] == first.setdefault(row["arm"], row["metric"])
        if row["block"] is None and row.get("p") is not None and any(row["differences"]):
            families.setdefault("" if is_first else row["metric"], []).append(place)
    q_values: dict[int, float | None] = {}
    sizes: dict[int, int] = {}
    for places in families.values():
        if len(places) > 1:
            adjusted = benjamini_hochberg([rows[place]["p"] for place in places])
            q_values |= dict(zip(places, adjusted, strict=True))
            sizes |= dict.fromkeys(places, len(places))
    full = [
        {**row, **_verdicts(row, q_values.get(place)), "family": sizes.get(place)}
        for place, row in enumerate(rows)
    ]
    columns = {key: [row.get(key) for row in full] for key in SCHEMA}
    return pl.DataFrame(columns, schema=SCHEMA, strict=False)


def _verdicts(row: Mapping[str, Any], q: float | None) -> dict[str, object]:  # Any: of a row
    if not row["found"]:
        return {"q": q, "verdict": ""}
    verdict, margin = finding(row["found"], q), ""
    if (size := row.get("margin_size")) is not None and any(row["differences"]):
        better = row.get("better") or BETTER.get(row["metric"].rpartition("/")[2])
        margin = margin_verdict(row["low"], row["high"], size, better, q)
    return {"q": q, "verdict": verdict, "margin": margin}


def _row(
    pairs: Sequence[Pair], unit: str, margin: Margin | None
) -> dict[str, Any]:  # Any: the values of a row
    """Return the numbers of a row: over seeds, or with a `unit` over blocks."""
    repeats = len(pairs) if _are_repeats(pairs) else 0
    both = [
        (pair.block if unit else pair.seed, pair.treated, pair.control)
        for pair in (pairs[:1] if repeats else pairs)
        if pair.treated is not None and pair.control is not None
    ]
    lost = Counter(pair.why for pair in pairs if pair.why)
    row: dict[str, Any] = {
        "unit": unit or "seed",
        "n": 0,
        "planned": len(pairs),
        "repeats": repeats,
        "not_compared": ", ".join(f"{number} {why}" for why, number in lost.items()),
        "found": None,
        **_divergence(pairs),
    }
    if not both:
        return row
    keys = list(dict.fromkeys(key for key, *_ in both))
    of_key = [[(a, b) for key, a, b in both if key == wanted] for wanted in keys]
    treated, control = (
        [fmean(pair[side] for pair in inside) for inside in of_key] for side in (0, 1)
    )
    found = paired_difference(treated, control)
    low, high = found.interval or found.range
    return row | {
        "n": found.n,
        "treated": fmean(treated),
        "control": fmean(control),
        "difference": found.mean,
        "low": low,
        "high": high,
        "interval": "95 %" if found.interval else "range",
        "p": found.p_value if found.n > 1 else None,
        "higher": found.higher,
        "lower": found.lower,
        "median": found.median,
        "t_low": found.t_low,
        "t_high": found.t_high,
        "effect_size": found.effect_size,
        "margin_size": margin.of(fmean(control)) if margin and found.interval else None,
        "differences": list(found.differences),
        "seeds": None if unit else keys,
        "found": found,
    }


BETTER: dict[str, Direction | None] = {number.name: number.better for number in TASK_METRICS}
"""The direction in which a metric is better, by the last part of its name."""


def _divergence(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """Count the seeds that diverged, of those that ended in both arms; McNemar's exact p."""
    ended = [pair for pair in pairs if pair.state in ENDED and pair.beside in ENDED]
    diverged = [(pair.state == DIVERGED, pair.beside == DIVERGED) for pair in ended]
    p_value = sign_test_p_value(diverged.count((True, False)), diverged.count((False, True)))
    return {
        "ended": len(ended),
        "diverged": sum(treated for treated, _ in diverged),
        "diverged_control": sum(control for _, control in diverged),
        "p_diverged": p_value if any(map(any, diverged)) else None,
    }


def _are_repeats(pairs: Sequence[Pair]) -> bool:
    """Whether all seeds came to the same numbers: nothing was drawn at random."""
    return len(pairs) > 1 and all(pair.same for pair in pairs)


def compared(
    study: Study,
    arms: Sequence[Arm],
    others: Others,
    margin: Margin | None = None,
    kind: str = "control",
) -> pl.DataFrame:
    """Compare the runs of these arms with the runs in `others`, which texts call a `kind`."""
    return with_q(rows_of_arms(study, arms, others, margin, kind))


def rows_of_arms(
    study: Study,
    arms: Sequence[Arm],
    others: Others,
    margin: Margin | None = None,
    kind: str = "control",
) -> list[dict[str, Any]]:  # Any: the values of a row
    """Return the rows of `compared` before the correction of `with_q`."""
    rows = []
    for arm in arms:
        beside = {run.name: study.by_name.get(others[arm.name][run.name] or "") for run in arm.runs}
        vacuous = _vacuous_control(study, arm) if kind == "control" else ""
        pairs = {
            metric: _pairs(study, arm, metric, beside, kind, vacuous)
            for metric in study.metrics_of or {"": ""}
        }
        known = [other for other in beside.values() if other]
        about = {
            "arm": arm.name,
            "against": plain_name(known[0]) if known else PLAIN,
            "vacuous": vacuous,
            "better": arm.runs[0].measured.get("better"),  # set for a script's metric
            **_setting(study, arm, known),
        }
        rows += compare_values(pairs, about, "split", margin)
    return rows


def _pairs(
    study: Study,
    arm: Arm,
    metric: str,
    beside: Mapping[str, LoadedRun | None],
    kind: str,
    vacuous: str,
) -> list[Pair]:
    """Return the pairs of an arm; a run of a task without the metric is left out."""
    runs = [(run, beside[run.name]) for run in arm.runs]
    known = [(run, other) for run, other in runs if other and not why_not(run, other, kind)]
    same = _all_equal(study, known)
    pairs = []
    for run, other in runs:
        why = "with a vacuous control" if vacuous else why_not(run, other, kind)
        treated = control = None
        if not why and other:
            treated, control = study.outcome(run, metric), study.outcome(other, metric)
            if treated is None or control is None:
                continue
        state = other.state if other else "missing"
        block = study.block_of[run.name]
        pairs.append(Pair(run.seed, block, treated, control, run.state, state, why, same))
    return pairs


def _all_equal(study: Study, pairs: Sequence[tuple[LoadedRun, LoadedRun]]) -> bool:
    """Whether all seeds came to the same numbers, in all that was tested."""
    keys = [key for key in study.metrics_of if not key.startswith(AREA)]
    return len(pairs) > 1 and all(
        len({tuple(run.number(key) for key in keys) for run in runs}) == 1
        for runs in zip(*pairs, strict=True)
    )


def why_not(
    run: LoadedRun, other: LoadedRun | None, kind: str, wanted: Collection[str] = (FINISHED,)
) -> str:
    """Return why a run cannot be compared: its own state, or its control's."""
    if run.state not in wanted:
        return run.state
    if other is None:
        return f"without a {kind}"
    return "" if other.state in wanted else f"{kind} {other.state}"


PLAIN = "control"
"""The name of a control arm without surgery."""


def plain_name(run: LoadedRun) -> str:
    """Return the name of a control run's arm in a sentence: `control`, `placebo`, `norm-matched`.

    A run that is no control, as one of a shorter chain, has its label.
    """
    kind = _control_kind(run)
    if kind == "plain" or run.label == "none":
        return PLAIN
    return (kind or run.label).replace("_", "-")


def _control_kind(run: LoadedRun) -> str:
    """Return the kind of a control run, as the key `control` has it; empty for other runs."""
    if run.arm != "control":
        return ""
    return "plain" if run.label == "none" else run.label.partition("-")[0]


def _vacuous_control(study: Study, arm: Arm) -> str:
    """Return the name of a control that is the treatment itself; empty for any other.

    A control that keeps the transform's norm, or its norm and cosine, is the treatment if the
    transform has turned no gradient.
    """
    controls = [one for run in arm.whole if (one := study.by_name.get(run.control or ""))]
    kinds = {_control_kind(control) for control in controls}
    is_matched = bool(kinds & {"norm_matched", "placebo"})
    return plain_name(controls[0]) if is_matched and vacuous(study, arm) else ""


def vacuous(study: Study, arm: Arm) -> bool:
    """Whether an arm has turned no gradient, so that only lengths differ from a plain run."""
    least = _changes(study, arm)["cosine"].min()
    return isinstance(least, float) and least >= PARALLEL


def _changes(study: Study, arm: Arm) -> pl.DataFrame:
    return study.changes.filter(pl.col("run").is_in([run.name for run in arm.whole]))


def _setting(study: Study, arm: Arm, beside: Sequence[LoadedRun]) -> dict[str, object]:
    """Return what is known of data, training and tuning of an arm and of the runs beside it."""
    one, other = arm.runs[0], beside[0] if beside else None
    tuning = study.tuning_of.get(one.name)
    against = study.tuning_of.get(other.name) if other else None
    sizes = {size for run in arm.whole if (size := run.test_examples)}
    splits = {split for run in arm.runs if (split := split_of(run)) is not None}
    changes = _changes(study, arm)
    return {
        "splits": len(splits) or None,
        "test_examples": sizes.pop() if len(sizes) == 1 else None,
        "steps": one.steps or None,
        "optimizer": one.optimizer,
        "scale_free": one.optimizer in SCALE_FREE and not one.is_at_updates,
        "lr": one.lr,
        "lr_control": other.lr if other else None,
        "tuned": tuning is not None,
        "rate_tuned": tuning is not None and tuning.has_rate,
        "chosen": tuning.others if tuning else "",
        "chosen_control": against.others if against else "",
        "configurations": len(tuning.points) if tuning else 1,
        "configurations_control": len(against.points) if against else 1,
        "cosine": changes["cosine"].min(),
        "norm_low": changes["norm_low"].min(),
        "norm_high": changes["norm_high"].max(),
    }
