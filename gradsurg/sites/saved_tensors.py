"""SavedTensors: the tensors that a backward pass reads back from the forward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites._tensor_origins import Origin, TensorOrigins
from gradsurg.sites.base import Attached, Place, PlaceTest, SiteHook, Stage
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

BLOCK = "block"  # the pattern, and the site, of all tensors saved while the block is open
Choice = Literal["activations", "parameters", "all"]
TensorFilter = Callable[[Tensor], bool]
Site = tuple[SiteHook, str]

COMPILED_SAVES = (
    "what torch.compile has compiled chooses by itself what it saves: there may be fewer sites "
    "than in eager, and other tensors in them"
)


@validated
class SavedTensors(ModuleSelector):
    """The tensors saved by the forward of the selected modules, when backward reads them back.

    The forward pass is unchanged; the backward pass computes with the transformed tensors, as with
    activations stored in few bits. Every floating tensor saved during a call of a matching module
    is a site, `name#call.number` in the order of saving; of nested modules it belongs to the
    innermost that matches. `node` selects the tensors saved by one kind of autograd node: a name, a
    pattern or a family, as for `Nodes`. Then the site is the node's with PyTorch's name for the
    saved tensor, `act#0/ReluBackward[0].result`. The pattern `block` selects all tensors saved
    while the block is open, also outside of modules, but only in the thread that attached; its one
    site is `block`.

    `of` is the kind of tensor: `parameters` are the weights, their views and casts, the tensors in
    their place in a `torch.func.functional_call`, and those that a parametrization (`weight_norm`)
    computes and saves; `activations` are all other floating tensors except buffers, so also the
    statistics of a norm and the mask of a dropout; `all` is both. Integer tensors, such as indices,
    are never changed. The cast of a frozen weight has no graph and is recognized by its values; the
    norm saved by the deprecated `torch.nn.utils.weight_norm` is not recognized.

    The transform is a constant to autograd, so a backward pass with `create_graph` raises. A tensor
    is read once in each backward pass, and counted then. A tensor changed in place since it was
    saved raises the error that PyTorch would raise. Other saved-tensor hooks, as those of a
    checkpoint or `save_on_cpu`, stay active: the transform gets the tensors that they return. Two
    exceptions: with `node`, a saved tensor that has such hooks raises; with `block`, tensors packed
    by them are not seen. Compiled code decides itself which tensors it saves; a warning on detach
    says so.
    """

    node: Pattern | None = None
    of: Choice = "activations"

    stages: ClassVar[tuple[Stage, ...]] = ("saved",)
    changes: ClassVar[str] = "saved tensors"
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
        selected = ModuleSelector.selects(self, place)
        if self.node is None or selected is False:
            return selected
        if place.node is None:
            return None
        return selected if fits_node(place.node, self.node) else False

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

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        match self.mechanism[-1]:
            case "block":
                self._hook_block(model, attached, stack)
            case "node":
                self._hook_nodes(model, attached, stack)
            case _:
                self._hook_modules(model, attached, stack)

    def _hook_block(self, model: nn.Module, attached: Attached, stack: ExitStack) -> None:
        if not attached.selects(Place(self.mechanism, BLOCK, whole=True)):
            return
        if attached.stateful:
            raise ValueError(
                f"SavedTensors: site 'block' is many tensors, and {attached.stateful} remembers "
                "one thing for each site: choose modules or nodes"
            )
        hook = attached.hook_at(BLOCK)
        origins = TensorOrigins(model, stack)
        is_chosen = _filter(self.of, origins)

        def wanted(tensor: Tensor) -> bool:
            origins.update()  # no module hook would show that a weight was replaced
            if compiling.in_compiled():
                attached.note(COMPILED_SAVES)
            return is_chosen(tensor)

        pair = hook_pair(
            lambda tensor: (hook, BLOCK) if wanted(tensor) else None, autograd.saved_tensor_hooks()
        )
        autograd.push_saved_tensor_hooks(pair)
        stack.callback(autograd.remove_saved_tensor_hooks, pair)

    def _hook_modules(self, model: nn.Module, attached: Attached, stack: ExitStack) -> None:
        origins = TensorOrigins(model, stack)
        wanted = _filter(self.of, origins)
        calls = _SavingCalls(names_of(model), self.site_ids(attached), attached, origins, wanted)
        stack.callback(calls.close_all)
        calls.hook(model, stack)
        enter = compiling.untraced(calls.enter, calls.enter_compiled)
        leave = compiling.untraced(calls.leave)
        for module in self.expect_modules(calls.names, attached):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_nodes(self, model: nn.Module, attached: Attached, stack: ExitStack) -> None:
        named = names_of(model)
        places = [
            Place(self.mechanism, name, module)
            for module, names in candidates(named, self.mechanism, attached.selects).items()
            for name in names
        ]
        origins = TensorOrigins(model, stack)
        wanted = _filter(self.of, origins)
        wanted_in_parametrization = _filter(self.of, origins, "parameter")
        hooked = False
        decisions: dict[NodePlace, bool] = {}

        @cache
        def wanted_node(node: str) -> bool:
            return any(attached.selects(replace(place, node=node)) is not False for place in places)

        def take(graph: CallGraph) -> None:
            nonlocal hooked
            origins.update()
            for node, place in graph.nodes(wanted_node):
                if place not in decisions:
                    decisions[place] = bool(attached.selects(self._place(place)))
                if decisions[place]:
                    hooked = True
                    inside = origins.is_parametrization(place.call.module)
                    _hook_node(
                        node, place, wanted_in_parametrization if inside else wanted, attached
                    )
            if not hooked and graph.whole and not graph.empty and not graph.hides_nodes():
                raise self._nothing_selected(graph)

        chosen = {place.thing for place in places if isinstance(place.thing, nn.Module)}
        Tracer().follow(model, around(named, chosen, inside=True), take, stack)

    def _nothing_selected(self, graph: CallGraph) -> SelectionError:
        names = sorted({plain(place.name).removesuffix("Backward") for _, place in graph.nodes()})
        return SelectionError(
            self,
            "node",
            f"no node of '{described(self)}' is selected by node='{self.node}'. "
            f"The model's are: {', '.join(names)}."
            + " What is compiled runs as one node."
            * ("CompiledFunction" in names),
        )

    def _place(self, place: NodePlace) -> Place:
        call = place.call
        where = self.mechanism, call.name, call.module, call.number, place.name, place.occurrence
        return Place(*where, whole=True)


def _hook_node(node: Node, place: NodePlace, wanted: TensorFilter, attached: Attached) -> None:
    """Register a pair of hooks on each wanted tensor that a node has saved."""
    for name, saved, read in _saved_by(node):
        data = saved.data
        if data is None:
            continue
        site = f"{place.id}.{name}"
        if saved.unpack_hook is not None:
            raise RuntimeError(
                f"SavedTensors: at site '{site}' there are hooks already, as those of a "
                "checkpoint, and a node takes one pair alone: choose the module without node="
            )
        # PyTorch checks for in-place changes only without hooks: `read` makes it check now.
        if wanted(read()):
            hook = attached.hook_at(site)
            saved.register_hooks(*hook_pair(lambda _, packed=(hook, site): packed, None))


def _filter(of: Choice, origins: TensorOrigins, known: Origin | None = None) -> TensorFilter:
    """Return whether a saved tensor is of the chosen kind; its origin may be `known`."""

    def wanted(tensor: Tensor) -> bool:
        if not tensor.is_floating_point():
            return False
        origin = known or origins.origin(tensor)
        match of:
            case "activations":
                return origin == "activation"
            case "parameters":
                return origin == "parameter"
            case "all":
                return origin != "buffer"

    return wanted


class _SavingCalls(Calls):
    """Activates a pair of saved-tensor hooks during each selected call."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        site_ids: SiteIds,
        attached: Attached,
        origins: TensorOrigins,
        wanted: TensorFilter,
    ) -> None:
        super().__init__(names)
        self.attached = attached
        self.origins = origins
        self.wanted = wanted
        self.site_ids = site_ids
        self.open: list[_OpenCall] = []

    def begin(self) -> None:
        self.close_all()

    def close_all(self) -> None:
        """Deactivate all hooks: a KeyboardInterrupt runs no forward hooks."""
        while self.open:
            self._close()

    def enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        # A recomputation gets no site here: the checkpoint has saved for the forward.
        call = self.next(module)
        base = None if call is None else self.site_ids(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            self.without_graph(module)
            return
        self.origins.update(module)
        outer = autograd.saved_tensor_hooks()
        for other in self.open:
            # Of two nested calls the inner one replaces the outer.
            if outer is not None and outer[0] is other.pair[0]:
                outer = other.outer
        numbered = _NumberedSites(base, self.attached, self.wanted)
        pair = hook_pair(numbered, outer)
        self.open.append(_OpenCall(module, pair, outer, numbered))
        autograd.push_saved_tensor_hooks(pair)

    def enter_compiled(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Call `enter` in a compiled model, and warn about what it saves."""
        self.attached.note(COMPILED_SAVES)
        self.enter(module, args)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # A call may end without having been entered, if the hook of another library has raised.
        if any(call.module is module for call in self.open):
            while self._close() is not module:
                pass

    def _close(self) -> nn.Module:
        call = self.open.pop()
        autograd.remove_saved_tensor_hooks(call.pair)
        if not call.sites.number:
            self.attached.expect(call.sites.base, skipped="saves no such tensor of its own")
        return call.module


class _NumberedSites:
    """The sites of one call: a number for each wanted tensor that it saves."""

    def __init__(self, base: str, attached: Attached, wanted: TensorFilter) -> None:
        self.base = base
        self.attached = attached
        self.wanted = wanted
        self.number = 0

    def __call__(self, tensor: Tensor) -> Site | None:
        if not self.wanted(tensor):
            return None
        site = f"{self.base}.{self.number}"
        self.number += 1
        self.attached.forget(self.base)
        return self.attached.hook_at(site), site


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A running call; `outer` is the pair of hooks that was active before it."""

    module: nn.Module
    pair: autograd.Pair
    outer: autograd.Pair | None
    sites: _NumberedSites


def hook_pair(
    site_of: Callable[[Tensor], Site | None], outer: autograd.Pair | None
) -> autograd.Pair:
    """Return saved-tensor hooks that store a tensor as `outer` does and transform it when read."""
    unpack_outer = outer[1] if outer is not None else None

    def pack(tensor: Tensor) -> object:
        site = site_of(tensor)
        if outer is not None:
            return site, outer[0](tensor), 0
        return site, tensor.detach(), tensor._version  # holding the tensor itself would leak it

    def unpack(packed: tuple[Site | None, Any, int]) -> Tensor:
        site, stored, version = packed
        if unpack_outer is not None:
            tensor = unpack_outer(stored)
        else:
            tensor = stored
            if tensor._version != version:
                raise _changed_since(site, tensor, version)
        # Reading a saved tensor outside a backward pass returns it unchanged.
        if site is None or not autograd.in_backward():
            return tensor
        hook, name = site
        result = hook(tensor)
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


def _saved_by(node: Node) -> Iterator[tuple[str, Any, Callable[[], Tensor]]]:
    """Yield each tensor saved by a node: name, SavedTensor (Any: untyped), function to read it."""
    for key in dir(node):
        if key.startswith("_raw_saved_"):
            name = key.removeprefix("_raw_saved_")
            attribute = "saved_tensors" if name == "tensors" else f"_saved_{name}"
            raw = getattr(node, key)
            if isinstance(raw, tuple):
                for index, saved in enumerate(raw):
                    yield f"{name}.{index}", saved, _reader(node, attribute, index)
            else:
                yield name, raw, _reader(node, attribute, None)


def _reader(node: Node, name: str, index: int | None) -> Callable[[], Tensor]:
    return lambda: getattr(node, name) if index is None else getattr(node, name)[index]
