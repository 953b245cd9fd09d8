"""The facts that verdicts and cautions are made of; their words are in `sentences.txt`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsurg.experiment.run_directory import FACTS, SUMMARY
from gradsurg.report.cautions import by_rule
from gradsurg.report.compare import compare
from gradsurg.report.study import Study, read_study
from gradsurg.report.verdict import below, is_clear_peak, population, reached, sentence, setting
from gradsurg.stats import parse_margin
from tests.report import studies
from tests.report.sentences import (
    CLIP,
    SGD,
    TREND,
    VACUOUS,
    frame,
    lengths,
    rewrite,
    row,
    said,
    study_of,
    to_target,
    tuned,
)


def one(**more: object) -> dict[str, object]:
    """A row of a comparison."""
    return frame(row(CLIP, **more)).row(0, named=True)


def test_a_setting_has_the_rate_the_steps_and_whether_they_were_tuned() -> None:
    parts = setting(one(lr=0.25, lr_control=0.25, steps=1500))
    assert (parts["rate"], parts["steps"], parts["budget"]) == (
        "lr 0.25",
        "1,500 steps",
        "not tuned",
    )
    assert setting(one(lr=0.1, lr_control=0.4))["rate"] == ""  # two arms that are named by them
    unknown = setting(one(lr=None, steps=None, tuned=None, splits=None, test_examples=None))
    assert set(unknown.values()) == {""}


def test_a_tuned_setting_has_both_choices_and_both_budgets() -> None:
    parts = setting(frame(tuned(CLIP)).row(0, named=True))
    assert parts["rate"] == "the chosen lr 0.8 (control 0.4)"
    assert parts["budget"] == "5 configurations each"
    parts = setting(frame(tuned(CLIP, chosen="value 0.01", configurations=15)).row(0, named=True))
    assert "value 0.01" in parts["rate"]
    assert [number in parts["budget"] for number in ("15", "5", "unequal")] == [True] * 3
    fixed = setting(one(tuned=True, chosen="value 0.01", configurations=5))["rate"]
    assert fixed.startswith("lr 0.1, ")  # only the value was chosen


def test_the_data_of_a_result_are_splits_and_test_examples() -> None:
    assert population(one(splits=1, test_examples=1450)) == "one split, 1,450 test examples"
    assert population(one(splits=8)) == "8 splits of 450 test examples"
    two = {"splits": 8, "unit": "split", "planned": 16}
    assert population(one(**two)) == "8 splits of 2 seeds, 450 test examples each"
    assert population(one(**two, not_compared="1 failed")) == "8 splits of 450 test examples"
    assert population(one(splits=None)) == "450 test examples"
    assert population(one(splits=8, test_examples=None)) == "8 splits"


def test_what_all_arms_have_in_common_is_said_once() -> None:
    text = said(row(CLIP, "clip"), row(CLIP, "sign"))
    assert [text.count(part) for part in ("lr 0.1", "500 steps", "450 test")] == [1, 1, 1]
    text = said(row(CLIP, "clip, lr=0.1"), row(CLIP, "clip, lr=0.4", lr=0.4))
    assert "lr 0" not in text  # the names have it
    text = said(tuned(CLIP), tuned(CLIP, "sign", lr=0.2))
    assert [text.count(part) for part in ("lr 0.8", "lr 0.2", "500 steps")] == [1, 1, 1]


def test_of_several_arms_the_clear_ones_come_first_by_their_size() -> None:
    wide = [3, -2, 1, -1, 2, -3, 1, 0]
    text = said(
        row(wide, "wide", q=0.9), row(CLIP, q=0.047), row([-x * 10 for x in CLIP], "big", q=0.03)
    )
    assert text.index("big ") < text.index("clip ") < text.index("wide ")
    text = said(*(row([1] * 6, f"arm{number}") for number in range(6)))
    assert [f"arm{number} " in text for number in range(6)] == [True] * 4 + [False] * 2


def test_arms_without_a_clear_difference_have_an_interval_each() -> None:
    text = said(row(CLIP, "late", q=0.06), row([3, -2, 1, -1, 2, -3, 1, 0], "wide", q=0.9))
    for part in ("late: -0.50 pp (-0.75 to -0.20 pp)", "wide: +0.13 pp (-1.67 to +2.00 pp)"):
        assert part in text
    assert "q 0.06" in text


def test_diverged_seeds_come_first() -> None:
    text = said(row(CLIP, ended=10, diverged=2, diverged_control=0, p_diverged=0.5))
    assert text.startswith("2 of 10 seeds diverged")
    assert "lowers" in text


def test_rows_of_blocks_and_other_metrics_are_no_part_of_the_sentence() -> None:
    others = [row(CLIP, block="split 1"), row(CLIP, metric="test/loss")]
    assert said(row(CLIP), *others) == said(row(CLIP))


@pytest.mark.parametrize(
    ("label", "before", "after", "more", "words"),
    [
        ("clip", 8.0, 1.0, SGD, ["shortened", "8 to 16", "norm_matched"]),
        ("scale", 1.0, 4.0, SGD, ["lengthened", "2 to 4", "norm_matched"]),
        ("scale", 1.0, 4.0, {"optimizer": {"name": "Adam", "lr": 0.1}}, ["lengthened", "Adam"]),
        ("clip", 1.0, 1.1, SGD, None),  # the other site is divided by 1.8
    ],
)
def test_a_transform_of_lengths_alone_is_told(
    tmp_path: Path, label: str, before: float, after: float, more: dict, words: list[str] | None
) -> None:
    study = lengths(tmp_path, label, before, after, **more)
    lines = below(compare(study), study)
    assert len(lines) == 1
    assert all(word in lines[0] for word in words or ["changed the length", "0.55 to 1.1"])
    assert ("tune=lr" in lines[0]) == ("Adam" not in lines[0])


@pytest.mark.parametrize(
    "changed",
    [
        {"cosine": 0.98, "verdict": "no clear difference"},
        {"cosine": None},
        {"norm_low": 0.95},
        {"rate_tuned": True},
        {"against": "placebo"},
    ],
)
def test_no_other_transform_is_told_to_change_lengths(tmp_path: Path, changed: dict) -> None:
    study = study_of(tmp_path, CLIP)
    alone = {"cosine": 0.999, "norm_low": 0.5, "norm_high": 1.0}
    assert len(below(frame(row(CLIP, **alone)), study)) == 1
    assert below(frame(row(CLIP, **{**alone, **changed})), study) == []


def test_a_turned_and_shortened_gradient_is_named_beside_a_clear_difference(tmp_path: Path) -> None:
    study = study_of(tmp_path, CLIP)
    turned = {"cosine": 0.9, "norm_low": 0.14, "norm_high": 0.5}
    (line,) = below(frame(row(CLIP, **turned)), study)
    assert "0.14 to 0.5" in line
    assert "tune=lr" in line
    assert below(frame(row(CLIP, **turned, scale_free=True)), study) == []


def test_a_transform_that_turns_nothing_is_not_sent_to_a_norm_matched_control(
    tmp_path: Path,
) -> None:
    alone = {"cosine": 1.0, "norm_low": 0.5, "norm_high": 1.0}
    (text,) = below(frame(row(CLIP, **alone)), study_of(tmp_path, CLIP))
    assert "tune=lr" in text
    assert "norm_matched" not in text


def test_a_vacuous_control_of_some_arms_is_a_caution(tmp_path: Path) -> None:
    study, empty = study_of(tmp_path, CLIP), row([1], "scale", **VACUOUS)
    assert "scale" in by_rule(study, frame(row(CLIP), empty))["vacuous control"]
    for made in (frame(empty), frame(row(CLIP))):
        assert "vacuous control" not in by_rule(study, made)


def warned(study: Study) -> dict[str, str]:
    """The cautions of a study by the name of their rule."""
    told = by_rule(study, compare(study))
    assert all(text.endswith(".") and text.count(". ") == 0 for text in told.values()), told
    return told


def test_a_plain_clear_result_needs_no_caution(tmp_path: Path) -> None:
    assert warned(study_of(tmp_path, CLIP)) == {}
    skewed = [3, 3.1, 3.2, 3, 3.1, 3.2, 3.1, -1]
    assert warned(study_of(tmp_path / "b", skewed)) == {}


def test_divergence_control_at_chance_and_skipped_steps_are_told(tmp_path: Path) -> None:
    study = study_of(tmp_path, CLIP)
    study = rewrite(study, SUMMARY, 2, "treated", state="diverged", skipped_steps=3)
    chance = {"metric": "test/accuracy", "what": "chance is", "beside": 0.25}
    few = warned(rewrite(study, SUMMARY, 4, "control", learned_nothing=chance))
    assert "tells little" not in few["control at chance"]
    told = warned(rewrite(study, SUMMARY, 5, "control", learned_nothing=chance))
    assert list(told)[:2] == ["divergence", "control at chance"]
    for part in ("control in 5 of 8 seeds", "50.00%", "25.00%", "tells little"):
        assert part in told["control at chance"]
    assert "2 runs skipped 6 steps" in told["skipped steps"]


def test_losses_above_that_of_a_constant_guess_come_first(tmp_path: Path) -> None:
    study = rewrite(study_of(tmp_path, CLIP), SUMMARY, 3, "treated", chance_loss=0.4)
    told = warned(rewrite(study, SUMMARY, 1, "control", chance_loss=0.5, skipped_steps=1))
    assert list(told) == ["worse than a constant", "skipped steps"]
    assert "clip in 3 of 8 seeds (0.5 against 0.4)" in told["worse than a constant"]
    assert "control" not in told["worse than a constant"]  # 0.5 is not above 0.5


def test_where_no_arm_has_learned_there_is_nothing_to_compare(tmp_path: Path) -> None:
    chance = {"metric": "test/accuracy", "what": "chance is", "beside": 0.25}
    study = rewrite(
        study_of(tmp_path, CLIP, **SGD), SUMMARY, learned_nothing=chance, chance_loss=0.4
    )
    made = compare(study)
    text = sentence(made, study)
    for part in ("Neither clip nor control", "lr 0.1, 40 steps", "49.50% and 50.00%", "25.00%"):
        assert part in text
    assert [part in text for part in (" p ", "lowers")] == [False] * 2
    assert (below(made, study), by_rule(study, made)) == ([], {})
    study = rewrite(study, SUMMARY, 4, "control", learned_nothing={})
    assert "lowers" in sentence(made, study)
    told = warned(study)
    assert "clip in 8 of 8 seeds (test accuracy" in told["control at chance"]
    assert "control in 4 of 8 seeds (0.5 against 0.4)" in told["worse than a constant"]
    assert "clip" not in told["worse than a constant"]  # it is said above


def test_one_seed_that_decides_is_told(tmp_path: Path) -> None:
    study, rest = study_of(tmp_path, CLIP), [-1.1, -1.2, -1.0, -1.5, -1.1, -1.6, -0.9]

    def told(points: Sequence[float], **more: object) -> str:
        return by_rule(study, frame(row(points, **more))).get("one seed decides", "")

    seeds = {"seeds": [*range(8)]}
    for part in ("clip", "seed 2 ", "+4.00 pp", "all -1.10 pp", "-1.20 pp, p 0.0156"):
        assert part in told([*rest[:2], 4, *rest[2:]], **seeds)
    assert "one split" in told([*rest, 4], unit="split", splits=8)
    assert told([*rest, 4], q=0.9, family=3)
    assert not told([*rest, 4], q=0.9, family=4)  # its p of 1/64 could have a q of 4/64
    assert not told([*rest, -20])  # clear without it too
    assert not told([1.0, 1.5, 1.1, 1.6, 0.9, 9])  # five seeds would be left
    assert not told([-3, -0.2, -2, -1.5, -0.4, -2.6, -0.9, 2.5])  # not far
    assert not told([-1.0] * 7 + [4.0])  # most are equal: no distance is measured
    assert "-0.25 pp, p 0.0625" in told([-0.1, -0.2, 0.03, -0.5, -0.6, -0.45, 0.06, -20.0])


def test_one_split_is_told_beside_a_claim_alone(tmp_path: Path) -> None:
    task = {"task": {"name": "digits", "split_seed": 0}}
    clear = rewrite(study_of(tmp_path / "a", CLIP, **task), SUMMARY, test_examples=1000)
    assert "(one test example is 0.10 pp)" in warned(clear)["one split only"]
    other = {"task": {"name": "wine", "split_seed": 0}}
    both = study_of(tmp_path / "a", CLIP, **other)
    assert warned(both)["one split only"].count("new data") == 1
    unclear = study_of(tmp_path / "b", [1, -1, 2, -2, 1, -1, 2, -2], **task)
    assert "one split only" not in warned(unclear)


def test_seeds_too_few_for_a_test_are_told(tmp_path: Path) -> None:
    few = warned(study_of(tmp_path / "b", [1, -1, 2]))["few seeds"]
    assert "needs 6 seeds" in few
    assert "few seeds" not in warned(study_of(tmp_path / "e", [1, -1, 2, -2, 1, -1]))
    alone = warned(study_of(tmp_path / "c", [1]))["few seeds"]
    assert "needs 6 seeds" in alone
    two = tmp_path / "d"
    studies.paired(two, "clip", [0.01, -0.01, 0.02, -0.02, 0, 0.01])
    studies.paired(two, "noise", [0.01, -0.01, 0.02, -0.02, 0, 0.01])
    told = warned(read_study(two))
    assert "needs 7 seeds" in told["few seeds"]
    for seed in range(6):
        control = studies.whole(two, "none", seed, 0.5 + seed / 100, lr=1.0)
        for label in ("idle", "still"):
            studies.whole(two, label, seed, 0.5 + seed / 100, control, lr=1.0)
    assert "needs 7 seeds" in warned(read_study(two))["few seeds"]  # these two are in no correction
    assert "q is p corrected" in told["several arms"]


def test_runs_after_a_look_and_a_margin_after_it_are_told(tmp_path: Path) -> None:
    study = rewrite(study_of(tmp_path, CLIP), FACTS, 3, looked=6)
    told = warned(study)
    assert "(3 of clip after 6)" in told["runs added after a look"]
    assert "margin after a look" not in told
    assert "margin after a look" in by_rule(study, compare(study, parse_margin("1pp")))
    planned = rewrite(study, FACTS, measured={"margin": "1pp"})
    assert "margin after a look" not in warned(planned)
    told = warned(rewrite(planned, FACTS, 1, margin_after=True, looked=5))
    assert "margin after a look" in told


def test_a_transform_that_changed_nothing_and_several_splits_are_told(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path / "a", "none", seed, 0.9 + seed / 100)
        studies.whole(tmp_path / "a", "clip", seed, 0.9 + seed / 100, control, value=0.5)
        studies.whole(tmp_path / "a", "clip", seed, 0.8 + seed / 110, control, value=0.001)
    study = read_study(tmp_path / "a")
    for arm, is_told in (("clip 0.001", False), ("clip 0.5", True)):
        (runs,) = (one.runs for one in study.arms if one.name == arm)
        for run in runs:
            content = json.loads((run.path / SUMMARY).read_text("utf-8"))
            (run.path / SUMMARY).write_text(json.dumps({**content, "idle": True}), "utf-8")
        study = read_study(tmp_path / "a")
        assert ("clip 0.5" in warned(study).get("nothing changed", "")) == is_told
    assert study.runs.filter("idle")["arm"].unique().sort().to_list() == ["clip 0.001", "clip 0.5"]
    for split in range(6):
        task = {"name": "digits", "split_seed": split}
        studies.paired(tmp_path / "b", "clip", [0.1 + split / 100], task=task)
    told = warned(read_study(tmp_path / "b"))
    assert "seeds" not in told["several splits"]
    assert "one split only" not in told
    assert "several splits" not in warned(study)


def test_states_of_runs_and_metrics_are_told(tmp_path: Path) -> None:
    told = warned(read_study(studies.mixed(tmp_path / "a")))
    counts = "13 runs, 1 interrupted, 1 planned, 1 diverged, 1 failed and 1 missing"
    assert counts in told["unfinished"]
    study = study_of(tmp_path / "b", CLIP)
    wrong = warned(rewrite(study, FACTS, 1, measured={"metric": "test/f1"}))
    assert "metric=test/f1" in wrong["metric"]
    assert "test/accuracy" in wrong["metric"]
    both = rewrite(study, FACTS, 1, measured={"metric": "test/accuracy"})
    both = rewrite(both, FACTS, 1, "control", measured={"metric": "train/loss"})
    assert "test/accuracy and train/loss" in warned(both)["metric"]


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
    assert name in told[f"{name} control"]
    assert "clip" in told[f"{name} control"]
    assert ("scale of gradients" in told) == (kind == "norm_matched")
    assert "other controls" not in told


def test_repeats_and_two_controls_are_told(tmp_path: Path) -> None:
    study = rewrite(study_of(tmp_path, [1] * 8), FACTS, 8, "treated", controls={"placebo": "x"})
    told = warned(study)
    assert "(8 with control=placebo)" in told["other controls"]
    assert "8 seeds of clip" in told["deterministic repeats"]


def test_a_peak_is_clear_if_both_ends_differ_and_the_correction_agrees() -> None:
    peak = {**TREND, "extreme": "highest", "peak": 2.0, "peak_p": 0.05}
    assert is_clear_peak({**peak, "peak_q": 0.05})
    assert not is_clear_peak({**peak, "peak_q": 0.06})
    assert not is_clear_peak({**peak, "peak_p": 0.06})
    assert not is_clear_peak({**peak, "n": 5})
    assert not is_clear_peak(TREND)


def test_with_a_target_the_verdict_is_about_the_steps_and_outcomes_are_not_compared(
    tmp_path: Path,
) -> None:
    study = to_target(tmp_path, [10, 12, 14, 11, 13, 12], [20, 24, 32, None, 36, None])
    made = compare(study)
    text = sentence(made, study)
    for part in (
        "sooner than control",
        "sooner in 6 and later in 0 of 6",
        "p 0.0312",
        "difference -15",
    ):
        assert part in text
    assert "accuracy" not in text
    assert "lr 0.1" in text
    assert [line in below(made, study) for line in reached(study)] == [True, True]
    assert "6 of 6 seeds of clip and 4 of 6 seeds of control" in reached(study)[0]
    assert "few seeds" not in by_rule(study, made)
    assert "one seed decides" not in by_rule(study, made)


def test_a_target_names_the_data_on_which_it_is_decided(tmp_path: Path) -> None:
    study = to_target(tmp_path, [10, 12, 14, 11, 13, 12], [20, 24, 32, None, 36, None])
    study = rewrite(study, SUMMARY, until="validation/loss <= 0.5", test_examples=450)
    text = sentence(compare(study), study)
    assert ("examples" in text, "checked" in text) == (False, False)
    assert "medians of the 4 in which both did 12.5 and 28 steps" in text
    study = rewrite(study, FACTS, measured={"eval_every": 2})
    study = rewrite(study, SUMMARY, validation_examples=1200)
    text = sentence(compare(study), study)
    assert "checked every 2 steps, on 1,200 validation examples" in text
    study = rewrite(study, SUMMARY, until="test/loss <= 0.5")
    assert "on 450 test examples" in sentence(compare(study), study)


@pytest.mark.parametrize("treated", [[10] * 4 + [None] * 2, [10] * 5])
def test_steps_to_a_target_without_a_clear_difference_have_no_direction(
    tmp_path: Path, treated: list
) -> None:
    study = to_target(tmp_path, treated, [20, 24, 32, None, 36, None][: len(treated)])
    text = sentence(compare(study), study)
    assert "sooner than" not in text
    assert f"sooner in {treated.count(10)} and later in" in text
    assert ("too few" in text) == (len(treated) < 6)
    assert reached(study_of(tmp_path / "none", CLIP)) == []


def test_without_a_pair_the_sentence_tells_what_there_is(tmp_path: Path) -> None:
    def told(name: str) -> str:
        study = read_study(tmp_path / name)
        return sentence(compare(study), study)

    control = studies.whole(tmp_path / "both", "none", 0, 0.9)
    assert "no treated arm" in told("both")
    assert "1 of 1 run finished" in told("both")
    studies.whole(tmp_path / "alone", "clip", 0, 0.9)
    assert "no control" in told("alone")
    studies.plan(tmp_path / "both", "clip", 0, control)
    assert "1 of 2 runs finished" in told("both")
