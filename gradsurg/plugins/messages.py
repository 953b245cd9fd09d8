"""Texts of error messages, one line each; imports no library."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TextIO

TEXT_WIDTH = 100
"""Columns of text that is not printed to a terminal."""
NAMES_WIDTH = 48
"""Columns of the names in an error message."""
MAX_PROSE_WIDTH = 120
"""Columns of a sentence in a wide terminal; tables use all."""


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, or its class if it has none."""
    # str() of a KeyError quotes its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return printable(" ".join(str(text).split())) or type(error).__name__


def full_message(error: BaseException) -> str:
    """Return an error's class, message and notes on one line."""
    parts = [" ".join(str(text).split()) for text in (error, *getattr(error, "__notes__", []))]
    return f"{type(error).__name__}: {printable('; '.join([parts[0] or 'no message', *parts[1:]]))}"


def place_in_user_code(error: BaseException) -> str:
    """Return ` (mine.py, line 3)`, the innermost line of a user's code that raised an error.

    Empty if all its lines are in files of gradsurg, of an installed package or of Python.
    """
    libraries = [sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")]
    others = [Path(__file__).parents[1], *map(Path, libraries)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in others):
            return f" ({printable(os.path.relpath(file))}, line {frame.lineno})"
    return ""


def printable(text: str) -> str:
    """Return a text with its control characters escaped, so that it has one line."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def typed_command(module: str) -> str:
    """Return the command of a module, such as `python -m gradsurg.report`.

    It is `gradsurg report` if the user typed the present command in this form.
    """
    is_script = sys.argv[0].startswith("gradsurg ")
    return f"gradsurg {module.rpartition('.')[2]}" if is_script else f"python -m {module}"


def unknown(
    fault: str,
    name: str,
    choices: Sequence[str],
    meant: Sequence[str] = (),
    listed_by: str = "",
) -> str:
    """Return an error message for a name that is none of the choices, the suggestion first.

    `fault` begins with a small letter and ends without a full stop. `meant` are names to suggest
    instead of similar ones. `listed_by` are the arguments of `gradsurg.run` that list all choices,
    such as `--list transform`.
    """
    close = [*(meant or similar(name, choices))]
    listed = _listed(choices, close, listed_by)
    begin = fault[:1].upper() + fault[1:] if close else fault
    question = f"did you mean {_quoted(close)}? " if close else ""
    return f"{question}{begin}. {listed}".strip()


def no_key(key: str, known: Sequence[str], listed_by: str = "") -> str:
    """Return the error for a key that is not there."""
    return unknown(f"there is no key '{key}'", key, known, listed_by=listed_by)


def similar(name: str, choices: Sequence[str]) -> list[str]:
    """Return the choice that is nearest to a name, and a second one if it is as near."""
    plain = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), plain, 2)
    ratios = [SequenceMatcher(None, each, name.lower()).ratio() for each in close]
    return [plain[each] for each, ratio in zip(close, ratios, strict=True) if ratio == ratios[0]]


def _quoted(names: Sequence[str]) -> str:
    return "'" + "' or '".join(names) + "'"


def _listed(choices: Sequence[str], close: Sequence[str], listed_by: str) -> str:
    """Return the sentence that lists the choices, or the command that does."""
    command = f"{typed_command('gradsurg.run')} {listed_by}"
    listed, left = _shortened(choices)
    if close and (left or {*choices} <= {*close}):
        return f"All of them: {command}" if left and listed_by else ""
    if left and listed_by:
        return f"There are: {listed}: {command}"
    return f"There are: {listed or 'none'}."


def shortened(names: Iterable[str]) -> str:
    """Return the names, joined by commas, and the number of those that do not fit."""
    return _shortened([*names])[0]


def _shortened(names: Sequence[str]) -> tuple[str, int]:
    """Return the names in short, and the number of those that are left out."""
    shown = list(names)
    while len(", ".join(shown)) > NAMES_WIDTH and len(shown) > 1:
        shown.pop()
    left = len(names) - len(shown)
    return ", ".join(shown) + f", ... and {left} more" * bool(left), left


def terminal_width(stream: TextIO) -> int | None:
    """Return COLUMNS if it is set, or the columns of the terminal that `stream` writes to; None for
    a file or a pipe without COLUMNS.
    """
    fallback = (80, 24) if stream.isatty() else (0, 0)
    return get_terminal_size(fallback).columns or None


def tell(text: object) -> None:
    """Print lines to stderr; in a terminal they are folded between words."""
    width = terminal_width(sys.stderr) if sys.stderr.isatty() else None
    for line in str(text).split("\n"):
        print(line if width is None else folded(line, width), file=sys.stderr, flush=True)


def folded(text: str, width: int) -> str:
    """Fold a line between words; names and paths stay whole, so that they can be copied."""
    return fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
