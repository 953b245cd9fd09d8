"""Statistics of paired differences: intervals, exact tests and false discovery rates."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import ceil, comb, floor, fsum, inf, isclose, isfinite, isnan, log2, sqrt
from statistics import NormalDist, fmean, median, stdev
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

MIN_INTERVAL_SEEDS = 3
"""Smallest n of a t interval: for n = 2 it is 18 standard deviations wide."""
MIN_FOR_P = 6
"""Smallest n with which the sign-flip test can reach 0.05."""
MAX_P = 0.05
"""Largest p-value, and q-value among several arms, of a clear difference."""
MAX_EXACT_SEEDS = 20
"""Largest n of the exact sign-flip test, which enumerates the 2^n sign vectors."""
NUM_SIGN_DRAWS = 99_999
"""Random sign vectors of the sign-flip test for larger n."""
_DRAWS_PER_BATCH = 9_000
NUM_POSTERIOR_DRAWS = 20_000
_RANK_COST = 0.2
_NUM_QUANTILES = 2_000

MAX_COMPARED_DOSES = 20
"""Up to this number of doses a trend compares all pairs; above it only neighbours."""

ROUNDING = 1e-12
"""Relative difference up to which two numbers count as equal."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """Summary of n paired differences, treated minus control, with one pair a seed."""

    differences: tuple[float, ...]
    confidence: float = 0.95

    @property
    def n(self) -> int:
        return len(self.differences)

    @cached_property
    def mean(self) -> float:
        return fmean(self.differences)

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

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest difference."""
        return min(self.differences), max(self.differences)

    @cached_property
    def sd(self) -> float | None:
        """The sample standard deviation; None for n = 1."""
        return stdev(self.differences) if self.n > 1 else None

    @property
    def effect_size(self) -> float | None:
        """Cohen's d_z (1988, section 2.3.5): mean / sd; None for n = 1 or equal differences."""
        return self.mean / self.sd if self.sd else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the mean by `sign_flip_interval`; None where n is too small."""
        return sign_flip_interval(self.differences, self.confidence)

    @cached_property
    def p_value(self) -> float | None:
        """The sign-flip p-value; None for n = 1."""
        return sign_flip_p_value(self.differences) if self.n > 1 else None

    @property
    def t_low(self) -> float | None:
        """The lower end of the paired t interval of the mean; None for n < 3."""
        return None if (margin := self._t_margin) is None else self.mean - margin

    @property
    def t_high(self) -> float | None:
        """The upper end of the paired t interval of the mean; None for n < 3."""
        return None if (margin := self._t_margin) is None else self.mean + margin

    @cached_property
    def _t_margin(self) -> float | None:
        if self.n < MIN_INTERVAL_SEEDS or self.sd is None:
            return None
        return t_critical(self.n, self.confidence) * self.sd / sqrt(self.n) if self.sd else 0.0


def paired_difference(
    treated: Sequence[float], control: Sequence[float], confidence: float = 0.95
) -> Difference:
    """Return the paired differences of two samples, of which entry i belongs to seed i.

    Diverged runs must be excluded by the caller, pair by pair: NaN and infinity raise ValueError.
    Values that differ by no more than a relative 1e-12, and differences that do, count as equal; if
    all differences are equal, the intervals have width 0.
    """
    differences = _differences(treated, control)
    _refuse_confidence(confidence)
    return Difference(differences, confidence)


def sign_test_p_value(higher: int, lower: int) -> float:
    """Return the two-sided p-value of the exact sign test of `higher` against `lower` seeds.

    It is 2 P(X <= min(higher, lower)) with X ~ Binomial(higher + lower, 1/2), at most 1. Ties are
    left out (Dixon and Mood 1946). For two binary outcomes of the same seeds, with the numbers of
    seeds in which only one of them is true, this is McNemar's exact test (McNemar 1947).
    """
    if higher < 0 or lower < 0:
        raise ValueError(f"numbers of seeds must be >= 0. Found {higher} and {lower}.")
    n = higher + lower
    tail = sum(comb(n, k) for k in range(min(higher, lower) + 1))
    return min(1.0, 2 * tail / 2**n)


def seeds_needed(arms: int, level: float = 0.05) -> int:
    """Return the smallest n with which a single one of `arms` treated arms can be found to differ.

    After `benjamini_hochberg` over the arms, its sign-flip p-value, at least 2 / 2^n, must be at
    most `level` / `arms`. If k arms have the smallest p-value, k `level` / `arms` is enough, so
    that `MIN_FOR_P` seeds can suffice if all arms differ.
    """
    return ceil(log2(2 * arms / level) - 1e-9)


def t_critical(n: int, confidence: float = 0.95) -> float:
    """Return the two-sided critical value of Student's t with n - 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + confidence) / 2))


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip (one-sample permutation) test of zero mean.

    It is the fraction of the 2^n sign vectors with |sum(s_i d_i)| >= |sum(d_i)|; Fisher (1935,
    section 21). It is at least 2 / 2^n, so that n < 6 cannot reach 0.05. Exact for n <= 20. For
    larger n it is the Monte Carlo estimate (b + 1) / (m + 1) of Phipson and Smyth (2010) from m =
    99,999 sign vectors, always the same. The test is valid if the differences are symmetric about
    their mean.
    """
    if not differences:
        raise ValueError("sign_flip_p_value needs at least one difference. Found none.")
    _refuse_nonfinite("differences", differences)
    total = fsum(differences)
    if abs(total) <= _rounding(differences):
        return 1.0
    # Flipping S gives total - 2 sum(S): for total > 0 it counts if S or the rest sums to <= 0.
    sums, _ = _subset_sums(differences)
    reached = (sums <= 0).sum() if total > 0 else (sums >= 0).sum()
    return (1 + int(reached)) / _num_pairs(len(sums))


def sign_flip_interval(
    differences: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval of the mean that inverts the sign-flip test; None if n is too small.

    It holds each theta for which `sign_flip_p_value` of the differences minus theta is above 1 -
    `confidence`; so it excludes 0 if and only if their own p-value is at most that. Its ends are
    order statistics of the means of subsets of the differences, the typical values of Hartigan
    (1969). For n <= 20 these are all subsets, for larger n those that the test draws. For 95 % it
    needs n >= 6. It is exact under the test's assumption of symmetry.
    """
    _refuse_nonfinite("differences", differences)
    _refuse_confidence(confidence)
    import numpy

    if not differences:
        return None
    sums, sizes = _subset_sums(differences)
    left_out = floor((1 - confidence) * _num_pairs(len(sums)) * (1 + ROUNDING))
    if not left_out:
        return None
    least, most = min(differences), max(differences)
    if least == most:
        return least, most
    ends = left_out - 1, len(sums) - left_out
    means = numpy.partition(sums / sizes, ends)
    return float(means[ends[0]]), float(means[ends[1]])


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
UNCLEAR = "no clear difference"
TOO_FEW = "too few seeds"


