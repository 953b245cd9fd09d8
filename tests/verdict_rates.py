"""How often a study without any effect has a verdict: python -m tests.verdict_rates"""

from collections.abc import Callable
from functools import cache
from itertools import product

import numpy
from numpy.random import Generator

from gradsurg.stats import (
    CLEAR,
    MAX_P,
    Difference,
    benjamini_hochberg,
    finding,
    margin_verdict,
    sign_flip_interval,
    trend,
)

SEEDS, STUDIES, BATCH = 8, 28_000, 2_000
RATES, TUNING_SEEDS = 5, 3
CURVES = {"flat": (0.0,) * RATES, "shallow": (-0.6, -0.2, 0.0, -0.2, -0.6)}
CURVES |= {"steep": (-4.0, -1.5, 0.0, -1.5, -4.0)}
"""Mean outcomes over the rates of a tuning, in standard deviations over seeds."""
DOSES = {"no effect": (0.0, 0.0, 0.0), "peak in the middle": (0.0, 3.0, 2.0)}
DOSES |= {"seven without effect": (0.0,) * 7, "monotone": (0.0, 1.0, 2.0)}
"""Mean effects of doses, in standard deviations over seeds."""
DESIGNS = ((1, 1), (6, 1), (6, 3))
SIGNS = numpy.array([(1.0, *signs) for signs in product((1.0, -1.0), repeat=SEEDS - 1)])


def normal(generator: Generator, shape: tuple[int, ...]) -> numpy.ndarray:
    return generator.normal(size=shape)


def lattice(generator: Generator, shape: tuple[int, ...]) -> numpy.ndarray:
    """Accuracies on 450 test examples, with ties."""
    return numpy.round(450 * generator.normal(0.97, 0.005, shape)) / 450


def collapse(generator: Generator, shape: tuple[int, ...]) -> numpy.ndarray:
    """One run in ten, of the control too, is much worse than the others."""
    return normal(generator, shape) - 30 * (generator.random(shape) < 0.1)


def one_sided_collapse(generator: Generator, shape: tuple[int, ...]) -> numpy.ndarray:
    """One run in ten is much worse, but none of the control, which has the same mean."""
    values = normal(generator, shape)
    values[:, 1:] += 3 - 30 * (generator.random(shape)[:, 1:] < 0.1)
    return values


def skewed(generator: Generator, shape: tuple[int, ...]) -> numpy.ndarray:
    """Differences that are log-normal, with mean 0: the control, index 0 of axis 1, is constant."""
    values = generator.lognormal(size=shape) - numpy.exp(0.5)
    values[:, 0] = 0.0
    return values


SYMMETRIC, SKEWED = (normal, lattice, collapse), (skewed, one_sided_collapse)
Kind = Callable[[Generator, tuple[int, ...]], numpy.ndarray]


def p_values(differences: numpy.ndarray) -> numpy.ndarray:
    """The sign-flip p-values of differences whose last axis is the seed."""
    slack = 1e-12 * abs(differences).sum(axis=-1, keepdims=True)
    observed = abs(differences.sum(axis=-1, keepdims=True)) - slack
    return (abs(differences @ SIGNS.T) >= observed).mean(axis=-1)


Found = Callable[[list[float], float | None], bool]


def is_clear(differences: list[float], q: float | None) -> bool:
    return finding(Difference(tuple(differences)), q) in CLEAR


def is_better_or_worse(differences: list[float], q: float | None) -> bool:
    """Beside a margin so small that no interval is equivalent."""
    low, high = sign_flip_interval(differences) or (-1.0, 1.0)
    verdict = margin_verdict(low, high, 1e-9, "higher", q)
    return verdict == "better" or verdict.startswith("worse")


def has_direction(
    differences: numpy.ndarray, p_by_arm: numpy.ndarray, found: Found = is_clear
) -> bool:
    """Whether an arm, of the differences of all arms in one metric, is found higher or lower.

    Arms without any difference are in no family.
    """
    family = numpy.flatnonzero(differences.any(axis=-1))
    p_values = p_by_arm[family].tolist()
    if min(p_values, default=1.0) > MAX_P:
        return False
    q_values = benjamini_hochberg(p_values) if len(family) > 1 else [None]
    return any(
        found(differences[arm].tolist(), q)
        for arm, p, q in zip(family, p_values, q_values, strict=True)
        if p <= MAX_P
    )


