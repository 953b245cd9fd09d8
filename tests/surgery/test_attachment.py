"""The first forward shows whether a selection is empty."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.multitask.losses import paused
from gradsurg.sites.places import Place
from tests.nets import attached, backward, batch, grad_of, small


class Turns(nn.Module):
    """Two layers, of which it calls the chosen one, several times if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)

    def forward(self, x: Tensor, side: str, times: int = 1) -> Tensor:
        for _ in range(times):
            x = self.get_submodule(side)(x)
        return x


def _run(model: nn.Module, *args: object) -> None:
    model(torch.ones(1, 3), *args).sum().backward()


@pytest.mark.parametrize(
    ("at", "runs", "met"),
    [
        (gs.Outputs("left", call=1), [("left", 2), ("left", 1), ("left", 3)], ("left#1", 2)),
        (gs.Outputs("right"), [("left", 1), ("right", 1)], ("right#0", 1)),
    ],
    ids=["not in a later forward", "not in the first forward"],
)
def test_what_is_met_in_some_forward_may_be_missing_in_another(at, runs, met) -> None:
    model = Turns()
    with attached(model, gs.Identity(), at) as live:
        for run in runs:
            _run(model, *run)
    assert [(entry.site, entry.calls) for entry in live.ledger] == [met]


def test_a_surgery_that_is_closed_while_it_is_paused_does_not_act_again() -> None:
    model = small()
    with pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"):
        live = gs.Surgery(gs.Intervention(gs.Zero(), gs.Outputs("act"))).start(model)
        loss = model(batch()[0]).sum()
        with paused(live.attachment.operations):
            live.close()
    loss.backward()
    assert grad_of(model.first.weight).any()


def test_a_surgery_may_be_closed_by_a_transform_in_the_forward() -> None:
    def close(activation: Tensor) -> Tensor:
        live.abort()  # as `close`, without the warnings
        return activation * 2

    model, plain = small(), small()
    last, expected = gs.Outputs("last").expect(2), 2 * plain(batch()[0])  # it has one, not two
    live = gs.Surgery(
        gs.Intervention(close, gs.Activations("root")), gs.Intervention(gs.Zero(), last)
    ).start(model)
    result = model(batch()[0])
    result.sum().backward()
    assert torch.equal(result, expected)
    assert grad_of(model.first.weight).any()


class Halves(nn.Sequential):
    """Returns two tensors, made by one node."""

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        return super().forward(input).split(2, dim=1)


def test_a_graph_may_reach_a_new_place_after_the_block() -> None:
    model = Halves(nn.Linear(3, 4))
    with attached(model, gs.Zero(), gs.Nodes("Split*")) as live:
        first, second = model(torch.ones(1, 3))
        first.sum().backward(retain_graph=True)
        assert not grad_of(model[0].weight).any()
    assert live.attachment.operations  # it is held, and its door is not
    second.sum().backward()
    assert grad_of(model[0].weight).any(dim=1).tolist() == [False, False, True, True]


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def is_collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the garbage collector is enabled before the test."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_garbage_collector_pauses_while_hooks_are_made_and_then_is_as_before(
    is_collecting: bool,
) -> None:
    during = []

    def noted(place: Place) -> bool:
        during.append(gc.isenabled())
        return True

    at, model = gs.Parameters().where(noted), small()
    with pytest.raises(LookupError, match="99 sites were expected"):
        gs.Surgery(gs.Intervention(gs.Identity(), at=at.expect(99))).start(model)
    assert gc.isenabled() == is_collecting
    during.clear()
    with attached(model, gs.Identity(), at) as live:
        assert gc.isenabled() == is_collecting
        assert during[-1] is False
        during.clear()
        live.add(gs.Intervention(gs.Identity(), at=at))
        assert gc.isenabled() == is_collecting
        assert during[-1] is False
        backward(model)
