"""Collect the errors of a config, each under its key, to report all of them at once.

The texts are written where a value is checked: types and bounds in `plugins/fields.py`, options and
override syntax in `config/overrides.py`, combinations in `config/build.py` and
`config/trial_step.py`, and the rules of one plug-in in its `__post_init__`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.messages import one_line, printable

Made = TypeVar("Made")


class ConfigError(ValueError):
    """A config that cannot be run; `faults` holds one line, `key: rule`, for each error."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = list(dict.fromkeys(map(printable, faults)))
        super().__init__("\n".join(self.faults))


class ErrorCollector:
    """The errors found so far, and the objects that were made, by their keys.

    A FieldError that names one of these objects, or a part of one, is reported under its key.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._objects: dict[str, object] = {}

    def add(self, key: str, text: str) -> None:
        """Report an error of a key."""
        self.lines.append(f"{key}: {text}")

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Report errors raised in this block, under `key` unless the error names another object."""
        try:
            yield
        except FieldError as error:
            root = self._key_of(error.owner)
            for field, text in error.faults:
                self.add(joined(key if root is None else root, field), text)
        except (ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
            self.add(key, one_line(error))
        except MemoryError:
            self.add(key, "needs more memory than there is")

    def attempt(self, key: str, make: Callable[[], Made]) -> Made | None:
        """Call `make` and return its result; report its error under `key` and return None."""
        with self.at(key):
            return make()
        return None

    def passes(self, key: str, check: Callable[[], object]) -> bool:
        """Call `check`, report its error under `key`, and return whether it raised none."""
        before = len(self.lines)
        with self.at(key):
            check()
        return len(self.lines) == before

    def made(self, key: str, make: Callable[[], Made]) -> Made | None:
        """Call `make` as `attempt` does; later errors that name the result have its key."""
        result = self.attempt(key, make)
        if result is not None:
            self._objects[key] = result
        return result

    def raise_if_any(self) -> None:
        """Raise a ConfigError if there is an error."""
        if self.lines:
            raise ConfigError(self.lines)

    def _key_of(self, owner: object) -> str | None:
        """Return the key of an object, or of a part of one; None for an unknown object."""
        for key, whole in self._objects.items():
            for path, part in parts_of(whole):
                if part is owner:
                    return joined(key, path)
        return None


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


def joined(*keys: str) -> str:
    """Join the non-empty parts of a key by dots."""
    return ".".join(key for key in keys if key)
