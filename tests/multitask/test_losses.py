"""Losses, places and gradients that are wrong or odd: each has a number or is refused by name."""

import warnings

import pytest
import torch

import gradsurg as gs
from tests.multitask.nets import (
    Net,
    Uneven,
    at_shared,
    grads_of,
    inputs,
    losses_of,
    still,
)

# Wrong arguments

WRONG = {
    "none": (lambda m: {}, ValueError, "must have at least one"),
    "a number": (lambda m: 3.0, TypeError, "must be a mapping or a sequence"),
    "numbers": (lambda m: [1.0, 2.0], TypeError, r"losses\['0'\]: must be a tensor, found 1.0"),
    "a vector": (lambda m: {"a": m(inputs())["a"]}, ValueError, "must be a scalar, found shape"),
    "a matrix": (lambda m: m(inputs())["a"], ValueError, "must be a 1-D tensor, found shape"),
    "integers": (lambda m: {"a": torch.tensor(3)}, TypeError, "a real number, found torch.int64"),
    "no graph": (
        lambda m: {"a": torch.tensor(3.0)},
        ValueError,
        "'a'.*does not require a gradient",
    ),
    "a slash": (lambda m: {"a/b": m(inputs())["a"].sum()}, ValueError, "without '/'"),
    "one name twice": (
        lambda m: {0: m(inputs())["a"].sum(), "0": m(inputs())["b"].sum()},
        ValueError,
        "two have the name '0'",
    ),
    "of another model": (
        lambda m: losses_of(Net()),
        ValueError,
        r"losses\['a'\]: leave it out: it depends on no parameter",
    ),
    "nothing shared": (
        lambda m: {task: m.heads[task](torch.ones(1, 6)).mean() for task in ("a", "b")},
        ValueError,
        "two losses must depend on the same .* of all 10 parameters a reaches 2, b reaches 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_refused_by_name(name: str) -> None:
    make, error, rule = WRONG[name]
    model = Net()
    surgery = gs.Surgery(at_shared(Uneven()))
    with pytest.raises(error, match=rule), surgery.attach(model) as live:
        live.backward(make(model))


def test_wrong_interventions_are_refused() -> None:
    with pytest.raises(TypeError, match=r"found a class: write PCGrad\(\)"):
        gs.Intervention(gs.PCGrad, at=gs.SharedParameters())
    with pytest.raises(ValueError, match="SharedParameters takes aggregators"):
        gs.Intervention(gs.Clip(1.0), at=gs.SharedParameters())
    with pytest.raises(ValueError, match="at SharedParameters, .*, found at=Parameters"):
        gs.Intervention(Uneven(), at=gs.Parameters())
    with pytest.raises(ValueError, match="this trigger reads one gradient"):
        gs.Surgery(
            gs.Intervention(Uneven(), at=gs.SharedParameters(), when=gs.ForTask("a"))
        ).attach(Net()).__enter__()
    with pytest.raises(ValueError, match="has no stages, found 'step'"):
        gs.SharedParameters(stage="step")
    with pytest.raises(LookupError, match="nothing"):
        gs.Surgery(at_shared(Uneven(), pattern="nothing")).attach(Net()).__enter__()


@pytest.mark.parametrize("fields", [{}, {"engine": "feature", "features": "heads.a"}], ids=str)
def test_zero_opposite_and_equal_gradients_have_numbers(fields: dict[str, str]) -> None:
    model = Net()
    with gs.Surgery(at_shared(gs.TrimmedMean(0.1), **fields)).attach(model) as live:
        loss = losses_of(model)["a"]
        live.backward({"zero": 0 * loss, "up": -loss, "down": loss, "again": loss})
    assert all(grad is None or grad.isfinite().all() for grad in grads_of(model).values())
    (conflict,) = live.conflicts.fetch()
    assert conflict.norms[0] == 0.0
    assert conflict.cosines[1][2:] == pytest.approx([-1.0, -1.0])
    assert conflict.cosines[2][3] == pytest.approx(1.0)
    assert conflict.cosines[0] == [0.0] * 4


def test_a_step_with_pending_gradients_warns() -> None:
    model = Net()
    optimizer = still(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with gs.Surgery(at_shared(Uneven())).attach(model, optimizer) as live:
            live.backward(losses_of(model), aggregate=False)
            optimizer.step()
    said = [str(one.message) for one in told]
    assert any("made a step before the last live.backward" in one for one in said)
    assert any("so no step was combined" in one for one in said)


@pytest.mark.parametrize("calls", [9, 10])
def test_an_optimizer_without_steps_warns(calls: int) -> None:
    model = Net()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for optimizer in (still(model), None):
            with gs.Surgery(at_shared(gs.Random())).attach(model, optimizer) as live:
                for _ in range(calls):
                    live.backward(losses_of(model))
    said = [str(one.message) for one in told]
    assert [f"no step in {calls} updates, so triggers" in one for one in said] == (
        [True] if calls == 10 else []
    )


def test_a_zero_loss_that_takes_all_the_weight_warns_once() -> None:
    model = Net()
    with (
        pytest.warns(gs.SurgeryWarning) as told,
        gs.Surgery(at_shared(gs.FAMO())).attach(model) as live,
    ):
        for step in range(3):
            losses = losses_of(model, step)
            live.backward({**losses, "b": losses["b"] * (step == 0)})
    (said,) = told
    assert "famo: the loss of b is 0 at step 0, so that it has all the weight" in str(said.message)


def test_each_absent_task_warns_once() -> None:
    model = Net()
    with (
        pytest.warns(gs.SurgeryWarning) as told,
        gs.Surgery(at_shared(Uneven())).attach(model) as live,
    ):
        for absent in ("a", "b", "a", "c"):
            losses = losses_of(model)
            live.backward({**losses, absent: model.heads[absent].weight.sum() * 0})
    assert [str(one.message).split()[1] for one in told] == ["a", "b", "c"]


def test_pending_gradients_at_the_end_of_the_block_warn() -> None:
    model = Net()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with gs.Surgery(at_shared(Uneven())).attach(model) as live:
            live.backward(losses_of(model), aggregate=False)
    assert any("were never combined" in str(one.message) for one in told)


def test_a_warning_points_at_the_line_of_the_user() -> None:
    model = Net()
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        losses = losses_of(model)
        losses["b"] = losses["b"] * float("nan")
        with pytest.warns(gs.SurgeryWarning) as told:
            live.backward(losses)
    assert told[0].filename == __file__
