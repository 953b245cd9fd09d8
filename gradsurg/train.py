"""The training loop, as a generator: it knows nothing of surgery."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batches:
    """Batches of tensors held in memory: which examples step n gets depends on (seed, n) alone.

    Every epoch is a new permutation; its incomplete last batch is dropped.
    """

    inputs: Tensor
    targets: Tensor
    size: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= len(self.inputs):
            count = len(self.inputs)
            raise ValueError(f"batch_size: must be 1 to {count} examples, found {self.size}")

    def start(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of `step`, `step` + 1 and so on, without end."""
        epoch, skip = divmod(step, len(self.inputs) // self.size)
        while True:
            # A torch seed has 64 bits, one that a user gave may fill them.
            seed = (self.seed * 1_000_003 + epoch) % 2**63
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(self.inputs), generator=generator)
            order = order[: len(order) - len(order) % self.size].to(self.inputs.device)
            for chosen in order.view(-1, self.size)[skip:]:
                yield self.inputs[chosen], self.targets[chosen]
            epoch, skip = epoch + 1, 0


@dataclass(frozen=True)
class Step:
    """One optimizer step: how many are done with it, its loss (on the device), its seconds."""

    done: int
    loss: Tensor
    seconds: float


def train(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Batches,
    steps: int,
    start: int = 0,
    before: Callable[[int, Sequence[tuple[Tensor, Tensor]]], None] | None = None,
) -> Iterator[Step]:
    """Train from step `start` to `steps`; what the caller does between steps is not timed.

    `before` is told the number of each step (from 0) and its batches before it is made.
    """
    model.train()
    stream = batches.start(start)
    for done in range(start + 1, steps + 1):
        inputs, targets = next(stream)
        if before is not None:
            before(done - 1, [(inputs, targets)])
        began = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield Step(done, loss.detach(), perf_counter() - began)


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor, size: int = 1024) -> Tensor:
    """What the model says about all `inputs`, in evaluation mode, `size` at a time."""
    model.eval()
    outputs = torch.cat([model(part) for part in inputs.split(size)])
    model.train()
    return outputs
