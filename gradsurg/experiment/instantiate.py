"""Instantiate the object that a mapping with a `name` or a `_target_` describes."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import nearest, one_line, place_in_user_code
from gradsurg.plugins.registry import find, names
from gradsurg.tasks.base import Task
from gradsurg.tasks.data.given import task_of
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform, as_transform

Config = Mapping[str, Any]  # Any: what a YAML file can hold


def instantiate(kind: str, config: Config, base: type) -> Any:  # Any: an instance of `base`
    """Instantiate a mapping: `name` is a plug-in of gradsurg's, `_target_` any dotted path.

    Nested mappings and lists are instantiated first. Raises FieldError with all wrong fields.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"must be a mapping with a name, found {config!r}")
    target = target_of(kind, config)
    fields, faults = {}, []
    for key, value in fields_of(config).items():
        with _field(key, faults):
            fields[key] = _nested(kind, value, base)
    if faults:
        raise FieldError("", faults)
    _check_kind(target, base)
    with user_code(config):
        if base is Transform:
            result = as_transform(_transform(target, fields))
        elif base is Task and "_target_" in config:
            with random_state.preserved():
                random_state.seed(0)  # a user's data are the same in every process
                result = call_with_fields(target, (), fields)
        else:
            result = call_with_fields(target, (), fields)
    if base is Task and not isinstance(result, Task):
        return task_of(result)
    if not isinstance(result, base):
        raise TypeError(f"must be a {base.__name__}, found {result!r}")
    return result


def _check_kind(target: object, base: type) -> None:
    """Raise TypeError for a class of another kind, before it is called.

    A task may be of any class with data, a transform of any whose instances are callable.
    """
    if not isinstance(target, type) or base is Task or issubclass(target, base):
        return
    if base is not Transform or not any("__call__" in vars(cls) for cls in target.__mro__):
        raise TypeError(f"must be a {base.__name__}, found the class {target.__qualname__}")


def target_of(kind: str, config: Config) -> object:
    """Return the class or function that a mapping names."""
    if "_target_" in config:
        try:
            return _import(config["_target_"])
        except ImportError as error:
            if kind != "sites":
                raise
            hint = f"for names in the model write site=parameters site.pattern={config['_target_']}"
            raise ImportError(f"{error}; {hint}") from None
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
        place = place_in_user_code(error)
        called = f"{target}.{method}" if method else target
        raise TypeError(
            f"{called} raised {type(error).__name__}: {one_line(error)}{place}"
        ) from error


def _nested(kind: str, value: object, base: type) -> object:
    match value:
        case Mapping() if base is Transform and value.get("name") in names("aggregators"):
            return instantiate("aggregators", value, object)  # of the examples of a batch
        case Mapping() if "name" in value or "_target_" in value:
            return instantiate(kind, value, base)
        case list():
            items, faults = [], []
            for index, item in enumerate(value):
                with _field(str(index), faults):
                    items.append(_nested(kind, item, base))
            if faults:
                raise FieldError("", faults)
            return items
        case _:
            return value


@contextmanager
def _field(key: str, faults: list[tuple[str, str]]) -> Iterator[None]:
    """Append the errors of this block to `faults`, under the field `key`."""
    try:
        yield
    except FieldError as error:
        faults += [(f"{key}.{field}" if field else key, text) for field, text in error.faults]
    except (ValueError, TypeError, LookupError, ImportError) as error:
        faults.append((key, one_line(error)))


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


def _import(path: object) -> object:
    """Import the object at a dotted path. Raises ImportError with the part that is missing."""
    module_name, _, name = str(path).rpartition(".")
    if not module_name or not all(part.isidentifier() for part in str(path).split(".")):
        raise ImportError(f"'{path}' is not a dotted path, as my_package.my_module.MyTransform")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ImportError(
                f"there is no module '{error.name}' on the path, nor in this folder"
            ) from None
        raise ImportError(f"{module_name} cannot be imported: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        kind = type(error).__name__
        raise ImportError(f"{module_name} cannot be imported: {kind}: {one_line(error)}") from error
    if not hasattr(module, name):
        choices = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module_name
        ]
        raise ImportError(f"{module_name} has no '{name}'. {nearest(name, choices)}")
    return getattr(module, name)
