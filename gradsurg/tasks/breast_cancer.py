"""Breast cancer: scikit-learn's 569 tumours of 30 measurements, malignant (0) or benign (1)."""

from functools import cache
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Seed, split, standardize
from gradsurg.torch_internals import random_state


@validated
class BreastCancer(Classification):
    """Classify tumours by cross-entropy; nothing is downloaded.

    The split is stratified and depends on `split_seed` alone. Each measurement is standardized by
    its mean and deviation in training.
    """

    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0

    def load(self) -> Data:
        measured, kinds = _arrays()
        train, test = split(kinds, self.test_fraction, self.split_seed, stratify=True)
        inputs = standardize(measured, train)
        targets = torch.from_numpy(kinds.astype(np.int64))
        return Data(
            train_inputs=inputs[train],
            train_targets=targets[train],
            test_inputs=inputs[test],
            test_targets=targets[test],
            input_shape=(30,),
            num_outputs=2,
        )


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Measurements and classes; read once a process."""
    with random_state.preserved():  # its import draws from Python's generator
        from sklearn.datasets import load_breast_cancer

    measured, kinds = load_breast_cancer(return_X_y=True)
    return measured, kinds
