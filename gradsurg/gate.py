"""The one wrapper around every transform: checks, state, measuring, and the error's context."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from gradsurg.effects import Effects
from gradsurg.ledger import Entry
from gradsurg.sites.base import SiteGate
from gradsurg.transforms.base import Context, GroupTransform, State, Stateless, Transform
from gradsurg.triggers import Trigger

ERRORS = Exception  # whatever a user's transform raises: it gets a note and is raised again
UNBORN: State = {}  # the state of a site that has met no gradient yet


class Operation:
    """One attached intervention: what its gates share. Its flags are set once a step."""

    __slots__ = (
        "effects",
        "firing",
        "idle",
        "links",
        "needs_value",
        "on",
        "ready",
        "sampling",
        "seed",
        "shadow",
        "stateless",
        "states",
        "step",
        "stepping",
        "trigger",
    )

    def __init__(
        self,
        links: Sequence[tuple[str, Transform]],
        trigger: Trigger,
        effects: Effects,
        states: dict[str, State],
        seed: int,
        shadow: bool,
        stepping: bool,
    ) -> None:
        self.links = links
        self.trigger = trigger
        self.effects = effects
        self.states = states
        self.seed = seed
        self.shadow = shadow
        self.stepping = stepping
        self.needs_value = any(link.needs_value for _, link in links)
        self.stateless = all(isinstance(link, Stateless) for _, link in links)
        self.on = True

    def begin(self, step: int) -> None:
        """A step begins: decide for all sites whether the trigger fires and effects are sampled."""
        self.step = step
        self.firing = self.trigger.fires(step)
        self.sampling = self.effects.sampling
        # A shadowed transform without state leaves no trace in a step that is not measured.
        self.idle = self.shadow and not self.sampling and self.stateless
        self.ready = False

    def ask(self, device: str) -> bool:
        """Whether the backward runs under autocast. If not, the short way is open for this step;
        where no steps are counted it is asked anew each time.
        """
        autocast = is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.ready = self.stepping and not autocast
        return autocast

    def retire(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.on = self.ready = False


class Link:
    """One transform at one site, with its state there."""

    __slots__ = (
        "apply",
        "context",
        "key",
        "label",
        "slot",
        "state",
        "states",
        "transform",
        "update",
    )

    def __init__(
        self, label: str, transform: Transform, operation: Operation, entry: Entry
    ) -> None:
        self.label = label
        self.transform = transform
        self.apply = transform.apply if isinstance(transform, Stateless) else None
        self.update = transform.update
        self.key = f"{label}/{entry.site}"
        self.slot = operation.effects.slot(label, entry)
        self.states = operation.states
        self.state = operation.states.get(self.key, UNBORN)
        self.context = Context(self.key, operation.step, seed=operation.seed)

    def keep(self, state: State) -> None:
        """Take over the next state; under create_graph it must not hold on to the graph."""
        if any(tensor.requires_grad for tensor in state.values()):
            state = {name: tensor.detach() for name, tensor in state.items()}
        self.state = state
        if state:
            self.states[self.key] = state


class Gate:
    """One intervention at one site. `hook` takes a gradient and gives the new one, or None."""

    __slots__ = (
        "_contexts",
        "_mark",
        "_plain",
        "_value",
        "entry",
        "hook",
        "links",
        "operation",
    )

    def __init__(
        self, operation: Operation, entry: Entry, value: Callable[[], Tensor | None] | None
    ) -> None:
        self.operation = operation
        self.entry = entry
        self.links = [Link(label, link, operation, entry) for label, link in operation.links]
        self._contexts = [link.context for link in self.links]
        self._value = value
        self._plain = False  # until the first gradient has shown that the short way will do
        self._mark = entry.fired
        self.hook = self._hook()

    def begin(self, step: int) -> int:
        """A step begins: transforms see its number. How many gradients passed in the last one."""
        fired = self.entry.fired
        passed = fired - self._mark
        self._mark = fired
        for context in self._contexts:
            context.step = step
            context.call = 0
        return passed

    def _hook(self) -> SiteGate:
        # A closure: called from autograd it costs half of what a method of an instance does.
        operation, entry, links = self.operation, self.entry, self.links
        effects = operation.effects

        def hook(grad: Tensor | None, value: Tensor | None = None) -> Tensor | None:
            if grad is None:
                return None
            if not operation.ready or not self._plain:
                return self._slow(grad, value)
            entry.calls += 1
            entry.fired += 1
            result = grad
            for link in links:
                before = result
                context = link.context
                try:
                    if link.apply is not None:
                        result = link.apply(before, context)
                    else:
                        result, state = link.update(before, link.state, context)
                        link.keep(state)
                except ERRORS as error:
                    error.add_note(self._where(link))
                    raise
                if (
                    not isinstance(result, Tensor)
                    or result.shape != before.shape
                    or result.dtype is not before.dtype
                ):
                    raise self._unfit(link, before, result)
                if operation.sampling:
                    effects.add(link.slot, before, result)
                context.call += 1
            return None if result is grad or operation.shadow else result

        return hook

    def _slow(self, grad: Tensor, value: Tensor | None) -> Tensor | None:
        """As `hook`, with all questions asked and all checks made."""
        operation = self.operation
        if not operation.on:
            return None
        self.entry.calls += 1
        if not operation.firing:
            return None
        self.entry.fired += 1
        if operation.idle:
            return None
        self.check_dense(grad)
        if value is None and self._value is not None:
            value = self._value()
        device = grad.device.type
        with torch.autocast(device, enabled=False) if operation.ask(device) else nullcontext():
            result = grad
            for link in self.links:
                before = result
                result = self.apply(link, before, value)
                if operation.sampling:
                    operation.effects.add(link.slot, before, result)
        self._plain = not operation.needs_value
        return None if result is grad or operation.shadow else result

    def apply(self, link: Link, grad: Tensor, value: Tensor | None) -> Tensor:
        """Apply one link, from its first state on, and check its result in full."""
        context, version = link.context, grad._version
        context.value = value if self.operation.needs_value else None
        try:
            if link.state is UNBORN:
                link.state = link.transform.init(grad)
            result, state = link.update(grad, link.state, context)
        except ERRORS as error:
            error.add_note(self._where(link))
            raise
        if (
            not isinstance(result, Tensor)
            or result.shape != grad.shape
            or result.dtype is not grad.dtype
            or result.device != grad.device
            or result.layout is not grad.layout
        ):
            raise self._unfit(link, grad, result)
        self._check_pure(link, grad, version, result, value)
        link.keep(state)
        context.value = None
        context.call += 1
        return result

    def check_dense(self, grad: Tensor) -> None:
        """Refuse what no transform can take."""
        if grad.layout is not torch.strided or grad.is_complex():
            raise TypeError(
                f"site '{self.entry.site}': transforms take dense real gradients, "
                f"found {grad.dtype} with layout {grad.layout}"
            )

    def value(self) -> Tensor | None:
        """The tensor whose gradient passes here, if the site has one."""
        return self._value() if self._value is not None else None

    def _check_pure(
        self, link: Link, grad: Tensor, version: int, result: Tensor, value: Tensor | None
    ) -> None:
        self.check_untouched(link, grad, version)
        if value is not None and _shares(result, value):
            raise RuntimeError(
                f"{link.label}: returned the storage of the value at site '{self.entry.site}', "
                "which would then be the gradient too. Return a clone."
            )

    def check_untouched(self, link: Link, grad: Tensor, version: int) -> None:
        """Refuse a transform that has written to its gradient, which was at `version` before."""
        if grad._version != version:
            raise RuntimeError(
                f"{link.label}: changed the gradient in place at site '{self.entry.site}', where "
                "other branches may read it. Return a new tensor."
            )

    def _where(self, link: Link) -> str:
        return f"while {link.label} acted at site '{self.entry.site}', step {self.operation.step}"

    def _unfit(self, link: Link, before: Tensor, after: object) -> TypeError:
        return TypeError(
            f"{link.label}: {link.transform!r} must return a tensor like the gradient. At site "
            f"'{self.entry.site}', step {self.operation.step}, the gradient is {_kind(before)}, "
            f"found {_kind(after)}."
        )


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
        firing = operation.firing
        for gate in gates:
            gate.entry.calls += 1
            gate.entry.fired += firing
        if not present or not firing or operation.idle:
            return grads
        device = present[0].device.type
        with torch.autocast(device, enabled=False) if operation.ask(device) else nullcontext():
            results = self._operate(gates, present)
        if operation.sampling:
            operation.effects.flush()  # before the optimizer can write to them
        if operation.shadow:
            return grads
        if len(present) == len(grads):
            return results
        new = iter(results)
        return [None if grad is None else next(new) for grad in grads]

    def _operate(self, gates: Sequence[Gate], grads: list[Tensor]) -> list[Tensor]:
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
                triples = zip(gates, links, befores, strict=True)
                grads = [gate.apply(link, grad, gate.value()) for gate, link, grad in triples]
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
                raise gates[index]._unfit(links[index], grad, result)
        for index, version in enumerate(versions):
            gates[index].check_untouched(links[index], grads[index], version)
        if state:
            states[key] = state
        return results


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def _shares(result: Tensor, value: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0
