"""The update effect: the optimizer's update with the surgery against the one without it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.effects.numbers import UPDATE_NAMES, UPDATES_SAMPLED
from gradsurg.experiment.loop import Batch, LossFn, loss_of
from gradsurg.torch_internals import autograd
from gradsurg.torch_internals.random_state import GeneratorStates, get_states, preserved, set_states

COSINE, NORM_RATIO, LOSS_CHANGE, LOSS_CHANGE_WITHOUT = UPDATE_NAMES


class _Sample(NamedTuple):
    """A sampled step: its batches, weights, generators and loss before it, and the twin's weights
    after it.
    """

    batches: Sequence[Batch]
    start: list[Tensor]
    generators: GeneratorStates
    loss: float
    without: list[Tensor]


class Counterfactual:
    """On sampled steps, compute the update that the optimizer would make without the surgery.

    A twin computes it: a deep copy of model and optimizer, taken before the surgery is attached, so
    that it has the model's own hooks and none of the surgery's. Thread-wide or process-wide modes
    of the surgery are off while the twin runs. Before a sampled step the twin copies weights,
    buffers, training modes and optimizer state. It draws the random numbers that the step will
    draw, and then restores the global generators. The trained model is never run, so training is
    bit-identical to training without a `Counterfactual`.

    State that a model keeps elsewhere (plain attributes, its own generators) is separate in the
    twin. The twin uses no gradient scaler, and runs a compiled model uncompiled, which rounds
    differently.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        every: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model, self._optimizer = getattr(model, "_orig_mod", model), optimizer
        self._loss_fn, self._every, self._autocast = loss_fn, every, autocast
        self._surroundings = autograd.active_hooks()
        # Together: the copy of the optimizer has the parameters of the copy of the model.
        self._twin, self._twin_optimizer = copy.deepcopy((self._model, optimizer))
        self._device = next(self._model.parameters()).device
        self._pending: _Sample | None = None
        self._samples: list[dict[str, float]] = []

    def before(self, step: int, batches: Sequence[Batch]) -> None:
        """Let the twin make step `step` (from 0) if it is sampled."""
        self._pending = None
        if step % self._every:
            return
        start, generators = _weights(self._model), get_states(self._device)
        optimizer = self._twin_optimizer
        with self._isolated(generators):
            self._copy_to_twin(start)
            optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))
            loss = self._loss(batches, backward=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._pending = _Sample(batches, start, generators, loss, _weights(self._twin))

    def after(self) -> None:
        """Call after each step: compare the two updates if it was sampled."""
        sample, self._pending = self._pending, None
        if sample is None:
            return
        weights = _weights(self._model)
        numbers = _compared(weights, sample.without, sample.start)
        for name, end in ((LOSS_CHANGE, weights), (LOSS_CHANGE_WITHOUT, sample.without)):
            with self._isolated(sample.generators), torch.no_grad():
                self._copy_to_twin(end)
                numbers[name] = self._loss(sample.batches, backward=False) - sample.loss
        self._samples.append(numbers)

    def fetch(self) -> dict[str, float]:
        """Return the means over the steps sampled since the last fetch; {} if there were none.

        A zero update has no direction: its step does not count in the mean cosine.
        """
        samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {UPDATES_SAMPLED: len(samples)} | {
            name: fmean(values)
            for name in UPDATE_NAMES
            if (values := [sample[name] for sample in samples if name in sample])
        }

    @contextmanager
    def _isolated(self, generators: GeneratorStates) -> Iterator[None]:
        """Disable the surgery's global modes and set the generators to the step's start."""
        with preserved(self._device), autograd.only_hooks(self._surroundings):
            set_states(generators, self._device)
            yield

    def _copy_to_twin(self, weights: Sequence[Tensor]) -> None:
        """Set the twin's weights, and copy the model's buffers and training modes."""
        twin, model = self._twin, self._model
        with torch.no_grad():
            tensors = [*twin.parameters(), *twin.buffers()]
            for tensor, source in zip(tensors, [*weights, *model.buffers()], strict=True):
                tensor.copy_(source)
        for module, source in zip(twin.modules(), model.modules(), strict=True):
            module.training = source.training

    def _loss(self, batches: Sequence[Batch], backward: bool) -> float:
        """Return the twin's mean loss of the batches; with `backward` also compute gradients."""
        total = 0.0
        for batch in batches:
            loss = loss_of(self._twin, self._loss_fn, batch, len(batches), self._autocast)
            assert isinstance(loss, Tensor)
            if backward:
                loss.backward()
            total += loss.item()  # waits for the device, at sampled steps only
        return total


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over a whole run of the rows that `fetch` returned; {} if there are none.

    A number that is not finite was written as null and does not count. Any: any JSON value.
    """
    rows = [row for row in rows if UPDATES_SAMPLED in row]
    result: dict[str, float] = (
        {UPDATES_SAMPLED: sum(row[UPDATES_SAMPLED] for row in rows)} if rows else {}
    )
    for name in UPDATE_NAMES:
        finite = [(row[name], row[UPDATES_SAMPLED]) for row in rows if row.get(name) is not None]
        if finite:
            total = sum(count for _, count in finite)
            result[name] = sum(value * count for value, count in finite) / total
    return result


def _weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _compared(
    weights: Sequence[Tensor], without: Sequence[Tensor], start: Sequence[Tensor]
) -> dict[str, float]:
    """Return cosine and norm ratio of two updates from `start`; a zero update has no cosine."""
    update, other = (
        torch.cat([(b.double() - a.double()).flatten() for a, b in zip(start, end, strict=True)])
        for end in (weights, without)
    )
    # These, and the product below, wait for the device, at sampled steps only.
    norm, other_norm = update.norm().item(), other.norm().item()
    numbers: dict[str, float] = {}
    if norm and other_norm:
        equal = torch.equal(update, other)  # rounding would make it almost 1
        numbers[COSINE] = 1.0 if equal else (update @ other).item() / (norm * other_norm)
    if other_norm:
        numbers[NORM_RATIO] = norm / other_norm
    return numbers
