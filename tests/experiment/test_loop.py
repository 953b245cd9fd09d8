"""The training loop: the examples of each step, and the steps that it yields."""

from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.experiment.loop import Batches, Step, outputs_of, train
from tests.nets import CLASSES, FEATURES, sgd, small, weights


def numbered(count: int, size: int, seed: int = 0) -> Batches:
    """Examples that are their own numbers, so that a batch says which it has."""
    return Batches(torch.arange(count), torch.arange(count) * 10, size, seed)


def first(batches: Batches, count: int, start: int = 0) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in islice(batches.start(start), count)]


def data() -> Batches:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(20, FEATURES, generator=generator)
    return Batches(inputs, torch.randint(CLASSES, (20,), generator=generator), 4, 0)


def test_batches_depend_on_the_seed_alone_and_leave_the_global_generator() -> None:
    once = first(numbered(20, 4), 12)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert first(numbered(20, 4), 12) == once
    assert torch.equal(torch.get_rng_state(), before)
    assert first(numbered(20, 4, seed=1), 12) != once
    assert len(first(numbered(20, 4, seed=2**63 - 1), 1)[0]) == 4


@pytest.mark.parametrize(("count", "size"), [(20, 4), (23, 4), (5, 5), (9, 8)])
def test_an_epoch_has_each_example_at_most_once_and_the_next_another_order(
    count: int, size: int
) -> None:
    batches, per_epoch = numbered(count, size), count // size
    firsts = first(batches, 3 * per_epoch)
    epochs = [firsts[start : start + per_epoch] for start in range(0, len(firsts), per_epoch)]
    for epoch in epochs:
        examples = [example for chosen in epoch for example in chosen]
        assert len(set(examples)) == len(examples) == per_epoch * size
        assert set(examples) <= set(range(count))
    assert epochs[0] != epochs[1] != epochs[2]
    for step in (1, 4, 5, 6, 11):
        assert first(batches, 7, start=step) == first(batches, step + 7)[step:]
    assert all(torch.equal(x * 10, y) for x, y in islice(batches.start(3), 20))


def go(model: nn.Module, steps: int, start: int = 0) -> list[Step]:
    return list(train(model, sgd(model), functional.cross_entropy, data(), steps, start))


def test_training_at_once_or_in_two_halves_equals_a_plain_loop() -> None:
    plain, model, halves = small(), small().eval(), small()
    optimizer = sgd(plain)
    losses = []
    for inputs, targets in islice(data().start(0), 9):
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for trained, steps in ((model, go(model, 9)), (halves, [*go(halves, 4), *go(halves, 9, 4)])):
        assert [step.loss.item() for step in steps] == losses
        assert [step.done for step in steps] == list(range(1, 10))
        assert not any(step.loss.requires_grad for step in steps)
        assert all(map(torch.equal, weights(plain), weights(trained)))
    assert model.training


def test_the_callers_work_between_steps_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        clock[0] += 1
        return functional.cross_entropy(outputs, targets)

    monkeypatch.setattr("gradsurg.experiment.loop.perf_counter", lambda: clock[0])
    model = small()
    seconds = []
    for step in train(model, sgd(model), loss_fn, data(), steps=3):
        seconds.append(step.seconds)
        clock[0] += 100
    assert seconds == [1, 1, 1]


def test_outputs_are_computed_in_evaluation_mode_in_parts_and_without_a_graph() -> None:
    model = nn.Sequential(small(), nn.Dropout(0.5))
    inputs = data().inputs
    outputs = outputs_of(model, inputs, size=7)
    assert model.training
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, model.eval()(inputs).detach())
