"""Statistics: numbers worked out by hand, scipy's own as oracles, and properties."""

import random
import subprocess
import sys
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, false_discovery_control, permutation_test, ttest_rel

from gradsurg import stats
from gradsurg.stats import (
    Difference,
    adjusted_p_values,
    bca_interval,
    benjamini_hochberg,
    paired_difference,
    sign_flip_is_exact,
    sign_flip_p_value,
    verdict,
)

NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))
P_VALUES = st.floats(0, 1) | st.none() | st.just(float("nan"))


def test_paired_difference_of_three_pairs_computed_by_hand():
    # differences 1, 2, 3: mean 2, sd 1, error 1/sqrt(3), t(0.975, 2) = 4.302653
    found = paired_difference([2, 4, 6], [1, 2, 3])
    assert (found.mean, found.sd, found.n) == (2, 1, 3)
    assert found.low == pytest.approx(2 - 4.302653 / 3**0.5, rel=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / 3**0.5, rel=1e-6)


@pytest.mark.parametrize("n", [2, 5, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_paired_difference_agrees_with_scipy(n, confidence):
    generator = random.Random(n)
    control = [generator.gauss(0.9, 0.02) for _ in range(n)]
    treated = [value + generator.gauss(0.01, 0.01) for value in control]
    expected = ttest_rel(treated, control)
    interval = expected.confidence_interval(confidence)
    found = paired_difference(treated, control, confidence)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_the_difference_is_treated_minus_control():
    assert paired_difference([1.0, 1.1], [2.0, 2.2]).mean < 0


def test_one_pair_has_a_mean_and_no_interval():
    assert paired_difference([3.0], [1.0]) == Difference(2.0, None, None, 1, None, None)


@pytest.mark.parametrize(("shift", "p"), [(0.5, 0.0), (0.0, 1.0)])
def test_equal_differences_have_an_interval_of_width_zero(shift, p):
    control = [1.0, 2.0, 4.0]
    found = paired_difference([value + shift for value in control], control)
    assert found == Difference(shift, shift, shift, 3, 0.0, p)


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


def test_sums_that_differ_by_rounding_alone_count_as_ties():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, and 0.3 - 0.1 - 0.2 is -2.8e-17
    assert sign_flip_p_value([0.1, 0.2, -0.3]) == 1
    assert sign_flip_p_value([0.3, -0.1, -0.2]) == 1


def test_fewer_than_six_seeds_cannot_reach_five_percent():
    assert sign_flip_p_value([1.0] * 5) == 0.0625
    assert sign_flip_p_value([1.0] * 6) == 0.03125


def test_the_sign_flip_test_of_forty_differences_is_exact() -> None:
    assert sign_flip_p_value([1.0] * 40) == 2 / 2**40
    # of five ones and odd ones out that weigh as much as nothing, half the signings at each
    assert sign_flip_p_value([1.0] * 5 + [0.0] * 35) == 2 / 2**5
    assert sign_flip_is_exact(40)
    assert not sign_flip_is_exact(41)


def test_beyond_forty_differences_sign_vectors_are_drawn_with_a_seed() -> None:
    assert sign_flip_p_value([1.0] * 41) == pytest.approx(1 / 99_901)
    generator = random.Random(5)
    values = [generator.gauss(0.2, 1) for _ in range(41)]
    assert sign_flip_p_value(values) == sign_flip_p_value(values)
    assert sign_flip_p_value(values, seed=1) != sign_flip_p_value(values)


def test_the_monte_carlo_estimate_agrees_with_the_exact_p_value(monkeypatch) -> None:
    generator = random.Random(7)
    values = [generator.gauss(0.3, 1) for _ in range(20)]
    exact = sign_flip_p_value(values)
    monkeypatch.setattr(stats, "MAX_EXACT_SEEDS", 10)
    # four standard errors of a share of 99,900
    assert abs(sign_flip_p_value(values) - exact) < 4 * (exact * (1 - exact) / 99_900) ** 0.5
    assert sign_flip_p_value(values) != exact


def test_sign_flip_p_value_agrees_with_scipys_permutation_test() -> None:
    generator = random.Random(3)
    values = [generator.gauss(0.4, 1) for _ in range(12)]
    found = permutation_test((values,), numpy.mean, permutation_type="samples", n_resamples=4096)
    assert sign_flip_p_value(values) == pytest.approx(found.pvalue)


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


def test_bca_interval_agrees_with_scipy() -> None:
    generator = random.Random(1)
    values = [generator.expovariate(1) for _ in range(25)]
    expected = bootstrap(
        (values,), numpy.mean, method="BCa", n_resamples=9_999, rng=numpy.random.default_rng(0)
    ).confidence_interval
    assert bca_interval(values) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert bca_interval(values, seed=1) != bca_interval(values)
    assert bca_interval(values) == bca_interval(values)


def test_bca_interval_is_asymmetric_for_skewed_data() -> None:
    values = [2.0**place for place in range(-10, 10)]
    mean = sum(values) / len(values)
    low, high = bca_interval(values)
    assert high - mean > 1.1 * (mean - low)


def test_a_higher_confidence_gives_a_wider_bca_interval() -> None:
    values = [float(place**2) for place in range(20)]
    (a, d), (b, c) = bca_interval(values, 0.99), bca_interval(values, 0.8)
    assert a < b < c < d


@settings(max_examples=20)
@given(st.lists(st.integers(-1000, 1000), min_size=20, max_size=24), st.integers(-100, 100))
def test_bca_interval_stays_within_the_data_and_moves_with_them(values, shift) -> None:
    low, high = bca_interval(values)
    assert min(values) <= low <= high <= max(values)
    moved = bca_interval([value + shift for value in values])
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e300])
def test_equal_differences_have_a_bca_interval_of_width_zero(value) -> None:
    assert bca_interval([value] * 20) == (value, value)


