"""The training loop, as a generator of steps; it imports nothing of gradsurg."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

LossFn = Callable[[Tensor, Tensor], Tensor]
EpochOrder = Callable[[int, int, torch.Generator], Iterator[Tensor]]
"""Indices of the examples of each batch, for an epoch (from 0), a batch size and a generator."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batches:
    """Batches of tensors held in memory; the examples of step n depend on (seed, n) alone.

    A step has `accumulate` batches of `size` examples, together those of one batch of
    `accumulate * size`. Each epoch is a new permutation, or the batches of `order`, and has
    `epoch_size` examples; an incomplete last step is dropped. Of each batch this process gets the
    part `rank` of `ranks` equal ones. Raises ValueError if `order` yields fewer batches than an
    epoch has.
    """

    inputs: Tensor
    targets: Tensor
    size: int
    seed: int
    accumulate: int = 1
    order: EpochOrder | None = None
    epoch_size: int | None = None
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        count = self._count // self.accumulate
        if not 1 <= self.size <= count:
            raise ValueError(f"batch_size: must be 1 to {count} examples, found {self.size}")
        if self.size % self.ranks:
            rule = f"must be a multiple of ranks={self.ranks}"
            raise ValueError(f"batch_size: {rule}, found {self.size}")

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._count // (self.size * self.accumulate)

    @property
    def _count(self) -> int:
        return len(self.inputs) if self.epoch_size is None else self.epoch_size

    def start(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of `step` and of all later steps, without end."""
        epoch, skip = divmod(step, self.steps_per_epoch)
        while True:
            for indices in islice(self.indices(epoch), skip * self.accumulate, None):
                own = indices.chunk(self.ranks)[self.rank]
                yield self.inputs[own], self.targets[own]
            epoch, skip = epoch + 1, 0

    def indices(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of the examples of each batch of an epoch."""
        # A torch seed has 64 bits, and a user's seed may fill them.
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        generator = torch.Generator().manual_seed(seed)
        count, device = self.steps_per_epoch * self.accumulate, self.inputs.device
        if self.order is not None:
            batches = self.order(epoch, self.size, generator)
            for number in range(count):
                indices = next(batches, None)
                if indices is None:
                    raise ValueError(f"the order of epoch {epoch} has {number} of {count} batches")
                yield indices.to(device)
            return
        order = torch.randperm(len(self.inputs), generator=generator)
        yield from order[: count * self.size].to(device).view(-1, self.size)


@dataclass(frozen=True)
class TaskLosses:
    """The losses of several tasks, by task, instead of one loss.

    `backward` runs the backward passes; its second argument is True for the last batch of a step.
    """

    losses: Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    backward: Callable[[Mapping[str, Tensor], bool], None]


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step beyond forward, backward and `optimizer.step`.

    `autocast` is the dtype of the forward and the loss; `schedule` steps with the optimizer, except
    when the scaler skips; `task_losses` replaces the single loss.
    """

    autocast: torch.dtype | None = None
    scaler: GradScaler | None = None
    schedule: LRScheduler | None = None
    task_losses: TaskLosses | None = None


PLAIN = StepOptions()


class Step(NamedTuple):
    """One step: the number of steps done, this one included, its loss (on the device), and its
    seconds.

    `skipped` if the scaler met gradients that are not finite: the weights are unchanged.
    """

    done: int
    loss: Tensor
    seconds: float
    skipped: bool = False


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Batches,
    steps: int,
    start: int = 0,
    options: StepOptions = PLAIN,
    before: Callable[[int, Sequence[tuple[Tensor, Tensor]]], None] | None = None,
) -> Iterator[Step]:
    """Train from step `start` to `steps`; the caller's work between steps is not timed.

    `before` is called before each step with its number (from 0) and its batches.
    """
    model.train()
    stream = batches.start(start)
    for done in range(start + 1, steps + 1):
        parts = list(islice(stream, batches.accumulate))
        if before is not None:
            before(done - 1, parts)
        began = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        losses = [
            _backward(model, loss_fn, part, len(parts), options, number == len(parts))
            for number, part in enumerate(parts, 1)
        ]
        skipped = _step(optimizer, options)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        yield Step(done, loss, perf_counter() - began, skipped)


def loss_of(
    model: nn.Module,
    loss_fn: LossFn,
    batch: tuple[Tensor, Tensor],
    parts: int,
    autocast: torch.dtype | None,
) -> Tensor:
    """Return the loss of one of the `parts` batches of a step, divided by `parts`."""
    loss = _forward(model, loss_fn, batch, autocast)
    return loss / parts if parts > 1 else loss


def _forward(
    model: nn.Module,
    function: Callable[[Tensor, Tensor], Result],
    batch: tuple[Tensor, Tensor],
    autocast: torch.dtype | None,
) -> Result:
    """Return `function(outputs, targets)` of a batch."""
    inputs, targets = batch
    if autocast is None:
        return function(model(inputs), targets)
    with torch.autocast(inputs.device.type, autocast):
        return function(model(inputs), targets)


def _backward(
    model: nn.Module,
    loss_fn: LossFn,
    batch: tuple[Tensor, Tensor],
    parts: int,
    options: StepOptions,
    last: bool,
) -> Tensor:
    """Add the gradients of one of the step's `parts` batches; return its share of the loss."""
    scale = options.scaler.scale if options.scaler is not None else lambda loss: loss
    if options.task_losses is None:
        loss = loss_of(model, loss_fn, batch, parts, options.autocast)
        scale(loss).backward()
        return loss.detach()
    losses = _forward(model, options.task_losses.losses, batch, options.autocast)
    losses = {name: loss / parts if parts > 1 else loss for name, loss in losses.items()}
    options.task_losses.backward({name: scale(loss) for name, loss in losses.items()}, last)
    return torch.stack([loss.detach() for loss in losses.values()]).sum()


def _step(optimizer: Optimizer, options: StepOptions) -> bool:
    """Step the optimizer and the schedule; return whether the scaler skipped both."""
    scaler, skipped = options.scaler, False
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
    if options.schedule is not None and not skipped:
        options.schedule.step()
    return skipped


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor, size: int = 1024) -> Tensor:
    """Return the model's outputs for all `inputs` in evaluation mode, `size` at a time.

    The outputs of several heads are concatenated along dimension 1.
    """
    model.eval()
    outputs = torch.cat([concatenated(model(part)) for part in inputs.split(size)])
    model.train()
    return outputs


def concatenated(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the outputs of several heads in one tensor, along dimension 1."""
    return outputs if isinstance(outputs, Tensor) else torch.cat(outputs, dim=1)
