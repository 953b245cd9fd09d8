"""Statistics: numbers worked out by hand, and scipy's paired t test as the oracle."""

import random
import subprocess
import sys
from itertools import product

import pytest
from scipy.stats import ttest_rel

from gradsurg.stats import Difference, paired_difference, sign_flip_p, verdict


def test_paired_difference_is_that_worked_out_by_hand():
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


def test_treated_minus_control_is_the_direction():
    assert paired_difference([1.0, 1.1], [2.0, 2.2]).mean < 0


def test_one_pair_has_a_mean_and_no_interval():
    assert paired_difference([3.0], [1.0]) == Difference(2.0, None, None, 1, None, None)


@pytest.mark.parametrize(("shift", "p"), [(0.5, 0.0), (0.0, 1.0)])
def test_identical_differences_are_their_own_interval(shift, p):
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
def test_what_cannot_be_compared_is_refused(treated, control, confidence, words):
    with pytest.raises(ValueError, match=words):
        paired_difference(treated, control, confidence)


def test_sign_flip_p_is_that_worked_out_by_hand():
    # of 8 signings of 1, 2, 3 only two sum to 6 or -6; of 1, 2, -3 (sum 0) all reach 0
    assert sign_flip_p([1, 2, 3]) == 2 / 8
    assert sign_flip_p([1, 2, -3]) == 1
    assert sign_flip_p([1, 2, -1]) == 6 / 8


def test_sign_flip_p_is_that_of_the_definition():
    generator = random.Random(0)
    for n in range(1, 9):
        values = [generator.gauss(0.5, 1) for _ in range(n)]
        signed = [
            abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=n)
        ]
        expected = sum(value >= abs(sum(values)) - 1e-9 for value in signed) / 2**n
        assert sign_flip_p(values) == expected


def test_sign_flip_p_counts_ties_that_rounding_splits():
    # 0.1 + 0.2 - 0.3 is 5.6e-17, and 0.3 - 0.1 - 0.2 is -2.8e-17
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1
    assert sign_flip_p([0.3, -0.1, -0.2]) == 1


def test_fewer_than_six_seeds_cannot_reach_five_percent():
    assert sign_flip_p([1.0] * 5) == 0.0625
    assert sign_flip_p([1.0] * 6) == 0.03125


def test_sixteen_are_exact_and_seventeen_too_many():
    assert sign_flip_p([1.0] * 16) == 2 / 2**16
    with pytest.raises(ValueError, match="Found 17"):
        sign_flip_p([1.0] * 17)
    with pytest.raises(ValueError, match="Found 0"):
        sign_flip_p([])
    with pytest.raises(ValueError, match="nan"):
        sign_flip_p([1.0, float("nan")])


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
def test_verdict_says_what_the_interval_allows(low, high, words):
    assert verdict(Difference(0.2, low, high, 5, 0.1, 0.01)) == words


def test_importing_stats_imports_no_scipy():
    code = "import sys, gradsurg.stats; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
