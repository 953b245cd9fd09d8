"""Which part of a selector or a trigger is at fault, and by which of its fields."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, TypeVar

from gradsurg.plugins.fields import FieldError
from gradsurg.sites.base import Selector
from gradsurg.triggers.base import Trigger

Part = TypeVar("Part", Selector, Trigger)


def guilty(whole: Part, fails: Callable[[Part], bool], path: str = "") -> tuple[str, Part]:
    """The part that fails by itself, with its key in the whole; without such a part the whole."""
    if isinstance(getattr(whole, "of", None), tuple):
        for key, part in inside(whole):
            if fails(part):
                return guilty(part, fails, joined(path, key))
    return path, whole


def culprit(part: Part, acts: Callable[[Part], bool]) -> str:
    """The field without which `part` would act; empty if there is none."""
    if not is_dataclass(part):
        return ""
    given = [
        field
        for field in fields(part)
        if field.default is MISSING or getattr(part, field.name) != field.default
    ]
    if len(given) == 1:
        return given[0].name
    for field in fields(part):
        value = getattr(part, field.name)
        # A switch has one other position; of anything else the default asks the least.
        other: Any = not value if isinstance(value, bool) else field.default
        if other is MISSING or other == value:
            continue
        try:
            if acts(replace(part, **{field.name: other})):
                return field.name
        except FieldError:
            continue  # the fields need one another
    return ""


def parts(whole: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """It and all that it is made of, each with its key in it, as `of.1`."""
    yield path, whole
    for key, part in inside(whole):
        yield from parts(part, joined(path, key))


def inside(whole: Part) -> list[tuple[str, Part]]:
    of: Any = getattr(whole, "of", None)  # Any: parts of the same kind as the whole, if it has some
    parts: list[tuple[str, Any]] = [("of", of)] if isinstance(of, Selector | Trigger) else []
    if isinstance(of, tuple):
        parts = [(f"of.{index}", part) for index, part in enumerate(of)]
    return parts


def joined(*keys: str) -> str:
    return ".".join(key for key in keys if key)
