"""The tensors inside the nested values that modules take and return."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor


def tensors_in(value: object, path: str = "", every: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors in a nested value, or `every` one, each with its path; a bare tensor's
    path is empty.
    """
    if isinstance(value, Tensor):
        if every or value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}", every)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}", every)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{path}.{field.name}", every)


def rebuilt(value: object, change: Callable[[str, Tensor], Tensor], path: str = "") -> object:
    """The same nesting with `change(path, tensor)` in place of each floating tensor.

    What holds no changed tensor is handed back as it is, and nothing is changed in place.
    """
    if isinstance(value, Tensor):
        return change(path, value) if value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: rebuilt(item, change, f"{path}.{key}") for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        # A subclass, as a model output of a library is one, is copied and filled anew.
        made = cast("dict[Any, Any]", value.copy())  # Any: a user's keys and values
        made.update(items)
        return made
    if isinstance(value, list | tuple):
        parts = [rebuilt(item, change, f"{path}.{index}") for index, item in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        kind: Any = type(value)  # Any: a named tuple takes its parts one by one
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: rebuilt(getattr(value, field.name), change, f"{path}.{field.name}")
            for field in fields(value)
        }
        changed = {name: new for name, new in changed.items() if new is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
