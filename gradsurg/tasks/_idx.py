"""MNIST and what is laid out like it: four IDX files, zipped or not, or one npz file."""

import gzip
import zlib
from dataclasses import dataclass
from functools import lru_cache
from hashlib import new
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import _cache
from gradsurg.tasks._images import NUM_CLASSES, Images, folder, refused

NAMES = {
    "train-images-idx3-ubyte": "x_train",
    "train-labels-idx1-ubyte": "y_train",
    "t10k-images-idx3-ubyte": "x_test",
    "t10k-labels-idx1-ubyte": "y_test",
}
"""The files of the IDX layout, and what their arrays are called in an npz file."""


@dataclass(frozen=True)
class Layout:
    """A data set: torchvision's folder for it, its npz file, where to get it, what it hashes to.

    `name` is that of the fetch command, and of its folder in the user's cache. Hashed are the
    unzipped IDX files, in the order of NAMES; arrays from an npz file are hashed as the IDX files
    they would be.
    """

    name: str
    title: str
    folder: str
    npz: str
    address: str
    algorithm: str
    hashes: tuple[str, str, str, str]

    @property
    def where(self) -> str:
        """What a user should give."""
        return (
            f"the folder with {self.title}: {', '.join(f'{name}.gz' for name in NAMES)} from "
            f"{self.address}, unzipped or not, here or in {self.folder}/raw, or {self.npz}"
        )


def files(layout: Layout, root: str | None) -> list[Path]:
    """Those that are read, or a FieldError that says which is missing."""
    place = _place(layout, root)
    return [place / layout.npz] if (place / layout.npz).is_file() else _idx_files(place, layout)


@lru_cache(maxsize=1)
def read(layout: Layout, root: str | None, verify: bool, content: str = "") -> Images:
    """The images of a data set, or a FieldError that says what is missing or wrong.

    They are kept as long as the files have that `content`. Without a `root` the user's cache
    folder is.
    """
    place = _place(layout, root)
    arrays = arrays_in(place, layout)
    if verify and (fault := hash_fault(arrays, layout)):
        raise refused(place, f"{fault} (verify=false takes it as it is)", layout.where)
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels):
            shapes = f"{list(images.shape)} and {list(labels.shape)}"
            raise refused(place, f"images and labels have the shapes {shapes}", layout.where)
        if labels.max() >= NUM_CLASSES:
            raise refused(place, f"a label is {labels.max()}", layout.where)
    train_images, train_labels, test_images, test_labels = arrays
    return Images(train_images[:, None], train_labels, test_images[:, None], test_labels)


def arrays_in(place: Path, layout: Layout) -> list[np.ndarray]:
    """What the files of a folder hold, in the order of NAMES, or a FieldError."""
    return _from_npz(place / layout.npz, place, layout) or _from_idx(place, layout)


def hash_fault(arrays: list[np.ndarray], layout: Layout) -> str:
    """Which is another file than the known one; empty if none is."""
    for array, name, expected in zip(arrays, NAMES, layout.hashes, strict=True):
        digest = new(layout.algorithm, as_idx(array), usedforsecurity=False).hexdigest()
        if digest != expected:
            return f"{name} has another {layout.algorithm}"
    return ""


def as_idx(array: np.ndarray) -> bytes:
    """The IDX file of an array of bytes."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


def _place(layout: Layout, root: str | None) -> Path:
    """The folder that is meant; without one that in the user's cache."""
    if root is not None:
        return folder(root, layout.where)
    place = _cache.place(layout.name)
    if (place / layout.npz).is_file():
        return place
    try:
        _idx_files(place, layout)
    except FieldError:
        how = f"{_cache.command(layout.name)} puts it there, or root takes {layout.where}"
        raise FieldError("task", [("root", f"{layout.title} is not in '{place}': {how}")]) from None
    return place


def _from_npz(path: Path, place: Path, layout: Layout) -> list[np.ndarray] | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            arrays = [held[key] for key in NAMES.values()]
    except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error) as error:
        raise refused(place, f"{path.name} cannot be read ({error})", layout.where) from error
    if any(array.dtype != np.uint8 for array in arrays):
        raise refused(place, f"{path.name} holds other numbers than bytes", layout.where)
    return arrays


def _idx_files(place: Path, layout: Layout) -> list[Path]:
    folders = [place, place / "raw", place / layout.folder, place / layout.folder / "raw"]
    found = []
    for name in NAMES:
        paths = [folder / f"{name}{end}" for folder in folders for end in ("", ".gz")]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise refused(place, f"there is no {name}", layout.where)
        found.append(path)
    return found


def _from_idx(place: Path, layout: Layout) -> list[np.ndarray]:
    arrays = []
    for path in _idx_files(place, layout):
        try:
            content = path.read_bytes()
            arrays.append(_array(gzip.decompress(content) if path.suffix == ".gz" else content))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise refused(place, f"{path.name} cannot be read ({error})", layout.where) from error
    return arrays


def _array(content: bytes) -> np.ndarray:
    """The inverse of `as_idx`: 0, 0, 8, the number of axes, their lengths, the entries."""
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError("it is not an IDX file of bytes")
    num_axes = content[3]
    shape = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
    entries = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    return entries.reshape(shape)
