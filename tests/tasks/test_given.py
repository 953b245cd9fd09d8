"""Tasks made of a user's own data."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradsurg.tasks import Classification, Regression
from gradsurg.tasks.data.given import task_of

NUMBERS = np.random.default_rng(0)
INPUTS = NUMBERS.normal(size=(40, 3))
CLASSES = np.arange(40) % 4
DATASET = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(CLASSES))
ROWS = [{"pixels": row, "label": int(label)} for row, label in zip(INPUTS, CLASSES, strict=True)]


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS, CLASSES),
        [torch.from_numpy(INPUTS).requires_grad_(), torch.from_numpy(CLASSES)],
        DATASET,
        DataLoader(DATASET, batch_size=7, shuffle=True),
        ROWS,
        {"train": ROWS},
        {"train": (INPUTS, CLASSES)},
    ],
    ids=["arrays", "tensors", "dataset", "loader", "rows", "mapping", "mapping of arrays"],
)
def test_every_form_gives_the_same_examples_of_which_a_quarter_are_for_tests(data: Any) -> None:
    task, known = task_of(data), task_of((INPUTS, CLASSES))
    assert isinstance(task, Classification)
    assert task.content == known.content
    loaded = task.load()
    assert (loaded.input_shape, loaded.num_outputs) == ((3,), 4)
    assert loaded.test_targets.bincount().tolist() == [3, 3, 2, 2]  # equal shares of 10
    both = torch.cat([loaded.train_inputs, loaded.test_inputs])
    expected = torch.from_numpy(INPUTS).float()
    assert torch.equal(both.sort(dim=0).values, expected.sort(dim=0).values)


def test_two_of_a_kind_are_training_and_test() -> None:
    first, second = (INPUTS[:30], CLASSES[:30]), (INPUTS[30:], CLASSES[30:])
    for data in ((first, second), {"train": first, "test": second}):
        loaded = task_of(data).load()
        assert loaded.test_targets.tolist() == CLASSES[30:].tolist()
        assert loaded.train_targets.tolist() == CLASSES[:30].tolist()


def test_whole_numbers_are_tokens_and_may_have_a_target_each() -> None:
    tokens = np.arange(160, dtype=np.int32).reshape(40, 4) % 7
    loaded = task_of((tokens[:, :-1], tokens[:, 1:])).load()
    assert (loaded.num_tokens, loaded.num_outputs, loaded.every_step) == (7, 7, True)
    assert {loaded.train_inputs.dtype, loaded.test_targets.dtype} == {torch.int64}
    assert torch.equal((loaded.train_inputs + 1) % 7, loaded.train_targets)
    of_examples = task_of((tokens, CLASSES)).load()
    assert (of_examples.num_tokens, of_examples.num_outputs, of_examples.every_step) == (
        7,
        4,
        False,
    )


def test_real_targets_make_a_regression() -> None:
    task = task_of((INPUTS, INPUTS[:, 0]))
    assert isinstance(task, Regression)
    assert task.load().num_outputs == 1
    assert task_of((INPUTS, INPUTS[:, :2])).load().num_outputs == 2


def test_bytes_become_numbers_to_one_and_images_get_their_channels_first() -> None:
    images = NUMBERS.integers(0, 256, size=(40, 5, 6, 3)).astype(np.uint8)
    loaded = task_of(((images, CLASSES), (images, CLASSES))).load()
    assert loaded.input_shape == (3, 5, 6)
    assert torch.equal(
        loaded.train_inputs[3, 2], torch.from_numpy(images[3, :, :, 2] / 255).float()
    )
    assert task_of((images[..., 0], CLASSES)).load().input_shape == (1, 5, 6)


def test_other_data_have_another_hash_and_a_run_cannot_change_them() -> None:
    task = task_of((INPUTS, CLASSES))
    assert task.content != task_of((INPUTS + 1e-3, CLASSES)).content
    task.load().train_inputs.zero_()
    assert task.load().train_inputs.abs().sum() > 0


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (Endless(), "found Endless, which has no length"),
        (3, "found int, which has no length"),
        ([], "found 0 arrays"),
        ([1, 2, 3], "must be a pair of input and target, found int"),
        ([{"a": 1, "b": 2}], "found a, b"),
        ((INPUTS, CLASSES, INPUTS, CLASSES), "found 4 arrays"),
        ((INPUTS, CLASSES[:-1]), "40 inputs have 39 targets"),
        ((INPUTS, -CLASSES), "classes must be >= 0, found -3"),
        (
            (INPUTS, np.stack([CLASSES, CLASSES], 1)),
            "of shape [40, 2] for inputs [40, 3]",
        ),
        ((CLASSES[:, None] - 2, CLASSES), "must be >= 0; convert numbers to float, found -2"),
        (
            ((INPUTS, CLASSES), (CLASSES.repeat(3).reshape(40, 3), CLASSES)),
            "inputs [3] torch.int64",
        ),
        ((INPUTS * np.inf, CLASSES), "inputs must be finite, found 120 that are not"),
        ((np.array(["a"] * 40), CLASSES), "inputs must be numbers, found <U1"),
        (((INPUTS, CLASSES), (INPUTS[:, :2], CLASSES)), "must be alike, found inputs [3]"),
    ],
)
def test_other_data_are_refused(data: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        task_of(data)
    assert error in str(caught.value)
