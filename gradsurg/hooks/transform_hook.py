"""The one wrapper around every transform at one site: checks, state, measuring, errors."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from gradsurg.effects.ledger import Entry
from gradsurg.hooks.bound_transform import UNBORN, UNCOUNTED, BoundTransform
from gradsurg.hooks.controller import ERRORS, HookController
from gradsurg.hooks.rules import alike, kind_of, same, shares, takes, version_of
from gradsurg.sites.base import SiteHook
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import TransformContext, TransformState


class TransformHook:
    """One intervention at one site. `hook` takes a gradient and gives the new one, or None."""

    __slots__ = (
        "_one",
        "_value",
        "at_once",
        "entry",
        "hook",
        "links",
        "operation",
        "passed",
    )

    def __init__(
        self, operation: HookController, entry: Entry, value: Callable[[], Tensor | None] | None
    ) -> None:
        self.operation = operation
        self.entry = entry
        self._value = value
        self.at_once = operation.at_once  # whether what was measured has to be summed at once
        self.links = [
            BoundTransform(label, link, operation, entry) for label, link in operation.links
        ]
        self.passed: object = False  # until a gradient has shown that the short way will do
        self._one = self._alone
        self.hook = self._hook_one() if self._one else self._hook()

    @property
    def _alone(self) -> bool:
        """Whether it has but one transform, that keeps no state and is one of gradsurg's own."""
        link = self.links[0]
        return len(self.links) == 1 and link.apply is not None and link.known

    def renew(self) -> None:
        """Its operation was set anew: a link of the same class keeps its state."""
        for link, (_, transform) in zip(self.links, self.operation.links, strict=True):
            if type(link.transform) is not type(transform):
                link.state = link.states.get(link.key, UNBORN)
            link.take(transform)

    def refresh(self, states: dict[str, TransformState]) -> None:
        """States were loaded: take up those of this site, and count its gradients anew."""
        for link in self.links:
            link.state = states.get(link.key, UNBORN)
            link.context.step = UNCOUNTED

    # Both hooks are closures: called from autograd one costs half of what a method does.

    def _hook(self) -> SiteHook:
        operation, entry, effects = self.operation, self.entry, self.operation.effects

        def hook(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
        ) -> Tensor | None:
            if grad is None:
                return None
            if self.passed is not operation.ready and not self.opens():
                return self._slow(grad, value, entering)
            entry.fired += 1
            result = grad
            for link in self.links:
                before = result
                result = self.again(link, before)
                if operation.sampling:
                    effects.add(link.slot, before, result)
            return None if result is grad or operation.shadow else result

        return hook

    def _hook_one(self) -> SiteHook:
        operation, entry, effects = self.operation, self.entry, self.operation.effects
        clock, link, context = operation.clock, self.links[0], self.links[0].context

        def hook(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
        ) -> Tensor | None:
            if grad is None:
                return None
            if self.passed is not operation.ready and not self.opens():
                return self._slow(grad, value, entering)
            entry.fired += 1
            if context.step != clock.step:
                context.step, context.call = clock.step, 0
            else:
                operation.recur(context)
            apply = link.apply
            assert apply is not None
            try:
                result = apply(grad, context)
            except ERRORS as error:
                error.add_note(self._where(link))
                raise
            if not link.keeps_shape and not alike(result, grad):
                raise self.unfit(link, grad, result)
            if operation.sampling:
                effects.add(link.slot, grad, result)
            return None if result is grad or operation.shadow else result

        return hook

    def opens(self) -> bool:
        """Whether the short way is open, and what passes here has shown that it will do."""
        return self.passed is self.operation.opened and self.operation.opens()

    def again(self, link: BoundTransform, grad: Tensor) -> Tensor:
        """Apply one link by the short way."""
        operation, context, trusted, apply = self.operation, link.context, link.known, link.apply
        if context.step != operation.clock.step:
            context.step, context.call = operation.clock.step, 0
        else:
            operation.recur(context)
        version = 0 if trusted else version_of(grad)
        try:
            if apply is not None:
                result = apply(grad, context)
            else:
                result, state = link.update(grad, link.state, context)
                link.keep(state)
        except ERRORS as error:
            error.add_note(self._where(link))
            raise
        if not link.keeps_shape and not alike(result, grad):
            raise self.unfit(link, grad, result)
        if not trusted:
            self.check_pure(link, grad, version, result, self.value())
            result = self.apart(link, grad, result, link.state)
        return result

    def _slow(
        self, grad: Tensor, value: Tensor | None, entering: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        """As `hook`, with all questions asked and all checks made."""
        operation = self.operation
        if operation.passes:
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
        is_autocast = operation.is_autocast(device)
        with torch.autocast(device, enabled=False) if is_autocast else nullcontext():
            result = grad
            for link in self.links:
                before = result
                link.context.entering = entering if operation.needs_entering else ()
                result = self.apply(link, before, value, on_device)
                link.context.entering = ()
                if operation.sampling:
                    operation.effects.add(link.slot, before, result)
        if operation.sampling and self.at_once:
            operation.effects.flush()
        # Set anew it may have become more than the hook for a lone transform can do.
        self.passed = operation.opened if self._alone or not self._one else False
        return None if result is grad or operation.shadow else result

    def apply(
        self, link: BoundTransform, grad: Tensor, value: Tensor | None, fires: Tensor | None = None
    ) -> Tensor:
        """Apply one link, from its first state on, and check its result in full.

        `fires`, where the device decides it, chooses between the result and the gradient.
        """
        context, version = self.count_call(link), version_of(grad)
        context.value = value if self.operation.needs_value else None
        try:
            if link.state is UNBORN:
                link.state = link.transform.init(grad)
            result, state = link.update(grad, link.state, context)
        except ERRORS as error:
            error.add_note(self._where(link))
            raise
        if not same(result, grad):
            raise self.unfit(link, grad, result)
        self.check_pure(link, grad, version, result, value)
        result = self.apart(link, grad, result, state)
        link.keep(state, fires)
        context.value = None
        return result if fires is None or result is grad else torch.where(fires, result, grad)

    def count_call(self, link: BoundTransform) -> TransformContext:
        """Number the gradient at hand among those of this step."""
        context, operation = link.context, self.operation
        if context.step != operation.clock.step:
            context.step, context.call = operation.clock.step, 0
        else:
            operation.recur(context)
        return context

    def count(self, fires: bool | Tensor) -> bool:
        """Count a gradient; whether the transform is to be called. What has no number to tell, as
        on the meta device or inside vmap, counts as one that it fires at.
        """
        told = not isinstance(fires, Tensor) or not (fires.is_meta or autograd.is_batched(fires))
        return self.entry.count(fires if told else True)

    def check_dense(self, grad: Tensor) -> None:
        """Refuse what no transform can take."""
        if not takes(grad):
            raise TypeError(
                f"site '{self.entry.site}': transforms take dense real gradients, "
                f"found {grad.dtype} with layout {grad.layout}"
            )

    def value(self) -> Tensor | None:
        """The tensor whose gradient passes here, if the site has one."""
        return self._value() if self._value is not None else None

    def apart(
        self, link: BoundTransform, grad: Tensor, result: Tensor, state: TransformState
    ) -> Tensor:
        """The result, in memory of its own: the optimizer, or whoever gets it, may write to it.

        What a transform returns may be what it remembers, as a running mean is.
        """
        if link.known or result is grad:
            return result
        if self.operation.rests or any(shares(result, own) for own in state.values()):
            return result.clone()
        return result

    def check_pure(
        self, link: BoundTransform, grad: Tensor, version: int, result: Tensor, value: Tensor | None
    ) -> None:
        """Refuse a transform that has written to its gradient or has returned the value."""
        self.check_untouched(link, grad, version)
        if value is not None and shares(result, value):
            raise RuntimeError(
                f"{link.label}: returned the storage of the value at site '{self.entry.site}', "
                "which would then be the gradient too. Return a clone."
            )

    def check_untouched(self, link: BoundTransform, grad: Tensor, version: int) -> None:
        """Refuse a transform that has written to its gradient, which was at `version` before."""
        if version_of(grad) != version:
            raise RuntimeError(
                f"{link.label}: changed the gradient in place at site '{self.entry.site}', where "
                "other branches may read it. Return a new tensor."
            )

    def _where(self, link: BoundTransform) -> str:
        return f"while {link.label} acted at site '{self.entry.site}', step {self.operation.step}"

    def unfit(self, link: BoundTransform, before: Tensor, after: object) -> TypeError:
        """The error for a result that is not like the gradient."""
        return TypeError(
            f"{link.label}: {link.transform!r} must return a tensor like the gradient. At site "
            f"'{self.entry.site}', step {self.operation.step}, the gradient is {kind_of(before)}, "
            f"found {kind_of(after)}."
        )
