"""SavedTensors: what a backward pass reads back of its forward."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites._modules import ModuleSelector, names_of, possible
from gradsurg.sites._node_names import fits, plain
from gradsurg.sites._patterns import Pattern
from gradsurg.sites._resolver import Graph, Spot, around, resolver
from gradsurg.sites._saved_pairs import pair, saved_by
from gradsurg.sites._saving import COMPILED_SAVES, Saving, Wanted
from gradsurg.sites._sorts import Sort, Sorts
from gradsurg.sites.base import HookRegistry, Keeps, Place, Stage
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

BLOCK = "block"  # the pattern, and the site, of all that is saved while the block is open
What = Literal["activations", "parameters", "all"]


@validated
class SavedTensors(ModuleSelector):
    """What the forward of the modules that fit `pattern` has saved, when backward reads it back.

    The forward is as it was; the backward computes with what the transform makes of the saved
    tensors, as with activations kept in few bits. Every floating tensor that is saved while a call
    of a matching module runs is a site, `name#call.number`, in the order of saving; of modules
    inside one another it belongs to the innermost that fits. `node` picks those of one kind of
    autograd node, a name, a pattern or a family as at `Nodes`; then the site is that of the node
    with the name PyTorch gives to what it has saved, `act#0/ReluBackward[0].result`. The pattern
    `block` stands for all that is saved while the block is open, outside of modules too, but in
    the thread that attached alone; its one site is `block`.

    `of` says what: `parameters` are the weights, views of them or cast ones, what stands in their
    place during a `torch.func.functional_call`, and what a parametrization (`weight_norm`) makes
    and saves on the way; `activations` are all other floating tensors but buffers, so also the
    statistics of a norm and the mask of a dropout; `all` is both. Whole numbers, as indices, are
    always left alone. The cast of a frozen weight has no graph and is known by its values; the norm
    that the deprecated `torch.nn.utils.weight_norm` saves on its way is not known.

    The transform is taken to be a constant where it acts: a backward with `create_graph`, which
    would have to differentiate it, is refused. A tensor is read back once in each backward, and
    counted as often. What was changed in place since it was saved is refused as PyTorch does.
    Other hooks for saved tensors, as those of a checkpoint or `save_on_cpu`, stay in force: what
    they give back is what the transform gets. Not with `node`, where one pair alone can be and this
    is an error; and not inside of `block`, where what such hooks take is theirs. What runs compiled
    chooses by itself what it saves, which a warning tells when the block ends.
    """

    node: Pattern | None = None
    of: What = "activations"

    stages: ClassVar[tuple[Stage, ...]] = ("saved",)
    uncompiled: ClassVar[str] = "what is compiled chooses by itself what it saves"

    def __post_init__(self) -> None:
        if self.pattern == BLOCK:
            fields = ("types", "depth", "index", "call", "node")
            asked = [name for name in fields if getattr(self, name) not in (None, "*")]
            if asked:
                raise Contradiction(asked[0], "pattern 'block' is all that is saved anywhere")

    @property
    def mechanism(self) -> tuple[object, ...]:
        kind = BLOCK if self.pattern == BLOCK else "module" if self.node is None else "node"
        return ("SavedTensors", self.stage, self.of, kind)

    def selects(self, place: Place) -> bool | None:
        if self.pattern == BLOCK:
            return place.mechanism == self.mechanism
        said = ModuleSelector.selects(self, place)
        if self.node is None or said is False:
            return said
        if place.node is None:
            return None
        return said if fits(place.node, self.node) else False

    def later(self, thing: nn.Module | Tensor) -> Place | None:
        return Place(self.mechanism, BLOCK) if self.pattern == BLOCK else None

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        if self.pattern != BLOCK:
            return ModuleSelector.find(self, model, keeps)
        if any(name == BLOCK for names in names_of(model).values() for name in names):
            raise ValueError(
                "SavedTensors: 'block' stands for all that is saved while the block is open, and "
                "the model has a module of this name: write 're:block' for the module"
            )
        return [BLOCK]

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: HookRegistry,
        stack: ExitStack,
    ) -> None:
        match self.mechanism[-1]:
            case "block":
                self._hook_block(model, gates, stack)
            case "node":
                self._hook_nodes(model, gates, stack)
            case _:
                self._hook_modules(model, gates, stack)

    def _hook_block(self, model: nn.Module, gates: HookRegistry, stack: ExitStack) -> None:
        if not gates.keeps(Place(self.mechanism, BLOCK, whole=True)):
            return
        if gates.stateful:
            raise ValueError(
                f"SavedTensors: site 'block' is many tensors, and {gates.stateful} remembers one "
                "thing for each site: choose modules or nodes"
            )
        gate = gates.gate(BLOCK)
        sorts = Sorts(model, stack)
        fits_sort = _wanted(self.of, sorts)

        def wanted(tensor: Tensor) -> bool:
            sorts.look()  # no call is followed that would say when a weight is another tensor
            if compiling.in_compiled():
                gates.note(COMPILED_SAVES)
            return fits_sort(tensor)

        one = pair(lambda tensor: (gate, BLOCK) if wanted(tensor) else None, autograd.saving())
        autograd.begin_saving(one)
        stack.callback(autograd.end_saving, one)

    def _hook_modules(self, model: nn.Module, gates: HookRegistry, stack: ExitStack) -> None:
        sorts = Sorts(model, stack)
        wanted = _wanted(self.of, sorts)
        calls = Saving(names_of(model), self.chosen(gates), gates, sorts, wanted)
        stack.callback(calls.end)
        calls.hook(model, stack)
        enter = compiling.untraced(calls.enter, calls.enter_compiled)
        leave = compiling.untraced(calls.leave)
        for module in self.hookable(calls.names, gates):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_nodes(self, model: nn.Module, gates: HookRegistry, stack: ExitStack) -> None:
        named = names_of(model)
        places = [
            Place(self.mechanism, name, module)
            for module, names in possible(named, self.mechanism, gates.keeps).items()
            for name in names
        ]
        sorts = Sorts(model, stack)
        wanted = _wanted(self.of, sorts)
        on_the_way = _wanted(self.of, sorts, "parameter")
        met = False
        known: dict[Spot, bool] = {}

        @cache
        def named_so(node: str) -> bool:
            return any(gates.keeps(replace(place, node=node)) is not False for place in places)

        def take(graph: Graph) -> None:
            nonlocal met
            sorts.look()
            for node, spot in graph.nodes(named_so):
                if spot not in known:
                    known[spot] = bool(gates.keeps(self._place(spot)))
                if known[spot]:
                    met = True
                    makes = sorts.makes(spot.call.module)
                    _hook_node(node, spot, on_the_way if makes else wanted, gates)
            if not met and graph.whole and not graph.empty and not graph.hides():
                raise self._nothing(graph)

        chosen = {place.thing for place in places if isinstance(place.thing, nn.Module)}
        resolver().follow(model, around(named, chosen, inside=True), take, stack)

    def _nothing(self, graph: Graph) -> SelectionError:
        names = sorted({plain(spot.name).removesuffix("Backward") for _, spot in graph.nodes()})
        return SelectionError(
            self,
            "node",
            f"no node of '{self.said()}' is selected by node='{self.node}'. "
            f"The model's are: {', '.join(names)}."
            + " What is compiled runs as one node."
            * ("CompiledFunction" in names),
        )

    def _place(self, spot: Spot) -> Place:
        call = spot.call
        where = self.mechanism, call.name, call.module, call.number, spot.name, spot.occurrence
        return Place(*where, whole=True)


def _hook_node(node: Node, spot: Spot, wanted: Wanted, gates: HookRegistry) -> None:
    """Put a pair of hooks on all that a node has saved and that is wanted."""
    for name, saved, read in saved_by(node):
        data = saved.data
        if data is None:
            continue
        site = f"{spot.id}.{name}"
        if saved.unpack_hook is not None:
            raise RuntimeError(
                f"SavedTensors: at site '{site}' there are hooks already, as those of a "
                "checkpoint, and a node takes one pair alone: choose the module without node="
            )
        # Once there are hooks, PyTorch no longer looks for changes in place: have it look now.
        if wanted(read()):
            gate = gates.gate(site)
            saved.register_hooks(*pair(lambda _, found=(gate, site): found, None))


def _wanted(of: What, sorts: Sorts, known: Sort | None = None) -> Wanted:
    """Whether a saved tensor is of the sort that was asked for; it may be `known` already."""

    def wanted(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and _fits(of, known or sorts.sort(tensor))

    return wanted


def _fits(of: What, sort: Sort) -> bool:
    match of:
        case "activations":
            return sort == "activation"
        case "parameters":
            return sort == "parameter"
        case "all":
            return sort != "buffer"
