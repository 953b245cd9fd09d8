"""Read the tables of scikit-learn, draw examples from a seed, and split and standardize tables."""

from collections.abc import Callable
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.extras import MissingExtra, how_to_install

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def draw_examples(draw: Draw, seed: int, num_train: int, num_test: int) -> tuple[Tensor, ...]:
    """Return training inputs and targets, then test inputs and targets.

    Each part has a generator of its own, so a change of the size of one does not change the other.
    """
    arrays: list[Tensor] = []
    for part, count in enumerate((num_train, num_test)):
        generator = np.random.default_rng([seed, part])
        arrays += [_tensor(array) for array in draw(generator, count)]
    return tuple(arrays)


def _tensor(array: np.ndarray) -> Tensor:
    kind = np.float32 if np.issubdtype(array.dtype, np.floating) else np.int64
    return torch.from_numpy(np.ascontiguousarray(array, dtype=kind))


def sklearn_table(file: str, delimiter: str | None = None) -> np.ndarray:
    """Read a file of numbers that scikit-learn has installed, without importing it: that takes as
    long as importing PyTorch.
    """
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(how_to_install("scikit-learn", "run"))
    folder = Path(spec.submodule_search_locations[0])
    return np.loadtxt(folder / "datasets" / "data" / file, delimiter=delimiter)


def split(
    targets: np.ndarray, test_fraction: float, seed: int, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training rows and of the test rows.

    With `stratify` both have the same shares of the classes, unless a class has a single row or a
    part has fewer rows than there are classes; in these cases the rows are drawn without regard to
    their class. The rows are the same as in scikit-learn's `train_test_split`, which is slow to
    import.
    """
    num_test = ceil(test_fraction * len(targets))
    num_train = len(targets) - num_test
    if num_train < 1:
        rows = f"{test_fraction:g} of {len(targets)} rows are {num_test} test rows"
        raise ValueError(f"no training row is left: {rows}")
    generator = np.random.RandomState(seed)
    _, counts = np.unique(targets, return_counts=True)
    if not stratify or min(num_test, num_train) < len(counts) or counts.min() < 2:
        rows = generator.permutation(len(targets))
        return rows[num_test:], rows[:num_test]
    num_of_train = _shares(counts, num_train, generator)
    num_of_test = _shares(counts - num_of_train, num_test, generator)
    by_class = np.split(np.argsort(targets, kind="stable"), np.cumsum(counts)[:-1])
    train, test = [], []
    for rows, middle, added in zip(by_class, num_of_train, num_of_test, strict=True):
        rows = rows[generator.permutation(len(rows))]
        train.append(rows[:middle])
        test.append(rows[middle : middle + added])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))


def _shares(counts: np.ndarray, number: int, generator: np.random.RandomState) -> np.ndarray:
    """Return how many of `number` rows each class gets, in proportion to `counts`.

    The largest remainders are rounded up; equal ones are drawn from the generator.
    """
    exact = counts / counts.sum() * number
    shares = np.floor(exact)
    remainders, missing = exact - shares, int(number - shares.sum())
    for value in np.unique(remainders)[::-1]:
        if missing < 1:
            break
        tied = np.flatnonzero(remainders == value)
        chosen = generator.choice(tied, min(len(tied), missing), replace=False)
        shares[chosen] += 1
        missing -= len(chosen)
    return shares.astype(int)


def standardize(values: np.ndarray, train: np.ndarray) -> Tensor:
    """Scale columns to mean 0 and standard deviation 1 on the rows `train`; float32."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    return torch.from_numpy(((values - mean) / deviation).astype(np.float32))
