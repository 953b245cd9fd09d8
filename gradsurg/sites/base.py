"""What a selector is: it finds sites in a model and hooks them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.aggregators.base import Aggregator
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import find
from gradsurg.transforms.base import Need, Scope

Stage = Literal[
    "use",  # the gradient of one use of a tensor
    "backward",  # one backward's gradient
    "accumulating",  # the same, only where it is then added to `.grad`
    "accumulated",  # the running sum in `.grad`
    "settled",  # the same, after all that others do at that moment
    "backward_end",  # the running sums of a group, when a backward has ended
    "step",  # what the optimizer is about to use; of weights: what it has left
    "captured",  # what `torch.autograd.grad` returns
    "forward",  # what flows forward
    "saved",  # what backward reads back of the forward
]
SCALED: tuple[Stage, ...] = (
    "use",
    "backward",
    "accumulating",
    "accumulated",
    "settled",
    "backward_end",
    "captured",
)
"""The stages at which a gradient is still times the loss scale."""

NO_GRADIENT = "needs no gradient"  # why a site is skipped

GradFn = Callable[[Tensor | None], Tensor | None]
"""What a hook calls: it gets a gradient and gives the new one, or None to leave it."""

GroupFn = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""All gradients of a group in, the new ones out (None: leave it), in the same order."""

RegisterHooks = Callable[[ExitStack], None]
"""Registers hooks, each with its removal on the stack, as often as it is called."""


class SiteHook(Protocol):
    """A `GradFn` that may be told more at each call: the value, as an activation is another one
    each time, and what has entered the node that the gradient leaves.
    """

    def __call__(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
    ) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a selector decides on: a parameter or a module by one of its names, and as far as it is
    known the call of the module, the autograd node made in it and its occurrence there. The `owner`
    of a parameter is its module, `aliases` are the same parameter by its other names. It is `whole`
    when nothing more will be known of it.

    `mechanism` says which hook it would get: selectors of another one do not select it.
    """

    mechanism: tuple[object, ...]
    name: str
    thing: nn.Module | Tensor | None = None
    call: int | None = None
    node: str | None = None
    occurrence: int | None = None
    owner: nn.Module | None = None
    aliases: tuple["Place", ...] = ()
    whole: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from every other place."""
        return (self.mechanism, self.name, self.call, self.node, self.occurrence)


PlaceTest = Callable[[Place], bool | None]
"""Whether a place is selected; None if that depends on what is not known of it yet."""


class HookRegistry(Protocol):
    """How a selector reaches the surgery: it asks for the gate of a site and hooks that."""

    @property
    def needs_value(self) -> bool:
        """Whether the tensor whose gradient passes is asked for."""
        ...

    @property
    def stateful(self) -> str:
        """What keeps a memory of each site, as `GrokfastEMA(...)`; empty if nothing does."""
        ...

    @property
    def unsteady(self) -> str:
        """Why a tensor that passes twice may have two results; empty if it cannot."""
        ...

    @property
    def moment(self) -> object:
        """What else decides about a result: step, switches and fields as they are now."""
        ...

    def selects(self, place: Place) -> bool | None:
        """Whether the place is selected; None if that depends on what is not known of it yet."""
        ...

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        """Put a site into the ledger before a gradient passes; `skipped` says why none will,
        `foreign` names the hooks of others that are there.
        """
        ...

    def forget(self, site: str) -> None:
        """An expected site turned out to be others: take it out of the ledger."""
        ...

    def note(self, text: str) -> None:
        """Say something once about this intervention when the block ends."""
        ...

    def register(self, register: RegisterHooks, stack: ExitStack) -> None:
        """Have hooks registered for the length of the block, but for the steps between two that are
        measured, if measuring is all that is done there.
        """
        ...

    def check_at_end(self, check: Callable[[], str]) -> None:
        """Have `check` called when the block ends: what it then says, if anything, is noted."""
        ...

    def hook_for(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        """The gate of a site, one for all time; `value` gives the tensor whose gradient passes."""
        ...

    def group_hook(
        self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]
    ) -> GroupFn:
        """The gate of all sites together."""
        ...


