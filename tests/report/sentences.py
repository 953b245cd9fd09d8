"""All sentences of a report on one page: `python -m tests.report.sentences` writes it anew.

Each case is a small study or frame made by hand. A change of the words shows in `sentences.txt`
alone; the other tests are about columns, names and numbers.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from gradsurg.experiment.run_directory import FACTS, SUMMARY
from gradsurg.report.cautions import by_rule
from gradsurg.report.compare import SCHEMA, compare
from gradsurg.report.study import Study, read_study
from gradsurg.report.verdict import (
    answer,
    best_sentence,
    sentence,
    sweeps,
    trend_sentence,
)
from gradsurg.stats import finding, margin_verdict, paired_difference, parse_margin
from tests.report import studies

FILE = Path(__file__).with_name("sentences.txt")
CLIP = [-0.78, -0.61, -0.11, -0.83, 0.11, -0.67, -0.44, -0.67]  # percentage points
UNCLEAR = [0.5, -0.3, 0.2, -0.1, 0.0, 0.4, -0.2, 0.3]
ADAM = {"optimizer": {"name": "Adam", "lr": 0.001}}
SGD = {"optimizer": {"name": "SGD", "lr": 0.1}}


def row(points: Sequence[float], arm: str = "clip", **more: object) -> dict[str, object]:
    """The comparison of an arm with these differences in percentage points."""
    found = paired_difference([0.9 + x / 100 for x in points], [0.9] * len(points))
    low, high = found.interval or found.range
    told = {
        "arm": arm,
        "against": "control",
        "metric": "test/accuracy",
        "family": None,
        "unit": "seed",
        "n": found.n,
        "planned": found.n,
        "splits": 1,
        "test_examples": 450,
        "steps": 500,
        "optimizer": "SGD",
        "scale_free": False,
        "lr": 0.1,
        "lr_control": 0.1,
        "tuned": False,
        "rate_tuned": False,
        "chosen": "",
        "chosen_control": "",
        "configurations": 1,
        "configurations_control": 1,
        "cosine": 0.5,
        "norm_low": 0.5,
        "norm_high": 0.5,
        "repeats": 0,
        "not_compared": "",
        "treated": 0.9 + found.mean,
        "control": 0.9,
        "difference": found.mean,
        "low": low,
        "high": high,
        "interval": "95 %" if found.interval else "range",
        "p": found.p_value,
        "higher": found.higher,
        "lower": found.lower,
        "median": median(found.differences),
        "differences": list(found.differences),
        "ended": found.n,
        "diverged": 0,
        "diverged_control": 0,
        "vacuous": "",
        "margin": "",
    }
    q: Any = more.get("q")
    return {**told, "verdict": finding(found, q), **more}


def within(points: Sequence[float], better: Any = "higher", **more: object) -> dict[str, object]:
    """The same beside a margin of 0.5 percentage points."""
    one = row(points, **more)
    ends = float(str(one["low"])), float(str(one["high"]))
    return {**one, "margin": margin_verdict(*ends, 0.005, better)}


def tuned(points: Sequence[float], arm: str = "clip", **more: object) -> dict[str, object]:
    """The comparison of an arm whose rate was chosen among five, like its control's."""
    base: dict[str, object] = {"tuned": True, "rate_tuned": True, "lr": 0.8, "lr_control": 0.4}
    base |= {"configurations": 5, "configurations_control": 5}
    return row(points, arm, **{**base, **more})


def frame(*rows: Mapping[str, object]) -> pl.DataFrame:
    columns = {key: [one.get(key) for one in rows] for key in SCHEMA}
    return pl.DataFrame(columns, schema=SCHEMA, strict=False)


def said(*rows: Mapping[str, object], margin: str = "") -> str:
    return sentence(frame(*rows), margin=parse_margin(margin) if margin else None)


def study_of(folder: Path, points: Sequence[float], **more: object) -> Study:
    """Runs of clip with these differences in percentage points, and their controls."""
    return read_study(studies.paired(folder, "clip", [x / 100 for x in points], **more))


