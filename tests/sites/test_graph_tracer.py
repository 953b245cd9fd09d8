"""Tracer: the module call in which each autograd node was made."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.sites.graph_tracer import CallGraph, Tracer, around, plain
from gradsurg.sites.selection import names_of
from tests.nets import num_hooks, small
from tests.sites.points import Double, Made, point


def _functional() -> Made:
    """ReLUs without modules, in two modules."""
    inner = Made(lambda self, x: functional.relu(self.linear(x)), linear=nn.Linear(3, 4))
    return Made(
        lambda self, x: self.out(functional.relu(self.inner(x) - 0.1)).sum(),
        inner=inner,
        out=nn.Linear(4, 1),
    )


def _traced(model: nn.Module, *inputs: tuple[object, ...]) -> list[CallGraph]:
    """Return the graph of each call of a model with one of the inputs."""
    taken: list[CallGraph] = []
    with ExitStack() as stack:
        Tracer().follow(model, list(model.modules()), taken.append, stack)
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


def _way(self: Made, x: Tensor, way: str) -> Tensor:
    """Goes one of several ways: all call the same module and make as many nodes."""
    return {
        "relu": lambda: self.inner(x.relu()).exp(),
        "tanh": lambda: self.inner(x.tanh()).exp(),
        "late": lambda: self.inner(x).relu().exp(),
    }[way]()


def test_a_forward_with_other_nodes_in_the_same_calls_is_traced_anew() -> None:
    x = point()
    ways = ("relu", "relu", "tanh", "late", "relu")
    taken = _traced(Made(_way, inner=Double()), *[(x, way) for way in ways])
    relu = ["root#0/ReluBackward[0]", "inner#0/MulBackward[0]", "root#0/ExpBackward[0]"]
    tanh = ["root#0/TanhBackward[0]", *relu[1:]]
    late = [relu[1], relu[0], relu[2]]
    assert [_ids(graph) for graph in taken] == [relu, relu, tanh, late, relu]


def test_a_forward_without_gradients_gives_no_graph() -> None:
    with torch.no_grad():
        assert not _traced(small(), (torch.ones(1, 6),))


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MulBackward12", "MulBackward"),
        ("torch::autograd::CopySlices", "CopySlices"),
        ("HalveBackward", "HalveBackward"),
        ("GeluBackwardBackward0", "GeluBackwardBackward"),
        ("SoftmaxBackwardDataBackward0", "SoftmaxBackwardDataBackward"),
        ("SumBackwardAutogradNestedTensor0", "SumBackward"),
        ("TBackward0_copy", "TBackward"),
    ],
)
def test_a_name_loses_its_overload_and_its_namespace(name: str, expected: str) -> None:
    assert plain(name) == expected


def test_an_interrupted_call_does_not_hide_the_next_one() -> None:
    def forward(self: Made, x: Tensor, interrupt: bool) -> Tensor:
        if interrupt:
            raise KeyboardInterrupt
        return x * 2

    taken: list[CallGraph] = []
    model, x = Made(forward), point()
    with ExitStack() as stack:
        Tracer().follow(model, [model], taken.append, stack)
        with pytest.raises(KeyboardInterrupt):
            model(x, True)
        model(x, False)
    assert [_ids(graph) for graph in taken] == [["root#0/MulBackward[0]"]]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("record", [torch.jit.trace, torch.export.export])
def test_a_recorded_call_is_ignored(record: Callable[..., object]) -> None:
    taken: list[CallGraph] = []
    model, x = small(), torch.ones(1, 6)
    with ExitStack() as stack:
        Tracer().follow(model, list(model.modules()), taken.append, stack)
        record(model, (x,))
        assert not taken
        model(x)
    assert len(taken) == 1
