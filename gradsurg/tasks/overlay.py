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
from gradsurg.tasks.base import LEAST_VALIDATION, VALIDATION_SEED, Data, MultiClassification
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
    """Classify two of scikit-learn's digits at once (like MultiMNIST, Sabour et al. 2017).

    One digit lies at the top left of a larger image, the other `shift` pixels further down and to
    the right; where they overlap the brighter pixel counts. The 20 outputs are ten for the first
    digit, then ten for the second. The loss is the sum of their cross-entropies, the accuracy the
    mean of their accuracies. Digits of the test are in no training image. The split depends on
    `split_seed`, the pairs on `data_seed` alone.
    """

    num_train: Count = 8000
    num_test: Count = 1000
    shift: Annotated[int, Field(ge=0, le=SIDE)] = 4
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0
    data_seed: Seed = 0

    def load(self) -> Data:
        return self.load_with_validation(0)

    def load_with_validation(self, share: float) -> Data:
        return _data(self, share).copy()


@lru_cache(maxsize=2)
def _data(task: Overlay, validation: float) -> Data:
    pixels, labels = load_digits()
    images = rearrange(pixels, "digit (y x) -> digit y x", y=SIDE) / 16
    train, test = split(labels, task.test_fraction, task.split_seed, stratify=True)
    pools = [
        Pool(images[train], labels[train], task.num_train),
        Pool(images[test], labels[test], task.num_test),
    ]
    return overlay_pairs(pools, task.shift, task.data_seed, validation)


@dataclass(frozen=True, eq=False)
class Pool:
    """Digits to draw from (digits, side, side), in [0, 1], their labels, and the number to draw."""

    images: np.ndarray
    labels: np.ndarray
    count: int


def overlay_pairs(pools: Sequence[Pool], shift: int, seed: int, validation: float = 0.0) -> Data:
    """Draw pairs from the training pool and the test pool, the second digit `shift` pixels off.

    With `validation`, this share of the training digits is used in validation images only, and the
    number of these images is this share of the training pool's `count`. All images are standardized
    by the mean and deviation of the images of all training digits.
    """
    parts = [_drawn(pool, shift, [seed, part]) for part, pool in enumerate(pools)]
    (images, _), _ = parts
    mean, deviation = images.mean(dtype=np.float64), images.std(dtype=np.float64)
    if validation:
        apart = _apart(pools[0], validation)
        parts[:1] = [_drawn(pool, shift, [seed, 2 * part]) for part, pool in enumerate(apart)]
    # In float64 with NumPy 1 too, where a scalar does not widen an array.
    wide = [(images.astype(np.float64) - mean) / deviation for images, _ in parts]
    inputs = [torch.from_numpy(images.astype(np.float32)) for images in wide]
    targets = [torch.from_numpy(labels) for _, labels in parts]
    return Data(
        train_inputs=inputs[0],
        train_targets=targets[0],
        validation_inputs=inputs[1] if validation else None,
        validation_targets=targets[1] if validation else None,
        test_inputs=inputs[-1],
        test_targets=targets[-1],
        input_shape=images.shape[1:],
        num_outputs=len(LABELS) * NUM_CLASSES,
        heads=(NUM_CLASSES,) * len(LABELS),
    )


def _drawn(pool: Pool, shift: int, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw pairs of digits; return their images (count, 1, canvas, canvas) and labels."""
    side = pool.images.shape[1]
    canvas = side + shift
    pairs = np.random.default_rng(seed).integers(0, len(pool.labels), (pool.count, 2))
    images = np.zeros((pool.count, 1, canvas, canvas), np.float32)
    images[:, 0, :side, :side] = pool.images[pairs[:, 0]]
    corner = images[:, 0, shift:, shift:]
    np.maximum(corner, pool.images[pairs[:, 1]], out=corner)
    return images, pool.labels[pairs].astype(np.int64)


def _apart(pool: Pool, validation: float) -> tuple[Pool, Pool]:
    """Divide the digits of a pool for training and for validation."""
    count = round(validation * pool.count)
    train, aside = split(pool.labels, validation, VALIDATION_SEED, stratify=True)
    if min(len(train), len(aside), count) < LEAST_VALIDATION:
        raise ValueError(f"leaves {len(aside)} digits and {count} images for validation")
    return (
        Pool(pool.images[train], pool.labels[train], pool.count),
        Pool(pool.images[aside], pool.labels[aside], count),
    )
