"""Images of two digits that lie over each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradsurg.tasks._several import MultiClassification
from gradsurg.tasks.base import Data

NUM_CLASSES = 10
LABELS = ("first", "second")


@dataclass(frozen=True, eq=False)
class Pool:
    """Digits to draw from (digits, side, side), from 0 to 1, with their labels, and how often."""

    images: np.ndarray
    labels: np.ndarray
    count: int


class TwoDigits(MultiClassification):
    """Two digits in one image, and both are asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        return LABELS

    @property
    def sizes(self) -> tuple[int, ...]:
        return (NUM_CLASSES,) * len(LABELS)


def overlaid(pools: Sequence[Pool], shift: int, seed: int) -> Data:
    """Pairs from the pool of training and from that of the test, the second `shift` pixels off."""
    side = pools[0].images.shape[1]
    canvas, parts = side + shift, []
    for part, pool in enumerate(pools):
        generator = np.random.default_rng([seed, part])
        pairs = generator.integers(0, len(pool.labels), (pool.count, 2))
        over = np.zeros((pool.count, 1, canvas, canvas), np.float32)
        over[:, 0, :side, :side] = pool.images[pairs[:, 0]]
        below = over[:, 0, shift:, shift:]
        np.maximum(below, pool.images[pairs[:, 1]], out=below)
        parts += [over, pool.labels[pairs].astype(np.int64)]
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
