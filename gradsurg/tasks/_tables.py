"""Tables of real numbers: split, and standardised by the training part."""

from math import ceil

import numpy as np
import torch
from torch import Tensor


def split(
    targets: np.ndarray, test_fraction: float, seed: int, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are for training and which for the test.

    It is scikit-learn's train_test_split, row for row, without the second that importing it takes.
    """
    draw = np.random.RandomState(seed)
    count = len(targets)
    num_test = ceil(test_fraction * count)
    if not stratify:
        order = draw.permutation(count)
        return order[num_test:], order[:num_test]
    _, classes, counts = np.unique(targets, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(classes, kind="stable"), np.cumsum(counts)[:-1])
    num_train_of = _shares(counts, count - num_test, draw)
    num_test_of = _shares(counts - num_train_of, num_test, draw)
    train, test = [], []
    for own, first, second in zip(members, num_train_of, num_test_of, strict=True):
        shuffled = own[draw.permutation(len(own))]
        train.extend(shuffled[:first])
        test.extend(shuffled[first : first + second])
    return draw.permutation(train), draw.permutation(test)


def _shares(counts: np.ndarray, total: int, draw: np.random.RandomState) -> np.ndarray:
    """How many of `total` rows each class gives: those with the largest remainder one more."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact)
    remainders = exact - shares
    left = int(total - shares.sum())
    for remainder in np.unique(remainders)[::-1]:
        if not left:
            break
        (classes,) = np.where(remainders == remainder)
        number = min(len(classes), left)
        shares[draw.choice(classes, size=number, replace=False)] += 1
        left -= number
    return shares.astype(int)


def standardised(values: np.ndarray, train: np.ndarray) -> Tensor:
    """Columns with mean zero and deviation one on the rows `train`, as float32."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    return torch.from_numpy(((values - mean) / deviation).astype(np.float32))
