"""What `import gradsurg` gives, for editors and type checkers: python scripts/stub.py

The classes of the folders are found by their files' names when they are asked for, which only a
running Python sees.
"""

from pathlib import Path
from types import ModuleType

import gradsurg

STUB = Path(gradsurg.__file__).with_suffix(".pyi")


def written() -> str:
    """The text of `gradsurg/__init__.pyi`."""
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
    STUB.write_text(written())
