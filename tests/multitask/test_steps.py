"""State of one step ends with it, and knowledge from finished steps stays."""

from collections.abc import Callable
from math import isnan

import pytest
import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, Weighting
from gradsurg.core.live import Live
from gradsurg.plugins.registry import find
from tests.multitask.nets import (
    Net,
    Running,
    Uneven,
    at_shared,
    close,
    grads_of,
    inputs,
    losses_of,
    oracle,
    still,
)


def weights_of_steps(
    spoil: Callable[[Live, Net, torch.optim.Optimizer], None], steps: int = 3
) -> list[list[float]]:
    """The weights that Random has at each step, before each of which something goes wrong."""
    model = Net()
    optimizer = still(model)
    found = []
    with gs.Surgery(at_shared(gs.Random())).attach(model, optimizer) as live:
        for _ in range(steps):
            spoil(live, model, optimizer)
            optimizer.zero_grad()
            live.backward(losses_of(model))
            optimizer.step()
            found.append(live.conflicts.fetch()[-1].weights)
    return found


def unfinished(live: Live, model: Net, optimizer: torch.optim.Optimizer) -> None:
    live.backward(losses_of(model), aggregate=False)
    optimizer.step()
    live.clock.step -= 1


def failed(live: Live, model: Net, optimizer: torch.optim.Optimizer) -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("in the middle")

    handle = model.trunk[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        live.backward(losses_of(model), aggregate=False)
    handle.remove()


@pytest.mark.filterwarnings("ignore:the optimizer has made a step before")
@pytest.mark.parametrize("spoil", [unfinished, failed])
def test_loss_weights_last_for_one_step(
    spoil: Callable[[Live, Net, torch.optim.Optimizer], None],
) -> None:
    found = weights_of_steps(spoil)
    assert found == weights_of_steps(lambda *_: None)
    assert found[0] != found[1] != found[2]


def test_after_an_error_the_tasks_of_a_step_may_change() -> None:
    model = Net()
    optimizer = still(model)
    with gs.Surgery(at_shared(gs.Mean())).attach(model, optimizer) as live:
        live.backward(losses_of(model), aggregate=False)
        failed(live, model, optimizer)
        losses = losses_of(model)
        live.backward({"a": losses["a"], "b": losses["b"]})


# In shadow


def weights_in(shadow: bool, aggregator: Aggregator, apart: bool = False) -> list[list[float]]:
    """The measured weights of three steps, whose third task may not reach the trunk."""
    model = Net()
    optimizer = still(model)
    surgery = gs.Surgery(at_shared(aggregator))
    with surgery.attach(model, optimizer, shadow=shadow) as live:
        for step in range(3):
            losses = losses_of(model, step)
            if apart:
                losses["c"] = model.heads["c"].weight.square().sum()
            live.backward(losses)
            optimizer.step()
        return [conflict.weights for conflict in live.conflicts.fetch()]


@pytest.mark.parametrize(
    "aggregator", [gs.GradNorm(lr=0.5), gs.FAMO(lr=0.5), Running(), Uneven(), gs.Random()]
)
def test_in_shadow_the_update_and_state_of_the_aggregator_are_measured(
    aggregator: Aggregator,
) -> None:
    shadow, acting = weights_in(True, aggregator), weights_in(False, aggregator)
    assert shadow == acting
    assert shadow[0] != shadow[2]


@pytest.mark.filterwarnings("ignore:.* does not reach the shared parameters")
@pytest.mark.parametrize("aggregator", [gs.Mean(), gs.FixedWeights({"a": 1.0, "b": 2.0, "c": 3.0})])
def test_in_shadow_all_losses_are_weighted_even_if_one_does_not_reach_the_trunk(
    aggregator: Aggregator,
) -> None:
    shadow, acting = (weights_in(own, aggregator, apart=True) for own in (True, False))
    assert shadow == acting
    assert len(shadow[0]) == 2


def test_in_shadow_the_trigger_is_respected() -> None:
    model = Net()
    item = gs.Intervention(Uneven(), at=gs.SharedParameters(), when=gs.Steps(start=1))
    optimizer = still(model)
    with gs.Surgery(item).attach(model, optimizer, shadow=True) as live:
        for _ in range(2):
            live.backward(losses_of(model))
            optimizer.step()
        first, second = live.conflicts.fetch()
    assert first.weights == [1.0, 1.0, 1.0] != second.weights


# Under a loss scale


def overflowing(aggregator: Aggregator, where: str, steps: int = 3) -> tuple[Live, list[bool]]:
    """Training whose first steps overflow at a parameter, all but the last; whether each of the
    states remembers something then.
    """
    model = Net()
    optimizer = still(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    item = at_shared(aggregator, granularity="tensor" if where == "trunk.2.bias" else "whole")
    learnt = []
    with gs.Surgery(item).attach(model, optimizer, scaler=scaler) as live:
        for step in range(steps):
            param = dict(model.named_parameters())[where]
            handle = param.register_hook(lambda grad: grad * float("inf"))
            if step == steps - 1:
                handle.remove()
            optimizer.zero_grad()
            live.backward({name: scaler.scale(own) for name, own in losses_of(model, step).items()})
            scaler.step(optimizer)
            scaler.update()
            handle.remove()
            learnt.append(bool(live.attachment.states))
    return live, learnt


@pytest.mark.parametrize("where", ["trunk.0.weight", "trunk.2.bias", "heads.a.weight"])
@pytest.mark.parametrize("aggregator", [gs.GradVac(), gs.FAMO(), gs.UncertaintyWeighting()])
def test_a_step_that_the_scaler_skips_changes_no_state(aggregator: Aggregator, where: str) -> None:
    if where == "trunk.2.bias" and not isinstance(aggregator, gs.GradVac):
        aggregator = Running()
    live, learnt = overflowing(aggregator, where)
    assert learnt == [False, False, True]
    assert live.step == 1


@pytest.mark.parametrize("aggregator", [gs.PCGrad(), gs.Random()])
def test_overflowed_steps_are_left_out_of_the_conflicts(aggregator: Aggregator) -> None:
    live, _ = overflowing(aggregator, "trunk.0.weight")
    (conflict,) = live.conflicts.fetch()
    assert all(norm < 1e6 for norm in conflict.norms)
    assert "inf" not in live.conflicts.table()
    assert "nan" not in live.conflicts.table()


# Under what a user has set for a thread


ALL = ("mean", "famo", "pcgrad", "krum", "cagrad")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tasks", ["ab", "abc"])
def test_a_default_device_changes_no_update(name: str, tasks: str) -> None:
    if (name, tasks) == ("krum", "ab"):
        name = "nash_mtl"  # two tasks are too few for Krum
    aggregator = find("aggregators", name)()
    found = []
    for awry in (False, True):
        model = Net(tuple(tasks))
        losses = losses_of(model)
        with gs.Surgery(at_shared(aggregator)).attach(model, still(model)) as live:
            torch.set_default_device("meta" if awry else None)
            try:
                live.backward(losses)
                live.conflicts.fetch()
            finally:
                torch.set_default_device(None)
        found.append(grads_of(model))
    close(*found, rtol=0.0)


@pytest.mark.parametrize("name", ["mean", "mgda", "upgrad", "nash_mtl", "cagrad", "pcgrad"])
def test_calling_an_aggregator_is_precise_under_autocast_and_a_default_device(name: str) -> None:
    aggregator = find("aggregators", name)()
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = aggregator(rows)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert torch.equal(aggregator(rows), expected)


def test_calling_an_aggregator_refuses_other_types() -> None:
    rows: object = [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(TypeError, match=r"PCGrad needs a tensor, found \[\[1.0, 2.0\]"):
        gs.PCGrad()(rows)  # pyright: ignore[reportArgumentType]


# Warnings


class Misshapen(Weighting):
    """Weights that no rows can have."""

    def __init__(self, weights: Tensor) -> None:
        self.own = weights

    def weights(self, gramian: Tensor) -> Tensor:
        return self.own


def test_a_class_with_a_weights_method_is_an_aggregator() -> None:
    aggregator = Misshapen(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64))
    assert aggregator(torch.eye(3)).tolist() == [1.0, 0.0, 2.0]
    assert aggregator.properties == frozenset()


def test_weights_that_are_no_tensor_are_refused_by_name() -> None:
    weights: object = [1.0, 0.0, 2.0]
    aggregator = Misshapen(weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^Misshapen: weights must be a tensor, found \[1\.0,"):
        aggregator(torch.eye(3))


@pytest.mark.parametrize("weights", [torch.ones(3), torch.ones(2).double(), torch.ones(1).double()])
def test_weights_of_a_wrong_dtype_or_shape_are_refused(weights: Tensor) -> None:
    aggregator = Misshapen(weights)
    said = r"^Misshapen: weights must be float64 of shape \[3\], found torch\.float"
    with pytest.raises(ValueError, match=said):
        aggregator(torch.eye(3))
    model = Net()
    with (
        gs.Surgery(at_shared(aggregator)).attach(model) as live,
        pytest.raises(ValueError, match=said),
    ):
        live.backward(losses_of(model))


def test_concatenated_or_stacked_heads_warn() -> None:
    for form in ("apart", "stacked", "concatenated"):
        model = Net()
        losses: dict[str, Tensor] | Tensor = losses_of(model)
        if form == "stacked":
            losses = torch.stack(list(losses.values()))
        elif form == "concatenated":
            outputs = torch.cat(list(model(inputs()).values()), dim=1)
            losses = {name: outputs[:, i].square().mean() for i, name in enumerate("abc")}
        with gs.Surgery(at_shared(Uneven())).attach(model) as live:
            if form == "apart":
                live.backward(losses)
                continue
            told = r"^uneven: give each loss .* all tasks reach heads\.a\.\w+, "
            with pytest.warns(gs.SurgeryWarning, match=told):
                live.backward(losses)


@pytest.mark.parametrize(
    "aggregator",
    [gs.GradDrop(), gs.Sum(), gs.TrimmedMean(0.3), gs.UncertaintyWeighting(), Uneven()],
)
def test_a_nonfinite_loss_warns_for_every_aggregator(aggregator: Aggregator) -> None:
    model = Net()
    losses = losses_of(model)
    losses["b"] = losses["b"] * float("nan")
    with gs.Surgery(at_shared(aggregator)).attach(model) as live:
        with pytest.warns(gs.SurgeryWarning, match="b is not finite at step 0"):
            live.backward(losses)
        (conflict,) = live.conflicts.fetch()
    assert isnan(conflict.cosines[1][1])
    assert isnan(conflict.norm_spread)
    pairs = [conflict.cosines[2][0] < 0]  # the one that exists
    assert conflict.conflict_rate == sum(pairs)
    assert "nan" in live.conflicts.table()


def test_measuring_does_not_change_random_draws() -> None:
    found = []
    for every in (0, 1):
        model = Net()
        torch.manual_seed(5)
        model.trunk[0].weight.register_hook(lambda grad: grad * torch.rand(()))
        with gs.Surgery(at_shared(gs.Mean())).attach(model, effects_every=every) as live:
            live.backward(losses_of(model))
        found.append(grads_of(model))
    close(*found, rtol=0.0)


def test_a_custom_label_does_not_hide_an_aggregator_from_the_alternatives() -> None:
    model = Net()
    item = gs.Intervention(gs.MGDA(), at=gs.SharedParameters(), names=("pcgrad",))
    with gs.Surgery(item).attach(model) as live:
        live.backward(losses_of(model))
        (conflict,) = live.conflicts.fetch()
    assert "pcgrad" in conflict.others
    assert "mgda" not in conflict.others


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_task_with_nan_is_left_out_if_chosen(bad: str) -> None:
    model, factor = Net(), float("nan")
    losses = losses_of(model)
    kept = {name: losses[name] for name in ("a", "c")}
    expected = oracle(
        model, kept, [(Uneven(), [name for name, _ in model.named_parameters() if "trunk" in name])]
    )
    if bad == "gradient":
        model.heads["b"].weight.register_hook(lambda grad: grad * factor)
    losses = losses_of(model)
    losses["b"] = losses["b"] * (factor if bad == "loss" else 1)
    model.zero_grad()
    surgery = gs.Surgery(at_shared(Uneven(), on_nonfinite="skip"))
    assert "a task with a NaN or infinity is left out" in surgery.plan(model)
    with (
        pytest.warns(gs.SurgeryWarning, match="the gradient of one task was left out 1 times"),
        pytest.warns(gs.SurgeryWarning, match="the gradient of b at step 0: left out of the step"),
        surgery.attach(model) as live,
    ):
        live.backward(losses)
    close(grads_of(model), expected)


def test_an_aggregator_that_needs_all_tasks_skips_a_step_with_nan() -> None:
    model = Net()
    losses = losses_of(model)
    losses["a"] = losses["a"] * float("nan")
    surgery = gs.Surgery(at_shared(Running(), on_nonfinite="skip"))
    with (
        pytest.warns(gs.SurgeryWarning, match="1 steps were skipped"),
        pytest.warns(gs.SurgeryWarning, match="of a at step 0: the step was skipped"),
        surgery.attach(model) as live,
    ):
        live.backward(losses)
        assert all(param.grad is None for param in model.parameters())
        live.backward(losses_of(model))
    grads = grads_of(model).values()
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


def test_skip_needs_the_engine_full() -> None:
    with pytest.raises(ValueError, match="on_nonfinite: 'skip' needs engine='full'"):
        gs.SharedParameters(engine="feature", features="trunk", on_nonfinite="skip")
