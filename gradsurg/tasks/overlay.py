"""Overlay: classify two handwritten digits that lie over each other in one image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from einops import rearrange
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiClassification
from gradsurg.tasks.data.arrays import Count, Seed, split
from gradsurg.tasks.digits import load_digits

SIDE = 8
NUM_CLASSES = 10
LABELS = ("first", "second")


class TwoDigits(MultiClassification):
    """Base class: two digits in one image, with a loss for each."""

    @property
    def names(self) -> tuple[str, ...]:
        return LABELS

    @property
    def sizes(self) -> tuple[int, ...]:
        return (NUM_CLASSES,) * len(LABELS)


@validated
class Overlay(TwoDigits):
    """Classify two of scikit-learn's digits at once (as MultiMNIST, Sabour et al. 2017).

    One digit lies at the top left of a larger image, the other `shift` pixels further down and to
    the right; where they overlap the brighter pixel counts. The 20 outputs are ten for the first
    digit, then ten for the second; the loss is the sum of their cross-entropies, the accuracy the
    mean of theirs. Digits of the test are in no training image. The split depends on `split_seed`,
    the pairs on `data_seed` alone.
    """

    num_train: Count = 8000
    num_test: Count = 1000
    shift: Annotated[int, Field(ge=0, le=SIDE)] = 4
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()


@lru_cache(maxsize=2)
def _data(task: Overlay) -> Data:
    pixels, labels = load_digits()
    images = rearrange(pixels, "digit (y x) -> digit y x", y=SIDE) / 16
    train, test = split(labels, task.test_fraction, task.split_seed, stratify=True)
    pools = [
        Pool(images[train], labels[train], task.num_train),
        Pool(images[test], labels[test], task.num_test),
    ]
    return overlay_pairs(pools, task.shift, task.data_seed)


@dataclass(frozen=True, eq=False)
class Pool:
    """Digits to draw from (digits, side, side), in [0, 1], their labels, and the number to draw."""

    images: np.ndarray
    labels: np.ndarray
    count: int


def overlay_pairs(pools: Sequence[Pool], shift: int, seed: int) -> Data:
    """Draw pairs from the training pool and the test pool, the second digit `shift` pixels off."""
    side = pools[0].images.shape[1]
    canvas, parts = side + shift, []
    for part, pool in enumerate(pools):
        generator = np.random.default_rng([seed, part])
        pairs = generator.integers(0, len(pool.labels), (pool.count, 2))
        images = np.zeros((pool.count, 1, canvas, canvas), np.float32)
        images[:, 0, :side, :side] = pool.images[pairs[:, 0]]
        corner = images[:, 0, shift:, shift:]
        np.maximum(corner, pool.images[pairs[:, 1]], out=corner)
        parts += [images, pool.labels[pairs].astype(np.int64)]
    mean, deviation = parts[0].mean(dtype=np.float64), parts[0].std(dtype=np.float64)
    train_inputs, test_inputs = (
        torch.from_numpy(((part - mean) / deviation).astype(np.float32)) for part in parts[::2]
    )
    return Data(
        train_inputs=train_inputs,
        train_targets=torch.from_numpy(parts[1]),
        test_inputs=test_inputs,
        test_targets=torch.from_numpy(parts[3]),
        input_shape=(1, canvas, canvas),
        num_outputs=len(LABELS) * NUM_CLASSES,
        heads=(NUM_CLASSES,) * len(LABELS),
    )