def finding(difference: Difference, q_value: float | None = None) -> str:
    """Return the direction of the difference, if it is clear.

    `identical`: all differences are zero. `too few seeds`: fewer than 6. `higher` or `lower`: the
    sign-flip p-value, and `q_value` if given, is at most 0.05. Otherwise `no clear difference`.
    """
    if not any(difference.differences):
        return "identical"
    if difference.n < MIN_FOR_P or difference.p_value is None:
        return TOO_FEW
    if max(difference.p_value, q_value or 0.0) > MAX_P:
        return UNCLEAR
    return CLEAR[0] if difference.mean > 0 else CLEAR[1]


Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Margin:
    """Largest difference without practical importance: a number, or a share of the control."""

    amount: float
    is_share: bool = False

    def of(self, control: float) -> float:
        """Return the margin in the metric's unit, for a mean of the control."""
        return self.amount * abs(control) if self.is_share else self.amount


def parse_margin(text: str | float) -> Margin:
    """Return the margin written as `0.02` (the metric's unit), `0.5pp` (0.005) or `2%` (a share).

    A share is of the mean of the control.
    """
    written = str(text).strip()
    unit = next((unit for unit in ("pp", "%") if written.endswith(unit)), "")
    try:
        amount = float(written.removesuffix(unit))
    except ValueError:
        amount = 0.0
    if not 0 < amount < float("inf"):
        raise ValueError(
            "margin needs a positive number in the metric's unit, such as 0.02, percentage points, "
            f"such as 0.5pp, or a share of the control's mean, such as 2%. Found {text!r}."
        )
    return Margin(amount / 100 if unit else amount, is_share=unit == "%")


