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


def data(size: int = 4, seed: int = 0, count: int = 20) -> Batches:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return Batches(inputs, torch.randint(CLASSES, (count,), generator=generator), size, seed)


def test_batches_depend_on_the_seed_alone() -> None:
    once = first(numbered(20, 4), 12)
    torch.manual_seed(99)
    assert first(numbered(20, 4), 12) == once
    assert first(numbered(20, 4, seed=1), 12) != once


def test_drawing_batches_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first(numbered(20, 4), 12)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("count", "size"), [(20, 4), (23, 4), (5, 5), (9, 8)])
@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 11])
def test_starting_at_a_step_skips_the_batches_before(count: int, size: int, step: int) -> None:
    batches = numbered(count, size)
    assert first(batches, 7, start=step) == first(batches, step + 7)[step:]


@pytest.mark.parametrize(("count", "size"), [(20, 4), (23, 4), (5, 5), (9, 8)])
def test_an_epoch_has_each_example_at_most_once_and_the_next_another_order(
    count: int, size: int
) -> None:
    per_epoch = count // size
    firsts = first(numbered(count, size), 3 * per_epoch)
    epochs = [firsts[start : start + per_epoch] for start in range(0, len(firsts), per_epoch)]
    for epoch in epochs:
        examples = [example for chosen in epoch for example in chosen]
        assert len(examples) == per_epoch * size
        assert len(set(examples)) == len(examples)
        assert set(examples) <= set(range(count))
    assert epochs[0] != epochs[1] != epochs[2]


def test_every_example_has_its_own_target() -> None:
    for inputs, targets in islice(numbered(23, 4).start(3), 20):
        assert torch.equal(inputs * 10, targets)


def test_a_seed_may_have_64_bits() -> None:
    torch.manual_seed(2**63 - 1)
    assert len(first(numbered(20, 4, seed=2**63 - 1), 1)[0]) == 4


@pytest.mark.parametrize("size", [0, -1, 21])
def test_an_impossible_batch_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size: must be 1 to 20 examples, found {size}"):
        numbered(20, size)


def go(model: nn.Module, steps: int, start: int = 0) -> list[Step]:
    return list(train(model, sgd(model), functional.cross_entropy, data(), steps, start))


def test_training_equals_a_plain_loop() -> None:
    plain, model = small(), small()
    optimizer = sgd(plain)
    losses = []
    for inputs, targets in islice(data().start(0), 8):
        optimizer.zero_grad()
        loss = functional.cross_entropy(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    steps = go(model, 8)
    assert [step.loss.item() for step in steps] == losses
    assert all(map(torch.equal, weights(plain), weights(model)))


def test_train_yields_the_step_the_loss_and_the_seconds() -> None:
    model = small()
    before = weights(model)
    count = 0
    for done, step in enumerate(
        train(model, sgd(model), functional.cross_entropy, data(), steps=5), start=1
    ):
        assert step.done == done
        assert step.loss.shape == ()
        assert not step.loss.requires_grad
        assert isinstance(step.seconds, float)
        assert step.seconds >= 0
        assert not torch.equal(weights(model)[0], before[0])
        before = weights(model)
        count += 1
    assert count == 5


def test_the_callers_work_between_steps_is_not_timed(monkeypatch) -> None:
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


def test_training_in_two_halves_equals_training_at_once() -> None:
    whole, halves = small(), small()
    expected = [step.loss.item() for step in go(whole, 9)]
    losses = [step.loss.item() for step in [*go(halves, 4), *go(halves, 9, start=4)]]
    assert losses == expected
    assert all(map(torch.equal, weights(whole), weights(halves)))


def test_the_model_is_in_training_mode() -> None:
    model = small().eval()
    go(model, 1)
    assert model.training


def test_outputs_are_computed_in_evaluation_mode_in_parts_and_without_a_graph() -> None:
    model = nn.Sequential(small(), nn.Dropout(0.5))
    inputs = data().inputs
    outputs = outputs_of(model, inputs, size=7)
    assert model.training
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, model.eval()(inputs).detach())
