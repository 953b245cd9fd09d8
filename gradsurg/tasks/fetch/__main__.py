"""The command `python -m gradsurg.tasks.fetch mnist fashion-mnist text`.

Torch is imported after parsing.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from gradsurg.plugins.messages import nearest, typed_command
from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.tasks.data import cache

if TYPE_CHECKING:
    from gradsurg.tasks.fetch.sources import DataSet

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Put data sets into the user's cache folder and return the exit code.

    0: all of them are there, 1: one could not be fetched, 2: the command line is wrong.
    """
    arguments = parser().parse_intermixed_args(words)
    from gradsurg.tasks.fetch.sources import DATA_SETS

    names = list(dict.fromkeys(arguments.names))
    if unknown := [name for name in names if name not in DATA_SETS]:
        for name in unknown:
            print(f"there is no data set '{name}'. {nearest(name, [*DATA_SETS])}", file=sys.stderr)
        return WRONG_INPUT
    if arguments.source is not None and not arguments.source.is_dir():
        print(f"--from: must be a folder, found '{arguments.source}'", file=sys.stderr)
        return WRONG_INPUT
    try:
        if arguments.list:
            print(_list())
            return 0
        if not names:
            print(f"name a data set. There are: {', '.join(DATA_SETS)}.", file=sys.stderr)
            return WRONG_INPUT
        return max(_fetch(DATA_SETS[name], arguments.source) for name in names)
    except KeyboardInterrupt:
        print("interrupted; no incomplete data set is left", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=typed_command("gradsurg.tasks.fetch"),
        description="Put data sets into the user's cache folder, where the tasks find them. "
        "GRADSURG_DATA moves it.",
    )
    made.add_argument("names", nargs="*", metavar="name", help="data sets, see --list")
    text = "take files that you have: IDX files, torchvision's folder, or another cache folder"
    made.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help=text)
    made.add_argument("--list", action="store_true", help="the data sets and their folders")
    return made


def _fetch(data_set: "DataSet", source: Path | None) -> int:
    """Put one data set into its folder, print the result, and return the exit code."""
    from gradsurg.tasks.fetch.sources import NotFetched, NotTheDataSet

    place = cache.place(data_set.name)
    try:
        was_there = _put(data_set, place, source)
    except NotTheDataSet as error:
        print(f"{data_set.name}: --from {error}", file=sys.stderr)
        return WRONG_INPUT
    except NotFetched as error:
        how = f"{cache.command(f'{data_set.name} --from FOLDER')} {data_set.instead}"
        print(f"{data_set.name}: {error}; {how}", file=sys.stderr)
        return FAILED
    except OSError as error:
        path = f"'{error.filename}'" if error.filename else f"'{place}'"
        print(f"{data_set.name}: cannot write {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    result = "already there" if was_there else "put"
    origin = data_set.source if was_there or source is None else f"your files in {source}"
    print(f"{data_set.name}: {result} in {place}, and checked by hash")
    print("\n".join(_about(data_set, origin)))
    return 0


def _put(data_set: "DataSet", place: Path, source: Path | None) -> bool:
    """Put a complete data set into its folder; return whether it was there before."""
    from gradsurg.tasks.fetch.sources import NotFetched

    if not data_set.fault(place):
        return True
    with _draft_folder(place.parent) as draft:
        if not data_set.fault(place):  # another process fetched it in the meantime
            return True
        work, complete = draft / "work", draft / "complete"
        work.mkdir()
        complete.mkdir()
        if source is None:
            print(f"{data_set.name}: fetching {data_set.source} ...", file=sys.stderr, flush=True)
            data_set.fetch(work, complete)
        else:
            inside = source / data_set.name
            data_set.take(inside if inside.is_dir() else source, complete)
        if fault := data_set.fault(complete):
            raise NotFetched(f"{data_set.source} is not what it was: {fault}")
        _move(complete, place)
    if fault := data_set.fault(place):  # files that were there take precedence when it is read
        raise NotFetched(f"'{place}' holds other files: {fault}")
    return False


@contextmanager
def _draft_folder(home: Path) -> Iterator[Path]:
    """Create a folder in `home` for one fetch at a time, replacing that of a killed one."""
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".lock"):
        draft = home / ".draft"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft)


def _move(complete: Path, place: Path) -> None:
    """Move a folder to `place`; if that exists, its files of the same names are replaced."""
    for path in complete.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if not place.exists():
        complete.rename(place)
        return
    for path in complete.iterdir():
        path.replace(place / path.name)


def _list() -> str:
    from gradsurg.tasks.fetch.sources import DATA_SETS

    lines = []
    for data_set in DATA_SETS.values():
        place = cache.place(data_set.name)
        fault = data_set.fault(place) if place.is_dir() else ""
        state = f"not whole: {fault}" if fault else "there" if place.is_dir() else "not there"
        lines += [f"{data_set.name}: {state}, {place}", *_about(data_set, data_set.source)]
    return "\n".join(lines)


def _about(data_set: "DataSet", source: str) -> list[str]:
    return [
        f"  {data_set.title}",
        f"  source: {source}",
        f"  licence: {data_set.licence}",
        f"  read by: {data_set.tasks}",
    ]


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
