"""Attaching and detaching, again and again, leaves nothing alive."""

import gc
import warnings
from collections.abc import Callable
from weakref import getweakrefs, ref

import pytest
import torch
from torch import nn

import gradsurg as gs
from gradsurg.core.live import Live
from gradsurg.core.operation import Operation
from tests.contexts.kinds import KINDS, Kind, Net
from tests.nets import attached, backward, num_hooks, sgd, small


def _pass(model: nn.Module, live: Live, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Make a step, of several losses if there is an aggregator, and return its graph."""
    optimizer.zero_grad()
    y = model(torch.ones(3, 4, requires_grad=True))
    if any(item.aggregator is not None for item in live.interventions):
        live.backward([y.sum(), y.square().sum()])
    elif any(item.stage == "captured" for item in live.interventions):
        torch.autograd.grad(y.sum(), list(model.parameters()))
    else:
        y.sum().backward()
    optimizer.step()
    live.effects.rows()
    return y


def _of_kind(kind: Kind) -> Callable[[], gs.Surgery]:
    return lambda: gs.Surgery(gs.Intervention(gs.Scale(0.5), at=kind.make()))


SURGERIES: dict[str, Callable[[], gs.Surgery]] = {
    **{name: _of_kind(kind) for name, kind in KINDS.items()},
    "group at step": lambda: gs.Surgery(gs.Intervention(gs.ClipGlobalNorm(1.0))),
    "group at backward_end": lambda: gs.Surgery(
        gs.Intervention(gs.ClipGlobalNorm(1.0), at=gs.Parameters(stage="backward_end"))
    ),
    "skipped steps": lambda: gs.Surgery(gs.Intervention(gs.SkipUpdate(1e-3))),
    "single examples": lambda: gs.Surgery(
        gs.Intervention(gs.PerSample(gs.ClipGlobalNorm(1.0)), at=gs.Parameters(stage="step"))
    ),
    "state and observation": lambda: gs.Surgery(
        gs.Intervention(gs.GrokfastEMA(), when=gs.Threshold(above=0.0, source="output:first"))
    ),
    "combined": lambda: gs.Surgery(
        gs.Intervention(gs.Clip(1.0), at=(gs.Outputs("first") | gs.Inputs("last")).expect(2))
    ),
    "several": lambda: gs.Surgery(
        gs.Intervention(gs.Clip(1.0)), gs.Intervention(gs.PCGrad(), at=gs.SharedParameters())
    ),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", SURGERIES)
def test_a_name_given_to_a_new_handle_detaches_the_old_one_at_once(name: str) -> None:
    model = Net()
    optimizer = sgd(model)
    handles, live = list[ref[Live]](), None
    operations = list[ref[Operation]]()
    graphs = list[torch.Tensor]()  # neither hooks of modules nor those of nodes hold the handle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        for _ in range(3):  # as a cell of a notebook that is run again
            live = SURGERIES[name]().start(model, optimizer)
            handles.append(ref(live))
            operations += map(ref, live.attachment.operations)
            graphs.append(_pass(model, live, optimizer))
            assert [held() for held in handles[:-1]] == [None] * (len(handles) - 1)
        del live
    assert handles[-1]() is None
    assert num_hooks(model, optimizer) == 0
    graphs.clear()  # they hold the hooks, and those the interventions
    assert [held() for held in operations] == [None] * len(operations)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", SURGERIES)
def test_after_the_block_nothing_refers_to_a_parameter(name: str) -> None:
    model = Net()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        with SURGERIES[name]().attach(model, optimizer) as live:
            graph, door = _pass(model, live, optimizer), ref(live.attachment.door)
    assert door() is None  # a graph that still exists asks it for no hook
    del graph
    assert [getweakrefs(param) for param in model.parameters()] == [[]] * 3
    assert {type(entry.fired_on_device) for entry in live.ledger} <= {int}  # no tensor
    assert live.ledger.table()


@pytest.mark.usefixtures("frozen_heap")
def test_what_was_in_the_model_is_not_held_by_the_block() -> None:
    model = small()
    at = gs.Parameters("*.weight")
    with (
        pytest.warns(gs.SurgeryWarning, match="have no hooks"),
        attached(model, gs.Identity(), at),
    ):
        backward(model)
        gone = ref(model.last.weight)
        model.last = nn.Linear(5, 3)
        gc.collect()
        assert gone() is None