class Selector(ABC):
    """Names places in a model; `stage` is the moment of the backward pass (None: the default).

    Selectors combine: `a | b` is what one of them selects, `a & b` what both do, `~a` what `a` does
    not; `a.expect(n)` refuses any other number of sites, `a.first(n)` keeps the first n that are
    met, `a.where(test)` those `Place`s that a function of the user's says True of.
    """

    stages: ClassVar[tuple[Stage, ...]]
    group_stages: ClassVar[tuple[Stage, ...]] = ()
    known_before_forward: ClassVar[bool] = False  # whether attaching alone shows all sites
    for_aggregators: ClassVar[bool] = False  # whether aggregators act at it, and no transforms
    compile_limit: ClassVar[str] = ""  # why it cannot act as in eager in a compiled model, if so

    stage: Stage | None

    @property
    def provides(self) -> frozenset[Need]:
        """What a transform is given at each of its sites besides the gradient, as it `needs` it."""
        return frozenset()

    @property
    def mechanism(self) -> tuple[object, ...]:
        """Which hook its sites get: selectors that share one are hooked together."""
        return (type(self).__name__, self.stage)

    @property
    def kinds(self) -> tuple["Selector", ...]:
        """The selectors that hook: this one, or those that a combination is made of."""
        return (self,)

    @property
    def known_in_backward(self) -> bool:
        """Whether some sites are known only once a backward reaches them."""
        return False

    @property
    def expected(self) -> int | None:
        """How many sites there must be, if that was said."""
        return None

    def resolve(self, scope: Scope) -> Stage:
        """The stage for a transform of this scope. ValueError if it cannot have the one given."""
        allowed = self.stages if scope == "tensor" else self.group_stages
        if not allowed:
            kind = type(self).__name__
            raise ValueError(
                f"needs all gradients of a group at once, {kind} meets them one at a time; "
                "it can act at Parameters with stage=step, or at Group"
            )
        stage = self.stage or allowed[0]
        if stage not in allowed:
            listed = f"stages it can have: {', '.join(allowed)}"
            if stage not in self.stages:
                name = type(self).__name__
                raise FieldError(self, [("stage", f"{name} cannot have stage '{stage}'; {listed}")])
            raise ValueError(
                f"needs all gradients of a group at once, stage '{stage}' has one at a time; "
                f"{listed}"
            )
        return stage

    def check_aggregator(self, aggregator: Aggregator) -> None:
        """Raise ValueError if the aggregator cannot act at these sites."""
        raise ValueError(
            f"{type(aggregator).__name__}: makes one gradient of those of several tasks, which is "
            f"done at SharedParameters, found at={type(self).__name__}"
        )

    @abstractmethod
    def selects(self, place: Place) -> bool | None:
        """Whether the fields of this selector fit the place; None if that cannot be known yet."""

    def offers(self, place: Place) -> bool:
        """Whether the place is one of those of which `~` takes what is not selected."""
        return True

    def place_if_added(self, thing: nn.Module | Tensor) -> Place | None:
        """The place at which it meets what came into the model after it was hooked, if it does."""
        return None

    def new_test(self) -> PlaceTest:
        """`selects`, or a test with a memory of its own, for the length of one attachment."""
        return self.selects

    @abstractmethod
    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        """The names of what is selected, as far as they are known before the model is called.

        `keeps` takes the place of `selects`. Raises LookupError, with what there is, if nothing is.
        """

    @abstractmethod
    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        """Hook at `stage` whatever `gates` keeps; each handle goes on `stack` as it is made."""

    def __or__(self, other: "Selector") -> "Selector":
        return _combined((self, other), "any")

    def __and__(self, other: "Selector") -> "Selector":
        return _combined((self, other), "all")

    def __invert__(self) -> "Selector":
        return _combined((self,), "none")

    def expect(self, count: int) -> "Selector":
        """The same sites, of which there must be `count`."""
        return _combined((self,), "all", count=count)

    def first(self, count: int) -> "Selector":
        """The first `count` sites, in the order in which they are met."""
        return _combined((self,), "all", limit=count)

    def where(self, test: Callable[[Place], bool]) -> "Selector":
        """Those places that `test` is True of."""
        return _combined((self,), "all", test=test)


def _combined(
    of: Sequence[object], by: Literal["any", "all", "none"], **fields: Any
) -> Selector:  # Any: fields have types
    selectors = tuple(selector for selector in of if isinstance(selector, Selector))
    if len(selectors) < len(of):
        raise TypeError(f"a selector combines with selectors, found {of[-1]!r}")
    # Found by name, as every plug-in: `Combined` is itself a selector and imports this module.
    return find("sites", "combined")(selectors, by=by, **fields)


def apply_hooks(
    hooks: Sequence[GradFn], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Pass the gradients of a node through one hook each."""
    results = [hook(grad) for hook, grad in zip(hooks, grads, strict=True)]
    return tuple(
        grad if result is None else result for result, grad in zip(results, grads, strict=True)
    )
