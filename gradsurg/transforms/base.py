"""Base classes of transforms: pure maps from (gradient, state, context) to (gradient, state)."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast

import torch
from pydantic import BeforeValidator
from torch import Tensor

from gradsurg.plugins.reductions import scaled
from gradsurg.torch_internals import autograd
from gradsurg.transforms.layer_calls import LayerCall

TransformState = dict[str, Tensor]
Scope = Literal["tensor", "group"]
Members = Literal["fixed", "any", "entries"]
TransformProperty = Literal[
    "elementwise",  # entry i of T(g) depends on no entry of g other than entry i
    "homogeneous",  # T(c g) = c T(g) for c > 0: commutes with loss scaling
    "idempotent",  # T(T(g)) = T(g)
    "linear",  # T(a g + b h) = a T(g) + b T(h): commutes with gradient accumulation, also over
    # tasks, so that a transform that reads `context.task` is not linear
    "odd",  # T(-g) = -T(g)
    "sign_preserving",  # no entry gets the opposite sign (it may become 0), and zeros stay zero
    "norm_non_increasing",  # |T(g)| <= |g| in the 2-norm
    "unbiased",  # E[T(g)] = g over the random draws
    "deterministic",  # draws no random numbers
    "differentiable",  # autograd differentiates T(g) by g and by all that T reads besides, except
    # for the state; the probabilities of its draws do not depend on g. At a kink of T, such as a
    # norm at g = 0, nothing is claimed, and the derivative may be NaN.
]
"""Properties of a transform T. `gradsurg.testing.check_transform` tests each of them."""


Need = Literal[
    "value",  # `context.value`, the tensor whose gradient is transformed
    "entering",  # `context.entering`, the gradients of the outputs of the autograd node
    "product",  # that the gradient belongs to the input of a matrix product with a weight
    "error",  # `context.error`, the gradient of the model's output
    "layer",  # `context.layer`, the module with its input, output and the gradient of its output
    "gradient",  # `context.gradient`, the gradient from which the optimizer made the update
    "examples",  # `context.examples`, the gradients of the single examples of the batch
    "skip",  # a site that can skip the step of the optimizer, counted in the state as `SKIPPED`
    "labels",  # `context.labels`, the labels of the examples of the backward pass
]
"""A thing that a transform may require besides the gradient."""

SKIPPED = "skipped"
"""State of a transform that needs `skip`: the number of steps skipped, plus one to skip a step."""


class BackwardInfo(Protocol):
    """The task of the current backward pass, the gradient of the model's output, the batch."""

    task: str
    error: Tensor | None
    batch: Mapping[str, Tensor]


class Examples(Protocol):
    """The gradients of the n = `count` examples of a step.

    Example i has the gradient g_i, and the row g_i / n for a loss that is a mean, or g_i for a sum.
    The gradient of the step is the sum of the rows, each times its factor in `shares`.
    """

    @property
    def count(self) -> int: ...

    @property
    def shares(self) -> Tensor | None:
        """The factor of each row, (n,); None if all are 1, which holds for a sum.

        In a mean over K backward passes an example of a pass with n_k examples has n / (K n_k),
        which is 1 for passes of equal size.
        """
        ...

    def norms(self) -> Tensor:
        """Return the joint norm of each row, (n,)."""
        ...

    def weighted(self, weights: Tensor) -> list[Tensor]:
        """Return the sum of the rows times share and `weights` (n,), for each gradient."""
        ...

    def rows(self, scale: float) -> Iterator[list[Tensor]]:
        """Yield the rows times `scale`, some examples of one backward pass at a time.

        Each item is a list with a tensor (k, *shape) for each gradient of the group.
        """
        ...

    # Any: an aggregator, of which this floor does not know.
    def merged(self, aggregator: Any, context: "TransformContext") -> list[Tensor]:
        """Return the aggregate of the rows, for each gradient of the group."""
        ...


