"""Write `gradsurg/__init__.pyi`, the catalogue, the keys of `conf/config.yaml` and the gallery's
text: python scripts/stub.py

The stub is for editors and type checkers: the classes are found by file name at run time, which
static tools cannot see. The catalogue of all options is printed by `--list` and
`gradsurg.list`; `docs/draw_gallery.py` draws the gallery's pictures.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import gradsurg
from gradsurg.experiment import catalogue
from gradsurg.experiment.help import described, folded
from gradsurg.experiment.settings import Settings, Shared
from gradsurg.plugins.registry import CONFIG_DIR

STUB = Path(gradsurg.__file__).with_suffix(".pyi")
CONFIG = CONFIG_DIR / "config.yaml"
KEYS = ("\n\n# The keys, with their defaults. scripts/stub.py writes them.\n", "\nhydra:\n")
"""The text above and below the keys in the config."""
COLUMN, WIDTH = 26, 99


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


def keys() -> str:
    """Return the text of `conf/config.yaml` with the keys of the schema, each with a comment."""
    above, below = KEYS
    head, _, rest = CONFIG.read_text(encoding="utf-8").partition(above)
    tail = rest.partition(below)[2]
    shared = {key: getattr(Shared, key) for key in described("Shared")}
    lines = ["shared:", *_commented(Shared, shared, "  ")]
    lines += _commented(Settings, {one.name: one.default for one in fields(Settings)}, "")  # pyright: ignore[reportArgumentType]
    return "\n".join([head + above[:-1], *lines]) + "\n" + below + tail


def _commented(cls: type, values: dict[str, Any], indent: str) -> Iterator[str]:  # Any: as in YAML
    texts = described(cls.__name__)
    for key, value in values.items():
        shown = json.dumps(value) if value in ("*", "") or not isinstance(value, str) else value
        name = f'"{key}"' if key == "yes" else key  # which is true in YAML
        begin = f"{f'{indent}{name}: {shown}':<{COLUMN - 1}} # "
        yield folded(begin, texts[key], " " * COLUMN + "# ", WIDTH)


def write() -> list[Path]:
    """Write the files whose text has changed, and return their paths."""
    from docs.draw_gallery import PAGE, page

    # The text of the gallery is made from the catalogue.
    texts = ((STUB, written), (catalogue.FILE, lambda: catalogue.measured().json()), (PAGE, page))
    texts += ((CONFIG, keys),)
    return [path for path, text in texts if _write(path, text())]


def _write(path: Path, text: str) -> bool:
    if path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # docs/
    write()
