"""Friedman: the first regression problem of Friedman 1991, with irrelevant inputs."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Regression
from gradsurg.tasks.data.arrays import Seed, draw_examples

MEAN, DEVIATION = 0.5, 12**-0.5  # of numbers uniform in [0, 1]


def response(inputs: np.ndarray) -> np.ndarray:
    """Return 10 sin(pi x1 x2) + 20 (x3 - 1/2)^2 + 10 x4 + 5 x5, for rows of numbers in [0, 1]."""
    x1, x2, x3, x4, x5 = inputs[:, :5].T
    return 10 * np.sin(np.pi * x1 * x2) + 20 * (x3 - 0.5) ** 2 + 10 * x4 + 5 * x5


@validated
class Friedman(Regression):
    """Predict `response` with normal noise from uniform numbers by squared error; generated.

    Inputs are standardized by the mean and deviation of uniform numbers, targets by those in
    training, so that a constant prediction has a loss of 1. All depends on `data_seed` alone.
    """

    num_train: Annotated[int, Field(ge=2)] = 2000
    num_test: Annotated[int, Field(ge=2)] = 1000
    num_features: Annotated[int, Field(ge=5)] = 10
    noise: Annotated[float, Field(ge=0)] = 1.0
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return standardized inputs and raw targets."""
        inputs = generator.random((count, self.num_features))
        targets = response(inputs) + self.noise * generator.standard_normal(count)
        return (inputs - MEAN) / DEVIATION, targets[:, None]


@lru_cache(maxsize=2)
def _data(task: Friedman) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    train_inputs, train_targets, test_inputs, test_targets = parts
    mean, deviation = train_targets.double().mean(), train_targets.double().std(correction=0)
    return Data(
        train_inputs=train_inputs,
        train_targets=((train_targets - mean) / deviation).float(),
        test_inputs=test_inputs,
        test_targets=((test_targets - mean) / deviation).float(),
        input_shape=(task.num_features,),
        num_outputs=1,
    )
