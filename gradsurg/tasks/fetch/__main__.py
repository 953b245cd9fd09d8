"""The command: python -m gradsurg.tasks.fetch mnist fashion-mnist text."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gradsurg.plugins.fields import nearest
from gradsurg.plugins.pipes import outlive_readers
from gradsurg.tasks import _cache
from gradsurg.tasks.fetch.packages import NotFetched
from gradsurg.tasks.fetch.placing import drafting, put
from gradsurg.tasks.fetch.sources import DATA_SETS, DataSet, NotTheirs

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Put data sets into the user's cache folder; the exit code.

    It is 0 if all of them are there, 1 if one could not be had, 2 if the command is wrong.
    """
    asked = _parser().parse_intermixed_args(words)
    names = list(dict.fromkeys(asked.names))
    if unknown := [name for name in names if name not in DATA_SETS]:
        for name in unknown:
            print(f"there is no data set '{name}'. {nearest(name, [*DATA_SETS])}", file=sys.stderr)
        return WRONG_INPUT
    if asked.theirs is not None and not asked.theirs.is_dir():
        print(f"--from: must be a folder, found '{asked.theirs}'", file=sys.stderr)
        return WRONG_INPUT
    try:
        if asked.list:
            print(_list())
            return 0
        if not names:
            print(f"name a data set. There are: {', '.join(DATA_SETS)}.", file=sys.stderr)
            return WRONG_INPUT
        return max(_one(DATA_SETS[name], asked.theirs) for name in names)
    except KeyboardInterrupt:
        print("interrupted; nothing half is left", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradsurg.tasks.fetch",
        description="Put data sets into the user's cache folder, where the tasks find them. "
        "GRADSURG_DATA moves it.",
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(DATA_SETS))
    text = "take files that you have: IDX files, torchvision's folder, or another cache folder"
    parser.add_argument("--from", dest="theirs", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--list", action="store_true", help="what there is, and where it lies")
    return parser


def _one(data_set: DataSet, theirs: Path | None) -> int:
    """Have one data set lie in its place, and tell so; the exit code."""
    place = _cache.place(data_set.name)
    try:
        there = _had(data_set, place, theirs)
    except NotTheirs as error:
        print(f"{data_set.name}: --from {error}", file=sys.stderr)
        return WRONG_INPUT
    except NotFetched as error:
        how = f"{_cache.command(f'{data_set.name} --from FOLDER')} {data_set.instead}"
        print(f"{data_set.name}: {error}; {how}", file=sys.stderr)
        return FAILED
    except OSError as error:
        what = f"'{error.filename}'" if error.filename else f"'{place}'"
        print(f"{data_set.name}: cannot write {what}: {error.strerror}", file=sys.stderr)
        return FAILED
    happened = "already there" if there else "put"
    source = data_set.source if there or theirs is None else f"your files in {theirs}"
    print(f"{data_set.name}: {happened} in {place}, and checked by hash")
    print("\n".join(_about(data_set, source)))
    return 0


def _had(data_set: DataSet, place: Path, theirs: Path | None) -> bool:
    """Put a data set into its place as a whole; whether it was there."""
    if not data_set.fault(place):
        return True
    with drafting(place.parent) as draft:
        if not data_set.fault(place):  # another fetch was at it
            return True
        work, whole = draft / "work", draft / "whole"
        work.mkdir()
        whole.mkdir()
        if theirs is None:
            print(f"{data_set.name}: fetching {data_set.source} ...", file=sys.stderr, flush=True)
            data_set.fetch(work, whole)
        else:
            own = theirs / data_set.name
            data_set.take(own if own.is_dir() else theirs, whole)
        if fault := data_set.fault(whole):
            raise NotFetched(f"{data_set.source} is not what it was: {fault}")
        put(whole, place)
    if fault := data_set.fault(place):  # what lies there besides is read before
        raise NotFetched(f"'{place}' holds other files: {fault}")
    return False


def _list() -> str:
    lines = []
    for data_set in DATA_SETS.values():
        place = _cache.place(data_set.name)
        fault = data_set.fault(place) if place.is_dir() else ""
        state = f"not whole: {fault}" if fault else "there" if place.is_dir() else "not there"
        lines += [f"{data_set.name}: {state}, {place}", *_about(data_set, data_set.source)]
    return "\n".join(lines)


def _about(data_set: DataSet, source: str) -> list[str]:
    return [
        f"  {data_set.title}",
        f"  source: {source}",
        f"  licence: {data_set.licence}",
        f"  read by: {data_set.tasks}",
    ]


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
