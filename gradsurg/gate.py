"""The one wrapper around every transform: checks, state, measuring, and the error's context."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsurg.effects import Effects
from gradsurg.ledger import Entry
from gradsurg.transforms.base import Context, GroupTransform, State, Transform
from gradsurg.triggers import Trigger

ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Clock:
    """`step` counts optimizer steps done; `on` goes false for good when the block is left."""

    __slots__ = ("on", "step")

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.on = True


class Operation:
    """One attached intervention: what all its gates share."""

    def __init__(
        self,
        links: Sequence[tuple[str, Transform]],
        trigger: Trigger,
        clock: Clock,
        effects: Effects,
        states: dict[str, State],
        seed: int,
        shadow: bool,
    ) -> None:
        self.links = links
        self.trigger = trigger
        self.clock = clock
        self.effects = effects
        self.states = states
        self.seed = seed
        self.shadow = shadow
        self.needs_value = any(link.needs_value for _, link in links)
        self.firing = trigger.fires(clock.step)

    def tick(self) -> None:
        """The clock moved on: decide once for all sites whether the trigger fires."""
        self.firing = self.trigger.fires(self.clock.step)


class Gate:
    """One intervention at one site: called by a hook with the gradient, gives the new one or None."""

    __slots__ = ("_call", "_links", "_passing", "_seen", "_step", "_value", "entry", "operation")

    def __init__(
        self, operation: Operation, entry: Entry, value: Callable[[], Tensor | None] | None
    ) -> None:
        self.operation = operation
        self.entry = entry
        self._value = value
        self._passing: Tensor | None = None
        self._call = 0
        self._step = -1
        self._seen = False
        self._links = [
            (label, link, f"{label}/{entry.site}", operation.effects.slot(label, entry))
            for label, link in operation.links
        ]

    @property
    def calls_in_step(self) -> int:
        """How many gradients have passed in the step at hand."""
        return self._call + 1 if self._step == self.operation.clock.step else 0

    def __call__(self, grad: Tensor | None, value: Tensor | None = None) -> Tensor | None:
        """`value` is the tensor whose gradient this is, where it is another one at each call."""
        operation = self.operation
        if grad is None or not operation.clock.on:
            return None
        self.entry.calls += 1
        if not operation.firing:
            return None
        self._count(grad)
        self._passing = value
        if torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                result = self._operate(grad)
        else:
            result = self._operate(grad)
        self._passing = None
        return None if result is grad or operation.shadow else result

    def _count(self, grad: Tensor) -> None:
        """A gradient passes: the call index starts anew with each step."""
        step = self.operation.clock.step
        self.entry.fired += 1
        self._call = self._call + 1 if step == self._step else 0
        self._step = step
        if not self._seen and (grad.layout is not torch.strided or grad.is_complex()):
            raise TypeError(
                f"site '{self.entry.site}': transforms take dense real gradients, "
                f"found {grad.dtype} with layout {grad.layout}"
            )

    def _operate(self, grad: Tensor) -> Tensor:
        effects = self.operation.effects
        for index, (label, link, _, slot) in enumerate(self._links):
            before = grad
            grad = self._update(index, before)
            _check_like(label, link, self.entry.site, self._step, before, grad)
            if effects.sampling:
                effects.add(slot, before, grad)
        self._seen = True
        return grad

    def _update(self, index: int, grad: Tensor) -> Tensor:
        label, link, key, _ = self._links[index]
        states = self.operation.states
        state = states.get(key)
        if state is None:
            state = link.init(grad)
        version = -1 if self._seen else grad._version
        try:
            result, state = link.update(grad, state, self._context(key))
        except ERRORS as error:
            error.add_note(f"while {label} acted at site '{self.entry.site}', step {self._step}")
            raise
        if not self._seen:
            self._check_pure(label, grad, version, result)
        if state:
            states[key] = _detached(state) if result.requires_grad else state
        return result

    def _context(self, key: str) -> Context:
        operation = self.operation
        value = self._current_value() if operation.needs_value else None
        return Context(key, self._step, value, operation.seed, self._call)

    def _current_value(self) -> Tensor | None:
        if self._passing is not None or self._value is None:
            return self._passing
        return self._value()

    def _check_pure(self, label: str, grad: Tensor, version: int, result: object) -> None:
        """On the first gradient of a site: nothing was written to, and nothing shared comes back."""
        if grad._version != version:
            raise RuntimeError(
                f"{label}: changed the gradient in place at site '{self.entry.site}', where other "
                "branches may read it. Return a new tensor."
            )
        value = self._current_value()
        if value is not None and isinstance(result, Tensor) and _shares(result, value):
            raise RuntimeError(
                f"{label}: returned the storage of the value at site '{self.entry.site}', which "
                "would then be the gradient too. Return a clone."
            )


class GroupGate:
    """One intervention at all its sites together, in the order in which the gates were made."""

    def __init__(self, operation: Operation, gates: Sequence[Gate]) -> None:
        self.operation = operation
        self.gates = gates

    def __call__(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        operation = self.operation
        present = [
            (gate, grad) for gate, grad in zip(self.gates, grads, strict=True) if grad is not None
        ]
        if not operation.clock.on or not present:
            return grads
        gates = [gate for gate, _ in present]
        for gate in gates:
            gate.entry.calls += 1
        if not operation.firing:
            return grads
        results = self._operate(gates, [grad for _, grad in present])
        if operation.shadow:
            return grads
        new = iter(results)
        return [None if grad is None else next(new) for grad in grads]

    def _operate(self, gates: Sequence[Gate], grads: list[Tensor]) -> list[Tensor]:
        effects = self.operation.effects
        for gate, grad in zip(gates, grads, strict=True):
            gate._count(grad)
        for index, (label, link) in enumerate(self.operation.links):
            befores = grads
            if isinstance(link, GroupTransform) and link.scope == "group":
                grads = self._update(label, link, index, gates, befores)
            else:
                grads = [
                    gate._update(index, grad) for gate, grad in zip(gates, befores, strict=True)
                ]
            for gate, before, after in zip(gates, befores, grads, strict=True):
                if not gate._seen:
                    _check_like(label, link, gate.entry.site, gate._step, before, after)
                if effects.sampling:
                    effects.add(gate._links[index][3], before, after)
        for gate in gates:
            gate._seen = True
        return grads

    def _update(
        self,
        label: str,
        link: GroupTransform,
        index: int,
        gates: Sequence[Gate],
        grads: list[Tensor],
    ) -> list[Tensor]:
        states = self.operation.states
        key = f"{label}/group"
        state = states.get(key)
        if state is None:
            state = link.init_group(grads)
        contexts = [gate._context(gate._links[index][2]) for gate in gates]
        try:
            results, state = link.update_group(grads, state, contexts)
        except ERRORS as error:
            error.add_note(f"while {label} acted on {len(grads)} sites, step {contexts[0].step}")
            raise
        if state:
            states[key] = state
        return results


def _check_like(
    label: str, link: Transform, site: str, step: int, before: Tensor, after: Tensor
) -> None:
    if (
        isinstance(after, Tensor)
        and after.shape == before.shape
        and after.dtype is before.dtype
        and after.device == before.device
    ):
        return
    found = type(after).__name__
    if isinstance(after, Tensor):
        found = f"{list(after.shape)} {after.dtype} on {after.device}"
    raise TypeError(
        f"{label}: {link!r} must return a tensor like the gradient. At site '{site}', step {step}, "
        f"the gradient is {list(before.shape)} {before.dtype} on {before.device}, found {found}."
    )


def _shares(result: Tensor, value: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0


def _detached(state: State) -> State:
    return {key: value.detach() for key, value in state.items()}
