"""Several losses of one vector of outputs, each with its own part of it."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional

from gradsurg.tasks.base import MultiTask

Outputs = Tensor | Sequence[Tensor]
"""All outputs beside one another, or those of each task apart, as a model with heads has them."""


class MultiClassification(MultiTask):
    """Cross-entropy of each part of the outputs with its own column of the targets."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each task: so many of the outputs are its own."""

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        parts, columns = parts_of(outputs, self.sizes, len(targets)), targets.unbind(dim=1)
        return {
            name: functional.cross_entropy(part, column)
            for name, part, column in zip(self.names, parts, columns, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = numbers(self.losses(outputs, targets).values())
        parts, columns = parts_of(outputs, self.sizes, len(targets)), targets.unbind(dim=1)
        right = numbers(
            (part.argmax(dim=1) == column).double().mean()
            for part, column in zip(parts, columns, strict=True)
        )
        return {
            "loss": sum(losses),
            "accuracy": fmean(right),
            **of_each("loss", self.names, losses),
            **of_each("accuracy", self.names, right),
        }


class MultiRegression(MultiTask):
    """Mean squared error of each column of the outputs, times its factor; each has its `r2`."""

    @property
    @abstractmethod
    def factors(self) -> Sequence[float]:
        """What the error of each is multiplied by."""

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        parts = parts_of(outputs, (1,) * len(self.names), len(targets))
        errors = [
            functional.mse_loss(part[:, 0], column)
            for part, column in zip(parts, targets.unbind(dim=1), strict=True)
        ]
        return {
            name: factor * error
            for name, factor, error in zip(self.names, self.factors, errors, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = numbers(self.losses(outputs, targets).values())
        variances = targets.var(dim=0, correction=0).tolist()
        explained = [
            1 - loss / (factor * variance)
            for loss, factor, variance in zip(losses, self.factors, variances, strict=True)
        ]
        return {
            "loss": sum(losses),
            "r2": fmean(explained),
            **of_each("loss", self.names, losses),
            **of_each("r2", self.names, explained),
        }


def parts_of(outputs: Outputs, sizes: Sequence[int], count: int) -> Sequence[Tensor]:
    """What belongs to each task; ValueError if that is not so many outputs for so many examples."""
    whole = [count, sum(sizes)]
    if isinstance(outputs, Tensor):
        if list(outputs.shape) != whole:
            raise ValueError(f"outputs must have the shape {whole}, found {list(outputs.shape)}")
        return outputs.split(tuple(sizes), dim=1)
    found = [list(part.shape) for part in outputs]
    if found != [[count, size] for size in sizes]:
        rule = f"a tensor of the shape {whole}, or for each task its part of it"
        raise ValueError(f"outputs must be {rule}, {list(sizes)} columns, found shapes {found}")
    return outputs


def numbers(values: Iterable[Tensor]) -> list[float]:
    """The numbers that several tensors hold; waits for the device once."""
    return torch.stack(list(values)).tolist()


def of_each(metric: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """A metric of each task, called as a MultiTask calls it."""
    return {f"{metric}_{name}": value for name, value in zip(names, values, strict=True)}
