"""Statistics: numbers worked out by hand, scipy's own as oracles, and properties."""

import random
import subprocess
import sys
from itertools import product
from math import inf, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import (
    binomtest,
    false_discovery_control,
    ttest_rel,
)

from gradsurg import stats
from gradsurg.stats import (
    adjusted_p_values,
    benjamini_hochberg,
    detectable_effect,
    equivalence_power,
    finding,
    margin_verdict,
    paired_difference,
    parse_margin,
    sd_interval,
    seeds_needed,
    sign_flip_interval,
    sign_flip_is_exact,
    sign_flip_p_value,
    sign_test_p_value,
    trend,
)
from tests import verdict_rates

NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))
P_VALUES = st.floats(0, 1) | st.none() | st.just(float("nan"))


def test_paired_difference_of_three_pairs_computed_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, error 1/sqrt(3), t(0.975, 2) = 4.302653
    found = paired_difference([2, 4, 6], [1, 2, 3])
    assert (found.mean, found.sd, found.n) == (2, 1, 3)
    assert found.t_low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-6)
    assert found.t_high == pytest.approx(2 + 4.302653 / 3**0.5, rel=1e-6)


@pytest.mark.parametrize("n", [3, 5, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_paired_difference_agrees_with_scipy(n, confidence):
    generator = random.Random(n)
    control = [generator.gauss(0.9, 0.02) for _ in range(n)]
    treated = [value + generator.gauss(0.01, 0.01) for value in control]
    expected = ttest_rel(treated, control)
    interval = expected.confidence_interval(confidence)
    found = paired_difference(treated, control, confidence)
    assert (found.t_low, found.t_high) == pytest.approx((interval.low, interval.high))
    assert found.p_value == sign_flip_p_value(found.differences)


def test_one_pair_and_two_have_a_mean_and_no_interval():
    found = paired_difference([3.0], [1.0])
    assert (found.mean, found.median, found.n, found.higher, found.lower) == (2.0, 2.0, 1, 1, 0)
    assert (found.t_low, found.t_high, found.sd, found.p_value) == (None, None, None, None)
    two = paired_difference([3.0, 4.0], [1.0, 1.0])
    assert (two.mean, two.t_low, two.interval, two.p_value) == (2.5, None, None, 0.5)


@pytest.mark.parametrize(("shift", "p"), [(0.5, 2 / 8), (0.0, 1.0)])
def test_equal_differences_have_an_interval_of_width_zero(shift, p):
    control = [1.0, 2.0, 4.0]
    found = paired_difference([value + shift for value in control], control)
    assert (found.mean, found.t_low, found.t_high, found.sd) == (shift, shift, shift, 0.0)
    assert found.p_value == p


def test_differences_that_rounding_alone_sets_apart_are_equal():
    assert len({0.7 - 0.6, 0.8 - 0.7, 0.4 - 0.3}) > 1
    found = paired_difference([0.7, 0.8, 0.4], [0.6, 0.7, 0.3])
    assert (found.sd, found.t_low) == (0.0, found.t_high)
    same = paired_difference([0.1 + 0.2, 1e9], [0.3, 1e9])
    assert same.differences == (0.0, 0.0)
    assert finding(same) == "identical"
    assert paired_difference([1e-9, 2e-9], [0.0, 0.0]).higher == 2


@pytest.mark.parametrize("n", [8, 25])
def test_one_number_near_overflow_makes_no_ties_of_the_others(n):
    small = [0.1 + place / 100 for place in range(n - 1)]
    found = paired_difference([1e27, *(0.5 + one for one in small)], [1e27] + [0.5] * (n - 1))
    assert found.differences == pytest.approx([0.0, *small])
    assert sign_flip_p_value([1e27, *small]) == sign_flip_p_value([1.0, *small])
    low, _ = sign_flip_interval([1e27, *small]) or (0, 0)
    assert low > 0.1


@pytest.mark.parametrize("n", [6, 7, 8, 9, 20])
def test_the_sign_test_p_value_is_scipys_binomial_test(n):
    for higher in range(n + 1):
        expected = binomtest(higher, n).pvalue
        assert sign_test_p_value(higher, n - higher) == pytest.approx(expected)


def test_numbers_of_seeds_below_none_are_refused():
    assert sign_test_p_value(0, 0) == 1
    with pytest.raises(ValueError, match="-1"):
        sign_test_p_value(3, -1)


def test_the_seeds_needed_are_the_fewest_with_which_an_arm_alone_can_be_significant():
    for arms in range(1, 14):
        best = [2 / 2 ** seeds_needed(arms), *[1.0] * (arms - 1)]
        one_less = [2 * best[0], *best[1:]]
        assert min(q for q in benjamini_hochberg(best) if q) <= 0.05
        assert min(q for q in benjamini_hochberg(one_less) if q) > 0.05
    assert [seeds_needed(arms) for arms in (1, 2, 3, 4, 6, 7, 12)] == [6, 7, 7, 8, 8, 9, 9]
    # ten arms that all differ: six seeds can be enough
    assert benjamini_hochberg([2 / 2**stats.MIN_FOR_P] * 10) == [2 / 2**6] * 10


@pytest.mark.parametrize(
    ("low", "high", "better", "words"),
    [
        (-0.5, 0.5, "higher", "equivalent"),
        (-0.5, 0.5, None, "equivalent"),
        (0.1, 0.5, "higher", "equivalent"),
        (0.1, 0.6, "higher", "better"),
        (-0.6, -0.1, "lower", "better"),
        (-0.4, 0.6, "higher", "not worse"),
        (-0.6, 0.4, "lower", "not worse"),
        (0.0, 0.6, "higher", "not worse"),
        (-0.5, 0.6, "higher", "undecided"),
        (-0.6, 0.4, "higher", "undecided"),
        (0.1, 0.6, "lower", "worse"),
        (-0.6, -0.1, "higher", "worse"),
        (0.6, 0.9, "lower", "worse by more than the margin"),
        (-0.9, -0.6, "higher", "worse by more than the margin"),
        (0.5, 0.9, "lower", "worse"),
        (0.1, 0.6, None, "undecided"),
        (0.6, 0.9, None, "beyond the margin"),
        (-0.9, -0.6, None, "beyond the margin"),
    ],
)
def test_an_interval_is_placed_against_a_margin(low, high, better, words):
    assert margin_verdict(low, high, 0.5, better) == words
    assert margin_verdict(low, high, 0.5, better, 0.05) == words
    is_lost = words.startswith(("worse", "beyond"))
    by_q = "not worse" if words == "better" else "undecided" if is_lost else words
    assert margin_verdict(low, high, 0.5, better, 0.051) == by_q


@pytest.mark.parametrize(
    ("text", "margin"),
    [("0.5pp", 0.005), ("0.02", 0.02), (0.02, 0.02), ("2%", 0.016), ("2 %", 0.016)],
)
def test_a_margin_is_a_number_points_or_a_share_of_the_control(text, margin):
    assert parse_margin(text).of(-0.8) == pytest.approx(margin)


@pytest.mark.parametrize("text", ["", "pp", "0", "-1%", "nan", "inf", "2%pp", "half", 0.0])
def test_a_margin_that_is_no_positive_number_is_refused(text):
    with pytest.raises(ValueError, match=rf"margin needs a positive number .* Found {text!r}\."):
        parse_margin(text)
    with pytest.raises(ValueError, match="Found -1"):
        margin_verdict(0.0, 1.0, -1, "higher")


def test_the_q_of_an_arm_beside_others_on_the_page_is_that_of_the_report() -> None:
    text = (Path(__file__).parents[1] / "docs/verdicts.md").read_text(encoding="utf-8")
    told = "at least 7 seeds among two or three arms, 8 among four to six, 9 among seven to twelve"
    assert told in text

    def is_called(seeds: int, arms: int) -> bool:
        """Whether the one arm that differs, in one direction in each seed, has q <= 0.05."""
        p = sign_flip_p_value([1.0 + seed for seed in range(seeds)])
        (q, *_) = benjamini_hochberg([p] + [1.0] * (arms - 1))
        return q is not None and q <= 0.05

    for seeds, low, high in ((7, 2, 3), (8, 4, 6), (9, 7, 12)):
        assert is_called(seeds, high)
        assert not is_called(seeds - 1, low)


def test_the_detectable_effect_of_six_seeds_computed_by_hand():
    # all six must have one sign: P(N(d, 1) > 0)^6 = 0.8
    expected = NormalDist().inv_cdf(0.8 ** (1 / 6))
    assert detectable_effect(6, 1.0) == pytest.approx(expected, rel=0.02)
    assert detectable_effect(6, 0.02) == pytest.approx(0.02 * expected, rel=0.02)
    assert detectable_effect(5, 1.0) is None
    with pytest.raises(ValueError, match="Found 80"):
        detectable_effect(8, 1.0, 80)


def test_the_interval_of_a_standard_deviation_by_a_table_of_chi_square() -> None:
    low, high = sd_interval(2.0, 5)
    assert (low, high) == pytest.approx((2 * sqrt(5 / 12.833), 2 * sqrt(5 / 0.8312)), rel=1e-4)


def test_one_of_six_arms_is_found_after_the_correction_with_that_power() -> None:
    # eight seeds must have one sign, as 2 / 2^8 is below 0.05 / 6, but 4 / 2^8 is not
    effect = detectable_effect(8, 1.0, level=0.05 / 6)
    assert effect == pytest.approx(NormalDist().inv_cdf(0.8 ** (1 / 8)))
    assert effect is not None
    assert effect == pytest.approx(1.92, abs=0.005)
    draws = numpy.random.default_rng(0).normal(size=(4_000, 6, 8))
    draws[:, 0] += effect
    p_values = verdict_rates.p_values(draws.reshape(-1, 8)).reshape(-1, 6)
    found = [(benjamini_hochberg(row)[0] or 0.0) <= 0.05 for row in p_values.tolist()]
    assert sum(found) / len(found) == pytest.approx(0.8, abs=0.03)


def test_too_few_seeds_for_so_many_arms_detect_nothing() -> None:
    assert detectable_effect(7, 1.0, level=0.05 / 3) is not None
    assert detectable_effect(7, 1.0, level=0.05 / 4) is None


@pytest.mark.slow
@pytest.mark.parametrize(("n", "arms"), [(8, 3), (9, 6), (10, 6), (10, 12)])
def test_the_detectable_effect_at_a_level_is_detected_with_that_power(n: int, arms: int) -> None:
    effect = detectable_effect(n, 2.0, level=0.05 / arms)
    assert effect is not None
    draws = numpy.random.default_rng(n).normal(effect, 2.0, (4_000, n)).tolist()
    found = sum(sum(row) > 0 and sign_flip_p_value(row) <= 0.05 / arms for row in draws)
    assert found / len(draws) == pytest.approx(0.8, abs=0.03)


def test_the_power_of_equivalence_of_six_seeds_computed_by_hand() -> None:
    # their interval is from the smallest to the largest difference
    share = (1 - 2 * NormalDist().cdf(-1.5)) ** 6
    assert equivalence_power(6, 2.0, 3.0) == pytest.approx(share)
    assert equivalence_power(5, 2.0, 3.0) is None
    assert (equivalence_power(30, 1.0, 5.0) or 0) == pytest.approx(1.0)
    assert equivalence_power(8, 1.0, 0.1) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("n", "margin"), [(7, 1.1), (8, 1.1), (10, 1.0)])
def test_equal_arms_are_found_equivalent_with_that_power(n: int, margin: float) -> None:
    expected = equivalence_power(n, 2.0, 2 * margin)
    rows = numpy.random.default_rng(n).normal(0.0, 2.0, (6_000, n)).tolist()
    intervals = [sign_flip_interval(row) or (-inf, inf) for row in rows]
    within = [margin_verdict(*ends, 2 * margin, None) == "equivalent" for ends in intervals]
    assert sum(within) / len(within) == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("n", [7, 8, 9, 10, 12, 16])
@pytest.mark.parametrize("power", [pytest.param(0.5, marks=pytest.mark.full), 0.8])
def test_the_detectable_effect_is_detected_with_that_power(n, power):
    generator, studies = numpy.random.default_rng(n), 20_000 if n < 12 else 4_000
    effect = detectable_effect(n, 2.0, power)
    assert effect is not None
    draws = generator.normal(effect, 2.0, (studies, n))
    found = sum((sign_flip_interval(row) or (0, 0))[0] > 0 for row in draws.tolist())
    assert found / studies == pytest.approx(power, abs=0.02 + 3 * (0.25 / studies) ** 0.5)


STEADY = [(0.0, 0.3, 1.0, 1.1), (0.1, 0.2, 0.9, 1.3)] * 4


@pytest.mark.parametrize(
    ("by_seed", "direction"),
    [
        (STEADY, "rises"),
        ([[-y for y in ys] for ys in STEADY], "falls"),
        (STEADY[:5], ""),
        ([(0.0, 1.0, 0.5, 0.5)] * 8, ""),
        ([(0.0, -1.0, -0.5, -0.5)] * 8, ""),
        ([(0.0, 1.0, 1.0, 1.0)] * 8, "rises"),
        # seeds that disagree
        ([(0.0, 0.3, 1.0, 1.1), (1.1, 1.0, 0.3, 0.0)] * 4, ""),
        ([(0.7, 0.7, 0.7, 0.7)] * 8, ""),
    ],
)
def test_a_trend_has_a_direction_if_no_later_dose_contradicts_it(by_seed, direction):
    found = trend([1, 2, 3, 4], by_seed)
    assert found.direction == direction
    shuffled = trend([4, 1, 3, 2], [[ys[3], ys[0], ys[2], ys[1]] for ys in by_seed])
    assert shuffled == found


@pytest.mark.parametrize(
    ("by_seed", "direction", "peak"),
    [
        ([(0.0, 3.0, 2.0)] * 8, "", (2, "highest", 2 / 2**8)),
        ([(0.0, -3.0, -2.0)] * 8, "", (2, "lowest", 2 / 2**8)),
        ([(0.0, 1.0, 2.0)] * 8, "rises", (None, "", None)),
        # the highest mean is inside, by one seed: no doubt about the rise, and none of a peak
        ([(0.0, 1.0, 1.0)] * 7 + [(0.0, 1.5, 1.0)], "", (2, "highest", 1.0)),
        ([(0.0, 3.0, -3.0)] * 8, "", (2, "highest", 2 / 2**8)),
    ],
)
def test_a_trend_whose_extreme_mean_is_inside_has_a_peak_and_no_direction(by_seed, direction, peak):
    found = trend([1, 2, 3], by_seed)
    assert found.direction == direction
    assert (found.peak, found.extreme, found.peak_p) == peak


def test_the_size_of_a_trend_is_the_last_outcome_minus_the_first_on_a_line():
    shares = [0.9, 0.7, 1.1, 1.0, 1.2, 0.8]
    found = trend([0.1, 1, 10, 100, 1000], [[0, s, 2 * s, 3 * s, 4 * s] for s in shares])
    assert found.size == pytest.approx(4 * sum(shares) / 6)
    assert found.interval == pytest.approx((4 * 0.7, 4 * 1.2))
    assert (found.n, found.p_value, found.direction) == (6, 2 / 64, "rises")
    # Abelson and Tukey's coefficients for three doses: -0.816, 0, 0.816
    assert trend([1, 2, 3], [[0.0, 5.0, 1.0]]).size == pytest.approx(1.0)
    assert trend([1, 2, 3], [[0.0, 5.0, 1.0]]).p_value is None
    # for four doses -0.866, -0.134, 0.134, 0.866: the inner ones count in the test, not in the size
    inner = trend([1, 2, 3, 4], [[0.0, -share, share, 0.0] for share in shares])
    assert (inner.size, inner.p_value) == (0.0, 2 / 64)


def test_doses_that_are_equal_or_alone_are_refused():
    for doses in ([1.0], [1.0, 2.0, 1.0]):
        with pytest.raises(
            ValueError, match=r"trend needs two or more different doses. Found \[1.0"
        ):
            trend(doses, [[0.0] * len(doses)] * 6)


@pytest.mark.parametrize(
    ("treated", "control", "confidence", "words"),
    [
        ([], [], 0.95, "Found none"),
        ([1.0], [1.0, 2.0], 0.95, "Found 1 treated and 2 control values"),
        ([1.0, float("nan")], [1.0, 2.0], 0.95, r"treated needs .* Found \[nan\]"),
        ([1.0, 2.0], [float("inf"), 2.0], 0.95, r"control needs .* Found \[inf\]"),
        ([1.0, 2.0], [1.0, 2.0], 95, "Found 95"),
    ],
)
def test_unpaired_or_nonfinite_samples_and_wrong_confidences_are_refused(
    treated, control, confidence, words
):
    with pytest.raises(ValueError, match=words):
        paired_difference(treated, control, confidence)


def test_sign_flip_p_values_computed_by_hand():
    # of 8 signings of 1, 2, 3 only two sum to 6 or -6; of 1, 2, -3 (sum 0) all reach 0
    assert sign_flip_p_value([1, 2, 3]) == 2 / 8
    assert sign_flip_p_value([1, 2, -3]) == 1
    assert sign_flip_p_value([1, 2, -1]) == 6 / 8
    # sums that differ by rounding alone: 0.1 + 0.2 - 0.3 is 5.6e-17, 0.3 - 0.1 - 0.2 is -2.8e-17
    assert sign_flip_p_value([0.1, 0.2, -0.3]) == 1
    assert sign_flip_p_value([0.3, -0.1, -0.2]) == 1


def test_sign_flip_p_value_agrees_with_its_definition():
    generator = random.Random(0)
    for n in range(1, 9):
        values = [generator.gauss(0.5, 1) for _ in range(n)]
        signed = [
            abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=n)
        ]
        expected = sum(value >= abs(sum(values)) - 1e-9 for value in signed) / 2**n
        assert sign_flip_p_value(values) == expected