def margin_verdict(
    low: float,
    high: float,
    margin: float,
    better: Direction | None,
    q_value: float | None = None,
) -> str:
    """Return the relation of the interval from `low` to `high` to a margin around 0.

    `equivalent`: the interval lies within +-`margin`, both included. These are the two one-sided
    tests of Schuirmann (1987), at level 0.025 each for a 95 % interval. Otherwise, if `better`
    names the good direction, it is the first that is true. `better`: the interval is on the good
    side of 0. `worse by more than the margin`: it is beyond `margin` on the bad side. `worse`: it
    is on the bad side of 0. These three need a `q_value` of at most 0.05, if one is given. `not
    worse`: it does not reach `margin` on the bad side. `undecided`: all other cases. Without a good
    direction it is `beyond the margin` on either side, with the same q, or `undecided`.
    """
    if not 0 <= margin < float("inf"):
        raise ValueError(f"margin_verdict needs a finite margin >= 0. Found {margin}.")
    if -margin <= low and high <= margin:
        return "equivalent"
    is_clear = (q_value or 0.0) <= MAX_P
    if better is None:
        return "beyond the margin" if is_clear and (low > margin or high < -margin) else "undecided"
    worst, best = (low, high) if better == "higher" else (-high, -low)
    if is_clear:
        if worst > 0:
            return "better"
        if best < 0:
            return "worse by more than the margin" if best < -margin else "worse"
    return "not worse" if worst > -margin else "undecided"


def detectable_effect(n: int, sd: float, power: float = 0.8, level: float = MAX_P) -> float | None:
    """Return the smallest true mean that the sign-flip test of n differences finds at a level.

    The test finds it with probability `power` if the differences are normal with standard deviation
    `sd`. None if n is too small to reach the level (for 0.05, n < 6). Use `level` = 0.05 / m for
    the only one of m arms that differs, after `benjamini_hochberg`. The effect is exact if only n
    equal signs reach the level. Otherwise it is the t test's effect (noncentral t) at the largest
    p-value that the sign-flip test has within the level. It is divided by 1 - 0.2 / k^1.5 if the
    test has k p-values within the level, because few p-values cost power. This fit is within 2 % of
    effects simulated for a power of 0.8 and n from 7 to 10.
    """
    if not 0 < power < 1:
        raise ValueError(f"power must be between 0 and 1. Found {power}.")
    rank, attained = _attained(n, level)
    if not rank:
        return None
    if rank == 1:
        return NormalDist().inv_cdf(power ** (1 / n)) * sd
    from scipy.special import nctdtrinc

    critical = t_critical(n, 1 - attained)
    noncentrality = float(nctdtrinc(n - 1, 1 - power, critical))
    return noncentrality / sqrt(n) * sd / (1 - _RANK_COST / rank**1.5)


