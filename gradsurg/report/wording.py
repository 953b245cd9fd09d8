"""Names of metrics, and the formats of their numbers, in sentences, tables and charts."""

import re
import sys
from collections.abc import Mapping, Sequence
from math import floor, log10
from textwrap import fill

from gradsurg.effects.numbers import TASK_METRICS
from gradsurg.effects.tables import number
from gradsurg.plugins.messages import MAX_PROSE_WIDTH, TEXT_WIDTH, terminal_width

FIRST = ("train/loss", "test/loss", "test/accuracy")
OUTCOME = "outcome/"
"""Prefix of the numbers that a user's script reports."""
OUTCOMES = ("test/", "examined/", OUTCOME)
HEADLINE = ("test/accuracy", "test/loss", "train/loss")
AREA = "area/"
"""Prefix of the mean height of a logged curve."""


def table_width() -> int:
    """Return the columns of the terminal, or of text that is printed elsewhere."""
    return terminal_width(sys.stdout) or TEXT_WIDTH


def filled(text: str, indent: str = "") -> str:
    """Fold a paragraph to the width of sentences; names, `n = 2` and `95 %` stay in one line."""
    bound = r"(?<=\bn) = (?=\d)|(?<=\d) (?=(?:%|pp|ms)(?!\w))"
    folded = fill(
        re.sub(bound, lambda found: found[0].replace(" ", "\u00a0"), text),
        min(table_width(), MAX_PROSE_WIDTH),  # wide terminals are not filled
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return folded.replace("\u00a0", " ")


def titles(summary: Mapping[str, object]) -> dict[str, str]:
    """Return the outcomes of a run with their titles, the outcomes common to all tasks first."""
    first = [key for key in FIRST if key in summary]
    others = [key for key in summary if key.startswith(OUTCOMES) and key not in FIRST]
    return {key: title(key) for key in [*first, *others]}


def title(key: str) -> str:
    """A logged name in words: `test/loss_first` is "test loss first"."""
    if key.startswith(AREA):
        return f"{title(key.removeprefix(AREA))} AUC"
    return re.sub("[/_]", " ", key.removeprefix(OUTCOME))


def better(key: str) -> str:
    """Return `higher` or `lower`, the good direction of a metric; empty if it is not known."""
    last = key.rpartition("/")[2]
    known = (metric for metric in TASK_METRICS if last.partition("_")[0] == metric.name)
    return next((metric.better or "" for metric in known), "")


def is_share(key: str) -> bool:
    """Whether an outcome is written in per cent."""
    return "accuracy" in key


def value(key: str, outcome: float | None) -> str:
    """An outcome, as 96.31% or 0.1382."""
    return f"{outcome:.2%}" if is_share(key) and outcome is not None else number(outcome)


def digits(number: float, many: int = 4) -> str:
    """A number with that many significant digits, also those that are 0: 0.1000, 96.31."""
    if not number or not 1e-4 <= abs(number) < 1e6:
        return f"{number:.{many}g}"
    return f"{number:.{max(0, many - 1 - floor(log10(abs(number))))}f}"


def amount(key: str, difference: float | None) -> str:
    """A difference with its sign, as -0.62 pp (percentage points) or +0.0253."""
    if difference is None:
        return "-"
    return f"{100 * difference:+.2f} pp" if is_share(key) else f"{difference:+.3g}"


def amounts(key: str, low: float | None, high: float | None) -> str:
    """A range of differences, as -0.89 to +0.44 pp; empty if an end is missing."""
    if low is None or high is None:
        return ""
    return f"{amount(key, low).removesuffix(' pp')} to {amount(key, high)}"


def size(key: str, difference: float) -> str:
    """The size of a difference without its sign: 0.62 pp."""
    return amount(key, abs(difference))[1:]


def sizes(key: str, low: float, high: float) -> str:
    """The ends of an interval on one side of 0, without their signs: 0.11 to 0.78 pp."""
    first, last = sorted((low, high), key=abs)
    return f"{size(key, first).removesuffix(' pp')} to {size(key, last)}"


def p_text(p_value: float | None) -> str:
    """Return a p-value or q-value as text; empty for None."""
    if p_value is None:
        return ""
    return f"{p_value:.3g}" if p_value >= 1e-4 else "< 0.0001"


def count(number: int, one: str, many: str = "") -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names in a sentence, as "a, b and c"; a long list ends with how many more there are.

    Names that have a comma are separated by semicolons.
    """
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    comma = "; " if any(", " in name.partition(" (")[0] for name in names) else ", "
    return " and ".join([comma.join(names[:-1]), names[-1]] if len(names) > 1 else names)


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
