"""SavedTensors: what a backward pass reads back of its forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites._tensor_origins import Sort, Sorts
from gradsurg.sites.base import HookRegistry, Place, PlaceTest, SiteHook, Stage
from gradsurg.sites.call_tracker import Calls
from gradsurg.sites.graph_tracer import CallGraph, NodePlace, Tracer, around, plain
from gradsurg.sites.nodes import fits_node
from gradsurg.sites.selection import (
    ModuleSelector,
    Pattern,
    SiteIds,
    candidates,
    described,
    names_of,
)
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

BLOCK = "block"  # the pattern, and the site, of all that is saved while the block is open
What = Literal["activations", "parameters", "all"]
Wanted = Callable[[Tensor], bool]
Site = tuple[SiteHook, str]


@validated
class SavedTensors(ModuleSelector):
    """What the forward of the modules that fit `pattern` has saved, when backward reads it back.

    The forward is as it was; the backward computes with what the transform makes of the saved
    tensors, as with activations kept in few bits. Every floating tensor that is saved while a call
    of a matching module runs is a site, `name#call.number`, in the order of saving; of modules
    inside one another it belongs to the innermost that fits_node. `node` picks those of one kind of
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
    compile_limit: ClassVar[str] = "what is compiled chooses by itself what it saves"

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
        return said if fits_node(place.node, self.node) else False

    def place_if_added(self, thing: nn.Module | Tensor) -> Place | None:
        return Place(self.mechanism, BLOCK) if self.pattern == BLOCK else None

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        if self.pattern != BLOCK:
            return ModuleSelector.find(self, model, test)
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
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        match self.mechanism[-1]:
            case "block":
                self._hook_block(model, registry, stack)
            case "node":
                self._hook_nodes(model, registry, stack)
            case _:
                self._hook_modules(model, registry, stack)

    def _hook_block(self, model: nn.Module, registry: HookRegistry, stack: ExitStack) -> None:
        if not registry.selects(Place(self.mechanism, BLOCK, whole=True)):
            return
        if registry.stateful:
            raise ValueError(
                f"SavedTensors: site 'block' is many tensors, and {registry.stateful} remembers one "
                "thing for each site: choose modules or nodes"
            )
        gate = registry.hook_for(BLOCK)
        sorts = Sorts(model, stack)
        fits_sort = _wanted(self.of, sorts)

        def wanted(tensor: Tensor) -> bool:
            sorts.look()  # no call is followed that would say when a weight is another tensor
            if compiling.in_compiled():
                registry.note(COMPILED_SAVES)
            return fits_sort(tensor)

        one = pair(lambda tensor: (gate, BLOCK) if wanted(tensor) else None, autograd.saving())
        autograd.begin_saving(one)
        stack.callback(autograd.end_saving, one)

    def _hook_modules(self, model: nn.Module, registry: HookRegistry, stack: ExitStack) -> None:
        sorts = Sorts(model, stack)
        wanted = _wanted(self.of, sorts)
        calls = Saving(names_of(model), self.site_ids(registry), registry, sorts, wanted)
        stack.callback(calls.end)
        calls.hook(model, stack)
        enter = compiling.untraced(calls.enter, calls.enter_compiled)
        leave = compiling.untraced(calls.leave)
        for module in self.expect_modules(calls.names, registry):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_nodes(self, model: nn.Module, registry: HookRegistry, stack: ExitStack) -> None:
        named = names_of(model)
        places = [
            Place(self.mechanism, name, module)
            for module, names in candidates(named, self.mechanism, registry.selects).items()
            for name in names
        ]
        sorts = Sorts(model, stack)
        wanted = _wanted(self.of, sorts)
        on_the_way = _wanted(self.of, sorts, "parameter")
        met = False
        known: dict[NodePlace, bool] = {}

        @cache
        def named_so(node: str) -> bool:
            return any(registry.selects(replace(place, node=node)) is not False for place in places)

        def take(graph: CallGraph) -> None:
            nonlocal met
            sorts.look()
            for node, spot in graph.nodes(named_so):
                if spot not in known:
                    known[spot] = bool(registry.selects(self._place(spot)))
                if known[spot]:
                    met = True
                    makes = sorts.makes(spot.call.module)
                    _hook_node(node, spot, on_the_way if makes else wanted, registry)
            if not met and graph.whole and not graph.empty and not graph.hides_nodes():
                raise self._nothing(graph)

        chosen = {place.thing for place in places if isinstance(place.thing, nn.Module)}
        Tracer().follow(model, around(named, chosen, inside=True), take, stack)

    def _nothing(self, graph: CallGraph) -> SelectionError:
        names = sorted({plain(spot.name).removesuffix("Backward") for _, spot in graph.nodes()})
        return SelectionError(
            self,
            "node",
            f"no node of '{described(self)}' is selected by node='{self.node}'. "
            f"The model's are: {', '.join(names)}."
            + " What is compiled runs as one node."
            * ("CompiledFunction" in names),
        )

    def _place(self, spot: NodePlace) -> Place:
        call = spot.call
        where = self.mechanism, call.name, call.module, call.number, spot.name, spot.occurrence
        return Place(*where, whole=True)


