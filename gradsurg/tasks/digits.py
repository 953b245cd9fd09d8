"""Digits: scikit-learn's 1797 handwritten digits of 8 x 8 pixels, in ten classes."""

from functools import cache
from typing import Annotated

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import sklearn_table, split

NUM_CLASSES, NUM_PIXELS = 10, 64


@validated
class Digits(Classification):
    """Classify handwritten digits by cross-entropy; nothing is downloaded.

    The split is stratified and depends on `split_seed` alone, not on a run's seed. Images are
    standardized by the mean and deviation of all training pixels. `label_noise` is the fraction
    of training labels that are replaced by a wrong one; test labels stay right.
    """

    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    label_noise: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def load(self) -> Data:
        images, labels = _arrays()
        train, test = split(labels, self.test_fraction, self.split_seed, stratify=True)
        mean, deviation = images[train].mean(), images[train].std()
        scaled = torch.from_numpy((images - mean) / deviation)
        targets = torch.from_numpy(labels)
        return Data(
            train_inputs=scaled[train],
            train_targets=self._with_noise(targets[train]),
            test_inputs=scaled[test],
            test_targets=targets[test],
            input_shape=(1, 8, 8),
            num_outputs=NUM_CLASSES,
        )

    def _with_noise(self, labels: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.split_seed)
        chosen = torch.randperm(len(labels), generator=generator)
        chosen = chosen[: round(self.label_noise * len(labels))]
        shift = torch.randint(1, NUM_CLASSES, chosen.shape, generator=generator)
        return labels.index_put((chosen,), (labels[chosen] + shift) % NUM_CLASSES)


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 1, 8, 8) in [0, 1] as float32 and labels as int64; read once a process."""
    pixels, labels = load_digits()
    images = rearrange(pixels, "digit (height width) -> digit 1 height width", height=8)
    return images.astype(np.float32) / 16, labels


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 64) from 0 to 16, and labels."""
    table = sklearn_table("digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