def rewrite(study: Study, name: str, number: int = 99, arm: str = "", **more: object) -> Study:
    """The study with facts or summaries of its first runs changed."""
    runs = [run for run in study.all_runs if arm in ("", run.arm)][:number]
    for run in runs:
        content = json.loads((run.path / name).read_text("utf-8"))
        (run.path / name).write_text(json.dumps({**content, **more}), "utf-8")
    return read_study(study.folder)


def by_dose(folder: Path, gains: Mapping[float, float], n: int = 6) -> Study:
    """Clip at several doses, each with a mean gain in percentage points."""
    for seed in range(n):
        control = studies.whole(folder, "none", seed, 0.5)
        for place, (dose, gain) in enumerate(gains.items()):
            wobble = (seed - (n - 1) / 2) * (place + 1) / 10_000 * (gain != 0)
            studies.whole(folder, "clip", seed, 0.5 + gain / 100 + wobble, control, value=dose)
    return read_study(folder)


def lengths(
    folder: Path, label: str, before: float, after: float, scaled: bool = False, **more: object
) -> Study:
    """Clip whose gradients keep their direction, at two sites of other norms.

    `scaled`: the norms of both change by the same factor, otherwise to the same norm.
    """
    for seed, points in enumerate(CLIP):
        control = studies.whole(folder, "none", seed, 0.5, **more)
        place = studies.plan(folder, label, seed, control, **more)
        for site, share in zip(studies.SITES, (1.0, 2.0), strict=True):
            norms = {"norm_before": before * share, "norm_after": after * share**scaled}
            place.append("effects.jsonl", [studies.effect(label, site, 10, cosine=0.9999, **norms)])
        studies.end(place, label, 0.5 + points / 100)
    return read_study(folder)


def with_both_controls(folder: Path) -> Study:
    """Eight seeds of clip, with a plain and a norm-matched control each."""
    for seed, points in enumerate(CLIP):
        plain = studies.whole(folder, "none", seed, 0.5)
        matched = studies.plan(folder, "norm_matched-clip", seed, arm="control")
        studies.end(matched, "norm_matched-clip", 0.5 + (points - UNCLEAR[seed] / 10) / 100)
        treated = studies.whole(folder, "clip", seed, 0.5 + points / 100, plain)
        facts = folder / treated / FACTS
        controls = {"controls": {"plain": plain, "norm_matched": matched.path.name}}
        content = {**json.loads(facts.read_text("utf-8")), **controls}
        facts.write_text(json.dumps(content), "utf-8")
    return read_study(folder)


def to_target(
    folder: Path,
    treated: Sequence[int | None],
    control: Sequence[int | None],
    arm: str = "clip",
) -> Study:
    """Steps at which seeds reached a target; None did not."""
    for seed, steps in enumerate(zip(control, treated, strict=True)):
        name = None
        for label, step in zip(("none", arm), steps, strict=True):
            place = studies.plan(folder, label, seed, name, **SGD)
            name = place.path.name
            told: dict[str, object] = {
                "until": "test/loss <= 0.5",
                "until/reached": int(bool(step)),
            }
            told |= {"until/step": step} if step else {}
            studies.end(place, label, 0.5 + 0.001 * seed * (label == arm), **told)
    return read_study(folder)


def told(study: Study, margin: str = "") -> str:
    """Verdict, sentences below it and on sweeps, of a study."""
    limit = parse_margin(margin) if margin else None
    made = compare(study, limit)
    return "\n".join([*answer(study, made, limit), *sweeps(study, made)])


def warned(study: Study, *names: str, rows: pl.DataFrame | None = None) -> str:
    """The cautions of these rules."""
    found = by_rule(study, compare(study) if rows is None else rows)
    return "\n".join(f"{name}: {found[name]}" for name in names)