def test_the_sign_flip_test_of_twenty_differences_is_exact() -> None:
    assert sign_flip_p_value([1.0] * 20) == 2 / 2**20
    # of five ones and odd ones out that weigh as much as nothing, half the signings at each
    assert sign_flip_p_value([1.0] * 5 + [0.0] * 15) == 2 / 2**5
    assert sign_flip_is_exact(20)
    # of more, sign vectors are drawn
    assert not sign_flip_is_exact(21)
    assert sign_flip_p_value([1.0] * 21) == 1 / 100_000
    assert sign_flip_p_value([1.0, -1.0] * 15) == 1


def test_the_monte_carlo_estimate_agrees_with_the_exact_p_value(monkeypatch) -> None:
    generator = random.Random(7)
    values = [generator.gauss(0.3, 1) for _ in range(20)]
    exact, ends = sign_flip_p_value(values), sign_flip_interval(values)
    of_eleven = sign_flip_interval(values[:11])
    monkeypatch.setattr(stats, "MAX_EXACT_SEEDS", 10)
    # four standard errors of a share of 99,999
    assert abs(sign_flip_p_value(values) - exact) < 4 * (exact * (1 - exact) / 99_999) ** 0.5
    assert sign_flip_p_value(values) != exact
    assert sign_flip_interval(values) == pytest.approx(ends, abs=0.01)
    assert sign_flip_interval(values) != ends
    # some of those drawn flip none of eleven signs, or all
    assert sign_flip_interval(values[:11]) == pytest.approx(of_eleven, abs=0.05)


