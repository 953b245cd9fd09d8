"""Group: all `.grad`s of a group at once, when a backward has ended, and once."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from tests.nets import attached, gradients, num_hooks, sgd
from tests.sites.points import TEN, Made, TimesValue, calls_of, recomputed


class Weighted(nn.Module):
    """The sum of a * x, b * y, c * z: each gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))
        self.c = nn.Parameter(torch.zeros(1))

    def forward(self, *values: float) -> Tensor:
        params = (self.a, self.b, self.c)
        return sum((p * v for p, v in zip(params, values, strict=False)), torch.zeros(1)).sum()


def _grads(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


CLIP = gs.ClipGlobalNorm(1.0, eps=0.0)
AT_ROOT = "a backward has failed, and the group was left as it is"


def test_a_group_transform_needs_no_optimizer() -> None:
    model = Weighted()
    with attached(model, CLIP, gs.Group("re:[ab]")) as live:
        model(3.0, 4.0, 100.0).backward()
        # |(3, 4)| = 5; the 100 is of no group. And it was done when backward() came back.
        assert _grads(model) == pytest.approx([0.6, 0.8, 100.0])
    assert calls_of(live) == {"a": 1, "b": 1}
    assert num_hooks(model) == 0


def test_it_is_the_default_stage_of_both_scopes_and_the_only_one() -> None:
    for transform in (CLIP, gs.Zero()):
        assert gs.Intervention(transform, gs.Group()).stage == "backward_end"
    with pytest.raises(ValueError, match="Group cannot have stage 'step'; stages it can have"):
        gs.Intervention(gs.Zero(), gs.Group(stage="step"))


def test_a_transform_of_one_tensor_acts_on_each_with_its_value() -> None:
    model = Weighted()
    with torch.no_grad():
        model.a.fill_(1.0)
        model.b.fill_(-1.0)
    transform = gs.ScaleBySign(positive=10.0, negative=2.0, of="value")
    with attached(model, transform, gs.Group()):
        model(3.0, 4.0, 5.0).backward()
    assert _grads(model)[:2] == [30.0, 8.0]


def test_parameters_that_a_backward_does_not_reach_keep_their_old_gradient() -> None:
    model = Weighted()
    model.c.grad = torch.tensor([100.0])
    with attached(model, CLIP, gs.Group()) as live:
        model(3.0, 4.0).backward()
        assert _grads(model) == pytest.approx([0.6, 0.8, 100.0])
        model.zero_grad()
        model(3.0, 4.0).backward(inputs=[model.b])
        assert _grads(model) == [None, pytest.approx(1.0), None]
        model(0.0, 0.0, 1.0).backward()
    assert calls_of(live) == {"a": 2, "b": 3, "c": 1}


# Backwards inside backwards


def _checkpointed(reentrant: bool, inside: tuple[int, ...] = (1,)) -> Made:
    """Layers, those in `inside` each in a checkpoint of its own."""

    def forward(self: Made, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = recomputed(layer, x, reentrant) if index in inside else layer(x)
        return x.pow(2).sum()

    torch.manual_seed(0)
    return Made(forward, layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))


def _x() -> Tensor:
    return torch.ones(1, 2, requires_grad=True)


def _norm(model: nn.Module) -> float:
    return torch.cat([grad.flatten() for grad in gradients(model).values()]).norm().item()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [(1,), (0,), (2,), (0, 2), (0, 1, 2)])
def test_around_checkpoints_the_group_acts_once_on_all_parameters(
    reentrant: bool, inside: tuple[int, ...]
) -> None:
    plain, model = _checkpointed(reentrant, ()), _checkpointed(reentrant, inside)
    plain(_x()).backward()
    with attached(model, gs.ClipGlobalNorm(0.5, eps=0.0), gs.Group()) as live:
        for _ in range(2):
            model.zero_grad()
            model(_x()).backward()
            assert _norm(model) == pytest.approx(0.5)
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(model)[name], grad * 0.5 / _norm(plain))
    assert calls_of(live) == dict.fromkeys(gradients(plain), 2)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the first forward
def test_nested_checkpoints_act_at_the_end_of_the_outermost_backward() -> None:
    model = _checkpointed(reentrant=True, inside=(0, 1, 2))
    x = _x()
    with attached(model, CLIP, gs.Group()) as live:
        loss = recomputed(lambda x: checkpoint(model, x, use_reentrant=True), x, True)
        loss.backward()
    assert _norm(model) == pytest.approx(1.0)
    assert set(calls_of(live).values()) == {1}


def test_an_error_after_an_inner_backward_is_reported_and_leaves_no_state() -> None:
    model = _checkpointed(reentrant=True, inside=(1,))
    x = _x()

    def fails(grad: Tensor) -> None:
        raise OSError("gone")

    with (
        pytest.warns(gs.SurgeryWarning, match=AT_ROOT),
        attached(model, CLIP, gs.Group()) as live,
    ):
        hidden: list[Tensor] = []
        handle = model.get_submodule("layers.0").register_forward_hook(
            lambda *args: hidden.append(args[-1])
        )
        loss = model(x)
        hidden.pop().register_hook(fails)
        handle.remove()
        with pytest.raises(OSError, match="gone"):
            loss.backward()
        del loss
        assert set(calls_of(live).values()) == {0}
        model.zero_grad()
        model(x).backward()
        assert _norm(model) == pytest.approx(1.0)
    assert set(calls_of(live).values()) == {1}


