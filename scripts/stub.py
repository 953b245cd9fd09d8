"""Write `gradsurg/__init__.pyi`, for editors and type checkers: python scripts/stub.py

The classes are found by file name at run time, which static tools cannot see.
"""

from pathlib import Path
from types import ModuleType

import gradsurg

STUB = Path(gradsurg.__file__).with_suffix(".pyi")


def written() -> str:
    """Return the text of `gradsurg/__init__.pyi`."""
    given = {name: getattr(gradsurg, name) for name in dir(gradsurg)}
    version = given.pop("__version__")
    homes = {
        name: "gradsurg" if isinstance(thing, ModuleType) else thing.__module__
        for name, thing in given.items()
    }
    imports = sorted(f"from {home} import {name} as {name}" for name, home in homes.items())
    head = ["# Written by scripts/stub.py.", ""]
    return "\n".join([*head, *imports, "", f"__version__: {type(version).__name__}", ""])


if __name__ == "__main__":
    STUB.write_text(written(), encoding="utf-8")