@pytest.mark.parametrize("size", [1e300, 1e-300, 1 + 2.3e-16], ids=["huge", "tiny", "alike"])
def test_bca_interval_of_tiny_and_huge_numbers_keeps_its_digits(size) -> None:
    least = 1.0 if size < 2 and size > 1 else 0.0
    low, high = bca_interval([least, size] * 10)
    assert least <= low <= high <= size
    assert low < high or least == 1.0


def test_bca_interval_needs_twenty_differences() -> None:
    with pytest.raises(ValueError, match=r"20 differences or more: .* too narrow.* Found 19"):
        bca_interval([float(place) for place in range(19)])
    with pytest.raises(ValueError, match="Found 95"):
        bca_interval([0.0, 1.0] * 10, 95)
    with pytest.raises(ValueError, match="inf"):
        bca_interval([float("inf")] * 20)


def test_q_values_computed_by_hand() -> None:
    # 4 x 0.01 / 1, 4 x 0.02 / 2, 4 x 0.03 / 3, 0.5: from the largest down, the least so far
    assert benjamini_hochberg([0.01, 0.02, 0.03, 0.5]) == pytest.approx([0.04, 0.04, 0.04, 0.5])
    assert benjamini_hochberg([0.5, 0.01, 0.04]) == pytest.approx([0.5, 0.03, 0.06])
    assert benjamini_hochberg([0.9, 0.8]) == [0.9, 0.9]
    assert benjamini_hochberg([0.2, 0.2]) == [0.2, 0.2]
    assert benjamini_hochberg([]) == []


def test_q_values_reject_the_hypotheses_that_the_paper_rejects() -> None:
    """Benjamini and Hochberg (1995), section 3.2: fifteen p-values, four rejected at 0.05."""
    paper = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    paper += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0000]
    assert [q <= 0.05 for q in benjamini_hochberg(paper) if q is not None] == [True] * 4 + [
        False
    ] * 11


def test_missing_p_values_have_no_q_value_and_are_not_counted() -> None:
    assert benjamini_hochberg([None, 0.01, float("nan"), 0.5]) == [None, 0.02, None, 0.5]
    assert benjamini_hochberg([None]) == [None]


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


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 20])
def test_the_t_interval_covers_the_true_mean_at_its_nominal_rate(n) -> None:
    """Of 4,000 experiments with fixed seeds; three standard errors are 0.0103."""
    generator = random.Random(n)
    covered = 0
    for _ in range(4_000):
        control = [generator.gauss(0, 1) for _ in range(n)]
        treated = [value + generator.gauss(0.3, 0.5) for value in control]
        found = paired_difference(treated, control)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high
    assert abs(covered / 4_000 - 0.95) < 0.0103


@pytest.mark.slow
def test_the_bca_interval_of_twenty_covers_nearly_at_its_nominal_rate() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(1_000):
        low, high = bca_interval([generator.gauss(0.3, 0.5) for _ in range(20)])
        covered += low <= 0.3 <= high
    assert 0.91 < covered / 1_000 < 0.97


@pytest.mark.slow
def test_the_sign_flip_test_rejects_at_most_at_its_level() -> None:
    generator = random.Random(0)
    p_values = [sign_flip_p_value([generator.gauss(0, 1) for _ in range(8)]) for _ in range(4_000)]
    for level in (0.01, 0.05, 0.2):
        found = sum(p <= level for p in p_values) / 4_000
        assert found <= level + 3 * (level * (1 - level) / 4_000) ** 0.5


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.3, "higher"),
        (-0.3, -0.1, "lower"),
        (-0.1, 0.3, "no clear difference"),
        (0.0, 0.3, "no clear difference"),
        (None, None, "one seed: no interval"),
    ],
)
def test_verdict_depends_on_whether_the_interval_excludes_zero(low, high, words):
    assert verdict(Difference(0.2, low, high, 5, 0.1, 0.01)) == words


def test_importing_stats_imports_no_scipy():
    code = "import sys, gradsurg.stats; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
