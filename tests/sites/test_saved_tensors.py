"""SavedTensors: backward computes with what the transform makes of what the forward has saved."""

import gc
import threading
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty
from tests.nets import (
    attached,
    backward,
    batch,
    gradients,
    noisy,
    num_hooks,
    sgd,
    small,
    train,
    weights,
)
from tests.sites.points import grad_of


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Saved(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return y


def _x(*values: float) -> Tensor:
    return torch.tensor(values or (3.0,), requires_grad=True)


def _calls(live: gs.Live) -> dict[str, int]:
    return {entry.site: entry.calls for entry in live.ledger if not entry.skipped}


def test_backward_reads_the_transformed_tensor_and_the_forward_is_unchanged() -> None:
    model, x = nn.Sequential(Square()), _x()
    with attached(model, gs.Scale(10.0), gs.SavedTensors("0")) as live:
        y = model(x)
        y.sum().backward()
    assert y.tolist() == [9.0]
    # x is saved twice, for each factor: 30 + 30.
    assert grad_of(x) == [60.0]
    assert _calls(live) == {"0#0.0": 1, "0#0.1": 1}


def test_a_quantised_activation_changes_only_the_gradient_of_the_next_weight() -> None:
    plain, model = small(), small()
    backward(plain)
    hidden = plain.act(plain.first(batch()[0])).detach()
    with attached(model, gs.Scale(2.0), gs.SavedTensors("last")) as live:
        backward(model)
    ours, theirs = gradients(model), gradients(plain)
    assert hidden.any()
    torch.testing.assert_close(ours["last.weight"], 2 * theirs["last.weight"])
    for name in ("last.bias", "first.weight", "first.bias"):
        assert torch.equal(ours[name], theirs[name])
    assert _calls(live) == {"last#0.0": 1}


@pytest.mark.parametrize(
    "at",
    [
        gs.SavedTensors(),
        gs.SavedTensors("root", of="all"),
        gs.SavedTensors("block"),
        gs.SavedTensors(node="*", of="all"),
    ],
    ids=["modules", "root", "block", "nodes"],
)
@pytest.mark.parametrize("shadow", [False, True])
def test_a_no_op_is_bit_identical(at: gs.SavedTensors, shadow: bool) -> None:
    plain, model = noisy(), noisy()
    torch.manual_seed(0)
    train(plain, sgd(plain), 3)
    torch.manual_seed(0)
    optimizer = sgd(model)
    transform = gs.Scale(3.0) if shadow else gs.Identity()
    with attached(model, transform, at, optimizer, shadow=shadow) as live:
        train(model, optimizer, 3)
    for ours, theirs in zip(weights(model), weights(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert sum(_calls(live).values()) >= 3 * 4


def test_a_saved_tensor_belongs_to_the_innermost_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Square()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).exp() * 1.0

    model, x = nn.Sequential(Outer()), _x(1.0)
    with attached(model, gs.Scale(10.0), gs.SavedTensors()) as live:
        model(x).sum().backward()
    # d exp(x^2) / dx: exp is saved by the outer one, times 10, x twice by the inner one, times 10.
    torch.testing.assert_close(x.grad, 100 * 2 * torch.tensor([1.0]).exp())
    assert _calls(live) == {"0.inner#0.0": 1, "0.inner#0.1": 1, "0#0.0": 1}


def test_a_module_that_saves_nothing_is_only_noted_in_the_ledger() -> None:
    model = nn.Sequential(nn.Flatten(), Square())
    with attached(model, gs.Identity(), gs.SavedTensors()) as live:
        model(_x()[None]).sum().backward()
    assert "0#0  (saves no such tensor of its own)" in live.ledger.table()
    with (
        pytest.warns(gs.SurgeryWarning, match=r"no gradient ever passed at: 0#0 \(saves no such"),
        attached(model, gs.Identity(), gs.SavedTensors("0")),
    ):
        model(_x()[None])


def test_calls_have_their_own_sites_and_call_picks_one() -> None:
    square = Square()
    model, x = nn.Sequential(square, square), _x(1.0)
    with attached(model, gs.Scale(10.0), gs.SavedTensors("1")) as live:
        model(x).sum().backward()
    # The module goes by its two names in turn. d x^4 = 4, and the second call's part times 10.
    assert grad_of(x) == [40.0]
    assert _calls(live) == {"1#0.0": 1, "1#0.1": 1}


def test_combined_selectors_choose_modules() -> None:
    model = small()
    at = (gs.SavedTensors("first") | gs.SavedTensors("act")) & ~gs.SavedTensors("first")
    with attached(model, gs.Scale(2.0), at) as live:
        backward(model)
    assert _calls(live) == {"act#0.0": 1}
    with attached(model, gs.Scale(2.0), gs.SavedTensors().first(2)) as live:
        backward(model)
    assert set(_calls(live)) == {"first#0.0", "act#0.0"}


def test_two_interventions_act_one_after_the_other() -> None:
    model, x = nn.Sequential(Square()), _x()
    surgery = gs.Surgery(
        gs.Intervention(gs.Clip(2.0), gs.SavedTensors("0")),
        gs.Intervention(gs.Scale(10.0), gs.SavedTensors("0")),
    )
    with surgery.attach(model):
        model(x).sum().backward()
    assert grad_of(x) == [40.0]


# What.


def test_parameters_views_of_them_and_buffers_are_left_alone_unless_asked_for() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Conv1d(1, 1, 2))

    def run(at: gs.SavedTensors) -> list[tuple[int, ...]]:
        shapes = []

        class Shape(Stateless):
            @property
            def properties(self) -> frozenset[TransformProperty]:
                return frozenset()

            def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
                shapes.append(tuple(grad.shape))
                return grad

        with attached(model, Shape(), at):
            x = batch()[0].requires_grad_()
            model[2](model[1](model[0](x))[:, None]).sum().backward()
        return sorted(shapes)

    # Inputs of the three, and the mean and deviation of the batch.
    assert run(gs.SavedTensors()) == [(5,), (5,), (8, 1, 5), (8, 5), (8, 6)]
    assert run(gs.SavedTensors(of="parameters")) == [(1, 1, 2), (5,), (6, 5)]
    frozen = model.requires_grad_(False)
    assert run(gs.SavedTensors(of="parameters")) == [(1, 1, 2), (5,), (6, 5)]
    assert run(gs.SavedTensors(of="all")) == sorted(
        run(gs.SavedTensors(of="parameters")) + run(gs.SavedTensors())
    )
    assert not any(param.requires_grad for param in frozen.parameters())


def test_asked_for_the_saved_weights_change_the_gradient_that_goes_on() -> None:
    model, x = nn.Sequential(nn.Linear(1, 1, bias=False)), _x()
    nn.init.constant_(model[0].weight, 5.0)
    with attached(model, gs.Scale(10.0), gs.SavedTensors("0", of="parameters")):
        model(x).sum().backward()
    assert grad_of(x) == [50.0]
    assert gradients(model)["0.weight"].tolist() == [[3.0]]


def test_integer_tensors_are_left_alone() -> None:
    model, x = nn.Sequential(nn.MaxPool1d(2)), torch.randn(1, 1, 4, requires_grad=True)
    with attached(model, gs.Zero(), gs.SavedTensors("0", of="all")) as live:
        model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == 2.0
    assert _calls(live) == {"0#0.0": 1}


@pytest.mark.parametrize(("of", "norm"), [("activations", 6**0.5), ("parameters", 8.0)])
def test_under_autocast_the_cast_of_a_trainable_weight_is_a_parameter(of: Any, norm: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    nn.init.constant_(model[0].weight, 4.0)
    at = gs.SavedTensors("0", of=of)
    with attached(model, gs.Scale(2.0), at) as live, torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(3, 2, requires_grad=True))
        y.float().sum().backward()
    assert _calls(live) == {"0#0.0": 1}
    assert y.dtype is torch.bfloat16
    (row,) = live.effects.rows()
    assert row["norm_before"] == pytest.approx(norm)


# Safety.


@pytest.mark.parametrize(
    ("at", "site"),
    [
        (gs.SavedTensors("0"), r"0#0\.0"),
        (gs.SavedTensors("block"), "block"),
        (gs.SavedTensors(node="Exp"), r"0#0/ExpBackward\[0\]\.result"),
    ],
    ids=["module", "block", "node"],
)
def test_a_saved_tensor_changed_in_place_is_refused_as_by_pytorch(
    at: gs.SavedTensors, site: str
) -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = nn.Sequential(Exp())
    with (
        pytest.raises(RuntimeError, match=f"modified by an inplace .*at site '{site}'"),
        attached(model, gs.Scale(2.0), at),
    ):
        y = model(_x())
        y.add_(1.0)
        y.sum().backward()


def test_a_tensor_changed_in_place_before_its_node_is_hooked_is_refused_too() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y.add_(1.0)

    model = nn.Sequential(Exp())
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        attached(model, gs.Scale(2.0), gs.SavedTensors(node="Exp")),
    ):
        model(_x()).sum().backward()