TARGET = [20, 24, 32, None, 36, None]
TREND = {"metric": "test/accuracy", "key": "clip.value", "name": "clip", "n": 8, "size": 0.021}
TREND |= {"low": 0.01, "high": 0.03, "p": 0.0078, "q": None, "inactive": [], "acting": [1, 2, 3]}
TREND |= {"direction": "", "extreme": "", "peak": None, "peak_difference": None}
TREND |= {"peak_p": None, "peak_q": None}
PEAK = {"p": 0.5, "extreme": "highest", "peak": 2.0, "peak_difference": 0.03}
BEST = {"label": "clip", "key": "optimizer.lr", "chosen_on": "test/accuracy", "values": 3}
BEST |= {"treated_value": 1.0, "control_value": 0.1, "edge": "clip"}
BEST |= {"q": None}
ALONE = {"splits": None, "test_examples": None, "steps": None, "lr": None, "lr_control": None}
ALONE |= {"tuned": None, "rate_tuned": None, "arm": "the surgery", "cosine": None}
DIVERGED = {"ended": 10, "diverged": 2, "diverged_control": 0, "p_diverged": 0.5}
GONE = {"difference": None, "ended": 8, "diverged": 8, "diverged_control": 0, "p_diverged": 0.0078}
VACUOUS = {"difference": None, "vacuous": "placebo"}
WIDE = [3, -2, 1, -1, 2, -3, 1, 0]
UP = [-10 * x for x in CLIP]
CHANCE = {"metric": "test/accuracy", "what": "chance is", "beside": 0.25}
DIGITS = {"task": {"name": "digits", "split_seed": 0}}

