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
from tests.contexts.kinds import KINDS, Kind, Net
from tests.nets import num_hooks, sgd

ROUNDS = 32


def _round(kind: Kind, model: nn.Module, refs: list[ref]) -> None:
    """Attach, train a step, detach."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    at = kind.make()
    item = gs.Intervention(gs.GrokfastEMA(), at, gs.Threshold(above=0.0))
    if at.resolve("tensor") == "forward":  # what remembers is refused by some of them
        item = gs.Intervention(gs.Scale(1.0), at)
    x = torch.ones(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        with (surgery := gs.Surgery(item)).attach(model, optimizer) as live:
            y = model(x)
            loss = y.sum()
            if kind.of == "captured":
                torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()
            optimizer.step()
            refs += [ref(thing) for thing in (surgery, live, y, loss, x, optimizer)]


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_rounds_of_attaching_leave_no_tensor_node_or_module_alive(name: str) -> None:
    refs: list[ref] = []
    model = Net()
    counts = []
    for number in range(ROUNDS):
        _round(KINDS[name], model, refs)
        if number in (ROUNDS // 4, ROUNDS - 1):
            gc.collect()
            counts.append(len(gc.get_objects()) - len(refs))
    assert [held() for held in refs if held() is not None] == []
    assert counts[1] - counts[0] < ROUNDS // 2, "objects pile up from round to round"
    gone = [ref(model), *map(ref, model.modules()), *map(ref, model.parameters())]
    del model
    gc.collect()
    assert [held() for held in gone if held() is not None] == []


@pytest.mark.usefixtures("frozen_heap")
def test_what_is_kept_alive_is_found() -> None:
    refs: list[ref] = []
    model, holding = Net(), []
    model.register_forward_hook(lambda module, args, output: holding.append(output))
    _round(KINDS["Outputs"], model, refs)
    gc.collect()
    assert [held() for held in refs if held() is not None] != []


def _pass(model: nn.Module, live: Live, optimizer: torch.optim.Optimizer) -> None:
    """Make a step, of several losses if there is an aggregator, and let go of its graph."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        for _ in range(3):  # as a cell of a notebook that is run again
            live = SURGERIES[name]().start(model, optimizer)
            handles.append(ref(live))
            _pass(model, live, optimizer)
            assert [held() for held in handles[:-1]] == [None] * (len(handles) - 1)
        del live
    assert handles[-1]() is None
    assert num_hooks(model, optimizer) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", SURGERIES)
def test_after_the_block_nothing_refers_to_a_parameter(name: str) -> None:
    model = Net()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)
        with SURGERIES[name]().attach(model, optimizer) as live:
            _pass(model, live, optimizer)
    assert [getweakrefs(param) for param in model.parameters()] == [[]] * 3
    assert live.ledger.table()
