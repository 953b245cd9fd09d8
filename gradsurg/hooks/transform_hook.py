"""Apply the transforms of one intervention at one site: checks, state, measuring, errors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeGuard

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from gradsurg.effects.ledger import Entry
from gradsurg.hooks.controller import HookController, many_at_once
from gradsurg.sites.base import AVERAGED, SiteHook
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import (
    SPARSE_RULE,
    Function,
    Stateless,
    Transform,
    TransformContext,
    TransformState,
    acts_on_values,
)

NO_STATE: TransformState = {}
"""The state of a site before its first gradient; compared by identity."""

NO_STEP = -1
"""The step of a site before its first gradient."""


class BoundTransform:
    """One transform at one site, with its state there."""

    __slots__ = (
        "apply",
        "context",
        "is_simple",
        "is_tried",
        "keeps_shape",
        "key",
        "label",
        "slot",
        "state",
        "states",
        "transform",
        "trusted",
        "update",
    )

    def __init__(
        self, label: str, transform: Transform, controller: HookController, entry: Entry
    ) -> None:
        session = controller.session
        self.label = label
        self.key = f"{label}/{entry.site}"
        self.slot = session.effects.slot(label, entry)
        self.states = session.states
        self.state = session.states.get(self.key, NO_STATE)
        rank = 0 if controller.stage in AVERAGED else session.rank
        self.context = TransformContext(
            entry.site, NO_STEP, seed=session.seed, backward=session.clock, rank=rank, label=label
        )
        self.set(transform)

    def set(self, transform: Transform) -> None:
        """Set the transform; the state stays."""
        self.transform = transform
        self.is_tried = False  # whether it was called, and drew from no global generator
        self.apply = transform.apply if isinstance(transform, Stateless) else None
        self.update = transform.update
        # The shape was checked at the first gradient; an elementwise transform keeps it.
        self.keeps_shape = "elementwise" in transform.properties
        self.trusted = is_trusted(transform)
        self.is_simple = self.trusted and self.apply is not None  # and so needs least checking

    def watched(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise RuntimeError if the first call of a user's transform draws from a global
        generator."""
        self.is_tried = True
        return random_state.untouched(
            f"{self.label}: {self.transform!r}",
            device,
            "Draw from context.generator(grad.device), which `apply(grad, context)` of a Transform "
            "has: it is seeded by (seed, site, step).",
        )

    def store(self, state: TransformState, fires: Tensor | None = None) -> None:
        """Store the next state, outside the graph of `create_graph` and of `torch.func.grad`.

        A trigger evaluated on the device, `fires`, chooses between the next state and the old one.
        """
        if fires is not None and state:
            before = self.state
            if state.keys() != before.keys():
                raise TypeError(
                    f"{self.label}: {self.transform!r} has a state of {', '.join(state)}, and "
                    f"init() made {', '.join(before) or 'none'}: init() must make all of it, "
                    "because the trigger may keep the state of before"
                )
            state = {name: torch.where(fires, new, before[name]) for name, new in state.items()}
        if any(tensor.requires_grad for tensor in state.values()) or autograd.in_functorch():
            state = {name: autograd.unwrapped(tensor) for name, tensor in state.items()}
        self.state = state
        if state:
            self.states[self.key] = state