def test_a_weight_changed_between_forward_and_backward_is_refused_even_if_it_is_no_site() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with attached(model, gs.Scale(2.0), gs.SavedTensors("0")):
        y = model(_x())
        with torch.no_grad():
            model[0].weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_transform_that_changes_the_shape_is_refused_by_site() -> None:
    class First(Stateless):
        @property
        def properties(self) -> frozenset[TransformProperty]:
            return frozenset()

        def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
            return grad[:1]

    model = nn.Sequential(Square())
    with (
        pytest.raises(TypeError, match=r"At site '0#0\.0'"),
        attached(model, First(), gs.SavedTensors("0")),
    ):
        model(_x(1.0, 2.0)).sum().backward()


def test_a_double_backward_is_refused_where_the_transform_acts() -> None:
    model, x = nn.Sequential(Square()), _x()
    with attached(model, gs.Scale(2.0), gs.SavedTensors("0")):
        y = model(x).sum()
        with pytest.raises(RuntimeError, match=r"site '0#0\.[01]' is read back under create_graph"):
            torch.autograd.grad(y, x, create_graph=True)
        y.backward()
        assert grad_of(x) == [12.0]
    with attached(model, gs.Identity(), gs.SavedTensors("0")):
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert (first.tolist(), second.tolist()) == ([6.0], [2.0])


