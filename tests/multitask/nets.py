"""Models of several tasks, aggregators that are easy to follow, and the oracle of both engines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    GramianAggregator,
    Weighting,
)
from gradsurg.plugins.fields import validated
from gradsurg.sites.places import Selector

WIDTH = 6
ENGINES = {"full": {}, "feature": {"engine": "feature", "features": "trunk"}}
"""The fields of `SharedParameters` for each engine, with a `Net`."""

Grads = dict[str, Any]
"""Gradients by name. Any: a tensor, or None where none has come."""


@validated
class Uneven(Weighting):
    """Weights that depend on all of G and are not those of another."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"deterministic"})

    def weights(self, gramian: Tensor) -> Tensor:
        sizes = gramian.diagonal().sqrt()
        return gramian.sum(1) / sizes.square().sum() + torch.arange(1.0, len(sizes) + 1).double()


@validated
class Running(GramianAggregator):
    """Weights from the running mean of the norms: what it remembers shows at every step."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"deterministic"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {"norms": torch.zeros(num_tasks, dtype=torch.float64)}

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        norms = 0.5 * state["norms"] + gramian.diagonal().sqrt()
        return 1 / (1 + norms), {"norms": norms}


class Net(nn.Module):
    """A trunk, and a head for each of three tasks."""

    def __init__(self, tasks: Sequence[str] = ("a", "b", "c"), seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, 1) for task in tasks})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x).tanh()
        return {task: head(features) for task, head in self.heads.items()}


def inputs(step: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


TARGETS = {"a": 0.5, "b": -1.0, "c": 2.0}


def losses_of(model: nn.Module, step: int = 0) -> dict[str, Tensor]:
    """Losses of different sizes, some of which conflict."""
    return {
        task: (output - TARGETS[task]).square().mean() * (number + 1)
        for number, (task, output) in enumerate(model(inputs(step)).items())
    }


def grads_of(model: nn.Module) -> Grads:
    """Copies of the `.grad`s, by name."""
    named = model.named_parameters()
    return {name: None if own.grad is None else own.grad.clone() for name, own in named}


def same(first: Grads, second: Grads) -> bool:
    """Whether they are equal bit for bit."""
    assert first.keys() == second.keys()
    pairs = [(own, second[name]) for name, own in first.items()]
    return all(
        (own is None and other is None)
        or (own is not None and other is not None and torch.equal(own, other))
        for own, other in pairs
    )


def close(first: Grads, second: Grads, rtol: float = 1e-5) -> None:
    """Assert that they are equal except for rounding."""
    assert first.keys() == second.keys()
    for name, own in first.items():
        other = second[name]
        if own is None or other is None:
            assert own is other, name
            continue
        scale = max(float(other.abs().max()), 1e-12)
        gap = float((own - other).abs().max())
        assert gap <= rtol * scale, f"{name}: {gap / scale:.2g}"


def joint(
    model: nn.Module,
    losses: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    *interventions: gs.Intervention,
    **options: object,
) -> tuple[Grads, gs.Surgery]:
    """What one live.backward leaves."""
    model.zero_grad()
    surgery = gs.Surgery(*interventions)
    with surgery.attach(model, **options) as live:
        live.backward(losses)
    return grads_of(model), surgery


def at_shared(aggregator: Aggregator, **fields: object) -> gs.Intervention:
    return gs.Intervention(aggregator, at=gs.SharedParameters(**fields))


def each(model: nn.Module, losses: Mapping[str, Tensor]) -> dict[str, Grads]:
    """The gradients of each task, one backward after the other."""
    found = {}
    for task, loss in losses.items():
        model.zero_grad()
        loss.backward(retain_graph=True)
        found[task] = grads_of(model)
    model.zero_grad()
    return found


def oracle(
    model: nn.Module,
    losses: Mapping[str, Tensor],
    groups: Iterable[tuple[Aggregator, Sequence[str]]],
) -> Grads:
    """The slow and obvious way: J of each group of parameter names, stacked by hand."""
    grads = each(model, losses)
    params = dict(model.named_parameters())
    merged: Grads = {}
    values = torch.tensor([loss.item() for loss in losses.values()], dtype=torch.float64)
    for name in params:
        own = [one for task in losses if (one := grads[task][name]) is not None]
        merged[name] = sum(own[1:], own[0]) if own else None
    for aggregator, names in groups:
        shared = [
            name for name in names if sum(grads[task][name] is not None for task in losses) > 1
        ]
        rows, tasks = [], []
        for index, task in enumerate(losses):
            parts = [grads[task][name] for name in shared]
            if any(part is not None for part in parts):
                tasks.append(index)
                flat = [
                    (torch.zeros_like(params[name]) if part is None else part).reshape(-1)
                    for name, part in zip(shared, parts, strict=True)
                ]
                rows.append(torch.cat(flat))
        flat = aggregator(torch.stack(rows), AggregatorContext(losses=values[tasks]))
        start = 0
        for name in shared:
            size = params[name].numel()
            merged[name] = flat[start : start + size].view_as(params[name])
            start += size
    return merged


def trained(model: nn.Module, *items: gs.Intervention) -> Grads:
    """As `joint`, with the forward in the block."""
    model.zero_grad()
    optimizer = still(model)
    with gs.Surgery(*items).attach(model, optimizer) as live:
        live.backward(losses_of(model))
        optimizer.step()
    return grads_of(model)


def still(model: nn.Module) -> torch.optim.SGD:
    """An optimizer that changes nothing."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def scaled(factor: float, at: Selector, task: str = "") -> gs.Intervention:
    when = gs.ForTask(task) if task else gs.Always()
    return gs.Intervention(gs.Scale(factor), at=at, when=when)
