"""Attaching and detaching, again and again, leaves nothing alive."""

import gc
import warnings
from weakref import ref

import pytest
import torch
from torch import nn

import gradsurg as gs
from tests.contexts.kinds import KINDS, Kind, Net

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