def equivalence_power(n: int, sd: float, margin: float) -> float | None:
    """Return the probability that the 95 % interval of n differences lies within +-`margin`.

    Their true mean is 0; they are normal with standard deviation `sd`. None for n < 6, which have
    no interval. Computed like `detectable_effect`: exact for n = 6, otherwise by the t interval,
    widened.
    """
    rank, attained = _attained(n, MAX_P)
    if not rank:
        return None
    if rank == 1:
        return (2 * NormalDist().cdf(margin / sd) - 1) ** n
    import numpy
    from scipy.special import chdtri, ndtr

    # The mean over the distribution of the estimated standard deviation, at its quantiles.
    tails = (numpy.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    estimates = numpy.sqrt(chdtri(n - 1, tails) / (n - 1))
    half = t_critical(n, 1 - attained) * estimates / sqrt(n) / (1 - _RANK_COST / rank**1.5)
    room = numpy.maximum(margin / sd - half, 0) * sqrt(n)
    return float(numpy.mean(2 * ndtr(room) - 1))


def _attained(n: int, level: float) -> tuple[int, float]:
    """Return how many p-values the sign-flip test has up to a level, and the largest of these."""
    if not sign_flip_is_exact(n):
        return floor(level * NUM_SIGN_DRAWS), level
    rank = floor(level * 2 ** (n - 1) * (1 + ROUNDING))
    return rank, rank / 2 ** (n - 1)


def sd_interval(sd: float, freedom: int) -> tuple[float, float]:
    """Return the 95 % interval of the standard deviation of normal values, estimated as `sd`."""
    from scipy.special import chdtri

    low, high = (sd * sqrt(freedom / chdtri(freedom, p)) for p in (0.025, 0.975))
    return low, high


def power(n: int, sd: float, effect: float) -> float:
    """Return the probability that the paired t test of n differences finds a true mean at 0.05.

    Its sign must be found too. The differences are normal with standard deviation `sd`.
    """
    from scipy.special import nctdtr

    return float(1 - nctdtr(n - 1, abs(effect) * sqrt(n) / sd, t_critical(n)))


@dataclass(frozen=True)
class Trend:
    """Change of the outcome from the smallest to the largest dose, in its unit, over n seeds.

    `interval` is the interval of this change, `p_value` tests a monotone contrast of all doses.
    `peak` is the dose between the ends that has the `extreme` mean, the highest or the lowest, if
    there is one. `peak_p` is the larger p-value of its differences to the two ends.
    """

    n: int
    size: float
    interval: tuple[float, float] | None
    p_value: float | None
    direction: Literal["rises", "falls", ""]
    peak: float | None = None
    extreme: Literal["highest", "lowest", ""] = ""
    peak_p: float | None = None


def trend(doses: Sequence[float], by_seed: Sequence[Sequence[float]]) -> Trend:
    """Return the monotone trend of outcomes over two or more doses, or the peak between the ends.

    `by_seed[i]` holds the outcomes, or differences to the control, of seed i, one a dose. The test
    is the sign-flip test of a contrast with the maximin coefficients of Abelson and Tukey (1963),
    which depend only on the order of the doses. There is a direction if three conditions hold: the
    p-value is at most 0.05, the means are extreme at the two ends, and between no two doses the
    outcome moves the other way with a p-value of at most 0.05.
    """
    k = len(doses)
    if len(set(doses)) < max(k, 2):
        raise ValueError(f"trend needs two or more different doses. Found {list(doses)}.")
    roots = [sqrt(j * (1 - j / k)) for j in range(k + 1)]
    weights = [roots[j] - roots[j + 1] for j in range(k)]
    ordered = [[y for _, y in sorted(zip(doses, ys, strict=True))] for ys in by_seed]
    # Positive and negative weights are summed separately, so equal outcomes give exactly 0.
    upper, lower = (
        [fsum(max(sign * w, 0) * y for w, y in zip(weights, ys, strict=True)) for ys in ordered]
        for sign in (1, -1)
    )
    contrast = paired_difference(upper, lower)
    columns = [*zip(*ordered, strict=True)]
    change = paired_difference(columns[-1], columns[0])
    return Trend(
        change.n,
        change.mean,
        change.interval,
        contrast.p_value,
        _direction(contrast, columns),
        *_peak(sorted(doses), columns),
    )


def _direction(
    contrast: Difference, columns: Sequence[Sequence[float]]
) -> Literal["rises", "falls", ""]:
    means = [fmean(column) for column in columns]
    steps = combinations(columns, 2) if len(columns) <= MAX_COMPARED_DOSES else pairwise(columns)
    found = {finding(paired_difference(later, earlier)) for earlier, later in steps}
    ends = means[0], means[-1]
    match finding(contrast):
        case "higher" if ends == (min(means), max(means)) and "lower" not in found:
            return "rises"
        case "lower" if ends == (max(means), min(means)) and "higher" not in found:
            return "falls"
    return ""


def _peak(
    doses: Sequence[float], columns: Sequence[Sequence[float]]
) -> tuple[float | None, Literal["highest", "lowest", ""], float | None]:
    """Return dose, kind and p-value of the mean farthest above or below the means of both ends."""
    first, *inside, last = (fmean(column) for column in columns)
    above = max(inside, default=first) - max(first, last)
    below = min(first, last) - min(inside, default=first)
    if max(above, below) <= 0:
        return None, "", None
    place = 1 + inside.index(max(inside) if above >= below else min(inside))
    ends = columns[0], columns[-1]
    p_values = [paired_difference(columns[place], end).p_value for end in ends]
    known = [p for p in p_values if p is not None]
    return doses[place], "highest" if above >= below else "lowest", max(known, default=None)


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
    # 0.7 - 0.6 and 0.9 - 0.8 are ties in spite of rounding. The tolerance depends on the smallest
    # pair: relative to a pair near overflow all other differences would be ties.
    smallest = min(max(abs(a), abs(b)) for a, b in zip(treated, control, strict=True))
    if max(differences) - min(differences) <= ROUNDING * smallest:
        differences = [differences[0]] * len(differences)
    return tuple(differences)


def chances_of_interval(
    values: Sequence[float], low: float | None, high: float | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the probabilities that a new 95 % interval of the mean is inside, and is outside.

    Inside means from `low` to `high`, outside means wholly outside of it. The interval is the t
    interval of as many new values, 3 % shorter than the sign-flip test's at n = 8. Each result is a
    pair for normal values: the first with the measured mean and deviation, the second with both
    drawn from their posterior (prior 1 / sigma^2). 20,000 draws, fixed seed; values must differ.
    """
    import numpy

    low, high = -inf if low is None else low, inf if high is None else high
    mean, sd, n = fmean(values), stdev(values), len(values)
    generator = numpy.random.default_rng(0)
    normal, other = generator.standard_normal((2, NUM_POSTERIOR_DRAWS))
    spread, other_spread = numpy.sqrt(
        generator.chisquare(n - 1, (2, NUM_POSTERIOR_DRAWS)) / (n - 1)
    )
    inside, outside = [], []
    for mu, sigma in ((mean, sd), (mean + sd / other_spread * other / sqrt(n), sd / other_spread)):
        means = mu + sigma * normal / sqrt(n)
        margin = t_critical(n) * sigma * spread / sqrt(n)
        inside.append(float(numpy.mean((means - margin >= low) & (means + margin <= high))))
        outside.append(float(numpy.mean((means + margin < low) | (means - margin > high))))
    return (inside[0], inside[1]), (outside[0], outside[1])


def share_interval(count: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval of a share, `count` of n (Clopper and Pearson 1934)."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = float(betaincinv(count, n - count + 1, tail)) if count else 0.0
    return low, float(betaincinv(count + 1, n - count, 1 - tail)) if count < n else 1.0


def chances_of_count(count: int, n: int, inside: Sequence[int]) -> tuple[float, float]:
    """Return the probabilities that a new count of n is among `inside`.

    The first is binomial with the share count / n, the second beta-binomial with Jeffreys' prior.
    """
    from scipy.stats import betabinom, binom

    plug_in = binom.pmf(inside, n, count / n).sum()
    predicted = betabinom.pmf(inside, n, count + 0.5, n - count + 0.5).sum()
    return float(plug_in), float(predicted)


def _subset_sums(differences: Sequence[float]) -> "tuple[NDArray[float64], NDArray[float64]]":
    """Return the sums and sizes of the subsets of the differences that the sign-flip test flips.

    For n <= 20 these are all subsets except the empty one; above, random ones, the complement of
    each, and the whole. A sum that is 0 apart from rounding is set to 0: sums that are equal in
    exact arithmetic differ in their last bits, and the p-value and its interval must count the same
    ones.
    """
    import numpy

    values, n = numpy.asarray(differences, float), len(differences)
    if sign_flip_is_exact(n):
        sums = sizes = totals = numpy.zeros(1)  # `totals`: of the absolute values
        for value in values:
            sums = numpy.concatenate([sums, sums + value])
            sizes = numpy.concatenate([sizes, sizes + 1])
            totals = numpy.concatenate([totals, totals + abs(value)])
        sums, sizes, totals = sums[1:], sizes[1:], totals[1:]
    else:
        generator, total = numpy.random.default_rng(0), fsum(differences)
        sums, sizes = numpy.array([total]), numpy.array([float(n)])
        totals = numpy.array([fsum(map(abs, differences))])
        for start in range(0, NUM_SIGN_DRAWS, _DRAWS_PER_BATCH):
            shape = min(_DRAWS_PER_BATCH, NUM_SIGN_DRAWS - start), n
            chosen = generator.integers(0, 2, shape, dtype=numpy.int8)
            size = chosen.sum(axis=1)
            for subset in (chosen, 1 - chosen):
                proper = subset[(size > 0) & (size < n)].astype(float)
                sums = numpy.concatenate([sums, proper @ values])
                sizes = numpy.concatenate([sizes, proper.sum(axis=1)])
                totals = numpy.concatenate([totals, proper @ abs(values)])
    sums[abs(sums) <= ROUNDING * totals / 2] = 0.0
    return sums, sizes


def _num_pairs(num_subsets: int) -> int:
    """Return the number of pairs of a subset and its complement; the empty one is not counted."""
    return (num_subsets + 1) // 2


def _rounding(differences: Sequence[float]) -> float:
    return ROUNDING * fsum(abs(difference) for difference in differences)


def _refuse_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1. Found {confidence}.")


def _refuse_nonfinite(name: str, values: Sequence[float]) -> None:
    bad = [value for value in values if not isfinite(value)]
    if bad:
        raise ValueError(f"{name} needs finite numbers: exclude diverged runs. Found {bad}.")
