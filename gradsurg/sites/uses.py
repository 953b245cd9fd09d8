"""Uses: the gradient of each use of a tensor, before autograd sums them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar
from weakref import ref

from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.plugins.messages import shortened
from gradsurg.sites.call_graphs import FORWARD, CallGraph, Edge, follow
from gradsurg.sites.calls import Shared, modules_of
from gradsurg.sites.node_names import plain
from gradsurg.sites.nodes import changed_by
from gradsurg.sites.places import (
    NO_GRADIENT,
    Door,
    Hook,
    Kind,
    Leaf,
    Memory,
    Named,
    Place,
    Stage,
    Things,
)
from gradsurg.sites.selection import ROOT, Pattern, matches, nothing_matched
from gradsurg.sites.selectors import (
    names_in,
    near_in,
    params_of,
    refuse_exported,
    refuse_frozen,
)
from gradsurg.torch_internals import autograd, compiling

CONSTANT = "a constant to torch.func, which was not given it"
NO_USE = "no use of it inside the model's call"
UNUSED = -1  # instead of the number of a use where there is none


class _Watched:
    """The uses in the graph of each outermost call of a module."""

    def __init__(self, door: Door, found: Sequence[Named], shared: Shared) -> None:
        self.door, self.shared, self.has_acted = door, shared, False
        self.held = {name: ref(named.owners[0]) for named in found for name in named.names}
        params = [named for named in found if isinstance(named.thing, Tensor)]
        self.modules = self.held.keys() - {name for named in params for name in named.names}
        self.params = [(each.place(USES), ref(each.owners[0]), each.is_frozen) for each in params]
        # By the places of a tensor (several modules may return it) and the number of the use.
        self.hooks: dict[tuple[tuple[Place, ...], int], Hook | None] = {}

    def take(self, graph: CallGraph) -> None:
        """Hook the nodes that use a tensor."""
        if not graph.reached:
            return
        is_whole = graph.task == FORWARD and graph.outer() is self.door.model
        tensors, without = self._tensors(graph, is_whole)
        if is_whole and any(plain(node.name()) == compiling.COMPILED for _, node in graph.reached):
            self._reject_hidden(graph)
        owners = {edge: tuple(places) for edge, places in tensors.items()}
        counts: Counter[Edge] = Counter()
        hooks: defaultdict[Node, list[tuple[int, Hook | None]]] = defaultdict(list)
        for edge, node, index in graph.uses(owners):
            key = owners[edge], counts[edge]
            if key not in self.hooks:
                places = [_use(place, counts[edge]) for place in owners[edge]]
                self.hooks[key] = self.door.meet_shared(places)
            hook = self.hooks[key]
            counts[edge] += 1
            if hook is not None:
                hooks[node].append((index, hook))
        for node, pairs in hooks.items():
            node.register_hook(changed_by(pairs))
        self.has_acted = self.has_acted or bool(hooks)
        unused = (place for edge in tensors if not counts[edge] for place in tensors[edge])
        without += [(_use(place, 0), NO_USE) for place in unused if is_whole]
        for place, why in without:
            if self.has_acted or self.shared.has_graphless:
                self.door.note_no_gradient(place, why)
            else:  # the error that nothing is picked lists it
                self.door.picking_at(replace(place, occurrence=UNUSED))

    def _reject_hidden(self, graph: CallGraph) -> None:
        """Reject a place at each module without a call (perhaps compiled), for an error to list."""
        called = {returned.call[0] for returned in graph.returned}
        for name, held in self.held.items():
            if name not in called and name in self.modules:
                self.door.picking_at(Place(USES, (name,), held, 0, occurrence=UNUSED))

    def _tensors(
        self, graph: CallGraph, is_whole: bool
    ) -> tuple[dict[Edge, list[Place]], list[tuple[Place, str]]]:
        """The tensors with their places, and the places without a gradient with the reason."""
        tensors: defaultdict[Edge, list[Place]] = defaultdict(list)
        without: list[tuple[Place, str]] = []
        for call, path, edge in graph.returned:
            place = Place(USES, call[:1], self.held[call[0]], call[1], suffix=path)
            if edge[0] is not None:
                tensors[edge].append(place)
            elif is_whole:
                without.append((_use(place, 0), NO_GRADIENT))
        for place, owner, is_frozen in self.params:
            # A functional_call may have replaced the parameter.
            tensor = getattr(owner(), place.name.rpartition(".")[2], place.thing)
            if not isinstance(tensor, Tensor) or not tensor.requires_grad:
                without += [(place, "frozen")] * is_frozen
            elif autograd.in_functorch() and not autograd.is_wrapped(tensor):
                without.append((_use(place, 0), CONSTANT))
            else:
                tensors[get_gradient_edge(tensor)[:2]].append(place)
        return tensors, without


def _use(place: Place, number: int) -> Place:
    return replace(place, occurrence=number, suffix=f"{place.suffix}/use[{max(number, 0)}]")


def _things(model: nn.Module) -> list[Named]:
    return [*modules_of(model), *params_of(model)]


def _watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook the uses of the outputs of modules and of parameters, after each outermost call."""
    chosen = {named.thing for named in found if isinstance(named.thing, nn.Module)}
    owners = {owner for named in found for owner in named.owners}
    # The modules around are needed to find the outermost call.
    around = {part for part in door.model.modules() if not owners.isdisjoint(part.modules())}
    followed = [named for named in modules_of(door.model) if named.thing in around]
    follow(door, followed, shared, _Watched(door, found, shared).take, chosen)


