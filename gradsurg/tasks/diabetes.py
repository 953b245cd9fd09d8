"""Diabetes: scikit-learn's 442 patients of ten measurements, and their disease progression."""

from functools import cache
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Regression
from gradsurg.tasks.data.arrays import Seed, sklearn_table, split, standardize


@validated
class Diabetes(Regression):
    """Predict the progression after a year by squared error (Efron et al. 2004); no download.

    The split depends on `split_seed` alone. Measurements and target are standardized by their
    mean and deviation in training, so that a constant prediction has a loss of 1.
    """

    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0

    def load(self) -> Data:
        measured, progress = load_diabetes()
        train, test = split(progress, self.test_fraction, self.split_seed, stratify=False)
        inputs, targets = standardize(measured, train), standardize(progress[:, None], train)
        return Data(
            train_inputs=inputs[train],
            train_targets=targets[train],
            test_inputs=inputs[test],
            test_targets=targets[test],
            input_shape=(10,),
            num_outputs=1,
        )


@cache
def load_diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Return measurements and progression after a year; read once a process."""
    return sklearn_table("diabetes_data_raw.csv.gz"), sklearn_table("diabetes_target.csv.gz")