@cache
def rates(kind: Kind, arms: int, metrics: int, studies: int = STUDIES) -> tuple[float, ...]:
    """The shares of studies with a direction in each metric, and last in any of them.

    The arms of a study share their control; its metrics are independent.
    """
    generator = numpy.random.default_rng(0)
    directed = []
    for _ in range(studies // BATCH):
        values = kind(generator, (BATCH, 1 + arms, metrics, SEEDS))
        differences = (values[:, 1:] - values[:, :1]).swapaxes(1, 2)
        for study in zip(differences, p_values(differences), strict=True):
            directed.append([has_direction(*metric) for metric in zip(*study, strict=True)])
    table = numpy.array(directed)
    return *table.mean(axis=0).tolist(), float(table.any(axis=1).mean())


def margin_rate(kind: Kind, arms: int, studies: int = STUDIES) -> float:
    """The share of studies with an arm that is better or worse beside a margin, in one metric."""
    generator = numpy.random.default_rng(0)
    directed = 0
    for _ in range(studies // BATCH):
        values = kind(generator, (BATCH, 1 + arms, SEEDS))
        differences = values[:, 1:] - values[:, :1]
        for study in zip(differences, p_values(differences), strict=True):
            directed += has_direction(*study, is_better_or_worse)
    return directed / studies


def tuned_rate(curve: str, studies: int = STUDIES) -> float:
    """The share of studies of two identical methods, each at its best rate, with a direction."""
    generator = numpy.random.default_rng(0)
    means = numpy.array(CURVES[curve])
    noise = normal(generator, (studies, 2, RATES)) / TUNING_SEEDS**0.5
    chosen = means[(means + noise).argmax(axis=-1)]
    differences = (chosen[:, :1] - chosen[:, 1:]) + 2**0.5 * normal(generator, (studies, SEEDS))
    return float((p_values(differences) <= MAX_P).mean())


def splits_rate(of_split: float, studies: int = STUDIES) -> float:
    """The share of studies of eight splits, with four seeds in each, with a direction.

    `of_split` is the share of the variance of a difference that belongs to the split.
    """
    generator = numpy.random.default_rng(0)
    splits = of_split**0.5 * normal(generator, (studies, SEEDS, 1))
    differences = splits + (1 - of_split) ** 0.5 * normal(generator, (studies, SEEDS, 4))
    return float((p_values(differences.mean(axis=-1)) <= MAX_P).mean())


def dose_rates(doses: str, studies: int = 8_000) -> tuple[float, float]:
    """The shares of studies of as many doses with a direction, and with a clear peak inside."""
    generator = numpy.random.default_rng(0)
    effects = numpy.array(DOSES[doses])
    outcomes = normal(generator, (studies, SEEDS, 1 + len(effects))) / 2**0.5
    differences = outcomes[..., 1:] + effects - outcomes[..., :1]
    found = [trend(range(len(effects)), study) for study in differences.tolist()]
    peaks = [each.peak_p is not None and each.peak_p <= MAX_P for each in found]
    return sum(bool(each.direction) for each in found) / studies, sum(peaks) / studies


def parts_rate(studies: int = STUDIES) -> tuple[float, float, float]:
    """The shares of studies with p <= 0.05 for the total, the direction and the size."""
    generator = numpy.random.default_rng(0)
    treated, matched, plain = normal(generator, (3, studies, SEEDS))
    parts = (treated - plain, treated - matched, matched - plain)
    total, direction, size = (float((p_values(part) <= MAX_P).mean()) for part in parts)
    return total, direction, size


def rows() -> list[str]:
    """The lines of the table in docs/verdicts.md."""
    lines = []
    for kind in (*SYMMETRIC, *SKEWED):
        single, many, (first, *others, either) = (rates(kind, *design) for design in DESIGNS)
        shares = (single[0], many[0], first, max(others), either)
        cells = [kind.__name__.replace("_", "-"), *(f"{100 * share:.1f} %" for share in shares)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def other_rows() -> list[str]:
    """The lines of the table of further sentences in docs/verdicts.md."""
    _, direction, size = parts_rate()
    three, seven = (dose_rates(doses) for doses in ("no effect", "seven without effect"))
    shares = {
        "better or worse, with a margin, 1 arm": margin_rate(normal, 1),
        "the same with 6 arms": margin_rate(normal, 6),
        "higher or lower, eight splits of four seeds": splits_rate(0.5),
        "p <= 0.05 for the direction, with `control=[plain,norm_matched]`": direction,
        "p <= 0.05 for the size, likewise": size,
        "rises or falls, or a clear peak, three swept values": sum(three),
        "the same with seven swept values": sum(seven),
        "higher or lower, both arms at their best of five equal rates": tuned_rate("flat"),
        "the same, rates one and two steps away worse by 0.2 and 0.6 deviations": tuned_rate(
            "shallow"
        ),
        "the same, rates one and two steps away worse by 1.5 and 4 deviations": tuned_rate("steep"),
    }
    return [f"| {name} | {100 * share:.1f} % |" for name, share in shares.items()]


if __name__ == "__main__":
    print("\n".join([*rows(), "", *other_rows()]))
