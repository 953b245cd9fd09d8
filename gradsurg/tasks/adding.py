"""Adding: predict the sum of the two marked numbers of a sequence."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Regression
from gradsurg.tasks.data.arrays import Seed, draw_examples


@validated
class Adding(Regression):
    """The adding problem (Hochreiter and Schmidhuber 1997; in this form Arjovsky et al. 2016).

    A step is a number uniform in [0, 1] and a mark, which is 1 once in each half of the sequence
    and else 0. The constant prediction 1 has a loss of 1/6. A gradient has to travel back about
    half of the length. All depends on `data_seed` alone.
    """

    length: Annotated[int, Field(ge=2)] = 30
    num_train: Annotated[int, Field(ge=2)] = 10000
    num_test: Annotated[int, Field(ge=2)] = 1000
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences (count, length, 2) and sums (count, 1)."""
        numbers = generator.random((count, self.length))
        half = self.length // 2
        marks = np.zeros_like(numbers)
        rows = np.arange(count)
        marks[rows, generator.integers(0, half, count)] = 1
        marks[rows, generator.integers(half, self.length, count)] = 1
        sums = (numbers * marks).sum(axis=1, keepdims=True)
        return np.stack([numbers, marks], axis=2), sums


@lru_cache(maxsize=2)
def _data(task: Adding) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    return Data(*parts, input_shape=(task.length, 2), num_outputs=1)
