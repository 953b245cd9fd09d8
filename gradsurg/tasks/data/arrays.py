"""Draw examples from a seed, and split and standardize tables."""

from collections.abc import Callable
from math import ceil
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def draw_examples(draw: Draw, seed: int, num_train: int, num_test: int) -> tuple[Tensor, ...]:
    """Return training inputs and targets, then test inputs and targets.

    Each part has a generator of its own, so changing the size of one leaves the other as it is.
    """
    arrays: list[Tensor] = []
    for part, count in enumerate((num_train, num_test)):
        generator = np.random.default_rng([seed, part])
        arrays += [_tensor(array) for array in draw(generator, count)]
    return tuple(arrays)


def _tensor(array: np.ndarray) -> Tensor:
    kind = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int64
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))


def split(
    targets: np.ndarray, test_fraction: float, seed: int, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training rows and of the test rows.

    Equal, row for row, to scikit-learn's `train_test_split`, whose import takes a second.
    """
    generator = np.random.RandomState(seed)
    count = len(targets)
    num_test = ceil(test_fraction * count)
    if not stratify:
        order = generator.permutation(count)
        return order[num_test:], order[:num_test]
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(classes, kind="stable"), np.cumsum(counts)[:-1])
    num_train_of = _shares(counts, count - num_test, generator)
    num_test_of = _shares(counts - num_train_of, num_test, generator)
    train, test = [], []
    for rows, first, second in zip(members, num_train_of, num_test_of, strict=True):
        shuffled = rows[generator.permutation(len(rows))]
        train.extend(shuffled[:first])
        test.extend(shuffled[first : first + second])
    return generator.permutation(train), generator.permutation(test)


def _shares(counts: np.ndarray, total: int, generator: np.random.RandomState) -> np.ndarray:
    """Divide `total` rows among classes in proportion to `counts`, by largest remainder."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    remainders = exact - shares
    missing = int(total - shares.sum())
    for remainder in np.unique(remainders)[::-1]:
        if not missing:
            break
        (classes,) = np.where(remainders == remainder)
        number = min(len(classes), missing)
        shares[generator.choice(classes, size=number, replace=False)] += 1
        missing -= number
    return shares.astype(int)


def standardize(values: np.ndarray, train: np.ndarray) -> Tensor:
    """Scale columns to mean 0 and standard deviation 1 on the rows `train`; float32."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    return torch.from_numpy(((values - mean) / deviation).astype(np.float32))
