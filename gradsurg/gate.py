"""The one wrapper around every transform: checks, state, measuring, and the error's context."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from gradsurg import engine
from gradsurg.effects import Effects
from gradsurg.ledger import Entry
from gradsurg.sites.base import SiteGate
from gradsurg.transforms.base import Context, Function, State, Stateless, Transform
from gradsurg.triggers.base import Clock, Fires, Moment, Sourced, Trigger

ERRORS = Exception  # whatever a user's transform raises: it gets a note and is raised again
UNBORN: State = {}  # the state of a site that has met no gradient yet


class Operation:
    """One attached intervention: what its gates share. Its flags are set once a step."""

    __slots__ = (
        "at_once",
        "clock",
        "effects",
        "firing",
        "idle",
        "label",
        "links",
        "looks",
        "needs_value",
        "on",
        "ready",
        "rests",
        "sampling",
        "seed",
        "shadow",
        "stateless",
        "states",
        "stepping",
        "trigger",
    )

    def __init__(
        self,
        links: Sequence[tuple[str, Transform]],
        trigger: Trigger,
        effects: Effects,
        states: dict[str, State],
        clock: Clock,
        seed: int = 0,
        shadow: bool = False,
        stepping: bool = False,
        at_once: bool = False,
        rests: bool = False,
    ) -> None:
        self.label = " -> ".join(label for label, _ in links)
        self.effects = effects
        self.states = states
        self.clock = clock
        self.seed = seed
        self.shadow = shadow
        self.stepping = stepping
        # What passes outside a backward may be written to before a backward ends: measure it now.
        self.at_once = at_once
        # What is put into `.grad` or handed out may be written to: nobody else may hold it.
        self.rests = rests
        self.on = True
        self.set(links, trigger)

    def set(self, links: Sequence[tuple[str, Transform]], trigger: Trigger) -> None:
        """What acts and when, now or anew."""
        self.links = links
        self.trigger = trigger
        sources = {part.source for part in trigger.parts if isinstance(part, Sourced)}
        self.looks = "grad" in sources
        self.needs_value = "value" in sources or any(link.needs_value for _, link in links)
        self.stateless = all(isinstance(link, Stateless) for _, link in links)
        self.begin()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    def begin(self) -> None:
        """A step begins: decide for all sites whether the trigger fires and effects are sampled.

        A trigger that has to see the site or its gradient says None: it is asked there.
        """
        fires = self._ask(Moment(self.clock, self.seed, self.label))
        self.firing = fires if isinstance(fires, bool) else None
        self.sampling = self.effects.sampling
        # A shadowed transform without state leaves no trace in a step that is not measured.
        self.idle = self.shadow and not self.sampling and self.stateless
        self.ready = False

    def ask(self, device: str) -> bool:
        """Whether the backward runs under autocast. If not, the short way is open for this step;
        where no steps are counted it is asked anew each time.
        """
        autocast = is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.ready = self.stepping and not autocast and self.firing is True and not self.shadow
        return autocast

    def fires(self, site: str, grad: Tensor, value: Tensor | None) -> bool | Tensor:
        """Whether the trigger fires at this gradient."""
        key = f"{self.label}/{site}/when"
        moment = Moment(self.clock, self.seed, self.label, site, grad, value)
        moment.state = dict(self.states.get(key, {}))
        fires = self._ask(moment)
        if fires is None:
            raise TypeError(f"{self.trigger!r}: fires() said None where the gradient was at hand")
        if moment.state:
            if any(engine.is_batched(tensor) for tensor in moment.state.values()):
                raise RuntimeError(
                    f"{self.trigger!r} remembers one thing for each site, and inside vmap the site "
                    f"'{site}' has many gradients at once"
                )
            self.states[key] = {name: own.detach() for name, own in moment.state.items()}
        if isinstance(fires, Tensor) and fires.device != grad.device:
            return fires.to(grad.device, non_blocking=True)
        return fires

    def _ask(self, moment: Moment) -> Fires:
        """What the trigger says, if it may say that."""
        try:
            fires = self.trigger.fires(moment)
        except ERRORS as error:
            where = f"at site '{moment.site}'" if moment.site else "before a gradient was there"
            error.add_note(f"while {self.trigger!r} was asked {where}, step {self.step}")
            raise
        if isinstance(fires, Tensor):
            found = f"{fires.dtype} of shape {list(fires.shape)}"
            fits = fires.dtype is torch.bool and not fires.ndim
        else:
            found, fits = repr(fires), fires is None or isinstance(fires, bool)
        if not fits:
            raise TypeError(
                f"{self.trigger!r}: fires() must say True, False, None or a bool tensor of no "
                f"dimension, found {found}"
            )
        return fires

    def retire(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.on = self.ready = False


class Link:
    """One transform at one site, with its state there."""

    __slots__ = (
        "apply",
        "context",
        "keeps_shape",
        "key",
        "known",
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
        # By its laws, and its first result here was looked at in full.
        self.keeps_shape = "elementwise" in transform.laws
        self.known = known(transform)
        self.key = f"{label}/{entry.site}"
        self.slot = operation.effects.slot(label, entry)
        self.states = operation.states
        self.state = operation.states.get(self.key, UNBORN)
        self.context = Context(self.key, operation.step, seed=operation.seed)

    def keep(self, state: State, fires: Tensor | None = None) -> None:
        """Take over the next state; under create_graph it must not hold on to the graph.

        Where the device decides, the old state stays unless the trigger fires.
        """
        if fires is not None and state:
            before = self.state
            if state.keys() != before.keys():
                raise TypeError(
                    f"{self.label}: {self.transform!r} has a state of {', '.join(state)} and began "
                    f"with {', '.join(before) or 'none'}: init() must make all of it, for the "
                    "trigger may keep what was before"
                )
            state = {name: torch.where(fires, new, before[name]) for name, new in state.items()}
        if any(tensor.requires_grad for tensor in state.values()):
            state = {name: tensor.detach() for name, tensor in state.items()}
        self.state = state
        if state:
            self.states[self.key] = state


class Gate:
    """One intervention at one site. `hook` takes a gradient and gives the new one, or None."""

    __slots__ = (
        "_renewed",
        "_value",
        "contexts",
        "entry",
        "hook",
        "links",
        "operation",
        "plain",
    )

    def __init__(
        self, operation: Operation, entry: Entry, value: Callable[[], Tensor | None] | None
    ) -> None:
        self.operation = operation
        self.entry = entry
        self.links = [Link(label, link, operation, entry) for label, link in operation.links]
        self.contexts = [link.context for link in self.links]
        self._value = value
        self.plain = False  # until the first gradient has shown that the short way will do
        self._renewed = False
        self.hook = self._hook()

    def renew(self) -> None:
        """Its operation was set anew: a link of the same class keeps its state."""
        old = list(self.links)
        self.links[:] = [
            Link(label, link, self.operation, self.entry) for label, link in self.operation.links
        ]
        for new, before in zip(self.links, old, strict=True):
            if type(new.transform) is type(before.transform):
                new.state = before.state
            new.context.call = before.context.call
        self.contexts = [link.context for link in self.links]
        self.plain = False
        self._renewed = True  # the short way knows the old ones

    def refresh(self, states: dict[str, State]) -> None:
        """States were loaded: take up those of this site."""
        for link in self.links:
            link.state = states.get(link.key, UNBORN)
        self.plain = False

    def _hook(self) -> SiteGate:
        # A closure: called from autograd it costs half of what a method of an instance does, and
        # with one transform that keeps no state there is no loop.
        operation, entry, links = self.operation, self.entry, self.links
        effects = operation.effects

        def hook(grad: Tensor | None, value: Tensor | None = None) -> Tensor | None:
            if grad is None:
                return None
            if not operation.ready or not self.plain:
                return self._slow(grad, value)
            entry.fired += 1
            result = grad
            for link in links:
                before = result
                context = link.context
                version = 0 if link.known else _version(before)
                try:
                    if link.apply is not None:
                        result = link.apply(before, context)
                    else:
                        result, state = link.update(before, link.state, context)
                        link.keep(state)
                except ERRORS as error:
                    error.add_note(self._where(link))
                    raise
                if not link.keeps_shape and not _alike(result, before):
                    raise self.unfit(link, before, result)
                if not link.known:
                    self.check_pure(link, before, version, result, self.value())
                    result = self.apart(link, before, result, link.state)
                if operation.sampling:
                    effects.add(link.slot, before, result)
                context.call += 1
            return None if result is grad else result

        if len(links) > 1 or links[0].apply is None or not links[0].known:
            return hook
        apply, context, slot = links[0].apply, links[0].context, links[0].slot
        keeps_shape = links[0].keeps_shape

        def hook_one(grad: Tensor | None, value: Tensor | None = None) -> Tensor | None:
            if grad is None:
                return None
            if not operation.ready or not self.plain:
                return self._slow(grad, value)
            entry.fired += 1
            try:
                result = apply(grad, context)
            except ERRORS as error:
                error.add_note(self._where(links[0]))
                raise
            if not keeps_shape and not _alike(result, grad):
                raise self.unfit(links[0], grad, result)
            if operation.sampling:
                effects.add(slot, grad, result)
            context.call += 1
            return None if result is grad else result

        return hook_one

    def _slow(self, grad: Tensor, value: Tensor | None) -> Tensor | None:
        """As `hook`, with all questions asked and all checks made."""
        operation = self.operation
        if not operation.on:
            return None
        if operation.firing is False:
            self.entry.count(False)
            return None
        if value is None and self._value is not None:
            value = self._value()
        if operation.looks:
            self.check_dense(grad)
        fires = operation.firing or operation.fires(self.entry.site, grad, value)
        if not self.count(fires) or operation.idle:
            return None
        on_device = fires if isinstance(fires, Tensor) else None
        self.check_dense(grad)
        device = grad.device.type
        with torch.autocast(device, enabled=False) if operation.ask(device) else nullcontext():
            result = grad
            for link in self.links:
                before = result
                result = self.apply(link, before, value, on_device)
                if operation.sampling:
                    operation.effects.add(link.slot, before, result)
        if operation.sampling and operation.at_once:
            operation.effects.flush()
        self.plain = not (operation.needs_value or operation.at_once or self._renewed)
        return None if result is grad or operation.shadow else result

    def apply(
        self, link: Link, grad: Tensor, value: Tensor | None, fires: Tensor | None = None
    ) -> Tensor:
        """Apply one link, from its first state on, and check its result in full.

        `fires`, where the device decides it, chooses between the result and the gradient.
        """
        context, version = link.context, _version(grad)
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
            raise self.unfit(link, grad, result)
        self.check_pure(link, grad, version, result, value)
        result = self.apart(link, grad, result, state)
        link.keep(state, fires)
        context.value = None
        context.call += 1
        return result if fires is None or result is grad else torch.where(fires, result, grad)

    def count(self, fires: bool | Tensor) -> bool:
        """Count a gradient; whether the transform is to be called. What has no number to tell, as
        on the meta device or inside vmap, counts as one that it fires at.
        """
        told = not isinstance(fires, Tensor) or not (fires.is_meta or engine.is_batched(fires))
        return self.entry.count(fires if told else True)

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

    def apart(self, link: Link, grad: Tensor, result: Tensor, state: State) -> Tensor:
        """The result, in memory of its own: the optimizer, or whoever gets it, may write to it.

        What a transform returns may be what it remembers, as a running mean is.
        """
        if link.known or result is grad:
            return result
        if self.operation.rests or any(_shares(result, own) for own in state.values()):
            return result.clone()
        return result

    def check_pure(
        self, link: Link, grad: Tensor, version: int, result: Tensor, value: Tensor | None
    ) -> None:
        """Refuse a transform that has written to its gradient or has returned the value."""
        self.check_untouched(link, grad, version)
        if value is not None and _shares(result, value):
            raise RuntimeError(
                f"{link.label}: returned the storage of the value at site '{self.entry.site}', "
                "which would then be the gradient too. Return a clone."
            )

    def check_untouched(self, link: Link, grad: Tensor, version: int) -> None:
        """Refuse a transform that has written to its gradient, which was at `version` before."""
        if _version(grad) != version:
            raise RuntimeError(
                f"{link.label}: changed the gradient in place at site '{self.entry.site}', where "
                "other branches may read it. Return a new tensor."
            )

    def _where(self, link: Link) -> str:
        return f"while {link.label} acted at site '{self.entry.site}', step {self.operation.step}"

    def unfit(self, link: Link, before: Tensor, after: object) -> TypeError:
        """The error for a result that is not like the gradient."""
        return TypeError(
            f"{link.label}: {link.transform!r} must return a tensor like the gradient. At site "
            f"'{self.entry.site}', step {self.operation.step}, the gradient is {_kind(before)}, "
            f"found {_kind(after)}."
        )


def known(transform: Transform) -> bool:
    """Whether it is one of gradsurg's own, with all that it is made of: these keep the rules at
    every gradient. Those of others are looked at each time.
    """
    if isinstance(transform, Function) or type(transform).__module__.split(".")[0] != "gradsurg":
        return False
    fields = [own if isinstance(own, tuple) else (own,) for own in vars(transform).values()]
    return all(known(part) for own in fields for part in own if isinstance(part, Transform))


def _alike(result: object, grad: Tensor) -> bool:
    return isinstance(result, Tensor) and result.shape == grad.shape and result.dtype is grad.dtype


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def _version(tensor: Tensor) -> int:
    """How often it was written to; what inference mode has made does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _shares(result: Tensor, value: Tensor) -> bool:
    if engine.is_wrapped(result) or engine.is_wrapped(value):
        return False
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0
