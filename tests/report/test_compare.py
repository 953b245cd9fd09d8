"""What is said of arms, against numbers worked out by hand."""

import json
import math
import os
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gradsurg.report.answer import cautions, duration, paragraph
from gradsurg.report.compare import (
    Outcome,
    compare,
    costs,
    divergences,
    doses,
    share,
    shares,
    update_effects,
)
from gradsurg.report.html import page
from gradsurg.report.load import group, read_study
from gradsurg.report.series import curves, effect_maps, load_effects, load_metrics, norms
from gradsurg.report.study import study_report
from gradsurg.report.text import Runs, _print, overview, report
from gradsurg.report.wording import FEW, disagreement
from gradsurg.stats import bca_interval, paired_difference, verdict
from tests.report import studies

T_975_2 = 4.302652729911275  # Student's t, two degrees of freedom


def of(outcomes: list[Outcome], arm: str, metric: str = "test/accuracy") -> Outcome:
    (found,) = [one for one in outcomes if (one.arm.name, one.metric) == (arm, metric)]
    return found


def test_the_difference_is_that_of_pairs_and_says_its_n(tmp_path: Path) -> None:
    clip = of(compare(group(read_study(studies.mixed(tmp_path / "first")))), "clip")
    differences = (-0.10, -0.06, 0.01)
    mean = sum(differences) / 3
    reach = T_975_2 * math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    assert clip.difference is not None
    assert (clip.difference.n, clip.planned, clip.states) == (3, 3, {})
    assert clip.difference.low == pytest.approx(mean - reach)
    assert clip.difference.high == pytest.approx(mean + reach)
    assert clip.p_value == 4 / 8  # of the signings of .10, .06 and .01 four reach .15


def test_runs_that_did_not_finish_are_counted_and_not_averaged(tmp_path: Path) -> None:
    outcomes = compare(group(read_study(studies.mixed(tmp_path / "first"))))
    zero, noise = of(outcomes, "zero"), of(outcomes, "noise")
    assert zero.difference is not None
    assert (zero.difference.n, zero.states) == (2, {"diverged": 1})
    assert zero.difference.mean == pytest.approx(-0.195)
    assert noise.difference is None
    assert noise.states == {"failed": 1, "interrupted": 1, "planned": 1}


def test_a_links_share_is_the_chain_minus_the_chain_without_it(tmp_path: Path) -> None:
    found = shares(group(read_study(studies.chain(tmp_path))))
    clip, noise = (one for one in found if one.metric == "test/accuracy")
    assert [(one.arm.name, one.link, one.planned) for one in (clip, noise)] == [
        ("clip+noise", "clip", 2),
        ("clip+noise", "noise", 2),
    ]
    assert noise.difference == share([0.8, 0.7], [0.9, 0.84])
    assert noise.p_value == 0.5
    assert clip.difference == share([0.8, None], [0.8, None])
    assert clip.states == {"shorter chain diverged": 1}
    assert (noise.q_value, clip.p_value) == (None, None)  # one p is no family


def test_a_norm_matched_control_has_no_links(tmp_path: Path) -> None:
    for label in ("clip+noise", "clip"):
        studies.whole(tmp_path, label, 0, 0.8, arm="control")
    assert shares(group(read_study(tmp_path))) == []


def test_the_updates_of_an_arm_are_means_over_runs(tmp_path: Path) -> None:
    found = {
        one.arm.name: one for one in update_effects(group(read_study(studies.chain(tmp_path))))
    }
    assert list(found) == ["clip", "clip+noise", "noise"]
    cosine = found["clip"].means["update/cosine"]
    assert (cosine.n, cosine.mean) == (2, 0.625)
    assert (cosine.low, cosine.high) == (None, None)  # of two seeds
    assert found["noise"].means["update/cosine"].n == 1  # the other has diverged
    assert "update/sampled" not in found["clip"].means


def test_an_update_of_zero_has_no_cosine_and_its_other_numbers(tmp_path: Path) -> None:
    studies.end(studies.plan(tmp_path, "zero", 0), "zero", 0.5, **studies.update(None))
    (found,) = update_effects(group(read_study(tmp_path)))
    assert "update/cosine" not in found.means
    assert found.means["update/norm_ratio"].mean == 2.0


def test_the_cost_is_the_ratio_pair_by_pair(tmp_path: Path) -> None:
    found = {cost.arm.name: cost for cost in costs(group(read_study(studies.mixed(tmp_path))))}
    assert found["clip"].ratios == (1.5, 1.5, 1.5)
    assert len(found["zero"].ratios) == 2
    assert "noise" not in found


