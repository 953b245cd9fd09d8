"""SavedTensors: what a backward pass reads back of its forward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal
from weakref import ref

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurg import engine
from gradsurg.fields import Contradiction, validated
from gradsurg.sites._modules import Calls, ModuleSelector, names_of
from gradsurg.sites._resolver import Graph, Made, around, resolver
from gradsurg.sites._spans import plain
from gradsurg.sites.base import Gates, Keeps, Place, SiteGate, Stage, check_pattern
from gradsurg.sites.nodes import fits
from gradsurg.transforms.base import Scope

BLOCK = "block"  # the pattern, and the site, of all that is saved while the block is open
LOOKS = {"AsStrided", "Detach", "Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy"}
LOOKS |= {"Transpose", "Unsqueeze", "UnsafeView", "View"}
"""The nodes that give a tensor in another shape or dtype."""

What = Literal["activations", "parameters", "all"]
Wanted = Callable[[Tensor], bool]
Site = tuple[SiteGate, str]


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

    `of` says what: `activations` are all floating tensors but parameters and buffers (and views of
    them and what autocast makes of trainable ones), so also the statistics of a norm and the mask
    of a dropout; `parameters` are the weights, views of them or cast ones; `all` is both. Whole
    numbers, as indices, are always left alone.

    The transform is taken to be a constant where it acts: a backward with `create_graph`, which
    would have to differentiate it, is refused. A tensor is read back once in each backward, and
    counted as often. What was changed in place since it was saved is refused as PyTorch does.
    Other hooks for saved tensors, as those of a checkpoint or `save_on_cpu`, stay in force: what
    they give back is what the transform gets. Not with `node`, where one pair alone can be and this
    is an error; and not inside of `block`, where what such hooks take is theirs. What runs compiled
    chooses by itself what it saves.
    """

    node: Annotated[str, AfterValidator(check_pattern)] | None = None
    of: What = "activations"

    stages: ClassVar[tuple[Stage, ...]] = ("saved",)
    has_value: ClassVar[bool] = False
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
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        match self.mechanism[-1]:
            case "block":
                self._hook_block(model, gates, stack)
            case "node":
                self._hook_nodes(model, gates, stack)
            case _:
                self._hook_modules(model, gates, stack)

    def _hook_block(self, model: nn.Module, gates: Gates, stack: ExitStack) -> None:
        if not gates.keeps(Place(self.mechanism, BLOCK, whole=True)):
            return
        if gates.stateful:
            raise ValueError(
                f"SavedTensors: site 'block' is many tensors, and {gates.stateful} remembers one "
                "thing for each site: choose modules or nodes"
            )
        gate = gates.gate(BLOCK)
        wanted = _wanted(self.of, model)
        pair = _pair(lambda tensor: (gate, BLOCK) if wanted(tensor) else None, engine.saving())
        engine.begin_saving(pair)
        stack.callback(engine.end_saving, pair)

    def _hook_modules(self, model: nn.Module, gates: Gates, stack: ExitStack) -> None:
        calls = _Saving(names_of(model), self, gates, _wanted(self.of, model))
        stack.callback(calls.end)
        calls.hook(model, stack)
        enter, leave = engine.untraced(calls.enter), engine.untraced(calls.leave)
        for module in self.hookable(calls.names, gates):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_nodes(self, model: nn.Module, gates: Gates, stack: ExitStack) -> None:
        named = names_of(model)
        places = [
            Place(self.mechanism, name, module)
            for module, names in named.items()
            for name in names
            if gates.keeps(Place(self.mechanism, name, module)) is not False
        ]
        wanted = _wanted(self.of, model)
        met = False
        known: dict[tuple[object, ...], bool] = {}

        @cache
        def named_so(node: str) -> bool:
            return any(gates.keeps(replace(place, node=node)) is not False for place in places)

        def take(graph: Graph) -> None:
            nonlocal met
            for made in graph.nodes(named_so):
                key = made[1:]
                if key not in known:
                    known[key] = bool(gates.keeps(self._place(made)))
                if known[key]:
                    met = True
                    _hook_node(made, wanted, gates)
            if not met and graph.whole and not graph.empty and not graph.hides():
                names = sorted(
                    {plain(made.name).removesuffix("Backward") for made in graph.nodes()}
                )
                raise LookupError(
                    f"SavedTensors: no node of '{self.said()}' is selected by node='{self.node}'. "
                    f"The model's are: {', '.join(names)}."
                )

        chosen = {place.thing for place in places if isinstance(place.thing, nn.Module)}
        resolver().follow(model, around(named, chosen, inside=True), take, stack)

    def _place(self, made: Made) -> Place:
        call = made.call
        where = self.mechanism, call.name, call.module, call.number, made.name, made.occurrence
        return Place(*where, whole=True)


