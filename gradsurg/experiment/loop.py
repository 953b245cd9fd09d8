"""The training loop, a generator of steps, which imports nothing of gradsurg.

`train` is the loop; `Batches` says which examples each step has, `StepOptions` what a step does
beyond forward, backward and `optimizer.step`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = tuple[Tensor, Tensor]
Losses = Tensor | Mapping[str, Tensor]
"""The loss of a batch, or several by task."""
EpochOrder = Callable[[int, int, torch.Generator], Iterator[Tensor]]
"""Indices of the examples of each batch, for an epoch (from 0), a batch size and a generator."""


@dataclass(frozen=True)
class Batches:
    """Batches of tensors held in memory; the examples of step n depend on (seed, n) alone.

    A step has `accumulate` batches of `size` examples, together those of one batch of
    `accumulate * size`. Each epoch is a new permutation, or the batches of `order`, and has
    `epoch_size` examples; an incomplete last step is dropped. Of each batch this process gets the
    part `rank` of `ranks`, which divides `size`. Raises ValueError if `order` yields fewer batches
    than an epoch has.
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

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        count = len(self.inputs) if self.epoch_size is None else self.epoch_size
        return count // (self.size * self.accumulate)

    def start(self, step: int) -> Iterator[Batch]:
        """Yield the batches of `step` and of all later steps, without end."""
        epoch, skip = divmod(step, self.steps_per_epoch)
        while True:
            for indices in islice(self.indices(epoch), skip * self.accumulate, None):
                own = indices.chunk(self.ranks)[self.rank] if self.ranks > 1 else indices
                yield self.inputs[own], self.targets[own]
            epoch, skip = epoch + 1, 0

    def indices(self, epoch: int) -> Iterator[Tensor]:
        """Yield the indices of the examples of each batch of an epoch."""
        # A torch seed has 64 bits, and a user's seed may fill them.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        count, device = self.steps_per_epoch * self.accumulate, self.inputs.device
        if self.order is None:
            order = torch.randperm(len(self.inputs), generator=generator)
            yield from order[: count * self.size].to(device).view(-1, self.size)
            return
        batches = islice(self.order(epoch, self.size, generator), count)
        for number, indices in zip_longest(range(count), batches):
            if indices is None:
                raise ValueError(f"the order of epoch {epoch} has {number} of {count} batches")
            yield indices.to(device)


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    `autocast` is the dtype of the forward and the loss; `schedule` steps with the optimizer, except
    when the scaler skips. If the loss function returns the losses of several tasks, `backward` runs
    their backward passes; its second argument is True for the last batch of a step. `on_batch` gets
    each batch before its forward.
    """

    autocast: torch.dtype | None = None
    scaler: GradScaler | None = None
    schedule: LRScheduler | None = None
    backward: Callable[[Mapping[str, Tensor], bool], None] | None = None
    on_batch: Callable[[Tensor, Tensor], None] | None = None


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
    loss_fn: Callable[[Tensor, Tensor], Losses],
    batches: Batches,
    steps: int,
    start: int = 0,
    options: StepOptions = PLAIN,
) -> Iterator[Step]:
    """Train from step `start` to `steps`; the caller's work between steps is not timed."""
    model.train()
    stream, parts = batches.start(start), batches.accumulate
    for done in range(start + 1, steps + 1):
        step_batches = list(islice(stream, parts))
        began = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(step_batches, 1):
            if options.on_batch is not None:
                options.on_batch(*batch)
            loss = _loss(model, loss_fn, batch, parts, options.autocast)
            losses.append(_backward(loss, options, number == parts))
        skipped = _step(optimizer, options)
        loss = losses[0] if parts == 1 else torch.stack(losses).sum()
        yield Step(done, loss, perf_counter() - began, skipped)


def _loss(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Losses],
    batch: Batch,
    parts: int,
    autocast: torch.dtype | None,
) -> Losses:
    """Return the loss, or losses, of one of the `parts` batches of a step, divided by `parts`."""
    inputs, targets = batch
    if autocast is None:
        loss = loss_fn(model(inputs), targets)
    else:
        with torch.autocast(inputs.device.type, autocast):
            loss = loss_fn(model(inputs), targets)
    if parts == 1:
        return loss
    if isinstance(loss, Tensor):
        return loss / parts
    return {name: each / parts for name, each in loss.items()}


def _backward(loss: Losses, options: StepOptions, last: bool) -> Tensor:
    """Add the gradients of one of a step's batches; return the loss, summed over tasks."""
    scaler = options.scaler
    if isinstance(loss, Tensor):
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()
    assert options.backward is not None
    scaled = loss if scaler is None else {name: scaler.scale(each) for name, each in loss.items()}
    options.backward(scaled, last)
    return torch.stack([each.detach() for each in loss.values()]).sum()


def _step(optimizer: Optimizer, options: StepOptions) -> bool:
    """Step the optimizer and the schedule; return whether the scaler skipped both."""
    skipped = False
    if (scaler := options.scaler) is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before  # `scaler.step` does not say whether it skipped
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
