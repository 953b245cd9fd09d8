"""The training loop, as a generator: it knows nothing of surgery."""

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
"""The numbers of the examples of each batch, of an epoch (from 0), a batch size and a generator."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Batches:
    """Batches of tensors held in memory: which examples step n gets depends on (seed, n) alone.

    A step takes `accumulate` batches of `size` examples, together those that it would get as one
    batch; what an `order` gives besides, each of them has. Every epoch is a new permutation, or
    what `order` makes it, with `epoch_size` examples; what is left for an incomplete last step is
    dropped. An order that ends before its epoch does raises ValueError.
    """

    inputs: Tensor
    targets: Tensor
    size: int
    seed: int
    accumulate: int = 1
    order: EpochOrder | None = None
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        count = self._count // self.accumulate
        if not 1 <= self.size <= count:
            raise ValueError(f"batch_size: must be 1 to {count} examples, found {self.size}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch has."""
        return self._count // (self.size * self.accumulate)

    @property
    def _count(self) -> int:
        return len(self.inputs) if self.epoch_size is None else self.epoch_size

    def start(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of `step`, `step` + 1 and so on, without end."""
        epoch, skip = divmod(step, self.steps_per_epoch)
        while True:
            for chosen in islice(self._epoch(epoch), skip * self.accumulate, None):
                yield self.inputs[chosen], self.targets[chosen]
            epoch, skip = epoch + 1, 0

    def _epoch(self, epoch: int) -> Iterator[Tensor]:
        """The numbers of the examples of each of its batches."""
        # A torch seed has 64 bits, one that a user gave may fill them.
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        generator = torch.Generator().manual_seed(seed)
        count, device = self.steps_per_epoch * self.accumulate, self.inputs.device
        if self.order is not None:
            batches = self.order(epoch, self.size, generator)
            for number in range(count):
                chosen = next(batches, None)
                if chosen is None:
                    raise ValueError(f"the order of epoch {epoch} has {number} of {count} batches")
                yield chosen.to(device)
            return
        order = torch.randperm(len(self.inputs), generator=generator)
        yield from order[: count * self.size].to(device).view(-1, self.size)


@dataclass(frozen=True)
class Several:
    """The `losses` of several tasks, by their names, in place of one loss.

    `backward` goes back from them, and is told whether they are the last of the step.
    """

    losses: Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    backward: Callable[[Mapping[str, Tensor], bool], None]


@dataclass(frozen=True)
class StepOptions:
    """How a step is made, where it is not the plain one.

    `autocast` is the type that the forward and the loss are computed in; `schedule` takes a step
    with each that the optimizer makes; with `several` the losses of several tasks go back.
    """

    autocast: torch.dtype | None = None
    scaler: GradScaler | None = None
    schedule: LRScheduler | None = None
    several: Several | None = None


PLAIN = StepOptions()


class Step(NamedTuple):
    """One step: how many are done with it, its loss (on the device), its seconds.

    It was `skipped` if the scaler met gradients that are not finite: the weights are as before.
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
    manner: StepOptions = PLAIN,
    before: Callable[[int, Sequence[tuple[Tensor, Tensor]]], None] | None = None,
) -> Iterator[Step]:
    """Train from step `start` to `steps`; what the caller does between steps is not timed.

    `before` is told the number of each step (from 0) and its batches before it is made.
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
            _backward(model, loss_fn, part, len(parts), manner, number == len(parts))
            for number, part in enumerate(parts, 1)
        ]
        skipped = _step(optimizer, manner)
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        yield Step(done, loss, perf_counter() - began, skipped)


def loss_of(
    model: nn.Module,
    loss_fn: LossFn,
    batch: tuple[Tensor, Tensor],
    parts: int,
    autocast: torch.dtype | None,
) -> Tensor:
    """The share that a batch, one of so many `parts` of a step, has in the loss of the step."""
    loss = computed(model, loss_fn, batch, autocast)
    return loss / parts if parts > 1 else loss


def computed(
    model: nn.Module,
    function: Callable[[Tensor, Tensor], Found],
    batch: tuple[Tensor, Tensor],
    autocast: torch.dtype | None,
) -> Found:
    """What a function says of the model's outputs and the targets."""
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
    manner: StepOptions,
    last: bool,
) -> Tensor:
    """Add the gradients of a batch, one of so many `parts` of a step; its share of the loss."""
    scale = manner.scaler.scale if manner.scaler is not None else lambda loss: loss
    if manner.several is None:
        loss = loss_of(model, loss_fn, batch, parts, manner.autocast)
        scale(loss).backward()
        return loss.detach()
    losses = computed(model, manner.several.losses, batch, manner.autocast)
    losses = {name: loss / parts if parts > 1 else loss for name, loss in losses.items()}
    manner.several.backward({name: scale(loss) for name, loss in losses.items()}, last)
    return torch.stack([loss.detach() for loss in losses.values()]).sum()


def _step(optimizer: Optimizer, manner: StepOptions) -> bool:
    """Have the optimizer make its step, and the schedule; whether the scaler has skipped both."""
    scaler, skipped = manner.scaler, False
    if scaler is None:
        optimizer.step()
    else:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < before
    if manner.schedule is not None and not skipped:
        manner.schedule.step()
    return skipped


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor, size: int = 1024) -> Tensor:
    """What the model says about all `inputs`, in evaluation mode, `size` at a time.

    Outputs of several heads stand beside one another.
    """
    model.eval()
    outputs = torch.cat([_beside(model(part)) for part in inputs.split(size)])
    model.train()
    return outputs


def _beside(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else torch.cat(outputs, dim=1)