def paired_case(generator: random.Random, n: int) -> list[float]:
    """Normal differences, or differences of a lattice of accuracies, with ties, zeros and heavy
    seeds.
    """
    kind, shift = generator.randrange(5), generator.choice([0, 0.3, 0.5, 1])
    values = [generator.gauss(shift, 1) for _ in range(n)]
    lattice = [0.1 * round(2 * value) for value in values]
    tied = [generator.choice([0.3, 0.1, 0.2, -0.3]) for _ in range(n)]
    heavy = [*lattice[1:], 1e6]
    return [values, lattice, tied, heavy, [lattice[0]] * n][kind]


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ((6, 10), 600),
        ((21, 48), 40),
        pytest.param((6, 16), 9_000, marks=pytest.mark.slow),
        pytest.param((6, 48), 1_000, marks=pytest.mark.full),
    ],
)
def test_the_interval_excludes_zero_if_and_only_if_p_is_small(sizes, cases):
    generator = random.Random(cases)
    significant = touching = 0
    for _ in range(cases):
        values = paired_case(generator, generator.randint(*sizes))
        interval = sign_flip_interval(values)
        assert interval is not None
        low, high = interval
        assert low <= high
        excluded = low > 0 or high < 0
        p = sign_flip_p_value(values)
        assert excluded == (p <= 0.05), values
        units = [round(10 * value) for value in values]
        if units == pytest.approx([10 * value for value in values], rel=1e-12, abs=1e-12):
            # whole numbers have no rounding
            assert p == sign_flip_p_value(units)
        significant += excluded
        touching += 0 in interval
    assert min(significant, touching, cases - significant) > cases / 50


