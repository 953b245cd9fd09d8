"""Random numbers of an update: when they are drawn anew, when again, and for which selection."""

import pytest
from torch import nn

import gradsurg as gs
from gradsurg.aggregators.base import (
    Aggregator,
)
from tests.multitask.nets import Grads, Net, at_shared, close, grads_of, losses_of, same, still

DRAWING = [gs.GradDrop(), gs.PCGrad(), gs.Random()]  # none remembers what was before


def _updates(surgery: gs.Surgery, model: Net, count: int, **options: object) -> list[Grads]:
    """The results of several updates from the same losses."""
    found = []
    with surgery.attach(model, **options) as live:
        for _ in range(count):
            model.zero_grad()
            live.backward(losses_of(model))
            found.append(grads_of(model))
    return found


def _kinds(updates: list[Grads]) -> int:
    """How many of them differ."""
    return sum(not any(same(own, other) for other in updates[:i]) for i, own in enumerate(updates))


@pytest.mark.parametrize("aggregator", DRAWING, ids=repr)
def test_without_an_optimizer_each_update_draws_new_numbers(aggregator: Aggregator) -> None:
    assert _kinds(_updates(gs.Surgery(at_shared(aggregator)), Net(), 6)) >= 3


def test_without_an_optimizer_two_equal_runs_draw_alike_measured_or_not() -> None:
    first, second = (
        _updates(gs.Surgery(at_shared(gs.GradDrop())), Net(), 4, effects_every=every)
        for every in (1, 0)
    )
    for own, other in zip(first, second, strict=True):
        assert same(own, other)


@pytest.mark.parametrize("how", ["attached again", "loaded"])
def test_without_an_optimizer_draws_continue_after_a_checkpoint(how: str) -> None:
    model = Net()
    whole = _updates(gs.Surgery(at_shared(gs.GradDrop())), model, 4)
    surgery = gs.Surgery(at_shared(gs.GradDrop()))
    halves = _updates(surgery, model, 2)
    if how == "loaded":
        state = surgery.state_dict()
        surgery = gs.Surgery(at_shared(gs.GradDrop()))
        surgery.load_state_dict(state)
    halves += _updates(surgery, model, 2)
    for own, other in zip(halves, whole, strict=True):
        assert same(own, other)


def test_batches_of_one_update_share_one_draw() -> None:
    model = Net()
    updates = _updates(gs.Surgery(at_shared(gs.Random())), model, 3)  # of one batch each
    with gs.Surgery(at_shared(gs.Random())).attach(model) as live:
        for update in updates:
            model.zero_grad()
            live.backward(losses_of(model), aggregate=False)
            one = grads_of(model)
            live.backward(losses_of(model), aggregate=False)
            live.backward(losses_of(model))
            close(grads_of(model), {name: 3 * own for name, own in one.items()})
            assert same(one, update)


def test_with_an_optimizer_a_step_that_is_skipped_is_drawn_again() -> None:
    # As it is after a checkpoint: what was drawn in a step that was never made leaves no trace.
    model = Net()
    optimizer = still(model)
    assert (
        _kinds(_updates(gs.Surgery(at_shared(gs.GradDrop())), model, 3, optimizer=optimizer)) == 1
    )


# Several selections


class Twice(nn.Module):
    """Two equal layers side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 1, bias=False), nn.Linear(20, 1, bias=False)


def _masks(*items: gs.Intervention) -> list[list[float]]:
    """The part that is kept of two opposite tasks in each layer."""
    model = Twice()
    total = model.first.weight.sum() + model.second.weight.sum()
    with gs.Surgery(*items).attach(model, still(model)) as live:
        live.backward([total, -total])
    return [grad.flatten().tolist() for grad in grads_of(model).values()]


@pytest.mark.parametrize("granularity", ["whole", "module", "tensor"])
def test_two_selections_draw_different_numbers_in_any_order(granularity: str) -> None:
    items = [
        at_shared(gs.GradDrop(), pattern=pattern, granularity=granularity)
        for pattern in ("first.*", "second.*")
    ]
    one, other = _masks(*items)
    assert one != other
    assert _masks(*items) == [one, other]
    assert _masks(*reversed(items)) == [one, other]
