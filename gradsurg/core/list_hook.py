"""One intervention over a list of places, whose gradients are available at the same time."""

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from functools import partial
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurg.core.checks import check_dense, check_result
from gradsurg.core.intervention import Facts
from gradsurg.core.operation import Operation
from gradsurg.core.site_hook import UNCHECKED, SiteHook, without_autocast, without_graph
from gradsurg.effects.effects import Effects
from gradsurg.plugins.messages import shortened
from gradsurg.sites.places import Ask, ListedFn, Place, ReadTensor
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import (
    SKIPPED,
    GroupTransform,
    Scaling,
    Scope,
    TransformContext,
    TransformState,
)

Fires = Sequence[bool | Tensor]
"""The trigger's answer for each gradient that is acted on."""


class ListHook:
    """One intervention over a list of places, whose gradients a kind of site has all at once.

    A kind sees it as `gradsurg.sites.places.PlacesHook`. `sites/grads.py` calls it for a group
    transform, and the functions `calls` for others; at `step` it tries `factors` first. A kind sets
    `values` and `gradients`, which stay empty at sites that have no value, or no gradient besides
    the tensor that is transformed.
    """

    def __init__(
        self, operation: Operation, places: Sequence[Place], skip: Callable[[], None] | None = None
    ) -> None:
        self.operation, self.places, self._skip = operation, places, skip
        self.scope: Scope = operation.intervention.scope
        self.asks: frozenset[Ask] = operation.asks
        sites = tuple(place.site for place in places)
        self.hooks = [operation.hook_at(place) for place in places]
        self.values: Sequence[ReadTensor] = ()
        self.gradients: Sequence[ReadTensor] = ()
        self._is_checked = False  # whether the first gradients of a group were checked
        # By label of a link, the sites for which a state of the whole group was made (see
        # `GroupTransform.members`). The operation keeps it: each change of the interventions makes
        # a new `ListHook`.
        self._members = operation.members.setdefault(sites, {})
        # By label of a link, for a state with an entry for each member: the entries as they were
        # stored last, and all joined, which saves joining them in the next step.
        self._entries: dict[str, tuple[list[TransformState], TransformState]] = {}

    @property
    def calls(self) -> Sequence[ListedFn]:
        """The function of each place, for a transform of one gradient."""
        if "gradient" not in self.asks:
            return [hook.call for hook in self.hooks]
        pairs = zip(self.hooks, self.gradients, strict=True)
        return [partial(_call_with_gradient, hook, read) for hook, read in pairs]

    def factors(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | float | None] | None:
        """Return the factor of each gradient, if to multiply by it is all there is to do.

        That is so for a single `Scaling` transform of gradsurg that acts on each gradient of this
        step and is not measured. Otherwise return None.
        """
        operation = self.operation
        link, *others = operation.links
        transform, configuration = link.transform, operation.open_configuration
        if (
            not isinstance(transform, Scaling)
            or not link.is_trusted
            or others
            or configuration is None
            or operation.sampling
        ):
            return None
        pairs = zip(self.hooks, grads, strict=True)
        given = [(hook, grad) for hook, grad in pairs if grad is not None]
        present = [grad for _, grad in given]
        if any(grad.layout is not torch.strided or grad.is_complex() for grad in present):
            return None  # to be checked, and perhaps refused
        for hook, grad in given:
            hook.entry.fired += 1
            if hook.checked_configuration is UNCHECKED:
                operation.attachment.tell("first_gradient", hook)
                hook.checked_configuration = configuration  # a product needs no other check
            hook.begin_call(0, grad)
        contexts = [hook.contexts[0] for hook, _ in given]
        factors = iter(transform.factors(present, contexts)) if present else iter(())
        return [None if grad is None else next(factors) for grad in grads]

    @property
    def is_new(self) -> bool:
        """Whether the surgery, or an optimizer, is just being attached."""
        return self.operation.is_new

    @property
    def order(self) -> int:
        """The position of the intervention in its surgery."""
        return self.operation.attachment.operations.index(self.operation)

    @property
    def stateful(self) -> str:
        """The first transform or trigger that keeps a state for each site; empty if none."""
        return self.operation.stateful

    @property
    def varies(self) -> str:
        """Why it may act differently in another process; empty if it cannot."""
        return self.operation.varies

    def note(self, text: str) -> None:
        """Record a warning that is emitted when the surgery ends."""
        self.operation.note(text)

    def state(self, key: str) -> dict[str, Tensor]:
        """Return tensors that are saved with the surgery."""
        operation = self.operation
        return operation.attachment.states.setdefault(f"{operation.label}/{key}", {})

    def __call__(self, grads: MutableSequence[Tensor | None]) -> Iterable[Tensor | None]:
        operation = self.operation
        if operation.is_idle:
            return grads
        attachment = operation.attachment  # a transform of a user may close it
        acting, fires = self._acting(grads)
        present = [grad for index in acting if (grad := grads[index]) is not None]
        if not acting or operation.skips_transform:
            return grads
        hooks = [self.hooks[index] for index in acting]
        for hook, grad in zip(hooks, present, strict=True):
            if not self._is_checked or grad.layout is not torch.strided:
                check_dense(hook, grad)
        if not self._is_checked:
            attachment.tell("first_gradient", hooks[0])
        rows = _Rows(
            hooks,
            fires,
            [self.values[index] if self.values else _no_tensor for index in acting],
            [self.gradients[index] for index in acting] if self.gradients else (),
            attachment.effects,
        )
        # Results are computed one by one, so that only one is held besides the gradients. All are
        # computed first for a user's transform, whose error must come before any gradient is
        # written; under autocast, as a generator runs after the block below; and in shadow.
        is_whole = autograd.any_autocast() or not all(link.is_trusted for link in operation.links)
        with without_autocast(present[0].device.type):
            results, skips = self._stream(rows, present)
            if is_whole or skips or attachment.shadow:
                results = list(results)
        if not self._is_checked:  # the results of a user's transform are all there
            self._is_checked = True
            for hook in hooks:
                hook.drew_nothing = True
        if attachment.shadow:
            return grads
        if skips and self._skip is not None:
            self._skip()
            return [None] * len(grads)
        return _merged(grads, acting, results)

    def _acting(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[bool | Tensor]]:
        """The indices of the gradients at which the trigger is not False, and its answers there."""
        operation = self.operation
        acting: list[int] = []
        answers: list[bool | Tensor] = []
        for index, (hook, grad) in enumerate(zip(self.hooks, grads, strict=True)):
            if grad is not None:
                fires = operation.answer
                if fires is None:
                    value = self.values[index]() if self.values else None
                    fires = operation.decide(hook.entry.site, grad, value)
                if hook.count(fires):
                    acting.append(index)
                    answers.append(fires)
        return acting, answers

    def _stream(self, rows: "_Rows", grads: list[Tensor]) -> tuple[Iterable[Tensor], bool]:
        """The results of all links, and whether one of them skips the step."""
        results: Iterable[Tensor] = grads
        for index, link in enumerate(self.operation.links):
            transform = link.transform
            if isinstance(transform, GroupTransform) and transform.scope == "group":
                befores = results if isinstance(results, list) else list(results)
                if self.operation.is_closed:
                    return befores, False
                results, skips = self._together(index, link, transform, rows, befores)
                if skips:
                    return results, True
            else:
                results = self._each(index, rows, results)
        return results, False

    def _each(self, index: int, rows: "_Rows", grads: Iterable[Tensor]) -> Iterator[Tensor]:
        """Apply a link that takes one gradient, one after the other."""
        operation = self.operation
        given = zip(rows.hooks, grads, rows.fires, rows.values, strict=True)
        for hook, grad, fired, read in given:
            if operation.is_closed:  # the user's transform has closed the surgery
                yield grad
                continue
            on_device = fired if isinstance(fired, Tensor) else None
            result = hook.apply(index, grad, read(), on_device, full_check=True)
            if operation.sampling:
                rows.effects.add(hook.slots[index], grad, result)
            yield result

    def _together(
        self, index: int, link: Facts, transform: GroupTransform, rows: "_Rows", grads: list[Tensor]
    ) -> tuple[Iterator[Tensor], bool]:
        """Apply a group transform and update its state; the results are computed when asked for."""
        operation, hooks = self.operation, rows.hooks
        states, key = operation.attachment.states, f"{link.label}/group"
        has_entries = transform.members == "entries"  # joined here, and kept by site
        saved, befores = states.get(key), []
        if saved and transform.members == "fixed":
            self._check_members(link, hooks)
        contexts = self._contexts(index, rows, grads)
        checks = not (self._is_checked and link.is_trusted)
        versions = [autograd.version_of(grad) for grad in grads] if checks else []
        step = operation.attachment.clock.step
        note = f"while {link.label} acted on {len(grads)} sites, step {step}"
        try:
            if has_entries:
                befores = self._of_each(index, link, transform, hooks, grads, saved)
                before = self._joined(link.label, befores)
            else:
                before = transform.init_group(grads) if saved is None else saved
            with hooks[0].watched(link, grads[0].device):
                results, state = transform.update_group(grads, before, contexts)
                if not link.is_trusted:  # a user's generator may draw, or read all gradients
                    results = list(results)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            error.add_note(note)
            raise
        skips = False
        if has_entries:
            state = without_graph(state)
            kept = []  # by site, so that members may come and go
            for hook, old, new, fired in zip(
                hooks, befores, _apart(state), rows.fires, strict=True
            ):
                kept.append(new if not isinstance(fired, Tensor) else link.chosen(new, old, fired))
                states[hook.keys[index]] = kept[-1]
            states.pop(key, None)  # a loaded state of the whole group, which is now kept by site
            self._entries[link.label] = kept, state
        elif state:
            if transform.members == "fixed":
                self._check_members(link, hooks)
            states[key] = without_graph(_chosen(rows.fires, state, before))
            if "skip" in transform.needs:
                # Here the host waits for the device, because only the host can skip a step.
                skips = bool(states[key][SKIPPED] > before[SKIPPED])
        return self._checked(index, rows, versions, grads, _noted(results, note), state), skips

    def _contexts(
        self, index: int, rows: "_Rows", grads: Sequence[Tensor]
    ) -> list[TransformContext]:
        """The contexts of a link at all sites, with what it needs besides the gradients."""
        intervention = self.operation.intervention
        contexts = [hook.contexts[index] for hook in rows.hooks]
        for hook, context, grad, read in zip(rows.hooks, contexts, grads, rows.values, strict=True):
            hook.begin_call(index, grad)
            if intervention.reads_value:
                context.value = read()
        if "gradient" in intervention.needs:
            for context, read in zip(contexts, rows.gradients, strict=True):
                context.gradient = read()
        if (source := self.operation.examples) is not None:
            sites = [hook.entry.site for hook in rows.hooks]
            examples = source.of_group(self.operation.attachment, sites, grads)
            for context in contexts:
                context.examples = examples
        return contexts

    def _checked(
        self,
        index: int,
        rows: "_Rows",
        versions: Sequence[int],
        grads: list[Tensor],
        results: Iterable[Tensor],
        state: TransformState,
    ) -> Iterator[Tensor]:
        """Check and measure each result."""
        operation = self.operation
        taken = zip(rows.hooks, rows.fires, rows.values, results, strict=True)
        try:
            for place, (hook, fired, read, result) in enumerate(taken):
                grad = grads[place]
                if versions:
                    version = versions[place]
                    result = check_result(hook, index, grad, version, result, read(), state)
                if isinstance(fired, Tensor) and result is not grad:
                    result = torch.where(fired, result, grad)
                if operation.sampling:
                    rows.effects.add(hook.slots[index], grad, result)
                yield result
                # `grads` is the very list that the transform's generator reads: with the result in
                # its place, the gradient can be freed before the next one is computed.
                grads[place] = result
                del grad
        finally:
            for hook in rows.hooks:
                context = hook.contexts[index]
                context.value = context.gradient = context.examples = None

    def _of_each(
        self,
        index: int,
        link: Facts,
        transform: GroupTransform,
        hooks: Sequence[SiteHook],
        grads: Sequence[Tensor],
        saved: TransformState | None,
    ) -> list[TransformState]:
        """The state of each member: its own, or its part of `saved`, a state of all of them.

        A member that is new has none of its own: it gets its part of a state that `init_group`
        makes for the present members.
        """
        states = self.operation.attachment.states
        own = [states.get(hook.keys[index], {}) for hook in hooks]
        if saved is None and all(own):
            return own
        parts = _apart(transform.init_group(grads) if saved is None else saved)
        if len(parts) != len(hooks):  # a loaded state, which does not name its members
            raise RuntimeError(
                f"{link.label}: begin with a step in which the same parameters have a gradient: "
                f"the loaded state is that of {len(parts)} tensors, now there are {len(hooks)}"
            )
        return [state or part for state, part in zip(own, parts, strict=True)]

    def _joined(self, label: str, states: list[TransformState]) -> TransformState:
        """One state of all members: the last axis of each tensor has an entry of each."""
        last, joined = self._entries.get(label, ([], {}))
        if len(last) == len(states) and all(map(is_, last, states)):
            return joined
        return {name: torch.cat([state[name] for state in states], dim=-1) for name in states[0]}

    def _check_members(self, link: Facts, hooks: Sequence[SiteHook]) -> None:
        """Raise RuntimeError if the sites differ from those that the group's state was made for."""
        sites = [hook.entry.site for hook in hooks]
        first = self._members.setdefault(link.label, sites)
        if sites != first:
            raise RuntimeError(
                f"{link.label}: {link.transform!r} keeps a state of its group, whose members must "
                f"stay the same: at first {shortened(first)}, now {shortened(sites)}"
            )


