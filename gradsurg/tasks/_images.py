"""Images from files that the user has: some or all of them, standardised."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.base import Data

NUM_CLASSES = 10


@dataclass(frozen=True, eq=False)
class Images:
    """What the files hold: bytes (examples, channels, height, width), and labels."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def data(self, num_train: int | None, num_test: int | None, seed: int) -> Data:
        """So many of each part, chosen by `seed`, or all in their order; with channels of mean
        zero and deviation one in training.
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


def folder(root: str | None, where: str) -> Path:
    """The folder that a user means; `where` says what should lie there and where to get it."""
    if root is None:
        raise FieldError("task", [("root", f"is required, {where}")])
    path = Path(root).expanduser()
    if not path.is_dir():
        raise FieldError("task", [("root", f"must be {where}; there is no folder '{root}'")])
    return path


def refused(root: Path, what: str, where: str) -> FieldError:
    """A fault of what lies in the folder."""
    return FieldError("task", [("root", f"must be {where}; {what} in '{root}'")])


def _chosen(field: str, count: int | None, there: int, seed: int) -> np.ndarray:
    if count is None:
        return np.arange(there)
    if count > there:
        raise FieldError("task", [(field, f"must be <= {there} examples, found {count}")])
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(there, generator=generator)[:count].numpy()


def _scaled(images: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> Tensor:
    scaled = images.astype(np.float32)
    scaled -= mean.astype(np.float32)
    scaled /= deviation.astype(np.float32)
    return torch.from_numpy(scaled)
