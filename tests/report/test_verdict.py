"""The verdict sentence and the cautions, against frames and studies made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl
import pytest

from gradsurg.experiment.run_directory import FACTS, SUMMARY
from gradsurg.report.cautions import by_rule
from gradsurg.report.compare import SCHEMA, compare
from gradsurg.report.study import Study, read_study
from gradsurg.report.verdict import best_sentence, reached, sentence, trend_sentence
from gradsurg.stats import finding, margin_verdict, paired_difference, parse_margin
from tests.report import studies

CLIP = [-0.78, -0.61, -0.11, -0.83, 0.11, -0.67, -0.44, -0.67]  # percentage points
PLACE = "one split, 450 test examples"


def row(points: Sequence[float], arm: str = "clip", **more: object) -> dict[str, object]:
    """The comparison of an arm with these differences in percentage points."""
    found = paired_difference([0.9 + x / 100 for x in points], [0.9] * len(points))
    low, high = found.interval or found.range
    told = {
        "arm": arm,
        "against": "control",
        "metric": "test/accuracy",
        "unit": "seed",
        "n": found.n,
        "planned": found.n,
        "population": PLACE,
        "repeats": 0,
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


def frame(*rows: Mapping[str, object]) -> pl.DataFrame:
    columns = {key: [one.get(key) for one in rows] for key in SCHEMA}
    return pl.DataFrame(columns, schema=SCHEMA, strict=False)


def said(*rows: Mapping[str, object], margin: str = "") -> str:
    return sentence(frame(*rows), margin=parse_margin(margin) if margin else None)


def test_a_clear_difference_has_direction_size_interval_p_wins_and_population() -> None:
    assert said(row(CLIP)) == (
        "clip lowers test accuracy by 0.50 pp (95 % interval 0.20 to 0.75 pp; exact sign-flip p "
        "0.0234; lower in 7 of 8 seeds; one split, 450 test examples)."
    )
    up = said(row([-x for x in CLIP], against="norm-matched", population=""))
    assert up.startswith("clip raises test accuracy by 0.50 pp against norm-matched (95 % interval")
    assert up.endswith("; higher in 7 of 8 seeds).")


def test_no_clear_difference_comes_with_its_signed_interval() -> None:
    text = said(row([0.5, -0.3, 0.2, -0.1, 0.0, 0.4, -0.2, 0.3]))
    start = (
        "No clear difference in test accuracy between clip and control: +0.10 pp (95 % interval "
    )
    assert text.startswith(start + "-0.17 to +0.37 pp; exact sign-flip p 0.422; ")
    assert text.endswith("higher in 4 and lower in 3 of 8 seeds; one split, 450 test examples).")


@pytest.mark.parametrize(
    ("points", "number"), [([-1, -2, 0.5], "3 seeds are"), ([-1], "1 seed is")]
)
def test_few_seeds_have_a_range_and_no_p(points: list[float], number: str) -> None:
    text = said(row(points))
    assert text.startswith("Test accuracy of clip minus control: ")
    assert text.endswith(f"; {number} too few for a test.")
    assert "p 0" not in text
    assert ("range over 3 seeds -2.00 to +0.50 pp; lower in 2 of 3" in text) == (len(points) == 3)
    assert "interval" not in text


def test_splits_identical_arms_and_repeated_seeds_are_named_so() -> None:
    text = said(row(CLIP, unit="split", population="8 splits of 450 test examples"))
    assert text.endswith("; lower in 7 of 8 splits; 8 splits of 450 test examples).")
    assert said(row([0] * 8)) == "Test accuracy is identical with clip and control in 8 seeds."
    assert said(row([1], repeats=8)).endswith("; one training is too few for a test.")


def test_diverged_seeds_come_first() -> None:
    text = said(row(CLIP, ended=10, diverged=2, diverged_control=0, p_diverged=0.5))
    assert text.startswith(
        "2 of 10 seeds diverged with clip and 0 with control (exact McNemar p 0.5); over the "
        "others, clip lowers test accuracy by 0.50 pp ("
    )
    gone = row([1], difference=None, ended=8, diverged=8, diverged_control=0, p_diverged=0.0078)
    assert said(gone) == (
        "8 of 8 seeds diverged with clip and 0 with control (exact McNemar p 0.0078); no seed is "
        "left to compare."
    )


def test_of_several_arms_the_clear_ones_are_named_and_the_others_counted() -> None:
    wide, narrow = [3, -2, 1, -1, 2, -3, 1, 0], [0.1, -0.1, 0.2, 0, 0, -0.2, 0.1, 0]
    text = said(
        row(CLIP, q=0.047),
        row([-x * 10 for x in CLIP], "a, lr=1", q=0.0312),
        row(wide, "wide", q=0.9),
        row(narrow, "narrow", q=0.8),
        row(CLIP, "late", q=0.06),
    )
    assert text.startswith(
        "5 arms against control: a, lr=1 raises test accuracy by 5.00 pp (95 % interval 2.03 to "
        "7.50 pp; exact sign-flip p 0.0234, q 0.0312; higher in 7 of 8 seeds); clip lowers test "
        "accuracy by 0.50 pp ("
    )
    span = frame(row(wide)).row(0, named=True)
    ends = f"{100 * span['low']:+.2f} to {100 * span['high']:+.2f} pp"
    assert text.endswith(
        "no clear difference in test accuracy with late, wide and narrow (widest 95 % interval "
        f"{ends}; least q 0.06; n = 8) ({PLACE})."
    )
    few = said(row([-1, -2], "a"), row([1, 3], "b"))
    assert few.startswith("2 arms against control: test accuracy of b minus control: +2.00 pp (")
    assert few.endswith("; 2 seeds are too few for a test.")
    text = said(*(row([1] * 6, f"arm{number}") for number in range(6)))
    assert "; 2 more: higher (" in text
    assert text.count(" raises test accuracy by ") == 4


@pytest.mark.parametrize(
    ("points", "start"),
    [
        ([0.1, -0.1, 0.2, 0.0, -0.2, 0.1], "clip and control are equivalent in test accuracy"),
        ([1.0, -0.2, 1.5, 0.1, 0.9, -0.1], "clip is not worse than control in test accuracy by"),
        ([1.0, 0.9, 1.5, 1.2, 0.9, 1.1], "clip is better than control in test accuracy: +1.10 pp"),
        ([-1.0, -0.9, -1.5, -1.2, -0.9, -1.1], "clip is worse than control in test accuracy by m"),
        ([-1.0, -0.2, -1.5, -1.2, -0.9, -1.1], "clip is worse than control in test accuracy: -0"),
        ([1.0, -1.9, 1.5, -1.2, 0.9, 0.1], "Whether clip and control are equivalent in test"),
    ],
)
def test_a_margin_is_answered_with_the_signed_interval(points: list[float], start: str) -> None:
    one = row(points)
    one["margin"] = margin_verdict(float(str(one["low"])), float(str(one["high"])), 0.005, "higher")
    text = said(one, margin="0.5pp")
    assert text.startswith(start)
    assert ("0.50 pp" in text) == (one["margin"] not in ("better", "worse"))
    assert "95 % interval" in text
    assert ("two one-sided tests" in text) == (one["margin"] == "equivalent")
    small = said(row([0.1] * 5 + [0.2], margin="equivalent"), margin="0.5pp")
    assert small.startswith(
        "clip raises test accuracy by 0.12 pp, less than the margin of 0.50 pp ("
    )
    assert "b and control are equivalent in test accuracy within 0.50 pp: +0.00 pp (" in said(
        one, row([0] * 6, "b", margin="equivalent"), margin="0.5pp"
    )


def test_a_clear_difference_of_a_metric_without_a_good_side_is_told_beside_a_margin() -> None:
    text = said(row(CLIP, metric="test/steps", margin="undecided"), margin="0.001")
    assert text.startswith("clip lowers test steps by 0.005 (95 % interval 0.00203 to ")


def test_a_control_that_is_the_treatment_itself_gives_no_verdict() -> None:
    empty = {"difference": None, "vacuous": "placebo"}
    text = said(row([1], **empty), row([1], "noise", **empty))
    assert text.startswith("clip and noise turned no gradient (cosine 1 at every site), so the ")
    assert text.endswith("compare with control=plain.")


def test_a_vacuous_control_of_some_arms_is_a_caution(tmp_path: Path) -> None:
    study, empty = study_of(tmp_path, CLIP), row([1], "scale", difference=None, vacuous="placebo")
    text = by_rule(study, frame(row(CLIP), empty))["vacuous control"]
    assert text.startswith("scale turned no gradient (cosine 1")
    for made in (frame(empty), frame(row(CLIP))):
        assert "vacuous control" not in by_rule(study, made)


def test_rows_of_blocks_and_other_metrics_are_no_part_of_the_sentence() -> None:
    others = [row(CLIP, block="split 1"), row(CLIP, metric="test/loss")]
    assert said(row(CLIP), *others) == said(row(CLIP))


def study_of(folder: Path, points: Sequence[float], **more: object) -> Study:
    """Eight runs of clip with these differences in percentage points, and their controls."""
    return read_study(studies.paired(folder, "clip", [x / 100 for x in points], **more))


def warned(study: Study) -> dict[str, str]:
    """The cautions of a study by the name of their rule."""
    told = by_rule(study, compare(study))
    assert all(text.endswith(".") and text.count(". ") == 0 for text in told.values()), told
    return told


def rewrite(study: Study, name: str, number: int = 99, arm: str = "", **more: object) -> Study:
    """The study with facts or summaries of its first runs changed."""
    runs = [run for run in study.all_runs if arm in ("", run.arm)][:number]
    for run in runs:
        content = json.loads((run.path / name).read_text("utf-8"))
        (run.path / name).write_text(json.dumps({**content, **more}), "utf-8")
    return read_study(study.folder)


def test_a_plain_clear_result_needs_no_caution(tmp_path: Path) -> None:
    assert warned(study_of(tmp_path, CLIP)) == {}


def test_divergence_control_at_chance_and_skipped_steps_are_told(tmp_path: Path) -> None:
    study = study_of(tmp_path, CLIP)
    study = rewrite(study, SUMMARY, 2, "treated", state="diverged", skipped_steps=3)
    chance = {"metric": "test/accuracy", "what": "chance is", "beside": 0.25}
    told = warned(rewrite(study, SUMMARY, 4, "control", learned_nothing=chance))
    assert list(told)[:2] == ["divergence", "control at chance"]
    assert told["control at chance"] == (
        "Training did not learn anything with control in 4 of 8 seeds (test accuracy 50.00%, and "
        "chance is 25.00%): a comparison with a control at chance tells little."
    )
    assert told["skipped steps"].startswith("2 runs skipped 6 steps")


def test_one_seed_that_outweighs_is_told_and_skew_of_a_clear_difference_too(tmp_path: Path) -> None:
    heavy = warned(study_of(tmp_path / "a", [0, 0.1, -0.1, 0.2, -0.2, 0.1, -0.1, -20]))
    assert heavy["one seed outweighs"] == (
        "One seed outweighs all others together with clip (seed 7: -20.00 pp, median "
        "of all -0.05 pp)."
    )
    assert "skew" not in heavy
    tail = [3, 3.1, 3.2, 3, 3.1, 3.2, 3.1, -1]
    skewed = warned(study_of(tmp_path / "b", tail))
    assert "those of clip are skewed against the verdict" in skewed["skew"]
    same = warned(study_of(tmp_path / "c", [1, 1.1, 1.2, 1, 1.1, 1.2, 1.1, 6]))
    assert "skew" not in same  # a tail on the side of the verdict makes it no weaker


def test_one_split_is_told_beside_a_claim_alone(tmp_path: Path) -> None:
    task = {"task": {"name": "digits", "split_seed": 0}}
    clear = rewrite(study_of(tmp_path / "a", CLIP, **task), SUMMARY, test_examples=1000)
    assert "(one test example is 0.10 pp)" in warned(clear)["one split only"]
    other = {"task": {"name": "wine", "split_seed": 0}}
    both = study_of(tmp_path / "a", CLIP, **other)
    assert warned(both)["one split only"].count("new data") == 1
    unclear = study_of(tmp_path / "b", [1, -1, 2, -2, 1, -1, 2, -2], **task)
    assert "one split only" not in warned(unclear)


def test_few_seeds_tell_the_effect_that_they_find(tmp_path: Path) -> None:
    unclear = warned(study_of(tmp_path / "a", [1, -1, 2, -2, 1, -1, 2, -2]))["few seeds"]
    assert unclear.startswith("8 seeds find a difference of 2.0")
    assert "in 80 % of studies (sd of the differences 1.69 pp)" in unclear
    few = warned(study_of(tmp_path / "b", [1, -1, 2]))["few seeds"]
    assert few == "A test at the level 0.05 needs 6 seeds."
    enough = warned(study_of(tmp_path / "e", [1, -1, 2, -2, 1, -1]))["few seeds"]
    assert enough.startswith("6 seeds find a difference of ")
    one = warned(study_of(tmp_path / "c", [1]))["few seeds"]
    assert one == "A test at the level 0.05 needs 6 seeds."
    two = tmp_path / "d"
    studies.paired(two, "clip", [0.01, -0.01, 0.02, -0.02, 0, 0.01])
    studies.paired(two, "noise", [0.01, -0.01, 0.02, -0.02, 0, 0.01])
    told = warned(read_study(two))
    assert "an arm that differs alone, needs 7 seeds" in told["few seeds"]
    for seed in range(6):
        control = studies.whole(two, "none", seed, 0.5 + seed / 100, lr=1.0)
        for label in ("idle", "still"):
            studies.whole(two, label, seed, 0.5 + seed / 100, control, lr=1.0)
    assert "needs 7 seeds" in warned(read_study(two))["few seeds"]  # these two are in no correction
    assert told["several arms"].startswith("Several arms are compared at once: q is p corrected")


def test_runs_after_a_look_and_a_margin_after_it_are_told(tmp_path: Path) -> None:
    study = rewrite(study_of(tmp_path, CLIP), FACTS, 3, looked=6)
    told = warned(study)
    assert "(3 of clip after 6)" in told["runs added after a look"]
    assert "margin after a look" not in told
    late = by_rule(study, compare(study, parse_margin("1pp")))["margin after a look"]
    assert late.startswith("The margin was given when outcomes were known")
    planned = rewrite(study, FACTS, measured={"margin": "1pp"})
    assert "margin after a look" not in warned(planned)
    told = warned(rewrite(planned, FACTS, 1, margin_after=True, looked=5))
    assert "margin after a look" in told


def test_a_transform_that_changed_nothing_and_several_splits_are_told(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path / "a", "none", seed, 0.9 + seed / 100)
        studies.whole(tmp_path / "a", "clip", seed, 0.9 + seed / 100, control, value=0.5)
        studies.whole(tmp_path / "a", "clip", seed, 0.8 + seed / 110, control, value=0.001)
    told = "No gradient was changed by clip 0.5: trained as the control."
    study = read_study(tmp_path / "a")
    for arm, text in (("clip 0.001", None), ("clip 0.5", told)):
        (runs,) = (one.runs for one in study.arms if one.name == arm)
        for run in runs:
            content = json.loads((run.path / SUMMARY).read_text("utf-8"))
            (run.path / SUMMARY).write_text(json.dumps({**content, "idle": True}), "utf-8")
        study = read_study(tmp_path / "a")
        assert warned(study).get("nothing changed") == text
    assert study.runs.filter("idle")["arm"].unique().sort().to_list() == ["clip 0.001", "clip 0.5"]
    for split in range(6):
        task = {"name": "digits", "split_seed": split}
        studies.paired(tmp_path / "b", "clip", [0.1 + split / 100], task=task)
    assert "Splits share examples" in warned(read_study(tmp_path / "b"))["several splits"]
    assert "several splits" not in warned(study)


def test_states_of_runs_and_metrics_are_told(tmp_path: Path) -> None:
    told = warned(read_study(studies.mixed(tmp_path / "a")))
    assert told["unfinished"] == (
        "Of 13 runs, 1 interrupted, 1 planned, 1 diverged, 1 failed and 1 missing: the table of "
        "runs has the reasons, numbers are of the others."
    )
    study = study_of(tmp_path / "b", CLIP)
    wrong = warned(rewrite(study, FACTS, 1, measured={"metric": "test/f1"}))
    assert wrong["metric"].startswith("metric=test/f1: no finished run has it; there are test/acc")
    both = rewrite(study, FACTS, 1, measured={"metric": "test/accuracy"})
    both = rewrite(both, FACTS, 1, "control", measured={"metric": "train/loss"})
    assert "planned with metric=test/accuracy and train/loss" in warned(both)["metric"]


def test_logs_that_cannot_be_read_are_told_in_one_line(tmp_path: Path) -> None:
    study = study_of(tmp_path, CLIP)
    (study.all_runs[0].path / "metrics.jsonl").write_text('{"step": "x"}\n[]\n', "utf-8")
    tuning = tmp_path / "tuning"
    tuning.mkdir()
    (tuning / "a.json").write_text("{}", "utf-8")
    text = warned(read_study(tmp_path))["unreadable files"]
    assert "a.json" in text
    assert "metrics.jsonl" in text


@pytest.mark.parametrize("kind", ["norm_matched", "update_norm_matched", "placebo"])
def test_a_control_that_acts_is_explained(tmp_path: Path, kind: str) -> None:
    adam = {"optimizer": {"name": "Adam"}}
    for seed in range(3):
        plain = studies.whole(tmp_path, "none", seed, 0.9, **adam)
        place = studies.plan(tmp_path, f"{kind}-clip", seed, arm="control", **adam)
        studies.end(place, f"{kind}-clip", 0.8)
        run = studies.whole(tmp_path, "clip", seed, 0.7 + seed / 100, place.path.name, **adam)
        facts = tmp_path / run / FACTS
        controls = {"plain": plain, kind: place.path.name}
        both = {**json.loads(facts.read_text("utf-8")), "controls": controls}
        facts.write_text(json.dumps(both), "utf-8")
    told = warned(read_study(tmp_path))
    name = kind.replace("_", "-")
    assert told[f"{name} control"].startswith(f"The {name} arm ")
    assert "clip" in told[f"{name} control"]
    assert ("scale of gradients" in told) == (kind == "norm_matched")
    assert "other controls" not in told


def test_repeats_and_two_controls_are_told(tmp_path: Path) -> None:
    study = rewrite(study_of(tmp_path, [1] * 8), FACTS, 8, "treated", controls={"placebo": "x"})
    told = warned(study)
    assert "(8 with control=placebo)" in told["other controls"]
    assert told["deterministic repeats"].startswith("The same numbers from the 8 seeds of clip: ")


def test_a_trend_has_a_size_and_a_direction_or_none() -> None:
    one = {"metric": "test/accuracy", "key": "clip.value", "name": "clip", "n": 8, "size": 0.021}
    ends = {"low": 0.01, "high": 0.03, "p": 0.0078, "q": 0.02}
    assert trend_sentence({**one, **ends, "direction": "rises"}) == (
        "The difference in test accuracy rises with clip.value (clip): +2.10 pp from the smallest "
        "to the largest (95 % interval +1.00 to +3.00 pp; sign-flip p 0.0078, q 0.02; n = 8; "
        "a further test, not among the q of the arms)."
    )
    none = {"low": None, "high": None, "p": 0.5, "q": None, "direction": ""}
    assert trend_sentence({**one, **none, "n": 3}) == (
        "No clear trend of the difference in test accuracy with clip.value (clip): +2.10 pp from "
        "the smallest to the largest (n = 3; a further test, not among the q of the arms)."
    )


def test_best_arm_against_best_arm_has_values_a_gain_or_none_and_the_usable_values() -> None:
    best = {"label": "clip", "key": "optimizer.lr", "chosen_on": "test/accuracy", "values": 3}
    best |= {"treated_value": 1.0, "control_value": 0.1, "edge": "clip"}
    best |= {"usable_treated": 2, "usable_control": 1}
    text = best_sentence({**row([-x for x in CLIP], q=None), **best})
    assert text.startswith(
        "Each at its best optimizer.lr, chosen on test accuracy, which flatters both: clip 90.50% "
        "at 1 against control 90.00% at 0.1, +0.50 pp (95 % interval "
    )
    assert text.endswith(
        "which is a gain at the best; more values are usable, within 5 pp of the best (2 against 1 "
        "of 3); the best of clip is at the edge: sweep further."
    )
    best |= {"edge": "", "chosen_on": "validation/accuracy", "usable_treated": 1}
    text = best_sentence({**row(CLIP, q=None), **best})
    assert "chosen on validation accuracy: clip 89.50% at 1" in text
    assert text.endswith("(1 against 1 of 3).")
    assert "is a loss at the best; as many values are usable" in text
    unclear = {**row([1, -1, 2, -2, 1, -1], q=None), **best, "usable_treated": 0}
    assert "is no clear difference at the best; fewer values are" in best_sentence(unclear)


def test_the_steps_to_a_target_are_told_beside_the_control(tmp_path: Path) -> None:
    steps = {"none": [20, 24, 32, None, 36, None], "clip": [10, 16, 22, 30, None, None]}
    controls = []
    for label, reached_at in steps.items():
        for seed, step in enumerate(reached_at):
            beside = controls[seed] if label == "clip" else None
            place = studies.plan(tmp_path, label, seed, beside)
            controls.append(place.path.name)
            told = {"until": "test/loss <= 0.5", "until/reached": int(step is not None)}
            told |= {"until/step": step} if step is not None else {}
            studies.end(place, label, 0.5, **told)
    # sooner in four, later in one, and in one neither got there: p = 2 * (1 + 5) / 2^5
    assert reached(read_study(tmp_path)) == [
        "test/loss <= 0.5 was reached by 4 of 6 seeds of clip and 4 of 6 seeds of control.",
        "clip reached it sooner than control in 4 of 6 seeds and later in 1 (a seed that never did "
        "counts as latest; exact sign test p 0.375; median of 3 that both did -10 steps).",
        "Outcomes are of the step at which each run has ended.",
    ]
    assert reached(study_of(tmp_path / "none", CLIP)) == []


def test_without_a_pair_the_sentence_tells_what_there_is(tmp_path: Path) -> None:
    def told(name: str) -> str:
        study = read_study(tmp_path / name)
        return sentence(compare(study), study)

    control = studies.whole(tmp_path / "both", "none", 0, 0.9)
    assert told("both") == "There is no treated arm to compare: 1 of 1 run finished."
    studies.whole(tmp_path / "alone", "clip", 0, 0.9)
    assert told("alone").startswith("There is no control to compare with: 1 of 1 run finished, ")
    studies.plan(tmp_path / "both", "clip", 0, control)
    text = "Nothing can be compared: 1 of 2 runs finished, and no seed in both arms."
    assert told("both") == text
