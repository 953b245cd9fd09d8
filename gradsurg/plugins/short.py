"""Lists of names in short, for messages."""

from collections.abc import Iterable

from gradsurg.plugins.messages import NAMES_WIDTH


def shortened(names: Iterable[str]) -> str:
    """Return the names, joined by commas, and the number of those that do not fit."""
    shown = listed = [*names]
    while len(", ".join(shown)) > NAMES_WIDTH and len(shown) > 1:
        shown = shown[:-1]
    left = len(listed) - len(shown)
    return ", ".join(shown) + f", ... and {left} more" * bool(left)
