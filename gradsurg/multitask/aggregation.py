"""Apply one attached aggregator: combine gradients, keep its state, measure the conflict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, combinations
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, distributed, nn

from gradsurg.aggregators.base import (
    AggregationResult,
    Aggregator,
    AggregatorContext,
    AggregatorState,
    Entrywise,
    GramianAggregator,
    LossWeighting,
    NormMatchedSum,
    check_one_kind,
    combine_by_gramian,
    norm_matched_sums,
)
from gradsurg.aggregators.rows import (
    Block,
    combine,
    gramian_of,
    is_finite,
    mapped,
    norm_of,
    part_name,
    pieces,
    products_of,
)
from gradsurg.aggregators.solvers import NotConverged
from gradsurg.multitask.conflict import Conflicts, Measurement
from gradsurg.multitask.features import module_of
from gradsurg.multitask.shared_parameters import SHARED, SharedParameters
from gradsurg.plugins.fields import FieldError, in_short
from gradsurg.plugins.messages import shortened
from gradsurg.plugins.registry import snake
from gradsurg.sites.places import Selector
from gradsurg.sites.tree_table import plural
from gradsurg.torch_internals import random_state
from gradsurg.torch_internals.autograd import without_autocast
from gradsurg.triggers.base import TensorTrigger, Trigger, TriggerContext
from gradsurg.triggers.for_task import ForTask

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment

SOLVER = "/solver"
"""End of the key of the state that counts the updates of a group without an exact solution."""


NONFINITE = "/nonfinite"
"""The same for the tasks and steps that were left out."""


def check_trigger(trigger: Trigger, label: str) -> None:
    """Raise FieldError if a trigger reads a gradient: an aggregator has several."""
    for part in trigger.parts:
        if isinstance(part, TensorTrigger | ForTask) or part.on_device:
            text = (
                "use Steps, Epochs, Phase, Flag or Probability: this trigger reads one gradient, "
                "and an aggregator has several"
            )
            raise FieldError(part, [("", text)], f"{label}: {in_short(part)}")


def check_disjoint(aggregations: Sequence["Aggregation"]) -> None:
    """Raise ValueError if a parameter has two aggregators."""
    for earlier, later in combinations(aggregations, 2):
        if both := sorted(later.groups.keys() & earlier.groups.keys()):
            raise ValueError(
                f"{later.label}: '{earlier.label}' already acts on {shortened(both)}, and a "
                "parameter can have one aggregator only"
            )


def plan_of(
    label: str, aggregator: Aggregator, at: Selector, trigger: Trigger, model: nn.Module
) -> str:
    """Return the plan of an aggregator: the parameters that it would act on, by group."""
    assert isinstance(at, SharedParameters)
    groups = at.groups(model)
    place = ""
    if at.features:
        module_of(model, at.features)  # raises if the module does not exist
        place = f" at {at.features!r}"
    names = dict.fromkeys(groups.values()) if at.granularity == "layer" else at.granularity
    names = [] if isinstance(names, str) else list(names)
    granularity = plural(len(names), "layer" if at.granularity == "layer" else "group")
    granularity = granularity if names else at.granularity
    is_distributed = distributed.is_available() and distributed.is_initialized()
    processes = distributed.get_world_size() if is_distributed else 1
    skip = ", a task with a NaN or infinity is left out" if at.on_nonfinite == "skip" else ""
    lines = [
        f"{label}: {aggregator!r} for those of {plural(len(groups), 'parameter')} that several "
        "tasks reach",
        f"  engine {at.engine}{place}, granularity {granularity}, when {trigger!r}{skip}",
    ]
    if processes > 1 and at.reduce == "mean":
        lines.append(f"  on the mean gradient of each task over {processes} processes")
    elif processes > 1:
        lines.append(f"  in each of {processes} processes alone, whose results are averaged")
    if not names:
        return "\n".join([*lines, *(f"  {site}" for site in groups)])
    for name in names:
        lines.append(f"  {name}:")
        lines += [f"    {site}" for site, group in groups.items() if group == name]
    return "\n".join(lines)


class Aggregation:
    """One aggregator attached to the shared parameters of a model."""

    def __init__(
        self,
        label: str,
        aggregator: Aggregator,
        at: SharedParameters,
        trigger: Trigger,
        attachment: "Attachment",
        conflicts: Conflicts,
    ) -> None:
        self.label = label
        self.aggregator = aggregator
        self.at = at
        self.trigger = trigger
        self.attachment = attachment
        self.conflicts = conflicts
        self.has_failed = False  # whether no solver converged in some step
        self._selection = at.selection
        self.select(attachment.model)
        # With a GradScaler, states wait here until the optimizer has made the step.
        self._new_states: dict[str, AggregatorState] = {}
        self._weights: Tensor | None = None  # of the losses, for the rest of this step
        self._weighted_tasks: tuple[str, ...] = ()
        self._is_tried = False  # whether the aggregator was called

    @property
    def weights_losses(self) -> bool:
        """Whether the aggregator weights the losses and reads no gradient."""
        return isinstance(self.aggregator, LossWeighting)

    @property
    def has_pending_weights(self) -> bool:
        """Whether this step has weights for further losses."""
        return self._weights is not None

    @property
    def needs_all_tasks(self) -> bool:
        """Whether the aggregator cannot act without one of the tasks."""
        return self.aggregator.num_tasks is not None or bool(self.aggregator.init(2))

    def count_nonfinite(self, tasks: Sequence[str], is_step: bool) -> None:
        """Count tasks left out of a step, or a step left out, and warn about the first."""
        self.has_failed |= is_step
        for _ in tasks[:1] if is_step else tasks:
            self._count_outcome("", "steps" if is_step else "tasks", NONFINITE)
        what = "the step was skipped" if is_step else "left out of the step"
        self.attachment.warn_once(
            f"{self.label}: a NaN or infinity in the loss or the gradient of {shortened(tasks)} at "
            f"step {self.attachment.clock.step}: {what}",
            key=f"{self.label} nonfinite",
        )

    def select(self, model: nn.Module) -> None:
        """Set `groups`, the group of each selected parameter that requires a gradient."""
        self.groups = self.at.groups(model)

    def loss_weights(self, losses: Mapping[str, float], last: bool) -> Tensor:
        """Return the weights of the losses: all batches of a step get those of the first one."""
        assert isinstance(self.aggregator, LossWeighting)
        self._warn_nonfinite_losses(losses)
        fires, tasks, weights = self._count(SHARED), tuple(losses), self._weights
        if weights is not None and self._weighted_tasks != tasks:
            raise ValueError(
                "losses: give each live.backward of a step the same losses: the first one had "
                f"{shortened(self._weighted_tasks)}, found {shortened(tasks)}"
            )
        with without_autocast(()):
            if not fires:
                weights = torch.ones(len(tasks), dtype=torch.float64)
            elif weights is None:
                context, state = self._context(SHARED, losses), self._state(SHARED, tasks)
                with self._watched(torch.device("cpu")):
                    weights, state = self.aggregator.weigh(len(tasks), state, context)
                self._store(SHARED, tasks, state)
                self._warn_zero_loss(losses, weights)
        self._weights, self._weighted_tasks = None if last else weights, tasks
        return weights

    def after_step(self) -> None:
        """Store the states learned in this step, and drop its weights."""
        self.attachment.states |= self._new_states
        self._new_states = {}
        self.drop_weights()

    def drop_weights(self) -> None:
        """Compute new weights at the next losses."""
        self._weights = None

    def combine_with(self, parts: Sequence[Block], weights: Tensor) -> list[Tensor]:
        """Combine the rows of each part by given weights."""
        with without_autocast(_first_rows(parts)):
            return mapped(parts, lambda rows, _: combine(rows, weights), drop=True)

    def closing_warnings(self) -> list[str]:
        """Return a warning if solvers fell back or failed, or tasks were left out, so far."""
        total: Counter[str] = Counter()
        prefix = f"{self.label}/"
        for key, counts in self.attachment.states.items():
            ending = key.removeprefix(prefix).endswith((SOLVER, NONFINITE))
            if key.startswith(prefix) and ending:
                total.update({name: int(count) for name, count in counts.items()})
        texts = []
        if total["fallbacks"] or total["skipped"]:
            texts.append(
                f"{self.label}: {total['fallbacks']} updates are less exact, because the "
                f"gradients were nearly dependent, and {total['skipped']} were skipped, as no "
                "solver converged"
            )
        if total["steps"] or total["tasks"]:
            texts.append(
                f"{self.label}: {total['steps']} steps were skipped, and the gradient of one task "
                f"was left out {total['tasks']} times, for a NaN or infinity"
            )
        return texts

    def combine(
        self, group: str, parts: Sequence[Block], losses: Mapping[str, float]
    ) -> list[Tensor] | None:
        """Combine the rows (T, p) of each part to one gradient; None if no solver converges."""
        fires, sampling = self._count(group), self.attachment.measures_conflicts
        if not (fires or sampling):
            return _sum(parts).grads
        if self.attachment.is_scaled and not is_finite(*parts):
            return _sum(parts).grads  # the scaler skips this step
        with without_autocast(_first_rows(parts)):
            context = self._context(group, losses)
            if fires:
                result = self._aggregate(context, parts)
                if result is None:
                    return None
                self._store(group, tuple(losses), result.state)
                self._warn_nonfinite_gradients(result, context)
                self._warn_nonfinite_losses(losses)
            else:
                result = _sum(parts)
            if sampling:
                self._measure(context, parts, result)
        return result.grads

    def observe(
        self,
        group: str,
        parts: Sequence[Block],
        losses: Mapping[str, float],
        weights: Tensor | None,
    ) -> None:
        """Measure the conflict of gradients that the caller combines with these weights.

        Without weights, measure the update that the aggregator would compute.
        """
        with without_autocast(_first_rows(parts)):
            result, context = AggregationResult([], {}, weights), self._context(group, losses)
            if weights is None and self._count(group):
                computed = self._aggregate(context, parts)
                if computed is None:
                    return
                result = computed
                self._store(group, tuple(losses), result.state)
            elif weights is None:
                result = _sum(parts)
            self._measure(context, parts, result)

    def _aggregate(
        self, context: AggregatorContext, parts: Sequence[Block]
    ) -> AggregationResult | None:
        """Return the update of a group, None if a solver does not converge."""
        group = context.group
        try:
            state = self._state(group, context.tasks)
            scale = self.attachment.loss_scale
            with self._watched(parts[0][0].device):
                result = aggregate(self.aggregator, parts, state, context, scale, drop=True)
            if result.fell_back:
                self._count_outcome(group, "fallbacks")
            if note := self.aggregator.order_note(context.tasks):
                self.attachment.warn_once(f"{self.label}: {note}", key=f"{self.label} order")
            return result
        except NotConverged as error:
            self.has_failed = True
            self._count_outcome(group, "skipped")
            self.attachment.warn_once(
                f"{self.label}: {error}, at '{group}', step {context.step}: in such steps the "
                "parameters of the group get no gradient",
                key=f"{self.label} skipped",
            )
            return None
        except Exception as error:  # whatever a user's aggregator raises, with its place added
            error.add_note(f"while {self.label} acted at '{group}', step {context.step}")
            raise

    def _watched(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise RuntimeError if the first call of a user's aggregator uses a global generator."""
        is_theirs = type(self.aggregator).__module__.partition(".")[0] != "gradsurg"
        if self._is_tried or not is_theirs:
            return nullcontext()
        self._is_tried = True
        way_out = "Draw from context.generator(), which is seeded by (seed, group, step)."
        return random_state.untouched(f"{self.label}: {self.aggregator!r}", device, way_out)

    def _count_outcome(self, group: str, outcome: str, end: str = SOLVER) -> None:
        """Count an outcome, by default of a solver, in a state, so that checkpoints hold it."""
        states, key, zero = self.attachment.states, f"{self.label}/{group}{end}", torch.tensor(0)
        counts = states.get(key, {})
        states[key] = counts | {outcome: counts.get(outcome, zero) + 1}

    def _measure(
        self, context: AggregatorContext, parts: Sequence[Block], result: AggregationResult
    ) -> None:
        scale, gramian, weights = self.attachment.loss_scale, result.gramian, result.weights
        if gramian is None:
            gramian = gramian_of(parts) / scale**2
        if self.attachment.is_scaled and not bool(gramian.isfinite().all()):
            return  # the scaler skips this step
        if weights is not None and not result.on_rows:
            products = gramian @ weights
            norm = max(float(weights @ products), 0.0) ** 0.5
        else:
            products = products_of(parts, result.grads) / scale**2
            # Synchronizes with the device, at sampled steps only.
            norm = norm_of(result.grads) / scale
        name = snake(type(self.aggregator).__name__)
        weights = None if weights is None else weights.clone()  # later steps may change them
        counts = self.attachment.states.get(f"{self.label}/{context.group}{SOLVER}", {})
        fallbacks = sum(map(int, counts.values()))
        measurement = Measurement(
            self.label, name, context, gramian, weights, products, norm, fallbacks
        )
        compare = self.at.granularity not in ("layer", "module", "tensor")
        self.conflicts.add(measurement, compare)

    def _count(self, group: str) -> bool:
        """Count one call in the ledger; return whether the trigger fires."""
        attachment = self.attachment
        context = TriggerContext(attachment.clock, attachment.seed, self.label, group)
        fires = self.trigger.fires(context)
        assert isinstance(fires, bool)  # see `check_trigger`
        entry = attachment.ledger.enter(self.label, group)
        if fires:
            entry.fired += 1
        else:
            entry.not_fired += 1
        return fires

    def _context(self, group: str, losses: Mapping[str, float]) -> AggregatorContext:
        # `torch.tensor` takes three times as long.
        values = torch.from_numpy(np.array([*losses.values()], dtype=np.float64))
        clock, seed = self.attachment.clock, self.attachment.seed
        return AggregatorContext(
            clock.step,
            seed,
            group,
            tuple(losses),
            values,
            call=clock.backwards,
            selection=self._selection,
        )

    def _state(self, group: str, tasks: tuple[str, ...]) -> AggregatorState:
        """Return the state of a group. Raises ValueError if it belongs to other tasks."""
        initial = self.aggregator.init(len(tasks))
        states, key = self.attachment.states, f"{self.label}/{group}"
        state, known = states.get(key, initial), tasks
        if positions := states.get(f"{key}/tasks"):
            # A checkpoint is loaded to the device of the model: move it back once.
            positions = {name: tensor.cpu() for name, tensor in positions.items()}
            states[f"{key}/tasks"] = positions
            known = tuple(sorted(positions, key=lambda name: int(positions[name])))
        # A tensor (T, 0) of `init` gets the columns of the rows later: only T is compared.
        grown = [name for name, tensor in initial.items() if not tensor.numel()]
        shapes, initial_shapes = (
            {name: tensor.shape[: 1 if name in grown else None] for name, tensor in tensors.items()}
            for tensors in (state, initial)
        )
        if shapes != initial_shapes or (initial and known != tasks):
            described = shortened(known) if known != tasks else "another number of tasks"
            raise ValueError(
                f"{self.label}: give live.backward the same losses in the same order as before: "
                f"the state at '{group}' was made for {described}, found {shortened(tasks)}"
            )
        if isinstance(self.aggregator, GramianAggregator | LossWeighting | NormMatchedSum):
            # These aggregators compute on the CPU, except with tensors of the size of gradients.
            of_rows = {name: state[name] for name in grown}
            state = {name: tensor.cpu() for name, tensor in state.items()} | of_rows
        return state

    def _store(self, group: str, tasks: tuple[str, ...], state: AggregatorState) -> None:
        if state:
            states, key = self.attachment.states, f"{self.label}/{group}"
            # A scaler may skip this step; without an optimizer no end of the step is seen.
            waits = self.attachment.is_scaled and bool(self.attachment.steps.optimizers)
            target = self._new_states if waits else states
            target[key] = state
            if f"{key}/tasks" not in states:  # `_state` has checked that they do not change
                # A checkpoint holds tensors only, so the order of the names is stored as tensors.
                positions = {name: torch.tensor(position) for position, name in enumerate(tasks)}
                target[f"{key}/tasks"] = positions

    def _warn_nonfinite_losses(self, losses: Mapping[str, float]) -> None:
        nonfinite = [name for name, loss in losses.items() if not isfinite(loss)]
        if nonfinite and not self.attachment.is_scaled:
            self.attachment.warn_once(
                f"{self.label}: the loss of {shortened(nonfinite)} is not finite at step "
                f"{self.attachment.clock.step}",
                key=f"{self.label} not finite",
            )

    def _warn_zero_loss(self, losses: Mapping[str, float], weights: Tensor) -> None:
        """Warn if a task whose loss is 0 has taken the weight of all others."""
        if 0 not in losses.values():
            return
        shares = (weights / weights.sum()).tolist()
        for (name, loss), share in zip(losses.items(), shares, strict=True):
            if loss == 0 and share > 0.99 and len(shares) > 1:
                self.attachment.warn_once(
                    f"{self.label}: the loss of {name} is 0 at step {self.attachment.clock.step}, "
                    "so that it has all the weight and the other tasks none",
                    key=f"{self.label}: {name} has all the weight",
                )

    def _warn_nonfinite_gradients(
        self, result: AggregationResult, context: AggregatorContext
    ) -> None:
        if result.gramian is None or all(map(isfinite, chain(*result.gramian.tolist()))):
            return
        squares = result.gramian.diagonal().tolist()
        nonfinite = [
            name
            for name, square in zip(context.tasks, squares, strict=True)
            if not isfinite(square)
        ]
        self.attachment.warn_once(
            f"{self.label}: the gradient of {shortened(nonfinite) or 'the tasks together'} is not "
            f"finite at step {context.step}, and neither is the update",
            key=f"{self.label} not finite",
        )


