"""Statistics of paired differences: intervals, the sign-flip test and false discovery rates."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, isnan, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MAX_EXACT_SEEDS = 40
"""Largest n of the exact sign-flip test, which enumerates 2^20 sign vectors of each half."""
NUM_SIGN_DRAWS = 99_900
"""Random sign vectors of the sign-flip test for larger n."""
MIN_BCA_SEEDS = 20
"""Smallest n of a BCa interval."""
NUM_RESAMPLES = 9_999
_DRAWS_PER_BATCH = 900

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """Summary of n paired differences, treated minus control, with one pair a seed.

    `low` and `high` are the ends of the confidence interval of the mean, `sd` the sample standard
    deviation. All but the mean are None for n = 1.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    sd: float | None
    p_value: float | None


def paired_difference(
    treated: Sequence[float], control: Sequence[float], confidence: float = 0.95
) -> Difference:
    """Return the mean paired difference with its Student t interval and the paired t test.

    Entry i of both samples belongs to seed i. Diverged runs must be excluded by the caller, pair by
    pair: NaN and infinity raise ValueError. If all differences are equal, the interval has width 0
    and the p-value is its limit: 0, or 1 if all differences are zero.
    """
    differences = _differences(treated, control)
    _refuse_confidence(confidence)
    n, mean = len(differences), fmean(differences)
    if n == 1:
        return Difference(mean, None, None, n, None, None)
    sd = stdev(differences)
    error = sd / sqrt(n)
    if error == 0:
        return Difference(mean, mean, mean, n, sd, 0.0 if mean else 1.0)
    from scipy.special import stdtr  # scipy.stats takes half a second to import

    margin = t_critical(n, confidence) * error
    p_value = 2 * float(stdtr(n - 1, -abs(mean) / error))
    return Difference(mean, mean - margin, mean + margin, n, sd, p_value)


def t_critical(n: int, confidence: float = 0.95) -> float:
    """Return the two-sided critical value of Student's t with n - 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + confidence) / 2))


def bca_interval(
    differences: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return the bias-corrected and accelerated (BCa) bootstrap interval of the mean.

    Efron (1987); Efron and Tibshirani (1993), equations 14.9, 14.10, 14.14 and 14.15. Raises
    ValueError for n < 20, where its coverage, unlike that of the t interval, is below the nominal
    level (0.81 instead of 0.95 at n = 5, 0.90 at n = 10). Resampling is seeded by `seed`. If all
    differences are equal, the interval has width 0.
    """
    if len(differences) < MIN_BCA_SEEDS:
        raise ValueError(
            f"bca_interval needs {MIN_BCA_SEEDS} differences or more: with fewer it is too narrow, "
            f"unlike the paired t interval. Found {len(differences)}."
        )
    _refuse_nonfinite("differences", differences)
    _refuse_confidence(confidence)
    least, most = min(differences), max(differences)
    if least == most:
        return least, most
    import numpy
    from scipy.stats import bootstrap

    # Rescaled to [0, 1]: nearly equal, tiny or huge numbers would lose their digits.
    half = most / 2 - least / 2
    unit = [(difference / 2 - least / 2) / half for difference in differences]
    ends = bootstrap(
        (unit,),
        numpy.mean,
        confidence_level=confidence,
        n_resamples=NUM_RESAMPLES,
        method="BCa",
        rng=numpy.random.default_rng(seed),
    ).confidence_interval
    low, high = (least + float(end) * half * 2 for end in (ends.low, ends.high))
    return low, high


