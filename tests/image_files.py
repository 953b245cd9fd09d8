"""Twelve random images as IDX files and as arrays of an npz file."""

import gzip
import struct

import numpy as np

from gradsurg.tasks.data.images import IDX_NAMES

GENERATOR = np.random.default_rng(0)
TRAIN, TEST = GENERATOR.integers(0, 256, (2, 12, 28, 28), dtype=np.uint8)
TRAIN_LABELS, TEST_LABELS = GENERATOR.integers(0, 10, (2, 12), dtype=np.uint8)
ARRAYS = dict(zip(IDX_NAMES, (TRAIN, TRAIN_LABELS, TEST, TEST_LABELS), strict=True))


def named() -> dict[str, np.ndarray]:
    """Return the arrays under the names that Keras uses."""
    return dict(zip(IDX_NAMES.values(), ARRAYS.values(), strict=True))


def idx(array: np.ndarray) -> bytes:
    """Return the IDX file of an array: magic number, big-endian sizes, bytes."""
    magic = 2048 + array.ndim
    return struct.pack(f">{1 + array.ndim}i", magic, *array.shape) + array.tobytes()


def write(folder, zipped: bool = False, **changed: bytes) -> str:
    """Write the four files into `folder`, some with other contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ARRAYS.items():
        content = changed.get(name.replace("-", "_"), idx(array))
        path = folder / f"{name}{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(content) if zipped else content)
    return str(folder)
