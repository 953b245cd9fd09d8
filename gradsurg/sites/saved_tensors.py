"""SavedTensors: the tensors that a backward pass reads back from the forward pass."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import is_parametrized

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites.calls import Shared, hook_calls, modules_of
from gradsurg.sites.node_names import fits_node, plain
from gradsurg.sites.nodes import Register, nothing_made, watch_nodes
from gradsurg.sites.places import Door, Hook, Kind, Memory, Named, Place, Stage, Things
from gradsurg.sites.selection import Pattern
from gradsurg.sites.selectors import ModuleSelector, near_in, refuse_exported
from gradsurg.torch_internals import autograd, compiling

BLOCK = "block"  # the pattern, and the site, of all tensors saved while the block is open
VIEWS = {"AsStrided", "Detach", "Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy"}
VIEWS |= {"Transpose", "Unsqueeze", "UnsafeView", "View"}
"""The nodes that return their input in another shape or dtype."""

PARAMETRIZED = "the weights that a parametrization computes are taken for activations"
COMPILED_SAVES = (
    "code that torch.compile compiled chooses which tensors it saves: there may be fewer sites "
    "than in eager code, with other tensors"
)

ALL = ("activations", "parameters")
Met = tuple[Hook | None, str]
"""The hook of a saved tensor, None for one that is left alone, and its site."""


def _watch_block(kind: Kind, door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook everything that is saved in this thread while the block is open."""
    hook = door.meet(Place(kind, (BLOCK,), ref(door.model)))
    if hook is None:
        return
    if hook.stateful:
        door.refuse("stateful transform", kind, BLOCK, what=hook.stateful)
    met, origins, held = (hook, BLOCK), _Origins(kind, door.model), ref(door)

    def meet(tensor: Tensor) -> Met:
        if compiling.in_compiled() and (open_door := held()):
            open_door.note(kind, COMPILED_SAVES)
        return met if origins.chooses(tensor) else (None, "")

    pair = _pair(door, kind, meet, autograd.saved_tensor_hooks())
    autograd.push_saved_tensor_hooks(pair)
    door.stack.callback(autograd.remove_saved_tensor_hooks, pair)