class _Saving(Calls):
    """The calls that are running, each with the pair of hooks that it has put in force."""

    def __init__(
        self, names: dict[nn.Module, list[str]], at: SavedTensors, gates: Gates, wanted: Wanted
    ) -> None:
        super().__init__(names)
        self.gates = gates
        self.wanted = wanted
        self.chosen = at.chosen(gates)
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
        base = None if call is None else self.chosen(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            self.without_graph(module)
            return
        outer = engine.saving()
        for other in self.open:
            # Of two calls inside one another the inner one takes the place of the outer.
            if outer is not None and outer[0] is other.pair[0]:
                outer = other.outer
        numbered = _Numbered(base, self.gates, self.wanted)
        pair = _pair(numbered, outer)
        self.open.append(_Open(module, pair, outer, numbered))
        engine.begin_saving(pair)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # A call that nobody has entered, as after a hook that has raised before, has nothing open.
        if any(own.module is module for own in self.open):
            while self._close() is not module:
                pass

    def _close(self) -> nn.Module:
        own = self.open.pop()
        engine.end_saving(own.pair)
        if not own.numbered.number:
            self.gates.expect(own.numbered.base, skipped="saves no such tensor of its own")
        return own.module


class _Numbered:
    """The sites of one call: a number for each tensor that it saves and that is wanted."""

    def __init__(self, base: str, gates: Gates, wanted: Wanted) -> None:
        self.base = base
        self.gates = gates
        self.wanted = wanted
        self.number = 0

    def __call__(self, tensor: Tensor) -> Site | None:
        if not self.wanted(tensor):
            return None
        site = f"{self.base}.{self.number}"
        self.number += 1
        self.gates.forget(self.base)
        return self.gates.gate(site), site


@dataclass(frozen=True, slots=True)
class _Open:
    """A call that is running; `outer` are the hooks that were in force before it."""

    module: nn.Module
    pair: engine.Pair
    outer: engine.Pair | None
    numbered: _Numbered


def _hook_node(made: Made, wanted: Wanted, gates: Gates) -> None:
    """Put a pair of hooks on all that a node has saved and that is wanted."""
    base = f"{made.call.id}/{plain(made.name)}[{made.occurrence}]"
    for name, saved, read in _saved_by(made.node):
        data = saved.data
        if data is None:
            continue
        site = f"{base}.{name}"
        if saved.unpack_hook is not None:
            raise RuntimeError(
                f"SavedTensors: at site '{site}' there are hooks already, as those of a "
                "checkpoint, and a node takes one pair alone: choose the module without node="
            )
        # Once there are hooks, PyTorch no longer looks for changes in place: have it look now.
        if wanted(read()):
            gate = gates.gate(site)
            saved.register_hooks(*_pair(lambda _, found=(gate, site): found, None))


def _saved_by(node: Node) -> Iterator[tuple[str, Any, Callable[[], Tensor]]]:
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


def _pair(site_of: Callable[[Tensor], Site | None], outer: engine.Pair | None) -> engine.Pair:
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
        if site is None or not engine.in_backward():
            return tensor
        gate, name = site
        result = gate(tensor)
        if result is None:
            return tensor
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"SavedTensors: site '{name}' is read back under create_graph, and PyTorch cannot "
                "differentiate what is done to a saved tensor: use Values, or no create_graph"
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


def _wanted(of: What, model: nn.Module) -> Wanted:
    """Whether a saved tensor is of the sort that was asked for."""
    held = ref(model)  # a graph keeps its hooks

    def wanted(tensor: Tensor) -> bool:
        if not tensor.is_floating_point():
            return False
        own = tensor._base if tensor._base is not None else tensor
        if _of_parameter(own):
            return of != "activations"
        if of == "parameters":
            return False
        owner = held()
        if own.grad_fn is not None or own.requires_grad or owner is None:
            return True
        return all(own is not buffer for buffer in owner.buffers())

    return wanted


def _of_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter in another shape or dtype."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and plain(node.name()).removesuffix("Backward") in LOOKS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)