def test_it_is_read_back_and_counted_in_each_backward() -> None:
    model, x = nn.Sequential(nn.Tanh()), _x(0.5)
    with attached(model, gs.Scale(2.0), gs.SavedTensors("0")) as live:
        y = model(x).sum()
        y.backward(retain_graph=True)
        y.backward()
    assert _calls(live) == {"0#0.0": 2}
    # tanh' = 1 - (2 tanh)^2, twice.
    torch.testing.assert_close(x.grad, 2 * (1 - (2 * torch.tanh(torch.tensor([0.5]))) ** 2))


def test_reading_a_saved_tensor_outside_backward_returns_it_unchanged() -> None:
    model = nn.Sequential(nn.Tanh())
    with (
        pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"),
        attached(model, gs.Zero(), gs.SavedTensors("0")) as live,
    ):
        y = model(_x())
        node: Any = y.grad_fn
        assert torch.equal(node._saved_result, y)
    assert _calls(live) == {"0#0.0": 0}


def test_a_backward_after_the_block_reads_the_saved_tensors_unchanged() -> None:
    for at in (gs.SavedTensors("0"), gs.SavedTensors("block"), gs.SavedTensors(node="Mul")):
        model, x = nn.Sequential(Square()), _x()
        with (
            pytest.warns(gs.SurgeryWarning, match="no gradient ever passed"),
            attached(model, gs.Scale(2.0), at),
        ):
            y = model(x).sum()
        y.backward()
        assert grad_of(x) == [6.0]


@pytest.mark.parametrize("at", [gs.SavedTensors(), gs.SavedTensors("block"), None])
def test_nothing_is_kept_alive(at: gs.SavedTensors | None) -> None:
    model = nn.Sequential(nn.Tanh(), Square())
    with attached(model, gs.Scale(2.0), at or gs.SavedTensors(node="*")) as live:
        x = _x()
        for reads in (False, True):
            h = model[0](x)
            y = model(h)
            held = [ref(h), ref(y)]
            if reads:
                y.sum().backward()
            del h, y
            gc.collect()
            assert [reference() for reference in held] == [None, None]
        outlives = model(x)
    held = [ref(model)]
    del model
    gc.collect()
    assert held[0]() is None
    outlives.sum().backward()
    assert live.ledger


