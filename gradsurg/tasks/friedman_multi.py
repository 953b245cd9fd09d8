"""Friedman's three regression problems at once, with the same inputs."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, MultiRegression
from gradsurg.tasks.data.arrays import Seed, draw_examples
from gradsurg.tasks.friedman import DEVIATION, MEAN, response

NAMES = ("sum", "impedance", "phase")
Scale = Annotated[float, Field(gt=0)]


def circuit(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the second and third problem: impedance and phase of an alternating current circuit.

    Of rows of numbers in [0, 1] the first four are stretched to R in [0, 100], w in
    [40 pi, 560 pi], L in [0, 1] and C in [1, 11]; with X = w L - 1 / (w C) they are
    sqrt(R^2 + X^2) and atan(X / R).
    """
    low = np.array([0, 40 * np.pi, 0, 1])
    high = np.array([100, 560 * np.pi, 1, 11])
    r, w, inductance, capacitance = (low + (high - low) * inputs[:, :4]).T
    x = w * inductance - 1 / (w * capacitance)
    return np.hypot(r, x), np.arctan2(x, r)


@validated
class FriedmanMulti(MultiRegression):
    """Predict the responses of Friedman 1991's three problems by squared error; generated.

    The first problem is that of the task friedman, the others use its first four inputs. Each
    target has normal noise of `noise` times its own deviation, and is standardized in training, so
    that the loss of a constant prediction is its scale; the `scales` are far apart, like those of
    losses in different units. All depends on `data_seed` alone.
    """

    scales: tuple[Scale, Scale, Scale] = (1.0, 0.1, 0.01)
    num_train: Annotated[int, Field(ge=2)] = 2000
    num_test: Annotated[int, Field(ge=2)] = 1000
    num_features: Annotated[int, Field(ge=5)] = 10
    noise: Annotated[float, Field(ge=0)] = 0.2
    data_seed: Seed = 0

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def factors(self) -> tuple[float, ...]:
        return self.scales

    def load(self) -> Data:
        return _data(self).copy()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return standardized inputs; the three responses, and standard normal numbers for each."""
        inputs = generator.random((count, self.num_features))
        responses = [response(inputs), *circuit(inputs)]
        normal = generator.standard_normal((count, len(NAMES)))
        return (inputs - MEAN) / DEVIATION, np.stack([np.stack(responses, axis=1), normal], axis=1)


@lru_cache(maxsize=2)
def _data(task: FriedmanMulti) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    train_inputs, train_drawn, test_inputs, test_drawn = parts
    size = train_drawn[:, 0].double().std(dim=0, correction=0)
    train, test = (_noisy(part.double(), task.noise * size) for part in (train_drawn, test_drawn))
    mean, deviation = train.mean(dim=0), train.std(dim=0, correction=0)
    return Data(
        train_inputs=train_inputs,
        train_targets=((train - mean) / deviation).float(),
        test_inputs=test_inputs,
        test_targets=((test - mean) / deviation).float(),
        input_shape=(task.num_features,),
        num_outputs=len(NAMES),
        heads=(1,) * len(NAMES),
    )


def _noisy(drawn_part: Tensor, deviation: Tensor) -> Tensor:
    responses, normal = drawn_part.unbind(dim=1)
    return responses + deviation * normal
