"""Examples that are made up: drawn from a seed, the training and the test part apart."""

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def drawn(draw: Draw, seed: int, num_train: int, num_test: int) -> tuple[Tensor, ...]:
    """Inputs and targets of training, then of test: neither changes with the other's number."""
    arrays: list[Tensor] = []
    for part, count in enumerate((num_train, num_test)):
        generator = np.random.default_rng([seed, part])
        arrays += [_tensor(array) for array in draw(generator, count)]
    return tuple(arrays)


def _tensor(array: np.ndarray) -> Tensor:
    kind = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int64
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))
