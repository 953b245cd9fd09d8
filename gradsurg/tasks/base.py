"""The contract of a task (data, a loss to differentiate, metrics), and its usual base classes."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from math import ceil
from operator import add
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.data.arrays import split

Part = Literal["train", "validation", "test"]
"""A part of the data."""

Outputs = Tensor | Sequence[Tensor]
"""The outputs of all losses in one tensor, or a tensor for each, for example of a model with
heads."""

_PASSED_ON = {
    "num_tokens": "the inputs of this task are tokens",
    "every_step": "this task has a target for every step of its inputs",
    "start": "what this task moves is a point (model=point)",
}
"""Fields of `Data` that, if set, every model gets as keyword arguments, and their meaning."""

VALIDATION_SEED = 0  # of the split, the same for every run of a task
LEAST_VALIDATION = 2  # examples: the variance of one is zero

_REQUIRED = {
    "num_tokens": "needs tokens, and the inputs of this task are real numbers",
    "start": "needs a point to start from, and this task has none",
    "heads": "needs a task of several losses with outputs of their own, and this one has none",
}
"""The message for a model that requires a keyword argument that the data do not have."""


class Order(ABC):
    """The training examples of each batch, for tasks that do not shuffle all of them."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """The number of examples in an epoch."""

    @abstractmethod
    def batches(self, epoch: int, size: int, generator: Generator) -> Iterator[Tensor]:
        """Yield the indices of the examples of each batch of an epoch (from 0).

        A function of the arguments alone. A batch has `size` examples of the epoch, and may have
        more, for example from a memory.
        """


@dataclass(frozen=True, eq=False)
class Data:
    """Training and test examples; the first axis of each tensor is the examples.

    Validation examples are set aside by `Task.load_with_validation`, or given by the task.

    Args:
        num_tokens: Inputs are tokens, 0 to `num_tokens` - 1, or real numbers if it is None.
        every_step: Targets are (examples, time) and outputs (examples, time, num_outputs), in place
            of (examples, num_outputs).
        start: The model is a point in the plane that starts here, and its outputs are the point.
        heads: How the outputs are divided among the losses of a MultiTask. A model with a parameter
            `heads` gets it, and may return a tuple with the outputs of each head.
        order: The batches of an epoch; None: all examples, shuffled.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    input_shape: tuple[int, ...]
    num_outputs: int
    num_tokens: int | None = None
    every_step: bool = False
    start: tuple[float, ...] | None = None
    heads: tuple[int, ...] | None = None
    order: Order | None = None
    validation_inputs: Tensor | None = None
    validation_targets: Tensor | None = None

    @property
    def epoch_size(self) -> int:
        """The number of examples in an epoch."""
        return len(self.train_inputs) if self.order is None else self.order.num_examples

    @property
    def watched(self) -> Part:
        """The part that is evaluated during training: validation, or test without one."""
        return "test" if self.validation_inputs is None else "validation"

    def part(self, name: Part) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a part. Raises ValueError for a missing validation part."""
        inputs, targets = getattr(self, f"{name}_inputs"), getattr(self, f"{name}_targets")
        if inputs is None or targets is None:
            raise ValueError("the data has no validation part")
        return inputs, targets

    def copy(self) -> "Data":
        """Return a copy whose tensors may be modified."""
        parts = ("train", "validation", "test")
        names = [f"{part}_{side}" for part in parts for side in ("inputs", "targets")]
        tensors = {name: getattr(self, name) for name in names}
        cloned = {name: each.clone() for name, each in tensors.items() if each is not None}
        return replace(self, **cloned)

    def set_aside(self, share: float) -> "Data":
        """Return the data with a share of the training examples as validation part.

        The examples are chosen at random, with equal shares of all classes where a target is one
        class; the choice is the same in every run. Test data are unchanged, and so is the scale of
        the inputs. Data that have a validation part are returned unchanged. Raises ValueError if no
        examples can be set aside.
        """
        if self.validation_inputs is not None:
            return self
        if self.start is not None:
            raise ValueError("this task moves a point and has no examples to set aside")
        if self.order is not None:
            raise ValueError("this task orders its training examples, none can be set aside")
        targets, count = self.train_targets, len(self.train_inputs)
        num_aside = ceil(share * count)
        if min(num_aside, count - num_aside) < LEAST_VALIDATION:
            raise ValueError(
                f"needs {LEAST_VALIDATION} examples or more on each side, and {share:g} of "
                f"{count} training examples are {num_aside}"
            )
        classes = targets.ndim == 1 and not targets.is_floating_point()
        train, aside = split(targets.numpy(), share, VALIDATION_SEED, stratify=classes)
        rows, others = (torch.from_numpy(indices).sort().values for indices in (train, aside))
        return replace(
            self,
            train_inputs=self.train_inputs[rows],
            train_targets=targets[rows],
            validation_inputs=self.train_inputs[others],
            validation_targets=targets[others],
        )

    def model_options(self, model: object, fields: Mapping[str, object]) -> dict[str, object]:
        """Return `fields` with the keyword arguments that the data add for `model`.

        Raises ValueError if the model does not take one of them, or requires one that the data do
        not have, and FieldError if `fields` sets one.
        """
        added = {name: getattr(self, name) for name in _PASSED_ON}
        added = {name: value for name, value in added.items() if value not in (None, False)}
        if not callable(model):
            return {**fields, **added}
        parameters = inspect.signature(model).parameters
        if self.heads is not None and "heads" in parameters:
            added["heads"] = self.heads
        if doubled := [name for name in added if name in fields]:
            raise FieldError("", [(name, "is set by the task") for name in doubled])
        if not any(param.kind is param.VAR_KEYWORD for param in parameters.values()):
            for name in added:
                if name not in parameters:
                    raise ValueError(f"takes no {name}, and {_PASSED_ON[name]}")
        for name, sentence in _REQUIRED.items():
            param = parameters.get(name)
            if param and param.default is param.empty and name not in {*added, *fields}:
                raise ValueError(sentence)
        return {**fields, **added}


@dataclass(frozen=True)
class Chance:
    """The loss and one metric of the best prediction that ignores the inputs.

    `best` is this metric for a perfect model. `description` precedes the value in a sentence, for
    example in "chance for 10 classes is 10%".
    """

    loss: float
    metric: str
    value: float
    best: float
    description: str


class Task(ABC):
    """Base class of a problem to train on: data, a loss and metrics."""

    @abstractmethod
    def load(self) -> Data:
        """Return the data, on the CPU, the same at every call."""

    def load_with_validation(self, share: float) -> Data:
        """Return the data with `share` of the training examples as validation part; 0: without.

        Override it where two examples can share a part, such as a digit. It must have the same test
        data as `load`.
        """
        if share and self.trajectory_metric_names:
            names = ", ".join(self.trajectory_metric_names)
            raise ValueError(f"this task needs tests during training, for {names}")
        if share:
            return self.load().set_aside(share)
        return replace(self.load(), validation_inputs=None, validation_targets=None)

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number to differentiate, a tensor of shape ()."""

    def labels(self, targets: Tensor) -> Tensor:
        """Return the labels (n,) of n examples, for transforms that read them, such as `Route`.

        By default these are the targets. Raises ValueError unless there is one integer for each
        example.
        """
        if targets.ndim != 1 or targets.is_floating_point():
            kind = f"{targets.dtype} of shape {list(targets.shape)}"
            raise ValueError(
                "a transform needs the labels of the examples, and this task has none: its targets "
                f"are {kind}; override Task.labels"
            )
        return targets

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return numbers for evaluation by name, `loss` among them.

        Called at tests only, never between steps, so it may wait for the device with `.item()`.
        """

    def files(self) -> Sequence[Path]:
        """Return the files that decide the data; their content is part of a run's identity."""
        return ()

    def chance(self, targets: Tensor) -> Chance | None:
        """Return the result of guessing with these targets; None if the task does not define it."""
        return None

    @property
    def trajectory_metric_names(self) -> tuple[str, ...]:
        """The names of the numbers of `trajectory_metrics`."""
        return ()

    def trajectory_metrics(
        self, rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> dict[str, float]:  # Any: what JSON can hold
        """Return numbers computed from the test metrics of the whole run, not only the last ones.

        A row has the numbers logged at its `step`, such as `test/accuracy`; `epoch` is the number
        of steps of an epoch.
        """
        return {}

    @property
    def content(self) -> str:
        """Eight hex digits of a hash of the files' content; empty without files."""
        hashes = [_hash_of(Path(path).resolve()) for path in self.files()]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:8] if hashes else ""


