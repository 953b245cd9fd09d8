"""Statistics of paired differences: intervals, exact tests and false discovery rates."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, comb, fsum, isclose, isfinite, isnan, log2, sqrt
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MIN_INTERVAL_SEEDS = 3
"""Smallest n of a t interval: that of two differences is 13 standard deviations wide."""
MIN_FOR_P = 6
"""Smallest n with which the sign-flip test can reach 0.05."""
MAX_P = 0.05
"""Largest p-value, and q-value among several arms, of a clear difference."""
MAX_EXACT_SEEDS = 40
"""Largest n of the exact sign-flip test, which enumerates 2^20 sign vectors of each half."""
NUM_SIGN_DRAWS = 99_900
"""Random sign vectors of the sign-flip test for larger n."""
MIN_BCA_SEEDS = 20
"""Smallest n of a BCa interval."""
NUM_RESAMPLES = 9_999
_DRAWS_PER_BATCH = 900
NUM_POSTERIOR_DRAWS = 20_000

ROUNDING = 1e-12
"""Relative difference up to which two numbers count as equal."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """Summary of n paired differences, treated minus control, with one pair a seed.

    `low` and `high` are the ends of the confidence interval of the mean; both are None for n < 3.
    `sd` is the sample standard deviation, None for n = 1.
    """

    differences: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    sd: float | None
    confidence: float = 0.95

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def higher(self) -> int:
        """The number of seeds with a positive difference."""
        return sum(difference > 0 for difference in self.differences)

    @property
    def lower(self) -> int:
        """The number of seeds with a negative difference."""
        return sum(difference < 0 for difference in self.differences)

    @property
    def median(self) -> float:
        return median(self.differences)

    @cached_property
    def median_interval(self) -> tuple[float, float] | None:
        """The interval of the median by `median_interval`; None where n is too small."""
        return median_interval(self.differences, self.confidence)

    @cached_property
    def p_value(self) -> float | None:
        """The exact sign-flip p-value; None for n = 1."""
        return sign_flip_p_value(self.differences) if self.n > 1 else None


def paired_difference(
    treated: Sequence[float], control: Sequence[float], confidence: float = 0.95
) -> Difference:
    """Return the paired differences with their mean and its Student t interval.

    Entry i of both samples belongs to seed i. Diverged runs must be excluded by the caller, pair by
    pair: NaN and infinity raise ValueError. Values that differ by no more than a relative 1e-12,
    and differences that do, count as equal; if all differences are equal, the interval has width 0.
    """
    differences = _differences(treated, control)
    _refuse_confidence(confidence)
    n, mean = len(differences), fmean(differences)
    if n == 1:
        return Difference(differences, mean, None, None, None, confidence)
    sd = stdev(differences)
    if n < MIN_INTERVAL_SEEDS:
        return Difference(differences, mean, None, None, sd, confidence)
    margin = t_critical(n, confidence) * sd / sqrt(n) if sd else 0.0
    return Difference(differences, mean, mean - margin, mean + margin, sd, confidence)


def sign_test_p_value(higher: int, lower: int) -> float:
    """Return the two-sided p-value of the exact sign test of `higher` against `lower` seeds.

    2 P(X <= min(higher, lower)) with X ~ Binomial(higher + lower, 1/2), at most 1; ties are left
    out (Dixon and Mood 1946). For two binary outcomes of the same seeds, with the numbers of seeds
    in which only one of them is true, this is McNemar's exact test (McNemar 1947).
    """
    if higher < 0 or lower < 0:
        raise ValueError(f"numbers of seeds must be >= 0. Found {higher} and {lower}.")
    n = higher + lower
    tail = sum(comb(n, k) for k in range(min(higher, lower) + 1))
    return min(1.0, 2 * tail / 2**n)


def median_interval(
    differences: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the sign-test interval of the median, from order statistics; None if n is too small.

    The narrowest [d_(k), d_(n+1-k)] that covers the median with at least the given probability,
    whatever the distribution; Conover (1999), section 3.2. For 95 % it needs n >= 6.
    """
    _refuse_nonfinite("differences", differences)
    _refuse_confidence(confidence)
    n, ordered = len(differences), sorted(differences)
    tail, left_out = 0, 0
    while 2 * (tail + comb(n, left_out)) <= (1 - confidence) * 2**n * (1 + 1e-12):
        tail += comb(n, left_out)
        left_out += 1
    return (ordered[left_out - 1], ordered[n - left_out]) if left_out else None


def seeds_needed(arms: int, level: float = 0.05) -> int:
    """Return the smallest n with which the best of `arms` treated arms can be significant.

    After `benjamini_hochberg` over the arms, its sign-flip p-value, at least 2 / 2^n, must be at
    most `level` / `arms`.
    """
    return ceil(log2(2 * arms / level) - 1e-9)


