"""Draw examples from a seed, and split and standardize tables."""

from collections.abc import Callable
from math import ceil
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.torch_internals import random_state

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

    With `stratify` both have the same shares of the classes, unless a class has a single row or a
    part has fewer rows than there are classes: then all rows are drawn alike.
    """
    with random_state.preserved():  # its import draws from Python's generator
        from sklearn.model_selection import train_test_split

    num_test = ceil(test_fraction * len(targets))
    _, counts = np.unique(targets, return_counts=True)
    too_few = min(num_test, len(targets) - num_test) < len(counts) or counts.min() < 2
    train, test = train_test_split(
        np.arange(len(targets)),
        test_size=test_fraction,
        random_state=seed,
        stratify=targets if stratify and not too_few else None,
    )
    return np.asarray(train), np.asarray(test)


def standardize(values: np.ndarray, train: np.ndarray) -> Tensor:
    """Scale columns to mean 0 and standard deviation 1 on the rows `train`; float32."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    return torch.from_numpy(((values - mean) / deviation).astype(np.float32))
