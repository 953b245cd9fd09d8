"""Select modules and parameters by name, class, position and shape."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache, wraps
from itertools import combinations
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary, ref

from pydantic import AfterValidator, BeforeValidator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.fields import SelectionError
from gradsurg.plugins.messages import unknown
from gradsurg.torch_internals import compiling

T = TypeVar("T")

ROOT = "root"  # the name of the model itself
COMPILED = "_orig_mod"  # the attribute under which torch.compile keeps the original module

OUTSIDE = -1
"""Stands for the number of a call made outside of the forward of the attached model."""

TRACED = (
    "train the model itself, or attach to the traced one at Parameters: code of torch.jit.trace "
    "runs no hooks of modules and nodes"
)


def _check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and an invalid regular expression."""
    if not pattern:
        raise ValueError("must not be empty")
    try:
        _matcher(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


def _type_name(given: Any) -> str:  # Any: not validated yet
    if not isinstance(given, str | type):
        raise ValueError("must be a string or a class")
    return _check_pattern(given.__name__ if isinstance(given, type) else given)


def _range(given: Any) -> tuple[int, int]:  # Any: not validated yet
    bounds = (given, given) if type(given) is int else given
    match bounds:
        case [int(low), int(high)] if 0 <= low <= high and bool not in map(type, bounds):
            return low, high
        case _:
            raise ValueError("must be a number >= 0 or two of them, low and high")


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A pattern on names: a glob or `re:` and a regular expression (see `matches`)."""

Types = Annotated[str | type[Any], BeforeValidator(_type_name)]
"""A pattern on the name of a class or of one of its bases; a class stands for its name."""


Range = Annotated[int | tuple[int, int], BeforeValidator(_range)]
"""A number or a pair (lowest, highest); stored as a pair."""


_tables: ContextVar[tuple[nn.Module, dict[object, Any]] | None] = ContextVar(
    "_tables", default=None
)
"""The model of `one_scan`, and the results of `scanned` functions. Any: each its own type."""


@contextmanager
def one_scan(model: nn.Module) -> Iterator[None]:
    """Keep the results of `scanned` functions in the block; the model must not change there.

    The garbage collector pauses, if it is enabled. While thousands of hooks are made, it would
    otherwise search all objects of the process again and again, for four fifths of the time of
    attaching.
    """
    held = _tables.get()
    if held is not None and held[0] is model:
        yield  # inside another block
        return
    token, was_enabled = _tables.set((model, {})), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _tables.reset(token)
        if was_enabled:
            gc.enable()


def scanned(function: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
    """Decorate a function of a model: inside `one_scan` its result is kept, and shared."""

    @wraps(function, updated=())
    def shared(model: nn.Module) -> T:
        held = _tables.get()
        if held is None or held[0] is not model:
            return function(model)
        if function not in held[1]:
            held[1][function] = function(model)
        return held[1][function]

    return shared


WRAPPERS: "WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]]" = WeakKeyDictionary()
"""The DistributedDataParallel around a model."""


def inner_model(model: nn.Module) -> nn.Module:
    """The model in a compiled one and in a DistributedDataParallel, whose names are used."""
    model = getattr(model, COMPILED, model)
    if not isinstance(model, DistributedDataParallel):
        return model
    WRAPPERS[model.module] = ref(model)
    return model.module


@scanned
def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all its names; the model itself is `root`. Not to be changed.

    The wrapper that torch.compile puts around a module is left out.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not compiling.is_wrapper(module):
            names.setdefault(module, []).append(uncompiled_name(name) or ROOT)
    return names


@scanned
def params_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under each of its names. Not to be changed."""
    named = model.named_parameters(remove_duplicate=False)
    return {uncompiled_name(name): param for name, param in named}


def uncompiled_name(name: str) -> str:
    """Return the name of a module or parameter without the parts added by torch.compile."""
    # The first test is for speed: names of large models are read at each attaching.
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], object]:
    """Return the compiled test of a pattern on full names."""
    is_regular = pattern.startswith("re:")
    return re.compile(pattern[3:] if is_regular else translate(pattern)).fullmatch


def matches(name: str, pattern: str) -> bool:
    """Return whether a name fits a glob (`layer1.*`; `*` also crosses dots) or `re:` and a regular
    expression for the full name.
    """
    return pattern == "*" or _matcher(pattern)(name) is not None


def matches_type(module: nn.Module | None, types: Types) -> bool:
    """Return whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if types == "*":
        return True
    pattern = _type_name(types)
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def is_container(module: nn.Module) -> bool:
    """Return whether a module, such as a ModuleList, has no forward and so is never called."""
    return getattr(type(module), "forward", None) is nn.Module.forward  # TorchScript has none


def nothing_matched(
    selector: object, field: str, pattern: str, names: Iterable[str], reason: str = ""
) -> SelectionError:
    """Return the error for a selector whose `field` matches none of `names`, which it lists.

    A known `reason`, a sentence, replaces the nearest name and the list.
    """
    choices = list(names)
    # The literal part of a glob such as 'hiden.*' is compared with the parts of the names.
    literal = pattern.removeprefix("re:").strip("*.")
    paths = [name.split(".") for name in choices]
    parts = {
        ".".join(path[i:j]) for path in paths for i, j in combinations(range(len(path) + 1), 2)
    }
    close = get_close_matches(literal, sorted(parts - {literal}), n=5, cutoff=0.6)
    offers = [pattern.replace(literal, part) for part in close] if literal != pattern else []
    offers = [offer for offer in offers if any(matches(name, offer) for name in choices)]
    if reason:
        text = f"nothing that is called matches '{pattern}'. {reason}"
    else:
        name = "" if pattern in choices else pattern
        text = unknown(f"nothing matches '{pattern}'", name, choices, offers[:1])
    return SelectionError(selector, field, text)


def in_range(number: int | None, bounds: Range | None) -> bool:
    if bounds is None or number is None:
        return bounds is None
    low, high = _range(bounds)
    return low <= number <= high
