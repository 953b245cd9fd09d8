"""One aggregator in place: it makes one gradient, keeps its state, and says what it did."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import isfinite

import torch
from torch import Tensor, nn

from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorState,
    GramianAggregator,
    LossWeighting,
    NormMatchedSum,
)
from gradsurg.aggregators.rows import combine, gramian_of
from gradsurg.hooks.controller import Session
from gradsurg.multitask.conflict import Conflicts
from gradsurg.multitask.features import module_of
from gradsurg.multitask.merging import Merged, merge, products
from gradsurg.multitask.others import Made
from gradsurg.multitask.shared_parameters import SHARED, SharedParameters
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import snake
from gradsurg.sites.base import Selector
from gradsurg.sites.tree_table import plural
from gradsurg.torch_internals.autograd import undisturbed
from gradsurg.triggers.base import TensorTrigger, Trigger, TriggerContext
from gradsurg.triggers.for_task import ForTask

REPRESENTATION = "representation"
"""The group of the gradients where the tasks part, with engine 'feature'."""

ERRORS = Exception  # whatever a user's aggregator raises: it gets a note and is raised again


def check_host(trigger: Trigger, label: str) -> None:
    """Raises ValueError if a trigger looks at a gradient: an aggregator has several."""
    for part in trigger.parts:
        if isinstance(part, TensorTrigger | ForTask) or part.on_device:
            text = (
                "looks at one gradient, and an aggregator has several: it can act by step, epoch, "
                "phase, flag or probability"
            )
            raise FieldError(part, [("", text)], f"{label}: {part!r}")


def check_apart(aggregations: Sequence["Aggregation"]) -> None:
    """Raises ValueError if a parameter has two aggregators."""
    for other, one in combinations(aggregations, 2):
        if both := sorted(one.groups.keys() & other.groups.keys()):
            raise ValueError(
                f"{one.label}: '{other.label}' acts on {', '.join(both)} already, and a parameter "
                "has one aggregator"
            )


def plan_of(
    label: str, aggregator: Aggregator, at: Selector, trigger: Trigger, model: nn.Module
) -> str:
    """The plan of an aggregator: the parameters it would act on, by group."""
    assert isinstance(at, SharedParameters)
    groups = at.groups(model)
    place = ""
    if at.features:
        module_of(model, at.features)  # a plan of what could not be attached is none
        place = f" at {at.features!r}"
    own = [] if isinstance(at.granularity, str) else at.granularity
    kind = plural(len(own), "group") if own else at.granularity
    how = f"engine {at.engine}{place}, granularity {kind}, when {trigger!r}"
    first = f"{label}: {aggregator!r} of what several tasks reach of"
    lines = [f"{first} {plural(len(groups), 'parameter')}", f"  {how}"]
    if not own:
        return "\n".join([*lines, *(f"  {site}" for site in groups)])
    for pattern in own:
        lines.append(f"  {pattern}:")
        lines += [f"    {site}" for site, group in groups.items() if group == pattern]
    return "\n".join(lines)


class Aggregation:
    """One aggregator in place."""

    def __init__(
        self,
        label: str,
        aggregator: Aggregator,
        at: SharedParameters,
        trigger: Trigger,
        session: Session,
        conflicts: Conflicts,
    ) -> None:
        self.label = label
        self.aggregator = aggregator
        self.at = at
        self.trigger = trigger
        self.session = session
        self.conflicts = conflicts
        self.look(session.model)
        self._learnt: dict[
            str, AggregatorState
        ] = {}  # under a loss scale, until the optimizer makes a step
        self._weights: Tensor | None = None  # of the losses, for the rest of a step
        self._weighed: tuple[str, ...] = ()  # the tasks that they are of

    @property
    def weighs(self) -> bool:
        """Whether it weighs the losses, and looks at no gradient."""
        return isinstance(self.aggregator, LossWeighting)

    def look(self, model: nn.Module) -> None:
        """Select anew: parameters were frozen, set free or replaced."""
        self.groups = self.at.groups(model)  # of each parameter

    def weigh(self, losses: Mapping[str, float], last: bool) -> Tensor:
        """The weights of the losses: of several batches of a step the first decides, until the
        `last`.
        """
        assert isinstance(self.aggregator, LossWeighting)
        self._tell_losses(losses)
        fires, tasks, weights = self._count(SHARED), tuple(losses), self._weights
        if weights is not None and self._weighed != tasks:
            raise ValueError(
                f"losses: the weights of this step are of {', '.join(self._weighed)}, found "
                f"{', '.join(tasks)}"
            )
        with undisturbed(()):
            if not fires:
                weights = torch.ones(len(tasks), dtype=torch.float64)
            elif weights is None:
                context, state = self._context(SHARED, losses), self._state(SHARED, tasks)
                weights, state = self.aggregator.weigh(len(tasks), state, context)
                self._keep(SHARED, tasks, state)
                self._tell_alone(losses, weights)
        self._weights, self._weighed = None if last else weights, tasks
        return weights

    @property
    def waits(self) -> bool:
        """Whether there are weights for more losses of this step."""
        return self._weights is not None

    def stepped(self) -> None:
        """The optimizer has made a step: what was learnt of it stays, and its weights end."""
        self.session.states |= self._learnt
        self._learnt = {}
        self.forget()

    def forget(self) -> None:
        """The next losses are a step's first."""
        self._weights = None

    def weighed(self, parts: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        """One gradient of the rows of each part, by weights that are known."""
        with undisturbed(parts):
            return [combine(rows, weights) for rows in parts]

    def make(self, group: str, parts: Sequence[Tensor], losses: Mapping[str, float]) -> Merged:
        """One gradient of the rows (T, p) of each part of a group, of tasks with these losses."""
        fires, sampling = self._count(group), self.session.effects.sampling
        if not (fires or sampling):
            return _summed(parts)
        if self.session.is_scaled and not all(bool(rows.isfinite().all()) for rows in parts):
            # The scaler leaves such a step out, and nothing is told of it.
            return _summed(parts)
        with undisturbed(parts):
            context = self._context(group, losses)
            if fires:
                merged = self._merge(group, parts, losses)
                self._keep(group, tuple(losses), merged.state)
                self._check_finite(merged, context)
                self._tell_losses(losses)
            else:
                merged = _summed(parts)
            if sampling:
                self._tell_conflict(context, parts, merged)
        return merged

    def observe(
        self,
        group: str,
        parts: Sequence[Tensor],
        losses: Mapping[str, float],
        weights: Tensor | None,
    ) -> None:
        """Measure the conflict where the update is made elsewhere, of these weights; with none,
        what the aggregator would have made of it.
        """
        with undisturbed(parts):
            merged = Merged([], {}, weights)
            if weights is None and self._count(group):
                merged = self._merge(group, parts, losses)
                self._keep(group, tuple(losses), merged.state)
            elif weights is None:
                merged = _summed(parts)
            self._tell_conflict(self._context(group, losses), parts, merged)

    def _merge(self, group: str, parts: Sequence[Tensor], losses: Mapping[str, float]) -> Merged:
        context = self._context(group, losses)
        try:
            state = self._state(group, context.tasks)
            return merge(self.aggregator, parts, state, context, self.session.loss_scale)
        except ERRORS as error:
            error.add_note(f"while {self.label} acted at '{group}', step {context.step}")
            raise

    def _tell_conflict(
        self, context: AggregatorContext, parts: Sequence[Tensor], merged: Merged
    ) -> None:
        scale, gramian, weights = self.session.loss_scale, merged.gramian, merged.weights
        if gramian is None:
            gramian = gramian_of(parts) / scale**2
        if self.session.is_scaled and not bool(gramian.isfinite().all()):
            return  # the scaler leaves such a step out
        if weights is not None:
            falls = gramian @ weights
            norm = max(float(weights @ falls), 0.0) ** 0.5
        else:
            falls = products(parts, merged.grads) / scale**2
            # Waits for the device, at measured steps only.
            norm = sum(grad.double().square().sum().item() for grad in merged.grads) ** 0.5 / scale
        own = snake(type(self.aggregator).__name__)
        weights = None if weights is None else weights.clone()  # as they are now
        made = Made(self.label, own, context, gramian, weights, falls, norm)
        self.conflicts.add(made, ask=self.at.granularity not in ("module", "tensor"))

    def _count(self, group: str) -> bool:
        """Count the gradients at hand; whether the aggregator is to act."""
        session = self.session
        said = self.trigger.fires(TriggerContext(session.clock, session.seed, self.label, group))
        assert isinstance(said, bool)  # what looks at a gradient was refused
        return session.ledger.enter(self.label, group).count(said)

    def _context(self, group: str, losses: Mapping[str, float]) -> AggregatorContext:
        values = torch.tensor([*losses.values()], dtype=torch.float64, device="cpu")
        clock, seed = self.session.clock, self.session.seed
        return AggregatorContext(
            clock.step,
            seed,
            group,
            tuple(losses),
            values,
            call=clock.backwards,
            selection=self.at.selection,
        )

    def _state(self, group: str, tasks: tuple[str, ...]) -> AggregatorState:
        fresh = self.aggregator.init(len(tasks))
        states, key = self.session.states, f"{self.label}/{group}"
        state, before = states.get(key, fresh), tasks
        if places := states.get(f"{key}/tasks"):
            # A checkpoint comes back on the device of the model: once to the CPU, then no wait.
            states[f"{key}/tasks"] = places = {name: own.cpu() for name, own in places.items()}
            before = tuple(sorted(places, key=lambda name: int(places[name])))
        shapes = [{name: own.shape for name, own in one.items()} for one in (state, fresh)]
        if shapes[0] != shapes[1] or (fresh and before != tasks):
            known = ", ".join(before) if before != tasks else "another number of tasks"
            raise ValueError(
                f"{self.label}: what it remembers at '{group}' is of {known}, found "
                f"{', '.join(tasks)}: its tasks must stay the same, in their order"
            )
        if isinstance(self.aggregator, GramianAggregator | LossWeighting | NormMatchedSum):
            # As the places, for these calculate on the CPU.
            state = {name: own.cpu() for name, own in state.items()}
        return state

    def _keep(self, group: str, tasks: tuple[str, ...], state: AggregatorState) -> None:
        if state:
            states, key = self.session.states, f"{self.label}/{group}"
            # A scaler may leave this step out.
            waits = self.session.is_scaled and self.session.optimizer is not None
            learnt = self._learnt if waits else states
            learnt[key] = state
            if f"{key}/tasks" not in states:  # as `_state` has seen, they stay the same
                # The names go with the state into a checkpoint, in which all are tensors.
                places = {name: torch.tensor(place) for place, name in enumerate(tasks)}
                learnt[f"{key}/tasks"] = places

    def _tell_losses(self, losses: Mapping[str, float]) -> None:
        wrong = [name for name, loss in losses.items() if not isfinite(loss)]
        if wrong and not self.session.is_scaled:
            self.session.warn_once(
                f"{self.label}: the loss of {', '.join(wrong)} is not finite at step "
                f"{self.session.clock.step}",
                key=f"{self.label} not finite",
            )

    def _tell_alone(self, losses: Mapping[str, float], weights: Tensor) -> None:
        """Say so if a task without a loss has taken the weight of all others."""
        if 0 not in losses.values():
            return
        shares = (weights / weights.sum()).tolist()
        for (name, loss), share in zip(losses.items(), shares, strict=True):
            if loss == 0 and share > 0.99 and len(shares) > 1:
                self.session.warn_once(
                    f"{self.label}: the loss of {name} is 0 at step {self.session.clock.step}, and "
                    "so it has all the weight and the other tasks none",
                    key=f"{self.label}: {name} has all the weight",
                )

    def _check_finite(self, merged: Merged, context: AggregatorContext) -> None:
        if merged.gramian is None or bool(merged.gramian.isfinite().all()):
            return
        sizes = merged.gramian.diagonal().tolist()
        wrong = [
            name
            for name, size in zip(context.tasks, sizes, strict=True)
            if not abs(size) < float("inf")
        ]
        self.session.warn_once(
            f"{self.label}: the gradient of {', '.join(wrong) or 'the tasks together'} is not "
            f"finite at step {context.step}, and so is what was made of it",
            key=f"{self.label} not finite",
        )


def _summed(parts: Sequence[Tensor]) -> Merged:
    """What is made where nothing acts."""
    ones = torch.ones(len(parts[0]), dtype=torch.float64)
    return Merged([rows.sum(dim=0) for rows in parts], {}, ones)