def test_hooks_are_gone_after_the_block_and_after_an_exception() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise OSError("gone")

    for at in (gs.SavedTensors("*"), gs.SavedTensors("block"), gs.SavedTensors(node="*")):
        model = nn.Sequential(nn.Sequential(Square(), Breaks()))
        before = num_hooks(model)
        with pytest.raises(OSError, match="gone"), attached(model, gs.Zero(), at):
            model(_x())
        assert num_hooks(model) == before
        assert autograd.saved_tensor_hooks() is None


def test_an_interrupted_forward_leaves_no_hooks_active() -> None:
    class Breaks(nn.Module):
        stops = True

        def forward(self, x: Tensor) -> Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return x * x

    breaks, x = Breaks(), _x()
    model = nn.Sequential(nn.Sequential(breaks))
    with attached(model, gs.Scale(10.0), gs.SavedTensors()):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        breaks.stops = False
        model(x).sum().backward()
        assert grad_of(x) == [60.0]
        assert autograd.saved_tensor_hooks() is None
        breaks.stops = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
    assert autograd.saved_tensor_hooks() is None


def test_a_foreign_hook_that_raises_before_a_module_leaves_no_hooks_active() -> None:
    def refuse(module: nn.Module, args: object) -> None:
        raise OSError("gone")

    square = Square()
    model = nn.Sequential(nn.Sequential(square))
    handle = square.register_forward_pre_hook(refuse)
    with attached(model, gs.Scale(10.0), gs.SavedTensors()):
        with pytest.raises(OSError, match="gone"):
            model(_x())
        assert autograd.saved_tensor_hooks() is None
        handle.remove()
        x = _x()
        model(x).sum().backward()
    assert grad_of(x) == [60.0]


# Other hooks for saved tensors.


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_the_recomputed_tensor_is_transformed(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Tanh(), Square())
    x, z = _x(0.5), _x(0.5)
    with attached(nn.Sequential(inner), gs.Scale(2.0), gs.SavedTensors("0.*")):
        inner(z).sum().backward()
    model = Saved(inner, reentrant)
    with attached(model, gs.Scale(2.0), gs.SavedTensors("inner.*")) as live:
        for _ in range(2):
            x.grad = None
            model(x).sum().backward()
    assert grad_of(x) == grad_of(z)
    assert _calls(live) == {"inner.0#0.0": 2, "inner.1#0.0": 2, "inner.1#0.1": 2}
    torch.testing.assert_close(
        x.grad, 4 * torch.tensor([0.5]).tanh() * (1 - (2 * torch.tensor([0.5]).tanh()) ** 2)
    )


def test_a_checkpoint_still_saves_memory() -> None:
    first = nn.Tanh()
    model = Saved(nn.Sequential(first, nn.Tanh(), nn.Tanh()), False)
    held: list[ref[Tensor]] = []

    def hold(module: nn.Module, args: object, output: Tensor) -> None:
        held.append(ref(output))

    first.register_forward_hook(hold)
    with attached(model, gs.Scale(2.0), gs.SavedTensors("inner.*")):
        y = model(_x(0.5))
        gc.collect()
        assert held[0]() is None
        y.sum().backward()


@pytest.mark.parametrize("outside", [True, False])
def test_foreign_saved_tensor_hooks_stay_active(outside: bool) -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach() + 1.0

    model, x = nn.Sequential(Square()), _x()
    others = saved_tensors_hooks(pack, lambda tensor: tensor)
    surgery = attached(model, gs.Scale(10.0), gs.SavedTensors("0"))
    # (3 + 1) * 10 + (3 + 1) * 10.
    first, second = (others, surgery) if outside else (surgery, others)
    with first, second:
        model(x).sum().backward()
    assert grad_of(x) == [80.0]
    assert len(packed) >= 2


