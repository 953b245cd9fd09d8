"""The contract of a site kind: select places in a model and hook them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, distributed, nn

from gradsurg.aggregators.base import Aggregator
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import find
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.transforms.base import LayerCall, Need, Scope

Stage = Literal[
    "use",  # the gradient of one use of a tensor
    "backward",  # the gradient of one backward pass
    "accumulated",  # the running sum in `.grad`
    "sent",  # the gradient that a process sends to be averaged over the processes
    "reduced",  # the average of the gradients that the processes have sent
    "backward_end",  # the running sums, averaged if DDP does so, at the end of a backward pass
    "step",  # before an optimizer step: its gradients; after it: weights, or their updates
    "captured",  # the gradients that `torch.autograd.grad` returns
    "forward",  # activations or weights in the forward pass
    "saved",  # tensors that the backward pass reads back from the forward pass
]
SCALED: tuple[Stage, ...] = (
    "use",
    "backward",
    "accumulated",
    "sent",
    "reduced",
    "backward_end",
    "captured",
)
"""The stages at which a gradient is still multiplied by the loss scale of a GradScaler."""

AVERAGED: tuple[Stage, ...] = ("reduced", "backward_end", "step")
"""The stages at which DistributedDataParallel has averaged the gradients over its processes."""

NO_GRADIENT = "needs no gradient"  # the reason recorded for a site that is skipped

GradFn = Callable[[Tensor | None], Tensor | None]
"""A gradient hook: takes a gradient and returns the new one, or None to leave it unchanged."""

GroupFn = Callable[[MutableSequence[Tensor | None]], Iterable[Tensor | None]]
"""A hook on all gradients of a group: yields the new ones in order, None for unchanged.

