"""One intervention at one place: trigger, transform, check, count, measure."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsurg.core.checks import (
    check_dense,
    check_no_state,
    check_result,
    check_state_fits,
    is_like,
    refuse_graph,
    result_error,
)
from gradsurg.sites.places import AVERAGED, Ask, SiteFn
from gradsurg.torch_internals import autograd, random_state
from gradsurg.transforms.base import TransformContext, TransformState, acts_on_values
from gradsurg.transforms.layer_calls import LayerCall
from gradsurg.triggers.base import WHEN

if TYPE_CHECKING:
    from gradsurg.core.intervention import Facts
    from gradsurg.core.operation import Operation

# For `in_order` alone, which reads them for each gradient: a look-up of an attribute costs time.
STRIDED, any_autocast = torch.strided, autograd.any_autocast

NO_STATE: TransformState = {}
"""The state of a transform that has none."""

UNCHECKED = object()
"""`checked_configuration` of a hook that was not checked. Not None: `open_configuration` is None
while the fast path is shut, and `None is None` would open it."""

NO_STEP = -1
"""The step of a site before its first gradient."""


class SiteHook:
    """One intervention at one site.

    It is called through `call`, or through the `call` of the `Joint` that it belongs to, which maps
    a gradient to the new one, or to None if it is unchanged. Besides the gradient, a kind of site
    hands over those arguments that the `Operation` asks for.

    A configuration is an empty object that `Operation.set` makes anew, compared by `is`. The first
    gradient that a site sees under it takes the slow path, `run_checked`, which checks the result
    in full. Later ones take a fast path as long as `checked_configuration` is the operation's
    `open_configuration`: `run_links` without the full check, or, which saves two calls, the lines
    in `in_order` for a single trusted transform without state. `open_configuration` is None in
    steps in which the trigger does not fire, or must be asked at each gradient, and if the
    transform needs more than the gradient.
    """

    __slots__ = (
        *("call", "checked_configuration", "contexts", "drew_nothing", "entry", "fast_args"),
        *("keys", "operation", "shapes", "slots"),
    )

    def __init__(self, operation: "Operation", site: str, aliases: Sequence[str] = ()) -> None:
        attachment = operation.attachment
        self.operation = operation
        self.entry = attachment.ledger.enter(operation.label, site, aliases)
        self.checked_configuration: object = UNCHECKED  # the one whose first result passed
        # False until a first call of all links has ended without a draw from a global generator.
        self.drew_nothing: bool
        # Where gradients are averaged, all processes must draw the same random numbers.
        rank = 0 if operation.stage in AVERAGED else attachment.rank
        # From here on each list has an entry for each link (transform of a `Chain`).
        self.contexts = [
            TransformContext(
                site,
                NO_STEP,
                seed=attachment.seed,
                backward=attachment.clock,
                rank=rank,
                label=label,
            )
            for label in operation.labels
        ]
        self.keys = [f"{label}/{site}" for label in operation.labels]
        self.slots = [attachment.effects.slot(label, self.entry) for label in operation.labels]
        # Of the gradient for which a state was last checked; `renew` sets it.
        self.shapes: list[torch.Size | None]
        self.renew()
        self.call: SiteFn = in_order((self,))

    def renew(self) -> None:
        """Take over the links of the operation, which were changed.

        A single trusted transform without state needs nothing but its `apply`, which `in_order`
        calls directly.
        """
        first, *others = self.operation.links
        # Not for a transform that refuses `create_graph`: `begin_call` checks that each time.
        is_simple = first.is_trusted and not first.refuses_graph and not others
        # What the fast path needs, in a tuple, as it is unpacked for each gradient.
        self.fast_args = None
        if is_simple and first.apply is not None:
            self.fast_args = first.apply, self.contexts[0], self.slots[0], first.keeps_shape
        self.drew_nothing = False
        self.shapes = [None] * len(self.contexts)

    def close(self) -> None:
        """Leave gradients alone from now on, and break the cycle through the closure of `call`.

        Closures that a joint or a built graph holds see that the operation is idle.
        """
        self.call = _unchanged

    @contextmanager
    def keeping_states(self) -> Iterator[None]:
        """In the block, such as a forward without a graph, gradients change no state."""
        states = self.operation.attachment.states
        keys = [*self.keys, f"{self.operation.label}/{self.entry.site}{WHEN}"]
        # References suffice: a state is replaced by the next one, never written in place.
        before = {key: states[key] for key in keys if key in states}
        try:
            yield
        finally:
            for key in keys:
                states.pop(key, None)
            states |= before

    def forget_steps(self) -> None:
        """Count the calls of a step anew: another step was loaded."""
        for context in self.contexts:
            context.step = NO_STEP

    def run_checked(
        self,
        grad: Tensor,
        value: Tensor | None,
        entering: tuple[Tensor | None, ...],
        layer: LayerCall | None,
    ) -> Tensor | None:
        """Evaluate the trigger, apply all links and check each result in full."""
        operation = self.operation
        # First: `Operation.close` has made it idle and dropped its `attachment`, and the functions
        # that joints and built graphs hold come here.
        if operation.is_idle:
            return None
        attachment = operation.attachment  # a local: a user's transform may close the surgery
        # The nodes at which the two passes of `SharedParameters(engine="feature")` meet: only one
        # of the passes may act there.
        if operation.skipped_nodes and autograd.running_node() in operation.skipped_nodes:
            return None
        if operation.answer is False:  # None: the trigger is asked at each gradient, below
            self.entry.not_fired += 1
            return None
        if operation.reads_gradient:
            check_dense(self, grad)  # before the trigger reads it
        fires = operation.answer or operation.decide(self.entry.site, grad, value)
        if not self.count(fires) or operation.skips_transform:
            return None
        if self.checked_configuration is UNCHECKED:
            # Again at each gradient, until a dense one was checked.
            attachment.tell("first_gradient", self)
        on_device = fires if isinstance(fires, Tensor) else None
        # A transform of entries takes the values of a sparse gradient; its zeros stay zeros.
        sparse = None
        if grad.layout is torch.sparse_coo and acts_on_values(operation.intervention.operator):
            sparse = grad.coalesce()
            grad, value = sparse.values(), None if value is None else value[tuple(sparse.indices())]
        check_dense(self, grad)  # before the transform
        # A backward pass may run under autocast; transforms compute in the gradient's precision.
        with without_autocast(grad.device.type):
            # `entering` comes if any hook of the joint asked; only transforms that asked get it.
            given = entering if "entering" in operation.asks else ()
            result = self.run_links(
                grad, value, on_device, full_check=True, entering=given, layer=layer
            )
        # A sparse gradient is converted each time, and proves nothing for others.
        if sparse is None:
            self.checked_configuration = operation.configuration
        if result is grad or attachment.shadow:
            return None
        return result if sparse is None else _with_values(sparse, result)

    def run_links(
        self,
        grad: Tensor,
        value: Tensor | None,
        fires: Tensor | None,
        full_check: bool,
        entering: tuple[Tensor | None, ...] = (),
        layer: LayerCall | None = None,
    ) -> Tensor:
        """Apply the links one after the other, and measure each."""
        result, operation = grad, self.operation
        effects = operation.attachment.effects
        for index, context in enumerate(self.contexts):
            if operation.is_closed:
                break  # the user's transform of an earlier link has closed the surgery
            before = result
            # Set for this call alone: a layer holds its module, and gradients hold memory.
            context.entering, context.layer = entering, layer
            result = self.apply(index, before, value, fires, full_check)
            context.entering, context.layer = (), None
            if operation.sampling:
                effects.add(self.slots[index], before, result)
        self.drew_nothing = True
        return result

    def apply(
        self,
        index: int,
        grad: Tensor,
        value: Tensor | None,
        fires: Tensor | None,
        full_check: bool,
    ) -> Tensor:
        """Apply one link, update its state and check its result.

        `fires`, a trigger evaluated on the device, chooses between the result and the gradient.
        Without `full_check`, less is checked for trusted transforms: an earlier result of the same
        configuration has passed all checks.
        """
        operation, context = self.operation, self.contexts[index]
        states = operation.attachment.states
        link, state = operation.links[index], NO_STATE
        transform, apply = link.transform, link.apply
        # Inside vmap one tensor stands for many gradients, which cannot share one state.
        if apply is None and (autograd.is_batched(grad) or autograd.in_vmap()):
            check_no_state(self, transform, grad)
        self.begin_call(index, grad)
        checks = full_check or not link.is_trusted
        version = autograd.version_of(grad) if checks else 0  # counts writes in place
        try:
            # Who reads the value never takes the fast path (`Operation._needs_context`).
            if full_check and operation.intervention.reads_value:
                context.value = value
            before = self._state_before(index, grad) if apply is None else NO_STATE
            watched = nullcontext() if link.is_trusted else self.watched(link, grad.device)
            with watched:
                if apply is None:
                    result, state = transform.update(grad, before, context)
                else:
                    result = apply(grad, context)
        except Exception as error:  # a user's transform may raise anything; it is raised again
            error.add_note(self.where(index))
            raise
        context.value = None
        if checks:
            result = check_result(self, index, grad, version, result, value, state)
        elif not link.keeps_shape and not is_like(result, grad):
            raise result_error(self, index, grad, result)
        if state:
            if fires is not None:
                state = link.chosen(state, before, fires)
            states[self.keys[index]] = without_graph(state)
        # `where`, not `if`: reading `fires` would wait for the device.
        return result if fires is None or result is grad else torch.where(fires, result, grad)

    def _state_before(self, index: int, grad: Tensor) -> TransformState:
        """The state of a link; made for this gradient if there is none, checked to fit it else."""
        transform, key = self.operation.links[index].transform, self.keys[index]
        state = self.operation.attachment.states.get(key)
        if state is None:
            state, self.shapes[index] = transform.init(grad), grad.shape
        elif grad.shape != self.shapes[index]:
            check_state_fits(self, index, grad, state)
            self.shapes[index] = grad.shape
        return state

    def begin_call(self, index: int, grad: Tensor) -> None:
        """Set `step` and `call` in the context of a link for this gradient, as `in_order` does.

        Raises RuntimeError under `create_graph` for a transform that is not differentiable.
        """
        if self.operation.links[index].refuses_graph:
            refuse_graph(self, index, grad)
        context, step = self.contexts[index], self.operation.attachment.clock.step
        if context.step != step:
            context.step, context.call = step, 0
        else:
            context.call += 1
            self.operation.attachment.tell("further_gradient", self, context.call)

    def count(self, fires: bool | Tensor) -> bool:
        """Count a gradient; return whether to call the transform: not if `fires` is False."""
        entry = self.entry
        if fires is False:
            entry.not_fired += 1
            return False
        if fires is True or fires.is_meta or autograd.is_batched(fires):  # no value, or many
            entry.fired += 1
        else:
            entry.fired_on_device = entry.fired_on_device + fires  # stays on the device
            entry.on_device += 1
        return True

    def watched(self, link: "Facts", device: torch.device) -> AbstractContextManager[None]:
        """Raise RuntimeError if a user's transform uses a global generator in its first call."""
        if link.is_trusted or self.drew_nothing:
            return nullcontext()
        return random_state.untouched(
            f"{link.label}: {link.transform!r}",
            device,
            "Draw from context.generator(grad.device), which `apply(grad, context)` of a Transform "
            "has: it is seeded by (seed, site, step).",
        )

    def where(self, index: int) -> str:
        """Say which link acted, for the note of an error.

        The step is that of the context, as a transform may have closed the surgery.
        """
        label, step = self.operation.links[index].label, self.contexts[index].step
        return f"while {label} acted at site '{self.entry.site}', step {step}"