@dataclass(slots=True)
class TransformContext:
    """Inputs of a transform besides the gradient and the state.

    | attribute | meaning |
    |---|---|
    | `site` | id of the site, the same at every step and in `live.effects`: `0.weight` |
    | `step` | optimizer steps done, from 0 |
    | `value` | the tensor whose gradient is transformed; None at sites without one, such as nodes |
    | `seed` | the surgery's seed |
    | `call` | gradients seen before at this site in this step |
    | `entering` | for a gradient that leaves an autograd node: the gradients of its outputs |
    | `task` | name of the loss in `live.backward(losses)`; empty in any other backward pass |
    | `error` | the gradient of the model's output in this backward pass; None if not known |
    | `batch` | tensors by name, from `live.set_batch(inputs=x)`; empty without them |
    | `labels` | `batch["labels"]`, of examples (n,) or of tokens (n, time); None without them |
    | `layer` | at the input of a module: its call, a `LayerCall`; None if not asked for |
    | `gradient` | at `Updates`: the gradient behind the update of the optimizer; otherwise None |
    | `examples` | the gradients of the single examples of the group; None if not asked for |
    | `rank` | number of the process, 0 where the gradients are averaged over the processes |
    | `label` | name of the transform in its surgery; empty outside of one |
    | `part` | place inside another transform, such as `0/placebo` in a chain; empty at the top |
    """

    site: str = ""
    step: int = 0
    value: Tensor | None = None
    seed: int = 0
    call: int = 0
    backward: BackwardInfo | None = None
    entering: tuple[Tensor | None, ...] = ()
    layer: LayerCall | None = None
    gradient: Tensor | None = None
    examples: Examples | None = None
    rank: int = 0
    label: str = ""
    part: str = ""

    @property
    def error(self) -> Tensor | None:
        """The gradient of the model's output in the current backward pass.

        None before it is computed, or if no transform has `error` among its `needs`.
        """
        return self.backward.error if self.backward is not None else None

    @property
    def batch(self) -> Mapping[str, Tensor]:
        """The tensors of `live.set_batch` by name; in a run they are `inputs` and `targets`."""
        return self.backward.batch if self.backward is not None else {}

    @property
    def labels(self) -> Tensor | None:
        """The labels of the examples, (n,), or of their tokens, (n, time); None without them."""
        return self.batch.get("labels")

    @property
    def task(self) -> str:
        """The name of the loss in `live.backward(losses)`; empty in any other backward pass."""
        return self.backward.task if self.backward is not None else ""

    @property
    def key(self) -> str:
        """`label/site/part`: contexts that differ in it draw different random numbers."""
        key = f"{self.label}/{self.site}" if self.label else self.site
        return f"{key}/{self.part}" if self.part else key

    def inside(self, part: str) -> "TransformContext":
        """Return the context for a transform inside this one, or for a second random stream."""
        return replace(self, part=f"{self.part}/{part}" if self.part else part)

    def generator(self, device: torch.device, *, per_call: bool = True) -> torch.Generator:
        """Return a generator seeded by (seed, key, step, call), independent of the global one.

        Each process with its own gradients draws its own numbers. With `per_call=False` it is
        seeded by (seed, key), the same for every gradient and for all calls of a module (sites
        `h#0` and `h#1`).
        """
        key = f"{self.seed}/{self.key}"
        if per_call:
            key += f"/{self.step}/{self.call}" + (f"/{self.rank}" if self.rank else "")
        else:
            key = re.sub(r"#\d+(?=[^#]*$)", "#0", key)
        # The CPU generator keeps only the low 32 bits of a seed, so the key is hashed first.
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
        return torch.Generator(device).manual_seed(seed)


