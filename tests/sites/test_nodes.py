"""Nodes: which are found, in which module, and the exact gradient on either side."""

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.sites.nodes import FAMILIES, fits_node
from gradsurg.torch_internals import autograd
from tests.nets import COMPILES_LAYERS, attached, backward, small
from tests.sites.points import TEN, Double, Made, calls_of, grad_of, passed, point, recomputed

# Sites and results


@pytest.mark.parametrize(
    ("transform", "at", "grads", "ends"),
    [
        # y = a b, dL/dy = 10, clipped to 4: a gets 4 b, b gets 4 a.
        (gs.Clip(4.0), gs.Nodes("Mul"), (12.0, 8.0), [""]),
        # a gets 10 b = 30 -> 25, b gets 10 a = 20.
        (gs.Clip(25.0), gs.Nodes("Mul", side="leave"), (25.0, 20.0), [".0", ".1"]),
        (gs.Zero(), gs.Nodes("Mul", side="leave", edge=0), (0.0, 20.0), [".0"]),
        (gs.Zero(), gs.Nodes("Mul", side="leave", edge=1), (30.0, 0.0), [".1"]),
    ],
)
def test_gradients_that_enter_or_leave_an_operation(transform, at, grads, ends) -> None:
    a, b, product = point(2.0), point(3.0), Made(lambda self, a, b: a * b)
    with attached(product, transform, at) as live:
        (product(a, b) * 10).sum().backward()
    assert (grad_of(a), grad_of(b)) == ([grads[0]], [grads[1]])
    assert calls_of(live) == {f"root#0/MulBackward[0]{end}": 1 for end in ends}


# Selection


@pytest.mark.parametrize(("occurrence", "grad"), [(0, 1.0), (1, 3.0), (2, 15.0)])
def test_occurrence_picks_one_of_several_nodes_in_a_call(occurrence: int, grad: float) -> None:
    # Gradients that enter: 15 at the first, 5 at the second, 1 at the third; clipped to 0.5.
    model, at = Made(lambda self, x: x * 2 * 3 * 5), gs.Nodes("Mul", occurrence=occurrence)
    site = f"root#0/MulBackward[{occurrence}]"
    assert passed(model, gs.Clip(0.5), at) == ([grad], {site: 1})


def test_a_later_forward_may_make_other_nodes() -> None:
    model, x = Made(lambda self, x, relu: (functional.relu(x) if relu else x * 2).sum()), point()
    with attached(model, gs.Zero(), gs.Nodes("Relu")):
        model(x, True).backward()
        model(x, False).backward()
    assert grad_of(x) == [2.0]


# Contexts


def test_a_backward_inside_a_forward_does_not_end_the_call() -> None:
    # A force is the gradient of an energy, which is a checkpoint and so runs again.
    def forward(self: Made, x: Tensor) -> Tensor:
        energy = recomputed(self.energy, x, False)
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return functional.relu(force).sum()

    model = Made(forward, energy=Made(lambda self, x: (x * x * x).sum()))
    # (x^3)'' = 6 x
    found = passed(model, TEN, gs.Nodes("Relu"), point(2.0))
    assert found == ([120.0], {"root#0/ReluBackward[0]": 1})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_inside_one_another_are_followed() -> None:
    def nest(depth: int, saves: bool) -> Made:
        def forward(self: Made, x: Tensor) -> Tensor:
            h = self.act(x)
            return self.act(recomputed(self.inner, h, True) if saves else self.inner(h))

        inner = nest(depth - 1, saves) if depth else nn.Sigmoid()
        return Made(forward, act=nn.Tanh(), inner=inner)

    at, triple = gs.Nodes("activation"), gs.Scale(3.0)
    plain = passed(nest(2, False), triple, at, point(0.3))
    assert passed(nest(2, True), triple, at, point(0.3)) == plain
    assert len(plain[1]) == 7