def test_the_interval_holds_the_means_that_the_test_does_not_reject():
    generator = random.Random(3)
    for n in (6, 7, 8, 11, 25):
        values = [generator.gauss(0.5, 1) for _ in range(n)]
        for confidence in (0.8, 0.95):
            ends = sign_flip_interval(values, confidence)
            for sign, end in zip((-1, 1), ends or (), strict=True):
                inside, outside = end - sign * 1e-9, end + sign * 1e-9
                assert sign_flip_p_value([v - inside for v in values]) > 1 - confidence
                assert sign_flip_p_value([v - outside for v in values]) <= 1 - confidence + 1e-12


def test_the_interval_needs_six_differences_and_has_width_zero_where_they_are_equal():
    assert sign_flip_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert sign_flip_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == (1.0, 5.0)
    assert sign_flip_interval([]) is None
    for n in (6, 13, 30):
        assert sign_flip_interval([0.1] * n) == (0.1, 0.1)
    with pytest.raises(ValueError, match="nan"):
        sign_flip_interval([1.0, float("nan")])
    with pytest.raises(ValueError, match="Found 95"):
        sign_flip_interval([1.0, 2.0], 95)


@pytest.mark.parametrize(
    ("differences", "q_value", "words"),
    [
        ([0.1, 0.2, 0.3, 0.2, 0.1, 0.2], None, "higher"),
        ([-0.1, -0.2, -0.3, -0.2, -0.1, -0.2], 0.05, "lower"),
        ([0.1, 0.2, 0.3, 0.2, 0.1, 0.2], 0.06, "no clear difference"),
        ([-0.1, -0.2, -0.3, -0.2, -0.2], None, "too few seeds"),
        ([0.1], 0.01, "too few seeds"),
        # p of 4 / 64 beside a t interval without 0
        ([-0.01, 0.02, 0.03, 0.04, 0.05, 0.06], None, "no clear difference"),
        # one heavy seed: all eight have one sign
        ([-0.1, -0.2, -0.3, -0.2, -0.2, -0.1, -0.3, -2e5], None, "lower"),
        ([0.0], None, "identical"),
        ([0.0] * 8, None, "identical"),
    ],
)
def test_a_finding_has_a_direction_if_p_and_q_are_small(differences, q_value, words):
    assert finding(paired_difference(differences, [0.0] * len(differences)), q_value) == words