It takes the gradients over, and may set an entry to None after its result was taken. The caller
writes each result before it asks for the next one.
"""

ReadTensor = Callable[[], Tensor | None]
"""Returns the tensor at a site: the value whose gradient passes, or a gradient."""


class SiteFn(Protocol):
    """A `GradFn` that accepts three more arguments at each call.

    `value` is the tensor whose gradient passes, at sites where it is a new tensor at each call;
    `entering` holds the gradients that entered the autograd node which `grad` leaves; `layer` is
    the call of the module whose input has the gradient.
    """

    def __call__(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
        layer: LayerCall | None = None,
    ) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A candidate site, on which a selector decides.

    `thing` is the parameter or module, `name` one of its names. `call` is the index of the module
    call, `node` the autograd node made in it, `occurrence` the index among such nodes, and `item`
    the path of a tensor in the module's output; each is None as long as it is unknown. The `owner`
    of a parameter is its module; `aliases` are places of the same parameter under its other names.
    `whole` means that no more will be known, but for `item`.

    `mechanism` identifies the kind of hook; a selector of another mechanism does not select it.
    """

    mechanism: tuple[object, ...]
    name: str
    thing: nn.Module | Tensor | None = None
    call: int | None = None
    node: str | None = None
    occurrence: int | None = None
    item: str | None = None
    owner: nn.Module | None = None
    aliases: tuple["Place", ...] = ()
    whole: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is unique to the place."""
        return (self.mechanism, self.name, self.call, self.node, self.occurrence, self.item)

    @property
    def label(self) -> str:
        """The name with what is known of it, as `encoder#0/ReluBackward[1]`."""
        call = "" if self.call is None else f"#{self.call}"
        item = f".{self.item}" if self.item else ""
        return f"{self.name}{call}{item}" + (
            f"/{self.node}[{self.occurrence}]" if self.node else ""
        )


PlaceTest = Callable[[Place], bool | None]
"""Decides whether a place is selected; None if more must be known of it first."""


class Attached(Protocol):
    """One attached intervention, as a selector sees it: it supplies the hook of each site."""

    stack: ExitStack
    """Removals of hooks are put here, at once."""

    @property
    def model(self) -> nn.Module:
        """The model whose places are hooked."""
        ...

    @property
    def steps(self) -> OptimizerSteps:
        """The optimizers of the surgery."""
        ...

    @property
    def stage(self) -> Stage:
        """The stage at which the transform acts."""
        ...

    @property
    def scope(self) -> Scope:
        """Whether the transform takes one gradient or a group of them."""
        ...

    @property
    def needs_value(self) -> bool:
        """Whether hooks need the tensor whose gradient passes."""
        ...

    @property
    def needs_layer(self) -> bool:
        """Whether hooks need the call of the module whose input has the gradient."""
        ...

    @property
    def may_skip(self) -> bool:
        """Whether a transform may skip the step of the optimizer."""
        ...

    @property
    def stateful(self) -> str:
        """The transform or trigger that keeps a state for each site, as text; empty if none."""
        ...

    @property
    def unsteady(self) -> str:
        """Why applying the transform twice to one tensor may differ; empty if it cannot."""
        ...

    @property
    def varies(self) -> str:
        """Why it may act differently in each process; empty if it cannot."""
        ...

    @property
    def acts_on_shards(self) -> bool:
        """Whether it can transform the parts of sharded gradients instead of the gradients."""
        ...

    @property
    def moment(self) -> object:
        """What else determines a result (step, flags, fields), compared by `==`."""
        ...

    def selects(self, place: Place) -> bool | None:
        """Return whether the place is selected: a `Selection`; None if more must be known."""
        ...

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        """Enter a site into the ledger before any gradient passes.

        `skipped` is the reason why none will pass, `foreign` lists hooks of other libraries there.
        """

    def forget(self, site: str) -> None:
        """Remove a site from the ledger: its gradients pass at sites with other ids."""

    def note(self, text: str) -> None:
        """Record a warning about this intervention, emitted once on detach."""

    def check_at_end(self, check: Callable[[], str]) -> None:
        """Call `check` on detach and note the text that it returns, if any."""

    def hook_at(self, site: str, value: ReadTensor | None = None) -> SiteFn:
        """Return the hook of a site, always the same; `value` returns the tensor whose gradient
        passes.
        """
        ...

    def keeping_states(self, site: str) -> AbstractContextManager[object]:
        """In the block, gradients at a site change no state of the transform or the trigger."""
        ...

    def group_hook(
        self,
        sites: Sequence[str],
        values: Sequence[ReadTensor],
        gradients: Sequence[ReadTensor] = (),
        skip: Callable[[], None] | None = None,
    ) -> GroupFn:
        """Return one hook for the gradients of all `sites` together.

        Where it gets updates, `gradients` return the gradients that the optimizer used. The hook
        calls `skip` to skip the step of the optimizer, and then returns None for each gradient. It
        may be asked for again with other sites, and replaces the one before.
        """
        ...

    def on_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> AbstractContextManager[object]:
        """In the block the hooks get parts of gradients that are sharded over a process group.

        `sizes` are the numbers of entries of the whole gradients, by site.
        """
        ...

    def count_bytes(self, site: str, number: int) -> None:
        """Count the bytes that this process has sent for a gradient."""

    def state(self, key: str) -> dict[str, Tensor]:
        """Return tensors of the selector's own that are saved with the surgery, to be changed in
        place; get them anew in each step.
        """
        ...


class Selector(ABC):
    """Selects places in a model and hooks them; `stage` is the timing of the hook.

    Selectors combine: `a | b` selects the sites of either, `a & b` those of both, `~a` those that
    `a` does not select; `a.expect(n)` requires n sites, `a.first(n)` keeps the first n in order of
    execution, `a.where(test)` keeps each `Place` for which a function returns True.
    """

    stages: ClassVar[tuple[Stage, ...]]  # of tensor transforms, the default first
    group_stages: ClassVar[tuple[Stage, ...]] = ()  # of group transforms
    changes: ClassVar[str] = "gradients"  # what transforms get here, as a plural
    copies_params: ClassVar[bool] = False  # whether it holds a copy of the parameters in each step
    known_before_forward: ClassVar[bool] = False  # whether attaching alone shows all sites
    for_aggregators: ClassVar[bool] = False  # whether aggregators act here, and no transforms
    compile_limit: ClassVar[str] = ""  # why it acts differently in a compiled model, if it does

    stage: Stage | None
    count: int | None = None  # the required number of sites; None if any number is accepted

    @property
    def provides(self) -> frozenset[Need]:
        """The inputs besides the gradient that a transform gets here (`Transform.needs`)."""
        return frozenset()

    @property
    def mechanism(self) -> tuple[object, ...]:
        """Identifies the kind of hook: selectors with equal mechanisms are hooked together.

        A subclass that inherits `hook` has the mechanism of its base.
        """
        return (type(self).hook.__qualname__.rpartition(".")[0], self.stage)

    @property
    def kinds(self) -> tuple["Selector", ...]:
        """The selectors that register hooks: this one, or the leaves of a combination."""
        return (self,)

    @property
    def changed_tensors(self) -> str:
        """The tensors that a transform changes here, as `gradients` or `activations, weights`."""
        return self.changes

    @property
    def name_patterns(self) -> frozenset[str]:
        """Patterns of which the name of each selected module or parameter fits at least one."""
        return frozenset({"*"})

    @property
    def known_in_backward(self) -> bool:
        """Whether some sites become known only in a backward pass."""
        return False

    def resolve(self, scope: Scope) -> Stage:
        """Return the stage for a transform of this scope; ValueError if it cannot be `stage`."""
        allowed, kind = self.stages if scope == "tensor" else self.group_stages, type(self).__name__
        stage = self.stage or next(iter(allowed), None)
        if stage is not None and stage in allowed:
            return stage
        whole = "needs all gradients of a group at once, "
        listed = f"stages it can have: {', '.join(allowed)}"
        if not allowed:
            raise ValueError(
                f"{whole}{kind} meets them one at a time; "
                "it can act at Parameters with stage=step or stage=backward_end"
            )
        if stage not in self.stages:
            raise FieldError(self, [("stage", f"{kind} cannot have stage '{stage}'; {listed}")])
        raise ValueError(f"{whole}stage '{stage}' has one at a time; {listed}")

    def check_aggregator(self, aggregator: Aggregator) -> None:
        """Raise ValueError if the aggregator cannot act at these sites."""
        raise ValueError(
            f"{type(aggregator).__name__}: makes one gradient of those of several tasks, which is "
            f"done at SharedParameters, found at={type(self).__name__}"
        )

    @abstractmethod
    def selects(self, place: Place) -> bool | None:
        """Return whether the place fits the fields; None if more must be known of it first."""

    def offers(self, place: Place) -> bool:
        """Return whether `~` may select the place."""
        return True

    def place_if_added(self, thing: nn.Module | Tensor) -> Place | None:
        """Return the place of a module or parameter that was added to the model after attaching;
        None if existing hooks do not reach it.
        """
        return None

    @abstractmethod
    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        """Return the names of the selected modules and parameters, before the model is called.

        `test` replaces `selects`. Raises LookupError, listing the choices, if there are none.
        """

    @abstractmethod
    def hook(self, attached: Attached) -> None:
        """Hook the places that `attached.selects`; put each removal on its `stack` at once."""

    def __or__(self, other: "Selector") -> "Selector":
        return _combined((self, other), "any")

    def __and__(self, other: "Selector") -> "Selector":
        return _combined((self, other), "all")

    def __invert__(self) -> "Selector":
        return _combined((self,), "none")

    def expect(self, count: int) -> "Selector":
        """Return the same sites, of which there must be `count`."""
        return _combined((self,), "all", count=count)

    def first(self, count: int) -> "Selector":
        """Return the first `count` sites, in the order in which they are reached."""
        return _combined((self,), "all", limit=count)

    def where(self, test: Callable[[Place], bool]) -> "Selector":
        """Return the sites for whose place `test` returns True."""
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
    """Apply one hook to each gradient of an autograd node."""
    results = [hook(grad) for hook, grad in zip(hooks, grads, strict=True)]
    return tuple(
        grad if result is None else result for result, grad in zip(results, grads, strict=True)
    )
