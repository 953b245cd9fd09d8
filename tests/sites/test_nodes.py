"""Nodes: which are found, in which module, and the exact gradient on either side."""

import re
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.fields import FieldError
from gradsurg.sites._spans import Located, Spans
from tests.nets import attached, backward, gradients, noisy, num_hooks, sgd, small, train


def _x(*values: float) -> Tensor:
    return torch.tensor(values or (1.0,), requires_grad=True)


def _grad(x: Tensor) -> list[float]:
    assert x.grad is not None
    return x.grad.tolist()


def _calls(live: gs.Live) -> dict[str, int]:
    return {entry.site: entry.calls for entry in live.ledger}


class Product(nn.Module):
    """a * b: the node has two edges."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Cubes(nn.Module):
    """Calls one module twice and makes nodes of its own: 5 * ((2 x)^2)."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        return (self.twice(self.twice(x)) * 5).sum()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x * x).sum()


class Pair(nn.Module):
    """Three nodes of one kind in one call."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2 * 3 * 5).sum()


class Functional(nn.Module):
    """ReLUs without modules, in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.relu(self.inner(x) - 0.1)).sum()


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


# What is seen and what comes out


def test_enter_acts_on_the_gradient_of_what_the_operation_returned() -> None:
    # y = a b, dL/dy = 10, clipped to 4: a gets 4 b, b gets 4 a.
    a, b = _x(2.0), _x(3.0)
    product = Product()
    with attached(product, gs.Clip(4.0), gs.Nodes("Mul")) as live:
        (product(a, b) * 10).sum().backward()
    assert (_grad(a), _grad(b)) == ([12.0], [8.0])
    assert _calls(live) == {"root#0/MulBackward[0]": 1}


def test_leave_acts_on_the_gradient_of_each_input() -> None:
    # a gets 10 b = 30 -> 25, b gets 10 a = 20.
    a, b, product = _x(2.0), _x(3.0), Product()
    with attached(product, gs.Clip(25.0), gs.Nodes("Mul", side="leave")) as live:
        (product(a, b) * 10).sum().backward()
    assert (_grad(a), _grad(b)) == ([25.0], [20.0])
    assert _calls(live) == {"root#0/MulBackward[0].0": 1, "root#0/MulBackward[0].1": 1}


@pytest.mark.parametrize(("edge", "expected"), [(0, ([0.0], [20.0])), (1, ([30.0], [0.0]))])
def test_edge_picks_one_input(edge: int, expected: tuple[list[float], list[float]]) -> None:
    a, b, product = _x(2.0), _x(3.0), Product()
    with attached(product, gs.Zero(), gs.Nodes("Mul", side="leave", edge=edge)) as live:
        (product(a, b) * 10).sum().backward()
    assert (_grad(a), _grad(b)) == expected
    assert _calls(live) == {f"root#0/MulBackward[0].{edge}": 1}


def test_an_edge_that_takes_no_gradient_is_refused_with_those_that_do() -> None:
    product = Product()
    with (
        pytest.raises(
            LookupError, match=re.escape("no edge 1 that takes a gradient. There are: 0")
        ),
        attached(product, gs.Zero(), gs.Nodes("Mul", side="leave", edge=1)),
    ):
        product(_x(2.0), torch.ones(1))


def test_an_input_without_a_gradient_passes_at_leave() -> None:
    a, product = _x(2.0), Product()
    with attached(product, gs.Scale(2.0), gs.Nodes("Mul", side="leave")):
        product(a, torch.tensor([3.0])).sum().backward()
    assert _grad(a) == [6.0]


def test_enter_equals_a_tensor_hook_on_the_output() -> None:
    one, two = noisy(), noisy()
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        output.register_hook(seen.append)

    one.norm.register_forward_hook(hook)
    torch.manual_seed(1)
    backward(one)
    torch.manual_seed(1)
    with attached(two, gs.Clip(0.01), gs.Nodes("norm", module="norm")):
        backward(two)
    torch.testing.assert_close(gradients(two), gradients(one), rtol=0, atol=0)
    assert (seen[0].abs() == 0.01).any()


