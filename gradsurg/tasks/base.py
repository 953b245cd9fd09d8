"""What a task promises: data, a loss to differentiate, and metrics to report."""

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import add
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn
from torch.nn import functional

from gradsurg.plugins.fields import FieldError

SAID = {
    "num_tokens": "the inputs of this task are tokens",
    "every_step": "this task has a target for every step of its inputs",
    "start": "what this task moves is a point (model=point)",
}
"""What a model is told by name, where the data has it to tell, and what it means."""

NEEDED = {
    "num_tokens": "needs tokens, and the inputs of this task are real numbers",
    "start": "needs a point to start from, and this task has none",
    "heads": "needs a task of several losses with outputs of their own, and this one has none",
}
"""What is said to a model that cannot do without what the data does not have."""


class Order(ABC):
    """Which training examples a batch has, where it is not any of all of them."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """Those of an epoch."""

    @abstractmethod
    def batches(self, epoch: int, size: int, generator: Generator) -> Iterator[Tensor]:
        """The numbers of the examples of each batch of an epoch (from 0), by these alone.

        `size` of a batch are the epoch's own, and there may be others besides.
        """


@dataclass(frozen=True, eq=False)
class Data:
    """What is learnt from and what is tested on, whole, with the first axis the examples.

    Inputs are real numbers, or with `num_tokens` the numbers 0 to `num_tokens` - 1 of tokens.
    A model gives (examples, num_outputs); with `every_step` the targets are (examples, time) and
    it gives (examples, time, num_outputs). With `start` the model is that point, and its outputs
    are it. A model is told of the three by name if they are set. `heads` says how the outputs are
    split among the losses of a MultiTask: a model that asks for it is told, and may give a tuple,
    the outputs of each head apart. Without an `order` every epoch is all examples, shuffled.
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

    @property
    def epoch_size(self) -> int:
        """The examples of an epoch."""
        return len(self.train_inputs) if self.order is None else self.order.num_examples

    def copy(self) -> "Data":
        """The same with tensors of its own, which its user may change."""
        return replace(
            self,
            train_inputs=self.train_inputs.clone(),
            train_targets=self.train_targets.clone(),
            test_inputs=self.test_inputs.clone(),
            test_targets=self.test_targets.clone(),
        )

    def told(self, model: object, fields: Mapping[str, object]) -> dict[str, object]:
        """What `model` is made with by name: `fields`, and what the data has to tell it.

        Raises ValueError if the model does not take that, or needs what the data has not.
        """
        own = {name: getattr(self, name) for name in SAID}
        own = {name: value for name, value in own.items() if value not in (None, False)}
        if not callable(model):
            return {**fields, **own}
        taken = inspect.signature(model).parameters
        if self.heads is not None and "heads" in taken:
            own["heads"] = self.heads
        if doubled := [name for name in own if name in fields]:
            raise FieldError("", [(name, "is for the task to say") for name in doubled])
        if not any(param.kind is param.VAR_KEYWORD for param in taken.values()):
            for name in own:
                if name not in taken:
                    raise ValueError(f"takes no {name}, and {SAID[name]}")
        for name, sentence in NEEDED.items():
            asked = taken.get(name)
            if asked and asked.default is asked.empty and name not in {*own, *fields}:
                raise ValueError(sentence)
        return {**fields, **own}


@dataclass(frozen=True)
class Chance:
    """What the best guess comes to that does not look at the inputs: its loss and one metric.

    `best` is that metric of a perfect model; `what` is said before the value, as in "chance for 10
    classes is 10%".
    """

    loss: float
    metric: str
    value: float
    best: float
    what: str


class Task(ABC):
    """A problem to train on."""

    @abstractmethod
    def load(self) -> Data:
        """The data: on the CPU, and the same at every call."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The number that is differentiated, as a tensor of no axes."""

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Numbers for evaluation, by name, `loss` among them.

        This is where `.item()` belongs: it waits for the device, at tests and never between steps.
        """

    def files(self) -> Sequence[Path]:
        """The files whose content decides the data; runs are told apart by it."""
        return ()

    def landscape(self) -> dict[str, Any] | None:  # Any: what JSON can hold
        """Where there are two coordinates to move in, what a report draws them over; else None.

        It has the `names` of the losses, the `start`, `x1` and `x2`, and for each loss its
        `values`, a row for each of `x2`; `pareto`, points of the Pareto set in order, and whether
        they go around it (`closed`).
        """
        return None

    def chance(self, targets: Tensor) -> Chance | None:
        """What is reached with these targets without learning; None if the task cannot tell."""
        return None

    @property
    def following(self) -> tuple[str, ...]:
        """The names of what `followed` makes."""
        return ()

    def followed(
        self, rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> dict[str, float]:  # Any: what JSON can hold
        """What comes of the tests of a run, by name: numbers of more than its end.

        A row has what was logged at its `step`, as `test/accuracy`; an `epoch` is so many steps.
        """
        return {}

    @property
    def content(self) -> str:
        """Eight hex digits that stand for what its files hold; empty if it has none."""
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
    """Of a file as it was at that time: a large one is read once in a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class MultiTask(Task):
    """Several losses of one model, whose gradients an aggregator can make one of.

    Its metrics are `loss`, the sum, and `loss_<name>` for each of its names; what else is measured
    of each is called so too, `<metric>_<name>`, as `accuracy_first`: thereby a report knows what to
    set beside one another.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of its losses, in their order."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The losses by their names, each a tensor of no axes."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Their sum: what is differentiated without an aggregator."""
        return reduce(add, self.losses(outputs, targets).values())


@dataclass(frozen=True)
class Examination:
    """What an examination came to: `numbers` by name, and what is kept beside the run."""

    numbers: Mapping[str, float]
    kept: Mapping[str, Any] = field(default_factory=dict)  # Any: what JSON can hold


class Examined(Task):
    """A task whose model is examined once it is trained.

    That is the moment after the last step: a trigger is asked about step `steps` of the run, also
    if that has ended before, so that `Steps(start=steps)` acts there and nowhere else.
    """

    @abstractmethod
    def examine(self, model: nn.Module, data: Data) -> Examination:
        """Examine a model, in evaluation mode, and leave it as it was.

        What flows back in it meets the surgery. Random numbers follow from the run's seed,
        apart from those of its training.
        """


class Classification(Task):
    """Cross-entropy and accuracy; with a target for every step, the means over all steps."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        right = outputs.argmax(dim=-1) == targets
        return {
            "loss": self.loss(outputs, targets).item(),
            "accuracy": right.double().mean().item(),
        }

    def chance(self, targets: Tensor) -> Chance:
        _, counts = targets.unique(return_counts=True)
        shares = counts.double() / targets.numel()
        entropy = -(shares * shares.log()).sum().item()  # once a run, as all of `chance`
        what = f"chance for {len(shares)} classes is"
        return Chance(entropy, "accuracy", shares.max().item(), 1.0, what)


class Regression(Task):
    """Mean squared error, and the share of the targets' variance that it explains, `r2`."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape != targets.shape:  # torch would broadcast them
            found = f"{list(outputs.shape)} and {list(targets.shape)}"
            raise ValueError(f"outputs and targets must have one shape, found {found}")
        return functional.mse_loss(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        loss = self.loss(outputs, targets).item()
        return {"loss": loss, "r2": 1 - loss / targets.var(correction=0).item()}

    def chance(self, targets: Tensor) -> Chance:
        spread = targets.double().var(correction=0).item()  # once a run
        return Chance(spread, "r2", 0.0, 1.0, "the mean of all targets has")
