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
from torch.nn.utils import parameters_to_vector

import gradsurg as gs
from gradsurg.effects.numbers import UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.experiment.counterfactual import Counterfactual, means
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.loop import Batches, train
from gradsurg.experiment.run import Run, Schedule
from gradsurg.sites.base import Selector
from gradsurg.transforms.base import Transform
from tests import runs
from tests.nets import attached, backward, batch, grad_of, noisy, num_hooks, sgd, trainee
from tests.runs import MIXED, Wrapped, assert_resumes, ended, flat, kept_in, lines, untimed

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


def step_by_hand(scale: float) -> tuple[Tensor, float]:
    """The update of SGD with scaled gradients of the matrices, and the change of the loss."""
    model, optimizer = trainee(0.3)
    (inputs, targets), start = batch(), parameters_to_vector(model.parameters()).detach()
    before = cross_entropy(model(inputs), targets)
    before.backward()
    for param in model.parameters():
        grad_of(param).mul_(scale if param.ndim > 1 else 1)
    optimizer.step()
    change = cross_entropy(model(inputs), targets) - before
    return parameters_to_vector(model.parameters()).detach() - start, change.item()


def measured(parts: int, every: int = 1, steps: int = 1) -> dict[str, float]:
    """The update effect of a surgery that scales the gradients of the weight matrices."""
    model, optimizer = trainee(0.3)
    counterfactual = Counterfactual(model, optimizer, cross_entropy, every)
    size = len(batch()[0]) // parts
    with attached(model, gs.Scale(0.25), gs.Parameters("*.weight"), optimizer):
        batches = Batches(*batch(), size, 0, parts)
        before = counterfactual.before
        for _ in train(model, optimizer, cross_entropy, batches, steps, before=before):
            counterfactual.after()
    numbers = counterfactual.fetch()
    assert counterfactual.fetch() == {}
    return numbers


@pytest.mark.parametrize("parts", [1, 2])
def test_the_update_numbers_equal_those_of_two_steps_by_hand(parts: int) -> None:
    numbers = measured(parts)
    (update, *change), (other, *other_change) = (step_by_hand(k) for k in (0.25, 1.0))
    cosine = torch.cosine_similarity(update, other, dim=0).item()
    assert 0.5 < cosine < 0.99
    expected = [cosine, (update.norm() / other.norm()).item(), *change, *other_change]
    assert [numbers[name] for name in UPDATE_NAMES] == pytest.approx(expected, rel=1e-4)
    assert measured(parts, every=3, steps=7)[UPDATES_SAMPLED] == 3


@pytest.mark.parametrize("call", [1, 14, 28])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(tmp_path, call: int) -> None:
    whole = assert_resumes(lambda at: a_run(MIXED, ADAMW, tears_at=at), tmp_path, call)
    assert {UPDATES_SAMPLED, *UPDATE_NAMES} < ended(whole).keys()


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
    handle = model[0].register_forward_hook(lambda *call: 2 * call[-1])
    optimizer = sgd(model)
    hooks, before = num_hooks(model, optimizer), copy.deepcopy(model.state_dict())
    counterfactual = Counterfactual(model, optimizer, cross_entropy, every=1)
    rng, (inputs, targets) = torch.get_rng_state(), batch()
    counterfactual.before(0, [(inputs.view(-1, 2, 3), targets)])
    assert flat(model.state_dict()) == flat(before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(param.grad is None for param in model.parameters())
    backward(model)
    optimizer.step()
    counterfactual.after()
    assert counterfactual.fetch()["update/cosine"] == 1  # the hook doubles for both
    assert num_hooks(model, optimizer) == hooks
    handle.remove()