def test_save_on_cpu_and_the_block_together() -> None:
    model, x = nn.Sequential(Square()), _x()
    with save_on_cpu(), attached(model, gs.Scale(10.0), gs.SavedTensors("block")) as live:
        model(x).sum().backward()
    assert grad_of(x) == [60.0]
    assert _calls(live) == {"block": 2}
    assert autograd.saved_tensor_hooks() is None


# The block.


def test_the_block_pattern_selects_all_tensors_saved_while_it_is_open() -> None:
    model, x = nn.Sequential(Square()), _x(1.0)
    with attached(model, gs.Scale(10.0), gs.SavedTensors("block")) as live:
        (model(x) * x).sum().backward()
    # d x^3: y = x^2 and x are saved by the product, x twice by the square: 10 + 10 (10 + 10).
    assert grad_of(x) == [210.0]
    assert _calls(live) == {"block": 4}
    after = _x(1.0)
    model(after).sum().backward()
    assert grad_of(after) == [2.0]


def test_tensors_saved_by_a_checkpoint_inside_the_block_are_not_seen() -> None:
    model, x = Saved(nn.Sequential(nn.Tanh(), Square()), False), _x(0.5)
    with attached(model, gs.Scale(2.0), gs.SavedTensors("block")) as live:
        model(x).sum().backward()
    # It keeps its input, which is doubled before it recomputes.
    assert _calls(live) == {"block": 1}
    plain = torch.tensor([1.0], requires_grad=True)
    plain.tanh().pow(2).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


def test_the_block_pattern_refuses_stateful_transforms_other_fields_and_a_module_of_its_name() -> (
    None
):
    model = small()
    with (
        pytest.raises(ValueError, match=r"site 'block' is many tensors, and GrokfastEMA"),
        attached(model, gs.GrokfastEMA(), gs.SavedTensors("block")),
    ):
        pass
    with pytest.raises(FieldError, match=r"SavedTensors\.call: pattern 'block'"):
        gs.SavedTensors("block", call=0)
    model.block = nn.ReLU()
    with (
        pytest.raises(ValueError, match="write 're:block' for the module"),
        attached(model, gs.Zero(), gs.SavedTensors("block")),
    ):
        pass
    assert gs.SavedTensors("re:block").find(model) == ["block"]


def test_blocks_can_be_left_in_any_order() -> None:
    model = nn.Sequential(Square())
    first = gs.Intervention(gs.Scale(10.0), gs.SavedTensors("block"), names=("first",))
    second = gs.Intervention(gs.Scale(3.0), gs.SavedTensors("block"), names=("second",))
    with gs.Surgery(first, second).attach(model) as live:
        x = _x()
        model(x).sum().backward()
        assert grad_of(x) == [180.0]
        live.remove("first")
        x = _x()
        model(x).sum().backward()
        assert grad_of(x) == [18.0]
    assert autograd.saved_tensor_hooks() is None


def test_the_block_pattern_is_limited_to_its_thread_and_modules_are_not() -> None:
    model, x = nn.Sequential(Square()), _x()

    def work() -> None:
        model(x).sum().backward()

    both = (
        gs.Intervention(gs.Scale(10.0), gs.SavedTensors("block")),
        gs.Intervention(gs.Scale(2.0), gs.SavedTensors("0")),
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


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x * 2, torch.ones(1, dtype=torch.long))
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, twice, ones = ctx.saved_tensors
        return grads[0] * (x + twice + ones)


