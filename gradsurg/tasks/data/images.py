"""Image files of MNIST and data sets in its layout: four IDX files, or one npz file."""

import gzip
import zlib
from dataclasses import dataclass
from functools import lru_cache
from hashlib import new
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.base import Data
from gradsurg.tasks.data import cache

NUM_CLASSES = 10
IDX_NAMES = {
    "train-images-idx3-ubyte": "x_train",
    "train-labels-idx1-ubyte": "y_train",
    "t10k-images-idx3-ubyte": "x_test",
    "t10k-labels-idx1-ubyte": "y_test",
}
"""The files of the IDX layout, and the names of their arrays in an npz file."""


@dataclass(frozen=True)
class Layout:
    """A data set of IDX files: torchvision's folder, npz file, download address and hashes.

    `name` is its name in the fetch command, and its folder in the user's cache. `hashes` belong to
    the unzipped IDX files, in the order of IDX_NAMES; arrays from an npz file are converted to
    IDX before they are hashed.
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
        """A description of the accepted files, for error messages."""
        return (
            f"the folder with {self.title}: {', '.join(f'{name}.gz' for name in IDX_NAMES)} from "
            f"{self.address}, unzipped or not, here or in {self.folder}/raw, or {self.npz}"
        )


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes (examples, channels, height, width), and their labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def data(self, num_train: int | None, num_test: int | None, seed: int) -> Data:
        """Return subsets chosen by `seed`, or with None all examples in their order.

        Each channel is standardized by its mean and deviation in training.
        """
        train = _chosen("num_train", num_train, len(self.train_labels), seed)
        test = _chosen("num_test", num_test, len(self.test_labels), seed)
        images = self.train_images[train]
        mean = images.mean(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
        deviation = images.std(axis=(0, 2, 3), dtype=np.float64, keepdims=True)
        return Data(
            train_inputs=_scaled(images, mean, deviation),
            train_targets=torch.from_numpy(self.train_labels[train].astype(np.int64)),
            test_inputs=_scaled(self.test_images[test], mean, deviation),
            test_targets=torch.from_numpy(self.test_labels[test].astype(np.int64)),
            input_shape=tuple(images.shape[1:]),
            num_outputs=NUM_CLASSES,
        )


def image_files(layout: Layout, root: str | None) -> list[Path]:
    """Return the files that `read_images` reads. Raises FieldError for a missing one."""
    place = _place(layout, root)
    return [place / layout.npz] if (place / layout.npz).is_file() else _idx_files(place, layout)


@lru_cache(maxsize=1)
def read_images(layout: Layout, root: str | None, verify: bool, content: str = "") -> Images:
    """Read a data set from `root`, or from the user's cache folder if that is None.

    `content` is a hash of the files (`Task.content`), here the key of the cache. Raises FieldError
    for files that are missing, broken or, with `verify`, not the published ones.
    """
    place = _place(layout, root)
    arrays = read_arrays(place, layout)
    if verify and (fault := hash_fault(arrays, layout)):
        raise refusal(place, f"{fault} (verify=false takes it as it is)", layout.where)
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels):
            shapes = f"{list(images.shape)} and {list(labels.shape)}"
            raise refusal(place, f"images and labels have the shapes {shapes}", layout.where)
        if labels.max() >= NUM_CLASSES:
            raise refusal(place, f"a label is {labels.max()}", layout.where)
    train_images, train_labels, test_images, test_labels = arrays
    return Images(train_images[:, None], train_labels, test_images[:, None], test_labels)


def read_arrays(place: Path, layout: Layout) -> list[np.ndarray]:
    """Read the four arrays of a folder, in the order of IDX_NAMES, or raise FieldError."""
    return _from_npz(place / layout.npz, place, layout) or _from_idx(place, layout)


def hash_fault(arrays: list[np.ndarray], layout: Layout) -> str:
    """Return a text with the first array whose hash differs from the published one; empty if none
    does.
    """
    for array, name, expected in zip(arrays, IDX_NAMES, layout.hashes, strict=True):
        digest = new(layout.algorithm, _as_idx(array), usedforsecurity=False).hexdigest()
        if digest != expected:
            return f"{name} has another {layout.algorithm}"
    return ""


def _as_idx(array: np.ndarray) -> bytes:
    """Encode an array of bytes as an IDX file."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.tobytes()


def image_folder(root: str | None, where: str) -> Path:
    """Return `root` as a path, or raise FieldError; `where` describes the files expected in it."""
    if root is None:
        raise FieldError("task", [("root", f"is required, {where}")])
    path = Path(root).expanduser()
    if not path.is_dir():
        raise FieldError("task", [("root", f"must be {where}; there is no folder '{root}'")])
    return path


def refusal(root: Path, fault: str, where: str) -> FieldError:
    """Return the error for a fault in a folder's files."""
    return FieldError("task", [("root", f"must be {where}; {fault} in '{root}'")])


def _chosen(field: str, count: int | None, available: int, seed: int) -> np.ndarray:
    if count is None:
        return np.arange(available)
    if count > available:
        raise FieldError("task", [(field, f"must be <= {available} examples, found {count}")])
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(available, generator=generator)[:count].numpy()


def _scaled(images: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> Tensor:
    scaled = images.astype(np.float32)
    scaled -= mean.astype(np.float32)
    scaled /= deviation.astype(np.float32)
    return torch.from_numpy(scaled)


def _place(layout: Layout, root: str | None) -> Path:
    if root is not None:
        return image_folder(root, layout.where)
    place = cache.place(layout.name)
    if (place / layout.npz).is_file():
        return place
    try:
        _idx_files(place, layout)
    except FieldError:
        how = f"{cache.command(layout.name)} puts it there, or root takes {layout.where}"
        raise FieldError("task", [("root", f"{layout.title} is not in '{place}': {how}")]) from None
    return place


def _from_npz(path: Path, place: Path, layout: Layout) -> list[np.ndarray] | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = [archive[key] for key in IDX_NAMES.values()]
    except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error) as error:
        raise refusal(place, f"{path.name} cannot be read ({error})", layout.where) from error
    if any(array.dtype != np.uint8 for array in arrays):
        raise refusal(place, f"{path.name} holds other numbers than bytes", layout.where)
    return arrays


def _idx_files(place: Path, layout: Layout) -> list[Path]:
    folders = [place, place / "raw", place / layout.folder, place / layout.folder / "raw"]
    files = []
    for name in IDX_NAMES:
        paths = [folder / f"{name}{end}" for folder in folders for end in ("", ".gz")]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise refusal(place, f"there is no {name}", layout.where)
        files.append(path)
    return files


def _from_idx(place: Path, layout: Layout) -> list[np.ndarray]:
    arrays = []
    for path in _idx_files(place, layout):
        try:
            content = path.read_bytes()
            arrays.append(_array(gzip.decompress(content) if path.suffix == ".gz" else content))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise refusal(place, f"{path.name} cannot be read ({error})", layout.where) from error
    return arrays


def _array(content: bytes) -> np.ndarray:
    """Decode an IDX file: 0, 0, 8, the number of axes, their lengths, the entries."""
    if content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError("it is not an IDX file of bytes")
    num_axes = content[3]
    shape = np.frombuffer(content, ">u4", num_axes, offset=4).tolist()
    entries = np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes)
    return entries.reshape(shape)