def sign_flip_p_value(differences: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value of the sign-flip (one-sample permutation) test of zero mean.

    The fraction of the 2^n sign vectors with |sum(s_i d_i)| >= |sum(d_i)|; Fisher (1935,
    section 21). It is at least 2 / 2^n, so that n < 6 cannot reach 0.05. Exact for n <= 40, by a
    meet-in-the-middle enumeration of both halves. For larger n the Monte Carlo estimate
    (b + 1) / (m + 1) of Phipson and Smyth (2010) from m = 99,900 sign vectors drawn with `seed`.
    """
    if not differences:
        raise ValueError("sign_flip_p_value needs at least one difference. Found none.")
    _refuse_nonfinite("differences", differences)
    import numpy

    # Sums that are equal in exact arithmetic differ in their last bits.
    slack = 1e-12 * fsum(abs(difference) for difference in differences)
    observed = abs(fsum(differences)) - slack
    if observed <= 0:
        return 1.0
    if sign_flip_is_exact(len(differences)):
        half = len(differences) // 2
        left, right = _signed_sums(differences[:half]), _signed_sums(differences[half:])
        # As many sums are <= -observed: flip every sign.
        reached = len(right) - numpy.searchsorted(right, observed - left)
        return 2 * int(reached.sum()) / 2 ** len(differences)
    generator = numpy.random.default_rng(seed)
    reached = 0
    for _ in range(NUM_SIGN_DRAWS // _DRAWS_PER_BATCH):
        signs = generator.choice([-1.0, 1.0], size=(_DRAWS_PER_BATCH, len(differences)))
        reached += int((abs(signs @ numpy.asarray(differences)) >= observed).sum())
    return (1 + reached) / (1 + NUM_SIGN_DRAWS)


def sign_flip_is_exact(n: int) -> bool:
    """Return whether `sign_flip_p_value` of n differences is exact, not a Monte Carlo estimate."""
    return n <= MAX_EXACT_SEEDS


def benjamini_hochberg(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for the false discovery rate (q-values), in the given order.

    The step-up procedure of Benjamini and Hochberg (1995), section 3.1: q_(i) is the minimum of
    p_(j) m / j over j >= i, where p_(1) <= ... <= p_(m). It controls the rate for independent
    tests, and for tests with positive regression dependency (Benjamini and Yekutieli 2001,
    theorem 1.2), which two-sided tests against a shared control are not known to have. None and NaN
    are not counted in m and stay None.
    """
    tested = [(p, index) for index, p in enumerate(p_values) if p is not None and not isnan(p)]
    invalid = [p for p, _ in tested if not 0 <= p <= 1]
    if invalid:
        raise ValueError(f"p_values needs numbers from 0 to 1. Found {invalid}.")
    adjusted: list[float | None] = [None] * len(p_values)
    least = 1.0
    for rank, (p, index) in reversed(list(enumerate(sorted(tested), 1))):
        least = min(least, p * (len(tested) / rank))
        adjusted[index] = least
    return adjusted


def adjusted_p_values(p_values: Mapping[Key, float | None]) -> dict[Key, float | None]:
    """Return a mapping's values adjusted by `benjamini_hochberg`, under the same keys."""
    return dict(zip(p_values, benjamini_hochberg(list(p_values.values())), strict=True))


def verdict(difference: Difference) -> str:
    """Return `higher` or `lower` if the interval excludes zero, else `no clear difference`.

    For n = 1, which has no interval: `one seed: no interval`.
    """
    if difference.low is None or difference.high is None:
        return "one seed: no interval"
    if difference.low > 0:
        return "higher"
    return "lower" if difference.high < 0 else "no clear difference"


def _differences(treated: Sequence[float], control: Sequence[float]) -> list[float]:
    if len(treated) != len(control):
        raise ValueError(
            "treated and control need the same seeds. "
            f"Found {len(treated)} treated and {len(control)} control values."
        )
    if not treated:
        raise ValueError("a difference needs at least one pair. Found none.")
    _refuse_nonfinite("treated", treated)
    _refuse_nonfinite("control", control)
    return [a - b for a, b in zip(treated, control, strict=True)]


def _signed_sums(differences: Sequence[float]) -> "NDArray[float64]":
    """Return the sorted sums of the differences under all sign vectors."""
    import numpy

    sums = numpy.zeros(1)
    for difference in differences:
        sums = numpy.concatenate([sums + difference, sums - difference])
    return numpy.sort(sums)


def _refuse_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1. Found {confidence}.")


def _refuse_nonfinite(name: str, values: Sequence[float]) -> None:
    bad = [value for value in values if not isfinite(value)]
    if bad:
        raise ValueError(f"{name} needs finite numbers: exclude diverged runs. Found {bad}.")
