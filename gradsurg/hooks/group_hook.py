"""Apply the transforms of one intervention at all its sites together."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from gradsurg.hooks.controller import HookController
from gradsurg.hooks.transform_hook import (
    BoundTransform,
    TransformHook,
    disabled_autocast,
)
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import SKIPPED, GroupTransform, TransformState


class GroupHook:
    """One intervention at all its sites together, in the order of `hooks`."""

    def __init__(
        self,
        controller: HookController,
        hooks: Sequence[TransformHook],
        skip: Callable[[], None] | None = None,
    ) -> None:
        self.controller = controller
        self.hooks = hooks
        self._skip = skip  # skips the step of the optimizer, at sites that can
        self._skips = False  # whether a link has skipped this one
        self._is_checked = False  # whether a group has passed all checks
        self._members: dict[str, list[str]] = {}  # the sites of each link that has a group state
        self._all = list(range(len(hooks)))
        self._all_fire: list[bool | Tensor] = [True] * len(hooks)

    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        controller = self.controller
        if not controller.on or controller.skips_step:
            return grads
        return self._together(grads) if controller.has_group_link else self._one_by_one(grads)

    def _one_by_one(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Send each gradient through its own hook: no link needs a group."""
        results = []
        for hook, grad in zip(self.hooks, grads, strict=True):
            result = hook.hook(grad)
            results.append(grad if result is None else result)
        return results

    def _together(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        controller = self.controller
        present = [grad for grad in grads if grad is not None]
        acting, fires, hooks = self._all, self._all_fire, self.hooks
        if controller.firing is True and len(present) == len(grads):
            for hook in hooks:
                hook.entry.fired += 1
        else:
            acting, fires = self._acting(grads)
            hooks = [self.hooks[index] for index in acting]
            present = [grad for index in acting if (grad := grads[index]) is not None]
        if not acting or controller.skips_transform:
            return grads
        device = present[0].device.type
        with disabled_autocast(device) if autograd.any_autocast() else nullcontext():
            results = self._run_links(hooks, present, fires)
        if controller.session.shadow:
            return grads
        if self._skips and self._skip is not None:
            self._skip()
            return [None] * len(grads)
        if len(results) == len(grads):
            return results
        new = dict(zip(acting, results, strict=True))
        return [new.get(index, grad) for index, grad in enumerate(grads)]

    def _acting(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[bool | Tensor]]:
        """The indices of the gradients that are acted on, and the trigger's answer for each.

        A gradient for which the trigger answers False on the host is not part of the group.
        """
        acting: list[int] = []
        answers: list[bool | Tensor] = []
        controller = self.controller
        for index, (hook, grad) in enumerate(zip(self.hooks, grads, strict=True)):
            if grad is not None:
                fires = controller.firing
                if fires is None:
                    fires = controller.fires(hook.entry.site, grad, hook.value())
                if hook.count(fires):
                    acting.append(index)
                    answers.append(fires)
        return acting, answers

    def _run_links(
        self, hooks: Sequence[TransformHook], grads: list[Tensor], fires: list[bool | Tensor]
    ) -> list[Tensor]:
        controller = self.controller
        self._skips = False
        for hook, grad in zip(hooks, grads, strict=True):
            if not self._is_checked or grad.layout is not torch.strided:
                hook.check_dense(grad)
        for index, (_, transform) in enumerate(controller.links):
            befores = grads
            links = [hook.links[index] for hook in hooks]
            if isinstance(transform, GroupTransform) and transform.scope == "group":
                grads = self._apply(transform, hooks, links, befores, fires)
            else:
                grads = [
                    hook.apply(
                        link, grad, hook.value(), fired if isinstance(fired, Tensor) else None
                    )
                    for hook, link, grad, fired in zip(hooks, links, befores, fires, strict=True)
                ]
            if controller.sampling:
                for link, before, after in zip(links, befores, grads, strict=True):
                    controller.session.effects.add(link.slot, before, after)
            if self._skips:
                break
        self._is_checked = True
        return grads

    def _apply(
        self,
        transform: GroupTransform,
        hooks: Sequence[TransformHook],
        links: Sequence[BoundTransform],
        grads: list[Tensor],
        fires: list[bool | Tensor],
    ) -> list[Tensor]:
        """Apply one group transform, update its state and check its results."""
        states = self.controller.session.states
        key = f"{links[0].label}/group"
        before = states.get(key)
        if before:
            self._check_members(links)
        contexts, step = [link.context for link in links], self.controller.step
        for context in contexts:  # as `count_call`, without a call for each
            if context.step != step:
                context.step, context.call = step, 0
            else:
                self.controller.count_repeat(context)
        checks = not (self._is_checked and links[0].trusted)
        versions = [autograd.version_of(grad) for grad in grads] if checks else []
        if self.controller.needs_context:
            for hook, context in zip(hooks, contexts, strict=True):
                context.value, context.gradient = hook.value(), hook.gradient()
        if (examples_of := self.controller.examples_of) is not None:
            examples = examples_of([hook.entry.site for hook in hooks], grads)
            for context in contexts:
                context.examples = examples
        try:
            if before is None:
                before = transform.init_group(grads)
            link = links[0]
            is_watched = not (link.trusted or link.is_tried)
            with link.watched(grads[0].device) if is_watched else nullcontext():
                results, state = transform.update_group(grads, before, contexts)
                results = list(results)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            where = f"{len(grads)} sites, step {self.controller.step}"
            error.add_note(f"while {links[0].label} acted on {where}")
            raise
        if self.controller.needs_context:
            for context in contexts:
                context.value = context.gradient = context.examples = None
        if checks:  # not again for a transform of gradsurg, whose results keep the shapes
            results = [
                hook.check_result(link, grad, version, result, hook.value(), state)
                for hook, link, grad, version, result in zip(
                    hooks, links, grads, versions, results, strict=True
                )
            ]
        if state:
            self._check_members(links)
            states[key] = _chosen(fires, state, before)
            if "skip" in transform.needs:
                self._skips = bool(states[key][SKIPPED] > before[SKIPPED])
        if fires is self._all_fire:
            return results
        return [
            torch.where(fired, result, grad)
            if isinstance(fired, Tensor) and result is not grad
            else result
            for fired, result, grad in zip(fires, results, grads, strict=True)
        ]

    def _check_members(self, links: Sequence[BoundTransform]) -> None:
        """Raise RuntimeError if the sites differ from those that the group's state was made for."""
        sites = [link.context.site for link in links]
        first = self._members.setdefault(links[0].label, sites)
        if sites != first:
            raise RuntimeError(
                f"{links[0].label}: {links[0].transform!r} keeps a state of its group, whose "
                f"members must stay the same: at first {', '.join(first)}, now {', '.join(sites)}"
            )


def _chosen(
    fires: list[bool | Tensor], new: TransformState, before: TransformState
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
