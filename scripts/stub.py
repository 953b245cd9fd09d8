"""Write `gradsurg/__init__.pyi`, the catalogue and the gallery's text: python scripts/stub.py

The stub is for editors and type checkers: the classes are found by file name at run time, which
static tools cannot see. The catalogue of all options is printed by `--list` and
`gradsurg.list`; `scripts/gallery.py` draws the gallery's pictures.
"""

from pathlib import Path
from types import ModuleType

import gradsurg
from gradsurg.experiment import catalogue

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


def write() -> list[Path]:
    """Write the files whose text has changed, and return their paths."""
    from gallery import PAGE, page

    # The text of the gallery is made from the catalogue.
    texts = ((STUB, written), (catalogue.FILE, lambda: catalogue.measured().json()), (PAGE, page))
    return [path for path, text in texts if _write(path, text())]


def _write(path: Path, text: str) -> bool:
    if path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    write()
