"""Transforms, models and tasks of a user, named by a dotted path."""

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.plugins.fields import validated
from gradsurg.tasks.base import Data, Task
from gradsurg.transforms.base import Stateless, Transform, TransformContext, TransformProperty

ready = gs.Scale(0.5)


@validated
class Twice(Stateless):
    """A transform with a field, decorated like gradsurg's own."""

    factor: float = 2.0

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset()

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * self.factor


class Clip(Twice):
    """A transform with the name of one of gradsurg's own."""


class Named(Stateless):
    """A transform with a field called `name`, which is no dataclass."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset()

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad


class Stubborn:
    """A class whose constructor raises."""

    def __init__(self) -> None:
        raise ZeroDivisionError("not today")


def halve(grad: Tensor) -> Tensor:
    return grad / 2


def scaled(grad: Tensor, factor: float) -> Tensor:
    return grad * factor


def total(grad: Tensor) -> Tensor:
    return grad.sum()


def maker(factor: float = 0.25) -> Transform:
    return gs.Scale(factor)


def linear(shape: tuple[int, ...], num_outputs: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs, bias=bias))


def no_module(shape: tuple[int, ...], num_outputs: int) -> int:
    return num_outputs


def misfit(shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Linear(3, num_outputs)


class Lines(Task):
    """Two classes of points on a line."""

    def load(self) -> Data:
        inputs = torch.linspace(-1, 1, 200)[:, None]
        targets = (inputs[:, 0] > 0).long()
        return Data(inputs, targets, inputs, targets, (1,), 2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"loss": self.loss(outputs, targets).item()}


class Lost(Lines):
    """A task whose data are missing."""

    def load(self) -> Data:
        raise FileNotFoundError("points.csv")
