"""A memory constrains the update and is not followed, in its own head either."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator
from tests.multitask.nets import Net, inputs, losses_of


def rows(model: Net, losses: dict[str, Tensor]) -> Tensor:
    """The gradient of each loss with respect to all parameters, zero where it has none."""
    params = list(model.parameters())
    grads = [
        torch.autograd.grad(
            loss, params, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for loss in losses.values()
    ]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in grads]).double()


def updated(
    model: Net, losses: dict[str, Tensor] | Callable[[], dict[str, Tensor]], surgery: gs.Surgery
) -> dict[str, Tensor]:
    with surgery.attach(model) as live:
        live.backward(losses() if callable(losses) else losses)
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }


def combining(aggregator: Aggregator, **fields: object) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(aggregator, gs.SharedParameters(**fields)))


def two_losses(model: Net, conflicting: bool) -> dict[str, Tensor]:
    every = losses_of(model)
    losses = {"now": every["a"], "retain": every["b"]}
    now, retain = rows(model, losses)
    if bool(now @ retain < 0) != conflicting:
        losses["retain"] = -losses["retain"]
    return losses


@pytest.mark.parametrize("conflicting", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", [gs.AGEM, gs.GEM])
@pytest.mark.filterwarnings("ignore:.*by their order:gradsurg.SurgeryWarning")
def test_the_memorys_own_head_gets_what_projecting_the_whole_gradient_gives_it(
    kind: type[gs.AGEM | gs.GEM], named: bool, conflicting: bool
) -> None:
    """g - (g · r) / |r|² r by hand, over all parameters; g is zero in the head of r."""
    model = Net()
    losses = two_losses(model, conflicting)
    now, retain = rows(model, losses)
    expected = now - min(0.0, float(now @ retain) / float(retain @ retain)) * retain
    aggregator = kind(memory="retain") if named else kind()
    found = updated(model, losses, combining(aggregator))
    flat = torch.cat([grad.flatten() for grad in found.values()])
    torch.testing.assert_close(flat.double(), expected, rtol=1e-5, atol=1e-6)
    assert bool(found["heads.b.weight"].any()) == conflicting


@pytest.mark.parametrize(
    "fields", [{"granularity": "module"}, {"engine": "feature", "features": "trunk"}], ids=str
)
def test_where_the_current_task_has_no_gradient_the_memory_moves_nothing(
    fields: dict[str, object],
) -> None:
    """A head by itself, or below which alone gradients are combined: the projection of 0 is 0."""
    model = Net()
    surgery = combining(gs.AGEM(memory="retain"), **fields)
    found = updated(model, lambda: two_losses(model, conflicting=True), surgery)
    assert found["heads.a.weight"].any()
    assert found["trunk.0.weight"].any()
    assert not found["heads.b.weight"].any()


def test_two_memories_with_a_head_each_constrain_like_gem_on_all_parameters() -> None:
    model = Net()
    every = losses_of(model)
    matrix = rows(model, every)
    signs = [1.0, *(-1.0 if row @ matrix[0] > 0 else 1.0 for row in matrix[1:])]
    losses = {name: sign * loss for (name, loss), sign in zip(every.items(), signs, strict=True)}
    expected = gs.GEM()(rows(model, losses))
    found = updated(model, losses, combining(gs.GEM(memory=("b", "c"))))
    flat = torch.cat([grad.flatten() for grad in found.values()])
    torch.testing.assert_close(flat.double(), expected, rtol=1e-4, atol=1e-6)
    assert found["heads.c.weight"].any()


def test_losses_that_share_no_parameter_are_still_refused() -> None:
    model = Net()
    features = model.trunk(inputs()).detach()
    losses = {name: head(features).square().mean() for name, head in model.heads.items()}
    del losses["c"]
    with pytest.raises(ValueError, match="two losses must depend on the same parameter"):
        updated(model, losses, combining(gs.AGEM(memory="b")))