class Several(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
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
    model = nn.Sequential()
    model.several = Several()
    with attached(model, gs.Scale(2.0), gs.SavedTensors("several", node=node)) as live:
        model(_x(0.5, -1.0)).sum().backward()
    calls = _calls(live)
    assert len(calls) == len(sites)
    assert {site for site in sites if site} <= set(calls)
    assert set(calls.values()) == {1}


def test_tensors_saved_by_a_node_are_transformed() -> None:
    class Tripled(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Function.apply(x)

    model, x = nn.Sequential(Tripled()), _x(1.0)
    with attached(model, gs.Scale(10.0), gs.SavedTensors(node="Function")):
        model(x).sum().backward()
    # x + 2x + 1, with 10 times the two that are floating.
    assert grad_of(x) == [31.0]


def test_a_missing_node_is_an_error_that_lists_the_choices() -> None:
    model = small()
    with (
        pytest.raises(LookupError, match="selected by node='Gelu'.*: Addmm.*, Relu"),
        attached(model, gs.Zero(), gs.SavedTensors(node="Gelu")),
    ):
        model(batch()[0])
    with pytest.raises(FieldError, match=r"SavedTensors\.node"):
        gs.SavedTensors(node="re:(")


def test_nodes_with_other_hooks_are_refused() -> None:
    model = Saved(nn.Sequential(nn.Tanh()), False)
    with (
        pytest.raises(RuntimeError, match=r"at site 'inner\.0#0/TanhBackward\[0\]\.result' there"),
        attached(model, gs.Zero(), gs.SavedTensors(node="Tanh")),
    ):
        model(_x())


def test_nodes_of_a_reentrant_checkpoint_are_hooked_in_the_backward() -> None:
    model, x = Saved(nn.Sequential(nn.Tanh()), True), _x(0.5)
    with attached(model, gs.Zero(), gs.SavedTensors(node="Tanh")) as live:
        model(x).sum().backward()
    assert grad_of(x) == [1.0]
    assert _calls(live) == {"inner.0#0/TanhBackward[0].result": 1}


# Measuring, evaluation, compile.


def test_effects_are_measured() -> None:
    model = nn.Sequential(nn.Tanh())
    with attached(model, gs.Zero(), gs.SavedTensors("0")) as live:
        model(_x(0.5)).sum().backward()
    (row,) = live.effects.rows()
    assert row["site"] == "0#0.0"
    assert row["norm_before"] == pytest.approx(torch.tanh(torch.tensor(0.5)).item())
    assert row["norm_after"] == 0.0
    assert "0#0.0" in live.effects.table()


def test_the_state_of_a_transform_belongs_to_a_site() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), _x(0.5)
    with attached(model, gs.GrokfastEMA(decay=0.5, strength=1.0), gs.SavedTensors()) as live:
        for _ in range(2):
            x.grad = None
            model(x).sum().backward()
    # The mean of a constant is the constant: 2 tanh.
    point = torch.tensor([0.5]).tanh()
    torch.testing.assert_close(x.grad, (1 - (2 * point) ** 2) * (1 - (2 * point.tanh()) ** 2))
    assert _calls(live) == {"0#0.0": 2, "1#0.0": 2}


def test_without_gradients_nothing_is_saved_or_reported() -> None:
    model, x = nn.Sequential(nn.Tanh()), _x(0.5)
    with attached(model, gs.Zero(), gs.SavedTensors()) as live:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(torch.ones(1))
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
    assert [(entry.site, entry.skipped) for entry in live.ledger] == [("0#0.0", "")]


@pytest.mark.filterwarnings("ignore")  # Dynamo trips over its own warnings when they are errors
def test_a_model_compiled_inside_the_block_reads_back_as_in_eager() -> None:
    def run(compiles: bool) -> tuple[list[Tensor], str]:
        torch.compiler.reset()
        model = small()
        optimizer = sgd(model)
        at, when = gs.SavedTensors(), gs.Steps(stop=3)
        with attached(model, gs.GrokfastEMA(strength=0.5), at, optimizer, when) as live:
            called = torch.compile(model, backend="eager") if compiles else model
            for step in range(5):
                optimizer.zero_grad()
                called(batch(step)[0]).pow(2).mean().backward()
                optimizer.step()
        return weights(model), live.ledger.table()

    (ours, table), (theirs, expected) = run(True), run(False)
    assert table == expected
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right)


def test_under_a_functional_gradient_pytorch_refuses_hooks_for_saved_tensors() -> None:
    model = nn.Sequential(Square())
    with (
        pytest.raises(RuntimeError, match="saved tensor hooks"),
        attached(model, gs.Scale(2.0), gs.SavedTensors("0")),
    ):
        torch.func.grad(lambda x: model(x).sum())(torch.ones(1))
