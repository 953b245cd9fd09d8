"""Combine the task gradients of replicas by their aggregators.

`Sum`, `Mean`, `FixedWeights`, and `PCGrad` and `MGDA` of two tasks combine the rows of all replicas
in one batched product. Other aggregators act replica by replica, and so do all of them at the steps
that measure conflicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurg.aggregators.base import Aggregator, AggregatorContext, LossWeighting
from gradsurg.aggregators.fixed_weights import FixedWeights
from gradsurg.aggregators.mean import Mean
from gradsurg.aggregators.mgda import MGDA
from gradsurg.aggregators.pcgrad import PCGrad
from gradsurg.aggregators.sum import Sum
from gradsurg.experiment.execution import OpenRun
from gradsurg.multitask.shared_parameters import SHARED
from gradsurg.triggers.base import Clock, TriggerContext

Grads = dict[str, Tensor]

CONSTANT = (Sum, Mean, FixedWeights)


@dataclass
class TaskRows:
    """The losses (k, T) of the tasks, and their gradients (k, *shape) by parameter, in one step.

    A gradient is None where the loss of the task does not reach the parameter.
    """

    names: tuple[str, ...]
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)


class Aggregated:
    """A group whose aggregator combines the gradients of the tasks in the slices `rows`.

    `difference` is the largest of a batched result from that of the aggregator on one replica.
    """

    def __init__(self, runs: Sequence[OpenRun], rows: slice, tasks: TaskRows) -> None:
        self.runs, self._rows, self._tasks = runs, rows, tasks
        lead = runs[0].run
        (item,) = (item for item in lead.surgery.interventions if item.aggregator is not None)
        assert item.aggregator is not None
        self._aggregator, self._when, self._shadow = item.aggregator, item.when, lead.shadow
        self._aggregations = [run.live.multi_task.aggregations[0] for run in runs]
        self._label = self._aggregations[0].label
        self._clock = Clock(epoch_length=runs[0].batches.steps_per_epoch)
        self._names = [name for name in tasks.grads if self._reach(name) == len(tasks.names)]
        for name in tasks.grads:
            if 1 < self._reach(name) < len(tasks.names):
                raise ValueError(f"some of several tasks reach '{name}'")
        for run in runs:
            run.live.multi_task.note_update(tasks.names)
        self._fired = self._not_fired = 0
        self.difference, self.at_once = 0.0, False
        self.at_once = has_batched_form(self._aggregator, len(tasks.names)) and self._try_on()

    def act(self, step: int, grads: Grads, active: Sequence[int]) -> None:
        """Replace the slices of the group by the combined gradients."""
        schedule, clock = self.runs[0].run.schedule, self._clock
        clock.step = step
        every = schedule.effects_every
        measured = every > 0 and step % every == 0 and step % schedule.conflict_every == 0
        if self.at_once and not measured:
            fires = bool(self._when.fires(TriggerContext(clock, label=self._label)))
            if not self._shadow or isinstance(self._aggregator, LossWeighting):
                self._fired += fires
                self._not_fired += not fires
            if fires and not self._shadow:
                self._write(grads, *self._combined())
            return
        if self._shadow and not measured and not isinstance(self._aggregator, LossWeighting):
            return
        rows, losses = self._stacked_rows(), self._tasks.losses.tolist()
        for row in active:
            if self._rows.start <= row < self._rows.stop:
                index = row - self._rows.start
                values = dict(zip(self._tasks.names, losses[row], strict=True))
                self._act_on(index, step, measured, rows[index], values, grads)

    def end_interval(self, row: int, done: int) -> None:
        """Add the counts to a replica's own, as its aggregator would have."""
        if not self._rows.start <= row < self._rows.stop:
            return
        live = self.runs[row - self._rows.start].live
        if self._fired or self._not_fired:
            entry = live.ledger.enter(self._label, SHARED)
            entry.fired += self._fired
            entry.not_fired += self._not_fired
        live.clock.step = done - 1
        live.tick()

    def clear(self) -> None:
        """Begin a new interval."""
        self._fired = self._not_fired = 0

    def _act_on(
        self,
        index: int,
        step: int,
        measured: bool,
        rows: Tensor,
        losses: Mapping[str, float],
        grads: Grads,
    ) -> None:
        """Combine the rows (T, P) of one replica, as `live.backward` does."""
        live, aggregation = self.runs[index].live, self._aggregations[index]
        live.clock.step = step
        live.effects.begin(step)
        weights = aggregation.loss_weights(losses, True) if aggregation.weights_losses else None
        combined = None
        if measured and (self._shadow or weights is not None):
            aggregation.observe(SHARED, [rows], losses, weights)
        if not self._shadow and weights is not None:
            combined = aggregation.combine_with([rows], weights)
        elif not self._shadow:
            combined = aggregation.combine(SHARED, [rows], losses)
            if combined is None:
                raise ValueError(
                    "no solver converged, and a step without a gradient is not stacked"
                )
        if combined is not None:
            place = slice(self._rows.start + index, self._rows.start + index + 1)
            factors = torch.ones(1, len(rows)) if weights is None else weights[None]
            self._write(grads, combined[0][None], factors, place)
        live.tick()

    def _write(
        self, grads: Grads, combined: Tensor, factors: Tensor, place: slice | None = None
    ) -> None:
        """Write combined gradients (n, P), and the scaled ones of parameters of a single task."""
        place = place or self._rows
        sizes = [grads[name][0].numel() for name in self._names]
        for name, piece in zip(self._names, combined.split(sizes, dim=1), strict=True):
            grads[name][place] = piece.view_as(grads[name][place])
        if not isinstance(self._aggregator, LossWeighting):
            return
        for name, own in self._tasks.grads.items():
            if name not in self._names:
                (task,) = (number for number, grad in enumerate(own) if grad is not None)
                factor = factors[:, task].to(grads[name].dtype)
                grads[name][place] *= factor.view(-1, *[1] * (grads[name].ndim - 1))

    def _combined(self) -> tuple[Tensor, Tensor]:
        """Return the combined gradients (n, P) of all replicas, and the weights (n, T)."""
        rows = self._stacked_rows()
        wide = rows.double()
        weights = _weights(self._aggregator, wide @ wide.mT, self._tasks.names)
        return (weights[:, None] @ wide)[:, 0].to(rows.dtype), weights

    def _stacked_rows(self) -> Tensor:
        """Return the gradients of all shared parameters: (n, T, P)."""
        grads = self._tasks.grads
        pieces = [
            torch.stack(
                [grad[self._rows].flatten(1) for grad in grads[name] if grad is not None], 1
            )
            for name in self._names
        ]
        return torch.cat(pieces, dim=2)

    def _reach(self, name: str) -> int:
        """Return the number of tasks that reach a parameter."""
        return sum(grad is not None for grad in self._tasks.grads[name])

    def _try_on(self) -> bool:
        """Whether the batched result on the first and the last replica is the aggregator's."""
        rows, (found, _) = self._stacked_rows(), self._combined()
        context = AggregatorContext(tasks=self._tasks.names)
        for row in {0, len(rows) - 1}:
            expected, _ = self._aggregator.merge(rows[row], {}, context)
            size = expected.abs().max().item() or 1.0
            worst = (found[row] - expected).abs().max().item() / size
            self.difference = max(self.difference, worst)
        return self.difference <= MAX_DIFFERENCE


