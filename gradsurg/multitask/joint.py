"""One update of several losses: what `live.backward(losses)` does."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import add

import torch
from torch import Tensor

from gradsurg.aggregators.base import Aggregator
from gradsurg.hooks.controller import HookController, Session
from gradsurg.multitask.aggregation import REPRESENTATION, Aggregation, check_apart, check_host
from gradsurg.multitask.conflict import Conflicts
from gradsurg.multitask.features import Piece, Watch, cut, is_apart, side_by_side, split
from gradsurg.multitask.flow import (
    Call,
    acts_unlike_on_parts,
    at_leaves,
    check_stateful,
    check_tasks,
    flowing,
    paused,
    pickers,
    sparing,
)
from gradsurg.multitask.losses import Losses, named, values
from gradsurg.multitask.passes import ERRORS, Passes, refuse_a_second_backward
from gradsurg.multitask.reaching import had_alone, meeting, nothing_shared, reaching, some
from gradsurg.multitask.rows import Block, Rows, views
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.torch_internals import compiling
from gradsurg.triggers.base import Trigger

STILL = 10  # updates in which an optimizer has made no step, and so is not the one in use


class MultiTaskBackward:
    """The aggregators of an attachment, and the backward passes of its losses."""

    def __init__(self, session: Session, conflicts: Conflicts) -> None:
        self.session = session
        self.conflicts = conflicts
        self.aggregations: list[Aggregation] = []
        self._passes = Passes(session, self.aggregations)
        self._shadow = session.shadow
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._keeps = False
        self._most = 0  # losses of one call
        self._asked = False  # whether the tasks have heads of their own
        self._ended = 0  # calls that were a step's last
        self._stepped = False
        self._tasks: dict[str, None] = {}  # all that have come

    def join(
        self, label: str, aggregator: Aggregator, at: SharedParameters, trigger: Trigger
    ) -> None:
        """Take an aggregator in. Raises LookupError or ValueError if it could not act."""
        one = Aggregation(label, aggregator, at, trigger, self.session, self.conflicts)
        check_apart([*self.aggregations, one])
        check_host(trigger, label)
        if at.features:
            self._watch = Watch(self.session.model, at.features, self._stack)
        self.aggregations.append(one)
        self.keep_buffers()

    def keep_buffers(self) -> None:
        """Have what will be compiled take a backward for each task."""
        if not self._keeps:
            self._keeps = True
            self._stack.enter_context(compiling.keeping_buffers())

    def backward(
        self, losses: Losses, attached: Sequence[HookController], last: bool, retain: bool
    ) -> None:
        """As `Live.backward` says."""
        call = Call(named(losses), list(attached), pickers(attached), last, retain)
        if retain:
            refuse_a_second_backward(call.losses, shared=False)
        self._tasks |= dict.fromkeys(call.losses)
        check_tasks(call.picky, list(self._tasks))
        one = self.aggregations[0] if self.aggregations else None
        self._most = max(self._most, len(call.losses))
        self._ended += last
        try:
            self._go_back(one, call)
        except ERRORS as error:
            if self.discard():
                error.add_note("what waited since live.backward(.., aggregate=False) is dropped")
            raise
        if last and self.session.optimizer is None:
            self.session.clock.backwards += 1

    def _go_back(self, one: Aggregation | None, call: Call) -> None:
        if self._shadow or not (call.picky or self._needs_each(one, call.attached)):
            self._at_once(one, call)
        elif one is not None and one.at.engine == "feature":
            self._at_features(one, call)
        else:
            self._one_by_one(one, call)

    def _needs_each(self, one: Aggregation | None, attached: Sequence[HookController]) -> bool:
        """Whether each loss has a backward of its own, also where none is asked for by name."""
        if one is None:
            return False
        return not one.weighs or bool(self._passes.waiting) or acts_unlike_on_parts(attached)

    def stepped(self) -> None:
        """The optimizer has made a step."""
        self._stepped = True
        waited = any(one.waits for one in self.aggregations)
        if self.discard() or waited:
            self.session.warn_once(
                "the optimizer has made a step while gradients or weights waited, which are "
                "dropped: the last live.backward of a step is the one with aggregate=True"
            )
        for one in self.aggregations:
            one.stepped()

    def discard(self) -> bool:
        """Drop what waits for more losses of this step; whether any gradients did."""
        for one in self.aggregations:
            one.forget()
        return self._passes.discard()

    def notice(self) -> None:
        """A scaler that was not told makes the steps."""
        for one in self.aggregations:
            said = one.aggregator.loss_scale_error() or (
                "The losses and gradients so far were seen times the loss scale"
            )
            self.session.warn_once(
                f"{one.label}: a GradScaler makes the steps, and attach was not told of it. "
                f"{said}. Use attach(..., scaler=scaler).",
            )

    def complaints(self) -> list[str]:
        """What is to be said when the block ends."""
        met = {entry.intervention for entry in self.session.ledger if entry.all_calls}
        why = "live.backward(losses) was never called"
        if self._tasks:
            why = "no two tasks were seen to reach a parameter that it has"
        if self._tasks and not self._ended:
            why = "no live.backward ended a step: the last one of a step has aggregate=True"
        said = [
            f"{one.label}: attached, but {why}"
            for one in self.aggregations
            if one.label not in met and not (self._shadow and self._tasks)
        ]
        said += [text for one in self.aggregations for text in self._idle(one, met)]
        if self.aggregations and self._most == 1:
            said.append(
                "live.backward had one loss each time, of which an aggregator has nothing to make "
                "one: give each task's loss apart"
            )
        stood = self._ended >= STILL and not self._stepped
        if self.aggregations and stood and self.session.optimizer is not None:
            said.append(
                f"live.backward was called for {self._ended} steps, and the optimizer that attach "
                "was given made none: all were step 0 to triggers and to what draws. Give attach "
                "the optimizer that makes the steps."
            )
        if self._passes.waiting:
            said.append("what waits since live.backward(.., aggregate=False) was never aggregated")
        return said

    def _idle(self, one: Aggregation, met: Collection[str]) -> list[str]:
        """The groups of a user's own in which nothing was made one."""
        if isinstance(one.at.granularity, str) or one.label not in met:
            return []
        acted = {entry.site for entry in self.session.ledger if entry.intervention == one.label}
        idle = [group for group in one.at.granularity if group not in acted]
        text = f"{one.label}: no two tasks were seen to reach a parameter of its group"
        return [f"{text} '{group}'" for group in idle]

    def close(self) -> None:
        """Let everything go."""
        self._stack.close()
        self._passes.close()
        self._watch = None

    # Three ways of going back: one pass, one pass a task, one pass from where the tasks part.

    def _at_once(self, one: Aggregation | None, call: Call) -> None:
        """One backward of the weighed losses. Measuring has passes of its own, and changes none."""
        weights = None
        if one is not None and one.weighs:  # in shadow too, for what it learns of each step
            weights = one.weigh(values(call.losses, self.session.loss_scale), call.last)
        if (one is not None or call.picky) and self.session.effects.sampling:
            self._observe(call, weights)
        parts = list(call.losses.values())
        if weights is not None and not self._shadow:
            parts = [loss * own for loss, own in zip(parts, weights.tolist(), strict=True)]
        reduce(add, parts).backward(retain_graph=call.retain)

    def _observe(self, call: Call, weights: Tensor | None) -> None:
        """Measure how the tasks conflict at this step, in passes of its own: no transform acts in
        them but those at some tasks only, which meet nothing in the plain backward that follows.
        """
        with paused(call.steady):
            looked = self._passes.look(call)
        if looked is None:
            return
        rows, losses = looked
        for one, group, blocks in self._passes.groups(rows):
            tasks, parts = reaching(rows, blocks)
            used = weights[tasks] if weights is not None else None
            one.observe(group, parts, some(losses, tasks), used)
        rows.clear(0)

    def _one_by_one(self, one: Aggregation | None, call: Call) -> None:
        """One backward a task, then one through the nodes alone that add to `.grad`."""
        check_stateful(call.attached, len({**self._passes.waiting, **call.losses}))
        weights = None
        if one is not None and one.weighs:
            weights = one.weigh(values(call.losses, self.session.loss_scale), call.last)
        collected = self._passes.collect(call, strict=weights is None)
        if collected is None:
            return
        rows, losses = collected
        self._most = max(self._most, len(losses))
        if one is not None and weights is None and not self._passes.compiled:
            self._tell_if_stacked(one, rows)
        found: dict[int, Tensor] = {}
        for own, group, blocks in self._passes.groups(rows):
            grads = self._made(own, group, rows, blocks, losses, weights)
            for block, grad in zip(blocks, grads, strict=True):
                found |= views(block, rows.params, grad)
        if self.aggregations and not found:
            if not self._passes.compiled:
                raise nothing_shared(rows, losses)
            self.session.warn_once(str(nothing_shared(rows, losses)))
        whole = rows.merged(found, [1.0] * len(losses) if weights is None else weights.tolist())
        rows.clear(rows.num_tasks)
        with paused(at_leaves(call.attached)):
            torch.autograd.backward(list(whole), list(whole.values()))

    def _made(
        self,
        one: Aggregation,
        group: str,
        rows: Rows,
        blocks: Sequence[Block],
        losses: Mapping[str, float],
        weights: Tensor | None,
    ) -> list[Tensor]:
        """The gradient of each block of a group, by these weights of all losses if there are."""
        tasks, parts = reaching(rows, blocks)
        if weights is not None:
            if self.session.effects.sampling:
                one.observe(group, parts, some(losses, tasks), weights[tasks])
            return one.weighed(parts, weights[tasks])
        self._tell_absent(one, losses, tasks, f"the shared parameters of '{group}'", "their")
        return one.make(group, parts, some(losses, tasks)).grads

    def _at_features(self, one: Aggregation, call: Call) -> None:
        """A pass a task down to where they part, one from there on."""
        if not call.last:
            raise ValueError(
                "engine 'feature' has the gradients of one forward: aggregate=False needs engine "
                "'full'"
            )
        given = call.losses
        place = cut(given, self._watch)
        refuse_a_second_backward(given, shared=True, below=() if place.nested else place.nodes)
        if place.joined:
            check_stateful(call.attached, len(given))
        parts: list[Sequence[Tensor | None]] = []
        leaves: dict[Tensor, Tensor] = {}
        # What asks for a task meets the gradients of the tasks at the edges, all others their one.
        with sparing(call.steady, place.nodes), place.closed():
            for number, name in enumerate(given, 1):
                again = call.retain or place.nested or number < len(given)
                with flowing(name, self.session.clock, call):
                    grads, own = place.pass_down(given[name], name, again)
                parts.append(grads)
                leaves |= own
        place.check_dense(parts, self.session.model)
        tasks = meeting(given, parts)
        self._tell_absent(one, given, tasks, "the representation that others share", "its")
        pieces = side_by_side([parts[task] for task in tasks])
        self._tell_if_apart(one, pieces)
        losses = some(values(given, self.session.loss_scale), tasks)
        made = one.make(REPRESENTATION, [piece.rows for piece in pieces], losses)
        grads = split(pieces, made.grads)
        if leaves:
            with paused(at_leaves(call.attached)):
                torch.autograd.backward(list(leaves), list(leaves.values()))
        with sparing(call.picky, place.nodes):
            edges = [place.edges[index] for index in grads]
            torch.autograd.backward(edges, list(grads.values()), retain_graph=call.retain)

    def _tell_absent(
        self, one: Aggregation, losses: Iterable[str], tasks: Sequence[int], what: str, whose: str
    ) -> None:
        """Say which of the tasks are not among those that reach something."""
        for name in (name for index, name in enumerate(losses) if index not in tasks):
            self.session.warn_once(
                f"{one.label}: {name} does not reach {what}, and has no say in {whose} gradient"
            )

    def _tell_if_stacked(self, one: Aggregation, rows: Rows) -> None:
        """Say so if the graph shows no heads where the gradients do; asked at the first update."""
        if self._asked:
            return
        self._asked = True
        alone = had_alone(rows)
        if len(alone) > 1:
            self.session.warn_once(
                f"{one.label}: all tasks reach {', '.join(alone.values())}, which have a gradient "
                "of one task each and zeros of the others, as heads have where outputs were "
                "concatenated or losses stacked: they count as shared. Give each loss as it was "
                "computed from its own output."
            )

    def _tell_if_apart(self, one: Aggregation, pieces: Sequence[Piece]) -> None:
        """Say so if the tasks cannot conflict where they part."""
        if is_apart(pieces):
            self.session.warn_once(
                f"{one.label}: the tasks part at {sum(piece.rows.shape[1] for piece in pieces)} "
                "numbers, none of which two of them use, as where losses were stacked or the whole "
                "model was compiled as one: they cannot conflict there. Give losses apart, compile "
                "the trunk and the heads apart, or name the representation (features=)."
            )