def test_a_summary_of_eight_differences_computed_by_hand():
    found = paired_difference([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [0.0] * 8)
    # the 6th smallest mean of a subset: after 1, 1.5 (1, 2), 2 (2; 1, 3; 1, 2, 3)
    assert found.interval == (2 + 1 / 3, 6 + 2 / 3)
    assert (found.range, found.p_value) == ((1.0, 8.0), 2 / 256)
    assert found.effect_size == pytest.approx(4.5 / 6**0.5)
    one = paired_difference([1.0], [0.0])
    assert (one.interval, one.effect_size) == (None, None)
    assert paired_difference([1.0] * 6, [0.0] * 6).effect_size is None


@given(st.lists(NUMBERS, min_size=1, max_size=14), st.randoms())
def test_sign_flip_p_value_is_invariant_to_order_sign_and_scale(values, rng) -> None:
    p = sign_flip_p_value(values)
    assert 2 / 2 ** len(values) <= p <= 1
    assert sign_flip_p_value([-value for value in values]) == p
    assert sign_flip_p_value([4 * value for value in values]) == p
    shuffled = list(values)
    rng.shuffle(shuffled)
    assert sign_flip_p_value(shuffled) == p


def test_sign_flip_of_no_or_nonfinite_differences_is_refused() -> None:
    with pytest.raises(ValueError, match="Found none"):
        sign_flip_p_value([])
    with pytest.raises(ValueError, match="nan"):
        sign_flip_p_value([1.0, float("nan")])


def test_q_values_computed_by_hand() -> None:
    # 4 x 0.01 / 1, 4 x 0.02 / 2, 4 x 0.03 / 3, 0.5: from the largest down, the least so far
    assert benjamini_hochberg([0.01, 0.02, 0.03, 0.5]) == pytest.approx([0.04, 0.04, 0.04, 0.5])
    assert benjamini_hochberg([0.5, 0.01, 0.04]) == pytest.approx([0.5, 0.03, 0.06])
    assert benjamini_hochberg([0.9, 0.8]) == [0.9, 0.9]
    assert benjamini_hochberg([0.2, 0.2]) == [0.2, 0.2]
    assert benjamini_hochberg([]) == []


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("inf")])
def test_p_values_outside_of_zero_to_one_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=rf"from 0 to 1. Found \[{wrong}\]"):
        benjamini_hochberg([0.5, wrong])


