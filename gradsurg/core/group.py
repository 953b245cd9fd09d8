"""Apply the transforms of one intervention at all its sites together."""

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurg.core.site_hook import Link, Owner, SiteHook, without_autocast, without_graph
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import SKIPPED, GroupTransform, TransformContext, TransformState


class GroupHook:
    """One intervention at all its sites together, in the order of `hooks`.

    Called with the gradients, it yields the results in order, one at a time, so that a caller that
    writes each before it asks for the next holds no copy of all. It takes the list over, and drops
    each gradient once its result was yielded. `skip` skips the step of the optimizer.
    """

    def __init__(
        self, owner: Owner, hooks: Sequence[SiteHook], skip: Callable[[], None] | None
    ) -> None:
        self.owner = owner
        self.hooks = hooks
        self._skip = skip
        self._has_group = owner.intervention.scope == "group"
        self._is_checked = False  # whether a group has passed all checks
        self._members: dict[str, list[str]] = {}  # the sites of each link that has a group state
        # The states of the members of each link whose state has entries, and the same joined.
        self._entries: dict[str, tuple[list[TransformState], TransformState]] = {}

    def __call__(self, grads: MutableSequence[Tensor | None]) -> Iterable[Tensor | None]:
        firing = self.owner.firing
        if firing.is_idle:
            return grads
        if not self._has_group:
            return self._one_by_one(grads)
        acting, fires = self._acting(grads)
        present = [grad for index in acting if (grad := grads[index]) is not None]
        if not acting or firing.skips_transform:
            return grads
        hooks = [self.hooks[index] for index in acting]
        for hook, grad in zip(hooks, present, strict=True):
            if not self._is_checked or grad.layout is not torch.strided:
                hook.check_dense(grad)
        if not self._is_checked:
            self.owner.note_first(hooks[0])
        # A user's result that is wrong is found before the first gradient is written.
        is_whole = autograd.any_autocast() or not all(link.is_trusted for link in hooks[0].links)
        with without_autocast(present[0].device.type):
            results, skips = self._stream(hooks, present, fires)
            if is_whole or skips or firing.session.shadow:
                results = list(results)
        self._is_checked = True
        if firing.session.shadow:
            return grads
        if skips and self._skip is not None:
            self._skip()
            return [None] * len(grads)
        return _merged(grads, acting, results)

    def _one_by_one(self, grads: MutableSequence[Tensor | None]) -> Iterator[Tensor | None]:
        """Send each gradient through its own hook: no link needs a group."""
        for index, hook in enumerate(self.hooks):
            grad, grads[index] = grads[index], None
            result = hook.call(grad)
            yield grad if result is None else result

    def _acting(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[bool | Tensor]]:
        """The indices of the gradients that are acted on, and the trigger's answer for each.

        A gradient for which the trigger answers False on the host is not part of the group.
        """
        firing = self.owner.firing
        acting: list[int] = []
        answers: list[bool | Tensor] = []
        for index, (hook, grad) in enumerate(zip(self.hooks, grads, strict=True)):
            if grad is not None:
                fires = firing.answer
                if fires is None:
                    fires = firing.decide(hook.entry.site, grad, hook.value())
                if hook.count(fires):
                    acting.append(index)
                    answers.append(fires)
        return acting, answers

    def _stream(
        self, hooks: Sequence[SiteHook], grads: list[Tensor], fires: Sequence[bool | Tensor]
    ) -> tuple[Iterable[Tensor], bool]:
        """The results of all links, and whether one of them skips the step."""
        results: Iterable[Tensor] = grads
        for index, transform in enumerate(self.owner.intervention.links):
            links = [hook.links[index] for hook in hooks]
            if isinstance(transform, GroupTransform) and transform.scope == "group":
                befores = results if isinstance(results, list) else list(results)
                results, skips = self._together(transform, hooks, links, befores, fires)
                if skips:
                    return results, True
            else:
                results = self._each(hooks, links, results, fires)
        return results, False

    def _each(
        self,
        hooks: Sequence[SiteHook],
        links: Sequence[Link],
        grads: Iterable[Tensor],
        fires: Sequence[bool | Tensor],
    ) -> Iterator[Tensor]:
        """Apply a link that takes one gradient, one after the other."""
        firing = self.owner.firing
        for hook, link, grad, fired in zip(hooks, links, grads, fires, strict=True):
            on_device = fired if isinstance(fired, Tensor) else None
            result = hook.apply(link, grad, hook.value(), on_device)
            if firing.sampling:
                firing.session.effects.add(link.slot, grad, result)
            yield result

    def _together(
        self,
        transform: GroupTransform,
        hooks: Sequence[SiteHook],
        links: Sequence[Link],
        grads: list[Tensor],
        fires: Sequence[bool | Tensor],
    ) -> tuple[Iterator[Tensor], bool]:
        """Apply a group transform and update its state; the results are computed when asked for."""
        session, first = self.owner.session, links[0]
        key, has_entries = f"{first.label}/group", transform.members == "entries"
        saved, befores = session.states.get(key), []
        if saved and transform.members == "fixed":
            self._check_members(links)
        contexts = self._contexts(hooks, links, grads)
        checks = not (self._is_checked and first.is_trusted)
        versions = [autograd.version_of(grad) for grad in grads] if checks else []
        note = f"while {first.label} acted on {len(grads)} sites, step {session.clock.step}"
        try:
            if has_entries:
                befores = _of_each(transform, links, grads, saved)
                before = self._joined(first.label, befores)
            else:
                before = transform.init_group(grads) if saved is None else saved
            with first.watched(grads[0].device):
                results, state = transform.update_group(grads, before, contexts)
                if not first.is_trusted:  # a user's generator may draw, or read all gradients
                    results = list(results)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            error.add_note(note)
            raise
        skips = False
        if has_entries:
            state = without_graph(state)
            for link, old, new, fired in zip(links, befores, _apart(state), fires, strict=True):
                if isinstance(fired, Tensor):
                    link.state = old
                    link.store(new, fired)
                else:
                    link.keep(new)
            session.states.pop(key, None)
            self._entries[first.label] = [link.state for link in links], state
        elif state:
            if transform.members == "fixed":
                self._check_members(links)
            session.states[key] = without_graph(_chosen(fires, state, before))
            if "skip" in transform.needs:
                skips = bool(session.states[key][SKIPPED] > before[SKIPPED])
        rows = _Rows(hooks, links, fires, versions)
        return self._checked(rows, grads, _noted(results, note), state), skips

    def _contexts(
        self, hooks: Sequence[SiteHook], links: Sequence[Link], grads: Sequence[Tensor]
    ) -> list[TransformContext]:
        """The contexts of a link at all sites, with what it needs besides the gradients."""
        intervention = self.owner.intervention
        for hook, link, grad in zip(hooks, links, grads, strict=True):
            hook.begin_call(link, grad)
            if intervention.reads_value:
                link.context.value = hook.value()
            if "gradient" in intervention.needs:
                link.context.gradient = hook.gradient()
        if (source := self.owner.examples) is not None:
            examples = source.of_group([hook.entry.site for hook in hooks], grads)
            for link in links:
                link.context.examples = examples
        return [link.context for link in links]

    def _checked(
        self, rows: "_Rows", grads: list[Tensor], results: Iterable[Tensor], state: TransformState
    ) -> Iterator[Tensor]:
        """Check and measure each result."""
        firing = self.owner.firing
        taken = zip(rows.hooks, rows.links, rows.fires, results, strict=True)
        try:
            for index, (hook, link, fired, result) in enumerate(taken):
                grad = grads[index]
                if rows.versions:
                    version = rows.versions[index]
                    result = hook.check_result(link, grad, version, result, hook.value(), state)
                if isinstance(fired, Tensor) and result is not grad:
                    result = torch.where(fired, result, grad)
                if firing.sampling:
                    firing.session.effects.add(link.slot, grad, result)
                yield result
                grads[index] = result  # the transform has read it: from now on it is not held
                del grad
        finally:
            for link in rows.links:
                link.context.value = link.context.gradient = link.context.examples = None

    def _joined(self, label: str, states: list[TransformState]) -> TransformState:
        """One state of all members: the last axis of each tensor has an entry of each."""
        last, joined = self._entries.get(label, ([], {}))
        if len(last) == len(states) and all(map(is_, last, states)):
            return joined
        return {name: torch.cat([state[name] for state in states], dim=-1) for name in states[0]}

    def _check_members(self, links: Sequence[Link]) -> None:
        """Raise RuntimeError if the sites differ from those that the group's state was made for."""
        sites = [link.context.site for link in links]
        first = self._members.setdefault(links[0].label, sites)
        if sites != first:
            raise RuntimeError(
                f"{links[0].label}: {links[0].transform!r} keeps a state of its group, whose "
                f"members must stay the same: at first {', '.join(first)}, now {', '.join(sites)}"
            )