MAX_DIFFERENCE = 1e-5  # relative


def has_batched_form(aggregator: Aggregator, num_tasks: int) -> bool:
    """Whether `_weights` has the weights of an aggregator."""
    match aggregator:
        case PCGrad():
            plain = aggregator.target == "original" and not aggregator.include_self
            return num_tasks == 2 and plain and not aggregator.eps
        case MGDA():
            return num_tasks == 2 and aggregator.preference is None
        case _:
            return type(aggregator) in CONSTANT


def _weights(aggregator: Aggregator, gramians: Tensor, names: tuple[str, ...]) -> Tensor:
    """Return the weights (n, T) of the rows, from n Gramians (n, T, T), in float64."""
    if isinstance(aggregator, LossWeighting):
        context = AggregatorContext(tasks=names)
        return aggregator.weigh(len(names), {}, context)[0].to(gramians).expand(len(gramians), -1)
    squares, inner = gramians.diagonal(dim1=1, dim2=2), gramians[:, 0, 1]
    if isinstance(aggregator, PCGrad):
        shares = torch.where(inner[:, None] < 0, inner[:, None] / squares, 0.0)
        weights = (1 - shares) / (2 if aggregator.reduction == "mean" else 1)
    else:  # MGDA: the point of a segment that is the nearest to 0
        length = squares.sum(dim=1) - 2 * inner
        share = torch.where(length > 0, (squares[:, 1] - inner) / length, 0.5).clamp(0, 1)
        weights = torch.stack([share, 1 - share], dim=1)
    return torch.where(gramians.isfinite().all(dim=2).all(dim=1)[:, None], weights, torch.nan)