class Transform(ABC):
    """Pure map from a gradient to a gradient of the same shape, dtype and device.

    Subclasses are decorated with `@validated`, and their fields are their whole configuration.
    The state is a dict of tensors that belongs to a site: `init` creates it, `update` returns the
    next one. Implementations must not modify the gradient in place, nor synchronize with the
    device: no `.item()`, no Python branch on the values of a tensor.
    """

    tags: ClassVar[frozenset[TransformProperty]] = frozenset()
    """The properties that hold for any fields; by default none is claimed."""

    def tags_if(self) -> dict[TransformProperty, bool]:
        """Return further properties by name, and whether each holds for these fields."""
        return {}

    @property
    def properties(self) -> frozenset[TransformProperty]:
        """The properties that hold for these fields: by default the `tags`, and those of `tags_if`.

        They hold for finite gradients and for every fixed state and context. A transform with state
        declares only properties that hold after any past gradients.
        """
        held: set[TransformProperty] = {name for name, holds in self.tags_if().items() if holds}
        return self.tags | held

    @property
    def scope(self) -> Scope:
        """`group` if it needs all gradients of a group at once, as global norm clipping does."""
        return "tensor"

    needed: ClassVar[frozenset[Need]] = frozenset()
    """The inputs that are needed for any fields; by default none."""

    @property
    def needs(self) -> frozenset[Need]:
        """Required inputs besides the gradient, by default the `needed`; sites without them are
        refused."""
        return self.needed

    @property
    def acts_on_shards(self) -> bool:
        """Whether it can transform the parts of sharded tensors instead of the tensors.

        True if it is elementwise and draws nothing. A transform may also return True if, besides
        single entries, it reads only `norms_of`, `joint_norm` or `norm(grad, "tensor")`.
        """
        return not self.needs and {"elementwise", "deterministic"} <= self.properties

    def check_parameters(self, params: Mapping[str, Tensor]) -> None:
        """Raise ValueError if it cannot act on the gradients of these parameters."""
        return

    @abstractmethod
    def init(self, grad: Tensor) -> TransformState:
        """Return the state before the first gradient of a site.

        It may depend on the gradient's shape, dtype and device, not on its values: in a chain
        `grad` has not passed the earlier links.
        """

    @abstractmethod
    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        """Return the new gradient and the new state."""


class Stateless(Transform):
    """Transform without state: subclasses implement `apply` alone."""

    @abstractmethod
    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        """Return the new gradient."""

    def init(self, grad: Tensor) -> TransformState:
        return {}

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        return self.apply(grad, context), state


class Scaling(Transform):
    """Transform without state that multiplies each gradient by a factor.

    At stage `step` a `.grad` to which nothing else refers is multiplied in place.
    """

    @abstractmethod
    def factors(
        self, grads: Sequence[Tensor], contexts: Sequence[TransformContext]
    ) -> Sequence[Tensor | float]:
        """Return a factor for each gradient: a number, or a tensor that broadcasts against it."""


class GroupTransform(Transform):
    """Transform of several gradients at once; applied to one tensor it takes a group of one."""

    @property
    def scope(self) -> Scope:
        return "group"

    @property
    def members(self) -> Members:
        """Which gradients of its group may be absent in a step, if it has a state.

        - `fixed`: none.
        - `any`: all, because the state holds nothing of a single gradient.
        - `entries`: all. The last axis of each tensor of the state has one entry for each gradient,
          stored by site. The entry of an absent gradient stays, and a new gradient begins its own.
        """
        return "fixed"

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        """Return the state before the first gradients of a group; by default there is none."""
        return {}

    @abstractmethod
    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        """Return the new gradients, in the same order, and the new state.

        The gradients may be a list, or a generator that makes each when it is asked for, so that
        not all exist at the same time. The state must be complete on return.
        """

    def init(self, grad: Tensor) -> TransformState:
        return self.init_group([grad])

    def update(
        self, grad: Tensor, state: TransformState, context: TransformContext
    ) -> tuple[Tensor, TransformState]:
        (result,), state = self.update_group([grad], state, [context])
        return result, state


