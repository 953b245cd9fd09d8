"""Builders shared by the tests of sites: a leaf, its gradient, call counts, small modules."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import (
    GroupTransform,
    Need,
    Stateless,
    Transform,
    TransformContext,
    TransformProperty,
    TransformState,
)
from tests.nets import attached

TEN = gs.Scale(10.0)


def point(*values: float) -> Tensor:
    """Return a leaf tensor, 1 by default."""
    return torch.tensor(values or (1.0,), requires_grad=True)


def grad_of(x: Tensor) -> list[Any]:
    assert x.grad is not None
    return x.grad.tolist()


def calls_of(live: gs.Live) -> dict[str, int]:
    """Return the number of gradients that passed at each site."""
    return {entry.site: entry.calls for entry in live.ledger}


def met(live: gs.Live) -> dict[str, int]:
    """Return the number of gradients that passed at each site that has seen any."""
    return {entry.site: entry.calls for entry in live.ledger if entry.calls}


def passed(
    model: nn.Module, transform: Transform, at: Selector, x: Tensor | None = None
) -> tuple[list[Any], dict[str, int]]:
    """Return the gradient of the input of a model, 1 by default, and the calls of each site."""
    x = point() if x is None else x
    with attached(model, transform, at) as live:
        model(x).sum().backward()
    return grad_of(x), calls_of(live)


def names_of_sites(live: gs.Live) -> list[list[str]]:
    """Return each site with its other names."""
    return [[entry.site, *entry.aliases] for entry in live.ledger]


def recomputed(function: Callable[..., Any], x: Tensor, reentrant: bool) -> Tensor:
    """Call a function in a checkpoint."""
    y = checkpoint(function, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    return y


class Made(nn.Module):
    """A module with these parts, whose forward is a function of it and of its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Acts(Stateless):
    """Applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return self.function(grad)


class Noted(Stateless):
    """Returns its input, and notes it with its context each time."""

    def __init__(self, *needs: Need) -> None:
        self.steps, self.calls, self.sites = list[int](), list[int](), list[str]()
        self.batches = list[dict[str, Tensor]]()
        self.tensors = list[list[Any]]()  # each with the value and the gradient, None without need
        self._needs = frozenset(needs)

    @property
    def needs(self) -> frozenset[Need]:
        return self._needs

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.sites.append(context.site)
        self.steps.append(context.step)
        self.calls.append(context.call)
        self.batches.append(dict(context.batch))
        self.tensors.append([grad, context.value, context.gradient])
        return grad


class TimesValue(Stateless):
    """It looks at the value as it is, with its graph."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"value"})

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset()

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        assert context.value is not None
        return grad * context.value


class UserGroup(GroupTransform):
    """A user's transform of a group by a function of its gradients and contexts."""

    def __init__(self, function: Callable[..., Iterable[Tensor]], *needs: Need) -> None:
        self.function, self._needs = function, frozenset(needs)

    @property
    def needs(self) -> frozenset[Need]:
        return self._needs

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        return self.function(grads, contexts), state


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Sums(nn.Module):
    """d/dw of `forward(x)` is x: every gradient can be chosen."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor | float) -> Tensor:
        return (self.w * x).sum()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Shared(nn.Module):
    """One module called twice, then a sum: d/dx = 4, d/d(first call) = 2, d/d(second) = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Double()

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(x)).sum()


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Tensor]
    count: int = 3