def test_a_call_that_was_interrupted_does_not_hide_the_one_around_it() -> None:
    def interrupted(self: Made, x: Tensor) -> Tensor:
        raise KeyboardInterrupt  # no hook runs at the end of this call

    def forward(self: Made, x: Tensor) -> Tensor:
        with pytest.raises(KeyboardInterrupt):
            self.inner(x)
        return functional.relu(x * 2).sum()

    model = Made(forward, inner=Made(interrupted))
    gradients, _ = passed(model, TEN, gs.Nodes("Relu"), point(2.0))
    assert gradients == [20.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nodes_after_a_call_that_was_interrupted_belong_to_the_one_around_it(error) -> None:
    def interrupted(self: Made, x: Tensor) -> Tensor:
        self.late(x)
        raise error

    def forward(self: Made, x: Tensor) -> Tensor:
        with pytest.raises(error):
            self.inner(x)
        return functional.relu(self.late(functional.relu(x)))

    model = Made(forward, inner=Made(interrupted, late=Double()), late=Double())
    _, calls = passed(model, TEN, gs.Nodes("*"), point(2.0))
    mul = "late#0/MulBackward[0]"
    assert calls == {"root#0/ReluBackward[0]": 1, mul: 1, "root#0/ReluBackward[1]": 1}


@pytest.mark.parametrize("outer", ["", "first"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_part_is_followed_after_a_forward_that_was_interrupted(outer: str, error) -> None:
    def forward(self: Made, x: Tensor) -> Tensor:
        if fails:
            raise error
        return x * 2

    fails = True
    model = nn.Sequential()
    model.first, model.second = nn.Sequential(Made(forward)), nn.Sequential(Made(forward))
    x = point()
    with attached(model, TEN, gs.Nodes("*")) as live:
        with pytest.raises(error):
            model.get_submodule(outer)(x)
        fails = False
        model.second(x).backward()
        model(x).backward()
    assert grad_of(x) == [20.0 + 400.0]
    assert calls_of(live) == {"second.0#0/MulBackward[0]": 2, "first.0#0/MulBackward[0]": 1}


# What HOOKS.md calls the care that spans need


def _view_changed(self: Made, x: Tensor) -> Tensor:
    base = x * 1
    view = base[:1]
    base.mul_(3)
    return self.late(view)


def _through_view(self: Made, x: Tensor) -> Tensor:
    y = x * 1
    y[:1].mul_(3)
    return y


@pytest.mark.parametrize(
    ("function", "name", "grads", "site"),
    [
        # A view of a tensor changed in place belongs to its first reader.
        (_view_changed, "AsStrided", [60.0, 0.0], "late#0/AsStridedBackward[0]"),
        (_through_view, "CopySlices", [30.0, 10.0], "root#0/CopySlices[0]"),
    ],
)
def test_changes_in_place_through_views_are_nodes(function, name, grads, site) -> None:
    model = Made(function, late=Double())
    assert passed(model, TEN, gs.Nodes(name), point(1.0, 1.0)) == (grads, {site: 1})


def test_the_wrapper_node_of_a_full_backward_hook_does_not_hide_the_nodes_inside() -> None:
    model = small()
    plain = model(torch.ones(1, 6)).grad_fn.name()
    with model.last.register_full_backward_hook(lambda *_: None):
        assert model(torch.ones(1, 6)).grad_fn.name() != plain
        with attached(model, gs.Scale(2.0), gs.Nodes("Addmm", module="last")) as live:
            backward(model)
    assert [entry.site for entry in live.ledger] == ["last#0/AddmmBackward[0]"]


def test_the_calls_of_a_module_with_two_names_take_them_in_turn() -> None:
    one = Double()
    model = Made(lambda self, x: self.two(self.one(self.two(self.one(x)))), one=one, two=one)
    found = passed(model, TEN, gs.Nodes("Mul", module="two", call=1))
    assert found == ([160.0], {"two#1/MulBackward[0]": 1})


def test_a_module_that_calls_itself_is_not_mistaken_for_an_interrupted_one() -> None:
    model = Made(lambda self, x, depth=2: self(x * 2, depth - 1) * 3 if depth else x * 5)
    x = point()
    with attached(model, gs.Identity(), gs.Nodes("Mul")) as live:
        model(x).sum().backward()
    counts = Counter(site.partition("/")[0] for site in calls_of(live))
    assert counts == {"root#0": 2, "root#1": 2, "root#2": 1}


def test_nodes_made_in_another_thread_do_not_belong_to_the_model() -> None:
    # Numbers are counted per thread: the input's numbers are among the model's own.
    given: list[Tensor] = []

    def work(until: int) -> None:
        x = point(2.0)
        while autograd.next_sequence_number() < until:
            given[:] = [x * 3]

    thread = threading.Thread(target=work, args=(autograd.next_sequence_number() + 1,))
    thread.start()
    thread.join()
    model = Made(lambda self, x: (self.twice(self.twice(x)) * 5).sum(), twice=Double())
    with attached(model, gs.Identity(), gs.Nodes("Mul", module="twice")) as live:
        model(given[0]).backward()
    assert set(calls_of(live)) == {"twice#0/MulBackward[0]", "twice#1/MulBackward[0]"}


# Names


@pytest.mark.parametrize(
    ("pattern", "endings"),
    [
        ("MulBackward", {"[0]", "[1]"}),
        ("MulBackward0", {"[0]"}),
        ("MulBackward1", {"[1]"}),
        ("re:Mul.*1", {"[1]"}),
        ("re:Mul", {"[0]", "[1]"}),
        ("M?l", {"[0]", "[1]"}),
    ],
)
def test_a_name_fits_every_overload_and_a_numbered_one_only_its_own(pattern, endings) -> None:
    model, x = Made(lambda self, x: torch.ops.aten.mul.Scalar(x * x, 3.0).sum()), point()
    with attached(model, gs.Identity(), gs.Nodes(pattern)) as live:
        model(x).backward()
    assert {site.removeprefix("root#0/MulBackward") for site in calls_of(live)} == endings


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_in_a_family_exists_in_torch(family: str) -> None:
    known = {name for name in dir(torch._C._functions) if "BackwardBackward" not in name}
    for name in FAMILIES[family]:
        assert any(fits_node(node, name) for node in known), name


X, IMAGE = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-1, 1, 18).view(1, 2, 3, 3)


@pytest.mark.parametrize(
    ("family", "module", "given", "names"),
    [
        ("matmul", nn.Linear(4, 2), X, {"Addmm"}),
        ("matmul", nn.Linear(4, 2, bias=False), X, {"Mm"}),
        ("conv", nn.Conv2d(2, 2, 2), IMAGE, {"Convolution"}),
        ("activation", nn.ReLU6(), X, {"Hardtanh"}),
        ("activation", nn.SELU(), X, {"Elu"}),
        ("activation", nn.PReLU(), X, {"PreluKernel"}),
        ("softmax", nn.Softmax(-1), X, {"Softmax"}),
        ("loss", nn.LogSoftmax(-1), X, {"LogSoftmax"}),
        ("norm", nn.InstanceNorm2d(2), IMAGE, {"NativeBatchNorm"}),
        ("rnn", nn.LSTM(4, 2), X[:, None], {"MkldnnRnnLayer"}),
    ],
    ids=str,
)
def test_a_family_finds_the_nodes_of_its_modules(family, module, given, names) -> None:
    given = given.clone().requires_grad_()
    with attached(module, gs.Identity(), gs.Nodes(family)) as live:
        out = module(given)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    stems = {site.partition("/")[2].partition("Backward")[0] for site in calls_of(live)}
    assert stems == names


@pytest.mark.slow
@pytest.mark.skipif(not COMPILES_LAYERS, reason="the layers run in eager")
def test_a_compiled_block_in_the_model_is_named_as_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model[2].compile(backend="aot_eager")
    with (
        pytest.warns(gs.SurgeryWarning, match="did not act inside 2.*: torch.compile has compiled"),
        attached(model, gs.Scale(2.0), gs.Nodes("Relu")) as live,
    ):
        model(torch.ones(2, 4)).sum().backward()
    assert {entry.site.partition("#")[0] for entry in live.ledger} == {"1"}
