"""SavedTensors: backward computes with the transformed tensors of the forward."""

import gc
import math
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.utils import parametrizations

import gradsurg as gs
from gradsurg.torch_internals import autograd
from tests.nets import attached, batch
from tests.sites.points import TEN, Acts, Made, grad_of, passed, point, recomputed

DOUBLE = gs.Scale(2.0)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x * 2, torch.ones(1, dtype=torch.long))
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, twice, ones = ctx.saved_tensors
        return grads[0] * (x + twice + ones)


def _saved(inner: nn.Module, reentrant: bool) -> Made:
    return Made(lambda self, x: recomputed(self.inner, x, reentrant), inner=inner)


@pytest.mark.parametrize(
    ("model", "at", "x", "grad", "sites"),
    [
        # x is saved twice, for each factor: 30 + 30.
        (nn.Sequential(Square()), gs.SavedTensors("0"), 3.0, 60.0, ["0#0.0", "0#0.1"]),
        # The weight changes the gradient that goes on, if it is asked for.
        (
            nn.Sequential(nn.Linear(1, 1, bias=False)),
            gs.SavedTensors("0", of="parameters"),
            3.0,
            50.0,
            ["0#0.0"],
        ),
        # d exp(x^2): exp is saved by the outer one, times 10, x twice by the inner one, times 10.
        (
            nn.Sequential(Made(lambda self, x: self.inner(x).exp() * 1.0, inner=Square())),
            gs.SavedTensors(),
            1.0,
            100 * 2 * math.e,
            ["0.inner#0.0", "0.inner#0.1", "0#0.0"],
        ),
        # x + 2x + 1, with 10 times the two that are floating.
        (
            nn.Sequential(Made(lambda self, x: Function.apply(x))),
            gs.SavedTensors(node="Function"),
            1.0,
            31.0,
            ["0#0/FunctionBackward[0].tensors.0", "0#0/FunctionBackward[0].tensors.1"],
        ),
    ],
)
def test_backward_reads_the_transformed_tensors(
    model: nn.Module, at: gs.SavedTensors, x: float, grad: float, sites: list[str]
) -> None:
    for param in model.parameters():
        nn.init.constant_(param, 5.0)
    found, calls = passed(model, TEN, at, point(x))
    assert found == pytest.approx([grad])
    assert calls == dict.fromkeys(sites, 1)


def test_parameters_views_of_them_and_buffers_are_left_alone_unless_asked_for() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Conv1d(1, 1, 2))

    def run(of: Any) -> list[tuple[int, ...]]:
        shapes = []
        look = Acts(lambda grad: shapes.append(tuple(grad.shape)) or grad)
        with attached(model, look, gs.SavedTensors(of=of)):
            x = batch()[0].requires_grad_()
            model[2](model[1](model[0](x))[:, None]).sum().backward()
        return sorted(shapes)

    # Inputs of the three, and the mean and deviation of the batch.
    assert run("activations") == [(5,), (5,), (8, 1, 5), (8, 5), (8, 6)]
    assert run("parameters") == [(1, 1, 2), (5,), (6, 5)]
    model.requires_grad_(False)
    assert run("parameters") == [(1, 1, 2), (5,), (6, 5)]
    assert run("all") == sorted(run("parameters") + run("activations"))
    model.eval()  # the running statistics are saved, too
    assert (5,) not in run("activations")


@pytest.mark.parametrize(
    ("at", "site"),
    [
        (gs.SavedTensors("0"), r"0#0\.0"),
        (gs.SavedTensors("block"), "block"),
        (gs.SavedTensors(node="Exp"), r"0#0/ExpBackward\[0\]\.result"),
        (gs.SavedTensors(node="Exp"), ""),  # changed before its node is hooked
    ],
)
def test_a_saved_tensor_changed_in_place_is_refused_as_by_pytorch(
    at: gs.SavedTensors, site: str
) -> None:
    model = nn.Sequential(Made(lambda self, x: x.exp() if site else x.exp().add_(1.0)))
    message = "modified by an inplace" + (f" .*at site '{site}'" if site else "")
    with pytest.raises(RuntimeError, match=message), attached(model, DOUBLE, at):
        y = model(point(3.0))
        y.add_(1.0)
        y.sum().backward()


def test_a_weight_changed_between_forward_and_backward_is_refused_even_if_it_is_no_site() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with attached(model, DOUBLE, gs.SavedTensors("0")):
        y = model(point(3.0))
        with torch.no_grad():
            model[0].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_it_may_be_read_under_create_graph_where_nothing_is_changed() -> None:
    model, x = nn.Sequential(Square()), point(3.0)
    with attached(model, gs.Identity(), gs.SavedTensors("0")):
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert (first.tolist(), second.tolist()) == ([6.0], [2.0])


def test_a_foreign_hook_that_raises_before_a_module_leaves_no_hooks_active() -> None:
    def refuse(module: nn.Module, args: object) -> None:
        raise OSError("gone")

    square = Square()
    model = nn.Sequential(nn.Sequential(square))
    handle = square.register_forward_pre_hook(refuse)
    with attached(model, TEN, gs.SavedTensors()):
        with pytest.raises(OSError, match="gone"):
            model(point(3.0))
        assert autograd.saved_tensor_hooks() is None
        handle.remove()
        x = point(3.0)
        model(x).sum().backward()
    assert grad_of(x) == [60.0]