class Joint:
    """The hooks of several interventions at one place, in order; PyTorch gets one for all."""

    __slots__ = ("asks", "call", "hooks")

    def __init__(self, hooks: Sequence[SiteHook]) -> None:
        self.hooks = tuple(hooks)
        first, *others = hooks
        self.asks: frozenset[Ask] = first.operation.asks.union(*(o.operation.asks for o in others))
        self.call: SiteFn = in_order(self.hooks) if others else first.call

    def mark_placed(self) -> "Joint":
        """Note that PyTorch has these hooks; return them."""
        for hook in self.hooks:
            operation, entry = hook.operation, hook.entry
            if entry.site not in operation.placed:
                operation.placed[entry.site] = None
                # An earlier `enter` as an alias of another site may have dropped the entry.
                operation.attachment.ledger.keep(entry)
            entry.skipped = ""
        return self

    @property
    def stateful(self) -> str:
        """The first transform or trigger that keeps a state for each site; empty if none."""
        return next((found for hook in self.hooks if (found := hook.operation.stateful)), "")

    @property
    def varies(self) -> str:
        """Why it may act differently in another process; empty if it cannot."""
        return next((found for hook in self.hooks if (found := hook.operation.varies)), "")

    @property
    def unsteady(self) -> str:
        """Why two calls with the same gradient may differ; empty if they cannot."""
        return next((found for hook in self.hooks if (found := hook.operation.unsteady)), "")

    @property
    def moment(self) -> object:
        """`Operation.moment` of all hooks; None once one is closed."""
        moments = [hook.operation.moment for hook in self.hooks]
        return None if None in moments else moments

    @contextmanager
    def keeping_states(self) -> Iterator[None]:
        """In the block, gradients change no state: see `SiteHook.keeping_states`."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.keeping_states())
            yield

    def count_bytes(self, number: int) -> None:
        """Count the bytes that this process has sent for a gradient."""
        for hook in self.hooks:
            hook.entry.sent += number


def _unchanged(*_: object, **__: object) -> None:
    """Leave a gradient as it is, as the `call` of a hook that is closed."""


def _with_values(sparse: Tensor, values: Tensor) -> Tensor:
    """Return a coalesced sparse tensor with other values."""
    # Without `check_invariants` PyTorch warns the user that it checks none (pytorch#171695).
    return torch.sparse_coo_tensor(
        sparse.indices(), values, sparse.shape, is_coalesced=True, check_invariants=False
    )


def in_order(hooks: tuple[SiteHook, ...]) -> SiteFn:
    """Return the function that autograd calls for the hooks of one place, which act in order."""
    # A closure: autograd calls it in half the time of a method, and its cells are read faster than
    # attributes. It runs for each gradient, so the path of `fast_args` is written out in it.
    attachment = hooks[0].operation.attachment
    clock, shadow, add = attachment.clock, attachment.shadow, attachment.effects.add
    # The attachment's own list: it is empty once no pitfall listens any more.
    listeners = attachment.listeners["further_gradient"]

    def call(
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
        layer: LayerCall | None = None,
    ) -> Tensor | None:
        if grad is None:
            return None
        # A sparse gradient, and one under autocast, needs the slow path.
        result, is_plain = grad, grad.layout is STRIDED and not any_autocast()
        for hook in hooks:
            operation = hook.operation
            if not is_plain or hook.checked_configuration is not operation.open_configuration:
                changed = hook.run_checked(result, value, entering, layer)  # None if unchanged
                result = result if changed is None else changed
                continue
            hook.entry.fired += 1
            if hook.fast_args is None:  # several links, a state, or a user's transform
                changed = hook.run_links(result, value, None, full_check=False)
            else:
                # A copy of `SiteHook.apply` for a trusted transform without state: change both.
                apply, context, slot, keeps_shape = hook.fast_args
                if context.step != clock.step:
                    context.step, context.call = clock.step, 0
                else:
                    context.call += 1
                    if listeners:
                        operation.attachment.tell("further_gradient", hook, context.call)
                try:
                    changed = apply(result, context)
                except Exception as error:  # raised again, with the site
                    error.add_note(hook.where(0))
                    raise
                if not keeps_shape and not is_like(changed, result):
                    raise result_error(hook, 0, result, changed)
                if operation.sampling:
                    add(slot, result, changed)
            if not shadow:
                result = changed
        return None if result is grad else result  # for None PyTorch keeps its own tensor

    # `AttachmentDoor` finds the hooks that act on a tensor in PyTorch's table of its hooks.
    vars(call)["hooks"] = hooks
    return call


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
