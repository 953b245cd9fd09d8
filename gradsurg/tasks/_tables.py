"""Tables of real numbers: split, and standardised by the training part."""

import numpy as np
import torch
from torch import Tensor


def split(
    targets: np.ndarray, test_fraction: float, seed: int, stratify: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are for training and which for the test."""
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        np.arange(len(targets)),
        test_size=test_fraction,
        random_state=seed,
        stratify=targets if stratify else None,
    )
    return np.asarray(train), np.asarray(test)


def standardised(values: np.ndarray, train: np.ndarray) -> Tensor:
    """Columns with mean zero and deviation one on the rows `train`, as float32."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    return torch.from_numpy(((values - mean) / deviation).astype(np.float32))
