"""Patterns by which selectors name modules, parameters and classes."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from torch import nn

from gradsurg.plugins.fields import SelectionError, nearest


def _check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and a regex that does not compile."""
    if not pattern:
        raise ValueError("must not be empty")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


def _type_name(given: Any) -> str:  # Any: pydantic has not looked yet
    if not isinstance(given, str | type):
        raise ValueError("must be a string or a class")
    return _check_pattern(given.__name__ if isinstance(given, type) else given)


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A pattern on names, as `matches` reads it."""

Types = Annotated[str | type[Any], BeforeValidator(_type_name)]
"""A glob or `re:` on a class's name or that of one of its bases; a class becomes its name."""


def matches(name: str, pattern: str) -> bool:
    """Whether `name` fits a glob (`layer1.*`, `*` crosses dots) or, whole, a regex (`re:...`)."""
    if pattern == "*":
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def matches_type(module: nn.Module | None, types: Types) -> bool:
    """Whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if types == "*":
        return True
    pattern = _type_name(types)
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def nothing_matched(
    selector: object, field: str, pattern: str, names: Iterable[str]
) -> SelectionError:
    """Return the error for a selector whose `field` matches none of `names`, which it lists."""
    choices = list(names)
    # A glob stands for a prefix, as 'hiden.*': the nearest prefix is what was meant.
    literal = pattern.removeprefix("re:").strip("*.")
    parts = [name.split(".") for name in choices]
    prefixes = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
    close = get_close_matches(literal, sorted(prefixes), n=1, cutoff=0.6)
    listed = nearest(pattern, choices)
    if close and literal != pattern:
        listed = listed.split(" Did you mean")[0]
        listed += f" Did you mean '{pattern.replace(literal, close[0])}'?"
    return SelectionError(selector, field, f"nothing matches '{pattern}'. {listed}")
