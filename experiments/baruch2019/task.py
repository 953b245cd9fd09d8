"""Digits divided among workers: each has a part of every batch, and a loss of its own."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Chance, Data, MultiTask, by_name, floats
from gradsurg.tasks.digits import Digits


@validated
class Workers(MultiTask):
    """Classify scikit-learn's digits, with each batch divided evenly among `num_workers`.

    Worker i has the examples i, i + num_workers, ... of the batch and their mean cross-entropy as
    its loss, 0 without examples; `accuracy` is that of all examples.
    """

    num_workers: Annotated[int, Field(ge=1)] = 20

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"worker_{index}" for index in range(self.num_workers))

    def load(self) -> Data:
        return Digits().load()

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
        chance = Digits().chance(targets)
        return replace(chance, loss=self.num_workers * chance.loss)
