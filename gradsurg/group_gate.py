"""The wrapper around a transform at all its sites together."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from gradsurg.gate import ERRORS, Gate, Link, Operation
from gradsurg.transforms.base import GroupTransform


class GroupGate:
    """One intervention at all its sites together, in the order of its gates."""

    def __init__(self, operation: Operation, gates: Sequence[Gate]) -> None:
        self.operation = operation
        self.gates = gates
        self._seen = False

    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        operation = self.operation
        if not operation.on:
            return grads
        gates, present = self.gates, [grad for grad in grads if grad is not None]
        if len(present) < len(grads):
            gates = [gate for gate, grad in zip(gates, grads, strict=True) if grad is not None]
        if operation.firing is False:
            for gate in gates:
                gate.entry.count(False)
        if not present or operation.firing is False:
            return grads
        fires = self._fires(gates, present)
        acting = [gate.entry.count(one) for gate, one in zip(gates, fires, strict=True)]
        if not any(acting) or operation.idle:
            return grads
        device = present[0].device.type
        with torch.autocast(device, enabled=False) if operation.ask(device) else nullcontext():
            results = self._operate(gates, present, fires)
        if operation.sampling:
            operation.effects.flush()  # before the optimizer can write to them
        if operation.shadow:
            return grads
        if len(present) == len(grads):
            return results
        new = iter(results)
        return [None if grad is None else next(new) for grad in grads]

    def _fires(self, gates: Sequence[Gate], grads: list[Tensor]) -> list[bool | Tensor]:
        operation = self.operation
        if operation.firing is True:
            return [True] * len(gates)
        return [
            operation.fires(gate.entry.site, grad, gate.value())
            for gate, grad in zip(gates, grads, strict=True)
        ]

    def _operate(
        self, gates: Sequence[Gate], grads: list[Tensor], fires: list[bool | Tensor]
    ) -> list[Tensor]:
        operation = self.operation
        if not self._seen:
            for gate, grad in zip(gates, grads, strict=True):
                gate.check_dense(grad)
        for index, (_, transform) in enumerate(operation.links):
            befores = grads
            links = [gate.links[index] for gate in gates]
            if isinstance(transform, GroupTransform) and transform.scope == "group":
                grads = self._update(transform, gates, links, befores)
            else:
                grads = [
                    grad
                    if one is False
                    else gate.apply(link, grad, gate.value(), None if one is True else one)
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
        gates: Sequence[Gate],
        links: Sequence[Link],
        grads: list[Tensor],
    ) -> list[Tensor]:
        states = self.operation.states
        key = f"{links[0].label}/group"
        state = states.get(key)
        contexts = [link.context for link in links]
        versions = [] if self._seen else [grad._version for grad in grads]
        if transform.needs_value:
            for gate, context in zip(gates, contexts, strict=True):
                context.value = gate.value()
        try:
            if state is None:
                state = transform.init_group(grads)
            results, state = transform.update_group(grads, state, contexts)
        except ERRORS as error:
            step = self.operation.step
            error.add_note(f"while {links[0].label} acted on {len(grads)} sites, step {step}")
            raise
        for context in contexts:
            context.value = None
            context.call += 1
        for index, (grad, result) in enumerate(zip(grads, results, strict=True)):
            if (
                not isinstance(result, Tensor)
                or result.shape != grad.shape
                or result.dtype is not grad.dtype
            ):
                raise gates[index].unfit(links[index], grad, result)
        for index, version in enumerate(versions):
            gates[index].check_untouched(links[index], grads[index], version)
        if state:
            states[key] = state
        return results
