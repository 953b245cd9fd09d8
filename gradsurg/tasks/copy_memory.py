"""Copy memory: repeat a sequence of symbols after a long delay."""

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Task
from gradsurg.tasks.data.arrays import Count, Seed, draw_examples


@validated
class CopyMemory(Task):
    """The copying problem (Hochreiter and Schmidhuber 1997; in this form Arjovsky et al. 2016).

    Inputs are `num_copied` symbols, numbered from 0, then `delay` - 1 blanks, a start sign, and
    `num_copied` blanks; targets are blanks, and after the sign the symbols. The loss is the mean
    cross-entropy over all steps; without a memory it is n log K / (delay + 2n) for n copied of K
    symbols. The accuracy is that of the symbols alone, by chance 1/K. A blank is numbered K, the
    sign K + 1. All depends on `data_seed` alone.
    """

    delay: Count = 10
    num_copied: Count = 10
    num_symbols: Annotated[int, Field(ge=2)] = 8
    num_train: Count = 4000
    num_test: Count = 1000
    data_seed: Seed = 0

    def load(self) -> Data:
        return _data(self).copy()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        right = outputs.argmax(dim=-1) == targets
        return {
            "loss": self.loss(outputs, targets).item(),
            "accuracy": right[:, -self.num_copied :].double().mean().item(),
        }

    def draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, both (count, delay + 2 num_copied)."""
        symbols = generator.integers(0, self.num_symbols, (count, self.num_copied))
        blanks = np.full((count, self.delay + self.num_copied), self.num_symbols)
        inputs, targets = np.hstack([symbols, blanks]), np.hstack([blanks, symbols])
        inputs[:, -self.num_copied - 1] = self.num_symbols + 1
        return inputs, targets


@lru_cache(maxsize=2)
def _data(task: CopyMemory) -> Data:
    parts = draw_examples(task.draw, task.data_seed, task.num_train, task.num_test)
    return Data(
        *parts,
        input_shape=(task.delay + 2 * task.num_copied,),
        num_outputs=task.num_symbols + 1,
        num_tokens=task.num_symbols + 2,
        every_step=True,
    )
