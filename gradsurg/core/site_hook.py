"""One intervention at one site: its `call` is the only callable that autograd sees."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from gradsurg.core.firing import Firing, many_at_once
from gradsurg.core.intervention import Intervention
from gradsurg.core.session import Session
from gradsurg.effects.ledger import Entry
from gradsurg.sites.base import AVERAGED, ReadTensor, SiteFn, Stage
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import (
    SPARSE_RULE,
    Function,
    LayerCall,
    Stateless,
    Transform,
    TransformContext,
    TransformState,
    acts_on_values,
)

NO_STATE: TransformState = {}
"""The state of a site before its first gradient; compared by identity."""

UNCHECKED = object()
"""Instead of the configuration for which a hook was checked; not None, as a closed fast path is."""

NO_STEP = -1
"""The step of a site before its first gradient."""

WRITABLE = ("accumulated", "sent", "reduced", "backward_end", "step", "forward", "captured")
"""Stages whose results others may write to: they end up in `.grad` or with the user."""


class Owner(Protocol):
    """The attached intervention of a hook."""

    session: Session
    firing: Firing
    intervention: Intervention
    labels: tuple[str, ...]
    stage: Stage

    @property
    def examples(self) -> "Examples | None":
        """Makes the gradients of single examples, for a transform that needs them."""
        ...

    def note_repeat(self, hook: "SiteHook", call: int) -> None:
        """Note a further gradient of the same step at one site."""

    def note_first(self, hook: "SiteHook") -> None:
        """Notice at the first gradient of a site what may change it a second time."""


class Examples(Protocol):
    """Makes the gradients of the single examples of a step."""

    def of_group(self, sites: Sequence[str], grads: Sequence[Tensor]) -> Any: ...


class Link:
    """One transform of an intervention at one site, with its state there.

    An intervention has several links if its transform is a `Chain`.
    """

    __slots__ = (
        *("_key", "_states", "apply", "context", "refuses_graph", "is_simple", "is_tried"),
        *("is_trusted", "keeps_shape", "label", "shape", "slot", "state", "transform", "update"),
    )

    def __init__(self, label: str, transform: Transform, owner: Owner, entry: Entry) -> None:
        session = owner.session
        self.label = label
        self.slot = session.effects.slot(label, entry)
        self._key, self._states = f"{label}/{entry.site}", session.states
        rank = 0 if owner.stage in AVERAGED else session.rank
        self.context = TransformContext(
            entry.site, NO_STEP, seed=session.seed, backward=session.clock, rank=rank, label=label
        )
        self.state = self._states.get(self._key, NO_STATE)
        self.shape: torch.Size | None = None  # of the gradient that the state was last checked for
        self.set(transform)

    def load(self) -> None:
        """Take over the state of the session."""
        self.state = self._states.get(self._key, NO_STATE)
        self.shape = None

    def set(self, transform: Transform) -> None:
        """Set the transform; the state stays."""
        self.transform = transform
        self.is_tried = False  # whether it was called, and drew from no global generator
        self.apply = transform.apply if isinstance(transform, Stateless) else None
        self.update = transform.update
        # The shape was checked at the first gradient; an elementwise transform keeps it.
        self.keeps_shape = "elementwise" in transform.properties
        self.is_trusted = is_trusted(transform)
        # Whether a user's transform is differentiable need not be declared.
        self.refuses_graph = self.is_trusted and "differentiable" not in transform.properties
        needs_least = self.is_trusted and not self.refuses_graph
        self.is_simple = needs_least and self.apply is not None

    def watched(self, device: torch.device) -> AbstractContextManager[None]:
        """Raise RuntimeError if a user's transform, called first, draws from a global generator."""
        if self.is_trusted or self.is_tried:
            return nullcontext()
        self.is_tried = True
        return random_state.untouched(
            f"{self.label}: {self.transform!r}",
            device,
            "Draw from context.generator(grad.device), which `apply(grad, context)` of a Transform "
            "has: it is seeded by (seed, site, step).",
        )

    def store(self, state: TransformState, fires: Tensor | None) -> None:
        """Store the next state.

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
        self.keep(without_graph(state))

    def keep(self, state: TransformState) -> None:
        """Take over a next state that has no graph."""
        self.state = state
        if state:
            self._states[self._key] = state


class SiteHook:
    """One intervention at one site.

    `call` maps a gradient to the new one, or to None if it is unchanged. `value` returns the tensor
    whose gradient passes; at `Updates`, where an update passes, `gradient` returns the gradient
    that it was made from. The first gradient of each configuration takes the slow path, which
    checks the result in full; later ones take the fast path while `checked_for` is the `fast_path`
    of the intervention's `Firing`: then its trigger is known to fire, and the transform needs only
    the gradient. `entering` are the gradients that entered the node which a gradient leaves.
    """

    __slots__ = ("call", "checked_for", "entry", "gradient", "links", "owner", "single", "value")

    def __init__(self, owner: Owner, entry: Entry) -> None:
        self.owner = owner
        self.entry = entry
        self.value: ReadTensor = _no_value
        self.gradient: ReadTensor = _no_value
        self.checked_for: object = UNCHECKED
        pairs = zip(owner.labels, owner.intervention.links, strict=True)
        self.links = [Link(label, link, owner, entry) for label, link in pairs]
        self._find_single()
        self.call: SiteFn = self._make_call()

    def renew(self) -> None:
        """Take over changed links of the intervention; one of the same class keeps its state."""
        for link, transform in zip(self.links, self.owner.intervention.links, strict=True):
            if type(link.transform) is not type(transform):
                link.load()
            link.set(transform)
        self._find_single()

    def close(self) -> None:
        """Refer to no tensor and not to itself; the function on built graphs passes gradients."""
        self.call = _unchanged
        self.value = self.gradient = _no_value

    def _find_single(self) -> None:
        first, *others = self.links
        self.single = first if first.is_simple and not others else None

    def _make_call(self) -> SiteFn:
        # A closure: calling one from autograd costs half as much as calling a method.
        owner, firing, entry = self.owner, self.owner.firing, self.entry
        effects, clock, shadow = firing.session.effects, firing.session.clock, firing.session.shadow
        strided, any_autocast = torch.strided, autograd.any_autocast

        def call(
            grad: Tensor | None,
            value: Tensor | None = None,
            entering: tuple[Tensor | None, ...] = (),
            layer: LayerCall | None = None,
        ) -> Tensor | None:
            if grad is None:
                return None
            is_open = self.checked_for is firing.fast_path
            if not is_open or grad.layout is not strided or any_autocast():
                return self._run_checked(grad, value, entering, layer)
            entry.fired += 1
            link = self.single
            if link is None:
                result = self._run_links(grad, None, None, full_check=False)
                return None if result is grad or shadow else result
            # A copy of `apply`, without what a trusted transform without state does not need.
            context, apply = link.context, link.apply
            assert apply is not None
            if context.step != clock.step:
                context.step, context.call = clock.step, 0
            else:
                context.call += 1
                owner.note_repeat(self, context.call)
            try:
                result = apply(grad, context)
            except Exception as error:  # whatever a user's transform raises
                error.add_note(self._where(link))
                raise
            if not link.keeps_shape and not _is_like(result, grad):
                raise self._result_error(link, grad, result)
            if firing.sampling:
                effects.add(link.slot, grad, result)
            return None if result is grad or shadow else result

        return call

    def _run_checked(
        self,
        grad: Tensor,
        value: Tensor | None,
        entering: tuple[Tensor | None, ...],
        layer: LayerCall | None,
    ) -> Tensor | None:
        """Evaluate the trigger, apply all links and check each result in full."""
        firing = self.owner.firing
        if firing.is_idle:
            return None
        if firing.skipped_nodes and autograd.running_node() in firing.skipped_nodes:
            return None
        if firing.answer is False:
            self.entry.not_fired += 1
            return None
        if value is None:
            value = self.value()
        if firing.reads_gradient:
            self.check_dense(grad)
        fires = firing.answer or firing.decide(self.entry.site, grad, value)
        if not self.count(fires) or firing.skips_transform:
            return None
        if self.checked_for is UNCHECKED:
            self.owner.note_first(self)
        on_device = fires if isinstance(fires, Tensor) else None
        sparse = None
        if grad.layout is torch.sparse_coo and acts_on_values(self.owner.intervention.operator):
            sparse = grad.coalesce()
            grad, value = sparse.values(), None if value is None else value[tuple(sparse.indices())]
        self.check_dense(grad)
        with without_autocast(grad.device.type):
            given = entering if "entering" in self.owner.intervention.needs else ()
            result = self._run_links(
                grad, value, on_device, full_check=True, entering=given, layer=layer
            )
        if sparse is None:
            self.checked_for = firing.configuration
        if result is grad or firing.session.shadow:
            return None
        if sparse is None:
            return result
        indices, shape = sparse.indices(), sparse.shape
        return torch.sparse_coo_tensor(
            indices, result, shape, is_coalesced=True, check_invariants=False
        )

    def _run_links(
        self,
        grad: Tensor,
        value: Tensor | None,
        fires: Tensor | None,
        full_check: bool,
        entering: tuple[Tensor | None, ...] = (),
        layer: LayerCall | None = None,
    ) -> Tensor:
        result, firing = grad, self.owner.firing
        for link in self.links:
            before = result
            link.context.entering, link.context.layer = entering, layer
            result = self.apply(link, before, value, fires, full_check)
            link.context.entering, link.context.layer = (), None
            if firing.sampling:
                firing.session.effects.add(link.slot, before, result)
        return result

    def apply(
        self,
        link: Link,
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
        context, state = link.context, NO_STATE
        self.begin_call(link, grad)
        checks = full_check or not link.is_trusted
        version = autograd.version_of(grad) if checks else 0
        try:
            if full_check:
                needs = self.owner.intervention.needs
                context.value = value if self.owner.intervention.reads_value else None
                context.gradient = self.gradient() if "gradient" in needs else None
                if link.state is NO_STATE and link.apply is None:
                    link.state, link.shape = link.transform.init(grad), grad.shape
            elif checks:
                value = self.value()
            with link.watched(grad.device):
                if link.apply is not None:
                    result = link.apply(grad, context)
                else:
                    if grad.shape != link.shape:
                        self._check_state_fits(link, grad)
                    result, state = link.update(grad, link.state, context)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            error.add_note(self._where(link))
            raise
        context.value = context.gradient = None
        if checks:
            result = self.check_result(link, grad, version, result, value, state)
        elif not link.keeps_shape and not _is_like(result, grad):
            raise self._result_error(link, grad, result)
        if link.apply is None:
            link.store(state, fires)
        return result if fires is None or result is grad else torch.where(fires, result, grad)

    def begin_call(self, link: Link, grad: Tensor) -> None:
        """Set `step` and `call` in the link's context for this gradient.

        Raises RuntimeError under `create_graph` for a transform that is not differentiable.
        """
        if link.refuses_graph:
            self._refuse_graph(link, grad)
        context, step = link.context, self.owner.session.clock.step
        if context.step != step:
            context.step, context.call = step, 0
        else:
            context.call += 1
            self.owner.note_repeat(self, context.call)

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
                f"site '{self.entry.site}': {self.owner.intervention.operator!r} takes dense real "
                f"gradients, found {grad.dtype} with layout {grad.layout}{rule}"
            )

    def check_result(
        self,
        link: Link,
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
            not _is_like(result, grad)
            or result.device != grad.device
            or result.layout is not grad.layout
        ):
            raise self._result_error(link, grad, result)
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
        if link.is_trusted or result is grad:
            return result
        is_kept = any(_shares_storage(result, tensor) for tensor in state.values())
        return result.clone() if is_kept or self.owner.stage in WRITABLE else result

    def _refuse_graph(self, link: Link, grad: Tensor) -> None:
        # A gradient without a graph, as that of a linear loss, may still get a result that depends
        # on the value. Activations are no gradients, and `torch.func.grad` always has a graph.
        has_graph = grad.requires_grad or (torch.is_grad_enabled() and autograd.in_backward())
        if has_graph and self.owner.stage != "forward" and not autograd.in_functorch():
            raise RuntimeError(
                f"take the gradient without create_graph: {link.label}, {link.transform!r}, is not "
                f"differentiable, so a penalty on the gradient at site '{self.entry.site}' would "
                "have a wrong derivative"
            )

    def _check_no_state(self, link: Link, grad: Tensor) -> None:
        """Raise RuntimeError if the transform keeps a state: the gradient stands for many."""
        if link.transform.init(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)):
            raise many_at_once(link.transform, self.entry.site)

    def _check_state_fits(self, link: Link, grad: Tensor) -> None:
        """Raise ValueError if the state was made for a gradient of another shape."""
        needed, found = (
            {name: list(tensor.shape) for name, tensor in state.items()}
            for state in (link.transform.init(grad), link.state)
        )
        if needed != found:
            name = next(name for name in {**needed, **found} if needed.get(name) != found.get(name))
            raise ValueError(
                f"{link.label}: keeps a state for each entry, and the gradient at site "
                f"'{self.entry.site}' is {list(grad.shape)} now, with which '{name}' of the state "
                f"would be {needed.get(name)}, found {found.get(name)}. Give batches of one size "
                "(DataLoader(drop_last=True)), attach the surgery anew, or select parameters, "
                "whose shape stays."
            )
        link.shape = grad.shape

    def _result_error(self, link: Link, grad: Tensor, result: object) -> TypeError:
        """The error for a result of another type, shape, dtype, device or layout."""
        return TypeError(
            f"{link.label}: {link.transform!r} must return a tensor like the gradient. At site "
            f"'{self.entry.site}', step {self.owner.session.clock.step}, the gradient is "
            f"{_described(grad)}, found {_described(result)}."
        )

    def _where(self, link: Link) -> str:
        step = self.owner.session.clock.step
        return f"while {link.label} acted at site '{self.entry.site}', step {step}"


def is_trusted(transform: Transform) -> bool:
    """Whether the transform and all its parts are gradsurg's own, whose contract is tested.

    Results of other transforms are checked at every gradient.
    """
    if isinstance(transform, Function) or type(transform).__module__.split(".")[0] != "gradsurg":
        return False
    values = [value if isinstance(value, tuple) else (value,) for value in vars(transform).values()]
    parts = [part for value in values for part in value if isinstance(part, Transform)]
    return all(is_trusted(part) for part in parts)


def without_graph(state: TransformState) -> TransformState:
    """Return a state outside the graph of `create_graph` and of `torch.func.grad`."""
    if any(tensor.requires_grad for tensor in state.values()) or autograd.in_functorch():
        return {name: autograd.unwrapped(tensor) for name, tensor in state.items()}
    return state


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Disable the autocast of this device, if it is enabled in this thread."""
    if not autograd.any_autocast() or not torch.amp.is_autocast_available(device):
        return nullcontext()
    is_enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if is_enabled else nullcontext()


def _is_like(result: object, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether a result is a tensor with the shape and dtype of the gradient."""
    return isinstance(result, Tensor) and result.shape == grad.shape and result.dtype is grad.dtype


def _no_value() -> None:
    return None


def _unchanged(
    grad: Tensor | None,
    value: Tensor | None = None,
    entering: tuple[Tensor | None, ...] = (),
    layer: LayerCall | None = None,
) -> None:
    return None


def _shares_storage(result: Tensor, value: Tensor) -> bool:
    if autograd.is_wrapped(result) or autograd.is_wrapped(value):
        return False
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__
