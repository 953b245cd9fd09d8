"""MNIST divided among workers: each has a part of every batch, and a loss of its own."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Chance, Data, MultiTask, by_name, floats
from gradsurg.tasks.data.arrays import Count
from gradsurg.tasks.mnist import MNIST


@validated
class Workers(MultiTask):
    """Classify MNIST's digits, of half the height and width, with each batch divided among workers.

    Each pixel is the mean of four. Worker i has the examples i, i + num_workers, ... of the batch
    and their mean cross-entropy as its loss, 0 without examples. `accuracy` is over all examples.
    """

    num_workers: Annotated[int, Field(ge=1)] = 50
    root: str | None = None
    num_train: Count | None = None
    num_test: Count | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker_{index}" for index in range(self.num_workers))

    @property
    def _mnist(self) -> MNIST:
        return MNIST(root=self.root, num_train=self.num_train, num_test=self.num_test)

    def load(self) -> Data:
        data = self._mnist.load()
        train, test = (functional.avg_pool2d(x, 2) for x in (data.train_inputs, data.test_inputs))
        return replace(data, train_inputs=train, test_inputs=test, input_shape=train.shape[1:])

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        each = functional.cross_entropy(outputs, targets, reduction="none")
        parts = (each[index :: self.num_workers] for index in range(self.num_workers))
        return {
            name: part.sum() / max(1, len(part))
            for name, part in zip(self.names, parts, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        correct = outputs.argmax(dim=1) == targets
        return {
            "loss": sum(losses),
            "accuracy": correct.double().mean().item(),
            **by_name("loss", self.names, losses),
        }

    def chance(self, targets: Tensor) -> Chance:
        chance = self._mnist.chance(targets)
        return replace(chance, loss=self.num_workers * chance.loss)
