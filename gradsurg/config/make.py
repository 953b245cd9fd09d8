"""From a mapping with a name, or with a dotted path, to the object that it describes."""

import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

from gradsurg.plugins.fields import FieldError, nearest
from gradsurg.plugins.registry import find
from gradsurg.transforms.base import Transform, as_transform

Config = Mapping[str, Any]  # Any: what a YAML file can hold

ERRORS = Exception  # whatever a user's code raises: it is told as a fault of its key


def make(kind: str, config: Config, base: type) -> Any:  # Any: an instance of `base`
    """The object that a mapping with `name:` (ours) or `_target_:` (a dotted path) describes."""
    if not isinstance(config, Mapping):
        raise TypeError(f"must be a mapping with a name, found {config!r}")
    found = named(kind, config)
    made, faults = {}, []
    for key, value in fields_of(config).items():
        with _within(key, faults):
            made[key] = _nested(kind, value, base)
    if faults:
        raise FieldError("", faults)
    with theirs(config):
        if base is Transform:
            result = as_transform(_transform(found, made))
        else:
            result = called(found, (), made)
    if not isinstance(result, base):
        raise TypeError(f"must be a {base.__name__}, found {result!r}")
    return result


def _nested(kind: str, value: object, base: type) -> object:
    match value:
        case Mapping() if "name" in value or "_target_" in value:
            return make(kind, value, base)
        case list():
            items, faults = [], []
            for index, item in enumerate(value):
                with _within(str(index), faults):
                    items.append(_nested(kind, item, base))
            if faults:
                raise FieldError("", faults)
            return items
        case _:
            return value


@contextmanager
def _within(key: str, faults: list[tuple[str, str]]) -> Iterator[None]:
    """What goes wrong in this block is added to `faults`, of the field `key`."""
    try:
        yield
    except FieldError as error:
        faults += [(f"{key}.{field}" if field else key, text) for field, text in error.faults]
    except (ValueError, TypeError, LookupError, ImportError) as error:
        faults.append((key, sentence(error)))


@contextmanager
def theirs(config: Config, doing: str = "") -> Iterator[None]:
    """A user's own code runs in this block: whatever it raises is a fault, with its place."""
    target = config.get("_target_")
    try:
        yield
    except FieldError:
        raise
    except ERRORS as error:
        if target is None:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if frame.filename == __file__ else f" ({frame.filename}, line {frame.lineno})"
        what = f"{target}.{doing}" if doing else target
        raise TypeError(
            f"{what} raised {type(error).__name__}: {sentence(error)}{place}"
        ) from error


def sentence(error: BaseException) -> str:
    """An error's message on one line."""
    # str() of a KeyError quotes its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split()) or type(error).__name__


def fields_of(config: Config) -> dict[str, Any]:
    """All of a mapping but what says which thing it describes."""
    says_what = "_target_" if "_target_" in config else "name"
    return {key: value for key, value in config.items() if key != says_what}


def named(kind: str, config: Config) -> object:
    """The class of ours, or what a user's dotted path leads to."""
    if "_target_" in config:
        return _import(config["_target_"])
    if "name" not in config:
        raise ValueError("needs a name (one of gradsurg's) or a _target_ (a dotted path)")
    return find(kind, str(config["name"]))


def _transform(found: object, fields: dict[str, Any]) -> object:
    """A class makes a transform, and so may a function; one that takes a gradient is one."""
    if isinstance(found, type):
        return called(found, (), fields)
    if isinstance(found, Transform) or not callable(found):
        if fields:
            text = f"is made already and takes no fields, found {', '.join(fields)}"
            raise FieldError("", [("", text)])
        return found
    try:
        signature = inspect.signature(found)
    except ValueError:  # it is written in C, as torch.sign
        return found
    try:
        signature.bind(None, **fields)
    except TypeError:
        return called(found, (), fields)
    try:
        signature.bind(**fields)
    except TypeError:
        return update_wrapper(partial(found, **fields), found) if fields else found
    return found(**fields)


def called(make: object, args: tuple[object, ...], fields: dict[str, Any]) -> object:
    """Call it; a field that it does not have is told with those that it has."""
    if not callable(make):
        raise FieldError("", [("", f"must be a class or a function, found {make!r}")])
    try:
        return make(*args, **fields)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        known = list(inspect.signature(make).parameters)[len(args) :]
        unknown = [key for key in fields if key not in known]
        if not unknown:
            raise
        faults = [(key, f"is not a field here. {nearest(key, known)}") for key in unknown]
        raise FieldError("", faults) from error


def chosen(name: str, kinds: list[str], refused: Mapping[str, str], place: str) -> str:
    """The name, if it is one of a library's kinds that can be used here; `refused` says why not."""
    if name in refused:
        raise ValueError(f"{name} {refused[name]}. {nearest(name, kinds)}")
    if name not in kinds:
        raise LookupError(f"there is no '{name}' in {place}. {nearest(name, kinds)}")
    return name


def _import(path: object) -> object:
    """What stands at a dotted path. Raises ImportError, saying which part is not there."""
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
        raise ImportError(f"{module_name} cannot be imported: {sentence(error)}") from error
    except ERRORS as error:
        kind = type(error).__name__
        raise ImportError(f"{module_name} cannot be imported: {kind}: {sentence(error)}") from error
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == module_name
        ]
        raise ImportError(f"{module_name} has no '{name}'. {nearest(name, own)}")
    return getattr(module, name)