def _hash_of(path: Path) -> str:
    try:
        stat = path.stat()
        return _hashed(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        text = f"{path} cannot be read: {error.strerror}"
        raise FieldError("task", [("", text)]) from error


@lru_cache(maxsize=64)
def _hashed(path: Path, time_ns: int, size: int) -> str:
    """Hash a file; an unchanged one is read once a process, as it may be large."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class MultiTask(Task):
    """Base class of a task of several losses, whose gradients an aggregator can combine.

    Its metrics are `loss`, the sum, and `loss_<name>` for each loss. Other metrics of one loss are
    called `<metric>_<name>`, such as `accuracy_first`, so that a report can compare them.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the losses, in their order."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the losses by name, each of shape ()."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses, which is differentiated without an aggregator."""
        return reduce(add, self.losses(outputs, targets).values())


@dataclass(frozen=True)
class Examination:
    """The result of an examination: `numbers` by name, and data to save beside the run."""

    numbers: Mapping[str, float]
    saved: Mapping[str, Any] = field(default_factory=dict)  # Any: what JSON can hold


class Examined(Task):
    """Base class of a task whose model is examined after training.

    Triggers then see step `steps` of the run, even if the run ended early, so `Steps(start=steps)`
    acts in the examination and nowhere else.
    """

    @abstractmethod
    def examine(self, model: nn.Module, data: Data) -> Examination:
        """Examine a model in evaluation mode, and leave it unchanged.

        The surgery is attached. The global generators are seeded from the run's seed, and
        the generators of its training are left alone.
        """


class Classification(Task):
    """Base class: cross-entropy and accuracy. With a target for every step, both are means over all
    steps.
    """

    def labels(self, targets: Tensor) -> Tensor:
        """Return the classes of the examples; with a target for every step, the classes of the
        steps.
        """
        return targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        correct = outputs.argmax(dim=-1) == targets
        return {
            "loss": self.loss(outputs, targets).item(),
            "accuracy": correct.double().mean().item(),
        }

    def chance(self, targets: Tensor) -> Chance:
        _, counts = targets.unique(return_counts=True)
        shares = counts.double() / targets.numel()
        entropy = -(shares * shares.log()).sum().item()  # waits for the device, once a run
        description = f"chance for {len(shares)} classes is"
        return Chance(entropy, "accuracy", shares.max().item(), 1.0, description)


class Regression(Task):
    """Base class: mean squared error, and `r2`, the fraction of the targets' variance that is
    explained.
    """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:  # torch would broadcast them
            shapes = f"{list(outputs.shape)} and {list(targets.shape)}"
            raise ValueError(f"outputs and targets must have one shape, found {shapes}")
        return functional.mse_loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        loss = self.loss(outputs, targets).item()
        return {"loss": loss, "r2": 1 - loss / targets.var(correction=0).item()}

    def chance(self, targets: Tensor) -> Chance:
        variance = targets.double().var(correction=0).item()  # waits for the device, once a run
        return Chance(variance, "r2", 0.0, 1.0, "the mean of all targets has")


class MultiClassification(MultiTask):
    """Base class: several cross-entropies, each of a part of the outputs and a column of the
    targets.
    """

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The number of classes of each loss, and of the outputs that belong to it."""

    def losses(self, outputs: Outputs, targets: Tensor) -> dict[str, Tensor]:
        parts, columns = parts_of(outputs, self.sizes, len(targets)), targets.unbind(dim=1)
        return {
            name: functional.cross_entropy(part, column)
            for name, part, column in zip(self.names, parts, columns, strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        losses = floats(self.losses(outputs, targets).values())
        parts, columns = parts_of(outputs, self.sizes, len(targets)), targets.unbind(dim=1)
        accuracies = floats(
            (part.argmax(dim=1) == column).double().mean()
            for part, column in zip(parts, columns, strict=True)
        )
        return {
            "loss": sum(losses),
            "accuracy": fmean(accuracies),
            **by_name("loss", self.names, losses),
            **by_name("accuracy", self.names, accuracies),
        }


def parts_of(outputs: Outputs, sizes: Sequence[int], count: int) -> Sequence[Tensor]:
    """Split the outputs for `count` examples into `sizes` columns; ValueError for other shapes."""
    whole = [count, sum(sizes)]
    if isinstance(outputs, Tensor):
        if list(outputs.shape) != whole:
            raise ValueError(f"outputs must have the shape {whole}, found {list(outputs.shape)}")
        return outputs.split(tuple(sizes), dim=1)
    shapes = [list(part.shape) for part in outputs]
    if shapes != [[count, size] for size in sizes]:
        rule = f"a tensor of the shape {whole}, or for each task its part of it"
        raise ValueError(f"outputs must be {rule}, {list(sizes)} columns, found shapes {shapes}")
    return outputs


def floats(values: Iterable[Tensor]) -> list[float]:
    """Return the numbers of several tensors of shape (), with one wait for the device."""
    return torch.stack(list(values)).tolist()


def by_name(metric: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return a metric of each loss under the name `<metric>_<name>`."""
    return {f"{metric}_{name}": value for name, value in zip(names, values, strict=True)}
