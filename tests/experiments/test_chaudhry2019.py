"""Permuted MNIST with a memory: the examples of each step, losses, and forgetting."""

from itertools import islice
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from gradsurg.experiments.chaudhry2019.task import KEPT, LABEL, TASK, PermutedMNIST
from gradsurg.experiments.conflict.task import PermutedStream
from torch import Tensor
from torch.nn import functional

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.execution import execute
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run import Run, Schedule
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.tasks.base import Data
from gradsurg.tasks.data.images import IDX_NAMES, read_images
from tests import papers
from tests.conftest import Here
from tests.image_files import idx
from tests.runs import Torn, a_run, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, TEST = 60, 20  # images that there are
GENERATOR = np.random.default_rng(1)
IMAGES = GENERATOR.integers(0, 256, (COUNT + TEST, 28, 28), dtype=np.uint8)
LABELS = np.arange(COUNT + TEST, dtype=np.uint8) % 10


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A folder with a few made-up images."""
    read_images.cache_clear()
    folder = tmp_path / "images"
    folder.mkdir()
    parts = (IMAGES[:COUNT], LABELS[:COUNT], IMAGES[COUNT:], LABELS[COUNT:])
    for name, array in zip(IDX_NAMES, parts, strict=True):
        (folder / name).write_bytes(idx(array))
    return str(folder)


def a_task(root: str, **fields: object) -> PermutedMNIST:
    few = {"num_tasks": 3, "num_train": 40, "num_test": None, "per_class": 2, "memory_batch": 25}
    return PermutedMNIST(root=root, verify=False, **{**few, **fields})  # type: ignore[arg-type]


def of(data: Data, size: int = 10, accumulate: int = 1, seed: int = 0) -> Batches:
    assert data.order is not None
    inputs, targets = data.train_inputs, data.train_targets
    order, epoch_size = data.order.batches, data.epoch_size
    return Batches(inputs, targets, size, seed, accumulate, order, epoch_size)


def bytes_of(inputs: Tensor) -> np.ndarray:
    return (inputs * 255).round().numpy().astype(np.uint8)


def test_each_task_has_the_digits_with_its_own_order_of_pixels(root: str) -> None:
    data = a_task(root).load()
    flat = IMAGES.reshape(len(IMAGES), -1)
    whole = {tuple(np.sort(image)): place for place, image in enumerate(flat)}
    chosen, orders = [], []
    for task in range(3):
        own = (data.train_targets[:, TASK] == task) & (data.train_targets[:, KEPT] == 0)
        assert own.nonzero()[:, 0].tolist() == list(range(40 * task, 40 * task + 40))
        pixels = bytes_of(data.train_inputs[own])
        places = [whole[tuple(np.sort(image))] for image in pixels]
        assert len({*places}) == 40
        assert max(places) < COUNT
        assert LABELS[places].tolist() == data.train_targets[own, LABEL].tolist()
        tested = bytes_of(data.test_inputs[data.test_targets[:, TASK] == task])
        test_places = [whole[tuple(np.sort(image))] for image in tested]
        assert sorted(test_places) == list(range(COUNT, COUNT + TEST))
        order = [np.flatnonzero((flat[places] == column[:, None]).all(0)) for column in pixels.T]
        order = np.concatenate(order)
        assert sorted(order) == list(range(784))
        assert (flat[test_places][:, order] == tested).all()
        chosen.append(places)
        orders.append(order.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0] != list(range(784))
    assert chosen[0] != chosen[1] != chosen[2] != chosen[0]
    other = a_task(root, data_seed=1).load()
    assert not torch.equal(other.train_inputs, data.train_inputs)
    assert torch.equal(a_task(root).load().train_inputs, data.train_inputs)


def test_the_memory_has_the_first_of_each_class_of_each_task(root: str) -> None:
    data = a_task(root, num_train=None).load()
    kept = data.train_targets[:, KEPT] == 1
    assert int(kept.sum()) == 3 * 20
    for task in range(3):
        own = (data.train_targets[:, TASK] == task) & ~kept
        memory = kept & (data.train_targets[:, TASK] == task)
        for label in range(10):
            all_of_it = data.train_inputs[own & (data.train_targets[:, LABEL] == label)]
            found = data.train_inputs[memory & (data.train_targets[:, LABEL] == label)]
            assert torch.equal(found, all_of_it[:2])
    assert not a_task(root, per_class=0).load().train_targets[:, KEPT].any()


def test_an_epoch_is_a_task_with_the_memory_of_those_before(root: str) -> None:
    data = a_task(root).load()
    batches = of(data)
    assert batches.steps_per_epoch == 4
    steps = [targets for _, targets in islice(batches.start(0), 16)]
    for epoch in range(4):
        task = min(epoch, 2)  # the last task stays
        for targets in steps[4 * epoch : 4 * epoch + 4]:
            kept = targets[:, KEPT] == 1
            assert (targets[~kept, TASK] == task).all()
            assert int((~kept).sum()) == 10
            assert int(kept.sum()) == min(20 * task, 25)
            assert (targets[kept, TASK] < task).all()
    inputs = [inputs[:10] for inputs, _ in islice(batches.start(4), 4)]
    assert len({tuple(image.tolist()) for image in torch.cat(inputs)}) == 40
    assert {task for targets in steps[8:12] for task in targets[10:, TASK].tolist()} == {0, 1}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("step", [1, 3, 4, 5, 9])
def test_a_step_has_the_same_examples_wherever_a_run_begins(
    root: str, step: int, accumulate: int
) -> None:
    data = a_task(root).load()
    size = 10 // accumulate
    long = islice(of(data, size, accumulate).start(0), 14 * accumulate)
    whole = [inputs for inputs, _ in long][step * accumulate :]
    late = [inputs for inputs, _ in islice(of(data, size, accumulate).start(step), len(whole))]
    assert len(whole) == len(late) > 0
    assert all(torch.equal(*pair) for pair in zip(whole, late, strict=True))
    other = next(of(data, size, accumulate, seed=1).start(step))[0]
    assert not torch.equal(other, late[0])


def test_the_loss_of_an_empty_memory_is_zero(root: str) -> None:
    task = a_task(root)
    targets = task.load().train_targets
    outputs = torch.randn(len(targets), 10, requires_grad=True)
    now, memory = targets[:, KEPT] == 0, targets[:, KEPT] == 1
    losses = task.losses(outputs, targets)
    assert tuple(losses) == task.names == ("now", "memory")
    for loss, own in zip(losses.values(), (now, memory), strict=True):
        expected = functional.cross_entropy(outputs[own], targets[own, LABEL])
        torch.testing.assert_close(loss, expected)
    assert task.loss(outputs, targets).item() == pytest.approx(sum(losses.values()).item())
    alone = task.losses(outputs[now], targets[now])
    assert alone["memory"].item() == 0
    (grad,) = torch.autograd.grad(alone["memory"], outputs)
    assert not grad.any()


def test_metrics_match_a_calculation_by_hand(root: str) -> None:
    task = a_task(root)
    outputs = torch.zeros(5, 10)
    outputs[torch.arange(5), torch.tensor([1, 2, 3, 4, 5])] = 50.0
    rows = [[1, 0, 0], [2, 0, 0], [9, 0, 0], [4, 2, 0], [5, 1, 1]]
    metrics = task.metrics(outputs, torch.tensor(rows))
    assert metrics["loss_now"] == pytest.approx(50 / 4)
    assert metrics["loss_memory"] == pytest.approx(0, abs=1e-6)
    assert metrics["loss"] == pytest.approx(50 / 4)
    assert metrics["accuracy_0"] == pytest.approx(2 / 3)
    assert metrics["accuracy_2"] == 1
    assert isnan(metrics["accuracy_1"])  # the memory is no test
    metrics = task.metrics(outputs[:4], torch.tensor([*rows[:3], [0, 1, 0]]))
    assert "loss_memory" not in metrics
    metrics = task.metrics(outputs, torch.tensor([*rows[:4], [0, 1, 0]]))
    assert metrics["accuracy"] == pytest.approx((2 / 3 + 1 + 0) / 3)


def a_row(step: int, *accuracies: float | None) -> dict[str, object]:
    values = {f"test/accuracy_{task}": value for task, value in enumerate(accuracies)}
    return {"step": step, **{key: value for key, value in values.items() if value is not None}}


ROWS = [
    a_row(2, 0.99, 0.1, 0.1),  # before its end, which does not count
    a_row(4, 0.9, 0.2, 0.1),
    a_row(8, 0.95, 0.8, 0.1),
    a_row(12, 0.7, 0.7, 0.6),
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS, (0.25 + 0.1) / 2),
        (ROWS[1:], (0.25 + 0.1) / 2),
        (ROWS[:3], 0.9 - 0.95),  # of the first task alone
        ([ROWS[1], ROWS[2], {"step": 10}, ROWS[3]], (0.25 + 0.1) / 2),
        ([*ROWS, a_row(16, 0.6, 0.75, 0.9)], (0.35 + 0.05) / 2),
        (ROWS[:2], None),  # one task has been learned, and nothing since
        (ROWS[:1], None),
        ([ROWS[0], ROWS[2], ROWS[3]], None),  # no test at the end of the first task
        ([ROWS[1], ROWS[2], {"step": 12}], None),  # none at the end of all
        ([], None),
    ],
)
def test_forgetting_is_the_best_since_a_tasks_end_less_the_end(
    root: str, rows: list[dict[str, object]], expected: float | None
) -> None:
    found = a_task(root).trajectory_metrics(rows, epoch=4)
    assert found == ({} if expected is None else {"forgetting": pytest.approx(expected)})


SHORT = Schedule(
    steps=12, batch_size=10, log_every=2, checkpoint_every=2, effects_every=3, eval_every=4
)


def an_agem_run(root: str) -> Run:
    run = a_run(gs.Identity(), task=a_task(root), schedule=SHORT)
    surgery = Surgery(Intervention(gs.AGEM(), SharedParameters(), names=("agem",)))
    return Run(**{**run.__dict__, "label": "agem", "surgery": surgery})


@pytest.mark.parametrize("at", [5, pytest.param(11, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_in_a_task_ends_as_if_it_never_had(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole = execute(an_agem_run(root), tmp_path / "whole", [])
    made = []

    def tearing(aggregator: gs.AGEM, gramian: Tensor) -> Tensor:
        made.append(gramian)
        if len(made) == at:
            raise Torn
        return weights(aggregator, gramian)

    weights = gs.AGEM.weights
    with monkeypatch.context() as patched, pytest.raises(Torn):
        patched.setattr(gs.AGEM, "weights", tearing)
        execute(an_agem_run(root), tmp_path, [])
    kept = RunDirectory(an_agem_run(root).directory(tmp_path)).load_checkpoint()
    assert (kept or {"step": 0})["step"] == (at - 1) // 2 * 2
    resumed = execute(an_agem_run(root), tmp_path, [])
    assert_same(resumed, whole)
    assert isinstance(resumed.summary["test/forgetting"], float)


def words(root: str, *more: str, batch_size: int = 10) -> list[str]:
    conf = papers.ROOT / "experiments/chaudhry2019/conf"
    own = [f"--config-dir={conf}", "task=permuted_mnist", f"task.root={root}"]
    own += ["task.verify=false", "task.num_tasks=2", "task.num_train=40", "task.num_test=20"]
    own += ["steps=8", "seeds=1", f"batch_size={batch_size}"]
    return [*own, "logger=none", "model.hidden=[8]", "effects_every=2", "log_every=4", *more]


def test_the_command_trains_task_by_task_and_tells_forgetting(root: str, here: Here) -> None:
    ended = here(*words(root, "aggregator=agem", "eval_every=4"))
    assert ended.code == 0, ended.err
    assert "test forgetting" in ended.out
    assert "would have lost" in ended.out


@pytest.mark.full
def test_without_a_memory_a_task_is_learned_from_its_own_loss_alone(
    root: str, here: Here, tmp_path: Path
) -> None:
    for name, more in (("with", ["aggregator=agem"]), ("without", ["aggregator=none"])):
        ended = here(*words(root, "task.per_class=0", f"study={name}", *more))
        assert ended.code == 0, ended.err
    agem, plain = (
        RunDirectory(next((tmp_path / "runs" / name).glob(f"{label}-*"))).read_summary()
        for name, label in (("with", "agem"), ("without", "none"))
    )
    keys = [key for key in plain if key.startswith(("test/", "train/"))]
    assert len(keys) > 4
    assert {key: agem[key] for key in keys} == {key: plain[key] for key in keys}


@pytest.mark.slow
def test_a_batch_is_of_one_task_and_so_is_an_epoch(root: str, here: Here) -> None:
    ended = here(*words(root, batch_size=41))
    assert (ended.code, ended.err) == (2, "batch_size: must be <= 40 examples, found 41\n")
    for start, acted in (1, True), (2, False):
        ended = here(*words(root, "transform=clip", "when=epochs", f"when.start={start}"))
        assert ended.code == 0
        assert ("its trigger never fired" in ended.out + ended.err) != acted


def test_an_order_that_ends_before_its_epoch_is_refused() -> None:
    numbers = torch.arange(20)
    batches = Batches(numbers, numbers, 5, 0, order=lambda *_: iter([numbers[:5], numbers[5:10]]))
    with pytest.raises(ValueError, match="the order of epoch 0 has 2 of 4 batches"):
        list(islice(batches.start(0), 4))


def test_a_stream_is_validated_on_other_images_and_measured_on_the_old_and_the_new(
    root: str,
) -> None:
    fields = {"num_tasks": 3, "num_train": 40, "num_test": 10, "per_class": 2, "memory_batch": 25}
    task = PermutedStream(root=root, verify=False, split_seed=4, **fields)  # type: ignore[arg-type]
    data, tuned = task.load(), task.load_with_validation(0.2)
    assert torch.equal(data.test_inputs, tuned.test_inputs)
    assert data.validation_inputs is None
    assert tuned.validation_inputs is not None
    assert len(tuned.validation_inputs) == len(tuned.test_inputs) == 3 * 10
    test, other = (
        {tuple(np.sort(image)) for image in bytes_of(part)}
        for part in (tuned.test_inputs, tuned.validation_inputs)
    )
    assert not test & other
    outputs = torch.randn(30, 10)
    each = functional.cross_entropy(outputs, data.test_targets[:, LABEL], reduction="none")
    found = task.metrics(outputs, data.test_targets)
    old = torch.arange(30) % 3 < 2  # by turns, so that the first examples have both
    assert found["loss_old"] == pytest.approx(each[old].mean().item())
    assert found["loss_new"] == pytest.approx(each[~old].mean().item())
    assert found["loss"] == found["loss_old"] + found["loss_new"]