@given(st.lists(P_VALUES, max_size=12))
def test_q_values_keep_the_order_of_p_and_agree_with_scipy(p_values) -> None:
    found = benjamini_hochberg(p_values)
    tested = [(p, q) for p, q in zip(p_values, found, strict=True) if p == p and p is not None]
    assert [q for _, q in tested] == [q for q in found if q is not None]
    assert all(q is not None and p <= q <= 1 for p, q in tested)
    assert [q for _, q in sorted(tested)] == sorted(q for _, q in tested)
    if tested:
        expected = false_discovery_control([p for p, _ in tested])
        assert [q for _, q in tested] == pytest.approx(list(expected), rel=1e-12)


def test_adjusted_p_values_keep_the_keys_of_a_mapping() -> None:
    assert adjusted_p_values({"clip": 0.04, "sign": None, "zero": 0.01}) == pytest.approx(
        {"clip": 0.04, "sign": None, "zero": 0.02}
    )


def docs() -> list[str]:
    return (Path(__file__).parents[1] / "docs" / "verdicts.md").read_text("utf-8").splitlines()


def test_the_detectable_effects_in_the_docs_are_those_of_the_function() -> None:
    (header,) = [line for line in docs() if line.startswith("| seeds |")]
    sizes = [int(cell) for cell in header.strip("| ").split(" | ")[1:]]
    for power in (0.5, 0.8, 0.9):
        effects = [f"{detectable_effect(n, 1.0, power) or 0:.2f}" for n in sizes]
        assert f"| found in {100 * power:.0f} % | {' | '.join(effects)} |" in docs()