def test_scale_by_sign_at_relu_nodes_is_guided_backpropagation() -> None:
    """Springenberg et al. 2015, made here by hooks on the ReLU modules themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)
    )
    x = torch.randn(4, 6)
    handles = [
        module.register_full_backward_hook(
            lambda module, grad_input, grad_output: (grad_input[0].clamp(min=0),)
        )
        for module in model
        if isinstance(module, nn.ReLU)
    ]
    guided, plain, ours = (x.clone().requires_grad_() for _ in range(3))
    model(guided)[:, 0].sum().backward()
    for handle in handles:
        handle.remove()
    model(plain)[:, 0].sum().backward()
    transform = gs.ScaleBySign(positive=1.0, negative=0.0)
    with attached(model, transform, gs.Nodes("Relu")) as live:
        model(ours)[:, 0].sum().backward()
    assert ours.grad is not None
    assert guided.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, guided.grad)
    assert not torch.allclose(plain.grad, guided.grad)
    assert len(_calls(live)) == 2


def test_so_it_is_in_a_convolutional_net_hooked_at_its_functional_relus() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(1, 4, 3)
            self.two = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.behind(functional.relu(self.two(functional.relu(self.one(x)))))

        def behind(self, y: Tensor) -> Tensor:
            return y.flatten(1)

    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 1, 7, 7)
    weights = torch.randn(2, 36)
    by_hand, plain, ours = (x.clone().requires_grad_() for _ in range(3))
    # The rule itself: what enters a ReLU is cut at zero, what leaves it has the ReLU's own mask.
    before_one = model.one(by_hand)
    after_one = before_one.clamp(min=0)
    before_two = model.two(after_one)
    entering = weights.view_as(before_two).clamp(min=0)
    leaving = entering * (before_two > 0)
    (entering,) = torch.autograd.grad(before_two, after_one, leaving, retain_graph=True)
    leaving = entering.clamp(min=0) * (before_one > 0)
    (expected,) = torch.autograd.grad(before_one, by_hand, leaving)
    (model(plain) * weights).sum().backward()
    with attached(model, gs.ScaleBySign(1.0, 0.0), gs.Nodes("ReluBackward0")) as live:
        (model(ours) * weights).sum().backward()
    assert ours.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(ours.grad, expected)
    assert not torch.allclose(plain.grad, expected)
    assert _calls(live) == {"root#0/ReluBackward[0]": 1, "root#0/ReluBackward[1]": 1}


# Selection


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("Relu", {"act#0/ReluBackward[0]"}),
        ("ReluBackward", {"act#0/ReluBackward[0]"}),
        ("ReluBackward0", {"act#0/ReluBackward[0]"}),
        ("re:Relu|None", {"act#0/ReluBackward[0]"}),
        ("Addmm", {"last#0/AddmmBackward[0]"}),
        ("matmul", {"last#0/AddmmBackward[0]"}),
        ("conv", {"conv#0/ConvolutionBackward[0]"}),
        ("*Conv*", {"conv#0/ConvolutionBackward[0]"}),
    ],
)
def test_nodes_are_found_by_name_glob_regex_and_family(pattern: str, sites: set[str]) -> None:
    model = noisy()
    with attached(model, gs.Identity(), gs.Nodes(pattern)) as live:
        backward(model)
    assert set(_calls(live)) == sites
    assert set(_calls(live).values()) == {1}


def test_the_norm_family_finds_batch_layer_and_group_norms() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4))
    with attached(model, gs.Scale(2.0), gs.Nodes("norm")) as live:
        model(torch.randn(3, 4)).sum().backward()
    fired = list(_calls(live))
    assert [site.split("/")[0] for site in fired] == ["0#0", "1#0", "2#0"]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


def test_the_attention_family_finds_scaled_dot_products() -> None:
    model, x = Attention(), torch.randn(1, 2, 4, 8, requires_grad=True)
    with attached(model, gs.Zero(), gs.Nodes("attention")) as live:
        model(x).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()
    assert any("ScaledDotProduct" in site for site in _calls(live))


def test_module_picks_the_module_whose_forward_made_the_node() -> None:
    model = small()
    with attached(model, gs.Zero(), gs.Nodes("Addmm", module="fi*")) as live:
        backward(model)
    assert _calls(live) == {"first#0/AddmmBackward[0]": 1}
    assert not gradients(model)["first.weight"].any()
    assert gradients(model)["last.weight"].any()


@pytest.mark.parametrize("occurrence", [0, 1, 2])
def test_occurrence_picks_one_of_several_nodes_in_a_call(occurrence: int) -> None:
    # Gradients that enter: 15 at the first, 5 at the second, 1 at the third; clipped to 0.5.
    model, x = Pair(), _x()
    with attached(model, gs.Clip(0.5), gs.Nodes("Mul", occurrence=occurrence)) as live:
        model(x).backward()
    assert _grad(x) == [[1.0], [3.0], [15.0]][occurrence]
    assert _calls(live) == {f"root#0/MulBackward[{occurrence}]": 1}


@pytest.mark.parametrize(("call", "expected"), [(0, [8.0]), (1, [16.0])])
def test_call_picks_one_call_of_a_shared_module(call: int, expected: list[float]) -> None:
    # 5 enters the second call, 10 the first; clipped to 4.
    model, x = Cubes(), _x()
    at = gs.Nodes("Mul", module="twice", call=call)
    with attached(model, gs.Clip(4.0), at) as live:
        model(x).backward()
    assert _grad(x) == expected
    assert _calls(live) == {f"twice#{call}/MulBackward[0]": 1}


def test_nodes_of_the_models_own_forward_belong_to_root() -> None:
    model, x = Cubes(), _x()
    with attached(model, gs.Scale(3.0), gs.Nodes("Mul", module="root")) as live:
        model(x).backward()
    assert _grad(x) == [60.0]
    assert _calls(live) == {"root#0/MulBackward[0]": 1}


def test_a_functional_relu_belongs_to_the_module_whose_forward_called_it() -> None:
    model = Functional()
    with attached(model, gs.Identity(), gs.Nodes("Relu")) as live:
        model(torch.randn(2, 3)).backward()
    assert set(_calls(live)) == {"inner#0/ReluBackward[0]", "root#0/ReluBackward[0]"}


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] / 2


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = Halve.apply(x)
        assert isinstance(y, Tensor)
        return y.sum()


@pytest.mark.parametrize("side", ["enter", "leave"])
def test_a_function_of_the_users_own_is_a_node(side) -> None:
    model, x = Custom(), _x()
    with attached(model, gs.Scale(10.0), gs.Nodes("Halve", side=side)):
        model(x).backward()
    assert _grad(x) == [5.0]


@pytest.mark.parametrize("side", ["enter", "leave"])
def test_an_in_place_relu_is_a_node_like_another(side) -> None:
    # 2 enters the ReLU and leaves it where x is positive.
    model = nn.Sequential(Twice(), nn.ReLU(inplace=True), Twice())
    x = _x(1.0, -1.0)
    with attached(model, gs.Scale(10.0), gs.Nodes("Relu", side=side)) as live:
        model(x).sum().backward()
    assert _grad(x) == [40.0, 0.0]
    end = "" if side == "enter" else ".0"
    assert _calls(live) == {f"1#0/ReluBackward[0]{end}": 1}


def test_a_module_called_without_the_model_is_at_its_call_0() -> None:
    model = Cubes()
    with attached(model, gs.Scale(10.0), gs.Nodes("Mul", module="twice")) as live:
        for _ in range(3):
            x = _x()
            model.twice(x).sum().backward()
            assert _grad(x) == [20.0]
    assert _calls(live) == {"twice#0/MulBackward[0]": 3}


@pytest.mark.parametrize("field", ["pattern", "module"])
def test_a_regex_that_does_not_compile_is_refused_when_made(field: str) -> None:
    with pytest.raises(FieldError, match=rf"Nodes\.{field}: is not a regular expression"):
        gs.Nodes(**{"pattern": "Relu", field: "re:["})


@pytest.mark.parametrize(
    ("module", "sites"),
    [
        ("body.*", {"body.first#0", "body.last#0"}),
        ("re:body[.](first|act)", {"body.first#0"}),
        ("*last", {"body.last#0"}),
        ("*", {"body.first#0", "body.last#0"}),
    ],
)
def test_a_module_pattern_is_of_the_whole_path(module: str, sites: set[str]) -> None:
    model = nn.Sequential()
    model.body = small()
    with attached(model, gs.Identity(), gs.Nodes("Addmm", module=module)) as live:
        backward(model)
    assert {site.split("/")[0] for site in _calls(live)} == sites


def test_ids_are_the_same_at_every_step() -> None:
    model = noisy()
    optimizer = sgd(model)
    with attached(model, gs.Identity(), gs.Nodes("*"), optimizer) as live:
        train(model, optimizer, 1)
        first = set(_calls(live))
        train(model, optimizer, 3, start=1)
    assert set(_calls(live)) == first
    calls = {entry.calls for entry in live.ledger if not entry.site.startswith("norm#0")}
    assert calls == {4}


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (gs.Nodes("Rleu"), "no node is selected by 'Rleu'"),
        (gs.Nodes("Rleu"), "Did you mean 'Relu'?"),
        (gs.Nodes("Rleu"), "There are: Addmm, Relu, T, attention, conv, matmul, norm"),
        (gs.Nodes("Relu", module="first"), "no node in 'first' is selected by 'Relu'"),
        (gs.Nodes("Relu", call=3), "call=3"),
        (gs.Nodes("Relu", occurrence=3), "occurrence=3"),
    ],
)
def test_a_node_that_is_not_there_is_refused_at_the_first_forward(
    at: gs.Nodes, message: str
) -> None:
    model = small()
    with pytest.raises(LookupError, match=re.escape(message)), attached(model, gs.Zero(), at):
        backward(model)
    assert num_hooks(model) == 0


def test_a_module_that_is_not_there_is_refused_when_attached() -> None:
    with pytest.raises(LookupError) as caught:
        gs.Nodes("Relu", module="atc").find(small())
    assert str(caught.value) == (
        "Nodes: module: nothing matches 'atc'. There are: root, first, act, last. "
        "Did you mean 'act'?"
    )


def test_a_later_forward_may_go_another_way() -> None:
    class Way(nn.Module):
        def forward(self, x: Tensor, relu: bool) -> Tensor:
            return (functional.relu(x) if relu else x * 2).sum()

    model, x = Way(), _x()
    with attached(model, gs.Zero(), gs.Nodes("Relu")):
        model(x, True).backward()
        model(x, False).backward()
    assert _grad(x) == [2.0]


def test_edge_makes_no_sense_on_the_side_where_gradients_enter() -> None:
    with pytest.raises(FieldError, match=r"Nodes\.edge: needs side=leave, found 1"):
        gs.Nodes("Relu", edge=1)


# Contexts


@pytest.mark.parametrize("side", ["enter", "leave"])
def test_non_reentrant_checkpoints_fire_exactly_once(side) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.body, x, use_reentrant=False)
            assert isinstance(y, Tensor)
            return y

    plain, model = small(), Saved()
    at = gs.Nodes("Relu", side=side)
    with attached(plain, gs.Scale(3.0), at):
        backward(plain)
    with attached(model, gs.Scale(3.0), at) as live:
        backward(model)
    assert set(_calls(live).values()) == {1}
    torch.testing.assert_close(gradients(model.body), gradients(plain))


def test_a_recomputation_that_ends_early_does_not_upset_the_next_forward() -> None:
    # The recomputation stops at the last tensor that backward needs, inside the modules.
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(Twice(), nn.Tanh()), nn.ReLU(), Twice())

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.body, x, use_reentrant=False)
            assert isinstance(y, Tensor)
            return y.sum()

    model = Saved()
    with attached(model, gs.Identity(), gs.Nodes("*")) as live:
        model(_x()).backward()
        first = _calls(live)
        for _ in range(2):
            model(_x()).backward()
    assert "body.0.1#0/TanhBackward[0]" in first
    assert set(first.values()) == {1}
    assert _calls(live) == dict.fromkeys(first, 3)


def test_a_backward_inside_forward_does_not_end_the_span_it_is_in() -> None:
    # A force is the gradient of an energy, which is a checkpoint and so runs again.
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = Cube()

        def forward(self, x: Tensor) -> Tensor:
            energy = checkpoint(self.energy, x, use_reentrant=False)
            assert isinstance(energy, Tensor)
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return functional.relu(force).sum()

    model, x = Force(), _x(2.0)
    with attached(model, gs.Scale(10.0), gs.Nodes("Relu")) as live:
        model(x).backward()
    # (x^3)'' = 6 x
    assert _grad(x) == [120.0]
    assert _calls(live) == {"root#0/ReluBackward[0]": 1}


def test_a_reentrant_checkpoint_hides_its_nodes_and_that_is_told() -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.act, x * 2, use_reentrant=True)
            assert isinstance(y, Tensor)
            return y.sum()

    model = Saved()
    with (
        pytest.raises(LookupError, match=r"'Relu'.*There are: CheckpointFunction, Mul, Sum"),
        attached(model, gs.Zero(), gs.Nodes("Relu")),
    ):
        model(_x())


def test_a_forward_without_gradients_makes_no_site() -> None:
    model = small()
    with attached(model, gs.Zero(), gs.Nodes("Relu")) as live:
        with torch.no_grad():
            model(torch.ones(1, 6))
        assert not _calls(live)
        backward(model)
    assert not gradients(model)["first.weight"].any()


@pytest.mark.parametrize("caught_inside", [True, False])
def test_an_exception_in_forward_leaves_the_spans_balanced(caught_inside: bool) -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fragile[0]:
                raise OSError("gone")
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile = Fragile()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            if caught_inside:
                try:
                    x = self.fragile(x)
                except OSError:
                    x = x * 3
            else:
                x = self.fragile(x)
            return self.act(x).sum()

    fragile = [True]
    model, x = Outer(), _x()
    with attached(model, gs.Scale(10.0), gs.Nodes("Relu")) as live:
        if caught_inside:
            model(x).backward()
            assert _grad(x) == [30.0]
        else:
            with pytest.raises(OSError, match="gone"):
                model(x)
        fragile[0] = False
        x.grad = None
        model(x).backward()
    assert _grad(x) == [20.0]
    assert set(_calls(live)) == {"act#0/ReluBackward[0]"}


def test_each_thread_has_its_own_spans() -> None:
    model = Cubes()
    barrier = threading.Barrier(2)

    def slow(module: nn.Module, args: object, output: object) -> None:
        barrier.wait(timeout=10)

    handle = model.twice.register_forward_hook(slow)
    results: list[list[float]] = []

    def work() -> None:
        x = _x()
        model(x).backward()
        results.append(_grad(x))

    at = gs.Nodes("Mul", module="twice")
    with attached(model, gs.Scale(10.0), at, effects_every=0) as live:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    handle.remove()
    assert results == [[2000.0], [2000.0]]
    assert set(_calls(live)) == {"twice#0/MulBackward[0]", "twice#1/MulBackward[0]"}


def _compiled(model: nn.Module) -> nn.Module:
    made = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _compiled_inside(model: nn.Module) -> nn.Module:
    return nn.Sequential(_compiled(model))


@pytest.mark.parametrize("compiling", [_compiled, _compiled_in_place, _compiled_inside])
def test_a_compiled_model_is_refused_with_the_reason(
    compiling: Callable[[nn.Module], nn.Module],
) -> None:
    model = compiling(small())
    before = num_hooks(model)
    with (
        pytest.raises(ValueError, match="a compiled model runs as one node; attach before"),
        attached(model, gs.Zero(), gs.Nodes("Relu")),
    ):
        pass
    assert num_hooks(model) == before


# The spans themselves


def test_spans_hand_over_every_node_with_its_innermost_module() -> None:
    taken: list[tuple[list[Located], bool]] = []
    model = Functional()
    with ExitStack() as stack:
        Spans(lambda nodes, whole: taken.append((nodes, whole))).hook(model, stack)
        x = torch.ones(2, 3, requires_grad=True) * 2
        model(x)
        model.inner(x)
    (nodes, whole), (part, partly) = taken
    assert (whole, partly) == (True, False)
    assert [node.id for node in nodes] == [
        "inner.linear#0/TBackward[0]",
        "inner.linear#0/AddmmBackward[0]",
        "inner#0/ReluBackward[0]",
        "root#0/SubBackward[0]",
        "root#0/ReluBackward[0]",
        "out#0/TBackward[0]",
        "out#0/AddmmBackward[0]",
        "root#0/SumBackward[0]",
    ]
    assert [node.id for node in part] == [node.id for node in nodes[:3]]
    assert num_hooks(model) == 0