def _watch_nodes(kind: Kind, door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook what nodes have saved, at the end of each outermost call of a module."""
    origins = _Origins(kind, door.model)

    def make(door: Door, place: Place) -> Register:
        def register(node: Node) -> None:
            for name, saved, read in autograd.saved_by(node):
                own = replace(place, item=name)
                if saved.unpack_hook is not None:
                    door.refuse("other saved-tensor hooks", kind, own.site)
                # PyTorch checks for in-place changes only without hooks: `read` does so now.
                if origins.chooses(read()) and (hook := door.meet(own)) is not None:
                    saved.register_hooks(*_pair(door, kind, lambda _, met=(hook, own.site): met))

        return register

    watch_nodes(kind, door, found, shared, make)


class _OpenCall:
    """A running call whose pair of saved-tensor hooks is active; `outer` is the pair around it."""

    def __init__(self, modules: "_Modules", place: Place, origins: "_Origins") -> None:
        self.place, self.origins, self.modules = place, origins, ref(modules)
        self.count = 0  # of the tensors that it has saved
        top = autograd.saved_tensor_hooks()
        around = (call.outer for call in modules.open.calls if top and call.pair[0] is top[0])
        self.outer: autograd.Pair | None = next(around, top)
        self.pair = _pair(modules.door, modules.kind, self.meet, self.outer)

    def meet(self, tensor: Tensor) -> Met:
        """Return the hook of a saved tensor."""
        modules = self.modules()  # weakly, as graphs have this method
        if modules is None or not self.origins.chooses(tensor):
            return None, ""
        key = self.place, self.count
        self.count += 1
        if key not in modules.met:
            own = replace(self.place, item=str(key[1]))
            modules.met[key] = modules.door.meet(own), own.site
        return modules.met[key]


class _OpenCalls(threading.local):
    """The open calls of a thread. The innermost acts alone."""

    def __init__(self) -> None:
        self.calls: list[_OpenCall] = []


class _Modules:
    """The tensors that modules save in their calls; they belong to the innermost module."""

    def __init__(self, kind: Kind, door: Door, found: Sequence[Named], shared: Shared) -> None:
        self.kind, self.door = kind, door
        self.thread, self.open = shared.follow(door.stack), _OpenCalls()
        self.origins: WeakKeyDictionary[nn.Module, _Origins] = WeakKeyDictionary()
        self.met: dict[tuple[Place, int], Met] = {}  # kept, to make no places anew in each step
        door.stack.callback(self.close_all_but)
        hook_calls(door, found, self.enter, self.leave, always=True)

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        calls, opened = self.thread.calls, self.open.calls
        self.close_all_but(calls.running)
        if compiling.in_compiled():
            self.door.note(self.kind, COMPILED_SAVES)
        # A recomputation gets no site here: the checkpoint has saved for the forward.
        call = calls.next(module)
        place = call and Place(self.kind, call[:1], ref(module), call[1])
        wanted = self.door.picking_at(place) if place else ()
        if not place or not wanted or not torch.is_grad_enabled():
            calls.enter(module, None)
            return
        if opened and any(one not in wanted for one in self.door.picking_at(opened[-1].place)):
            self.door.refuse("nested modules", self.kind, place.site, outer=opened[-1].place.whole)
        if module not in self.origins:
            self.origins[module] = _Origins(self.kind, module)
        running = _OpenCall(self, place, self.origins[module])
        opened.append(running)
        calls.enter(module, running)
        autograd.push_saved_tensor_hooks(running.pair)

    def leave(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        calls = self.thread.calls
        call = calls.leave(module)
        self.close_all_but(calls.running)
        if call is not None and not call.count:
            self.door.note_no_gradient(call.place, "saves no such tensor of its own")

    def close_all_but(self, running: Sequence[tuple[int, object]] = ()) -> None:
        """End the calls that do not run: this one, and those that others have left open.

        A KeyboardInterrupt runs no forward hooks, and the pre-hook of another library may raise.
        """
        opened = self.open.calls
        while opened and all(call is not opened[-1] for _, call in running):
            last = opened.pop()
            autograd.remove_saved_tensor_hooks(last.pair)
            del last.pair  # graphs have the call: no cycle


def _pair(
    door: Door,
    kind: Kind,
    meet: Callable[[Tensor], Met],
    outer: autograd.Pair | None = None,
) -> autograd.Pair:
    """Return hooks that store a saved tensor as `outer` does and transform it when read.

    The graph keeps them: they hold the surgery weakly.
    """
    pack_outer, unpack_outer = outer or (None, None)
    held = ref(door)

    def pack(tensor: Tensor) -> tuple[Met, Any, int]:  # Any: what `outer` stores
        met = meet(tensor)
        if pack_outer is not None:
            return met, pack_outer(tensor), 0
        # Holding the tensor itself would leak it.
        return met, tensor.detach(), autograd.version_of(tensor)

    def unpack(packed: tuple[Met, Any, int]) -> Tensor:  # Any: see `pack`
        (hook, site), stored, version = packed
        tensor = stored if unpack_outer is None else unpack_outer(stored)
        now = autograd.version_of(tensor)
        if unpack_outer is None and now != version:
            where = f" at site '{site}'" if site else ""
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(tensor.shape)} {tensor.dtype}{where} is at version "
                f"{now}; expected version {version} instead. Write to a copy: x = x.clone()"
            )
        # Reading a saved tensor outside a backward pass returns it unchanged.
        result = hook.call(tensor) if hook is not None and autograd.in_backward() else None
        if result is not None and torch.is_grad_enabled() and (open_door := held()):
            open_door.refuse("double backward", kind, site)
        return tensor if result is None else result

    return pack, unpack


class _Origins:
    """Tells parameters, buffers and activations apart among the tensors saved in a module."""

    def __init__(self, kind: Kind, module: nn.Module) -> None:
        self.chosen = {"all": ALL}.get(of := kind.mode.split()[1], (of,))
        self.params, self.buffers = autograd.tensor_tables(module)

    def chooses(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is changed."""
        return tensor.is_floating_point() and self._of(tensor) in self.chosen

    def _of(self, tensor: Tensor) -> Literal["activations", "parameters", "buffers"]:
        params = [param for table in self.params for param in table.values() if param is not None]
        # The tensors that a functional_call puts in the place of parameters.
        given = [param for param in params if not isinstance(param, nn.Parameter)]
        made = {param.grad_fn for param in given} - {None}
        base, node = autograd.base_of(tensor), tensor.grad_fn
        while node is not None and node not in made and _is_view(node):
            node = node.next_functions[0][0]
        for source in (base, getattr(node, "variable", None)):
            if isinstance(source, nn.Parameter) or any(param is source for param in given):
                return "parameters"
        if node in made:
            return "parameters"
        if tensor.requires_grad:
            return "activations"
        if any(buffer is base for table in self.buffers for buffer in table.values()):
            return "buffers"
        frozen = (param for param in params if not param.requires_grad)
        is_cast = any(one.shape == base.shape and one.dtype != base.dtype for one in frozen)
        return "parameters" if is_cast else "activations"


def _is_view(node: Node) -> bool:
    return plain(node.name()).removesuffix("Backward") in VIEWS


def _block_of(model: nn.Module) -> list[Named]:
    return [Named((BLOCK,), model, (model,))]


@cache
def _kind(mode: str, of: str) -> Kind:
    watch = {BLOCK: _watch_block, "module": _Modules, "node": _watch_nodes}[mode]

    def begin(door: Door, found: Sequence[Named], shared: Shared) -> None:
        if of != "all" and any(map(is_parametrized, door.model.modules())):
            door.note(kind, PARAMETRIZED)
        watch(kind, door, found, shared)

    kind = Kind("SavedTensors", f"{mode} {of}", modules_of, begin)
    if mode == BLOCK:
        kind = replace(kind, things=_block_of, known_at="watch", reaches_new=True)
    return kind


@validated
class SavedTensors(ModuleSelector):
    """Transform the tensors saved by the forward of the selected modules, when backward reads them
    back.

    The pattern `block` selects all tensors saved while the block is open, also outside of modules,
    but only in the thread that attached; its one site is `block`. `node` selects the tensors saved
    by one kind of autograd node: a name, a pattern or a family (see `Nodes`). The site is then the
    node's with PyTorch's name for the saved tensor, `act#0/ReluBackward[0].result`. `of` is the
    kind of tensor. `parameters` are the weights, their views and casts, and the tensors in their
    place in a `torch.func.functional_call`. `activations` are all other floating tensors except
    buffers. They include the mean and variance that a norm computes, the mask of a dropout, and a
    weight that the model computes by a parametrization such as `weight_norm`, by pruning or by
    another network. `all` is both.

    The forward pass is unchanged; the backward pass computes with the transformed tensors, for
    example with activations stored in few bits. Every floating tensor saved during a call of a
    matching module is a site, `name#call.number` in the order of saving; of nested modules it
    belongs to the innermost that matches. A tensor is read once in each backward pass, and counted
    then.

    Integer tensors, such as indices, are never changed. The cast of a frozen weight has no graph,
    so a tensor without one, with the shape of a frozen weight and another dtype, counts as the
    cast. The transform is a constant to autograd, so a backward pass with `create_graph` raises. A
    tensor changed in place since it was saved raises the error that PyTorch would raise.

    Other saved-tensor hooks, such as a checkpoint's or `save_on_cpu`, stay active, and the
    transform gets the tensors that they return. There are two exceptions. With `node`, a saved
    tensor that has such hooks raises; with `block`, tensors packed by them are not seen. Compiled
    code decides itself which tensors it saves; a warning on detach says so.
    """

    node: Pattern | None = None
    of: Literal["activations", "parameters", "all"] = "activations"

    stages: ClassVar[tuple[Stage, ...]] = ("saved",)
    changes: ClassVar[str] = "saved tensors"
    compile_limit: ClassVar[str] = "compiled code chooses by itself which tensors it saves"

    def __post_init__(self) -> None:
        fields = ("types", "depth", "index", "call", "node")
        asked = [name for name in fields if getattr(self, name) not in (None, "*")]
        if self.pattern == BLOCK and asked:
            raise Contradiction(asked[0], "leave it out: pattern 'block' selects all saved tensors")

    def kind_at(self, stage: Stage | None) -> Kind:
        mode = BLOCK if self.pattern == BLOCK else "module" if self.node is None else "node"
        return _kind(mode, self.of)

    def near(self, named: Named) -> Sequence[str]:
        return named.names if self.pattern == BLOCK else super().near(named)

    def offers(self, named: Named) -> Sequence[str]:
        return named.names if self.pattern == BLOCK else super().offers(named)

    def picks(self, place: Place) -> bool:
        is_made = self.node is None or fits_node(place.node, self.node)
        return is_made and super().picks(place)

    @property
    def picks_all(self) -> bool:
        return super().picks_all and self.node is None

    def expected(self, name: str) -> str:
        return super().expected(name) if self.node is None else ""

    def check(self, things: Things, memory: Memory) -> None:
        found = things[kind := self.kind_at(memory.stage)]
        if self.pattern != BLOCK:
            refuse_exported(self, found, near_in(found, kind, memory.near[self]))
            super().check(things, memory)
        elif any(BLOCK in named.names for named in modules_of(found[0].owners[0])):
            raise ValueError(
                "SavedTensors: 'block' selects all tensors saved while the block is open, and the "
                "model has a module of this name. Write 're:block' for the module"
            )

    def nothing_met(self, memory: Memory, may_meet_nodes: bool) -> SelectionError | None:
        if self.node is None:
            return super().nothing_met(memory, may_meet_nodes)
        return None if may_meet_nodes else nothing_made(self, "node", self.described(), memory)
