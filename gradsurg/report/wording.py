"""Names and formats of outcomes, shared by terminal, page and tables."""

import re
from collections.abc import Mapping
from typing import Any

from gradsurg.effects.tables import number
from gradsurg.stats import Difference, verdict
from gradsurg.training.run_directory import UNTIL_STEP

FIRST = ("train/loss", "test/loss", "test/accuracy")
OUTCOMES = ("test/", "examined/")
HEADLINE = ("test/accuracy", "test/loss", "train/loss")

FEW = "Fewer than 6 seeds cannot reach p < 0.05 in a sign-flip test."

Summary = dict[str, Any]  # Any: what JSON can hold


def titles(summary: Mapping[str, object]) -> dict[str, str]:
    """Return the outcomes of a run with their titles, the outcomes common to all tasks first."""
    first = [key for key in FIRST if key in summary]
    others = [key for key in summary if key.startswith(OUTCOMES) and key not in FIRST]
    return {key: title(key) for key in [*first, *others]}


def title(key: str) -> str:
    """A logged name in words: `update/norm_ratio` is "update norm ratio"."""
    return "the step that gets there" if key == UNTIL_STEP else re.sub("[/_]", " ", key)


def is_share(key: str) -> bool:
    """Whether an outcome is written in per cent."""
    return "accuracy" in key


def value(key: str, outcome: float | None) -> str:
    """An outcome, as 96.31% or 0.1382."""
    return f"{outcome:.2%}" if is_share(key) and outcome is not None else number(outcome)


def amount(key: str, difference: float | None) -> str:
    """A difference with its sign, as -0.62% or +0.0253."""
    if difference is None:
        return "-"
    if key == UNTIL_STEP:
        return f"{difference:+,.1f}".removesuffix(".0")
    return f"{difference:+.2%}" if is_share(key) else f"{difference:+.3g}"


def interval(key: str, difference: Difference) -> str:
    """Return the interval as text, or that one seed has none."""
    if difference.low is None or difference.high is None:
        return "one seed: no interval"
    return f"{amount(key, difference.low)} to {amount(key, difference.high)}"


def answer(name: str, plain: str, key: str, difference: Difference) -> str:
    """Return a sentence on one arm, and the caution that it needs."""
    direction = verdict(difference)
    mean, outcome = amount(key, difference.mean), title(key)
    if difference.low is None:
        return f"{name}: {outcome} {mean} against the {plain} arm; {direction}."
    if direction == "no clear difference":
        finding = f"no clear difference in {outcome} against the {plain} arm"
    else:
        finding = f"{outcome} is {direction} than in the {plain} arm"
    few = difference.n < 6 and direction != "no clear difference"
    between = f"95 % interval {interval(key, difference)} ({difference.n} seeds, paired t)"
    return f"{name}: {finding}: {mean}, {between}.{f' {FEW}' if few else ''}"


def count(number: int, one: str, many: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def unbroken(text: str) -> str:
    """Put no-break spaces into `n = 2`, `95 %` and `clip · mlp`."""
    return re.sub(r"(?<=\bn) = (?=\d)|(?<=\d) (?=%)| · ", _hard, text)


def _hard(spaced: re.Match[str]) -> str:
    return spaced[0].replace(" ", "\u00a0")


def listed(names: list[str], most: int = 6) -> str:
    """Names in a sentence, as "a, b and c"; a long list ends with how many more there are."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