def _hook_node(node: Node, spot: NodePlace, wanted: Wanted, registry: HookRegistry) -> None:
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
            gate = registry.hook_for(site)
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


COMPILED_SAVES = (
    "what torch.compile has compiled chooses by itself what it saves: there may be fewer sites "
    "than in eager, and other tensors in them"
)


class Saving(Calls):
    """The calls that are running, each with the pair of hooks that it has put in force."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        chosen: SiteIds,
        registry: HookRegistry,
        sorts: Sorts,
        wanted: Wanted,
    ) -> None:
        super().__init__(names)
        self.registry = registry
        self.sorts = sorts
        self.wanted = wanted
        self.site_ids = chosen
        self.open: list[_Open] = []

    def begin(self) -> None:
        self.end()

    def end(self) -> None:
        """Take all out of force: a KeyboardInterrupt runs no forward hook."""
        while self.open:
            self._close()

    def enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        # A recomputation takes what its checkpoint has been given of the forward.
        call = self.next(module)
        base = None if call is None else self.site_ids(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            self.without_graph(module)
            return
        self.sorts.look(module)
        outer = autograd.saving()
        for other in self.open:
            # Of two calls inside one another the inner one takes the place of the outer.
            if outer is not None and outer[0] is other.pair[0]:
                outer = other.outer
        numbered = _Numbered(base, self.registry, self.wanted)
        own = pair(numbered, outer)
        self.open.append(_Open(module, own, outer, numbered))
        autograd.begin_saving(own)

    def enter_compiled(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """As `enter`, in a compiled model: what is saved there is told of."""
        self.registry.note(COMPILED_SAVES)
        self.enter(module, args)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # A call that nobody has entered, as after a hook that has raised before, has nothing open.
        if any(own.module is module for own in self.open):
            while self._close() is not module:
                pass

    def _close(self) -> nn.Module:
        own = self.open.pop()
        autograd.end_saving(own.pair)
        if not own.numbered.number:
            self.registry.expect(own.numbered.base, skipped="saves no such tensor of its own")
        return own.module


class _Numbered:
    """The sites of one call: a number for each tensor that it saves and that is wanted."""

    def __init__(self, base: str, registry: HookRegistry, wanted: Wanted) -> None:
        self.base = base
        self.registry = registry
        self.wanted = wanted
        self.number = 0

    def __call__(self, tensor: Tensor) -> Site | None:
        if not self.wanted(tensor):
            return None
        site = f"{self.base}.{self.number}"
        self.number += 1
        self.registry.forget(self.base)
        return self.registry.hook_for(site), site


@dataclass(frozen=True, slots=True)
class _Open:
    """A call that is running; `outer` are the hooks that were in force before it."""

    module: nn.Module
    pair: autograd.Pair
    outer: autograd.Pair | None
    numbered: _Numbered


def pair(site_of: Callable[[Tensor], Site | None], outer: autograd.Pair | None) -> autograd.Pair:
    """Hooks that keep a tensor as `outer` does, and let it through its gate when it is read."""
    give_back = outer[1] if outer is not None else None

    def pack(tensor: Tensor) -> object:
        site = site_of(tensor)
        if outer is not None:
            return site, outer[0](tensor), 0
        return site, tensor.detach(), tensor._version  # the tensor itself would never be freed

    def unpack(packed: tuple[Site | None, Any, int]) -> Tensor:
        site, kept, version = packed
        if give_back is not None:
            tensor = give_back(kept)
        else:
            tensor = kept
            if tensor._version != version:
                raise _changed_since(site, tensor, version)
        # Somebody may look at it outside a backward, and sees what was saved.
        if site is None or not autograd.in_backward():
            return tensor
        gate, name = site
        result = gate(tensor)
        if result is None:
            return tensor
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"SavedTensors: site '{name}' is read back under create_graph, and PyTorch cannot "
                "differentiate what is done to a saved tensor: use Activations, or no create_graph"
            )
        return result

    return pack, unpack


def _changed_since(site: Site | None, tensor: Tensor, version: int) -> RuntimeError:
    where = "" if site is None else f" at site '{site[1]}'"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {list(tensor.shape)} {tensor.dtype}{where} is at version {tensor._version}; "
        f"expected version {version} instead"
    )


def saved_by(node: Node) -> Iterator[tuple[str, Any, Callable[[], Tensor]]]:
    """What a node has saved: its name, itself (Any: PyTorch names no type) and how to read it."""
    for key in dir(node):
        if key.startswith("_raw_saved_"):
            name = key.removeprefix("_raw_saved_")
            read = "saved_tensors" if name == "tensors" else f"_saved_{name}"
            raw = getattr(node, key)
            if isinstance(raw, tuple):
                for index, saved in enumerate(raw):
                    yield f"{name}.{index}", saved, _reader(node, read, index)
            else:
                yield name, raw, _reader(node, read, None)


def _reader(node: Node, name: str, index: int | None) -> Callable[[], Tensor]:
    return lambda: getattr(node, name) if index is None else getattr(node, name)[index]