class TransformHook:
    """One intervention at one site.

    `hook` maps a gradient to the new one, or to None if it is unchanged. `value` returns the tensor
    whose gradient it is, `gradient` the gradient of an update; None if there is none. The first
    gradient of each configuration is checked in full; later ones take the fast path if the trigger
    is known to fire and the transform needs only the gradient.
    """

    __slots__ = (
        "_checked",
        "_single",
        "controller",
        "entry",
        "gradient",
        "hook",
        "links",
        "value",
    )

    def __init__(
        self,
        controller: HookController,
        entry: Entry,
        value: Callable[[], Tensor | None] | None,
        gradient: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self.controller = controller
        self.entry = entry
        self.value = value or _no_value
        self.gradient = gradient or _no_value
        self.links = [
            BoundTransform(label, link, controller, entry) for label, link in controller.links
        ]
        self._single = self.links[0] if len(self.links) == 1 and self.links[0].is_simple else None
        # The configuration of the controller for which a gradient has passed all checks here.
        self._checked: object = False
        self.hook = self._make_hook()

    def renew(self) -> None:
        """Take over the links of the controller; a link of the same class keeps its state."""
        for link, (_, transform) in zip(self.links, self.controller.links, strict=True):
            if type(link.transform) is not type(transform):
                link.state = link.states.get(link.key, NO_STATE)
            link.set(transform)
        self._single = self.links[0] if len(self.links) == 1 and self.links[0].is_simple else None

    def load_states(self) -> None:
        """Take over the states of the session, and number the gradients of the step anew."""
        for link in self.links:
            link.state = link.states.get(link.key, NO_STATE)
            link.context.step = NO_STEP

    def _make_hook(self) -> SiteHook:
        # A closure: calling one from autograd costs half as much as calling a method.
        controller, entry, session = self.controller, self.entry, self.controller.session
        effects, clock, shadow = session.effects, session.clock, session.shadow
        strided = torch.strided

        def hook(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
        ) -> Tensor | None:
            if grad is None:
                return None
            checked = self._checked
            if grad.layout is not strided or (
                checked is not controller.fast and not controller.opens_fast_path(checked)
            ):
                return self._run_checked(grad, value, entering)
            entry.fired += 1
            link = self._single
            if link is None:
                result = self._run_links(grad)
                return None if result is grad or shadow else result
            # As `apply`, without the steps that a trusted transform without state does not need.
            context, apply = link.context, link.apply
            assert apply is not None
            if context.step != clock.step:
                context.step, context.call = clock.step, 0
            else:
                controller.count_repeat(context)
            try:
                result = apply(grad, context)
            except Exception as error:
                error.add_note(self._where(link))
                raise
            if not link.keeps_shape and not is_like(result, grad):
                raise self.result_error(link, grad, result)
            if controller.sampling:
                effects.add(link.slot, grad, result)
            return None if result is grad or shadow else result

        return hook

    def _run_links(self, grad: Tensor) -> Tensor:
        """Apply all links by the fast path."""
        controller, result = self.controller, grad
        for link in self.links:
            before = result
            value = None if link.trusted else self.value()
            result = self.apply(link, before, value, full_check=False)
            if controller.sampling:
                controller.session.effects.add(link.slot, before, result)
        return result

    def _run_checked(
        self, grad: Tensor, value: Tensor | None, entering: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        """Evaluate the trigger, apply all links and check each result in full."""
        controller = self.controller
        if not controller.on or controller.skips_step:
            return None
        if controller.skipped_nodes and autograd.running_node() in controller.skipped_nodes:
            return None
        if controller.firing is False:
            self.entry.not_fired += 1
            return None
        if value is None:
            value = self.value()
        if controller.trigger_reads_gradient:
            self.check_dense(grad)
        fires = controller.firing or controller.fires(self.entry.site, grad, value)
        if not self.count(fires) or controller.skips_transform:
            return None
        on_device = fires if isinstance(fires, Tensor) else None
        sparse = None
        if grad.layout is torch.sparse_coo and acts_on_values(controller.transform):
            sparse = grad.coalesce()
            grad, value = sparse.values(), None if value is None else value[tuple(sparse.indices())]
        self.check_dense(grad)
        effects = controller.session.effects
        with disabled_autocast(grad.device.type) if autograd.any_autocast() else nullcontext():
            result = grad
            for link in self.links:
                before = result
                link.context.entering = entering if controller.needs_entering else ()
                result = self.apply(link, before, value, on_device)
                link.context.entering = ()
                if controller.sampling:
                    effects.add(link.slot, before, result)
        if sparse is None:
            self._checked = controller.configuration
        if result is grad or controller.session.shadow:
            return None
        if sparse is None:
            return result
        indices, shape = sparse.indices(), sparse.shape
        return torch.sparse_coo_tensor(
            indices, result, shape, is_coalesced=True, check_invariants=False
        )

    def apply(
        self,
        link: BoundTransform,
        grad: Tensor,
        value: Tensor | None,
        fires: Tensor | None = None,
        full_check: bool = True,
    ) -> Tensor:
        """Apply one link, update its state and check its result.

        `fires`, a trigger evaluated on the device, chooses between the result and the gradient.
        Without `full_check`, less is checked for trusted transforms: an earlier result of the same
        configuration has passed all checks.
        """
        if link.apply is None and (autograd.is_batched(grad) or autograd.in_vmap()):
            self._check_no_state(link, grad)
        context, state = self.count_call(link), NO_STATE
        checks = full_check or not link.trusted
        version = autograd.version_of(grad) if checks else 0
        try:
            if full_check:
                context.value = value if self.controller.needs_value else None
                context.gradient = self.gradient() if self.controller.needs_gradient else None
                if link.state is NO_STATE and link.apply is None:
                    link.state = link.transform.init(grad)
            with nullcontext() if link.trusted or link.is_tried else link.watched(grad.device):
                if link.apply is not None:
                    result = link.apply(grad, context)
                else:
                    result, state = link.update(grad, link.state, context)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            error.add_note(self._where(link))
            raise
        if full_check:
            context.value = context.gradient = None
        if checks:
            result = self.check_result(link, grad, version, result, value, state)
        elif not link.keeps_shape and not is_like(result, grad):
            raise self.result_error(link, grad, result)
        if link.apply is None:
            link.store(state, fires)
        return result if fires is None or result is grad else torch.where(fires, result, grad)

    def count_call(self, link: BoundTransform) -> TransformContext:
        """Set `step` and `call` in the link's context for this gradient."""
        context, controller = link.context, self.controller
        step = controller.session.clock.step
        if context.step != step:
            context.step, context.call = step, 0
        else:
            controller.count_repeat(context)
        return context

    def count(self, fires: bool | Tensor) -> bool:
        """Count a gradient by the trigger's decision; return whether to call the transform.

        A decision that cannot be read (meta device, vmap) counts as fired.
        """
        entry = self.entry
        if fires is False:
            entry.not_fired += 1
            return False
        if fires is True or fires.is_meta or autograd.is_batched(fires):
            entry.fired += 1
        else:
            entry.fired_on_device = entry.fired_on_device + fires
            entry.on_device += 1
        return True

    def check_dense(self, grad: Tensor) -> None:
        """Raise TypeError for a sparse or a complex gradient."""
        if grad.layout is not torch.strided or grad.is_complex():
            rule = "" if grad.is_complex() else f"; {SPARSE_RULE}"
            raise TypeError(
                f"site '{self.entry.site}': {self.controller.transform!r} takes dense real "
                f"gradients, found {grad.dtype} with layout {grad.layout}{rule}"
            )

    def check_result(
        self,
        link: BoundTransform,
        grad: Tensor,
        version: int,
        result: object,
        value: Tensor | None,
        state: TransformState,
    ) -> Tensor:
        """Return the result, cloned if writing to it could change a state.

        Raises TypeError for a result unlike the gradient, RuntimeError if the transform has
        modified the gradient, which was at `version`, or has returned the storage of the value.
        """
        if (
            not is_like(result, grad)
            or result.device != grad.device
            or result.layout is not grad.layout
        ):
            raise self.result_error(link, grad, result)
        if autograd.version_of(grad) != version:
            raise RuntimeError(
                f"{link.label}: changed the gradient in place at site '{self.entry.site}', where "
                "other branches may read it. Return a new tensor."
            )
        if value is not None and _shares_storage(result, value):
            raise RuntimeError(
                f"{link.label}: returned the storage of the value at site '{self.entry.site}', "
                "which would then be the gradient too. Return a clone."
            )
        if link.trusted or result is grad:
            return result
        if self.controller.is_writable or any(
            _shares_storage(result, tensor) for tensor in state.values()
        ):
            return result.clone()
        return result

    def _check_no_state(self, link: BoundTransform, grad: Tensor) -> None:
        """Raise RuntimeError if the transform keeps a state: the gradient stands for many."""
        if link.transform.init(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)):
            raise many_at_once(link.transform, self.entry.site)

    def result_error(self, link: BoundTransform, grad: Tensor, result: object) -> TypeError:
        """The error for a result of another type, shape, dtype, device or layout."""
        return TypeError(
            f"{link.label}: {link.transform!r} must return a tensor like the gradient. At site "
            f"'{self.entry.site}', step {self.controller.step}, the gradient is "
            f"{_described(grad)}, found {_described(result)}."
        )

    def _where(self, link: BoundTransform) -> str:
        return f"while {link.label} acted at site '{self.entry.site}', step {self.controller.step}"


def is_trusted(transform: Transform) -> bool:
    """Whether the transform and all its parts are gradsurg's own, whose contract is tested.

    Results of other transforms are checked at every gradient.
    """
    if isinstance(transform, Function) or type(transform).__module__.split(".")[0] != "gradsurg":
        return False
    values = [value if isinstance(value, tuple) else (value,) for value in vars(transform).values()]
    parts = [part for value in values for part in value if isinstance(part, Transform)]
    return all(is_trusted(part) for part in parts)


def disabled_autocast(device: str) -> AbstractContextManager[object]:
    """Disable the autocast of this device, if it is enabled in this thread."""
    is_enabled = is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


def is_like(result: object, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether a result is a tensor with the shape and dtype of the gradient."""
    return isinstance(result, Tensor) and result.shape == grad.shape and result.dtype is grad.dtype


def _no_value() -> None:
    return None


def _shares_storage(result: Tensor, value: Tensor) -> bool:
    if autograd.is_wrapped(result) or autograd.is_wrapped(value):
        return False
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
