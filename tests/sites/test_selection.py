"""Selection: fields of selectors, the errors if they select nothing, and one scan of a model."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs
from gradsurg.sites.calls import modules_of
from gradsurg.sites.places import Selector
from gradsurg.sites.selection import one_scan
from gradsurg.sites.selectors import params_of
from tests.nets import attached, small
from tests.sites.points import met


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.LayerNorm(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.extra = nn.ParameterList([torch.zeros(4), torch.zeros(2, 3)])


IN_BLOCKS = [f"blocks.{i}.{j}.{name}" for i in "01" for j in "01" for name in ("weight", "bias")]
EVERY = ["scale", *IN_BLOCKS, "extra.0", "extra.1"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"types": "Linear"}, [1, 2, 5, 6]),
        ({"types": nn.Linear}, [1, 2, 5, 6]),
        ({"types": nn.Sequential, "depth": 2}, []),
        ({"types": "L*"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"types": "re:Linear|ParameterList"}, [1, 2, 5, 6, 9, 10]),
        ({"types": Net}, [0]),
        ({"depth": 0}, [0]),
        ({"depth": (0, 1)}, [0, 9, 10]),
        ({"depth": [3, 9]}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"index": 0}, [1, 2, 5, 6, 9]),
        ({"index": 1, "pattern": "blocks.0.*"}, [3, 4]),
        ({"ndim": 0}, [0]),
        ({"ndim": 2}, [1, 5, 10]),
        ({"size": (4, 6)}, [1, 5, 9, 10]),
        ({"types": "Linear", "ndim": 1, "pattern": "re:.*1.*"}, [6]),
    ],
)
def test_fields_select_by_type_depth_index_and_shape(
    fields: dict[str, Any], expected: list[int]
) -> None:
    if not expected:
        with pytest.raises(LookupError, match=re.escape("nothing matches '*' with 'types=Seq")):
            gs.Parameters(**fields).find(Net())
        return
    assert gs.Parameters(**fields).find(Net()) == [EVERY[number] for number in expected]


def test_a_base_class_selects_its_subclasses() -> None:
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(Mine(2, 2), nn.Linear(2, 2))
    assert gs.Parameters(types=nn.Linear).find(model) == gs.Parameters().find(model)
    assert gs.Parameters(types=Mine).find(model) == ["0.weight", "0.bias"]


# The error if nothing is selected


def _exported() -> nn.Module:
    return torch.export.export(small(), (torch.ones(2, 6),)).module()


@pytest.mark.parametrize(
    ("at", "sites"),
    [
        (gs.Captured("first*"), {"first.weight", "first.bias"}),
        (gs.Nodes("Relu"), {"root#0/ReluBackward[0]"}),
        (gs.SavedTensors("root", node="Relu"), {"root#0/ReluBackward[0].result"}),
        (gs.Parameters("last.bias"), {"last.bias"}),
        (gs.Uses("last.bias"), {"last.bias/use[0]"}),
    ],
    ids=lambda value: repr(sorted(value) if isinstance(value, set) else value),
)
def test_nodes_and_parameters_of_an_exported_model_act(at: Selector, sites: set[str]) -> None:
    model = _exported()
    with attached(model, gs.Identity(), at) as live:
        torch.autograd.grad(model(torch.ones(2, 6)).sum(), [*model.parameters()])
    assert met(live).keys() == sites


@pytest.mark.parametrize("at", [gs.Outputs("first"), gs.Nodes("Relu")], ids=str)
def test_an_intervention_added_after_compilation_is_told_of_it(at: Selector) -> None:
    model, x = torch.compile(small(), backend="eager"), torch.ones(2, 6)
    text = r"^zero: .*\. Was the model compiled\? Attach before"
    with (
        pytest.warns(gs.SurgeryWarning, match=text),
        attached(model, gs.Scale(0.5)) as live,  # pyright: ignore[reportArgumentType] - a module
    ):
        model(x).sum().backward()
        live.add(gs.Intervention(gs.Zero(), at))
        model(x).sum().backward()


# One scan


def test_a_model_is_scanned_once_while_a_surgery_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(64)))
    scans: list[int] = []
    plain = nn.Module.named_modules
    monkeypatch.setattr(
        nn.Sequential, "named_modules", lambda *a, **k: scans.append(1) or plain(*a, **k)
    )

    def scans_with(number: int, kind: Callable[[str], Selector]) -> int:
        scans.clear()
        sites = [gs.Intervention(gs.Scale(0.5), kind(f"{i}*")) for i in range(number)]
        gs.Surgery(*sites).start(model).abort()
        return len(scans)

    for kind in (gs.Parameters, gs.Outputs, gs.Nodes):
        at = (lambda name: gs.Nodes("Addmm", name)) if kind is gs.Nodes else kind
        assert scans_with(9, at) <= scans_with(1, at) + 8  # the hooks of the model may ask again


def test_a_model_is_scanned_once_for_all_kinds() -> None:
    model = Net()
    with one_scan(model):
        assert params_of(model) is params_of(model)
        assert modules_of(model) is modules_of(model)
    assert params_of(model) is not params_of(model)
