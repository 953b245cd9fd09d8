"""Depth and Index: triggers on the place of a module in the model."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.triggers.base import Clock, TriggerContext
from tests.nets import attached


@pytest.mark.parametrize(
    ("site", "depth"),
    [
        ("weight", 0),
        ("first.weight", 1),
        ("encoder.layers.3.linear1.bias", 4),
        ("root#0", 0),
        ("first#0", 1),
        ("first#2.0", 1),
        ("encoder.layers.3#1", 3),
        ("root#0/ReluBackward[0]", 0),
        ("a.b#0/AddmmBackward[1].0", 2),
    ],
)
def test_the_depth_is_the_nesting_depth_of_the_module(site: str, depth: int) -> None:
    context = TriggerContext(Clock(), site=site)
    exactly = [number for number in range(6) if gs.Depth(number, number).fires(context)]
    assert exactly == [depth]
    assert gs.Depth(low=depth).fires(context) is True
    assert gs.Depth(low=depth + 1).fires(context) is False


@pytest.mark.parametrize(
    ("site", "number"),
    [
        ("0.weight", 0),
        ("layers.3#0", 3),
        ("encoder.layers.11.linear1.bias", 11),
        ("blocks.2.convs.1#0/ReluBackward[7].5", 1),
        ("first#4", None),
        ("layer4.weight", None),
        ("root#0", None),
    ],
)
def test_the_index_is_the_last_number_in_the_modules_name(site: str, number: int | None) -> None:
    context = TriggerContext(Clock(), site=site)
    exactly = [start for start in range(20) if gs.Index(start, start + 1).fires(context)]
    assert exactly == ([] if number is None else [number])
    assert gs.Index(start=2).fires(context) is (number is not None and number >= 2)


@pytest.mark.parametrize("trigger", [gs.Depth(), gs.Index()])
def test_the_decision_is_unknown_at_the_beginning_of_a_step(trigger: gs.Trigger) -> None:
    assert trigger.fires(TriggerContext(Clock())) is None


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _fired(model: nn.Module, at: Selector, when: gs.Trigger) -> dict[str, int]:
    with attached(model, gs.Scale(1.0), at, when=when) as live:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    return {entry.site: entry.all_fired for entry in live.ledger}


def test_a_module_held_twice_has_both_indices_one_call_after_the_other() -> None:
    shared = Double()
    model = nn.Sequential(shared, Double(), shared)
    assert _fired(model, gs.Outputs(), gs.Index(start=2)) == {"0#0": 0, "1#0": 0, "2#0": 1}


def test_parameters_have_the_depth_and_index_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    expected = {"0.weight": 0, "0.bias": 0, "1.0.weight": 1, "1.0.bias": 1}
    assert _fired(model, gs.Parameters(), gs.Depth(low=2)) == expected


def test_nodes_have_the_depth_and_index_of_their_module() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))
    fired = _fired(model, gs.Nodes("Relu"), gs.Depth(high=1))
    assert fired == {"0#0/ReluBackward[0]": 1, "1.0#0/ReluBackward[0]": 0}


def test_a_group_consists_of_the_sites_where_the_trigger_fires() -> None:
    # |(3, 4)| = 5 -> 1; the 100 is deeper, so no part of the group and left alone.
    model = nn.ModuleDict({"a": _Sum(), "b": _Sum(), "deep": nn.ModuleDict({"c": _Sum()})})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    transform = gs.ClipGlobalNorm(1.0, eps=0.0)
    with attached(model, transform, None, optimizer, gs.Depth(high=1)) as live:
        for name, x in (("a", 3.0), ("b", 4.0), ("deep.c", 100.0)):
            model.get_submodule(name)(torch.tensor(x)).backward()
        optimizer.step()
    grads = [param.grad.item() for param in model.parameters() if param.grad is not None]
    assert grads == pytest.approx([0.6, 0.8, 100.0])
    assert [entry.all_fired for entry in live.ledger] == [1, 1, 0]
    rows = live.effects.rows()
    assert [(row["site"], row["sampled"]) for row in rows] == [
        ("a.w", 1),
        ("b.w", 1),
        ("deep.c.w", 0),
    ]


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x
