"""Collect the errors of a config, each under its key, to report all of them at once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from gradsurg.plugins.messages import one_line, printable

Made = TypeVar("Made")

FAILED, WRONG_INPUT = 1, 2
"""Exit codes of the command: a run failed or diverged, or the command line is wrong."""
MAX_RUNS = 10_000  # a command with more runs needs yes=true


class ConfigError(ValueError):
    """A config that cannot be run; `faults` holds one line, `key: rule`, for each error."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = list(dict.fromkeys(map(printable, faults)))
        super().__init__("\n".join(self.faults))


def too_many(count: int | str, things: str) -> str:
    """Return the error for more runs, jobs or values than `MAX_RUNS`."""
    shown = f"{count:,}" if isinstance(count, int) else count
    return f"{shown} {things} need yes=true; without it at most {MAX_RUNS:,} are allowed"


class ErrorCollector:
    """The errors found so far, and the objects that were made, by their keys.

    A FieldError that names one of these objects, or a part of one, is reported under its key.
    """

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines = lines or []
        self._objects: dict[str, object] = {}

    def add(self, key: str, text: str) -> None:
        """Report an error of a key."""
        self.lines.append(f"{key}: {text}")

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Report errors raised in this block, under `key` unless the error names another object."""
        from gradsurg.plugins.fields import FieldError  # imports pydantic, slow to load for --help

        try:
            yield
        except FieldError as error:
            places = (
                joined(name, path)
                for name, whole in self._objects.items()
                for path, part in parts_of(whole)
                if part is error.owner
            )
            root = next(places, key)
            for field, text in error.faults:
                self.add(joined(root, field), text)
        except (ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
            self.add(key, one_line(error))
        except MemoryError:
            self.add(key, "needs more memory than there is")

    def made(self, key: str, make: Callable[[], Made]) -> Made | None:
        """Return the object that `make` makes; report its error under `key` and return None."""
        with self.at(key):
            result = self._objects[key] = make()
            return result
        return None

    def raise_if_any(self) -> None:
        """Raise a ConfigError if there is an error."""
        if self.lines:
            raise ConfigError(self.lines)


def parts_of(whole: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield an object and the parts in its fields `of` and `links`, each with its key.

    (Any: a selector, a trigger or a transform.)
    """
    yield path, whole
    for field in ("of", "links"):
        value = getattr(whole, field, None)
        if isinstance(value, tuple):
            for index, part in enumerate(value):
                yield from parts_of(part, joined(path, field, str(index)))
        elif value is not None:
            yield from parts_of(value, joined(path, field))


def leaves(value: object, *keys: str) -> Iterator[tuple[str, object]]:
    """Yield the values inside nested mappings and lists, each with its dotted key."""
    match value:
        case Mapping() | list():
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, item in items:
                yield from leaves(item, *keys, str(key))
        case _:
            yield joined(*keys), value


def joined(*keys: str) -> str:
    """Join the non-empty parts of a key by dots."""
    return ".".join(key for key in keys if key)
