"""Weights: parameter values are edited in place, at the right moment, where they change."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.transforms.base import Stateless, TransformContext, TransformProperty
from tests.nets import attached, batch, num_hooks, sgd, small, train, weights
from tests.sites.points import calls_of


class Flip(Stateless):
    """A view of what it is given."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return grad.t()


class Seen(Stateless):
    """Writes down the step that it is told."""

    steps: list[int]

    def __init__(self) -> None:
        self.steps = []

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.steps.append(context.step)
        return grad


def _one(value: float = 1.0) -> nn.Linear:
    """One weight of 2, w = `value`: the gradient of w x at x = 3 is 3."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 2), 3.0)).sum().backward()
    optimizer.step()


def test_weights_are_clipped_after_each_step() -> None:
    model = _one()
    optimizer = sgd(model, lr=1.0)
    with attached(model, gs.Clip(0.5), gs.Weights(), optimizer) as live:
        _step(model, optimizer)
        assert model.weight.tolist() == [[-0.5, -0.5]]  # 1 - 3 = -2
        _step(model, optimizer)
        assert model.weight.tolist() == [[-0.5, -0.5]]
    assert calls_of(live) == {"weight": 2}
    _step(model, optimizer)
    assert model.weight.tolist() == [[-3.5, -3.5]]


def test_at_stage_forward_they_are_edited_before_each_call_in_training_mode() -> None:
    model = _one(8.0)
    with attached(model, gs.Scale(0.5), gs.Weights(stage="forward")) as live:
        assert model(torch.ones(1, 2)).item() == 8.0
        assert model(torch.ones(1, 2)).item() == 4.0
        model.eval()
        assert model(torch.ones(1, 2)).item() == 4.0
    assert calls_of(live) == {"weight": 2}


def test_the_parameter_keeps_its_optimizer_and_its_hooks() -> None:
    model = _one()
    optimizer = sgd(model, lr=1.0)
    held, seen = model.weight, []
    model.weight.register_hook(lambda grad: seen.append(grad.tolist()))
    with attached(model, gs.Scale(0.0), gs.Weights(), optimizer):
        _step(model, optimizer)
        _step(model, optimizer)
    assert model.weight is held
    assert held is optimizer.param_groups[0]["params"][0]
    assert len(seen) == 2


def test_a_no_op_is_bit_identical_and_writes_to_nothing() -> None:
    plain, model = small(), small()
    train(plain, sgd(plain), 5)
    optimizer = sgd(model)
    at = gs.Weights(stage="forward")
    with (
        attached(model, gs.Identity(), gs.Weights(), optimizer),
        attached(model, gs.Identity(), at, optimizer),
        attached(model, gs.Scale(3.0), gs.Weights(), optimizer, shadow=True),
    ):
        train(model, optimizer, 5)
        versions = {name: param._version for name, param in model.named_parameters()}
    for ours, theirs in zip(weights(model), weights(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert versions == {name: param._version for name, param in plain.named_parameters()}


def test_a_result_that_is_a_view_of_the_weight_is_copied_correctly() -> None:
    model = nn.Linear(64, 64, bias=False)
    expected = model.weight.detach().t().clone()
    with attached(model, Flip(), gs.Weights(stage="forward")):
        model(torch.ones(1, 64))
    assert torch.equal(model.weight, expected)


def test_a_group_transform_sees_all_weights_together() -> None:
    for stage in ("step", "forward"):
        first, last = _one(3.0), nn.Linear(1, 1, bias=False)
        nn.init.constant_(last.weight, 4.0)
        model = nn.Sequential(first, last)
        optimizer = sgd(model, lr=0.0)
        with attached(model, gs.ClipGlobalNorm(1.0), gs.Weights(stage=stage), optimizer):
            _step(model, optimizer)
        # sqrt(3^2 + 3^2 + 4^2) = sqrt(34).
        assert first.weight.tolist() == [[pytest.approx(3 / 34**0.5, rel=1e-4)] * 2]
        assert last.weight.item() == pytest.approx(4 / 34**0.5, rel=1e-4)


def test_the_step_number_is_that_of_the_last_step() -> None:
    model = small()
    optimizer = sgd(model)
    after, before, added = Seen(), Seen(), Seen()
    with (
        attached(model, after, gs.Weights("first.bias"), optimizer) as live,
        attached(model, before, gs.Parameters("first.bias", stage="step"), optimizer),
    ):
        live.add(gs.Intervention(added, gs.Weights("first.bias")))
        train(model, optimizer, 3)
        assert live.step == 3
    assert after.steps == before.steps == added.steps == [0, 1, 2]


def test_triggers_and_effects_are_counted() -> None:
    model = _one()
    optimizer = sgd(model, lr=0.0)
    when = gs.Steps(start=1, stop=3)
    with attached(model, gs.Scale(2.0), gs.Weights(), optimizer, when) as live:
        for _ in range(4):
            _step(model, optimizer)
    assert model.weight.tolist() == [[4.0, 4.0]]
    (row,) = live.effects.rows()
    assert (row["site"], row["seen"], row["calls"]) == ("weight", 4, 2)
    # Norms before: 1 and 2, each times the root of 2.
    assert row["norm_before"] == pytest.approx(1.5 * 2**0.5)
    assert row["norm_after"] == pytest.approx(3 * 2**0.5)
    assert "weight" in live.effects.table()


def test_a_frozen_parameter_is_left_alone_and_the_ledger_says_so() -> None:
    model = small()
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    with attached(model, gs.Zero(), gs.Weights("*.weight", stage="forward")) as live:
        model(batch()[0])
    assert torch.equal(model.first.weight, before)
    assert not model.last.weight.any()
    assert "first.weight  (frozen)" in live.ledger.table()
    with (
        pytest.raises(LookupError, match="all that 'first.*' matches is frozen"),
        attached(model, gs.Zero(), gs.Weights("first.*", stage="forward")),
    ):
        pass


def test_a_tied_parameter_is_one_site() -> None:
    model = nn.Sequential(_one(), _one())
    model[1].weight = model[0].weight
    with (
        attached(model, gs.Scale(2.0), gs.Weights(stage="forward")) as live,
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        model(torch.ones(1, 2))
    assert model[0].weight.tolist() == [[2.0, 2.0]]
    (entry,) = live.ledger
    assert (entry.site, entry.aliases) == ("0.weight", ["1.weight"])


@pytest.mark.parametrize(
    ("at", "sites"),
    [
        (gs.Weights("*.bias"), ["first.bias", "last.bias"]),
        (gs.Weights(ndim=2), ["first.weight", "last.weight"]),
        (gs.Weights(size=(16, 100)), ["first.weight"]),
        (gs.Weights("first.bias") | gs.Weights("last.bias"), ["first.bias", "last.bias"]),
        (gs.Weights("first.*") & ~gs.Weights("*.bias"), ["first.weight"]),
        (gs.Weights().first(1), ["first.weight"]),
        (gs.Weights("*.bias").expect(2), ["first.bias", "last.bias"]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no gradient ever passed")
def test_weights_are_selected_like_parameters(at: Any, sites: list[str]) -> None:
    model = small()
    optimizer = sgd(model)
    with attached(model, gs.Scale(0.5), at, optimizer) as live:
        train(model, optimizer, 1)
    assert [entry.site for entry in live.ledger] == sites


def test_invalid_stages_are_refused() -> None:
    model = small()
    with (
        pytest.raises(ValueError, match="stage 'step' needs the optimizer"),
        attached(model, gs.Zero(), gs.Weights()),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"the optimizer does not have last\.weight, last\.bias"),
        attached(model, gs.Zero(), gs.Weights(), sgd(model.first)),
    ):
        pass
    with (
        pytest.raises(LookupError, match="Weights.pattern: nothing matches 'lst"),
        attached(model, gs.Zero(), gs.Weights("lst.*"), sgd(model)),
    ):
        pass
    with pytest.raises(FieldError, match=r"Weights\.pattern"):
        gs.Weights("re:(")
    with pytest.raises(ValueError, match="Weights cannot have stage 'backward'"):
        gs.Intervention(gs.Zero(), gs.Weights(stage="backward"))
    assert num_hooks(model) == 0


@pytest.mark.parametrize("stage", ["step", "forward"])
def test_hooks_are_gone_after_the_block_and_after_an_exception(stage: Any) -> None:
    model = small()
    optimizer = sgd(model)
    before = num_hooks(model, optimizer)
    with attached(model, gs.Identity(), gs.Weights(stage=stage), optimizer):
        assert num_hooks(model, optimizer) > before
        train(model, optimizer, 1)
    assert num_hooks(model, optimizer) == before
    with (
        pytest.raises(OSError, match="gone"),
        attached(model, gs.Identity(), gs.Weights(stage=stage), optimizer),
    ):
        raise OSError("gone")
    assert num_hooks(model, optimizer) == before


@pytest.mark.parametrize("stage", ["step", "forward"])
def test_nothing_is_kept_alive(stage: Any) -> None:
    model = small()
    optimizer = sgd(model)
    surgery = gs.Surgery(gs.Intervention(gs.GrokfastEMA(), gs.Weights(stage=stage)))
    with surgery.attach(model, optimizer) as live:
        train(model, optimizer, 1)
    held = [ref(model), ref(model.first.weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in held] == [None, None]
    assert live.ledger


def test_a_replaced_parameter_is_reported() -> None:
    model = small()
    with (
        pytest.warns(gs.SurgeryWarning, match="parameters were replaced, .*first.weight"),
        attached(model, gs.Scale(0.5), gs.Weights(stage="forward")),
    ):
        model(batch()[0])
        model.first.weight = nn.Parameter(torch.ones(5, 6))


def test_a_step_that_the_scaler_skips_edits_nothing() -> None:
    model = _one()
    optimizer = sgd(model, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with attached(model, gs.Clip(0.5), gs.Weights(), optimizer) as live:
        for x in (float("inf"), 3.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), x)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            if x > 3:
                assert model.weight.tolist() == [[1.0, 1.0]]
    assert model.weight.tolist() == [[-0.5, -0.5]]
    assert calls_of(live) == {"weight": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_recomputation_of_a_checkpoint_does_not_count_as_a_call(reentrant: bool) -> None:
    model = nn.Sequential(_one(2.0), nn.Tanh())
    x = torch.ones(1, 2, requires_grad=True)
    with attached(model, gs.Scale(0.5), gs.Weights(stage="forward")) as live:
        y = checkpoint(model, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert calls_of(live) == {"0.weight": 1}
    torch.testing.assert_close(x.grad, torch.full((1, 2), 1 - torch.tanh(torch.tensor(2.0)) ** 2))


def test_a_backward_after_the_weights_were_edited_is_refused_by_pytorch() -> None:
    model = small()
    with attached(model, gs.Scale(0.5), gs.Weights(stage="forward")):
        first = model(batch()[0]).sum()
        model(batch()[0])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()


@pytest.mark.filterwarnings("ignore")  # Dynamo trips over its own warnings when they are errors
@pytest.mark.parametrize("stage", ["step", "forward"])
def test_a_model_compiled_inside_the_block_is_edited_as_in_eager(stage: Any) -> None:
    def run(compiles: bool) -> tuple[list[Tensor], str]:
        torch.compiler.reset()
        model = small()
        optimizer = sgd(model)
        with attached(
            model,
            gs.GrokfastEMA(strength=0.1),
            gs.Weights(stage=stage),
            optimizer,
            gs.Steps(stop=3),
        ) as live:
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


def test_under_autocast_a_cast_of_the_old_weight_is_not_used() -> None:
    model = _one(8.0)
    with (
        attached(model, gs.Scale(0.5), gs.Weights(stage="forward")),
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert model(torch.ones(1, 2)).item() == 8.0
        assert model(torch.ones(1, 2)).item() == 4.0


def test_weights_can_be_added_and_removed_while_attached() -> None:
    model = _one()
    optimizer = sgd(model, lr=0.0)
    with attached(model, gs.Identity(), gs.Parameters(), optimizer) as live:
        label = live.add(gs.Intervention(gs.Scale(2.0), gs.Weights()))
        _step(model, optimizer)
        live.remove(label)
        _step(model, optimizer)
    assert model.weight.tolist() == [[2.0, 2.0]]