def aggregate(
    aggregator: Aggregator,
    blocks: Sequence[Block],
    state: AggregatorState,
    context: AggregatorContext,
    scale: float = 1.0,
    drop: bool = False,
) -> AggregationResult:
    """Apply an aggregator to the matrix with these blocks of columns.

    The rows are multiplied by the loss `scale`, and so is the result. With `drop`, blocks that are
    sequences of vectors may be emptied to free memory, if weights follow from the Gramian alone.
    """
    match aggregator:
        case GramianAggregator():
            return combine_by_gramian(aggregator, blocks, state, context, scale, drop)
        case LossWeighting():
            weights, state = aggregator.weigh(len(blocks[0]), state, context)
            grads = mapped(blocks, lambda rows, _: combine(rows, weights))
            return AggregationResult(grads, state, weights)
        case Entrywise():
            of_part = replace(context, selection=context.selection + part_name())
            grads = mapped(
                blocks, lambda rows, start: aggregator.apply(rows, replace(of_part, start=start))
            )
            return AggregationResult(grads, state)
        case NormMatchedSum():
            result = aggregate(aggregator.of, blocks, state, context, scale)
            grads = norm_matched_sums(blocks, result.grads)
            return AggregationResult(grads, result.state, fell_back=result.fell_back)
        case _:
            check_one_kind(aggregator, blocks)
            parts = [rows for _, _, rows in pieces(blocks)]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            grad, state = aggregator.merge(rows, state, context)
            return AggregationResult(list(grad.split([len(block[0]) for block in blocks])), state)


def _sum(parts: Sequence[Block]) -> AggregationResult:
    ones = torch.ones(len(parts[0]), dtype=torch.float64)
    return AggregationResult(mapped(parts, lambda rows, _: rows.sum(dim=0)), {}, ones)


def _first_rows(parts: Sequence[Block]) -> list[Tensor]:
    """Return a row of each block, for its device."""
    return [block[0] for block in parts]
