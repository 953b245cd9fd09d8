"""Diabetes with three targets: disease progression, body mass and blood pressure."""

from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiRegression
from gradsurg.tasks.data.arrays import Seed, split, standardize
from gradsurg.tasks.diabetes import load_table

NAMES = ("progress", "mass", "pressure")
TARGETS = (2, 3)  # the columns of body mass and of blood pressure
Scale = Annotated[float, Field(gt=0)]


@validated
class DiabetesMulti(MultiRegression):
    """Predict three numbers from eight others by squared error (Efron et al. 2004).

    Inputs are age, sex and six blood serum measurements of scikit-learn's 442 patients. All columns
    are standardized in training, so that the loss of a constant prediction is its scale; the
    `scales` are far apart, like those of losses in different units. The split is that of the task
    diabetes.
    """

    scales: tuple[Scale, Scale, Scale] = (1.0, 0.1, 0.01)
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.25
    split_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def factors(self) -> tuple[float, ...]:
        return self.scales

    def load(self) -> Data:
        measured, progress = load_table()
        train, test = split(progress, self.test_fraction, self.split_seed, stratify=False)
        inputs_of = [column for column in range(measured.shape[1]) if column not in TARGETS]
        columns = [progress[:, None], measured[:, TARGETS]]
        inputs = standardize(measured[:, inputs_of], train)
        targets = standardize(np.concatenate(columns, axis=1), train)
        return Data(
            train_inputs=inputs[train],
            train_targets=targets[train],
            test_inputs=inputs[test],
            test_targets=targets[test],
            input_shape=(len(inputs_of),),
            num_outputs=len(NAMES),
            heads=(1,) * len(NAMES),
        )