class _Rows(NamedTuple):
    """What belongs to each gradient of a group; `versions` are empty if nothing is checked."""

    hooks: Sequence[SiteHook]
    links: Sequence[Link]
    fires: Sequence[bool | Tensor]
    versions: Sequence[int]


def _noted(results: Iterable[Tensor], note: str) -> Iterator[Tensor]:
    """Yield the results of a transform, and say where it was if it raises."""
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
    for _ in stream:  # let it end, so that it drops what it holds
        raise AssertionError("a group has more results than gradients")


def _of_each(
    transform: GroupTransform,
    links: Sequence[Link],
    grads: Sequence[Tensor],
    saved: TransformState | None,
) -> list[TransformState]:
    """The state of each member: its own, or else its part of `saved`, one of all together."""
    if saved is None and all(link.state for link in links):
        return [link.state for link in links]
    parts = _apart(transform.init_group(grads) if saved is None else saved)
    if len(parts) != len(links):  # a loaded state, which does not tell its members
        raise RuntimeError(
            f"{links[0].label}: begin with a step in which the same parameters have a gradient: "
            f"the loaded state is that of {len(parts)} tensors, now there are {len(links)}"
        )
    return [link.state or part for link, part in zip(links, parts, strict=True)]


def _apart(state: TransformState) -> list[TransformState]:
    entries = zip(*(tensor.split(1, dim=-1) for tensor in state.values()), strict=True)
    return [dict(zip(state, entry, strict=True)) for entry in entries]


def _chosen(
    fires: Sequence[bool | Tensor], new: TransformState, before: TransformState
) -> TransformState:
    """Return a group's next state; the old one if all triggers decide on the device and none
    fires."""
    answers = [answer for answer in fires if isinstance(answer, Tensor)]
    if len(answers) < len(fires):
        return new
    device = answers[0].device
    acts = torch.stack([answer.to(device, non_blocking=True) for answer in answers]).any()
    return {
        name: torch.where(acts.to(tensor.device), tensor, before[name])
        for name, tensor in new.items()
    }