def test_an_interrupted_forward_leaves_no_hooks_active_in_the_next_one() -> None:
    def interrupt(module: nn.Module, args: object) -> None:
        raise KeyboardInterrupt

    model = nn.Sequential(Square())
    with attached(model, TEN, gs.SavedTensors()):
        handle = model[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(point(3.0))
        handle.remove()
        x = point(3.0)
        model(x).sum().backward()
        assert autograd.saved_tensor_hooks() is None
    assert grad_of(x) == [60.0]


# Other hooks for saved tensors.


@pytest.mark.usefixtures("frozen_heap")
def test_a_checkpoint_still_saves_memory() -> None:
    first = nn.Tanh()
    model = _saved(nn.Sequential(first, nn.Tanh(), nn.Tanh()), False)
    held: list[ref[Tensor]] = []

    def hold(module: nn.Module, args: object, output: Tensor) -> None:
        held.append(ref(output))

    first.register_forward_hook(hold)
    with attached(model, DOUBLE, gs.SavedTensors("inner.*")):
        y = model(point(0.5))
        gc.collect()
        assert held[0]() is None
        y.sum().backward()


@pytest.mark.parametrize("outside", [True, False])
def test_foreign_saved_tensor_hooks_stay_active(outside: bool) -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach() + 1.0

    model, x = nn.Sequential(Square()), point(3.0)
    others = saved_tensors_hooks(pack, lambda tensor: tensor)
    surgery = attached(model, TEN, gs.SavedTensors("0"))
    # (3 + 1) * 10 + (3 + 1) * 10.
    first, second = (others, surgery) if outside else (surgery, others)
    with first, second:
        model(x).sum().backward()
    assert grad_of(x) == [80.0]
    assert len(packed) >= 2


# The block.


def test_the_block_pattern_is_limited_to_its_thread_and_modules_are_not() -> None:
    model, x = nn.Sequential(Square()), point(3.0)

    def work() -> None:
        model(x).sum().backward()

    both = (
        gs.Intervention(TEN, gs.SavedTensors("block")),
        gs.Intervention(DOUBLE, gs.SavedTensors("0")),
    )
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed at: block"),
        gs.Surgery(*both).attach(model, effects_every=0),
    ):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert grad_of(x) == [12.0]


# Nodes.


def _several(self: Made, x: Tensor) -> Tensor:
    y = Function.apply(x)
    assert isinstance(y, Tensor)
    return y.tanh() + y.relu() + nn.functional.layer_norm(y, (2,))


@pytest.mark.parametrize(
    ("node", "sites"),
    [
        ("Relu", ["several#0/ReluBackward[0].result"]),
        ("re:Tanh|Relu", ["several#0/TanhBackward[0].result", "several#0/ReluBackward[0].result"]),
        ("Function", ["several#0/FunctionBackward[0].tensors.0", None]),
        ("norm", ["several#0/NativeLayerNormBackward[0].input", None, None]),
    ],
)
def test_nodes_are_selected_by_name_and_family(node: str, sites: list[str | None]) -> None:
    model, at = nn.Sequential(), gs.SavedTensors("several", node=node)
    model.several = Made(_several)
    _, calls = passed(model, DOUBLE, at, point(0.5, -1.0))
    assert len(calls) == len(sites)
    assert {site for site in sites if site} <= set(calls)
    assert set(calls.values()) == {1}


# Parameters and activations.

IN, MIDDLE, OUT, BATCH = 4, 3, 2, 5
FLOWS = {(BATCH, IN), (BATCH, MIDDLE)}
WEIGHT = {(OUT, MIDDLE), (MIDDLE, OUT)}  # a linear layer saves its weight transposed


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, MIDDLE), nn.Tanh(), nn.Linear(MIDDLE, OUT))


def _shapes(at: gs.SavedTensors, model: nn.Module, call: Callable[[Tensor], Tensor]) -> set[Any]:
    seen: set[Any] = set()
    with attached(model, Acts(lambda grad: seen.add(tuple(grad.shape)) or grad), at):
        call(torch.ones(BATCH, IN, requires_grad=True)).float().sum().backward()
    return seen


@pytest.mark.parametrize(
    "given",
    [
        lambda param: param,
        lambda param: param.requires_grad_(False),
        lambda param: param.detach().clone().requires_grad_(),
        lambda param: param.detach().clone(),
        lambda param: param * 1.5,  # fast weights, and weights of a hyper-network
    ],
    ids=["own", "frozen", "leaf", "frozen leaf", "computed"],
)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("at", [{}, {"node": "*"}, {"pattern": "block"}], ids=str)
def test_a_tensor_in_place_of_a_weight_is_a_parameter(at, autocast, given) -> None:
    def call(x: Tensor) -> Tensor:
        weights = {name: given(param) for name, param in model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return functional_call(model, weights, (x,))

    def call_last(x: Tensor) -> Tensor:
        weights = {name: given(param) for name, param in model[2].named_parameters()}
        return functional_call(model[2], weights, (model[1](model[0](x)),))

    model = _layers()
    assert (BATCH, MIDDLE) in _shapes(gs.SavedTensors(**at), model, call) <= FLOWS
    assert WEIGHT & _shapes(gs.SavedTensors(**at, of="parameters"), model, call)
    if "node" not in at:  # its nodes are hooked when the model returns
        assert _shapes(gs.SavedTensors(**at), model, call_last) <= FLOWS


def test_a_parametrized_weight_is_an_activation_with_a_warning() -> None:
    model = _layers()
    parametrizations.weight_norm(model[2])
    with pytest.warns(gs.SurgeryWarning, match="a parametrization computes are taken for act"):
        assert WEIGHT & _shapes(gs.SavedTensors("2"), model, model)
