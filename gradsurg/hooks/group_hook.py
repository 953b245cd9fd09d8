"""The wrapper around a transform at all its sites together."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from gradsurg.hooks.bound_transform import BoundTransform
from gradsurg.hooks.controller import ERRORS, HookController
from gradsurg.hooks.rules import alike
from gradsurg.hooks.transform_hook import TransformHook
from gradsurg.transforms.base import GroupTransform, TransformState


class GroupHook:
    """One intervention at all its sites together, in the order of its gates."""

    def __init__(self, operation: HookController, gates: Sequence[TransformHook]) -> None:
        self.operation = operation
        self.gates = gates
        self._seen = False
        self._members: dict[str, list[str]] = {}
        for gate in gates:
            gate.at_once = False  # but when all have passed
        self._all = list(range(len(gates)))
        self._always: list[bool | Tensor] = [True] * len(gates)

    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        operation = self.operation
        if not operation.on or operation.asleep:
            return grads
        results = self._together(grads) if operation.grouped else self._one_by_one(grads)
        if operation.sampling:
            operation.effects.flush()  # before the optimizer can write to them
        return results

    def _one_by_one(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Each by its own gate, for transforms that take one tensor at a time."""
        results = []
        for gate, grad in zip(self.gates, grads, strict=True):
            result = gate.hook(grad)
            results.append(grad if result is None else result)
        return results

    def _together(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        operation = self.operation
        present = [grad for grad in grads if grad is not None]
        acting, fires, gates = self._all, self._always, self.gates
        if operation.firing is True and len(present) == len(grads):
            for gate in gates:
                gate.entry.fired += 1
        else:
            acting, fires = self._acting(grads)
            gates = [self.gates[index] for index in acting]
            present = [grad for index in acting if (grad := grads[index]) is not None]
        if not acting or operation.idle:
            return grads
        device = present[0].device.type
        is_autocast = operation.is_autocast(device)
        with torch.autocast(device, enabled=False) if is_autocast else nullcontext():
            results = self._operate(gates, present, fires)
        if operation.shadow:
            return grads
        if len(results) == len(grads):
            return results
        new = dict(zip(acting, results, strict=True))
        return [new.get(index, grad) for index, grad in enumerate(grads)]

    def _acting(self, grads: Sequence[Tensor | None]) -> tuple[list[int], list[bool | Tensor]]:
        """Which gradients there are and the trigger lets be acted on, and what it says of each."""
        acting: list[int] = []
        fires: list[bool | Tensor] = []
        for index, (gate, grad) in enumerate(zip(self.gates, grads, strict=True)):
            if grad is not None:
                one = self._fires(gate, grad)
                if gate.count(one):  # where the host says no, a gradient is not of the group
                    acting.append(index)
                    fires.append(one)
        return acting, fires

    def _fires(self, gate: TransformHook, grad: Tensor) -> bool | Tensor:
        operation = self.operation
        if operation.firing is not None:
            return operation.firing
        return operation.fires(gate.entry.site, grad, gate.value())

    def _operate(
        self, gates: Sequence[TransformHook], grads: list[Tensor], fires: list[bool | Tensor]
    ) -> list[Tensor]:
        operation = self.operation
        if not self._seen:
            for gate, grad in zip(gates, grads, strict=True):
                gate.check_dense(grad)
        for index, (_, transform) in enumerate(operation.links):
            befores = grads
            links = [gate.links[index] for gate in gates]
            if isinstance(transform, GroupTransform) and transform.scope == "group":
                grads = self._update(transform, gates, links, befores, fires)
            else:
                grads = [
                    gate.apply(link, grad, gate.value(), one if isinstance(one, Tensor) else None)
                    for gate, link, grad, one in zip(gates, links, befores, fires, strict=True)
                ]
            if operation.sampling:
                for link, before, after in zip(links, befores, grads, strict=True):
                    operation.effects.add(link.slot, before, after)
        self._seen = True
        return grads

    def _update(
        self,
        transform: GroupTransform,
        gates: Sequence[TransformHook],
        links: Sequence[BoundTransform],
        grads: list[Tensor],
        fires: list[bool | Tensor],
    ) -> list[Tensor]:
        states = self.operation.states
        key = f"{links[0].label}/group"
        before = states.get(key)
        if before:
            self._check_members(links)
        contexts = [gate.count_call(link) for gate, link in zip(gates, links, strict=True)]
        # One of gradsurg's own keeps the rules at every gradient.
        trusted = self._seen and links[0].known
        versions = [] if trusted else [grad._version for grad in grads]
        if self.operation.needs_value:
            for gate, context in zip(gates, contexts, strict=True):
                context.value = gate.value()
        try:
            if before is None:
                before = transform.init_group(grads)
            results, state = transform.update_group(grads, before, contexts)
        except ERRORS as error:
            step = self.operation.step
            error.add_note(f"while {links[0].label} acted on {len(grads)} sites, step {step}")
            raise
        for context in contexts:
            context.value = None
        _check(gates, links, grads, results, versions)
        results = [
            gate.apart(link, grad, result, state)
            for gate, link, grad, result in zip(gates, links, grads, results, strict=True)
        ]
        if state:
            self._check_members(links)
            states[key] = _chosen(fires, state, before)
        if fires is self._always:
            return results
        return [
            torch.where(one, result, grad)
            if isinstance(one, Tensor) and result is not grad
            else result
            for one, result, grad in zip(fires, results, grads, strict=True)
        ]

    def _check_members(self, links: Sequence[BoundTransform]) -> None:
        """A state is of a group in its order: with other members it would be that of others."""
        sites = [link.context.site for link in links]
        first = self._members.setdefault(links[0].label, sites)
        if sites != first:
            raise RuntimeError(
                f"{links[0].label}: {links[0].transform!r} keeps a state of its group, whose "
                f"members must stay the same: at first {', '.join(first)}, now {', '.join(sites)}"
            )


def _check(
    gates: Sequence[TransformHook],
    links: Sequence[BoundTransform],
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    versions: Sequence[int],
) -> None:
    """Refuse results that are not like the gradients and, where `versions` tells how they were
    before, a transform that has written to them.
    """
    for gate, link, grad, result in zip(gates, links, grads, results, strict=True):
        if not alike(result, grad):
            raise gate.unfit(link, grad, result)
    for index, version in enumerate(versions):
        gate, link, grad = gates[index], links[index], grads[index]
        gate.check_pure(link, grad, version, results[index], gate.value())


def _chosen(
    fires: list[bool | Tensor], new: TransformState, before: TransformState
) -> TransformState:
    """The next state of a group; where the device decides, the old one unless it acts at all."""
    asked = [one for one in fires if isinstance(one, Tensor)]
    if len(asked) < len(fires):
        return new
    device = asked[0].device
    acts = torch.stack([one.to(device, non_blocking=True) for one in asked]).any()
    return {name: torch.where(acts.to(own.device), own, before[name]) for name, own in new.items()}