class JointScaling(GroupTransform, Scaling):
    """Transform that multiplies all gradients of a group by one number: see `joint_factor`."""

    @abstractmethod
    def joint_factor(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the factor, of no dimension."""

    def factors(
        self, grads: Sequence[Tensor], contexts: Sequence[TransformContext]
    ) -> Sequence[Tensor]:
        factor = self.joint_factor(grads)
        own = {grad.device: factor.to(grad.device) for grad in grads}
        return [own[grad.device] for grad in grads]

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        return scaled(grads, self.joint_factor(grads)), state


class ExampleWeighting(ABC):
    """A transform that multiplies the gradient of each example by one number, inside `PerSample`.

    Then the gradients of the examples need not be computed one by one.
    """

    @property
    def example_bound(self) -> float | None:
        """The bound of the norm of each result; None if there is no bound."""
        return None

    @abstractmethod
    def example_weights(
        self, norms: Callable[[], Tensor], context: TransformContext
    ) -> Tensor | None:
        """Return the factors (n,), given a function that computes the norms of the gradients (n,).

        None if the result is no multiple of the gradient.
        """


class Wrapper(GroupTransform):
    """Transform around another transform `of`, with its scope, its needs and its state.

    Subclasses implement `combine`.
    """

    of: Transform

    inherited: ClassVar[frozenset[TransformProperty]] = frozenset()
    """The properties that it has if `of` has them."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return super().properties | (self.of.properties & self.inherited)

    @property
    def scope(self) -> Scope:
        return self.of.scope

    @property
    def needs(self) -> frozenset[Need]:
        return self.of.needs

    def combine(self, grad: Tensor, result: Tensor, context: TransformContext) -> Tensor:
        """Return the new gradient, from the gradient and the result of `of`."""
        return result

    @property
    def members(self) -> Members:
        has_its_state = type(self).init_group is Wrapper.init_group
        return self.of.members if has_its_state and isinstance(self.of, GroupTransform) else "fixed"

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return init_all(self.of, grads)

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[Iterable[Tensor], TransformState]:
        results, state = update_all(self.of, grads, state, contexts)
        return map(self.combine, grads, results, contexts), state


class Function(Stateless):
    """A plain function of a gradient as a transform without declared properties."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        # No address: state_dicts identify a transform by its repr.
        called = self.function.func if isinstance(self.function, partial) else self.function
        return getattr(called, "__qualname__", type(called).__qualname__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts[0])

    @property
    def _parts(self) -> tuple[object, ...]:
        """The function, and what a partial one is called with: two of these are never equal."""
        function = self.function
        if isinstance(function, partial):
            return function.func, function.args, function.keywords
        return (function,)

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        return self.function(grad)


# Any, twice: the caller refuses values that are neither a transform nor a callable.
def as_transform(thing: Any) -> Any:
    """Wrap a plain callable in a `Function`; return anything else as is.

    Classes and aggregators are callable but are no functions of one gradient: they are returned.
    """
    if isinstance(thing, Transform | type) or hasattr(thing, "merge") or not callable(thing):
        return thing
    return Function(cast(Callable[[Tensor], Tensor], thing))


AnyTransform = Annotated[Transform, BeforeValidator(as_transform)]
"""A field that takes a transform or a plain function of a gradient."""


def value_of(transform: Transform, context: TransformContext) -> Tensor:
    """Return `context.value`, detached. Raises ValueError if the site has none."""
    if context.value is None:
        raise ValueError(
            f"{type(transform).__name__} needs the tensor whose gradient this is, and the site "
            f"'{context.site}' has none: use it at parameters, outputs or inputs"
        )
    return autograd.detached(context.value)


def entering_of(transform: Transform, context: TransformContext) -> Tensor:
    """Return the gradient of the node's only output, detached.

    Raises ValueError unless exactly one output has a gradient.
    """
    entered = [grad for grad in context.entering if grad is not None]
    if len(entered) != 1:
        raise ValueError(
            f"{type(transform).__name__} needs the gradient of the node's output, and the node at "
            f"the site '{context.site}' has {len(entered)} of them: use it at nodes with "
            "side=leave, of operations with one output"
        )
    return autograd.detached(entered[0])


def layer_of(
    transform: Transform, context: TransformContext
) -> tuple[LayerCall, Tensor, Tensor, Tensor]:
    """Return the call of the module, its input, its output and the output's gradient, detached.

    Raises ValueError unless the module takes one tensor and returns another.
    """
    layer = context.layer
    if layer is None or layer.output is None or layer.entering is None:
        raise ValueError(
            f"{type(transform).__name__} needs a module that takes one tensor and returns another, "
            f"and that at the site '{context.site}' does not: choose others, as with site.types"
        )
    tensors = (layer.input, layer.output, layer.entering)
    given, output, entering = map(autograd.detached, tensors)
    return layer, given, output, entering


def gradient_of(transform: Transform, context: TransformContext) -> Tensor:
    """Return `context.gradient`, detached. Raises ValueError if the site has none."""
    if context.gradient is None:
        raise ValueError(
            f"{type(transform).__name__} needs the gradient from which the optimizer made the "
            f"update, and the site '{context.site}' has none: use it at Updates"
        )
    return autograd.detached(context.gradient)


def error_of(transform: Transform, context: TransformContext) -> Tensor:
    """Return the gradient of the model's output, detached.

    Raises ValueError if it is not known yet in this backward pass.
    """
    if context.error is None:
        raise ValueError(
            f"{type(transform).__name__}: exclude the model's output, for example by site.pattern: "
            f"its gradient is needed, and not known yet at the site '{context.site}'"
        )
    return autograd.detached(context.error)


def example_labels(transform: Transform, context: TransformContext) -> Tensor:
    """Return `context.labels`. Raises ValueError if the step has none."""
    if context.labels is None:
        raise ValueError(
            f"{type(transform).__name__} needs the labels of the examples at the site "
            f"'{context.site}': call live.set_example_labels(labels) before each backward pass"
        )
    return context.labels


def acts_on_values(transform: Transform) -> bool:
    """Whether the values of a sparse gradient can be transformed in place of the dense gradient."""
    properties = transform.properties
    keeps_zero = {"linear", "homogeneous", "odd", "sign_preserving"}
    if "elementwise" not in properties or properties.isdisjoint(keeps_zero):
        return False
    return not transform.init(torch.zeros(1))


def fixed_weights(context: TransformContext, scale: float, rows: int, like: Tensor) -> Tensor:
    """Return a matrix for products with `like`, uniform in ±scale / sqrt(n).

    n is the length of the last axis of `like`. The matrix is a function of (seed, site).
    """
    columns, device = like.shape[-1], like.device

    def drawn() -> Tensor:
        bound = scale * max(1, columns) ** -0.5
        generator = context.generator(device, per_call=False)
        # Another dtype would draw other numbers.
        weights = torch.empty((rows, columns), dtype=torch.float32, device=device)
        return weights.uniform_(-bound, bound, generator=generator)

    if not autograd.in_functorch() and not autograd.is_batched(like):
        return drawn().to(like.dtype)
    # vmap refuses to draw, or draws for each example: another thread is outside it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(drawn).result().to(like.dtype)


def init_all(transform: Transform, grads: Sequence[Tensor]) -> TransformState:
    """Return the first state of a transform of any scope for a group of gradients.

    The keys of a transform of single tensors are prefixed by the index of the gradient.
    """
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
) -> tuple[Iterable[Tensor], TransformState]:
    """Apply a transform of any scope to a group of gradients, with a state of `init_all`."""
    if isinstance(transform, GroupTransform):
        return transform.update_group(grads, state, contexts)
    results = []
    states = {}
    for index, (grad, context) in enumerate(zip(grads, contexts, strict=True)):
        result, after = transform.update(grad, substate(state, f"{index}."), context)
        results.append(result)
        states |= {f"{index}.{key}": value for key, value in after.items()}
    return results, states


def substate(state: TransformState, prefix: str) -> TransformState:
    """Return the entries of `state` whose key starts with `prefix`, without the prefix."""
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
