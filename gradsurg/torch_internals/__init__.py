"""All access to private objects of PyTorch; each has a test.

`private`, `lookup` and `needs` report an object that a version of PyTorch lacks, and only when it
is used; `exists` checks for it, for code that does not depend on it. A path is a module and a name
in it, such as `torch.nn:Module._call_impl`. A path for `needs` and `exists` may also name an
instance attribute that `__init__` sets, or a local variable of a function.
"""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def lookup(path: str) -> Any:  # Any: PyTorch declares no types for these
    """Return a private object of PyTorch; raise RuntimeError if this version lacks it."""
    module, _, names = path.partition(":")
    try:
        return attrgetter(names)(import_module(module))
    except (ImportError, AttributeError):
        return _Missing(path)()


def private(path: str) -> Any:  # Any: as above
    """Return a private object of PyTorch; if it is missing, an object that raises when used."""
    return lookup(path) if exists(path) else _Missing(path)


def needs(*paths: str) -> Callable[[Function], Function]:
    """Return a decorator of a function that uses these private objects.

    If one is missing, the decorated function raises RuntimeError when it is called; otherwise the
    decorator returns the function itself, so that calls cost nothing.
    """
    missing: list[Any] = [_Missing(path) for path in paths if not exists(path)]
    return lambda function: missing[0] if missing else function


class _Missing:
    """A stand-in that raises RuntimeError when it is called or an attribute is read."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"gradsurg uses {self._path.replace(':', '.')}, which torch {torch.__version__} lacks: "
            "install a version that the README names as tested"
        )

    def __getattr__(self, name: str) -> object:
        self()


def exists(path: str) -> bool:
    """Whether this version of PyTorch has a private object."""
    module, _, names = path.partition(":")
    try:
        owner: Any = import_module(module)
    except ImportError:
        return False
    for name in names.split("."):
        code = getattr(owner, "__code__", None) or getattr(owner.__init__, "__code__", None)
        local = code is not None and name in (*code.co_names, *code.co_varnames)
        if not (hasattr(owner, name) or name in getattr(owner, "__annotations__", ()) or local):
            return False
        owner = getattr(owner, name, None)
    return True
