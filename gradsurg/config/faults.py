"""What is wrong with a config, gathered, so that all of it can be said at once."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gradsurg.config.make import sentence
from gradsurg.plugins.fields import FieldError

Made = TypeVar("Made")


class ConfigError(ValueError):
    """A config that cannot be run; `faults` holds a line for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = list(dict.fromkeys(faults))
        super().__init__("\n".join(self.faults))


class Faults:
    """The lines so far, each under the key that it is due to."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """What goes wrong in this block is said of `key`."""
        try:
            yield
        except FieldError as error:
            for field, text in error.faults:
                # As it was typed: YAML's null, Python's None.
                typed = re.sub(r"found (None|True|False)$", _typed, text)
                self.lines.append(f"{'.'.join(part for part in (key, field) if part)}: {typed}")
        except (ValueError, TypeError, LookupError, ImportError, RuntimeError) as error:
            self.lines.append(f"{key}: {sentence(error)}")

    def made(self, key: str, make: Callable[[], Made]) -> Made | None:
        """What `make` gives; None if it cannot, which is then said of `key`."""
        with self.at(key):
            return make()
        return None

    def stop(self) -> None:
        """Raises ConfigError if there is a fault."""
        if self.lines:
            raise ConfigError(self.lines)


def _typed(found: re.Match[str]) -> str:
    return f"found {'null' if found[1] == 'None' else found[1].lower()}"
