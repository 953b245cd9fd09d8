"""Comparing two arms that share their seeds: paired differences and what may be said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from statistics import fmean, stdev

MAX_EXACT = 16


@dataclass(frozen=True)
class Difference:
    """Treated minus control, seed by seed; what one seed cannot give is None."""

    mean: float
    low: float | None
    high: float | None
    n: int
    sd: float | None
    p_value: float | None


def paired_difference(
    treated: Sequence[float], control: Sequence[float], confidence: float = 0.95
) -> Difference:
    """The mean paired difference with its Student t interval, and the p of the paired t test.

    Entry i of both belongs to the same seed. Diverged runs are the caller's to leave out, pair by
    pair, and to count: NaN and infinity raise ValueError. If all differences are the same the
    interval is that number and p is its limit: 0, or 1 if they are all zero.
    """
    differences = _differences(treated, control)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1. Found {confidence}.")
    n, mean = len(differences), fmean(differences)
    if n == 1:
        return Difference(mean, None, None, n, None, None)
    sd = stdev(differences)
    error = sd / sqrt(n)
    if error == 0:
        return Difference(mean, mean, mean, n, sd, 0.0 if mean else 1.0)
    from scipy.stats import t

    reach = t_reach(n, confidence) * error
    p_value = 2 * float(t.sf(abs(mean) / error, n - 1))
    return Difference(mean, mean - reach, mean + reach, n, sd, p_value)


def t_reach(n: int, confidence: float = 0.95) -> float:
    """How many standard errors Student's t interval reaches from the mean of `n` numbers."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, n - 1))


def sign_flip_p(differences: Sequence[float]) -> float:
    """The exact two-sided p of the sign-flip test: how many of the 2^n signings reach |mean|.

    With n differences it cannot fall below 2 / 2^n: fewer than 6 seeds cannot reach 0.05.
    """
    if not 1 <= len(differences) <= MAX_EXACT:
        raise ValueError(f"sign_flip_p needs 1 to {MAX_EXACT} numbers. Found {len(differences)}.")
    _refuse_nonfinite("differences", differences)
    sums = [0.0]
    for difference in differences:
        sums = [total + sign * difference for total in sums for sign in (1, -1)]
    # sums that are equal on paper differ in their last bits
    slack = 1e-12 * fsum(abs(difference) for difference in differences)
    observed = abs(fsum(differences)) - slack
    return sum(abs(total) >= observed for total in sums) / len(sums)


def verdict(difference: Difference) -> str:
    """What the interval allows to say: `higher`, `lower`, `no clear difference`, or that n is 1."""
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


def _refuse_nonfinite(name: str, values: Sequence[float]) -> None:
    bad = [value for value in values if not isfinite(value)]
    if bad:
        raise ValueError(f"{name} needs finite numbers, diverged runs left out. Found {bad}.")
