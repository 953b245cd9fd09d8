"""The tensors in nested values, and aliases of tensors."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeGuard
from weakref import ref

from torch import Tensor, nn

from gradsurg.sites.places import Door, GradFn, Kind, SiteFn
from gradsurg.torch_internals import autograd, module_hooks

ORIGINAL = "_gradsurg_original"  # the attribute of an alias that holds the original tensor


def _parts(value: object) -> list[tuple[Any, object]]:  # Any: keys of a user's dict
    """Return the items of a container, or the tensors among the attributes of another object."""
    if isinstance(value, MutableMapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, nn.Module | type | FunctionType | ModuleType):
        return []
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    attributes = getattr(value, "__dict__", {})
    return [(key, item) for key, item in attributes.items() if isinstance(item, Tensor)]


def _with_parts(value: Any, changed: Mapping[Any, object]) -> object:  # Any: see `_parts`
    """Return a copy of a container or object with other parts under some keys."""
    if isinstance(value, list | tuple):
        parts = [changed.get(index, part) for index, part in enumerate(value)]
        kind: Any = type(value)  # the constructor of a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    new = copy(value)
    for key, part in changed.items():
        if isinstance(value, MutableMapping):
            new[key] = part
        else:
            object.__setattr__(new, key, part)  # of a frozen dataclass too
    return new


def tensors_in(value: object, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors in a nested value (or `every` tensor) with their paths.

    The path of a tensor that is the whole value is empty. Dicts, lists, tuples and dataclasses are
    searched, and the attributes of other objects.
    """
    if isinstance(value, Tensor):
        if every or value.is_floating_point():
            yield path, value
    elif value is not None:
        for key, part in _parts(value):
            yield from tensors_in(part, f"{path}.{key}", every)


def bare(args: Sequence[object], kwargs: Mapping[str, object] | None) -> Tensor | None:
    """Return the tensor with which a module is called, if that is its only argument."""
    return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None


def rebuilt(value: object, change: Callable[[str, Tensor], Tensor], path: str = "") -> object:
    """Return the same nesting with `change(path, tensor)` in place of each floating tensor.

    Parts without a changed tensor are returned unchanged; nothing is changed in place.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    parts = [] if value is None else _parts(value)
    new = {key: rebuilt(part, change, f"{path}.{key}") for key, part in parts}
    changed = {key: new[key] for key, part in parts if new[key] is not part}
    return _with_parts(value, changed) if changed else value


def layout(value: object) -> object:
    """Return the ids of the parts of a nested value, to detect that it was written to."""
    parts = [] if isinstance(value, Tensor) else _parts(value)
    return [(key, layout(part)) for key, part in parts] or id(value)


def is_new(value: object) -> TypeGuard[Tensor]:
    """Return whether `autograd.hook_first` may hook it: a tensor without hooks, not an alias."""
    return module_hooks.is_hookable(value) and not hasattr(value, ORIGINAL)


def alias_of(tensor: Tensor) -> Tensor:
    """Return an equal tensor with its own edge in the graph, for the gradient of one branch."""
    # Unlike `view_as`, this keeps the stride of a dimension of size 1.
    alias = tensor[...]
    setattr(alias, ORIGINAL, (ref(tensor), module_hooks.version(tensor)))
    return alias


def original(tensor: Tensor) -> Tensor:
    """Return the tensor that an alias stands for: a module may return its aliased input."""
    held, version = getattr(tensor, ORIGINAL, (None, 0))
    source = None if held is None else held()
    # A tensor written to since is another value, with another gradient.
    if source is None or autograd.version_of(source) != version:
        return tensor
    return original(source)


def unwritten(
    door: Door, kind: Kind, site: str, returned: Tensor, version: int
) -> Callable[[], None]:
    """Return a check that an input which a module has returned is still at this version."""

    def check() -> None:
        if autograd.version_of(returned) != version:
            fault = "returned its input, which was then written to"
            door.refuse("in-place write", kind, site, fault=fault)

    return check


def with_value(hook: SiteFn, tensor: Tensor) -> GradFn:
    """Return the hook with the value of its tensor, without holding the tensor itself.

    An activation is copied, since a later operation may change it in place. The value of a leaf,
    hooked for many steps, is its current one.
    """
    return partial(hook, value=tensor.detach() if tensor.is_leaf else tensor.detach().clone())
