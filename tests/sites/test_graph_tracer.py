"""Tracer: the module call in which each autograd node was made."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.sites.graph_tracer import CallGraph, Tracer, around, plain
from gradsurg.sites.selection import names_of
from tests.nets import attached, num_hooks, small
from tests.sites.points import Double, Made, point


def _functional() -> Made:
    """ReLUs without modules, in two modules."""
    inner = Made(lambda self, x: functional.relu(self.linear(x)), linear=nn.Linear(3, 4))
    return Made(
        lambda self, x: self.out(functional.relu(self.inner(x) - 0.1)).sum(),
        inner=inner,
        out=nn.Linear(4, 1),
    )


def _traced(
    model: nn.Module, *inputs: tuple[object, ...], since: Sequence[nn.Module] = ()
) -> list[CallGraph]:
    """Return the graph of each call of a model with one of the inputs."""
    taken: list[CallGraph] = []
    with ExitStack() as stack:
        Tracer().follow(model, list(model.modules()), taken.append, stack, since=since)
        for given in inputs:
            model(*given)
    assert num_hooks(model) == 0
    return taken


def _ids(graph: CallGraph) -> list[str]:
    return [spot.id for _, spot in graph.nodes()]


def test_every_node_belongs_to_its_innermost_module() -> None:
    taken: list[CallGraph] = []
    model = _functional()
    with ExitStack() as stack:
        Tracer().follow(model, list(model.modules()), taken.append, stack)
        x = torch.ones(2, 3, requires_grad=True) * 2
        model(x)
        model.inner(x)
    whole, part = taken
    assert (whole.whole, part.whole) == (True, False)
    assert _ids(whole) == [
        "inner.linear#0/TBackward[0]",
        "inner.linear#0/AddmmBackward[0]",
        "inner#0/ReluBackward[0]",
        "root#0/SubBackward[0]",
        "root#0/ReluBackward[0]",
        "out#0/TBackward[0]",
        "out#0/AddmmBackward[0]",
        "root#0/SumBackward[0]",
    ]
    assert _ids(part) == _ids(whole)[:3]
    assert num_hooks(model) == 0


def test_a_call_is_the_same_object_at_every_step() -> None:
    taken = _traced(small(), *[(torch.ones(1, 6),)] * 2)
    calls, more_calls = ([spot.call for _, spot in graph.nodes()] for graph in taken)
    assert all(a is b for a, b in zip(calls, more_calls, strict=True))


def _way(self: Made, x: Tensor, way: str) -> Tensor:
    """Goes one of several ways: all call the same module and make as many nodes."""
    match way:
        case "relu":
            return self.inner(x.relu()).exp()
        case "tanh":
            return self.inner(x.tanh()).exp()
        case _:
            return self.inner(x).relu().exp()


def test_a_forward_with_other_nodes_in_the_same_calls_is_traced_anew() -> None:
    x = point()
    ways = ("relu", "relu", "tanh", "late", "relu")
    taken = _traced(Made(_way, inner=Double()), *[(x, way) for way in ways])
    relu = ["root#0/ReluBackward[0]", "inner#0/MulBackward[0]", "root#0/ExpBackward[0]"]
    tanh = ["root#0/TanhBackward[0]", *relu[1:]]
    late = [relu[1], relu[0], relu[2]]
    assert [_ids(graph) for graph in taken] == [relu, relu, tanh, late, relu]


def test_a_node_made_in_another_call_is_traced_anew() -> None:
    """The same nodes with the same numbers: only where the inner call stands among them differs."""
    model = Made(
        lambda self, x, early: self.inner(x).tanh() if early else self.inner(x.tanh()),
        inner=nn.Tanh(),
    )
    early = ["inner#0/TanhBackward[0]", "root#0/TanhBackward[0]"]
    taken = _traced(model, (point(), True), (point(), False))
    assert [_ids(graph) for graph in taken] == [early, early[::-1]]


def test_a_forward_without_gradients_gives_no_graph() -> None:
    with torch.no_grad():
        assert not _traced(small(), (torch.ones(1, 6),))


def test_nodes_before_the_first_selected_call_are_left_out() -> None:
    model = small()
    (graph,) = _traced(model, (torch.ones(1, 6),), since=[model.act])
    late = ["act#0/ReluBackward[0]", "last#0/TBackward[0]", "last#0/AddmmBackward[0]"]
    assert _ids(graph) == late


def test_all_overloads_of_a_wanted_name_are_included() -> None:
    model = Made(lambda self, x: torch.ops.aten.mul.Scalar(x * x, 3.0).sum())
    (graph,) = _traced(model, (point(),))
    nodes = [(spot.name, spot.occurrence) for _, spot in graph.nodes("MulBackward1".__eq__)]
    assert nodes == [("MulBackward0", 0), ("MulBackward1", 1)]


@pytest.mark.parametrize(
    ("chosen", "inside", "followed"),
    [
        ("inner", True, ["root", "inner", "inner.linear"]),
        ("inner", False, ["root", "inner"]),
        ("inner.linear", True, ["root", "inner", "inner.linear"]),
        ("out", True, ["root", "out"]),
        ("root", True, ["root", "inner", "inner.linear", "out"]),
        ("root", False, ["root"]),
    ],
)
def test_only_modules_around_or_inside_the_selected_ones_are_followed(
    chosen, inside, followed
) -> None:
    model = _functional()
    names = names_of(model)
    (module,) = (module for module, (name,) in names.items() if name == chosen)
    modules = around(names, [module], inside)
    assert [names[module][0] for module in modules] == followed


def test_only_followed_modules_get_hooks_and_none_if_no_node_is_selected() -> None:
    model = _functional()
    with attached(model, gs.Identity(), gs.Nodes("Addmm", module="out")):
        assert not model.inner._forward_hooks
        assert not model.inner.linear._forward_pre_hooks
        assert model.out._forward_hooks
        model(torch.ones(2, 3)).backward()
    with attached(model, gs.Identity()):
        assert not any(module._forward_hooks for module in model.modules())
        model(torch.ones(2, 3)).backward()


def test_a_name_loses_its_overload_and_its_namespace() -> None:
    assert plain("MulBackward0") == plain("MulBackward12") == "MulBackward"
    assert plain("torch::autograd::CopySlices") == "CopySlices"
    assert plain("HalveBackward") == "HalveBackward"
    assert plain("GeluBackwardBackward0") == "GeluBackwardBackward"
    assert plain("SoftmaxBackwardDataBackward0") == "SoftmaxBackwardDataBackward"
    assert plain("SumBackwardAutogradNestedTensor0") == "SumBackward"
    assert plain("TBackward0_copy") == "TBackward"