class _Rows(NamedTuple):
    """What belongs to each gradient of a group."""

    hooks: Sequence[SiteHook]
    fires: Fires
    values: Sequence[ReadTensor]
    gradients: Sequence[ReadTensor]
    effects: Effects  # held here, as a transform of a user may close the surgery


def _no_tensor() -> None:
    return None


def _call_with_gradient(
    hook: SiteHook, read: ReadTensor, grad: Tensor | None, value: Tensor | None
) -> Tensor | None:
    """Call a hook whose transforms get the gradient of which the optimizer made an update."""
    gradient = read()
    for context in hook.contexts:
        context.gradient = gradient
    try:
        return hook.call(grad, value)
    finally:
        for context in hook.contexts:
            context.gradient = None


def _noted(results: Iterable[Tensor], note: str) -> Iterator[Tensor]:
    """Yield the results of a transform, and say where it was if it raises."""
    # Here and not where the transform is called: a generator runs when its results are asked for.
    try:
        yield from results
    except Exception as error:  # a user's transform may raise anything; it is raised again
        error.add_note(note)
        raise


def _merged(
    grads: MutableSequence[Tensor | None], acting: Sequence[int], results: Iterable[Tensor]
) -> Iterator[Tensor | None]:
    """Yield the results in the places of the gradients that were acted on."""
    places, stream = set(acting), iter(results)
    for index in range(len(grads)):
        yield next(stream) if index in places else grads[index]
        grads[index] = None
    # There is no further result: asking lets the generators end, and drop the values they hold.
    for _ in stream:
        raise AssertionError("a group has more results than gradients")


def _apart(state: TransformState) -> list[TransformState]:
    """Split a joint state along its last axis: one state for each member."""
    entries = zip(*(tensor.split(1, dim=-1) for tensor in state.values()), strict=True)
    return [dict(zip(state, entry, strict=True)) for entry in entries]


def _chosen(fires: Fires, new: TransformState, before: TransformState) -> TransformState:
    """Return the next state of a group; the old one if the trigger, on the device, never fired."""
    answers = [answer for answer in fires if isinstance(answer, Tensor)]
    if len(answers) < len(fires):
        return new
    device = answers[0].device
    acts = torch.stack([answer.to(device, non_blocking=True) for answer in answers]).any()
    return {
        name: torch.where(acts.to(tensor.device), tensor, before[name])
        for name, tensor in new.items()
    }