def test_three_values_of_one_number_are_doses_and_two_are_not(tmp_path: Path) -> None:
    for value in (0.1, 0.001, 0.01):
        studies.whole(tmp_path, "clip", 0, 0.8, value=value)
    for value in (0.1, 0.2):
        studies.whole(tmp_path, "zero", 0, 0.8, value=value)
    (found,) = doses(group(read_study(tmp_path)))
    assert (found.key, found.name, found.doses) == (
        "transform.clip.value",
        "clip",
        [0.001, 0.01, 0.1],
    )


def test_arms_that_differ_in_a_users_code_alone_are_numbered_in_the_order_of_time(
    tmp_path: Path,
) -> None:
    for source, time in (("b", 1), ("a", 2), ("c", 3)):
        name = studies.whole(tmp_path, "halve", 0, 0.8, sources={"mine": source})
        os.utime(tmp_path / name / "config.yaml", (time, time))
    arms = group(read_study(tmp_path))
    assert {arm.name: arm.config["sources.mine"] for arm in arms} == {
        "halve": "b",
        "halve #2": "a",
        "halve #3": "c",
    }


def test_a_curve_is_the_mean_of_runs_that_did_not_diverge(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.0, 2.0, 3.0, 60.0)):
        place = studies.plan(tmp_path, "none", seed)
        studies.log(place, "none", loss=loss)
        studies.end(place, "none", 0.5, "finished" if seed < 3 else "diverged")
    arms = group(read_study(tmp_path))
    metrics, faults = load_metrics(arms)
    (curve,) = curves(arms, metrics)
    assert (faults, curve.steps, curve.n) == ([], [10, 20, 30, 40], [3, 3, 3, 3])
    assert curve.mean == pytest.approx([0.2, 0.1, 0.2 / 3, 0.05])
    reach = 4.302652729911275 * math.sqrt(0.01 / 3)  # t of two degrees; variance of .1, .2 and .3
    assert curve.high[0] == pytest.approx(0.2 + reach)
    assert len(curve.runs) == 4


def test_a_curve_of_two_seeds_has_no_interval(tmp_path: Path) -> None:
    for seed in range(2):
        place = studies.plan(tmp_path, "none", seed)
        studies.log(place, "none", loss=1.0 + seed)
        studies.end(place, "none", 0.5)
    arms = group(read_study(tmp_path))
    (curve,) = curves(arms, load_metrics(arms)[0])
    assert curve.low == curve.high == [None] * 4


def test_a_map_has_means_over_runs_where_each_run_counts_once(tmp_path: Path) -> None:
    for seed, (cosine, rows) in enumerate(((0.0, 1), (1.0, 4))):
        place = studies.plan(tmp_path, "clip", seed)
        for step in range(10, 10 * rows + 1, 10):
            place.append_effects([studies.effect("clip", "w", step, cosine=cosine)])
        place.append_effects([studies.effect("clip", "w", 40, cosine=None, sampled=0)])
    arms = group(read_study(tmp_path))
    effects = load_effects(arms)
    (found,) = effect_maps(arms, effects)
    assert (found.n, found.sites, found.ends) == (2, ["w"], [10, 20, 30, 40])
    assert found.overall["cosine"] == [0.5]
    assert found.means["cosine"] == [[0.5, 1.0, 1.0, 1.0]]
    assert found.overall["ratio"] == [0.5]
    (norm,) = norms(arms, effects)
    assert (norm.before[-1], (norm.after or [])[0]) == (1.0, 1.0)


def test_the_answer_names_the_arms_and_the_cautions_what_is_missing(tmp_path: Path) -> None:
    runs = read_study(studies.mixed(tmp_path / "first"))
    arms = group(runs)
    outcomes = compare(arms)
    said = paragraph(outcomes, arms)
    assert said.startswith(
        "1 of 3 seeds diverged with zero, 0 of 3 in the control arm (exact McNemar p 1). Means "
        "and medians are over the seeds in which neither arm diverged. Compared with their control "
        "arms, "
        "seed by seed: no clear difference in test accuracy for clip (n = 3). Two seeds each and "
        "so no interval: test accuracy -19.50 pp with zero."
    )
    assert "Nothing to compare yet for noise." in said
    text = " ".join(cautions(runs, outcomes))
    for words in ("unfinished: 1 interrupted, 1 planned, 1 missing of 13 runs", "1 run diverged"):
        assert words in text
    assert "Fewer than 6 seeds cannot reach" in text