def test_the_simulated_p_values_are_those_of_the_test() -> None:
    for kind in (*verdict_rates.SYMMETRIC, *verdict_rates.SKEWED):
        values = kind(numpy.random.default_rng(1), (40, 2, verdict_rates.SEEDS))
        differences = values[:, 1] - values[:, 0]
        expected = [sign_flip_p_value(row) for row in differences.tolist()]
        assert verdict_rates.p_values(differences).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("design", verdict_rates.DESIGNS)
@pytest.mark.parametrize("kind", verdict_rates.SYMMETRIC)
def test_a_metric_of_a_study_without_effects_has_a_direction_in_one_study_of_twenty(kind, design):
    *by_metric, _ = verdict_rates.rates(kind, *design)
    assert max(by_metric) <= 0.055


@pytest.mark.slow
@pytest.mark.parametrize("arms", [1, 6])
@pytest.mark.parametrize("kind", verdict_rates.SYMMETRIC)
def test_a_margin_names_a_direction_without_effects_in_one_study_of_twenty(kind, arms):
    assert verdict_rates.margin_rate(kind, arms) <= 0.055


@pytest.mark.slow
def test_a_sentence_on_splits_parts_or_doses_is_false_in_one_study_of_twenty() -> None:
    _, *parts = verdict_rates.parts_rate()
    nothing = [doses for doses, effects in verdict_rates.DOSES.items() if not any(effects)]
    doses = [sum(verdict_rates.dose_rates(each)) for each in nothing]
    assert max([*parts, *doses, verdict_rates.splits_rate(0.5)]) <= 0.055


@pytest.mark.slow
def test_a_peak_in_the_middle_is_called_a_peak_and_no_rise() -> None:
    direction, peak = verdict_rates.dose_rates("peak in the middle", 2_000)
    assert direction < 0.01 < 0.5 < peak


@pytest.mark.full
def test_the_rates_in_the_docs_are_the_simulated_ones() -> None:
    assert {*verdict_rates.rows(), *verdict_rates.other_rows()} <= set(docs())


def test_importing_stats_imports_no_scipy():
    code = "import sys, gradsurg.stats; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