CASES: Mapping[str, Callable[[Path], str]] = {
    "a clear difference": lambda _: said(row(CLIP)),
    "a clear difference to a norm-matched control": lambda _: said(
        row([-x for x in CLIP], against="norm-matched")
    ),
    "no clear difference": lambda _: said(row(UNCLEAR)),
    "three seeds": lambda _: said(row([-1, -2, 0.5])),
    "one of the arms of a study": lambda _: said(row(CLIP, q=0.047, family=3)),
    "no arm has learned": lambda folder: told(
        rewrite(study_of(folder, CLIP), SUMMARY, learned_nothing=CHANCE)
    ),
    "one seed": lambda _: said(row([-1])),
    "several splits": lambda _: said(row(CLIP, unit="split", splits=8)),
    "identical outcomes": lambda _: said(row([0] * 8)),
    "nothing drawn at random": lambda _: said(row([1], repeats=8)),
    "an optimizer without a rate": lambda _: said(row(CLIP, lr=None, lr_control=None)),
    "a training function of the user": lambda _: said(row(CLIP, **ALONE)),
    "seeds that diverged": lambda _: said(row(CLIP, **DIVERGED)),
    "seeds that diverged, and no clear difference": lambda _: said(row(UNCLEAR, **DIVERGED)),
    "all seeds diverged": lambda _: said(row([1], **GONE)),
    "several arms": lambda _: said(
        row(CLIP, q=0.047), row(UP, "sign", q=0.0312), row(WIDE, "noise", q=0.9)
    ),
    "several arms without a clear difference": lambda _: said(
        row(CLIP, "late", q=0.06), row(WIDE, "wide", q=0.9), row(UNCLEAR, "narrow, mlp", q=0.8)
    ),
    "arms with other rates": lambda _: said(
        row(CLIP, "clip, lr=0.1", q=0.047), row(UP, "clip, lr=0.4", q=0.0312, lr=0.4)
    ),
    "arms of other tasks": lambda _: said(
        row(CLIP, "clip, digits", q=0.047), row(UP, "clip, wine", q=0.03, test_examples=54)
    ),
    "many clear arms": lambda _: said(*(row([1] * 6, f"arm{number}") for number in range(6))),
    "two arms with few seeds": lambda _: said(row([-1, -2], "a"), row([1, 3], "b")),
    "a tuned rate": lambda _: said(tuned(CLIP)),
    "the same tuned rate": lambda _: said(tuned(CLIP, lr_control=0.8)),
    "another tuned field, unequal budgets": lambda _: said(
        tuned(CLIP, chosen="value 0.01", configurations=15)
    ),
    "a tuned field alone": lambda _: said(
        row(CLIP, tuned=True, chosen="value 0.01", configurations=5)
    ),
    "a tuned field that both arms have": lambda _: said(
        row(CLIP, tuned=True, chosen="batch_size 16", chosen_control="batch_size 32")
        | {"configurations": 2, "configurations_control": 2}
    ),
    "several tuned arms": lambda _: said(tuned(CLIP, q=0.047), tuned(WIDE, "sign", q=0.9, lr=0.2)),
    "equivalent": lambda _: said(within([0.1, -0.1, 0.2, 0.0, -0.2, 0.1]), margin="0.5pp"),
    "equivalent and different": lambda _: said(within([0.1] * 5 + [0.2]), margin="0.5pp"),
    "not worse": lambda _: said(within([1.0, -0.2, 1.5, 0.1, 0.9, -0.1]), margin="0.5pp"),
    "better": lambda _: said(within([1.0, 0.9, 1.5, 1.2, 0.9, 1.1]), margin="0.5pp"),
    "worse by more": lambda _: said(within([-1.0, -0.9, -1.5, -1.2, -0.9, -1.1]), margin="0.5pp"),
    "worse": lambda _: said(within([-1.0, -0.2, -1.5, -1.2, -0.9, -1.1]), margin="0.5pp"),
    "undecided": lambda _: said(within([1.0, -1.9, 1.5, -1.2, 0.9, 0.1]), margin="0.5pp"),
    "a margin of a metric without a good side": lambda _: said(
        within(CLIP, None, metric="test/steps"), margin="0.005"
    ),
    "beyond a margin, without a good side": lambda _: said(
        within([-1.0, -0.9, -1.5, -1.2, -0.9, -1.1], None, metric="test/steps"), margin="0.005"
    ),
    "a control that is the treatment": lambda _: said(
        row([1], **VACUOUS), row([1], "noise", **VACUOUS)
    ),
    "only controls": lambda folder: told(
        read_study(Path(studies.whole(folder, "none", 0, 0.9) and folder))
    ),
    "no control": lambda folder: told(
        read_study(Path(studies.whole(folder, "clip", 0, 0.9) and folder))
    ),
    "shorter steps": lambda folder: told(lengths(folder, "clip", 8.0, 1.0, **SGD)),
    "longer steps": lambda folder: told(lengths(folder, "scale", 1.0, 4.0, **SGD)),
    "steps longer by one factor": lambda folder: told(
        lengths(folder, "scale", 1.0, 4.0, scaled=True, **SGD)
    ),
    "scaled gradients of Adam": lambda folder: told(lengths(folder, "scale", 1.0, 4.0, **ADAM)),
    "both controls": lambda folder: told(with_both_controls(folder)),
    "sooner at a target": lambda folder: told(
        to_target(folder, [10, 12, 14, 11, 13, 12], [20, 24, 32, None, 36, None])
    ),
    "a target on validation data": lambda folder: told(
        rewrite(
            rewrite(
                to_target(folder, [10, 12, 14, 11, 13, 12], TARGET),
                SUMMARY,
                until="validation/loss <= 0.5",
                validation_examples=1200,
                test_examples=450,
            ),
            FACTS,
            measured={"eval_every": 2},
        )
    ),
    "not clearly sooner at a target": lambda folder: told(
        to_target(folder, [10, 16, 22, 30, None, None], [20, 24, 32, None, 36, None])
    ),
    "few seeds at a target": lambda folder: told(to_target(folder, [10, 12], [20, 24])),
    "two arms at a target": lambda folder: told(
        to_target(folder, [10, 12, 14, 11, 13, 12], TARGET)
        and to_target(folder, [10, 16, 22, 30, None, None], TARGET, "sign")
    ),
    "rises": lambda folder: told(by_dose(folder, {0.01: 0.5, 0.1: 1, 1: 3})),
    "a peak": lambda folder: told(by_dose(folder, {0.01: 0.5, 0.1: 3, 1: 2})),
    "a trend": lambda _: trend_sentence({**TREND, "direction": "rises", "q": 0.02}),
    "no trend, the highest inside": lambda _: trend_sentence(
        {**TREND, **PEAK, "peak_p": 0.2, "inactive": [9, 10.0]}
    ),
    "a clear peak among several": lambda _: trend_sentence(
        {**TREND, **PEAK, "peak_p": 0.01, "peak_q": 0.02}
    ),
    "too few values that act": lambda _: trend_sentence(
        {**TREND, "n": None, "size": None, "acting": [1, 2], "inactive": [3]}
    ),
    "best against best, a gain": lambda _: best_sentence({**row([-x for x in CLIP]), **BEST}),
    "best against best, a loss": lambda _: best_sentence(
        {**row(CLIP), **BEST, "edge": "", "chosen_on": "validation/accuracy"}
    ),
    "best against best, unclear": lambda _: best_sentence({**row(UNCLEAR), **BEST, "edge": ""}),
    "caution: losses above a constant guess": lambda folder: warned(
        rewrite(study_of(folder, CLIP), SUMMARY, 3, "treated", chance_loss=0.4),
        "worse than a constant",
    ),
    "cautions: divergence, chance, skipped steps": lambda folder: warned(
        rewrite(
            rewrite(
                study_of(folder, CLIP), SUMMARY, 2, "treated", state="diverged", skipped_steps=3
            ),
            SUMMARY,
            5,
            "control",
            learned_nothing=CHANCE,
        ),
        "divergence",
        "control at chance",
        "skipped steps",
    ),
    "caution: one seed": lambda folder: warned(
        study_of(folder, [-1.1, -1.2, 4, -1.0, -1.5, -1.1, -1.6, -0.9]), "one seed decides"
    ),
    "caution: one split": lambda folder: warned(
        rewrite(study_of(folder, CLIP, **DIGITS), SUMMARY, test_examples=1000), "one split only"
    ),
    "caution: too few seeds": lambda folder: warned(study_of(folder, [1, -1, 2]), "few seeds"),
    "cautions: after a look": lambda folder: warned(
        rewrite(rewrite(study_of(folder, CLIP), FACTS, 3, looked=6), FACTS, margin_after=True),
        "runs added after a look",
        "margin after a look",
        rows=frame(within(CLIP)),
    ),
    "caution: splits": lambda folder: warned(
        study_of(folder, CLIP), "several splits", rows=frame(row(CLIP, unit="split", splits=8))
    ),
    "caution: nothing changed": lambda folder: warned(
        rewrite(study_of(folder, [0] * 6), SUMMARY, arm="treated", idle=True), "nothing changed"
    ),
    "caution: unfinished": lambda folder: warned(read_study(studies.mixed(folder)), "unfinished"),
    "caution: metrics": lambda folder: warned(
        rewrite(study_of(folder, CLIP), FACTS, 1, measured={"metric": "test/f1"}), "metric"
    ),
    "cautions: controls that act": lambda folder: "\n".join(
        warned(study_of(folder, CLIP), *names, rows=frame(row(CLIP, against=against, **ADAM_ROW)))
        for against, names in {
            "norm-matched": ("norm-matched control", "scale of gradients"),
            "update-norm-matched": ("update-norm-matched control",),
            "placebo": ("placebo control",),
        }.items()
    ),
    "caution: another control": lambda folder: warned(
        rewrite(study_of(folder, CLIP), FACTS, 8, "treated", controls={"placebo": "x"}),
        "other controls",
    ),
    "cautions: repeats, several arms, a vacuous control": lambda folder: warned(
        study_of(folder, CLIP),
        "vacuous control",
        "deterministic repeats",
        "several arms",
        rows=frame(row(CLIP, q=0.03), row([1], "noise", repeats=8), row([1], "scale", **VACUOUS)),
    ),
}
ADAM_ROW = {"optimizer": "Adam", "scale_free": True}


def page() -> str:
    """The sentences of all cases."""
    return "\n\n".join(f"# {name}\n{text}" for name, text in _texts()) + "\n"


def _texts() -> Iterator[tuple[str, str]]:
    for name, case in CASES.items():
        with TemporaryDirectory() as folder:
            (Path(folder) / "study").mkdir()
            yield name, case(Path(folder) / "study")


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
