"""MNIST overlay: two digits of MNIST over each other, from files."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.images import image_files, read_images
from gradsurg.tasks.mnist import LAYOUT
from gradsurg.tasks.overlay import Pool, TwoDigits, overlay_pairs

SIDE = 28


@validated
class MNISTOverlay(TwoDigits):
    """Classify two of MNIST's digits at once (MultiMNIST, Sabour et al. 2017; see `Overlay`).

    `root` and `verify` have the same meaning as in the task mnist. The test digits come from
    MNIST's own test part; the pairs depend on `data_seed` alone.
    """

    root: str | None = None
    num_train: Count = 20000
    num_test: Count = 5000
    shift: Annotated[int, Field(ge=0, le=SIDE)] = 4
    data_seed: Seed = 0
    verify: bool = True

    def load(self) -> Data:
        return self.load_with_validation(0)

    def load_with_validation(self, share: float) -> Data:
        return _data(self, self.content, share).copy()

    def files(self) -> Sequence[Path]:
        # verified files have a fixed content
        return () if self.verify else image_files(LAYOUT, self.root)


@lru_cache(maxsize=2)
def _data(task: MNISTOverlay, content: str, validation: float) -> Data:
    """Load the data; `content`, a hash of the files, is part of the cache's key."""
    images = read_images(LAYOUT, task.root, task.verify, content)
    pools = [
        Pool(_scaled(images.train_images), images.train_labels, task.num_train),
        Pool(_scaled(images.test_images), images.test_labels, task.num_test),
    ]
    return overlay_pairs(pools, task.shift, task.data_seed, validation)


def _scaled(images: np.ndarray) -> np.ndarray:
    return images[:, 0].astype(np.float32) / 255
