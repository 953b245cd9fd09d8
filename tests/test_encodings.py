"""Every text file is read and written as UTF-8, whatever the locale."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("gradsurg", "scripts", "tests", "experiments")
TEXT = {"read_text": 0, "write_text": 1, "open": 1}
"""Functions and methods, and the position of the encoding or, for `open`, of the mode."""
OTHERS = ("os", "webbrowser", "Image", "gzip", "zipfile", "tarfile", "wave")
"""Modules whose `open` takes no encoding."""


def calls_without_an_encoding(source: str) -> Iterator[ast.Call]:
    """The calls that open a file as text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(word.arg == "encoding" for word in node.keywords):
            continue
        match node.func:
            case ast.Name("open"):
                name, place = "open", 1
            case ast.Attribute(ast.Name(module), "open") if module in OTHERS:
                continue
            case ast.Attribute(attr=str(name)) if name in TEXT:
                place = 0 if name == "open" else TEXT[name]
            case _:
                continue
        if name != "open":
            if len(node.args) <= place:
                yield node
            continue
        modes = [word.value for word in node.keywords if word.arg == "mode"] + node.args[place:]
        mode = ast.literal_eval(modes[0]) if modes and isinstance(modes[0], ast.Constant) else "r"
        if "b" not in str(mode):
            yield node


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_that_is_read_or_written_as_text_names_its_encoding(folder: str) -> None:
    places = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"open\(|_text\(", text := path.read_text(encoding="utf-8"))
        for call in calls_without_an_encoding(text)
    ]
    assert places == []
