"""Overlay: two handwritten digits over each other, and both are asked for."""

from functools import lru_cache
from typing import Annotated

import numpy as np
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.fields import validated
from gradsurg.tasks._digits import load_digits
from gradsurg.tasks._generated import Count, Seed
from gradsurg.tasks._tables import split
from gradsurg.tasks.base import Data, MultiTask

SIDE = 8
NUM_CLASSES = 10
LABELS = ("first", "second")


@validated
class Overlay(MultiTask):
    """Classify two of scikit-learn's digits at once (as MultiMNIST, Sabour et al. 2017).

    One digit lies at the top left of a larger image, the other `shift` pixels further down and to
    the right; where they overlap the brighter pixel counts. The 20 outputs are ten for the first
    digit, then ten for the second; the loss is the sum of their cross-entropies, and the accuracy
    the mean of theirs. Digits of the test are in no training image. The split depends on
    `split_seed`, the pairs on `data_seed` alone.
    """

    num_train: Count = 8000
    num_test: Count = 1000
    shift: Annotated[int, Field(ge=0, le=SIDE)] = 4
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    @property
    def names(self) -> tuple[str, ...]:
        return LABELS

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        said = outputs.split(NUM_CLASSES, dim=1)
        return {
            label: functional.cross_entropy(part, target)
            for label, part, target in zip(LABELS, said, targets.unbind(dim=1), strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = {name: loss.item() for name, loss in self.losses(outputs, targets).items()}
        said = rearrange(outputs, "batch (label kind) -> batch label kind", label=len(LABELS))
        right = (said.argmax(dim=2) == targets).double().mean(dim=0).tolist()
        return {
            "loss": sum(losses.values()),
            "accuracy": sum(right) / len(LABELS),
            **{f"loss_{label}": loss for label, loss in losses.items()},
            **{f"accuracy_{label}": share for label, share in zip(LABELS, right, strict=True)},
        }


@lru_cache(maxsize=2)
def _data(task: Overlay) -> Data:
    pixels, labels = load_digits()
    images = rearrange(pixels, "digit (y x) -> digit y x", y=SIDE) / 16
    pools = split(labels, task.test_fraction, task.split_seed, stratify=True)
    canvas, parts = SIDE + task.shift, []
    for pool, count, part in zip(pools, (task.num_train, task.num_test), range(2), strict=True):
        generator = np.random.default_rng([task.data_seed, part])
        pairs = pool[generator.integers(0, len(pool), (count, 2))]
        over = np.zeros((count, 1, canvas, canvas), np.float32)
        over[:, 0, :SIDE, :SIDE] = images[pairs[:, 0]]
        below = over[:, 0, task.shift :, task.shift :]
        np.maximum(below, images[pairs[:, 1]], out=below)
        parts += [over, labels[pairs].astype(np.int64)]
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
    )
