"""Moby Dick, in the user's cache folder."""

from hashlib import sha256
from pathlib import Path

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import _cache

NAME = "text"
FILE = "moby_dick.txt"
SHA256 = "0af87669e16afbac484ab450db3343221bc6582e65565fcaa535807b5c1df370"


def path() -> Path:
    """The file, or a FieldError that says how to get it."""
    found = _cache.place(NAME) / FILE
    if not found.is_file():
        how = f"{_cache.command(NAME)} puts it there, or path takes a text of your own"
        raise FieldError("CharLM", [("text", f"moby_dick is not in '{found.parent}': {how}")])
    return found


def read() -> str:
    """The text, or a FieldError that says what is wrong with its file."""
    found = path()
    if fault := fault_of(found):
        how = f"{_cache.command(NAME)} puts it there anew"
        raise FieldError("CharLM", [("text", f"{fault} in '{found.parent}': {how}")])
    return found.read_text(encoding="utf-8")


def fault_of(file: Path) -> str:
    """What is wrong with a file that should be the text; empty if nothing is."""
    try:
        same = sha256(file.read_bytes()).hexdigest() == SHA256
    except OSError as error:
        return f"{FILE} cannot be read ({error.strerror})"
    return "" if same else f"{FILE} has another sha256"
