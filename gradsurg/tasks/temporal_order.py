"""Temporal order: classify a sequence by the order of two symbols among many others."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data.arrays import Count, Seed, draw_examples

SYMBOLS = "abcdXYEB"
NUM_DISTRACTORS = 4
START, TRIGGER = SYMBOLS.index("E"), SYMBOLS.index("B")


@validated
class TemporalOrder(Classification):
    """Classify a sequence by the order of two symbols among many others.

    A sequence is E, then a, b, c, d at random, and B at its end. An X or a Y stands in the second
    tenth of it and another in the sixth; XX, XY, YX and YY are the classes 0 to 3. Tokens are
    numbered as in "abcdXYEB". All depends on `data_seed` alone.

    Experiment 6a of Hochreiter and Schmidhuber 1997, with sequences of one length.
    """

    length: Annotated[int, Field(ge=10)] = 30
    num_train: Count = 4000
    num_test: Count = 1000
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences (count, length) of tokens, and classes."""
        tokens = generator.integers(0, NUM_DISTRACTORS, (count, self.length))
        tokens[:, 0], tokens[:, -1] = START, TRIGGER
        kinds = generator.integers(0, 2, (count, 2))  # X or Y
        for kind, tenth in zip(kinds.T, (1, 5), strict=True):
            low, high = tenth * self.length // 10, (tenth + 1) * self.length // 10
            tokens[np.arange(count), generator.integers(low, high, count)] = NUM_DISTRACTORS + kind
        return tokens, 2 * kinds[:, 0] + kinds[:, 1]


@lru_cache(maxsize=2)
def _data(task: TemporalOrder) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    return Data(*parts, input_shape=(task.length,), num_outputs=4, num_tokens=len(SYMBOLS))