def test_a_backward_called_by_a_hook_on_a_leaf_is_reported() -> None:
    model, other = Weighted(), torch.ones(1, requires_grad=True)

    @torch.enable_grad()
    def more(param: Tensor) -> None:
        model(3.0, 4.0).backward()

    other.register_post_accumulate_grad_hook(more)
    with (
        pytest.warns(gs.SurgeryWarning, match="called by a hook on a leaf, inside another"),
        attached(model, CLIP, gs.Group("re:[ab]")) as live,
    ):
        (other * 2).backward()
        assert _grads(model)[:2] == [3.0, 4.0]
        model.zero_grad()
        model(3.0, 4.0).backward()
    assert calls_of(live) == {"a": 1, "b": 1}


# What goes wrong


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OSError("gone")


def _failing(model: Weighted) -> Tensor:
    """Reaches `a`, and fails on the way to `b`: what was made last runs first."""
    b = Fails.apply(model.b * 4.0)
    assert isinstance(b, Tensor)
    return (b + model.a * 3.0).sum()


def test_a_backward_that_raises_is_reported_and_the_next_one_acts() -> None:
    model = Weighted()
    with (
        pytest.warns(gs.SurgeryWarning, match=AT_ROOT) as caught,
        attached(model, CLIP, gs.Group("re:[ab]")) as live,
    ):
        for _ in range(2):
            model.zero_grad()
            with pytest.raises(OSError, match="gone"):
                _failing(model).backward()
            assert _grads(model) == [3.0, None, None]
        model.zero_grad()
        model(3.0, 4.0).backward()
        assert _grads(model)[:2] == pytest.approx([0.6, 0.8])
    assert calls_of(live) == {"a": 1, "b": 1}
    assert len(caught) == 1
    assert num_hooks(model) == 0


def test_a_last_backward_that_raises_is_reported_too() -> None:
    model = Weighted()
    with (
        pytest.warns(gs.SurgeryWarning, match=AT_ROOT),
        attached(model, gs.Scale(2.0), gs.Group("a")),
    ):
        model(1.0).backward()
        with pytest.raises(OSError, match="gone"):
            _failing(model).backward()


def test_an_optimizer_that_steps_inside_the_backward_is_reported() -> None:
    model = Weighted()

    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad)
        param.grad = None

    handles = [param.register_post_accumulate_grad_hook(step) for param in model.parameters()]
    with (
        pytest.warns(gs.SurgeryWarning) as caught,
        attached(model, CLIP, gs.Group("re:[ab]")) as live,
    ):
        model(3.0, 4.0).backward()
    for handle in handles:
        handle.remove()
    text = " ".join(str(warning.message) for warning in caught)
    assert "the .grad of a, b was gone when the backward had ended" in text
    assert "step" in live.ledger.table()  # as the hook of another
    assert [param.item() for param in model.parameters()] == [-3.0, -4.0, 0.0]


def test_an_optimizer_that_waits_for_the_end_of_backward_gets_the_transformed_gradients() -> None:
    model = Weighted()
    queued: list[bool] = []

    def step(param: Tensor) -> None:
        if not queued:
            queued.append(True)
            torch.autograd.Variable._execution_engine.queue_callback(optimizer.step)

    optimizer = sgd(model, lr=1.0)
    with attached(model, CLIP, gs.Group("re:[ab]")):
        # Registered after those of the group: their callback is queued first.
        handles = [param.register_post_accumulate_grad_hook(step) for param in model.parameters()]
        model(3.0, 4.0).backward()
    for handle in handles:
        handle.remove()
    assert [param.item() for param in model.parameters()] == pytest.approx([-0.6, -0.8, 0.0])


# Contexts


def test_the_new_gradients_have_a_graph_only_under_create_graph() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    model = nn.ParameterDict({"w": w})
    with attached(model, TEN, gs.Group()):
        with pytest.warns(UserWarning, match="create_graph=True will create a reference cycle"):
            (w**3).backward(create_graph=True)
        grad, w.grad = w.grad, None
        assert grad is not None
        # 10 * 3 w^2, and the derivative of that.
        assert grad.item() == 120.0
        assert torch.autograd.grad(grad, w)[0].item() == 120.0
    with attached(model, TimesValue(), gs.Group()):
        (w**3).backward()
    assert w.grad is not None
    assert (w.grad.item(), w.grad.requires_grad) == (24.0, False)


def test_threads_act_each_at_the_end_of_their_own_backward() -> None:
    model = Weighted()
    barrier = threading.Barrier(2)

    def work(values: tuple[float, ...]) -> None:
        barrier.wait(timeout=10)
        model(*values).backward()

    with attached(model, gs.Scale(2.0), gs.Group(), effects_every=0) as live:
        # They share no parameter: (1, 2) are a's and b's, 3 is c's.
        hidden = model.c
        threads = [
            threading.Thread(target=work, args=((1.0, 2.0),)),
            threading.Thread(target=lambda: (barrier.wait(timeout=10), (hidden * 3).backward())),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert _grads(model) == [2.0, 4.0, 6.0]
    assert calls_of(live) == {"a": 1, "b": 1, "c": 1}