def test_divergence_is_an_outcome_with_an_exact_test(tmp_path: Path) -> None:
    for seed in range(8):
        control = studies.plan(tmp_path, "none", seed)
        studies.end(control, "none", 0.5, "diverged" if seed < 7 else "finished")
        studies.whole(tmp_path, "clip", seed, 0.9, control.path.name)
    arms = group(read_study(tmp_path))
    (found,) = divergences(arms)
    assert (found.treated, found.control, found.n, found.p_value) == (0, 7, 8, 2 / 2**7)
    assert paragraph(compare(arms), arms) == (
        "0 of 8 seeds diverged with clip, 7 of 8 in the control arm (exact McNemar p 0.0156). "
        "Means and medians are over the seeds in which neither arm diverged. clip: test accuracy "
        "+40.00 pp against the control arm; one seed: no interval."
    )


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([0.1] * 8, ""),
        ([0.1] * 9 + [-0.6], "includes 0, that of the median does not, because the seeds differ"),
        ([0.1] * 9 + [-1.0], "opposite signs, because one seed outweighs all others (-100.00 pp)"),
        ([0.1] * 7 + [9.0], "of the mean includes 0, because one seed outweighs all others (+9"),
        ([0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, -0.01], "counts seeds (7 higher, 1 lower) and not"),
        ([0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4], ""),
    ],
)
def test_where_test_median_and_mean_disagree_the_reason_is_told(
    differences: list[float], words: str
) -> None:
    found = paired_difference(differences, [0.0] * len(differences))
    text = disagreement("test/accuracy", found, verdict(found))
    assert words in text
    assert bool(words) == bool(text)


def test_a_swept_number_has_a_trend_of_the_difference_to_the_control(tmp_path: Path) -> None:
    for seed in range(6):
        for dose in (0.1, 0.2, 0.4):  # the learning rate of both arms, which changes the control
            extra = {"optimizer": {"name": "SGD", "lr": dose}}
            control = studies.whole(tmp_path, "none", seed, 0.5 + dose, **extra)
            gain = dose / 10 if seed else -dose / 10
            studies.whole(tmp_path, "clip", seed, 0.5 + dose - gain, control, **extra)
    report = study_report(tmp_path, logs=False)
    (swept,) = report.doses
    trend = swept.trend([one for one in report.outcomes if one.metric == "test/accuracy"])
    assert trend is not None
    assert trend.correlation == pytest.approx(-4 / 6)  # five seeds of -1, one of 1
    assert (trend.p_value, trend.n) == (14 / 64, 6)
    assert report.answer.endswith(
        "No clear trend of the difference in test accuracy with optimizer.lr (clip): Spearman "
        "-0.67, a mean over 6 seeds, sign-flip p 0.219."
    )


def plan_metric(place: Path, metric: str) -> None:
    """Write down that a run is judged by `metric`."""
    facts = json.loads((place / "run.json").read_text(encoding="utf-8"))
    text = json.dumps({**facts, "measured": {"metric": metric}})
    (place / "run.json").write_text(text, encoding="utf-8")


def test_the_metric_that_was_planned_carries_the_verdict(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.4 - seed / 100, control)
    arms = group(read_study(tmp_path))
    assert paragraph(compare(arms), arms).startswith("clip: test accuracy is lower ")
    places = sorted(tmp_path.glob("*-seed*"))
    for place in places:
        plan_metric(place, "train/loss")
    arms = group(read_study(tmp_path))
    assert paragraph(compare(arms), arms).startswith("clip: train loss is identical ")
    assert not [line for line in cautions([], compare(arms), arms) if "metric=" in line]
    plan_metric(places[-1], "test/f1")
    text = " ".join(cautions([], compare(arms), group(read_study(tmp_path))))
    assert "Runs were planned with metric=" in text


def test_a_metric_that_no_run_has_is_said_with_those_there_are(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0)
    studies.end(place, "clip", 0.5)
    plan_metric(place.path, "test/f1")
    (line,) = [line for line in study_report(tmp_path).cautions if "metric=" in line]
    assert line.startswith("metric=test/f1: no finished run has it; there are test/accuracy, ")
    control = studies.plan(tmp_path, "none", 0)
    studies.end(control, "none", 0.4)
    assert line in " ".join(report([Runs(place.path, control.path)]).split())


