"""Stage `step`: which optimizers, which parameters, and when."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon, Optimizer

import gradsurg as gs
from gradsurg.sites.updates import MatchedUpdates
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Transform, TransformContext
from gradsurg.triggers.base import Trigger
from tests.nets import attached, backward, num_hooks, sgd, small, train, weights
from tests.sites.points import UserGroup, calls_of

Params = Iterator[nn.Parameter]
STEP = gs.Parameters(stage="step")
CLIP = gs.ClipGlobalNorm(0.01)


class Lookahead(Optimizer):
    """As timm's: `Optimizer.__init__` is not called, so that its step runs no hooks."""

    def __init__(self, base_optimizer: Optimizer) -> None:
        self._base_optimizer = base_optimizer
        self.param_groups, self.state = base_optimizer.param_groups, {}
        self.defaults = base_optimizer.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure: Any = None) -> Any:
        return self._base_optimizer.step(closure)


class SAM(Optimizer):
    """Sharpness-aware minimization, without the perturbation."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {})
        self.base_optimizer = SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base_optimizer.step()


class Wrapper:
    """Not an optimizer itself."""

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim
        self.zero_grad, self.step = optim.zero_grad, optim.step


WRAPPED: dict[str, Callable[[Params], Any]] = {
    "Lookahead": lambda params: Lookahead(SGD(params, lr=0.1)),
    "SAM": SAM,
    "Wrapper": lambda params: Wrapper(SGD(params, lr=0.1)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_optimizer_inside_a_wrapper_is_found(name: str) -> None:
    plain, model = small(), small()
    inner, optimizer = sgd(plain), WRAPPED[name](model.parameters())
    with attached(model, CLIP, STEP, optimizer) as live:
        for step in range(2):
            backward(plain, step)
            clip_grad_norm_(plain.parameters(), 0.01)
            inner.step()
            inner.zero_grad()
            if name == "SAM":
                backward(model, step + 50)
                optimizer.first_step()
            backward(model, step)
            getattr(optimizer, "second_step", optimizer.step)()
            optimizer.zero_grad()
        assert live.step == 2
    assert all(map(torch.equal, weights(plain), weights(model)))


def test_an_optimizer_whose_step_runs_no_hooks_is_refused() -> None:
    class Bare(Lookahead):
        def __init__(self, params: Params) -> None:
            self.param_groups, self.state = [{"params": [*params]}], {}

    model = small()
    with pytest.raises(TypeError, match="the step of Bare runs no hooks.* the optimizer inside it"):
        attached(model, CLIP, STEP, Bare(model.parameters()))


# Layers that are thawed or added


@pytest.mark.parametrize("added", [False, True], ids=["held", "added to the optimizer"])
@pytest.mark.parametrize("pattern", ["*", "first.*"])
@pytest.mark.parametrize("kind", ["ClipGlobalNorm", "ClipNorm", "Updates", "Weights"])
def test_layers_thawed_after_attach_join(added: bool, pattern: str, kind: str) -> None:
    """As if the surgery were attached anew then."""
    transform = gs.ClipNorm(0.01) if kind == "ClipNorm" else CLIP
    at = getattr(gs, kind if kind[0] in "UW" else "Parameters")(pattern, stage="step")
    results = []
    for late in (True, False):
        model = small()
        model.first.requires_grad_(False)
        optimizer = sgd(model.last if added else model)
        with attached(model, transform, at, optimizer) if late or pattern == "*" else nullcontext():
            train(model, optimizer, 1)
            model.first.requires_grad_(True)
            if added:
                optimizer.add_param_group({"params": [*model.first.parameters()]})
            if late:
                train(model, optimizer, 2, start=1)
        if not late:
            with attached(model, transform, at, optimizer) as live:
                train(model, optimizer, 2, start=1)
            assert calls_of(live)["first.weight"] == 2
        assert num_hooks(model, optimizer) == 0
        results.append(weights(model))
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], small().first.weight)


# Several optimizers


def _two(model: nn.Sequential) -> list[Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    return [Muon(matrices, lr=0.1), AdamW(others, lr=0.1)]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("by_hand", [False, True], ids=["in the step", "before_step"])
def test_a_group_in_several_optimizers_is_one_group(passes: int, by_hand: bool) -> None:
    plain, model = small(), small()
    theirs, ours = _two(plain), _two(model)
    surgery = gs.Surgery(gs.Intervention(CLIP))
    with surgery.attach(model, ours) as live:
        for step in range(4):
            for net, optimizers in ((plain, theirs), (model, ours)):
                for part in range(passes):
                    backward(net, step + 10 * part)
                if net is plain:
                    clip_grad_norm_(net.parameters(), 0.01)
                elif by_hand:
                    live.before_step()
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    for weight, expected in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(weight, expected)
    assert set(calls_of(live).values()) == {4}


def test_an_optimizer_that_steps_less_often_begins_no_round_of_its_own() -> None:
    model = small()
    first, second = _two(model)
    with gs.Surgery(gs.Intervention(CLIP)).attach(model, [first, second]) as live:
        for step in range(4):
            backward(model, step)
            first.step()
            if step % 2:
                second.step()
                model.zero_grad()
        # Gradients that came between two steps of a round begin another one.
        backward(model)
        first.step()
        backward(model)
        second.step()
    assert set(calls_of(live).values()) == {6}


@pytest.mark.parametrize("transform", [gs.SkipUpdate(1e-6), gs.AdaptiveClip(warmup=1)])
def test_a_group_with_a_state_decides_once_for_all_optimizers(transform: Any) -> None:
    model = small()
    optimizers = _two(model)
    before = weights(model)
    with gs.Surgery(gs.Intervention(transform)).attach(model, optimizers) as live:
        for step in range(3):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
            assert all(param.grad is not None for param in model.parameters())
            model.zero_grad()
        skips = isinstance(transform, gs.SkipUpdate)
        assert live.skipped_steps == ({"skip_update": 3} if skips else {})
    assert all(map(torch.equal, before, weights(model))) == skips
    assert set(calls_of(live).values()) == {3}


def test_a_skip_ends_with_the_next_gradients_of_an_optimizer_that_did_not_step() -> None:
    model = small()
    first, second = _two(model)
    item = gs.Intervention(gs.SkipUpdate(1e-6), when=gs.Steps(stop=1))
    with gs.Surgery(item).attach(model, [first, second]):
        backward(model)
        first.step()
        model.zero_grad()
        before = weights(model)
        backward(model)
        first.step()
        second.step()
    assert not any(map(torch.equal, before, weights(model)))


@pytest.mark.parametrize("by_hand", [False, True], ids=["in the step", "before_step"])
def test_gradients_of_all_optimizers_must_be_unscaled_before_the_first_steps(by_hand: bool) -> None:
    model = small()
    optimizers, scaler = [sgd(model.first), sgd(model.last)], torch.amp.GradScaler("cpu")
    surgery = gs.Surgery(gs.Intervention(CLIP))
    with surgery.attach(model, optimizers, scaler=scaler) as live:  # pyright: ignore[reportArgumentType]
        step = live.before_step if by_hand else scaler.step
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        scaler.unscale_(optimizers[0])
        with pytest.raises(RuntimeError, match="before the first scaler.step"):
            step(optimizers[0])
        scaler.unscale_(optimizers[1])
        step(optimizers[0])
    assert set(calls_of(live).values()) == {1}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gan_whose_optimizers_take_turns(scaled: bool) -> None:
    """The first steps twice as often as the second, which has no gradients then."""
    plain, model = small(), small()
    for net in (plain, model):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled and net is model)
        optimizers = [sgd(net.first), sgd(net.last)]
        surgery = gs.Surgery(gs.Intervention(CLIP if net is model else gs.Identity()))
        with surgery.attach(net, optimizers, scaler=scaler) as live:  # pyright: ignore[reportArgumentType]
            for optimizer in (optimizers[0], *optimizers) * 2:
                net.zero_grad()
                params = optimizer.param_groups[0]["params"]
                scaler.scale(torch.stack([(param**2).sum() for param in params]).sum()).backward()
                scaler.unscale_(optimizer)
                if net is plain:
                    clip_grad_norm_(net.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
        assert live.step == 4
    for weight, expected in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(weight, expected)


# Exceptions, and a block that ends inside a step


class Failing(SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


@pytest.mark.parametrize("at", [STEP, gs.Updates(), MatchedUpdates(), gs.Weights()], ids=repr)
def test_a_step_that_raises_is_not_counted_and_the_next_is(at: Any) -> None:
    plain, model = small(), small()
    optimizer = Failing(model.parameters(), lr=0.1)
    with attached(model, gs.Identity(), at, optimizer) as live:
        for step in range(3):
            optimizer.fails = step == 1
            optimizer.zero_grad()
            backward(model, step)
            if optimizer.fails:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
            else:
                optimizer.step()
        assert live.step == 2
    train(plain, sgd(plain), 1)
    train(plain, sgd(plain), 1, start=2)
    assert all(map(torch.equal, weights(model), weights(plain)))


@pytest.mark.parametrize("where", ["closure", "before", "after"])
def test_the_block_may_end_inside_a_step(where: str) -> None:
    model, lives = small(), []
    optimizer = sgd(model)

    def act(grad: Tensor) -> Tensor:
        if where != "closure":
            lives[0].abort()
        return grad

    def closure() -> None:
        backward(model)
        if where == "closure":
            lives[0].abort()

    item = gs.Intervention(act, gs.Weights() if where == "after" else STEP)
    lives.append(gs.Surgery(item).start(model, optimizer))
    for _ in range(2):
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    assert num_hooks(model, optimizer) == 0


@pytest.mark.parametrize("raises", [False, True])
def test_the_gradients_of_a_skipped_step_that_is_never_made_are_back_after_the_block(
    raises: bool,
) -> None:
    model = small()
    optimizer = Failing(model.parameters(), lr=0.1)
    optimizer.fails = True
    with attached(model, gs.SkipUpdate(1e-6), None, optimizer) as live:
        backward(model)
        if raises:
            with pytest.raises(ArithmeticError):
                optimizer.step()
        else:
            live.before_step()
    assert all(param.grad is not None for param in model.parameters())


# Memory


@pytest.mark.parametrize("at", [STEP, gs.Parameters(stage="backward_end")], ids=repr)
def test_each_gradient_is_written_and_freed_before_the_next_is_made(
    at: gs.Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, alive = small(), list[int]()
    optimizer = sgd(model)

    def zeros(grads: Sequence[Tensor], _: object) -> Iterator[Tensor]:
        held = [ref(grad) for grad in grads]
        for index in range(len(held)):
            alive.append(sum(grad() is not None for grad in held))
            yield torch.zeros_like(grads[index])

    # That of a user is computed whole, and checked, before a gradient is written.
    monkeypatch.setattr(UserGroup, "__module__", "gradsurg.transforms.streams")
    transform = UserGroup(zeros)
    with attached(model, transform, at, optimizer, effects_every=0):
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert alive == [4, 3, 2, 1] * 2


def test_a_transform_of_single_tensors_holds_no_list_of_gradients() -> None:
    model, alive = small(), []
    optimizer = sgd(model)

    def one(grad: Tensor) -> Tensor:
        alive.append([param.grad.any().item() for param in model.parameters()])  # pyright: ignore
        return torch.zeros_like(grad)

    surgery = gs.Surgery(gs.Intervention(one, STEP))
    with surgery.attach(model, optimizer):
        backward(model)
        optimizer.step()
    assert [sum(row) for row in alive] == [4, 3, 2, 1]


def test_two_groups_act_once_in_a_round_also_of_two_surgeries() -> None:
    model = small()
    optimizers = _two(model)
    items = [gs.Intervention(CLIP), gs.Intervention(gs.RescaleGlobalNorm())]
    with (
        pytest.warns(gs.SurgeryWarning, match="two surgeries with this intervention are attached"),
        gs.Surgery(*items).attach(model, optimizers) as live,
        gs.Surgery(*items).attach(model, optimizers) as other,
    ):
        for step in range(3):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert {entry.calls for each in (live, other) for entry in each.ledger} == {3}
    assert num_hooks(model, *optimizers) == 0


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "nobody": lambda grad: None,
    "the user": lambda grad: grad,
    "a view": lambda grad: grad[1:],
    "NumPy": lambda grad: grad.numpy(),
    "a graph": lambda grad: nn.Parameter(torch.ones(3, 3)) * grad,
}


SCALING = [gs.ClipNorm(0.5), gs.Scale(0.5), gs.ClipGlobalNorm(0.5), gs.RescaleGlobalNorm(0.5)]


def _memory_of(array: np.ndarray, param: nn.Parameter) -> np.ndarray:
    param.grad = torch.from_numpy(array)
    return array


@pytest.mark.parametrize("holder", [*HOLDERS, "memory of NumPy"])
@pytest.mark.parametrize("every", [0, 1], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("transform", SCALING, ids=repr)
def test_a_gradient_is_scaled_in_place_only_if_nothing_else_holds_it(
    transform: Transform, holder: str, every: int
) -> None:
    param = nn.Parameter(torch.zeros(3, 3))
    model = nn.ParameterDict({"w": param})
    optimizer = SGD(model.parameters(), lr=0.0)
    surgery = gs.Surgery(gs.Intervention(transform, at=STEP))
    with surgery.attach(model, optimizer, effects_every=every) as live:
        for step in range(3):
            before = torch.randn(3, 3, generator=torch.Generator().manual_seed(step))
            param.grad = before.clone()
            if holder in HOLDERS:
                held = HOLDERS[holder](param.grad)
            else:
                held = _memory_of(before.numpy().copy(), param)
            address = param.grad.data_ptr()
            optimizer.step()
            expected, _ = transform.update(before, {}, TransformContext())
            assert param.grad.equal(expected)
            in_place = param.grad.data_ptr() == address
            assert in_place == (holder == "nobody" and not every)
            if isinstance(held, np.ndarray | Tensor) and holder != "a graph":
                assert torch.as_tensor(held).equal(before[1:] if holder == "a view" else before)
        assert [entry.fired for entry in live.ledger] == [3]


@pytest.mark.parametrize("transform", SCALING, ids=repr)
def test_of_several_gradients_those_that_are_held_are_replaced(transform: Transform) -> None:
    params = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)])
    optimizer = SGD(params.parameters(), lr=0.0)
    given = [torch.arange(1.0, size + 1) for size in (2, 3, 4)]
    with attached(params, transform, STEP, optimizer, effects_every=1):  # out of place
        for param, grad in zip(params, given, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    expected = [param.grad for param in params]
    with attached(params, transform, STEP, optimizer, effects_every=0):
        for param, grad in zip(params, given, strict=True):
            param.grad = grad.clone()
        held, addresses = params[1].grad, [param.grad.data_ptr() for param in params]
        optimizer.step()
    assert [param.grad.data_ptr() for param in params][::2] == addresses[::2]
    assert params[1].grad is not held
    assert torch.equal(held, given[1])
    assert all(torch.equal(param.grad, each) for param, each in zip(params, expected, strict=True))


class OwnScale(gs.Scale):
    """One of a user, who overrides `apply` alone."""

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad * self.factor**2


@pytest.mark.parametrize(
    ("transform", "shadow", "when", "factors"),
    [
        (gs.Chain(gs.Scale(0.5), gs.Scale(0.5)), False, gs.Always(), [0.25, 0.25]),
        (OwnScale(0.5), False, gs.Always(), [0.25, 0.25]),
        (gs.Scale(0.5), True, gs.Always(), [1.0, 1.0]),
        (gs.Scale(0.5), False, gs.Steps(start=1), [1.0, 0.5]),
    ],
    ids=["chain", "of a user", "shadow", "trigger"],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_held_are_replaced_where_a_product_is_not_all(
    transform: Transform, shadow: bool, when: Trigger, factors: list[float], sparse: bool
) -> None:
    model = nn.Embedding(3, 2, sparse=sparse)
    optimizer = SGD(model.parameters(), lr=0.0)
    surgery = gs.Surgery(gs.Intervention(transform, STEP, when=when))
    with surgery.attach(model, optimizer, effects_every=0, shadow=shadow):
        for factor in factors:
            optimizer.zero_grad()
            model(torch.tensor([0, 2, 2])).sum().backward()
            grad = model.weight.grad
            assert grad is not None
            expected = factor * grad.to_dense()
            optimizer.step()
            after = model.weight.grad
            assert after is not None
            assert after.to_dense().equal(expected)
            assert (after is grad) == (factor == 1.0)  # held here, it is never written to


def test_sparse_and_complex_gradients_that_come_late_are_refused_by_name() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.0)
    with attached(model, gs.ClipNorm(0.5), STEP, optimizer, effects_every=0):
        model.weight.grad = torch.ones(2, 2)
        optimizer.step()
        model.weight.grad = torch.ones(2, 2).to_sparse()
        with pytest.raises(TypeError, match="weight"):
            optimizer.step()
    bare = nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    optimizer = SGD(bare.parameters(), lr=0.0)
    with attached(bare, gs.ClipNorm(0.5), STEP, optimizer, effects_every=0):
        bare["w"].grad = torch.ones(2, dtype=torch.complex64)
        with pytest.raises(TypeError, match="w"):
            optimizer.step()


def test_of_two_surgeries_that_scale_in_place_one_warns() -> None:
    model = small()
    optimizer, scale = sgd(model), gs.Scale(0.5)
    with (
        pytest.warns(gs.SurgeryWarning, match="two surgeries with this intervention are attached"),
        attached(model, scale, STEP, optimizer, effects_every=0),
        attached(model, scale, STEP, optimizer, effects_every=0),
    ):
        train(model, optimizer, 2)


def test_a_gradient_is_replaced_where_pytorch_does_not_count_its_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autograd, "_counts_holders", False)
    param = nn.Parameter(torch.zeros(3))
    optimizer = SGD([param], lr=0.0)
    surgery = gs.Surgery(gs.Intervention(gs.ClipNorm(0.5), at=STEP))
    with surgery.attach(nn.ParameterDict({"w": param}), optimizer, effects_every=0):
        for _ in range(3):
            param.grad = torch.tensor([3.0, 4.0, 0.0])
            address = param.grad.data_ptr()
            optimizer.step()
            assert param.grad.data_ptr() != address
            torch.testing.assert_close(param.grad, torch.tensor([0.3, 0.4, 0.0]))
