"""Instantiate the object that a mapping with a `name` or a `_target_` describes."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

from gradsurg.experiment.errors import joined
from gradsurg.experiment.own_code import import_path, site_hint
from gradsurg.experiment.settings import Config
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import one_line, place_in_user_code
from gradsurg.plugins.registry import find, names
from gradsurg.tasks.base import Task
from gradsurg.tasks.data.given import task_of
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform, as_transform


def instantiate(kind: str, config: Config, base: type) -> Any:  # Any: an instance of `base`
    """Instantiate a mapping: `name` is a plug-in of gradsurg's, `_target_` any dotted path.

    Nested mappings and lists are instantiated first. Raises FieldError with all wrong fields.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"must be a mapping with a name, found {config!r}")
    target = target_of(kind, config)
    fields = _made(kind, fields_of(config), base)
    _check_kind(target, base)
    # A user's data are the same in every process.
    is_users_data = base is Task and "_target_" in config
    with user_code(config), random_state.preserved() if is_users_data else nullcontext():
        if is_users_data:
            random_state.seed(0)
        if base is Transform:
            result = as_transform(_transform(target, fields))
        else:
            result = call_with_fields(target, (), fields)
    if base is Task and not isinstance(result, Task):
        return task_of(result)
    if not isinstance(result, base):
        raise TypeError(f"must be a {base.__name__}, found {result!r}")
    return result


def target_of(kind: str, config: Config) -> object:
    """Return the class or function that a mapping names."""
    if "_target_" in config:
        try:
            return import_path(config["_target_"])
        except ImportError as error:
            hint = site_hint(config["_target_"]) if kind == "sites" else ""
            raise ImportError(f"{error}{hint}") from None
    if "name" not in config:
        raise ValueError("needs a name (one of gradsurg's) or a _target_ (a dotted path)")
    return find(kind, str(config["name"]))


def fields_of(config: Config) -> dict[str, Any]:
    """Return a mapping without its `_target_`, or else without its `name`."""
    target = "_target_" if "_target_" in config else "name"
    return {key: value for key, value in config.items() if key != target}


@contextmanager
def user_code(config: Config, method: str = "") -> Iterator[None]:
    """Turn any error of a user's own class into a TypeError with its file and line."""
    target = config.get("_target_")
    try:
        yield
    except FieldError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        if target is None:
            raise
        called = f"{target}.{method}" if method else target
        raised = f"{type(error).__name__}: {one_line(error)}{place_in_user_code(error)}"
        raise TypeError(f"{called} raised {raised}") from error


def _made(kind: str, values: Mapping[str, object], base: type) -> dict[str, object]:
    """Instantiate the mappings inside fields. Raises FieldError with all wrong ones."""
    made: dict[str, object] = {}
    faults: list[tuple[str, str]] = []
    for key, value in values.items():
        try:
            made[key] = _nested(kind, value, base)
        except FieldError as error:
            faults += [(joined(key, field), text) for field, text in error.faults]
        except (ValueError, TypeError, LookupError, ImportError) as error:
            faults.append((key, one_line(error)))
    if faults:
        raise FieldError("", faults)
    return made


def _nested(kind: str, value: object, base: type) -> object:
    match value:
        case Mapping() if base is Transform and value.get("name") in names("aggregators"):
            return instantiate("aggregators", value, object)  # of the examples of a batch
        case Mapping() if "name" in value or "_target_" in value:
            return instantiate(kind, value, base)
        case list():
            return [*_made(kind, {str(n): item for n, item in enumerate(value)}, base).values()]
        case _:
            return value


def _check_kind(target: object, base: type) -> None:
    """Raise TypeError for a class of another kind, before it is called.

    A task may be of any class with data, a transform of any whose instances are callable.
    """
    if not isinstance(target, type) or base is Task or issubclass(target, base):
        return
    if base is not Transform or not any("__call__" in vars(cls) for cls in target.__mro__):
        raise TypeError(f"must be a {base.__name__}, found the class {target.__qualname__}")


def _transform(target: object, fields: dict[str, Any]) -> object:
    """Make a transform of a class, of a function that returns one, or of one of a gradient."""
    if isinstance(target, type):
        return call_with_fields(target, (), fields)
    if isinstance(target, Transform) or not callable(target):
        if fields:
            text = f"is made already and takes no fields, found {', '.join(fields)}"
            raise FieldError("", [("", text)])
        return target
    try:
        signature = inspect.signature(target)
    except ValueError:  # it is written in C, as torch.sign
        return target
    try:
        signature.bind(None, **fields)
    except TypeError:
        return call_with_fields(target, (), fields)
    try:
        signature.bind(**fields)
    except TypeError:
        return update_wrapper(partial(target, **fields), target) if fields else target
    return target(**fields)
