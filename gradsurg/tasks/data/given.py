"""A task of a user's own data: arrays, a Dataset, a DataLoader or Hugging Face rows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gradsurg.tasks.base import Classification, Data, Regression, Task
from gradsurg.tasks.data.arrays import split

TEST_FRACTION, SPLIT_SEED = 0.25, 0
FORMS = (
    "(inputs, targets), a Dataset of such pairs, a DataLoader, or Hugging Face rows, and two of "
    "one kind for training and test"
)

Examples = tuple[Tensor, Tensor]


def task_of(data: object) -> Task:
    """Return a task of `data`: `(inputs, targets)`, a Dataset, a DataLoader, or two of one kind.

    Two of a kind, or a mapping with `train` and `test`, are the training and the test examples;
    from one, a quarter is set aside as test examples, with equal shares of all classes. Whole
    numbers as targets are classes (cross-entropy), of examples (N,) or of steps (N, T) of inputs
    (N, T, ...); real ones a regression (mean squared error). Whole numbers (N, T) as inputs are
    tokens. Bytes become numbers from 0 to 1, and images get their channels first. Of a DataLoader
    only the dataset is used; the run has its own batches. Raises TypeError or ValueError for other
    data.
    """
    train, test = _parts(data)
    inputs, targets = _examples(train)
    if test is None:
        rows, others = map(torch.from_numpy, _split(targets))
        parts = inputs[rows], targets[rows], inputs[others], targets[others]
    else:
        parts = inputs, targets, *_examples(test)
    kinds = _kind(inputs, targets), _kind(*parts[2:])
    if kinds[0] != kinds[1]:
        found = " and ".join(kinds)
        raise ValueError(f"training and test examples must be alike, found {found}")
    classes = not targets.is_floating_point()
    num_outputs = 1 + int(max(parts[1].max(), parts[3].max())) if classes else targets.shape[1]
    is_real = inputs.is_floating_point()
    made = Data(
        *parts,
        input_shape=tuple(inputs.shape[1:]),
        num_outputs=num_outputs,
        num_tokens=None if is_real else 1 + int(max(inputs.max(), parts[2].max())),
        every_step=classes and targets.ndim == 2,
    )
    return GivenClassification(made) if classes else GivenRegression(made)


@dataclass(frozen=True)
class _Given(Task):
    data: Data

    def load(self) -> Data:
        return self.data.copy()

    @property
    def content(self) -> str:
        """A hash of the examples, which are part of a run's identity."""
        tensors = (*self.data.part("train"), *self.data.part("test"))
        contents = (tensor.contiguous().numpy().tobytes() for tensor in tensors)
        return hashlib.sha256(b"".join(contents)).hexdigest()[:8]


class GivenClassification(_Given, Classification):
    """Classify a user's own examples."""


class GivenRegression(_Given, Regression):
    """Predict real numbers of a user's own examples."""


def _parts(data: object) -> tuple[object, object | None]:
    """Return training and test examples as they were given; None for those to be set aside."""
    match data:
        case Mapping() if "train" in data:
            (name,) = [key for key in ("test", "validation") if key in data][:1] or [None]
            return data["train"], None if name is None else data[name]
        case (train, test) if not _is_array(train):
            return train, test
        case tuple() | list() if len(data) != 2 and all(map(_is_array, data)):
            pairs = "((inputs, targets), (inputs, targets)) for training and test"
            raise TypeError(f"must be {pairs}, found {len(data)} arrays")
        case _:
            return data, None


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _array(value: object) -> np.ndarray:
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)


def _examples(data: Any) -> Examples:  # Any: what a user has
    """Return inputs and targets as tensors, the examples first."""
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        inputs, targets = map(_array, data)
    elif isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise TypeError(f"must be {FORMS}, found {type(data).__name__}, which has no length")
    elif not hasattr(data, "__getitem__") or not len(data):
        raise TypeError(f"must be {FORMS}, found {type(data).__name__}")
    else:
        pairs = [_pair(data[index]) for index in range(len(data))]
        inputs, targets = (np.stack([*map(_array, side)]) for side in zip(*pairs, strict=True))
    if len(inputs) != len(targets):
        raise ValueError(f"{len(inputs)} inputs have {len(targets)} targets")
    return _inputs(inputs), _targets(targets, inputs.shape[:2])


def _pair(example: object) -> Sequence[object]:
    if isinstance(example, Mapping):
        names = [name for name in ("label", "labels", "target", "targets", "y") if name in example]
        others = [name for name in example if name not in names]
        if len(names) != 1 or len(others) != 1:
            columns = ", ".join(map(str, example))
            raise TypeError(
                f"an example must have one input and one of label, labels, target, targets, y, "
                f"found {columns}"
            )
        return example[others[0]], example[names[0]]
    if isinstance(example, tuple | list) and len(example) == 2:
        return example
    raise TypeError(
        f"an example must be a pair of input and target, found {type(example).__name__}"
    )


def _inputs(values: np.ndarray) -> Tensor:
    if values.dtype == np.uint8:
        if values.ndim == 4 and values.shape[-1] in (1, 3, 4):
            values = rearrange(values, "n height width channel -> n channel height width")
        elif values.ndim == 3:
            values = rearrange(values, "n height width -> n 1 height width")
        values = values.astype(np.float32) / 255
    if values.dtype.kind not in "fiub":
        raise TypeError(f"inputs must be numbers, found {values.dtype}")
    if values.ndim == 2 and values.dtype.kind in "iu":
        if values.size and values.min() < 0:
            rule = "tokens (inputs of whole numbers) must be >= 0; convert numbers to float"
            raise ValueError(f"{rule}, found {values.min()}")
        return torch.from_numpy(values.astype(np.int64))
    inputs = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if count := int((~inputs.isfinite()).sum()):
        raise ValueError(f"inputs must be finite, found {count} that are not")
    return inputs if inputs.ndim > 1 else inputs[:, None]


def _targets(values: np.ndarray, steps: tuple[int, ...]) -> Tensor:
    if values.dtype.kind == "f":
        targets = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if not targets.isfinite().all():
            raise ValueError("targets must be finite")
        return targets.reshape(len(targets), -1)
    if values.dtype.kind not in "iub" or values.shape not in (steps[:1], steps):
        found = f"{values.dtype} of shape {list(values.shape)}"
        rule = "one class an example or a step of the inputs, or real numbers"
        raise TypeError(f"targets must be {rule}, found {found} for inputs {list(steps)}")
    if values.min() < 0:
        raise ValueError(f"classes must be >= 0, found {values.min()}")
    return torch.from_numpy(values.astype(np.int64))


def _split(targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    classes = targets.ndim == 1 and not targets.is_floating_point()
    return split(targets.numpy(), TEST_FRACTION, SPLIT_SEED, stratify=classes)


def _kind(inputs: Tensor, targets: Tensor) -> str:
    left, right = (f"{list(side.shape[1:])} {side.dtype}" for side in (inputs, targets))
    return f"inputs {left} with targets {right}"
