"""How sure an outcome is, beside its t interval: the sign-flip test and, from 20 seeds, BCa."""

from collections.abc import Callable, Mapping, Sequence

from gradsurg.stats import DRAWS, MIN_BCA, bca_interval, is_exact, sign_flip_p

MIN_FOR_P = 6  # seeds with which an exact sign-flip test can reach 0.05

Amount = Callable[[str, float], str]  # a difference of an outcome as it is printed


def p_cell(differences: Sequence[float]) -> str:
    """The p of the sign-flip test in a table; nothing for one seed."""
    if len(differences) < 2:
        return ""
    p_value = sign_flip_p(differences)
    return f"{p_value:.3g}" if p_value >= 1e-4 else "< 0.0001"


def about_p(n: int) -> str:
    """What a reader of that p has to know, if anything."""
    if 1 < n < MIN_FOR_P:
        return f"with {n} seeds the exact sign-flip p is at least {2 / 2**n:.3g}: 6 can reach 0.05"
    if not is_exact(n):
        return f"sign-flip p of {DRAWS:,} signings drawn at random, not of all"
    return ""


def bootstrap_line(differences: Mapping[str, Sequence[float]], amount: Amount) -> str:
    """The BCa intervals of outcomes, by key; nothing if there are too few seeds."""
    parts = []
    for key, own in differences.items():
        if len(own) >= MIN_BCA:
            low, high = bca_interval(own)
            parts.append(f"{key.replace('/', ' ')} {amount(key, low)} to {amount(key, high)}")
    return f"95 % BCa bootstrap intervals: {'; '.join(parts)}" if parts else ""
