"""`live.backward(losses)`: one update from several losses, combined by aggregators."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from math import isfinite
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsurg.aggregators.rows import across
from gradsurg.multitask.aggregation import Aggregation, check_disjoint, check_trigger
from gradsurg.multitask.conflict import Conflicts
from gradsurg.multitask.features import GraphCut, OutputMarker, are_disjoint, check_dense, find_cut
from gradsurg.multitask.jacobian import (
    Jacobian,
    JacobianBuilder,
    check_repeatable,
    first_names,
    jacobian_at,
)
from gradsurg.multitask.losses import (
    BackwardCall,
    Losses,
    loss_values,
    named_losses,
    paused,
    skipping,
)
from gradsurg.multitask.processes import average_jacobian, mean_losses
from gradsurg.multitask.shards import accumulate_parts, group_of
from gradsurg.multitask.shared_parameters import REPRESENTATION, SharedParameters
from gradsurg.plugins.messages import shortened
from gradsurg.sites.wrapped_models import refuse_static_graph, when_wrapped
from gradsurg.torch_internals import compiling
from gradsurg.torch_internals.autograd import accumulate, is_sharded

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment
    from gradsurg.core.intervention import Intervention
    from gradsurg.core.operation import Operation

MAX_WITHOUT_STEP = 10  # updates without an optimizer step before a warning
UNUSED = "live.backward"  # the key of the warning that it was not called


class MultiTaskBackward:
    """The aggregators of an attached surgery, and the backward passes of its losses."""

    def __init__(self, attachment: "Attachment", conflicts: Conflicts) -> None:
        self.attachment = attachment
        self.conflicts = conflicts
        self.aggregations: list[Aggregation] = []
        self._builder = JacobianBuilder(attachment, self.aggregations)
        self._stack = ExitStack()
        self._marker: OutputMarker | None = None
        # The processes over which the gradients of the tasks are averaged.
        self._group: distributed.ProcessGroup | None = None
        # The processes that have parts of the gradients, if the parameters are sharded.
        self._shards: distributed.ProcessGroup | None = None
        self._keeps_buffers = False
        self._max_losses = 0  # of one call
        self._checked_heads = False
        self._num_updates = 0  # calls with aggregate=True
        self._made_jacobian = False  # by `Live.jacobian`
        self._has_stepped = False
        self._tasks: dict[str, None] = {}  # all tasks so far, in order

    def add(self, label: str, intervention: "Intervention") -> None:
        """Attach an aggregator. Raises LookupError, ValueError or RuntimeError if it cannot act."""
        aggregator, at, trigger = intervention.aggregator, intervention.at, intervention.when
        assert aggregator is not None
        assert isinstance(at, SharedParameters)
        aggregation = Aggregation(label, aggregator, at, trigger, self.attachment, self.conflicts)
        check_disjoint([*self.aggregations, aggregation])
        check_trigger(trigger, label)
        for other in self.aggregations:
            if other.at.reduce != at.reduce:
                raise ValueError(
                    f"{label}: use reduce={other.at.reduce!r}, as '{other.label}' has, found "
                    f"{at.reduce!r}: all aggregators of a surgery need the same"
                )
        self._shards = group_of(self.attachment.model.parameters(), at, aggregator)
        if self._shards is not None:
            self._builder.sharded = first_names(self.attachment.model)
        refuse_static_graph(at, self.attachment.model, self._stack)
        if at.reduce == "mean":
            when_wrapped(self.attachment.model, self._stack, partial(self._average_over, label, at))
        if at.features:
            self._marker = OutputMarker(self.attachment.model, at.features, self._stack)
        self.aggregations.append(aggregation)
        self.keep_buffers()

    def _average_over(
        self, label: str, at: SharedParameters, wrapper: DistributedDataParallel
    ) -> None:
        """Average the tasks' gradients over the processes. Raises RuntimeError if they cannot."""
        if distributed.get_world_size(wrapper.process_group) == 1:
            return
        if at.engine == "feature":
            raise RuntimeError(
                f"{label}: use engine='full', or reduce='local', which averages the results: "
                "engine='feature' combines gradients of single examples, which each process has"
            )
        self._group = wrapper.process_group

    def keep_buffers(self) -> None:
        """Make graphs compiled from now on support one backward pass for each task."""
        if not self._keeps_buffers:
            self._keeps_buffers = True
            self._stack.enter_context(compiling.keeping_buffers())

    def backward(
        self,
        losses: Losses,
        interventions: "Sequence[Operation]",
        scale: float,
        aggregate: bool,
        retain_graph: bool,
    ) -> None:
        """Implement `Live.backward`."""
        named = named_losses(losses)
        if scale != 1.0:
            named = {name: loss * scale for name, loss in named.items()}
        self.attachment.backward_scale = scale
        call = BackwardCall(named, list(interventions), aggregate, retain_graph)
        if retain_graph:
            check_repeatable(call.losses, shared=False)
        self._tasks |= dict.fromkeys(call.losses)
        call.check_task_names(list(self._tasks))
        aggregation = self.aggregations[0] if self.aggregations else None
        self._max_losses = max(self._max_losses, len(call.losses))
        self._num_updates += call.last
        try:
            self._run(call, aggregation)
        except BaseException as error:  # also an interrupt: half a step must not be continued
            if self.discard():
                error.add_note("gradients of live.backward(..., aggregate=False) were dropped")
            raise
        if call.last and not self.attachment.steps.optimizers:
            self.attachment.clock.backwards += 1
        if self.attachment.is_scaled:
            self._allow_step_without_gradients()

    def _run(self, call: BackwardCall, aggregation: Aggregation | None) -> None:
        if self._shards is not None:  # other tasks would make the processes wait for ever
            mean_losses(self._shards, dict.fromkeys(call.losses, 0.0), (), call.device)
        with across(self._shards):
            if self.attachment.shadow or not self._needs_tasks(aggregation, call):
                self._backward_of_sum(aggregation, call)
            elif aggregation is not None and self._marker is not None:
                self._backward_at_features(aggregation, self._marker, call)
            else:
                self._backward_of_tasks(aggregation, call)

    def jacobian(self, losses: Losses, interventions: "Sequence[Operation]") -> dict[str, Tensor]:
        """Implement `Live.jacobian`."""
        if any(map(is_sharded, self.attachment.model.parameters())):
            rule = "call it without fully_shard: it returns whole gradients, found sharded ones"
            raise TypeError(f"live.jacobian: {rule}")
        call = BackwardCall(named_losses(losses), list(interventions), True, retain_graph=True)
        call.check_task_names(list(call.losses))
        call.check_stateless(len(call.losses))
        self._made_jacobian = True
        collected = JacobianBuilder(self.attachment, []).collect(call, strict=False)
        assert collected is not None  # the call is the last of its step
        return collected[0].rows()

    def after_step(self) -> None:
        """End the step of all aggregators; call it after each optimizer step."""
        self._has_stepped = True
        had_weights = any(aggregation.has_pending_weights for aggregation in self.aggregations)
        if self.discard() or had_weights:
            self.attachment.warn_once(
                "the optimizer has made a step before the last live.backward of the step, the one "
                "with aggregate=True: the gradients and weights so far were dropped"
            )
        for aggregation in self.aggregations:
            aggregation.after_step()

    def discard(self) -> bool:
        """Drop the gradients and weights of an unfinished step; return whether it had gradients."""
        for aggregation in self.aggregations:
            aggregation.drop_weights()
        return self._builder.discard()

    def warn_unknown_scaler(self) -> None:
        """Warn that a GradScaler is in use that `attach` was not given."""
        for aggregation in self.aggregations:
            effect = aggregation.aggregator.loss_scale_error() or (
                "The losses and gradients so far were multiplied by the loss scale"
            )
            self.attachment.warn_once(
                f"{aggregation.label}: the optimizer steps by a GradScaler that attach was not "
                f"given. {effect}. Use attach(..., scaler=scaler).",
            )

    def warn_unused(self) -> None:
        """Warn in the first steps if the losses of aggregators and of triggers were not given."""
        operations, aggregators = self.attachment.operations, self.attachment.aggregators
        waiting = (each for each in operations if each.named_tasks and each.answer is False)
        labels = [*aggregators, *(each.label for each in waiting)]
        if labels and not self._tasks and not self._made_jacobian:
            self.attachment.warn_once(
                f"{shortened(labels)}: call live.backward(losses) in place of "
                "sum(losses).backward(): it was not called in the first steps",
                key=UNUSED,
            )

    def closing_warnings(self) -> list[str]:
        """Return the warnings to emit on detach."""
        used = {entry.intervention for entry in self.attachment.ledger if entry.all_calls}
        why = "live.backward(losses) was never called"
        if self._tasks:
            why = "no two tasks reached a parameter that it acts on"
        if self._tasks and not self._num_updates:
            why = "every live.backward had aggregate=False, so no step was combined"
        is_known = self._made_jacobian or UNUSED in self.attachment.warned
        texts = [
            f"{aggregation.label}: attached, but {why}"
            for aggregation in self.aggregations
            if aggregation.label not in used
            and not (self.attachment.shadow if self._tasks else is_known)
        ]
        for aggregation in self.aggregations:
            texts += self._unused_groups(aggregation, used) + aggregation.closing_warnings()
        if self.aggregations and self._max_losses == 1:
            texts.append(
                "live.backward had one loss each time, so an aggregator has nothing to combine: "
                "give the loss of each task separately"
            )
        without_step = self._num_updates >= MAX_WITHOUT_STEP and not self._has_stepped
        if self.aggregations and without_step and self.attachment.steps.optimizers:
            texts.append(
                "pass attach the optimizer that you step: the one that it has made no step in "
                f"{self._num_updates} updates, so triggers and random numbers stayed at step 0"
            )
        if self._builder.pending:
            texts.append("the gradients of live.backward(..., aggregate=False) were never combined")
        return texts

    def close(self) -> None:
        """Remove all hooks and free all gradients."""
        self._stack.close()
        self._builder.close()
        self._marker = None

    def _allow_step_without_gradients(self) -> None:
        """Let a GradScaler step an optimizer whose parameters have no gradient, as no solver
        converged.

        `GradScaler.step` raises without a gradient: one parameter has a gradient of zeros until the
        optimizer steps.
        """
        if not any(aggregation.has_failed for aggregation in self.aggregations):
            return
        for optimizer in self.attachment.steps.optimizers:
            self._give_zeros(optimizer)

    def _give_zeros(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(param.grad is not None for param in params):
            return
        param = params[0]
        zeros = param.grad = torch.zeros_like(param)

        def remove(*_: object) -> None:
            handle.remove()
            if param.grad is zeros:
                param.grad = None

        handle = optimizer.register_step_pre_hook(remove)
        self._stack.callback(handle.remove)

    def _needs_tasks(self, aggregation: Aggregation | None, call: BackwardCall) -> bool:
        """Whether each loss needs a backward pass of its own."""
        if call.task_specific:
            return True
        if aggregation is None:
            return False
        if not aggregation.weights_losses or self._builder.pending:
            return True
        return call.has_nonlinear

    def _unused_groups(self, aggregation: Aggregation, used: Collection[str]) -> list[str]:
        """Return a warning for each group of a pattern in which no gradients were combined."""
        patterns = aggregation.at.granularity
        if isinstance(patterns, str) or aggregation.label not in used:
            return []
        ledger = self.attachment.ledger
        groups = {entry.site for entry in ledger if entry.intervention == aggregation.label}
        text = f"{aggregation.label}: no two tasks reached a parameter of its group"
        return [f"{text} '{pattern}'" for pattern in patterns if pattern not in groups]

    # The three ways: one backward pass of the sum, one a task, or one a task down to the shared
    # representation and one below it.

    def _backward_of_sum(self, aggregation: Aggregation | None, call: BackwardCall) -> None:
        """Run one backward pass of the weighted sum of the losses.

        At sampled steps the conflict is measured first, in separate passes without side effects.
        """
        weights = self._loss_weights(aggregation, call)  # in shadow too, to learn from each step
        if (aggregation is not None or call.task_specific) and self.attachment.measures_conflicts:
            self._measure(call, weights)
        losses = list(call.losses.values())
        if weights is not None and not self.attachment.shadow:
            losses = [loss * factor for loss, factor in zip(losses, weights.tolist(), strict=True)]
        reduce(add, losses).backward(retain_graph=call.retain_graph)

    def _loss_weights(self, aggregation: Aggregation | None, call: BackwardCall) -> Tensor | None:
        """Return the weights of the losses, None if the aggregator does not weight losses."""
        if aggregation is None or not aggregation.weights_losses:
            return None
        values = loss_values(call.losses, self.attachment.loss_scale)
        if (group := self._group or self._shards) is not None:
            values = mean_losses(group, values, (), call.device)
        return aggregation.loss_weights(values, call.last)

    def _measure(self, call: BackwardCall, weights: Tensor | None) -> None:
        """Measure the conflict of the tasks in backward passes of their own.

        Only transforms whose trigger names a task act in these passes; they do not act in the
        backward pass of the sum.
        """
        with paused(call.task_independent):
            measured = self._builder.measure(call)
        if measured is None:
            return
        jacobian, losses = self._averaged(*measured)
        for aggregation, group, members in self._builder.groups(jacobian):
            memories = aggregation.aggregator.memories(tuple(losses))
            tasks, parts = jacobian.take(members, bool(memories))
            used = weights[tasks] if weights is not None else None
            aggregation.observe(group, parts, _of_tasks(losses, tasks), used)
        jacobian.reset(0)

    def _backward_of_tasks(self, aggregation: Aggregation | None, call: BackwardCall) -> None:
        """Run one backward pass a task, and accumulate the combined gradients in `.grad`."""
        call.check_stateless(len({**self._builder.pending, **call.losses}))
        weights = self._loss_weights(aggregation, call)
        collected = self._builder.collect(call, strict=weights is None)
        if collected is None:
            return
        jacobian, losses = self._averaged(*collected)
        self._max_losses = max(self._max_losses, len(losses))
        if aggregation is not None and aggregation.at.on_nonfinite == "skip":
            self._drop_nonfinite(aggregation, jacobian, losses)
        if aggregation is not None and weights is None and not self._builder.compiled:
            self._warn_if_stacked(aggregation, jacobian)
        combined = self._combined(jacobian, losses, weights)
        if self.aggregations and not jacobian.has_common:
            text = jacobian.nothing_shared(losses)
            if not self._builder.compiled:
                raise ValueError(text)
            self.attachment.warn_once(text)
        factors = [1.0] * len(losses) if weights is None else weights.tolist()
        grads = jacobian.assemble(combined, factors)
        jacobian.reset(jacobian.num_tasks)
        with paused(call.at_leaves):
            accumulate_parts(grads) if self._shards is not None else accumulate(grads)

    def _averaged(
        self, jacobian: Jacobian, losses: dict[str, float]
    ) -> tuple[Jacobian, dict[str, float]]:
        """Return the Jacobian and the losses, as means over the processes."""
        if self._group is not None:
            losses = average_jacobian(self._group, jacobian, losses)
        elif self._shards is not None:  # whose gradients are means
            losses = mean_losses(self._shards, losses, (), jacobian.params[0].device)
        return jacobian, losses

    def _drop_nonfinite(
        self, aggregation: Aggregation, jacobian: Jacobian, losses: Mapping[str, float]
    ) -> None:
        """Drop the tasks with a NaN or infinity; all if an aggregator needs them all."""
        dropped = {task for task, loss in enumerate(losses.values()) if not isfinite(loss)}
        dropped.update(jacobian.nonfinite_tasks())
        if not dropped:
            return
        names = [name for task, name in enumerate(losses) if task in dropped]
        is_step = any(each.needs_all_tasks for each in self.aggregations)
        aggregation.count_nonfinite(names, is_step or len(dropped) == len(losses))
        for task in range(len(losses)) if is_step else dropped:
            jacobian.drop(task)

    def _combined(
        self, jacobian: Jacobian, losses: Mapping[str, float], weights: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Return the combined gradients of the groups whose solver converged, by index."""
        combined: dict[int, Tensor] = {}
        for owner, group, members in self._builder.groups(jacobian):
            if not any(reached.intersection(members) for reached in jacobian.reached):
                continue  # all tasks that reach the group were dropped
            grads = self._combine(owner, group, jacobian, members, losses, weights)
            if grads is not None:
                combined |= jacobian.split(members, grads)
        return combined

    def _combine(
        self,
        aggregation: Aggregation,
        group: str,
        jacobian: Jacobian,
        members: Sequence[int],
        losses: Mapping[str, float],
        weights: Tensor | None,
    ) -> list[Tensor] | None:
        """Return the combined gradients of a group's blocks, or None if no solver converges."""
        tasks, parts = jacobian.take(members, bool(aggregation.aggregator.memories(tuple(losses))))
        if weights is not None:
            if self.attachment.measures_conflicts:
                aggregation.observe(group, parts, _of_tasks(losses, tasks), weights[tasks])
            return aggregation.combine_with(parts, weights[tasks])
        names = list(losses)
        absent = [
            names[task]
            for task, reached in enumerate(jacobian.reached)
            if reached and task not in tasks
        ]
        self._warn_absent(aggregation, absent, f"the shared parameters of '{group}'")
        return aggregation.combine(group, parts, _of_tasks(losses, tasks))

    def _backward_at_features(
        self, aggregation: Aggregation, marker: OutputMarker, call: BackwardCall
    ) -> None:
        """Run one backward pass a task down to the shared representation, and one below it."""
        if not call.last:
            raise ValueError(
                "live.backward: leave out aggregate=False, or use engine='full': engine='feature' "
                "combines the gradients of one forward pass"
            )
        losses = call.losses
        cut = find_cut(losses, marker)
        check_repeatable(losses, shared=True, below=() if cut.nested else cut.nodes)
        if cut.joined:
            call.check_stateless(len(losses))
        task_grads, head_grads = self._grads_above(aggregation, cut, call)
        check_dense(task_grads, marker.name)
        group = f"{aggregation.label}/{REPRESENTATION}"
        found, jacobian = jacobian_at(cut.edges, task_grads, group)
        _check_reached(losses, jacobian, marker.name)
        absent = [
            name for name, reached in zip(losses, jacobian.reached, strict=True) if not reached
        ]
        self._warn_absent(aggregation, absent, "the representation that others share")
        if are_disjoint(task_grads):
            self._warn_disjoint(aggregation, sum(part.numel() for part in jacobian.params))
        task_grads.clear()  # those that were copied make room
        combined = self._combined(jacobian, loss_values(losses, self.attachment.loss_scale))
        edge_grads = {
            edge: combined[index] for index, edge in enumerate(found) if index in combined
        }
        for edge, grad in edge_grads.items():
            if found[edge].is_complex():
                edge_grads[edge] = torch.complex(*grad.unbind(-1))
        if head_grads:
            with paused(call.at_leaves):
                accumulate(head_grads)
        with skipping(call.task_specific, cut.nodes):
            torch.autograd.backward(
                list(edge_grads), list(edge_grads.values()), retain_graph=call.retain_graph
            )

    def _grads_above(
        self, aggregation: Aggregation, cut: GraphCut, call: BackwardCall
    ) -> tuple[list[Sequence[Tensor | None]], dict[Tensor, Tensor]]:
        """Return the gradients of each task at the edges of a cut, and of all heads."""
        memories = aggregation.aggregator.memories(tuple(call.losses))
        task_grads: list[Sequence[Tensor | None]] = []
        head_grads: dict[Tensor, Tensor] = {}
        # At the edges, transforms of some tasks see the gradients of the tasks, and all others the
        # combined gradient.
        with skipping(call.task_independent, cut.nodes), cut.stopped():
            for number, (name, loss) in enumerate(call.losses.items(), 1):
                keep_graph = call.retain_graph or cut.nested or number < len(call.losses)
                with call.task(name, self.attachment.clock):
                    at_edges, of_head = cut.backward(loss, name, keep_graph)
                task_grads.append(at_edges)
                if number - 1 not in memories:
                    head_grads |= of_head
        return task_grads, head_grads

    def _warn_absent(self, aggregation: Aggregation, names: Iterable[str], place: str) -> None:
        """Warn about each of these tasks."""
        for name in names:
            self.attachment.warn_once(
                f"{aggregation.label}: {name} does not reach {place}, and does not contribute to "
                "the combined gradient"
            )

    def _warn_if_stacked(self, aggregation: Aggregation, jacobian: Jacobian) -> None:
        """Warn, at the first update, if heads count as shared because losses were stacked."""
        if self._checked_heads or self._shards is not None:
            return
        self._checked_heads = True
        heads = jacobian.params_of_single_tasks()
        if len(heads) > 1:
            self.attachment.warn_once(
                f"{aggregation.label}: give each loss as it was computed from its own output, "
                "not from concatenated outputs or stacked losses: all tasks reach "
                f"{shortened(heads.values())}, which count as shared, with a gradient of one task"
            )

    def _warn_disjoint(self, aggregation: Aggregation, entries: int) -> None:
        """Warn that the gradients at the representation cannot conflict."""
        self.attachment.warn_once(
            f"{aggregation.label}: name in features= a module below, whose output the tasks share: "
            f"here none of {entries} entries has gradients of two tasks, so no two can conflict"
        )


def _check_reached(losses: Iterable[str], jacobian: Jacobian, features: str) -> None:
    """Raise ValueError if none of the tasks has a gradient, or fewer than two of several tasks."""
    names = [*losses]
    present = [name for name, reached in zip(names, jacobian.reached, strict=True) if reached]
    if len(present) < min(2, len(names)):
        raise ValueError(
            "losses: name in features= a module whose output the losses depend on: of "
            f"{shortened(names)} {'only ' * bool(present)}{', '.join(present) or 'none'} depends "
            f"on the output of '{features}'"
        )


def _of_tasks(losses: Mapping[str, float], tasks: Sequence[int]) -> dict[str, float]:
    """Return the losses of these tasks."""
    items = list(losses.items())
    return dict(items[task] for task in tasks)