def test_the_other_metrics_are_corrected_together(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.plan(tmp_path, "none", seed)
        studies.end(control, "none", 0.5, **{"test/loss": 0.3})
        treated = studies.plan(tmp_path, "clip", seed, control.path.name)
        studies.end(treated, "clip", 0.4 - seed / 100, **{"test/loss": 0.4 + seed / 100})
    found = {one.metric: one for one in compare(group(read_study(tmp_path)))}
    assert found["test/accuracy"].q_value is None  # the first metric of one arm
    assert found["test/loss"].p_value == 2 / 64
    assert found["test/loss"].q_value == 2 * 2 / 64  # beside the train loss, whose p is 1
    assert found["test/loss"].reading == "higher (hint)"


def test_q_is_of_the_sign_flip_p_of_all_arms_in_one_metric(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.5 + (-1) ** seed / 10, control)
        studies.whole(tmp_path, "sign", seed, 0.5 + (seed + 1) / 100 - 0.02 * (not seed), control)
        studies.whole(tmp_path, "zero", seed, 0.4 - seed / 1e9, control)
    outcomes = compare(group(read_study(tmp_path)))
    found = {name: of(outcomes, name) for name in ("zero", "sign", "clip")}
    # all alike; the smallest against the rest: it and none below; three of six each way
    p_values = (2 / 64, 4 / 64, 1.0)
    assert tuple(one.p_value for one in found.values()) == p_values
    q_values = [found[name].q_value for name in found]
    assert q_values == pytest.approx([3 * 2 / 64, 3 / 2 * 4 / 64, 1.0])


def test_a_reading_of_few_seeds_is_a_hint_and_of_many_arms_needs_q(tmp_path: Path) -> None:
    for seed in range(8):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "zero", seed, 0.4 - seed / 1000, control)
        if seed < 6:  # p of 4 / 64: the interval leaves out 0
            studies.whole(tmp_path, "sign", seed, 0.51 + seed / 100 - 0.03 * (not seed), control)
        if seed < 5:
            studies.whole(tmp_path, "clip", seed, 0.6 + seed / 1000, control)
    arms = group(read_study(tmp_path))
    outcomes = compare(arms)
    found = {name: of(outcomes, name) for name in ("zero", "sign", "clip")}
    assert [one.reading for one in found.values()] == ["lower", "higher (hint)", "higher (hint)"]
    said = paragraph(outcomes, arms)
    assert (
        "seed by seed: test accuracy is lower with zero (8 of 8 seeds; median -10.35 pp, " in said
    )
    few = "With n = 5 seeds no sign-flip test can reach 0.05: take as hints that test accuracy is "
    assert f"{few}higher with clip (" in said
    assert "With p or q above 0.05: take as hints that test accuracy is higher with sign (" in said
    assert "No clear difference" not in said


def test_the_bootstrap_is_that_of_stats_from_20_seeds_and_p_has_no_limit(tmp_path: Path) -> None:
    for seed in range(41):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.5 + seed / 100, control)
        if seed < 19:
            studies.whole(tmp_path, "zero", seed, 0.4 - seed / 1e9, control)
    outcomes = compare(group(read_study(tmp_path)))
    clip, zero = of(outcomes, "clip"), of(outcomes, "zero")
    assert clip.bootstrap == bca_interval(clip.differences)
    assert zero.bootstrap is None
    assert clip.p_value == 1 / 100_000  # none of those that were drawn reaches it
    assert zero.p_value == 2 / 2**19


def test_seeds_that_all_gave_the_same_numbers_count_as_one(tmp_path: Path) -> None:
    for seed in range(6):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.4, control)
        studies.whole(tmp_path, "sign", seed, 0.4 + seed / 1e9, control)
    report = study_report(tmp_path, logs=False)
    clip, sign = of(report.outcomes, "clip"), of(report.outcomes, "sign")
    assert clip.difference is not None
    assert (clip.difference.n, clip.difference.low, clip.p_value) == (1, None, None)
    assert (clip.planned, clip.repeats) == (6, 6)
    assert sign.difference is not None
    assert (sign.difference.n, sign.repeats) == (6, 0)
    assert FEW not in report.cautions
    said = "The same numbers from the 6 seeds of clip: nothing in these runs is drawn at random"
    assert any(line.startswith(said) for line in report.cautions)


