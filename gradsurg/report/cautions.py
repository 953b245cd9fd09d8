"""The cautions of a study: a table of rules, each with a condition and at most one sentence."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import polars as pl

from gradsurg.report.study import Study
from gradsurg.report.tuning import read_tunings, unequal
from gradsurg.report.verdict import DOES, MAX_NAMED, Row, rows_of, vacuous_sentence
from gradsurg.report.wording import amount, count, is_share, listed, size, title, value
from gradsurg.stats import (
    MAX_P,
    MIN_FOR_P,
    MIN_INTERVAL_SEEDS,
    TOO_FEW,
    detectable_effect,
    seeds_needed,
)


def cautions(study: Study, frame: pl.DataFrame) -> list[str]:
    """Return the cautions of a study, at most one sentence for each rule of `CAUTIONS`."""
    return [text for rule in CAUTIONS.values() if (text := rule(study, frame))]


Rule = Callable[[Study, pl.DataFrame], str]


def _each(tell: Callable[[Row], str], text: str) -> Rule:
    """Return a rule on the arms in the first metric: `text` with what `tell` says of them."""

    def rule(study: Study, frame: pl.DataFrame) -> str:
        rows = [row for row in rows_of(frame) if row["difference"] is not None]
        told = list(dict.fromkeys(words for row in rows if (words := tell(row))))
        return text.format(listed(told, MAX_NAMED)) if told else ""

    return rule


def _divergence(study: Study, frame: pl.DataFrame) -> str:
    if not any(row["diverged"] or row["diverged_control"] for row in rows_of(frame)):
        return ""
    return (
        "A seed that diverged in either arm is in no mean, interval or p: they describe the "
        "surviving seeds alone."
    )


def _chance(study: Study, frame: pl.DataFrame) -> str:
    arms = sorted(study.arms, key=lambda arm: not arm.is_control)
    told = [learned_nothing(arm.name, [run.summary or {} for run in arm.whole]) for arm in arms]
    dead = [text for text in told if text]
    weak = any(text and arm.is_control for text, arm in zip(told, arms, strict=True))
    useless = ": a comparison with a control at chance tells little" if weak else ""
    return f"Training did not learn anything with {listed(dead, MAX_NAMED)}{useless}." * bool(dead)


def learned_nothing(name: str, runs: Sequence[Mapping[str, Any]]) -> str:  # Any: JSON's values
    """Return in how many seeds an arm is no better than chance; empty if it has learned."""
    dead = [summary for summary in runs if summary.get("learned_nothing")]
    if not dead:
        return ""
    evidence = dead[0]["learned_nothing"]
    key = evidence["metric"]
    own = value(key, fmean(summary[key] for summary in dead))
    chance = value(key, fmean(summary["learned_nothing"]["beside"] for summary in dead))
    seeds = f"{len(dead)} of {count(len(runs), 'seed')}"
    return f"{name} in {seeds} ({title(key)} {own}, and {evidence['what']} {chance})"


def _outweighed(row: Row) -> str:
    key, (heaviest, *others) = row["metric"], sorted(row["differences"], key=abs, reverse=True)
    if len(others) < 2 or abs(heaviest) <= sum(map(abs, others)):
        return ""
    return f"{row['arm']} ({amount(key, heaviest)}, median of all {amount(key, row['median'])})"


def _skewed(row: Row) -> str:
    """Of a clear difference, skewness beyond twice its standard error under a normal one."""
    n, mean, spread = row["n"], row["difference"], row["differences"]
    sd = fmean((one - mean) ** 2 for one in spread) ** 0.5
    if row["verdict"] not in DOES or not sd or _outweighed(row):
        return ""
    skewness = fmean(((one - mean) / sd) ** 3 for one in spread)
    if abs(skewness) <= 2 * (6 * (n - 2) / ((n + 1) * (n + 3))) ** 0.5:
        return ""
    return f"{row['arm']} (median {amount(row['metric'], row['median'])})"


def _on_one_split(row: Row) -> str:
    """A claim about one split is none about the task: told only beside a claim."""
    claims = {*DOES, "equivalent", "not worse", "better"}
    if not {row["verdict"], row["margin"]} & claims or "one split" not in row["population"]:
        return ""
    examples = re.search(r"([\d,]+) test examples", row["population"])
    if not examples or not is_share(row["metric"]):
        return "new data"
    one = size(row["metric"], 1 / int(examples[1].replace(",", "")))
    return f"new data (one test example is {one})"


def _vacuous_too(study: Study, frame: pl.DataFrame) -> str:
    rows = rows_of(frame)
    vacuous = [row for row in rows if row["vacuous"]]
    return vacuous_sentence(vacuous) if 0 < len(vacuous) < len(rows) else ""


def _tuned(study: Study, frame: pl.DataFrame) -> str:
    if not read_tunings(study.folder)[0]:
        return ""
    return (
        "The arms are compared at their chosen values, which is not a comparison of the methods: "
        f"two identical methods tuned like this differ at p <= {MAX_P} in more than 10 % of "
        "studies."
    )


def _added(study: Study, frame: pl.DataFrame) -> str:
    told = []
    for arm in study.arms:
        added = [run.looked for run in arm.runs if run.looked]
        told += [f"{len(added)} of {arm.name} after {min(added)}"] if added else []
    if not told:
        return ""
    return (
        f"Runs were added when others had finished ({listed(told, MAX_NAMED)}): if after a look at "
        "them, p is too small (with looks at 8, 12 and 16 seeds 11 % false alarms instead of 5)."
    )


def _few(study: Study, frame: pl.DataFrame) -> str:
    """The number of seeds for a test at all, or the size of the effect that so many find."""
    rows = [row for row in rows_of(frame) if row["n"] and not row["repeats"]]
    if not rows or all(row["verdict"] in (*DOES, "identical") for row in rows):
        return ""
    row = min(rows, key=lambda row: row["n"])
    n, unit, key = row["n"], row["unit"], row["metric"]
    needed = seeds_needed(len(rows)) if len(rows) > 1 else MIN_FOR_P
    sd = stdev(row["differences"]) if n >= MIN_INTERVAL_SEEDS else 0.0
    effect = detectable_effect(max(n, needed), sd)
    found = ""
    if effect:
        found = (
            f" a difference of {size(key, effect)} in 80 % of studies (sd of the differences "
            f"{size(key, sd)})"
        )
    if n < needed:
        alone = ", for an arm that differs alone," if len(rows) > 1 else ""
        more = f", which find{found}" if found else ""
        return f"A test at the level {MAX_P}{alone} needs {needed} {unit}s{more}."
    return f"{n} {unit}s find{found}, and miss most smaller ones." if found else ""


def _unfinished(study: Study, frame: pl.DataFrame) -> str:
    if {*study.states} <= {"finished", "diverged"}:
        return ""
    lost = [f"{number} {state}" for state, number in study.states.items() if state != "finished"]
    of = count(len(study.runs), "run")
    return f"Of {of}, {listed(lost)}: the table of runs has the reasons, numbers are of the others."


def _faults(study: Study, frame: pl.DataFrame) -> str:
    faults = [*study.faults, *read_tunings(study.folder)[1]]
    return f"Left out, because it cannot be read: {listed(faults, MAX_NAMED)}." if faults else ""


def _skipped(study: Study, frame: pl.DataFrame) -> str:
    steps = [n for run in study.all_runs if (n := (run.summary or {}).get("skipped_steps"))]
    of = f"{count(len(steps), 'run')} skipped {count(sum(steps), 'step')}"
    return f"{of}, because scaled gradients were not finite." if steps else ""


def _metric(study: Study, frame: pl.DataFrame) -> str:
    chosen, known = study.chosen_metrics, study.metrics_of
    if chosen and known and chosen[0] not in known:
        return f"metric={chosen[0]}: no finished run has it; there are {', '.join(known)}."
    if len(chosen) > 1:
        return f"Runs were planned with metric={listed(chosen)}; the verdict is about the first."
    return ""


def _against(kind: str) -> Callable[[Row], str]:
    return lambda row: row["arm"] if row["against"] == kind else ""


def _scale(study: Study, frame: pl.DataFrame) -> str:
    names = {row["arm"] for row in rows_of(frame) if row["against"] == "norm-matched"}
    configs = [run.config or {} for arm in study.arms if arm.name in names for run in arm.whole]
    used = {str((config.get("optimizer") or {}).get("name")) for config in configs} & SCALE_FREE
    if not used:
        return ""
    return (
        f"A constant scale of the gradients cancels in the updates of {listed(sorted(used))}: "
        "control=update_norm_matched matches the norms of the updates."
    )


def _other_controls(study: Study, frame: pl.DataFrame) -> str:
    kinds = [
        kind for run in study.all_runs for kind in run.controls if run.controls[kind] != run.control
    ]
    told = [f"{n} with control={kind}" for kind, n in Counter(kinds).items() if kind != "plain"]
    if not told:
        return ""
    return (
        f"Some runs have another control too ({listed(told)}), and are compared with the plain one "
        "here; the command with it, given again, tells the other."
    )


def _lengths(study: Study, frame: pl.DataFrame) -> str:
    if not any((run.config or {}).get("aggregator") for run in study.all_runs):
        return ""
    from gradsurg.report.conflicts import about_lengths  # it imports Altair

    return " ".join(about_lengths(study))


SCALE_FREE = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"}
SCALE_FREE |= {"RAdam", "RMSprop", "Rprop"}
"""Optimizers of torch.optim in whose update a constant scale of the gradients cancels."""
DIRECTION = "with the norm that it has with {}: a clear difference is due to the direction."
CAUTIONS: dict[str, Rule] = {
    "divergence": _divergence,
    "control at chance": _chance,
    "one seed outweighs": _each(_outweighed, "One seed outweighs all others together with {}."),
    "one split only": _each(
        _on_one_split,
        "Interval and p are about new seeds on this split, not about {}: splits=6 tells more.",
    ),
    "vacuous control": _vacuous_too,
    "tuned values": _tuned,
    "runs added after a look": _added,
    "margin after a look": lambda study, _: (
        "The margin was chosen when outcomes were known."
        * any(r.margin_after for r in study.all_runs)
    ),
    "few seeds": _few,
    "skew": _each(
        _skewed,
        "The test assumes differences that are symmetric about their mean, and those of {} are "
        "skewed: p can be too small.",
    ),
    "unfinished": _unfinished,
    "unreadable files": _faults,
    "skipped steps": _skipped,
    "metric": _metric,
    "norm-matched control": _each(
        _against("norm-matched"),
        f"The norm-matched arm has the gradient's direction {DIRECTION}",
    ),
    "update-norm-matched control": _each(
        _against("update-norm-matched"),
        f"The update-norm-matched arm has the direction of the plain update {DIRECTION}",
    ),
    "placebo control": _each(
        _against("placebo"),
        "The placebo arm turns each gradient as far as {}, to the same norm, in a random "
        "direction: a clear difference is due to the direction chosen.",
    ),
    "scale of gradients": _scale,
    "other controls": _other_controls,
    "update lengths": _lengths,
    "unequal tuning": lambda study, _: unequal(read_tunings(study.folder, study.arms)[0]),
    "deterministic repeats": _each(
        lambda row: f"the {row['repeats']} seeds of {row['arm']}" if row["repeats"] else "",
        "The same numbers from {}: nothing in these runs is drawn at random, so they count as one.",
    ),
    "several arms": _each(
        lambda row: "q" if row["q"] is not None and row["verdict"] != TOO_FEW else "",
        f"Several arms are compared at once: {{}} is p corrected for that, metric by metric "
        f"(Benjamini-Hochberg), and a difference is clear if both are at most {MAX_P}; an interval "
        "is that of its arm alone.",
    ),
}
"""The rules in the order in which they are told; each returns a sentence, or '' if it holds not."""
