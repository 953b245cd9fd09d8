"""Names and formats of outcomes, shared by terminal, page and tables."""

import re
import sys
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from gradsurg.effects.tables import number
from gradsurg.plugins.messages import MAX_PROSE_WIDTH, TEXT_WIDTH, terminal_width
from gradsurg.stats import CLEAR, HINTS, MIN_FOR_P, UNCLEAR, Difference, verdict

FIRST = ("train/loss", "test/loss", "test/accuracy")
OUTCOMES = ("test/", "examined/")
HEADLINE = ("test/accuracy", "test/loss", "train/loss")

FEW = "Fewer than 6 seeds cannot reach p < 0.05 in a sign-flip test."

Summary = dict[str, Any]  # Any: what JSON can hold


def table_width() -> int:
    """Return the columns of the terminal, or of text that is printed elsewhere."""
    return terminal_width(sys.stdout) or TEXT_WIDTH


def prose_width() -> int:
    """Return the columns of sentences, which wide terminals do not fill."""
    return min(table_width(), MAX_PROSE_WIDTH)


def filled(text: str) -> str:
    """Fold a paragraph to the width of sentences."""
    return fill(text, prose_width(), break_on_hyphens=False)


def titles(summary: Mapping[str, object]) -> dict[str, str]:
    """Return the outcomes of a run with their titles, the outcomes common to all tasks first."""
    first = [key for key in FIRST if key in summary]
    others = [key for key in summary if key.startswith(OUTCOMES) and key not in FIRST]
    return {key: title(key) for key in [*first, *others]}


def title(key: str) -> str:
    """A logged name in words: `update/norm_ratio` is "update norm ratio"."""
    return re.sub("[/_]", " ", key)


def is_share(key: str) -> bool:
    """Whether an outcome is written in per cent."""
    return "accuracy" in key


def value(key: str, outcome: float | None) -> str:
    """An outcome, as 96.31% or 0.1382."""
    return f"{outcome:.2%}" if is_share(key) and outcome is not None else number(outcome)


def amount(key: str, difference: float | None) -> str:
    """A difference with its sign, as -0.62 pp (percentage points) or +0.0253."""
    if difference is None:
        return "-"
    return f"{100 * difference:+.2f} pp" if is_share(key) else f"{difference:+.3g}"


def amounts(key: str, low: float, high: float) -> str:
    """A range of differences, as -0.89 to +0.44 pp."""
    return f"{amount(key, low).removesuffix(' pp')} to {amount(key, high)}"


def interval(key: str, difference: Difference) -> str:
    """Return the interval of the mean as text, or that so few seeds have none."""
    if difference.low is None or difference.high is None:
        return f"{'one seed' if difference.n == 1 else 'two seeds'}: no interval"
    return amounts(key, difference.low, difference.high)


def answer(
    name: str, plain: str, key: str, difference: Difference, q_value: float | None = None
) -> str:
    """Return a sentence on one arm: direction, seeds, sizes, p, and the cautions that it needs."""
    direction, outcome = verdict(difference, q_value), title(key)
    if direction == "identical":
        seeds = count(difference.n, "seed")
        return f"{name}: {outcome} is identical to that of the {plain} arm in {seeds}."
    if difference.low is None:
        mean = amount(key, difference.mean)
        return f"{name}: {outcome} {mean} against the {plain} arm; {direction}."
    counts = {"higher": difference.higher, "lower": difference.lower}
    of = f"of {difference.n} seeds"
    if direction == UNCLEAR:
        words = sorted(counts, key=lambda word: -counts[word])
        in_seeds = " and ".join(f"{word} in {counts[word]}" for word in words if counts[word])
        finding = f"no clear difference in {outcome} against the {plain} arm, {in_seeds} {of}"
    else:
        word = direction.partition(" ")[0]
        finding = f"{outcome} is {word} than in the {plain} arm in {counts[word]} {of}"
        if direction in HINTS:
            finding = f"a hint that {finding}"
    q_text = f", q {p_text(q_value)}" if q_value is not None else ""
    sentences = [
        f"{name}: {finding}: {sizes(key, difference)}; "
        f"sign-flip p {p_text(difference.p_value)}{q_text}.",
        disagreement(key, difference, direction),
        FEW if direction in HINTS and difference.n < MIN_FOR_P else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def sizes(key: str, difference: Difference, in_brackets: bool = False) -> str:
    """Return median and mean, each with its 95 % interval where it has one.

    With `in_brackets` the text stands in brackets itself, and has none for the intervals.
    """
    middle, mean = (
        f"{word} {amount(key, getattr(difference, word))}" for word in ("median", "mean")
    )
    form = "{}, 95 % interval {}" if in_brackets else "{} (95 % interval {}, {})"
    if ends := difference.median_interval:
        middle = form.format(middle, amounts(key, *ends), "sign test")
    if difference.low is not None:
        mean = form.format(mean, interval(key, difference), "paired t")
    return f"{middle}{';' if in_brackets else ','} {mean}"


def disagreement(key: str, difference: Difference, direction: str) -> str:
    """Return why the exact test, median and mean disagree; empty if they agree.

    If the mean is the odd one out, a seed that outweighs all others is named; a median's interval
    that includes 0 beside a clear direction counts seeds, not sizes.
    """
    if difference.low is None or difference.high is None:
        return ""
    in_mean = difference.low <= 0 <= difference.high
    ends = difference.median_interval
    in_median = ends is None or ends[0] <= 0 <= ends[1]
    if direction in CLEAR and in_mean:
        found = "The interval of the mean includes 0"
    elif difference.mean * difference.median < 0:
        found = "Mean and median have opposite signs"
    elif in_mean and not in_median:
        found = "The interval of the mean includes 0, that of the median does not"
    elif direction in CLEAR and ends is not None and in_median:
        return (
            "The interval of the median includes 0, because it counts seeds "
            f"({difference.higher} higher, {difference.lower} lower) and not sizes."
        )
    else:
        return ""
    heaviest, *others = sorted(difference.differences, key=abs, reverse=True)
    if abs(heaviest) > sum(map(abs, others)):
        return f"{found}, because one seed outweighs all others ({amount(key, heaviest)})."
    ends = amounts(key, min(difference.differences), max(difference.differences))
    return f"{found}, because the seeds differ widely ({ends})."


def p_text(p_value: float | None) -> str:
    """Return a p-value or q-value as text; empty for None."""
    if p_value is None:
        return ""
    return f"{p_value:.3g}" if p_value >= 1e-4 else "< 0.0001"


def count(number: int, one: str, many: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def unbroken(text: str) -> str:
    """Put no-break spaces into `n = 2` and `95 %`."""
    return re.sub(r"(?<=\bn) = (?=\d)|(?<=\d) (?=%)", _hard, text)


def _hard(spaced: re.Match[str]) -> str:
    return spaced[0].replace(" ", "\u00a0")


def listed(names: list[str], most: int = 6) -> str:
    """Names in a sentence, as "a, b and c"; a long list ends with how many more there are.

    Names that have a comma are separated by semicolons.
    """
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    comma = "; " if any(", " in name.partition(" (")[0] for name in names) else ", "
    return " and ".join([comma.join(names[:-1]), names[-1]] if len(names) > 1 else names)
