"""Several losses of one vector of outputs, each with its own part of it."""

from abc import abstractmethod
from collections.abc import Sequence
from statistics import fmean

from torch import Tensor
from torch.nn import functional

from gradsurg.tasks.base import MultiTask


class MultiClassification(MultiTask):
    """Cross-entropy of each part of the outputs with its own column of the targets."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each task: so many of the outputs are its own."""

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        parts, columns = outputs.split(self.sizes, dim=1), targets.unbind(dim=1)
        return {
            name: functional.cross_entropy(part, column)
            for name, part, column in zip(self.names, parts, columns, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = {name: loss.item() for name, loss in self.losses(outputs, targets).items()}
        parts, columns = outputs.split(self.sizes, dim=1), targets.unbind(dim=1)
        right = [
            (part.argmax(dim=1) == column).double().mean().item()
            for part, column in zip(parts, columns, strict=True)
        ]
        return {
            "loss": sum(losses.values()),
            "accuracy": fmean(right),
            **of_each("loss", self.names, list(losses.values())),
            **of_each("accuracy", self.names, right),
        }


class MultiRegression(MultiTask):
    """Mean squared error of each column of the outputs, times its scale; each has its `r2`."""

    @property
    @abstractmethod
    def scales(self) -> Sequence[float]:
        """What the error of each is multiplied by."""

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if outputs.shape != targets.shape:  # torch would broadcast them
            found = f"{list(outputs.shape)} and {list(targets.shape)}"
            raise ValueError(f"outputs and targets must have one shape, found {found}")
        errors = (outputs - targets).square().mean(dim=0).unbind()
        return {
            name: scale * error
            for name, scale, error in zip(self.names, self.scales, errors, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = [loss.item() for loss in self.losses(outputs, targets).values()]
        variances = targets.var(dim=0, correction=0).tolist()
        explained = [
            1 - loss / (scale * variance)
            for loss, scale, variance in zip(losses, self.scales, variances, strict=True)
        ]
        return {
            "loss": sum(losses),
            "r2": fmean(explained),
            **of_each("loss", self.names, losses),
            **of_each("r2", self.names, explained),
        }


def of_each(metric: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """A metric of each task, called as a MultiTask calls it."""
    return {f"{metric}_{name}": value for name, value in zip(names, values, strict=True)}
