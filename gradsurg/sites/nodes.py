"""Nodes: the gradients that enter or leave a node of the autograd graph."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, ClassVar, Literal
from weakref import ref

from pydantic import Field
from torch import Tensor
from torch.autograd.graph import Node

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.plugins.messages import shortened, unknown
from gradsurg.sites.call_graphs import FORWARD, CallGraph, follow
from gradsurg.sites.calls import Shared, modules_of
from gradsurg.sites.node_names import FAMILIES, PRODUCTS, edges_of, fits_node, plain, residual_edges
from gradsurg.sites.places import Door, Hook, Kind, Leaf, Memory, Named, Place, Stage, Things
from gradsurg.sites.selection import (
    OUTSIDE,
    ROOT,
    Pattern,
    Types,
    matches,
    matches_type,
    nothing_matched,
)
from gradsurg.sites.selectors import near_in, picks_call, refuse_exported
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need

IN_COMPILED = (
    "torch.compile has compiled it, so that its operations are one node; use Outputs there"
)
ONE_NODE = (
    "it acted on nodes of code that torch.compile compiled, which combine many operations: eager "
    "code has other nodes"
)

Register = Callable[[Node], object]
"""Registers the hooks of a place on a node."""

Grads = tuple[Tensor | None, ...]


def watch_nodes(
    kind: Kind,
    door: Door,
    found: Sequence[Named],
    shared: Shared,
    make: Callable[[Door, Place], Register],
) -> None:
    """Hook the nodes that are made in calls of the modules, after each outermost call.

    `make` returns the function that registers the hooks of a place on a node.
    """
    model, chosen = door.model, {named.thing for named in found}
    # All modules around are needed to find the outermost call, and those inside, as they own the
    # nodes that they make.
    needed = {module for module in model.modules() if not chosen.isdisjoint(module.modules())}
    needed.update(part for module in needed & chosen for part in module.modules())
    followed = [named for named in modules_of(model) if named.thing in needed]
    held = {name: ref(named.owners[0]) for named in followed for name in named.names}
    latest: dict[object, tuple[object, list[tuple[int, Register]]]] = {}
    register_at = cache(partial(make, door))
    near = {name for named in found for name in named.names}
    left_out: dict[str, None] = {}  # modules inside which a compiled graph is one node

    def registers(graph: CallGraph) -> Iterator[tuple[int, Register]]:
        for index, name, call, occurrence in graph.made():
            place = Place(kind, call[:1], held[call[0]], call[1], node=name, occurrence=occurrence)
            if graph.task == FORWARD and graph.owners[0] and graph.owners[0][0] != ROOT:
                # A part of the model was called by itself: a selector with `call=` raises here.
                door.picking_at(replace(place, call=OUTSIDE))
            is_compiled = plain(name) == compiling.COMPILED
            if door.picking_at(place):
                if is_compiled:
                    door.note(kind, ONE_NODE)
                yield index, register_at(place)
            elif is_compiled and call[0] in near:
                left_out[call[0]] = None

    def take(graph: CallGraph) -> None:
        # Most forwards make the same nodes in the same calls as the one before.
        pattern = graph.pattern
        known, places = latest.get(graph.owners[0], (None, []))
        if known != pattern:
            places = [*registers(graph)]
            latest[graph.owners[0]] = pattern, places
        for index, register in places:
            register(graph.reached[index][1])

    follow(door, followed, shared, take)
    text = "it did not act inside {}: {}".format
    door.at_end(kind, lambda: text(shortened(left_out), IN_COMPILED) if left_out else "")


def _entering(door: Door, place: Place) -> Register:
    """Return the function that hooks the gradients entering a node at a place."""
    held = ref(door)  # weakly: graphs have the hook, also after the surgery was closed

    @cache
    def hook_at(index: int) -> Hook | None:
        open_door = held()
        return None if open_door is None else open_door.meet(replace(place, item=str(index)))

    def of_several(grads: Sequence[Tensor | None]) -> Grads | None:
        # Those that get a gradient are places, which is known in the backward alone.
        given = [index for index, grad in enumerate(grads) if grad is not None]
        return _changed(grads, [(index, hook_at(index)) for index in given])

    @cache
    def of_one() -> Callable[..., object]:
        hooks = [(0, door.meet(place))]
        return lambda grads: _changed(grads, hooks)

    def register(node: Node) -> None:
        is_single = len(autograd.outputs_of(node)) == 1
        node.register_prehook(of_one() if is_single else of_several)

    return register


def _leaving(door: Door, place: Place) -> Register:
    """Return the function that hooks the gradients leaving a node at a place."""
    is_residual = place.kind.mode == "residual"

    @cache
    def posthook(edges: tuple[int, ...]) -> Callable[..., object]:
        hooks = [(edge, door.meet(replace(place, item=str(edge)))) for edge in edges]
        if not is_residual and all(hook is None for _, hook in hooks):
            listed = ", ".join(map(str, edges)) or "none"
            door.refuse("edges of a node", place.kind, place.site, edges=listed)
        return changed_by(hooks)

    def register(node: Node) -> None:
        edges = residual_edges(node) if is_residual else edges_of(node)
        if edges or not is_residual:
            node.register_hook(posthook(edges))

    return register


def changed_by(hooks: Sequence[tuple[int, Hook | None]]) -> Callable[..., object]:
    """Return a node posthook that applies one hook at each of some edges."""
    return lambda grads, entering: _changed(grads, hooks, entering)


def _changed(
    grads: Sequence[Tensor | None], hooks: Sequence[tuple[int, Hook | None]], entering: Grads = ()
) -> Grads | None:
    """Apply hooks to the gradients with these indices; return None if all are unchanged."""
    changed: list[Tensor | None] | None = None
    for index, hook in hooks:
        result = None if hook is None else hook.call(grads[index], None, entering)
        if result is not None:
            changed = changed or list(grads)
            changed[index] = result
    return None if changed is None else tuple(changed)


def _watch(mode: str, door: Door, found: Sequence[Named], shared: Shared) -> None:
    watch_nodes(KINDS[mode], door, found, shared, _entering if mode == "enter" else _leaving)


MODES = ("enter", "leave", "residual")
KINDS = {mode: Kind("Nodes", mode, modules_of, partial(_watch, mode)) for mode in MODES}
# Which outputs of a node get a gradient is known in the backward alone.
KINDS["enter"] = replace(KINDS["enter"], known_at="backward")


@validated
class Nodes(Leaf):
    """Select the autograd nodes of one kind, made inside the modules whose name fits `module`.

    `pattern` is the name of a node, or a glob or `re:` on it: `Mul` fits every overload,
    `MulBackward1` only that one. It may also be a family: activation, attention, conv, loss,
    matmul, norm, rectifier, rnn, softmax. A rectifier is a ReLU or ReLU6; to PyTorch the latter is
    a Hardtanh, so that `nn.Hardtanh` is one too. `types` is a pattern on the class of the module.
    `call` picks one call of the module, `occurrence` one of several such nodes in the call, in the
    order in which they were made.

    `side="enter"` is a node prehook on the gradients with respect to the outputs of the operation.
    `side="leave"` is a node posthook on the gradients with respect to its inputs, of which `edge`
    picks one. Site ids are `module#call/Name[occurrence]`, such as
    `encoder.layers.0.linear1#0/AddmmBackward[0]`, followed by `.edge` at `side="leave"`.

    `edge="residual"` selects the edge into the branch of a residual connection, at the addition
    that ends it, and no edge of other nodes. Both operands of such an addition are computed from
    one tensor. The branch is the operand that is further from that tensor in the graph, with a
    matrix product or a convolution on the way.

    A node belongs to the innermost module that was running when it was made; nodes made in the
    model's own forward belong to `root`. So a weight's autocast cast, made once, belongs to the
    first call that needs it. A view of a tensor changed in place belongs to the first call that
    reads it. Nodes of a reentrant checkpoint are hooked in the backward pass, except those made
    outside of modules.

    Nodes on which no output of the model depends are not found, nor are nodes made after the
    model's forward (use `gs.hook(loss.grad_fn, ...)`) or in a backward pass. Raises LookupError
    after the first forward if no node is selected.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Nodes("Addmm", "0"))).attach(model):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model[0].bias.grad, model[1].bias.grad
    (tensor([0., 0.]), tensor([1.]))
    """

    pattern: Pattern
    module: Pattern = "*"
    side: Literal["enter", "leave"] = "enter"
    call: Annotated[int, Field(ge=0)] | None = None
    occurrence: Annotated[int, Field(ge=0)] | None = None
    edge: Annotated[int, Field(ge=0)] | Literal["residual"] | None = None
    types: Types = "*"
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)
    compile_limit: ClassVar[str] = "compiled code runs as one node"

    def __post_init__(self) -> None:
        if self.edge is not None and self.side == "enter":
            raise Contradiction("edge", "give side='leave' too: gradients leave a node by edges")

    @property
    def provides(self) -> frozenset[Need]:
        if self.side == "enter":
            return frozenset()
        kind = plain(self.pattern).removesuffix("Backward")
        return frozenset({"entering", "product"} if (kind, self.edge) in PRODUCTS else {"entering"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return KINDS["residual" if self.edge == "residual" else self.side]

    def near(self, named: Named) -> Sequence[str]:
        if not matches_type(named.owners[0], self.types):
            return ()
        return [name for name in named.names if matches(name, self.module)]

    def offers(self, named: Named) -> Sequence[str]:
        return named.names

    def picks(self, place: Place) -> bool:
        return (
            fits_node(place.node, self.pattern)
            and picks_call(self.call, place)
            and (self.edge in (None, "residual") or place.item in ("", str(self.edge)))
            and self.occurrence in (None, place.occurrence)
        )

    def check(self, things: Things, memory: Memory) -> None:
        found = things[kind := self.kind_at(memory.stage)]
        near = near_in(found, kind, memory.near[self])
        refuse_exported(self, found, near)
        if near:
            return
        choices = [name for named in found for name in named.names]
        if any(matches(name, self.module) for name in choices):
            types = sorted({type(named.thing).__name__ for named in found})
            raise nothing_matched(self, "types", str(self.types), types)
        raise nothing_matched(self, "module", self.module, choices)

    def expected(self, name: str) -> str:
        return ""

    def nothing_met(self, memory: Memory, may_meet_nodes: bool) -> SelectionError | None:
        return None if may_meet_nodes else nothing_made(self, "pattern", self.module, memory)


def nothing_made(query: Leaf, field: str, where: str, memory: Memory) -> SelectionError:
    """Return the error for a forward without a picked node; the pattern on nodes is in `field`.

    `where` is the pattern on modules.
    """
    near, pattern = memory.near[query], getattr(query, field)
    made = [place.node for place in memory.rejected if (place.kind, place.name) in near]
    families = [name for name in FAMILIES if any(fits_node(node, name) for node in made)]
    choices = [*families, *sorted({plain(name).removesuffix("Backward") for name in made})]
    numbers = [(name, getattr(query, name, None)) for name in ("call", "occurrence")]
    given = "".join(f" ({name}={number})" for name, number in numbers if number is not None)
    inside = "" if where == "*" else f" in '{where}'"
    is_compiled = any(plain(place.node) == compiling.COMPILED for place in memory.rejected)
    hint = " Compiled code runs as one node: use Outputs there." * is_compiled
    fault = f"no node{inside} is selected by '{pattern}'{given}"
    text = unknown(fault, "" if pattern in choices else pattern, choices)
    return SelectionError(query, field, text + hint)