def trend_p_value(
    doses: Sequence[float], outcomes: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return Spearman's rank correlation of outcome and dose, a mean over seeds, and its p-value.

    `outcomes[i]` are those of seed i, one a dose. The p-value is that of the sign-flip test on the
    correlations of the seeds; a seed whose outcomes are all equal has correlation 0.
    """
    import numpy
    from scipy.stats import rankdata

    ranks = rankdata(doses) - (len(doses) + 1) / 2
    by_seed = []
    for values in outcomes:
        values_ranks = rankdata(values) - (len(doses) + 1) / 2
        scale = float(numpy.linalg.norm(ranks) * numpy.linalg.norm(values_ranks))
        by_seed.append(float(ranks @ values_ranks) / scale if scale else 0.0)
    return fmean(by_seed), sign_flip_p_value(by_seed)


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


CLEAR = ("higher", "lower")
HINTS = ("higher (hint)", "lower (hint)")
UNCLEAR = "no clear difference"


def verdict(difference: Difference, q_value: float | None = None) -> str:
    """Return the direction of the difference as far as it is certain.

    `higher` or `lower`: the sign-flip p-value, and `q_value` if given, is at most 0.05, which needs
    6 seeds. `higher (hint)` or `lower (hint)`: it is not, but the t interval excludes zero.
    `identical`: all differences are zero. For n < 3: `one seed: no interval` or `two seeds: no
    interval`. Else `no clear difference`.
    """
    if not any(difference.differences):
        return "identical"
    if difference.low is None or difference.high is None:
        return f"{'one seed' if difference.n == 1 else 'two seeds'}: no interval"
    direction = CLEAR[0] if difference.mean > 0 else CLEAR[1]
    is_low = [p <= MAX_P for p in (difference.p_value, q_value) if p is not None]
    if all(is_low):
        return direction
    outside = difference.low > 0 or difference.high < 0 or any(is_low)
    return f"{direction} (hint)" if outside else UNCLEAR


def _differences(treated: Sequence[float], control: Sequence[float]) -> tuple[float, ...]:
    if len(treated) != len(control):
        raise ValueError(
            "treated and control need the same seeds. "
            f"Found {len(treated)} treated and {len(control)} control values."
        )
    if not treated:
        raise ValueError("a difference needs at least one pair. Found none.")
    _refuse_nonfinite("treated", treated)
    _refuse_nonfinite("control", control)
    differences = [
        0.0 if isclose(a, b, rel_tol=ROUNDING) else a - b
        for a, b in zip(treated, control, strict=True)
    ]
    # 0.7 - 0.6 and 0.9 - 0.8 are not the same number, but the same difference.
    if max(differences) - min(differences) <= ROUNDING * max(map(abs, [*treated, *control])):
        differences = [differences[0]] * len(differences)
    return tuple(differences)


def chances_of_mean(
    values: Sequence[float], low: float | None, high: float | None
) -> tuple[float, float]:
    """Return the probabilities that the mean of as many new values is from `low` to `high`.

    Values are drawn from a normal distribution: of the measured mean and deviation, and of both
    from their posterior (prior 1 / sigma^2), by 20,000 draws with a fixed seed. The values must
    differ.
    """
    return _normal_chances(values, low, high, len(values), 1)


def chances_of_all(
    values: Sequence[float], low: float | None, high: float | None
) -> tuple[float, float]:
    """Return the probabilities that each of as many new values is from `low` to `high`.

    They are computed as those of `chances_of_mean`.
    """
    return _normal_chances(values, low, high, 1, len(values))


def chances_of_count(count: int, n: int, inside: Sequence[int]) -> tuple[float, float]:
    """Return the probabilities that a new count of n is among `inside`.

    Binomial, and beta-binomial with Jeffreys' prior.
    """
    from scipy.stats import betabinom, binom

    plug_in = binom.pmf(inside, n, count / n).sum()
    predicted = betabinom.pmf(inside, n, count + 0.5, n - count + 0.5).sum()
    return float(plug_in), float(predicted)


def _normal_chances(
    values: Sequence[float], low: float | None, high: float | None, averaged: int, repeats: int
) -> tuple[float, float]:
    import numpy
    from scipy.special import ndtr

    mean, sd, n = fmean(values), stdev(values), len(values)
    generator = numpy.random.default_rng(0)
    sigmas = sd * numpy.sqrt((n - 1) / generator.chisquare(n - 1, NUM_POSTERIOR_DRAWS))
    means = mean + sigmas / sqrt(n) * generator.standard_normal(NUM_POSTERIOR_DRAWS)
    results = []
    for mu, sigma in ((numpy.array([mean]), numpy.array([sd])), (means, sigmas)):
        scale = sigma / sqrt(averaged)
        below = 0.0 if low is None else ndtr((low - mu) / scale)
        up_to = 1.0 if high is None else ndtr((high - mu) / scale)
        results.append(float(numpy.mean((up_to - below) ** repeats)))
    return results[0], results[1]


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
