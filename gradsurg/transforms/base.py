"""What a transform is: a frozen value that maps (gradient, state, context) to a gradient."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

TransformState = dict[str, Tensor]
Scope = Literal["tensor", "group"]
TransformProperty = Literal[
    "elementwise",  # an entry of the result depends on the same entry of the gradient alone
    "homogeneous",  # T(c g) = c T(g) for c > 0: safe on gradients scaled by a loss scale
    "idempotent",  # T(T(g)) = T(g)
    "linear",  # T(a g + b h) = a T(g) + b T(h): the same before and after accumulation, also if
    # g and h are of several tasks, so that it must not ask for `context.task`
    "odd",  # T(-g) = -T(g)
    "sign_preserving",  # no entry changes from positive to negative or back; zero stays zero
    "norm_non_increasing",  # |T(g)| <= |g|
    "unbiased",  # E[T(g)] = g over the random draws
    "deterministic",  # draws no random numbers
]


Need = Literal[
    "value",  # the tensor whose gradient it gets: `context.value`
    "entering",  # what has entered the node that its gradient leaves: `context.entering`
    "product",  # and that this is the gradient of the input of a product with a weight
    "error",  # the gradient of what the model has returned: `context.error`
]


class BackwardInfo(Protocol):
    """What knows whose gradient is flowing, and what came to the output of the model."""

    task: str
    error: Tensor | None


@dataclass(slots=True)
class TransformContext:
    """What a transform may ask about the gradient at hand.

    `site` is the stable id of the place, `step` the optimizer steps done so far (from 0), `value`
    the tensor whose gradient this is (None where there is none, as at a node), `call` counts the
    gradients seen at this site in this step. `entering` is of what leaves a node alone: the
    gradients that have entered it, one for each of its outputs.
    """

    site: str = ""
    step: int = 0
    value: Tensor | None = None
    seed: int = 0
    call: int = 0
    flow: BackwardInfo | None = None
    entering: tuple[Tensor | None, ...] = ()

    @property
    def error(self) -> Tensor | None:
        """The gradient of what the model has returned, in the backward at hand; None if none has
        come, or no transform needs it.
        """
        return self.flow.error if self.flow is not None else None

    @property
    def task(self) -> str:
        """The loss whose gradient this is, in `live.backward(losses)`; empty if it is of none."""
        return self.flow.task if self.flow is not None else ""

    def generator(self, device: torch.device, *, anew: bool = True) -> torch.Generator:
        """A generator from (seed, site, step, call) alone; the global one is not touched.

        Not `anew`: from (seed, site) alone, so that it draws the same at each gradient, and at all
        calls of a module: `h#1` as `h#0`.
        """
        key = f"{self.seed}/{self.site}"
        if anew:
            key += f"/{self.step}/{self.call}"
        else:
            key = re.sub(r"#\d+(?=[^#]*$)", "#0", key)
        # The CPU generator keeps only the low 32 bits of a seed, so the key is hashed first.
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
        return torch.Generator(device).manual_seed(seed)


class Transform(ABC):
    """A pure map from a gradient to one of the same shape, dtype and device.

    Subclasses are made by `@validated`: their fields are their whole configuration. State belongs
    to a site: `init` makes it from the first gradient there, `update` returns the next one.
    Never in place, no `.item()`, no Python branch on the values of a tensor.
    """

    @property
    @abstractmethod
    def properties(self) -> frozenset[TransformProperty]:
        """The properties that hold for these fields, each checked by the test-suite.

        For finite gradients, and for any fixed state and context: of a transform with state only
        what its past cannot spoil.
        """

    @property
    def scope(self) -> Scope:
        """`group` if it needs all gradients of a group at once, as clipping by global norm does."""
        return "tensor"

    @property
    def needs(self) -> frozenset[Need]:
        """What it must have besides the gradient; where its sites lack it, it is refused."""
        return frozenset()

    @abstractmethod
    def init(self, grad: Tensor) -> TransformState:
        """The state before the first gradient of a site, from its shape, dtype and device alone.

        Not from its values: inside a chain the first gradient has not met the earlier links.
        """

    @abstractmethod
    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        """The new gradient and the new state."""


class Stateless(Transform):
    """A transform that remembers nothing: it writes only `apply`."""

    @abstractmethod
    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        """The new gradient."""

    def init(self, grad: Tensor) -> TransformState:
        return {}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        return self.apply(grad, context), state


class GroupTransform(Transform):
    """A transform of several gradients at once; a lone tensor is a group of one."""

    @property
    def scope(self) -> Scope:
        return "group"

    @abstractmethod
    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        """The state before the first gradients of a group."""

    @abstractmethod
    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        """The new gradients, in the same order, and the new state."""

    def init(self, grad: Tensor) -> TransformState:
        return self.init_group([grad])

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        grads, state = self.update_group([grad], state, [context])
        return grads[0], state


class Wrapper(GroupTransform):
    """A transform around another one, `of`: it needs what that needs, and sees what that sees."""

    of: Transform

    @property
    def scope(self) -> Scope:
        return self.of.scope

    @property
    def needs(self) -> frozenset[Need]:
        return self.of.needs


class FunctionTransform(Stateless):
    """A plain callable as a transform: nothing is known of its properties."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        # Never an address: the state of a surgery is recognised by its transforms' names.
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset()

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return self.function(grad)


