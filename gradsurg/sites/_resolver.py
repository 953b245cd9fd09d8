"""Who tells which module call made which autograd node: the interface, and the choice of one."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import nn
from torch.autograd import graph
from torch.autograd.graph import Node

from gradsurg.sites._node_names import plain

Edge = tuple[Node | None, int]
"""A node and which of its outputs: one tensor's place in the graph. None: takes no gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module by the name that it goes by: the same object at every step."""

    name: str
    number: int
    module: nn.Module

    @property
    def id(self) -> str:
        return f"{self.name}#{self.number}"


class Spot(NamedTuple):
    """Where a node was made: the innermost module call, and its occurrence there."""

    name: str  # as torch spells it
    call: Call
    occurrence: int

    @property
    def id(self) -> str:
        return f"{self.call.id}/{plain(self.name)}[{self.occurrence}]"


class Returned(NamedTuple):
    """A tensor that a call has returned, its edge without a node if it needs no gradient."""

    call: Call
    path: str
    edge: Edge


class Use(NamedTuple):
    """One use of a tensor: the node that took it, and which of that node's inputs it was."""

    edge: Edge
    node: Node
    input: int


class Graph(Protocol):
    """What one outermost call of a module has made, as far as its outputs depend on it."""

    @property
    def whole(self) -> bool:
        """Whether the model itself was called."""
        ...

    @property
    def empty(self) -> bool:
        """Whether no output depends on a node."""
        ...

    @property
    def returned(self) -> Sequence[Returned]:
        """What the modules returned whose outputs were asked for."""
        ...

    def nodes(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[Node, Spot]]:
        """Its nodes, in the order in which they were made, with all overloads of wanted names."""
        ...

    def uses(self, edges: Collection[Edge]) -> Sequence[Use]:
        """All uses of some tensors, in the order in which their consumers were made."""
        ...

    def hides(self) -> bool:
        """Whether a reentrant checkpoint in it makes its nodes only in the backward."""
        ...


Take = Callable[[Graph], None]


class Resolver(Protocol):
    """Follows the calls of modules and hands over the graph of each outermost one."""

    needs: ClassVar[str]  # what `torch.autograd.graph` must have for it, if anything

    def follow(
        self,
        model: nn.Module,
        modules: Collection[nn.Module],
        take: Take,
        stack: ExitStack,
        outputs: Collection[nn.Module] = (),
        since: Collection[nn.Module] = (),
    ) -> None:
        """Hook `modules`, among them the model; `take` gets each graph when its call ends.

        What the `outputs` among them return is told too. Nodes made before the first call of one of
        `since` need not be told.
        """
        ...


def resolver() -> Resolver:
    """The first kind of resolver that this torch can serve."""
    # Imported here, for each of them speaks the language above.
    from gradsurg.sites._spans import Spans

    # One that is told of each node as it is made, by `node_creation_hook`, goes before.
    kinds: tuple[type[Resolver], ...] = (Spans,)
    return next(kind for kind in kinds if not kind.needs or hasattr(graph, kind.needs))()


def around(
    names: Mapping[nn.Module, Sequence[str]], chosen: Collection[nn.Module], inside: bool
) -> list[nn.Module]:
    """The chosen modules, those that contain them and, if `inside` is asked for, that they contain.

    The containing ones tell which call is the outermost; those inside take nodes for themselves.
    """
    found = set(chosen)
    for module in names:
        within = set(module.modules())
        if not within.isdisjoint(chosen):
            found.add(module)
        if inside and module in chosen:
            found |= within
    return [module for module in names if module in found]
