"""What an update would have been without the surgery, from the same weights and the same batch."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.effects.numbers import UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.torch_internals import autograd
from gradsurg.torch_internals.random_state import Generators, generators, kept, put_back
from gradsurg.training.loop import LossFn, loss_of

Batch = tuple[Tensor, Tensor]


@dataclass
class _Sample:
    """A sampled step: its batches, its weights and random generators at the start, the twin's."""

    parts: Sequence[Batch]
    start: list[Tensor]
    generators: Generators
    loss: float
    without: list[Tensor]


class Counterfactual:
    """On sampled steps, the step that the optimizer would have made without the surgery.

    A twin makes it: a deep copy of model and optimizer, taken before the surgery is attached, so
    that it has the hooks of the model itself and none of the surgery. What the surgery puts in
    force for the whole thread or process is out of force while the twin runs. Before a sampled step
    it gets weights, buffers, modes and optimizer state as they are, its forwards draw what those
    of the step will draw, and the generators of the process are put back. The model that is trained
    is never run: training is bit for bit what it is without asking.

    What a model keeps elsewhere (plain attributes, generators of its own) the twin has apart. It
    takes no gradient scaler, and runs a compiled model uncompiled, which rounds differently.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        every: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.every = every
        self._model = getattr(model, "_orig_mod", model)
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._surroundings = autograd.surroundings()
        # Together: the copy of the optimizer has the parameters of the copy of the model.
        self._twin, self._twin_optimizer = copy.deepcopy((self._model, optimizer))
        self._device = next(self._model.parameters()).device
        self._open: _Sample | None = None
        self._samples: list[dict[str, float]] = []

    def before(self, step: int, parts: Sequence[Batch]) -> None:
        """Step `step` (from 0) is about to be made of these batches; if it is sampled, the twin
        makes it first.
        """
        self._open = None
        if step % self.every:
            return
        start = _weights(self._model)
        sample = self._open = _Sample(parts, start, generators(self._device), 0.0, [])
        optimizer = self._twin_optimizer
        with self._apart(sample):
            self._follow(start)
            optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
            sample.loss = self._loss(parts, learn=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            sample.without = _weights(self._twin)

    def after(self) -> None:
        """The step has been made; if it was sampled, compare."""
        sample, self._open = self._open, None
        if sample is None:
            return
        made = _weights(self._model)
        changes = []
        for weights in (made, sample.without):
            with self._apart(sample), torch.no_grad():
                self._follow(weights)
                changes.append(self._loss(sample.parts, learn=False) - sample.loss)
        found = _compared(made, sample.without, sample.start)
        found |= dict(zip(UPDATE_NAMES[2:], changes, strict=True))
        self._samples.append(found)

    def fetch(self) -> dict[str, float]:
        """The means over the steps sampled since the last fetch; nothing if there were none.

        An update of zero has no direction, and no cosine counts for it.
        """
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {UPDATES_SAMPLED: len(samples)} | {
            name: fmean(own)
            for name in UPDATE_NAMES
            if (own := [sample[name] for sample in samples if name in sample])
        }

    @contextmanager
    def _apart(self, sample: _Sample) -> Iterator[None]:
        """Out of reach of the surgery, with the generators as they were when the step began."""
        with kept(self._device):
            put_back(sample.generators, self._device)
            with autograd.within(self._surroundings):
                yield

    def _follow(self, weights: Sequence[Tensor]) -> None:
        """Have the twin be as the model is, with these weights."""
        twin, model = self._twin, self._model
        with torch.no_grad():
            own = [*twin.parameters(), *twin.buffers()]
            for tensor, other in zip(own, [*weights, *model.buffers()], strict=True):
                tensor.copy_(other)
        for module, other in zip(twin.modules(), model.modules(), strict=True):
            module.training = other.training

    def _loss(self, parts: Sequence[Batch], learn: bool) -> float:
        """The twin's mean loss of the batches; to `learn` leaves its gradients."""
        losses = []
        for batch in parts:
            loss = loss_of(self._twin, self._loss_fn, batch, len(parts), self._autocast)
            if learn:
                loss.backward()
            losses.append(loss.item())  # a wait for the device, at sampled steps only
        return sum(losses)


def means(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """The means over a whole run, of the rows that `fetch` has given; nothing if there were none.

    A number that is not finite has been written as null and does not count.
    """
    rows = [row for row in rows if UPDATES_SAMPLED in row]
    if not rows:
        return {}
    found = {UPDATES_SAMPLED: sum(_number(row[UPDATES_SAMPLED]) for row in rows)}
    for name in UPDATE_NAMES:
        own = [row for row in rows if row.get(name) is not None]
        if own:
            total = sum(_number(row[name]) * _number(row[UPDATES_SAMPLED]) for row in own)
            found[name] = total / sum(_number(row[UPDATES_SAMPLED]) for row in own)
    return found


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _compared(
    made: Sequence[Tensor], without: Sequence[Tensor], start: Sequence[Tensor]
) -> dict[str, float]:
    """Cosine and norm ratio of two updates from `start`, as far as there are any."""
    with_, other = (
        torch.cat([(b.double() - a.double()).flatten() for a, b in zip(start, end, strict=True)])
        for end in (made, without)
    )
    # These, and the product below, wait for the device, at sampled steps only.
    norm, other_norm = with_.norm().item(), other.norm().item()
    found: dict[str, float] = {}
    if norm and other_norm:
        same = torch.equal(with_, other)  # rounding would make it almost 1
        found[UPDATE_NAMES[0]] = 1.0 if same else (with_ @ other).item() / (norm * other_norm)
    if other_norm:
        found[UPDATE_NAMES[1]] = norm / other_norm
    return found
