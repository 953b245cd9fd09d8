"""Steps, Every, Epochs and Phase: triggers on the progress of a run."""

import pytest
import torch

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.triggers.base import Clock, TriggerContext
from tests.nets import attached, backward, gradients, sgd, small, train


@pytest.mark.parametrize(
    ("trigger", "steps"),
    [
        (gs.Always(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Steps(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Steps(start=3), [3, 4, 5, 6, 7]),
        (gs.Steps(stop=2), [0, 1]),
        (gs.Steps(start=2, stop=5), [2, 3, 4]),
        (gs.Steps(every=3), [0, 3, 6]),
        (gs.Steps(start=1, every=3), [1, 4, 7]),
        (gs.Steps(start=1, stop=7, every=3), [1, 4]),
        (gs.Steps(start=1, stop=8, every=3), [1, 4, 7]),
        (gs.Steps(start=6, stop=7, every=5), [6]),
        (gs.Every(1), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Every(3), [0, 3, 6]),
        (gs.Every(3, offset=2), [2, 5]),
        (gs.Every(2, offset=5), [5, 7]),
        (gs.Phase("warm_up", warm_up=2), [0, 1]),
        (gs.Phase("train"), [0, 1, 2, 3, 4, 5, 6, 7]),
        (gs.Phase("train", warm_up=2), [2, 3, 4, 5, 6, 7]),
        (gs.Phase("train", warm_up=2, fine_tune=5), [2, 3, 4]),
        (gs.Phase("train", warm_up=3, fine_tune=3), []),
        (gs.Phase("fine_tune", warm_up=2, fine_tune=5), [5, 6, 7]),
        (gs.Epochs(start=1, length=3), [3, 4, 5, 6, 7]),
        (gs.Epochs(stop=1, length=3), [0, 1, 2]),
        (gs.Epochs(every=2, length=2), [0, 1, 4, 5]),
        (gs.Epochs(start=1, stop=4, every=2, length=2), [2, 3, 6, 7]),
    ],
    ids=repr,
)
def test_a_trigger_fires_at_its_steps(trigger: gs.Trigger, steps: list[int]) -> None:
    assert [step for step in range(8) if trigger.fires(TriggerContext(Clock(step)))] == steps


@pytest.mark.parametrize(
    "at",
    [
        gs.Parameters("first.*"),
        gs.Parameters("first.*", stage="accumulated"),
        gs.Parameters("first.*", stage="step"),
        gs.Outputs("first"),
        gs.Nodes("Relu"),
    ],
    ids=repr,
)
def test_steps_are_optimizer_steps_at_every_site(at: Selector) -> None:
    model = small()
    optimizer = sgd(model)
    acted = []
    with attached(model, gs.Zero(), at, optimizer, gs.Steps(start=1, stop=4, every=2)):
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            if not gradients(model)["first.weight"].any():
                acted.append(step)
    assert acted == [1, 3]


def test_backward_passes_between_two_optimizer_steps_have_the_same_step() -> None:
    model = small()
    optimizer = sgd(model)
    acted = []
    with attached(model, gs.Zero(), None, optimizer, gs.Steps(stop=1)):
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            acted.append(not gradients(model)["last.bias"].any())
        optimizer.step()
        backward(model)
        acted.append(not gradients(model)["last.bias"].any())
    assert acted == [True, True, False]


def test_a_step_that_the_scaler_skips_is_not_counted() -> None:
    model = small()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with attached(model, gs.Scale(2.0), gs.Parameters("last.*"), optimizer) as live:
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 6)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert live.step == 1


def _fired(live: gs.Live) -> dict[str, int]:
    return {entry.site: entry.all_fired for entry in live.ledger}


def _surgery(when: gs.Trigger) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(gs.Scale(2.0), gs.Parameters("last.bias"), when))


@pytest.mark.parametrize(
    ("when", "length", "fired"),
    [
        # Steps 0 to 9; epochs of 4 steps are 0-3, 4-7, 8-9.
        (gs.Epochs(start=1), 4, 6),
        (gs.Epochs(stop=1), 4, 4),
        (gs.Epochs(every=2), 4, 6),
        (gs.Epochs(start=1, length=5), 4, 5),
        (gs.Epochs(start=1, length=5), None, 5),
    ],
)
def test_the_epoch_length_is_that_of_the_trigger_or_of_attach(
    when: gs.Trigger, length: int | None, fired: int
) -> None:
    model = small()
    optimizer = sgd(model)
    with _surgery(when).attach(model, optimizer, steps_per_epoch=length) as live:
        train(model, optimizer, 10)
    assert _fired(live) == {"last.bias": fired}


def test_next_epoch_counts_epochs_across_attachments() -> None:
    model = small()
    surgery = _surgery(gs.Epochs(start=1, stop=3))
    with surgery.attach(model) as live:
        backward(model)  # epoch 0
        live.next_epoch()
        backward(model)
        backward(model)
    assert _fired(live) == {"last.bias": 2}
    assert surgery.state_dict()["epoch"] == 1
    with surgery.attach(model) as live:
        live.next_epoch()
        backward(model)  # epoch 2
        live.next_epoch()
        backward(model)
    assert _fired(live) == {"last.bias": 1}


def test_the_epoch_is_in_the_state_dict() -> None:
    model = small()
    first, other = _surgery(gs.Epochs(start=1)), _surgery(gs.Epochs(start=1))
    with first.attach(model) as live:
        live.next_epoch()
        backward(model)
    other.load_state_dict(first.state_dict())
    with other.attach(model) as live:
        backward(model)
        live.next_epoch()
    assert _fired(live) == {"last.bias": 1}


def test_next_epoch_is_refused_with_steps_per_epoch() -> None:
    model = small()
    with _surgery(gs.Epochs()).attach(model, sgd(model), steps_per_epoch=4) as live:
        train(model, sgd(model), 1)
        live.tick()
        with pytest.raises(RuntimeError, match="steps_per_epoch=4 counts epochs"):
            live.next_epoch()


@pytest.mark.parametrize("length", [0, -1])
def test_an_epoch_without_steps_is_refused(length: int) -> None:
    message = f"steps_per_epoch: must be >= 1, found {length}"
    with (
        pytest.raises(ValueError, match=message),
        _surgery(gs.Epochs()).attach(small(), steps_per_epoch=length),
    ):
        pass


@pytest.mark.parametrize(
    ("when", "length", "message"),
    [
        (gs.Steps(stop=3), None, "Steps: no optimizer step was counted"),
        (gs.Every(2), None, "Every: no optimizer step was counted"),
        (gs.Phase("train"), None, "Phase: no optimizer step was counted"),
        (gs.Probability(1.0), None, "Probability: no optimizer step was counted"),
        (gs.Epochs(), None, "Epochs: no epoch was counted. Use Epochs"),
        (gs.Epochs(length=3), None, "Epochs: no optimizer step was counted"),
        (gs.Epochs(), 3, "Epochs: no optimizer step was counted"),
        (gs.Always() & ~gs.Steps(start=4), None, "Steps: no optimizer step was counted"),
    ],
)
def test_a_step_based_trigger_warns_if_no_step_was_counted(
    when: gs.Trigger, length: int | None, message: str
) -> None:
    model = small()
    with (
        pytest.warns(gs.SurgeryWarning, match=message) as caught,
        _surgery(when).attach(model, steps_per_epoch=length),
    ):
        backward(model)
    assert len(caught) == 1
