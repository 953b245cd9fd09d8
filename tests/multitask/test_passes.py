"""What one pass leaves behind for what is gone back through after it: nothing."""

from contextlib import nullcontext

import pytest
from torch import Tensor

import gradsurg as gs
from tests.multitask.nets import (
    Net,
    Uneven,
    at_shared,
    grads_of,
    losses_of,
    same,
    scaled,
    still,
)

TRUNK = gs.Parameters("trunk.0.weight")


@pytest.mark.parametrize("others", ["ac", "ba", "abc"])
def test_of_batches_of_other_tasks_that_are_only_looked_at_the_last_alone_is_measured(
    others: str,
) -> None:
    model = Net()
    first, second = losses_of(model, 1), losses_of(model, 2)
    with gs.Surgery(at_shared(Uneven())).attach(model, shadow=True) as live:
        live.backward({task: first[task] for task in "ab"}, aggregate=False, retain_graph=True)
        live.backward({task: second[task] for task in others}, retain_graph=True)
        (found,) = live.conflicts.fetch()
        live.backward({task: second[task] for task in others})
        (alone,) = live.conflicts.fetch()
    assert found.tasks == alone.tasks == list(others)
    assert found.norms == pytest.approx(alone.norms)
    for row, expected in zip(found.cosines, alone.cosines, strict=True):
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("task", ["a", "b", "c"])
def test_what_waits_for_a_task_meets_nothing_in_the_one_backward_of_a_shadow(task: str) -> None:
    model = Net()
    surgery = gs.Surgery(scaled(3.0, TRUNK, task), at_shared(Uneven()))
    with surgery.attach(model, still(model), shadow=True) as live:
        live.backward(losses_of(model))
    (entry,) = [entry for entry in live.ledger if entry.intervention == "scale"]
    assert entry.all_fired == 1


AT = {
    "a parameter": TRUNK,
    "an activation": gs.Outputs("trunk.0"),
    "a use": gs.Uses("trunk.0.weight"),
}


@pytest.mark.parametrize("place", AT)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("task", ["a", "c"])
def test_what_waits_for_a_task_leaves_a_plain_backward_of_the_same_step_alone(
    place: str, fails: bool, task: str
) -> None:
    model = Net()
    losses_of(model, 2)["a"].backward()
    expected = grads_of(model)
    surgery = gs.Surgery(scaled(3.0, AT[place], task), at_shared(Uneven()))
    with surgery.attach(model, still(model)) as live:
        losses = losses_of(model)
        if fails:
            losses[task].register_hook(_fail)
        with pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
            live.backward(losses)
        model.zero_grad()
        losses_of(model, 2)["a"].backward()
        assert same(grads_of(model), expected)
        live.backward(losses_of(model))


def _fail(grad: Tensor) -> None:
    raise RuntimeError("in the middle")