# Any, twice: what is neither a transform nor a callable is handed on, for the caller to refuse.
def as_transform(thing: Any) -> Any:
    """A plain callable as a `Function`; anything else, a class too, as it is."""
    if isinstance(thing, Transform | type) or not callable(thing):
        return thing
    return FunctionTransform(cast(Callable[[Tensor], Tensor], thing))


def value_of(transform: Transform, context: TransformContext) -> Tensor:
    """The value that the gradient belongs to, a constant also in a double backward.

    Raises ValueError if the site has none.
    """
    if context.value is None:
        raise ValueError(
            f"{type(transform).__name__} needs the tensor whose gradient this is, and the site "
            f"'{context.site}' has none: use it at parameters, outputs or inputs."
        )
    return context.value.detach()


def entering_of(transform: Transform, context: TransformContext) -> Tensor:
    """The one gradient that has entered the node, a constant also in a double backward.

    Raises ValueError if the site has none, or several.
    """
    entered = [grad for grad in context.entering if grad is not None]
    if len(entered) != 1:
        raise ValueError(
            f"{type(transform).__name__} needs the gradient that enters the node which this one "
            f"leaves, and at the site '{context.site}' there are {len(entered)}: use it at nodes "
            "with side=leave, of an operation that has one result."
        )
    return entered[0].detach()


def error_of(transform: Transform, context: TransformContext) -> Tensor:
    """The gradient of what the model has returned, a constant also in a double backward.

    Raises ValueError if none has come in this backward.
    """
    if context.error is None:
        raise ValueError(
            f"{type(transform).__name__} needs the gradient of what the model has returned, and "
            f"none had come when there was one at the site '{context.site}': leave out what the "
            "model itself returns, as with site.pattern."
        )
    return context.error.detach()


def init_all(transform: Transform, grads: Sequence[Tensor]) -> TransformState:
    """The state of `transform` over a group, whatever its scope; keys get the member's index."""
    if isinstance(transform, GroupTransform):
        return transform.init_group(grads)
    return {
        f"{index}.{key}": value
        for index, grad in enumerate(grads)
        for key, value in transform.init(grad).items()
    }


def update_all(
    transform: Transform,
    grads: Sequence[Tensor],
    state: TransformState,
    contexts: Sequence[TransformContext],
) -> tuple[list[Tensor], TransformState]:
    """Apply `transform` to a group, whatever its scope: member by member if it is a tensor's."""
    if isinstance(transform, GroupTransform):
        return transform.update_group(grads, state, contexts)
    results = []
    states = {}
    for index, (grad, context) in enumerate(zip(grads, contexts, strict=True)):
        result, own = transform.update(grad, substate(state, f"{index}."), context)
        results.append(result)
        states |= {f"{index}.{key}": value for key, value in own.items()}
    return results, states


def substate(state: TransformState, prefix: str) -> TransformState:
    """The entries of `state` under `prefix`, without it."""
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