USES = Kind("Uses", "", _things, _watch)


@validated
class Uses(Leaf):
    """Select each use of the module outputs and of the parameters whose name fits `pattern`.

    `use` picks the n-th use, in the order in which the operations ran; an operation that takes a
    tensor twice counts twice. Site ids are `encoder.0#0/use[1]` (with the path of the tensor before
    the slash if a module returns several) and `embed.weight/use[0]`. The model itself is `root`,
    which only the pattern `root` selects.

    A tensor hook gets the sum over all uses of a tensor. Here each operation that takes the tensor
    is a site of its own, hooked by a node posthook.

    A use is found if it is inside the outermost call of a module, and an output of that call
    depends on it: a use in the loss is not found. A view of the tensor is one use, and so is the
    cast of a weight under autocast; an operation that changes the tensor in place is its last use.
    Modules that return the same tensor share its uses. In a reentrant checkpoint uses are hooked in
    the backward pass, and uses of a parameter are counted from 0 in each recomputation; uses of the
    tensors that it returns are not found. A tensor that replaces a parameter in a `functional_call`
    has the name of the parameter. Raises LookupError after the first forward if no use is selected.
    """

    pattern: Pattern
    use: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("use",)
    compile_limit: ClassVar[str] = "compiled code is one use"

    def kind_at(self, stage: Stage | None) -> Kind:
        return USES

    def near(self, named: Named) -> Sequence[str]:
        fitting = [name for name in named.names if matches(name, self.pattern)]
        if isinstance(named.thing, Tensor):
            return named.names[:1] if fitting else ()
        return [name for name in fitting if name != ROOT or self.pattern == ROOT]

    def offers(self, named: Named) -> Sequence[str]:
        return named.names[:1] if isinstance(named.thing, Tensor) else named.names

    def picks(self, place: Place) -> bool:
        return place.occurrence != UNUSED and self.use in (None, place.occurrence)

    def check(self, things: Things, memory: Memory) -> None:
        found = near_in(things[USES], USES, memory.near[self])
        if any(isinstance(named.thing, Tensor) and not named.is_frozen for named in found):
            return
        refuse_exported(self, things[USES], found)
        refuse_frozen(self, self.pattern, found)
        if not found:
            raise nothing_matched(self, "pattern", self.pattern, names_in(things[USES]))

    def nothing_met(self, memory: Memory, may_meet_nodes: bool) -> SelectionError | None:
        if may_meet_nodes:
            return None
        counts: Counter[str] = Counter()
        for place in memory.rejected:
            if (place.kind, place.name) in memory.near[self]:
                counts[place.site.partition("/")[0]] += place.occurrence != UNUSED
        uses = shortened(f"{count} of {site}" for site, count in counts.items()) or "none"
        asked = "no use" if self.use is None else f"no use number {self.use}"
        given = (
            " Tensors that torch.func was not given are constants there." * autograd.in_functorch()
        )
        return SelectionError(
            self,
            "pattern" if self.use is None else "use",
            f"'{self.pattern}' has {asked}. Uses in the model's call: {uses}. Those in the loss "
            f"or in compiled code are not found.{given}",
        )
