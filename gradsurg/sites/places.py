"""Places at which gradients pass, selectors that pick them, and the door of an attachment.

A `Kind` enumerates the places of a model and registers PyTorch's hooks. It asks a `Door` which hook
acts at a place; it selects and counts nothing. A `Selector` says which places an intervention has.
"""

from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol
from weakref import ref

from torch import Tensor, distributed, nn

from gradsurg.aggregators.base import Aggregator
from gradsurg.plugins.fields import FieldError, SelectionError, in_short, only_changed_field
from gradsurg.plugins.messages import shortened
from gradsurg.plugins.registry import find
from gradsurg.sites.node_names import plain
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.transforms.base import Need, Scope
from gradsurg.transforms.layer_calls import LayerCall

if TYPE_CHECKING:
    from gradsurg.sites.calls import Leaves, Shared

Stage = Literal[
    "use",  # the gradient of one use of a tensor
    "backward",  # the gradient of one backward pass
    "accumulated",  # the running sum in `.grad`
    "sent",  # the gradient that a process sends to be averaged over the processes
    "reduced",  # the average of the gradients that the processes have sent
    "backward_end",  # the running sums, averaged if DDP does so, at the end of a backward pass
    "step",  # gradients before an optimizer step, or weights and their updates after it
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

ReadTensor = Callable[[], Tensor | None]
"""Returns the tensor at a site: the value whose gradient passes, or a gradient."""


ListedFn = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""A `GradFn` that gets the tensor at its place, too."""


class SiteFn(Protocol):
    """A `GradFn` that accepts three more arguments at each call.

    `value` is the tensor whose gradient passes, at sites where it is a new tensor at each call.
    `entering` holds the gradients that entered the autograd node which `grad` leaves. `layer` is
    the call of the module whose input has the gradient.
    """

    def __call__(
        self,
        grad: Tensor | None,
        value: Tensor | None = None,
        entering: tuple[Tensor | None, ...] = (),
        layer: LayerCall | None = None,
    ) -> Tensor | None: ...


Ask = Literal[
    "value",  # the tensor whose gradient passes
    "storage",  # the same at a leaf: a result must not share its memory
    "layer",  # the call of the module whose input has the gradient
    "entering",  # the gradients that entered the node which a gradient leaves
    "gradient",  # the gradient from which the optimizer made an update
    "skip",  # a way to skip the step of the optimizer
    "whole",  # whole gradients of sharded parameters, and not the parts of this process
]
"""An argument that a hook needs besides the gradient."""


class Named(NamedTuple):
    """A module or a parameter with all its names, and the module that owns it under each.

    A module is its own owner.
    """

    names: tuple[str, ...]
    thing: nn.Module | Tensor
    owners: tuple[nn.Module, ...]

    def place(self, kind: "Kind") -> "Place":
        """The place of a parameter."""
        held: Any = ref(self.thing)  # Any: of a module or of a tensor, which are two types
        return Place(kind, self.names, held)

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that needs no gradient."""
        return isinstance(self.thing, Tensor) and not self.thing.requires_grad


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of site in one of its modes; there is one object of each."""

    name: str
    mode: str  # a stage, a side of nodes, or another field of its selector; empty for a single one
    # Lists the modules or parameters of a model at which it may have places.
    things: Callable[[nn.Module], list[Named]] = field(repr=False)
    # Registers hooks on those of them that a selector may pick: called when a surgery is attached,
    # and again, without the earlier hooks, after each change of its interventions.
    watch: Callable[["Door", Sequence[Named], "Shared"], object] = field(repr=False)
    suffix: str = field(default="", repr=False)  # follows the call in its site ids
    # When all its places are known: in `watch`, after a forward, or only after a backward pass.
    known_at: Literal["watch", "forward", "backward"] = field(default="forward", repr=False)
    # Whether its hooks reach modules and parameters that are added to the model later.
    reaches_new: bool = field(default=False, repr=False)
    # Whether its hooks may act in compiled code.
    is_traced: bool = field(default=False, repr=False)


def call_id(name: str, call: int) -> str:
    """Return the beginning of the ids of all sites of one call of a module."""
    return f"{name}#{call}"


@dataclass(frozen=True, slots=True)
class Place:
    """A place at which a gradient passes."""

    kind: Kind
    names: tuple[str, ...]  # all of a parameter; of a module the name that its call goes by
    # The module or parameter, held weakly: graphs hold hooks, and hooks hold places.
    held: "ref[nn.Module] | ref[Tensor]" = field(compare=False, repr=False)
    call: int | None = None  # the index of that call; OUTSIDE for one outside the model's forward
    item: str = ""  # the path of a tensor in nested values, or the edge of a node
    node: str = ""  # the name of an autograd node
    occurrence: int = 0  # its index among the nodes of this name in the call
    suffix: str = ""  # follows the kind's in the site id

    @property
    def name(self) -> str:
        """The name of the module or parameter; the first one of a parameter with several."""
        return self.names[0]

    @property
    def thing(self) -> nn.Module | Tensor | None:
        """The module or parameter; None if it is gone."""
        return self.held()

    @property
    def whole(self) -> str:
        """The site id without `item`: several tensors of one call have it in common."""
        name = self.names[0]
        first = name if self.call is None else call_id(name, max(self.call, 0))  # OUTSIDE: as 0
        node = f"/{plain(self.node)}[{self.occurrence}]" if self.node else ""
        return f"{first}{self.kind.suffix}{self.suffix}{node}"

    @property
    def aliases(self) -> list[str]:
        """The site ids that its other names would give."""
        return [replace(self, names=(name,)).site for name in self.names[1:]]

    @property
    def site(self) -> str:
        """The site id, the same in every step and every run."""
        if self.call is None and not self.item and not self.node:
            return self.names[0] + self.suffix  # a parameter
        return f"{self.whole}.{self.item}" if self.item else self.whole


# Selectors.

ELSEWHERE = "what is called outside the model"
"""Stands for the names of modules that are not in the model, and unknown until they are called."""

Near = frozenset[tuple[Kind, str]]
"""Names of modules and parameters at which a selector may pick places of a kind."""

Things = Mapping[Kind, Sequence[Named]]
"""The modules or parameters of a model, by the kind that may have places at them."""


@dataclass(eq=False)
class Memory:
    """The state of a selector for one attached intervention: several may share the selector."""

    stage: Stage | None = None  # of the intervention; None: the first that a selector may have
    # The names at which the selector, and each of its parts, may pick places.
    near: "dict[Selector, Near]" = field(default_factory=dict)
    # The site ids that each part with a limit, such as `first(2)`, has let in.
    admitted: "dict[Selector, dict[str, None]]" = field(default_factory=dict)
    rejected: dict[Place, None] = field(default_factory=dict)  # not picked by the whole selector
    has_picked: bool = False  # whether the whole selector has picked a place
    picking: "set[Selector]" = field(default_factory=set)  # the parts that have picked one
    refusing: "set[Selector]" = field(default_factory=set)  # those that have not picked one


class Selector(ABC):
    """Pick places in a model. A selector is a tree, whose leaves test the fields of one kind of
    site.

    Selectors combine: `a | b` picks the places of either, `a & b` the places of both, `~a` all
    places that `a` does not pick. `a.expect(n)` requires n places. `a.first(n)` keeps the first n
    in the order in which they are reached, and `a.where(test)` each `Place` for which a function
    returns True.
    """

    for_aggregators: ClassVar[bool] = False  # whether aggregators act here, and no transforms

    stage: Stage | None
    count: int | None = None
    """The number of places that must be picked; None if any number is right."""

    @property
    @abstractmethod
    def leaves(self) -> tuple["Leaf", ...]:
        """The leaves of the tree, in order."""

    @property
    def provides(self) -> frozenset[Need]:
        """The inputs besides the gradient that a transform gets here (`Transform.needs`)."""
        return frozenset()

    @property
    def changed_tensors(self) -> str:
        """The tensors that a transform changes here, for example `activations, weights`."""
        return ", ".join(dict.fromkeys(leaf.changed_tensors for leaf in self.leaves))

    @abstractmethod
    def resolve(self, scope: Scope) -> Stage:
        """Return the stage for a transform of this scope.

        Raises ValueError if `stage` or the kind of site does not allow it.
        """

    def check_aggregator(self, aggregator: Aggregator) -> None:
        """Raise ValueError if the aggregator cannot act here."""
        raise ValueError(
            f"{type(aggregator).__name__}: an aggregator acts at SharedParameters, where it "
            f"combines the gradients of several tasks, found at={type(self).__name__}"
        )

    def find(self, model: nn.Module) -> list[str]:
        """Return the names of the modules and parameters at which places may be picked.

        Frozen parameters are left out. Raises LookupError, listing the choices, if there are none.
        """
        memory = Memory()
        things = things_of(model, self.leaves, None)
        near = self.search(things, memory)
        self.check(things, memory)
        return [
            name
            for kind, found in things.items()
            for named in found
            for name in named.names
            if (kind, name) in near
            and not named.is_frozen
            # A parameter is wholly known, a module only once it is called.
            and (kind.known_at != "watch" or self.fits(named.place(kind), memory))
        ]

    @abstractmethod
    def search(self, things: Things, memory: Memory) -> Near:
        """Return the names whose places must be met, and remember those near to each part."""

    @abstractmethod
    def check(self, things: Things, memory: Memory) -> None:
        """Raise SelectionError, listing the choices, if there is no such name."""

    @abstractmethod
    def fits(self, place: Place, memory: Memory) -> bool:
        """Return whether a place is picked."""

    def unmatched(self, memory: Memory) -> "Iterator[Selector]":
        """Yield the parts that should have picked a place and have picked none."""
        yield from ()

    def unmet(
        self, model: nn.Module, memory: Memory, met: "Container[tuple[Kind, str]]"
    ) -> "Iterator[tuple[str, str]]":
        """Yield the site ids that are expected at the names in `memory.near` without a `met` place.

        Each comes with the reason why none will be, empty if it is not known. A place that was not
        picked needs no reason; a place with a negative `occurrence` stands for a missing one.
        """
        settled: set[str] = set()  # ids and names of rejected places, which need no reason
        for place in memory.rejected:
            settled |= {place.site, place.whole, *[place.name] * (place.occurrence >= 0)}
        for leaf in self.leaves:
            kind = leaf.kind_at(memory.stage)
            for named in () if kind.known_at == "watch" else kind.things(model):
                first = named.names[0]
                near = [name for name in named.names if (kind, name) in memory.near[self]]
                if not near or any((kind, name) in met for name in named.names):
                    continue
                # The calls of a module with several names take them in turn: with one call alone,
                # the other names have none.
                is_other = near[0] != first and isinstance(named.thing, nn.Module)
                site = leaf.expected(near[0])
                if site and site not in settled:
                    yield site, f"another name of {first}, which names its first call" * is_other

    def nothing_met(self, memory: Memory, may_meet_nodes: bool) -> SelectionError | None:
        """Return the error for a forward in which no place was picked.

        `may_meet_nodes` is True if its backward pass may make nodes, in a reentrant checkpoint:
        None is returned if they may be picked.
        """
        if any(name == ELSEWHERE for _, name in memory.near[self]):
            return None  # modules outside the model may be called in a later forward
        # Tensors of one call are listed apart only if the selector could tell them apart.
        items = any(leaf.picks_items for leaf in self.leaves)
        met = (place.site if items else place.whole for place in memory.rejected)
        text = f"nothing in the first forward is selected by {in_short(self)}. There were: "
        text += shortened(dict.fromkeys(met))
        return SelectionError(self, only_changed_field(self), text)

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
    queries = tuple(query for query in of if isinstance(query, Selector))
    if len(queries) < len(of):
        raise TypeError(f"a selector combines with selectors, found {of[-1]!r}")
    # Found by name, as every plug-in: `Combined` is itself a selector and imports this module.
    return find("sites", "combined")(queries, by=by, **fields)


def things_of(model: nn.Module, leaves: "Sequence[Leaf]", stage: Stage | None) -> Things:
    """Return the modules or parameters of a model for the kinds of these leaves."""
    kinds = dict.fromkeys(leaf.kind_at(stage) for leaf in leaves)
    return {kind: kind.things(model) for kind in kinds}


class Leaf(Selector):
    """A selector of one kind of site, by its fields; `stage` is the timing of its hooks."""

    stages: ClassVar[tuple[Stage, ...]]  # of tensor transforms, the default first
    group_stages: ClassVar[tuple[Stage, ...]] = ()  # of group transforms
    changes: ClassVar[str] = "gradients"  # the tensors that transforms get here, in the plural
    copies_params: ClassVar[bool] = False  # whether it holds a copy of the parameters in each step
    compile_limit: ClassVar[str] = ""  # why it acts differently in a compiled model, if it does

    @abstractmethod
    def kind_at(self, stage: Stage | None) -> Kind:
        """Return the kind of site whose places it picks at a stage; None means the selector's own
        stage.
        """

    @abstractmethod
    def near(self, named: Named) -> Sequence[str]:
        """Return the names that its places may have at a module or parameter.

        These are the matching names of a module, whose calls take them in turn, or the first name
        of a parameter.
        """

    @abstractmethod
    def offers(self, named: Named) -> Sequence[str]:
        """Return the names of the places that this selector or its complement may pick there."""

    @abstractmethod
    def picks(self, place: Place) -> bool:
        """Return whether a place whose name fits also fits the other fields, such as the call."""

    def expected(self, name: str) -> str:
        """Return the site id for the warning that no place was met under a name that fits.

        Empty if no warning is needed.
        """
        return name

    @property
    def leaves(self) -> tuple["Leaf", ...]:
        return (self,)

    @property
    def changed_tensors(self) -> str:
        return self.changes

    @property
    def picks_all(self) -> bool:
        """Whether it picks every place whose name fits."""
        return False

    @property
    def picks_items(self) -> bool:
        """Whether it distinguishes the tensors of one call."""
        return False

    def resolve(self, scope: Scope) -> Stage:
        allowed, kind = self.stages if scope == "tensor" else self.group_stages, type(self).__name__
        stage = self.stage or next(iter(allowed), None)
        if stage is not None and stage in allowed:
            return stage
        why = "it needs several tensors at once, and"
        if not allowed:
            use = "use Parameters(stage='step') or 'backward_end'"
            raise ValueError(f"{use}: {why} {kind} has one at a time")
        if stage not in self.stages:
            listed = ", ".join(allowed)
            text = f"{kind} cannot have stage '{stage}'; stages it can have: {listed}"
            raise FieldError(self, [("stage", text)])
        raise ValueError(f"use stage={' or '.join(allowed)}: {why} '{stage}' has one at a time")

    def search(self, things: Things, memory: Memory) -> Near:
        kind = self.kind_at(memory.stage)
        names = (name for named in things[kind] for name in self.near(named))
        found = memory.near[self] = frozenset((kind, name) for name in names)
        return found

    def fits(self, place: Place, memory: Memory) -> bool:
        return (place.kind, place.names[0]) in memory.near[self] and self.picks(place)


# The door: all that a kind may say to the attachment.


class Hook(Protocol):
    """One function for all interventions at a place.

    `asks` are the arguments that it needs besides the gradient. `stateful` is the first transform
    or trigger that keeps a state for each site, as text: saved tensors refuse it. `varies` says why
    it may draw or decide differently in another process: parts of a sharded gradient refuse that.
    `unsteady` says why two calls with the same gradient may have different results: activations in
    a checkpoint refuse that. All three may be empty. `moment` is what else determines a
    result (step, switches, fields), compared by `==` when a checkpoint computes activations again.
    It is None once one of the interventions was detached.
    """

    @property
    def call(self) -> SiteFn: ...

    @property
    def asks(self) -> frozenset[Ask]: ...

    @property
    def stateful(self) -> str: ...

    @property
    def varies(self) -> str: ...

    @property
    def unsteady(self) -> str: ...

    @property
    def moment(self) -> object: ...

    def keeping_states(self) -> AbstractContextManager[object]:
        """In the block, gradients change no state of a transform or a trigger at this place."""
        ...

    def count_bytes(self, number: int) -> None:
        """Count the bytes that this process has sent for a gradient."""


class Traced(Protocol):
    """A function that acts at each call of a module, for code that torch.compile traces.

    `mark(key)` is called during tracing. It notes the site in the ledger, and returns whether to
    act there. `call` is a function of the gradient without side effects.
    """

    @property
    def key(self) -> str: ...

    @property
    def mark(self) -> Callable[[str], bool]: ...

    @property
    def call(self) -> Callable[[Tensor], Tensor]: ...


class PlacesHook(Protocol):
    """One intervention over the places of a list at which it acts.

    Called with their gradients (None where there is none), it yields the results in order, one at a
    time, and an unchanged gradient as it is. In the list it replaces each gradient by None once its
    result was yielded. It returns the list itself if nothing acts. A transform of one gradient
    may be called place by place instead, by `calls`. `order` is the position of the intervention in
    its surgery; `is_new` is True while the surgery, or an optimizer, is being attached.

    A kind sets `values` and `gradients`, each in the order of the places. `values` read the tensors
    whose gradients pass, `gradients` those of which the optimizer made updates.
    """

    values: Sequence[ReadTensor]
    gradients: Sequence[ReadTensor]

    @property
    def places(self) -> Sequence[Place]: ...

    @property
    def calls(self) -> Sequence[ListedFn]: ...

    def factors(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | float | None] | None:
        """Return the factor of each gradient if the hook would multiply by it alone, otherwise
        None.
        """
        ...

    @property
    def is_new(self) -> bool: ...

    @property
    def order(self) -> int: ...

    @property
    def scope(self) -> Scope: ...

    @property
    def asks(self) -> frozenset[Ask]: ...

    @property
    def stateful(self) -> str: ...

    @property
    def varies(self) -> str: ...

    def __call__(self, grads: MutableSequence[Tensor | None]) -> Iterable[Tensor | None]: ...

    def note(self, text: str) -> None:
        """Record a warning about the intervention, emitted when the surgery ends."""

    def state(self, key: str) -> dict[str, Tensor]:
        """Return tensors of the kind that are saved with the surgery, to be changed in place.

        They may be replaced between steps, so get them anew in each step.
        """
        ...


class Door(Protocol):
    """One attachment, from the view of a kind.

    Attributes:
        stack: Takes the functions that remove the hooks being registered; a kind reads it in
            `watch` alone.
        leaves: Takes the handles of hooks on leaf tensors.
        steps: The optimizers.
        kept: Values that a kind needs again when it watches anew, by a key of its own.
    """

    stack: ExitStack
    leaves: "Leaves"
    steps: OptimizerSteps
    kept: dict[object, Any]  # Any: each kind has its own type

    @property
    def model(self) -> nn.Module:
        """The model whose places are hooked."""
        ...

    def picking_at(self, place: Place) -> Sequence[object]:
        """Return the interventions that pick a place; an empty `item` may be filled in later."""
        ...

    def meet(
        self,
        place: Place,
        value: Tensor | None = None,
        own: bool = False,
        acted: Sequence[SiteFn] = (),
    ) -> Hook | None:
        """Return the hook of a place, None if no intervention acts there; it is cached.

        `value` is the tensor whose gradient will pass: if it needs none, that is noted. `own` says
        that the value itself will be hooked. Interventions that act on it already at another site
        are then left out, because both sites are one place. `acted` are the functions by which they
        act, if these are not among PyTorch's hooks of the tensor.
        """
        ...

    def meet_shared(self, places: Sequence[Place]) -> Hook | None:
        """Return the hook of one gradient that passes at several places at once.

        Each intervention acts at the first place that it picks; the others are names of that one.
        """
        ...

    def search_again(self, kind: Kind) -> Sequence[Named]:
        """Return the modules or parameters that `watch` gets, as the model is now."""
        ...

    def meet_all(
        self, places: Sequence[Place], skip: Callable[[], None] | None = None
    ) -> Sequence[PlacesHook]:
        """Return the hook of each intervention that acts at one of these places, in order.

        A hook calls `skip` to skip the step of the optimizer, and then yields None for each place.
        A list may be met again when it has changed.
        """
        ...

    def traced(self, kind: Kind, found: Sequence[Named]) -> "Mapping[nn.Module, Traced]":
        """Return the hook of each of these modules in compiled code; other modules break its graph.

        Called in `watch` alone.
        """
        ...

    def note_no_gradient(self, place: Place, why: str) -> None:
        """Note why no gradient will pass at a place, if an intervention has picked it."""

    def note(self, kind: Kind, text: str) -> None:
        """Record a warning about the interventions at a kind, emitted when the surgery ends."""

    def at_end(self, kind: Kind, check: Callable[[], str]) -> None:
        """Have `check` called when the surgery ends, and note the text that it returns, if any."""

    def on_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> AbstractContextManager[object]:
        """In the block the hooks get parts of gradients that are sharded over a process group.

        `sizes` are the numbers of entries of the whole gradients, by site.
        """
        ...

    def refuse(self, context: str, kind: Kind, site: str = "", **found: object) -> NoReturn:
        """Raise the error that the table of contexts has for a kind in a context."""
        ...