def test_time_and_hardware_are_told_with_the_runs_they_are_of(tmp_path: Path) -> None:
    for seed, place in enumerate(("a, 1 thread", "a, 1 thread", "b, 2 threads")):
        more = {"time/train_s": 50.0, "hardware": place, "skipped_steps": seed}
        studies.end(studies.plan(tmp_path, "none", seed), "none", 0.5, **more)
    studies.plan(tmp_path, "none", 3)
    report = study_report(tmp_path, logs=False)
    assert report.effort == [
        "Trained for 2 min 30 s in all (3 of 4 runs).",
        "Hardware: a, 1 thread (2 runs); b, 2 threads (1 run).",
    ]
    assert any("2 runs skipped 3 steps" in text for text in report.cautions)
    assert [duration(s) for s in (0.123, 59, 7500)] == ["0.12 s", "59 s", "2 h 5 min"]


def test_test_metrics_have_curves_and_the_number_of_samples_has_none(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0)
    for step in (10, 20):
        update = {"update/cosine": 0.5, "update/sampled": 1}
        tested = {"test/accuracy": 0.1 * step / 10} if step == 20 else {}
        place.append_metrics({"step": step, "train/loss": 1.0, **update, **tested})
    arms = group(read_study(tmp_path))
    found = {curve.metric: curve for curve in curves(arms, load_metrics(arms)[0])}
    assert list(found) == ["test/accuracy", "train/loss", "update/cosine"]
    assert (found["test/accuracy"].steps, found["test/accuracy"].mean) == ([20], [0.2])


def test_a_metric_of_another_task_is_not_told_of_an_arm(tmp_path: Path) -> None:
    study = tmp_path / "two"
    for task in ("parts", "plain"):
        control = ""
        for label in ("none", "clip"):
            place = studies.plan(study, label, 0, control or None, task={"name": task})
            control = control or place.path.name
            more = {"test/loss_first": 0.5} if task == "parts" else {}
            studies.end(place, label, 0.9, **more)
    report = study_report(study)
    tables = overview(report).split("\n\n")
    (own,) = [text for text in tables if text.startswith("test loss first")]
    assert [line.split()[1] for line in own.splitlines()[2:]] == ["parts"]
    (both,) = [text for text in tables if text.startswith("test accuracy\n")]
    assert [line.split()[1] for line in both.splitlines()[2:]] == ["parts", "plain"]
    (table,) = re.findall(
        'aria-label="Differences in test loss first by arm">(.*?)</table>', page(report)
    )
    assert table.count('<th scope="row">') == 1


def test_an_arm_whose_control_is_the_treatment_itself_is_in_no_correction(tmp_path: Path) -> None:
    adam = {"optimizer": {"name": "Adam"}}
    for seed in range(2):
        for label, cosine in (("scale", 1.0), ("clip", 0.5), ("sign", 0.25)):
            matched = f"norm_matched-{label}"
            control = studies.whole(tmp_path, matched, seed, 0.8, arm="control", **adam)
            place = studies.plan(tmp_path, label, seed, control, **adam)
            rows = [studies.effect(label, site, 10, cosine=cosine) for site in studies.SITES]
            place.append_effects(rows)
            studies.end(place, label, 0.9 + seed / 100)
    report = study_report(tmp_path)
    outcomes = {one.arm.name: one for one in report.outcomes if one.metric == "test/accuracy"}
    assert outcomes["scale"].difference is None
    assert outcomes["scale"].states == {"with a vacuous control": 2}
    assert outcomes["clip"].q_value == outcomes["clip"].p_value == 0.5
    assert report.answer.startswith("scale turned no gradient (cosine 1 at every site), so the")
    assert any(line.startswith("2 arms are compared at once") for line in report.cautions)
    offer = "A constant scale of the gradients cancels in the updates of Adam: control=update_"
    assert any(line.startswith(offer) for line in report.cautions)


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_of_outcomes_breaks_no_word_in_a_narrow_terminal(
    tmp_path: Path, width: int
) -> None:
    for seed in range(3):
        control = studies.whole(tmp_path, "none", seed, 0.5 + seed / 1000)
        for label, accuracy in (("clip", 0.91), ("grokfast_ema", 0.3)):
            studies.whole(tmp_path, label, seed, accuracy - seed / 100, control)
    console = Console(file=StringIO(), width=width)
    _print(study_report(tmp_path), console)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "grokfast_ema" in text.split("test accuracy")[-1]
    assert "reading" in text
    assert ("  treated  " in text) == (width == 100)
