"""What is said of arms, against numbers worked out by hand."""

import math
from pathlib import Path

import pytest

from gradsurg import stats
from gradsurg.report.answer import cautions, paragraph
from gradsurg.report.dose import doses
from gradsurg.report.grouping import group
from gradsurg.report.outcomes import Outcome, compare, costs, shares
from gradsurg.report.reading import read_study
from gradsurg.report.series import curves, effect_maps, load_effects, load_metrics, norms
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


def test_a_seed_whose_control_diverged_is_told_apart(tmp_path: Path) -> None:
    control = studies.plan(tmp_path, "none", 0)
    studies.end(control, "none", 0.1, "diverged")
    studies.whole(tmp_path, "clip", 0, 0.9, control.path.name)
    outcome = of(compare(group(read_study(tmp_path))), "clip")
    assert (outcome.difference, outcome.states) == (None, {"control diverged": 1})


def test_a_links_share_is_the_chain_minus_the_chain_without_it(tmp_path: Path) -> None:
    for seed, (both, without) in enumerate(((0.8, 0.9), (0.7, 0.9))):
        control = studies.whole(tmp_path, "none", seed, 0.9)
        whole = studies.whole(tmp_path, "clip+noise", seed, both, control)
        studies.whole(tmp_path, "clip", seed, without, control, left_out="noise", whole=whole)
    arms = group(read_study(tmp_path))
    share = of(shares(arms), "clip without noise")
    assert share.arm.left_out == "noise"
    assert share.difference is not None
    assert share.difference.mean == pytest.approx(-0.15)


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


def test_a_curve_is_the_mean_of_runs_that_did_not_diverge(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.0, 2.0, 6.0)):
        place = studies.plan(tmp_path, "none", seed)
        studies.log(place, "none", loss=loss)
        studies.end(place, "none", 0.5, "finished" if seed < 2 else "diverged")
    arms = group(read_study(tmp_path))
    metrics, faults = load_metrics(arms)
    (curve,) = curves(arms, metrics)
    assert (faults, curve.steps, curve.n) == ([], [10, 20, 30, 40], [2, 2, 2, 2])
    assert curve.mean == pytest.approx([0.15, 0.075, 0.05, 0.0375])
    reach = 12.706204736432095 * math.sqrt(0.005 / 2)  # t of one degree; variance of .1 and .2
    assert curve.high[0] == pytest.approx(0.15 + reach)
    assert len(curve.runs) == 3


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
    assert said.startswith("Beside their control arms, seed for seed: test accuracy is lower with")
    assert "No clear difference in test accuracy for clip (n = 3)." in said
    assert "Nothing to compare yet for noise." in said
    text = " ".join(cautions(runs, outcomes))
    for words in ("unfinished: 1 interrupted, 1 planned, 1 missing of 13 runs", "1 run diverged"):
        assert words in text
    assert "Fewer than 6 seeds cannot reach" in text


def test_q_values_and_the_bootstrap_come_from_stats(tmp_path: Path, monkeypatch) -> None:
    def twice(p_values: list[float]) -> list[float]:
        return [2 * p for p in p_values]

    monkeypatch.setattr(stats, "benjamini_hochberg", twice, raising=False)
    interval = lambda differences: (min(differences), max(differences))  # noqa: E731 a stand-in
    monkeypatch.setattr(stats, "bca_interval", interval, raising=False)
    for seed in range(20):
        control = studies.whole(tmp_path, "none", seed, 0.5)
        studies.whole(tmp_path, "clip", seed, 0.5 + seed / 100, control)
        if seed < 6:
            studies.whole(tmp_path, "zero", seed, 0.4, control)
    outcomes = compare(group(read_study(tmp_path)))
    clip, zero = of(outcomes, "clip"), of(outcomes, "zero")
    assert clip.bootstrap == pytest.approx((0.0, 0.19))
    assert zero.bootstrap is None
    assert (zero.p_value, zero.q_value) == (2 / 2**6, 4 / 2**6)
