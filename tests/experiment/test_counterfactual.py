"""The update effect: its numbers, and that measuring it does not change the training."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.effects.numbers import UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.experiment.counterfactual import Counterfactual, means
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.loop import Batches, train
from gradsurg.experiment.run import Run, Schedule
from gradsurg.sites.base import Selector
from gradsurg.transforms.base import Transform
from tests import runs
from tests.nets import batch, noisy, num_hooks, small, weights
from tests.runs import MIXED, Torn, Wrapped, ended, flat, kept_in, lines, untimed

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Schedule(12, 32, log_every=4, checkpoint_every=4, effects_every=3, update_effect_every=2)


class Recurrent(nn.Module):
    """A GRU over the rows of a picture, with dropout; its head is tied to its input map."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, 10)
        self.twice = nn.Linear(16, 10)
        self.twice.weight = self.head.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, _ = self.cell(inputs.reshape(len(inputs), 8, 8))
        return self.head(outputs[:, -1]) + self.twice(outputs[:, 0])


def perceptron() -> nn.Module:
    layers = nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def normed() -> nn.Module:
    pictures = nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*pictures, nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 10))


Make = tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer], dict[str, Any]]
SGD: Make = (perceptron, torch.optim.SGD, {"lr": 0.1})
MOMENTUM: Make = (normed, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAMW: Make = (normed, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True})
MADE: dict[str, Make] = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "adam": (Recurrent, torch.optim.Adam, {"lr": 0.01}),
    "adamw amsgrad": ADAMW,
    "rmsprop": (perceptron, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


def a_run(
    transform: Transform, make: Make = SGD, at: Selector | None = None, tears_at: int = 0
) -> Run:
    model, optimizer, fields = make
    return replace(
        runs.a_run(transform, at, seed=3, schedule=SHORT, task=Wrapped(tears_at, "raise")),
        make_model=lambda data: model(),
        make_optimizer=lambda made: optimizer(made.parameters(), **fields),
    )


def rows(record: Record) -> list[dict[str, Any]]:
    return lines(record, "metrics.jsonl")


def without_update(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key.split("/")[0] not in ("update", "time")}


def assert_alike(asked: Record, plain: Record) -> None:
    """All that was written and kept is the same, the update effect apart."""
    assert asked.directory != plain.directory
    assert [*map(without_update, rows(asked))] == [*map(without_update, rows(plain))] != []
    assert lines(asked, "effects.jsonl") == lines(plain, "effects.jsonl")
    found, expected = (flat(untimed(kept_in(one.directory))) for one in (asked, plain))
    assert found == expected
    assert without_update(ended(asked)) == without_update(ended(plain))


def both(run: Run, out: Path) -> tuple[Record, Record]:
    """The run with the question and without it."""
    never = replace(run, schedule=replace(run.schedule, update_effect_every=0))
    return execute(run, out / "asked", []), execute(never, out / "plain", [])


@pytest.mark.parametrize("name", MADE)
def test_measuring_the_update_effect_leaves_training_bit_identical(tmp_path, name: str) -> None:
    asked, plain = both(a_run(MIXED, MADE[name]), tmp_path)
    assert_alike(asked, plain)
    assert [row[UPDATES_SAMPLED] for row in rows(asked)] == [2, 2, 2]
    assert not any(UPDATES_SAMPLED in row for row in rows(plain))


SITES = {
    "outputs": gs.Outputs(),
    "nodes": gs.Nodes("Relu"),
    "saved tensors": gs.SavedTensors("block"),
    "saved in modules": gs.SavedTensors(),
    "every module": gs.EveryModule(),
    "every module's gradients": gs.EveryModule(kind="full_backward"),
    "values": gs.Activations(),
    "uses": gs.Uses("*.weight"),
    "captured": gs.Captured(),
    "at the step": gs.Parameters(stage="step"),
    "group": gs.Parameters(stage="backward_end"),
    "weights": gs.Weights(),
}


@pytest.mark.parametrize("kind", SITES)
@pytest.mark.filterwarnings("ignore::gradsurg.effects.ledger.SurgeryWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_measuring_the_update_effect_does_not_reach_any_kind_of_site(tmp_path, kind: str) -> None:
    run = a_run(gs.Scale(0.5), at=SITES[kind])
    asked, plain = both(run, tmp_path)
    assert_alike(asked, plain)
    (first, *_) = rows(asked)
    # what acts elsewhere than on gradients acts too; the twin has none of it
    assert (first["update/norm_ratio"] == 1) == (kind == "captured")


@pytest.mark.parametrize("name", MADE)
def test_a_surgery_that_does_nothing_has_cosine_and_ratio_one(tmp_path, name: str) -> None:
    record = execute(a_run(gs.Identity(), MADE[name]), tmp_path, [])
    for row in [*rows(record), ended(record)]:
        assert (row["update/cosine"], row["update/norm_ratio"]) == (1.0, 1.0)
        assert row["update/loss_change"] == row["update/loss_change_without"] != 0
    control = replace(a_run(gs.Identity(), MADE[name]), shadow=True, label="control", identity={})
    assert not any(UPDATES_SAMPLED in row for row in rows(execute(control, tmp_path, [])))


def test_zero_gradients_give_no_update_with_sgd_and_one_with_weight_decay(tmp_path) -> None:
    still = ended(execute(a_run(gs.Zero()), tmp_path / "sgd", []))
    # The same dropout mask: else the loss would change with no weight changed.
    assert still["update/norm_ratio"] == still["update/loss_change"] == 0
    assert still["update/loss_change_without"] != 0
    assert "update/cosine" not in still
    moved = ended(execute(a_run(gs.Zero(), MOMENTUM), tmp_path / "decay", []))
    assert 0 < moved["update/norm_ratio"] < 1


def test_the_update_numbers_equal_those_of_two_steps_by_hand() -> None:
    """The slow way: two copies of the model, one step each."""
    inputs, targets = batch()
    losses, updates = [], []
    for scale in (0.25, 1.0):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        start = torch.cat([tensor.flatten() for tensor in weights(model)])
        before = cross_entropy(model(inputs), targets)
        before.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad *= scale if param.ndim > 1 else 1
        optimizer.step()
        updates.append(torch.cat([tensor.flatten() for tensor in weights(model)]) - start)
        losses.append((cross_entropy(model(inputs), targets) - before).item())
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    counterfactual = Counterfactual(model, optimizer, cross_entropy, every=1)
    surgery = Surgery(Intervention(gs.Scale(0.25), gs.Parameters("*.weight")))
    with surgery.attach(model, optimizer):
        batches = Batches(inputs, targets, len(inputs), 0)
        for _ in train(model, optimizer, cross_entropy, batches, 1, before=counterfactual.before):
            counterfactual.after()
    numbers = counterfactual.fetch()
    cosine = torch.cosine_similarity(*updates, dim=0).item()
    assert 0.5 < cosine < 0.99
    expected = [cosine, (updates[0].norm() / updates[1].norm()).item(), *losses]
    assert [numbers[name] for name in UPDATE_NAMES] == pytest.approx(expected, rel=1e-4)
    assert counterfactual.fetch() == {}


def test_several_batches_of_a_step_are_one_update() -> None:
    inputs, targets = batch()
    results = []
    for parts in ([(inputs, targets)], list(zip(inputs.split(4), targets.split(4), strict=True))):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        counterfactual = Counterfactual(model, optimizer, cross_entropy, every=1)
        counterfactual.before(0, parts)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        counterfactual.after()
        results.append(counterfactual.fetch())
    assert results[1] == pytest.approx(results[0], abs=1e-5)
    assert results[1]["update/cosine"] == pytest.approx(1)


def test_steps_between_samples_are_not_measured() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    counterfactual = Counterfactual(model, optimizer, cross_entropy, every=3)
    for step in range(7):
        counterfactual.before(step, [batch(step)])
        counterfactual.after()
    assert counterfactual.fetch()[UPDATES_SAMPLED] == 3


@pytest.mark.parametrize("call", [1, 14, 28])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(tmp_path, call: int) -> None:
    whole = execute(a_run(MIXED, ADAMW), tmp_path / "whole", [])
    with pytest.raises(Torn):
        execute(a_run(MIXED, ADAMW, tears_at=call), tmp_path / "torn", [])
    torn = execute(a_run(MIXED, ADAMW), tmp_path / "torn", [])
    assert_alike(torn, whole)
    assert rows(torn) == rows(whole)
    for name in (UPDATES_SAMPLED, *UPDATE_NAMES):
        assert ended(torn)[name] == ended(whole)[name]


def test_means_are_weighted_by_samples_and_skip_missing_numbers() -> None:
    name = UPDATE_NAMES[0]
    averages = means(
        [
            {UPDATES_SAMPLED: 1, name: 1.0},
            {UPDATES_SAMPLED: 3, name: 0.0},
            {UPDATES_SAMPLED: 4, name: None},
            {},
        ]
    )
    assert averages == {UPDATES_SAMPLED: 8, name: 0.25}
    assert means([{"train/loss": 1.0}]) == {}


def test_the_model_keeps_its_own_hooks_and_gets_no_other() -> None:
    model = noisy()
    handle = model[0].register_forward_hook(_double)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks, before = num_hooks(model, optimizer), copy.deepcopy(model.state_dict())
    counterfactual = Counterfactual(model, optimizer, cross_entropy, every=1)
    rng = torch.get_rng_state()
    inputs, targets = batch()
    counterfactual.before(0, [(inputs.view(-1, 2, 3), targets)])
    assert flat(model.state_dict()) == flat(before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(param.grad is None for param in model.parameters())
    optimizer.zero_grad()
    cross_entropy(model(inputs.view(-1, 2, 3)), targets).backward()
    optimizer.step()
    counterfactual.after()
    assert counterfactual.fetch()["update/cosine"] == 1  # the hook doubles for both
    assert num_hooks(model, optimizer) == hooks
    handle.remove()


def _double(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
    return output * 2
