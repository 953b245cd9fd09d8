"""How sure an outcome is, beside its t interval: sign-flip p, q among many arms, BCa intervals."""

from collections.abc import Callable, Collection, Mapping, Sequence

from gradsurg.stats import (
    DRAWS,
    MAX_EXACT,
    MIN_BCA,
    Difference,
    bca_interval,
    is_exact,
    sign_flip_p,
    verdict,
)

MIN_FOR_P = 6  # seeds with which an exact sign-flip test can reach 0.05
MAX_Q = 0.05  # of what is called clear among several
CLEAR = ("higher", "lower")

ABOUT_Q = (
    "q is the sign-flip p after Benjamini and Hochberg's control of false discoveries, among all "
    "arms in one metric or all links of one chain"
)

Amount = Callable[[str, float], str]  # a difference of an outcome as it is printed


def reading(difference: Difference, q_value: float | None) -> str:
    """The verdict of the interval, called a hint where seeds are few or q does not bear it out."""
    told = verdict(difference)
    few = difference.n < MIN_FOR_P
    borne_out = not few and (q_value is None or q_value <= MAX_Q)
    return told if told not in CLEAR or borne_out else f"{told} (hint)"


def p_of(differences: Sequence[float]) -> float | None:
    """The p of the sign-flip test; one seed has none."""
    return sign_flip_p(differences) if len(differences) > 1 else None


def p_text(p_value: float | None) -> str:
    """A p or a q in a table."""
    if p_value is None:
        return ""
    return f"{p_value:.3g}" if p_value >= 1e-4 else "< 0.0001"


def p_cell(differences: Sequence[float]) -> str:
    """The p of the sign-flip test in a table; nothing for one seed."""
    return p_text(p_of(differences))


def about_p(n: int) -> str:
    """What a reader of that p has to know, if anything."""
    if 1 < n < MIN_FOR_P:
        return f"with {n} seeds the exact sign-flip p is at least {2 / 2**n:.3g}: 6 can reach 0.05"
    if not is_exact(n):
        return f"sign-flip p of {DRAWS:,} signings drawn at random, not of all"
    return ""


def about_tests(seeds: Collection[int]) -> str:
    """What a table's p and reading are of, given the numbers of seeds in it."""
    exact = "p is that of the exact sign-flip test"
    if not all(is_exact(n) for n in seeds):
        drawn = f"more than {MAX_EXACT} seeds: of {DRAWS:,} signings drawn at random"
        exact = f"p is that of the sign-flip test, exact or, with {drawn}"
    hint = f"a hint with fewer than {MIN_FOR_P} seeds, or with q above {MAX_Q}"
    return f"{exact}; the reading is that of the 95 % paired t interval, {hint}."


def bootstrap(differences: Sequence[float]) -> tuple[float, float] | None:
    """The BCa interval, where there are seeds enough for it."""
    return bca_interval(differences) if len(differences) >= MIN_BCA else None


def bootstrap_line(differences: Mapping[str, Sequence[float]], amount: Amount) -> str:
    """The BCa intervals of outcomes, by key; nothing if there are too few seeds."""
    parts = []
    for key, own in differences.items():
        found = bootstrap(own)
        if found:
            shown = " to ".join(amount(key, end) for end in found)
            parts.append(f"{key.replace('/', ' ')} {shown}")
    return f"95 % BCa bootstrap intervals: {'; '.join(parts)}" if parts else ""
