"""Objects and lists of names in short, for messages and tables."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from gradsurg.plugins.messages import NAMES_WIDTH


def in_short(part: Any) -> str:  # Any: a transform, a selector, a trigger or an aggregator
    """Return the repr of an object without the fields that have their defaults."""
    if isinstance(part, tuple):
        return f"({', '.join(map(in_short, part))})"
    if not is_dataclass(part) or isinstance(part, type):
        return getattr(part, "__qualname__", "") or repr(part)  # without a memory address
    pairs = ((field, getattr(part, field.name)) for field in fields(part))
    changed = [
        f"{field.name}={in_short(value)}" for field, value in pairs if value != field.default
    ]
    return f"{type(part).__name__}({', '.join(changed)})"


def shortened(names: Iterable[str]) -> str:
    """Return the names, joined by commas, and the number of those that do not fit."""
    shown = listed = [*names]
    while len(", ".join(shown)) > NAMES_WIDTH and len(shown) > 1:
        shown = shown[:-1]
    left = len(listed) - len(shown)
    return ", ".join(shown) + f", ... and {left} more" * bool(left)
