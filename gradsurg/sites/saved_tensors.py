"""SavedTensors: the tensors that a backward pass reads back from the forward pass."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import is_parametrized

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites.contexts import refusal
from gradsurg.sites.graph_tracer import check_called, plain
from gradsurg.sites.module_calls import Calls
from gradsurg.sites.nodes import NodeHooker, fits_node
from gradsurg.sites.places import Attached, Place, PlaceTest, SiteFn, Stage
from gradsurg.sites.selection import ModuleSelector, Pattern, candidates, described, names_of
from gradsurg.torch_internals import autograd, compiling

BLOCK = "block"  # the pattern, and the site, of all tensors saved while the block is open
VIEWS = {"AsStrided", "Detach", "Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy"}
VIEWS |= {"Transpose", "Unsqueeze", "UnsafeView", "View"}
"""The nodes that return their input in another shape or dtype."""

Site = tuple[SiteFn, str]

PARAMETRIZED = "the weights that a parametrization computes are taken for activations"
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

    `of` is the kind of tensor: `parameters` are the weights, their views and casts, and the tensors
    in their place in a `torch.func.functional_call`; `activations` are all other floating tensors
    except buffers, so also the statistics of a norm, the mask of a dropout, and a weight that the
    model computes: by a parametrization such as `weight_norm`, by pruning, by another network.
    `all` is both. Integer tensors, such as indices, are never changed. The cast of a frozen weight
    has no graph: such a tensor with the shape of a frozen weight in another dtype is taken for it.

    The transform is a constant to autograd, so a backward pass with `create_graph` raises. A tensor
    is read once in each backward pass, and counted then. A tensor changed in place since it was
    saved raises the error that PyTorch would raise. Other saved-tensor hooks, as those of a
    checkpoint or `save_on_cpu`, stay active: the transform gets the tensors that they return. Two
    exceptions: with `node`, a saved tensor that has such hooks raises; with `block`, tensors packed
    by them are not seen. Compiled code decides itself which tensors it saves; a warning on detach
    says so.
    """

    node: Pattern | None = None
    of: Literal["activations", "parameters", "all"] = "activations"

    stages: ClassVar[tuple[Stage, ...]] = ("saved",)
    changes: ClassVar[str] = "saved tensors"
    compile_limit: ClassVar[str] = "what is compiled chooses by itself what it saves"

    def __post_init__(self) -> None:
        fields = ("types", "depth", "index", "call", "node")
        asked = [name for name in fields if getattr(self, name) not in (None, "*")]
        if self.pattern == BLOCK and asked:
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
        named = names_of(model)
        if self.pattern != BLOCK:
            check_called(self, model, candidates(named, self.mechanism, test or self.selects))
            return ModuleSelector.find(self, model, test)
        if any(name == BLOCK for names in named.values() for name in names):
            raise ValueError(
                "SavedTensors: 'block' stands for all that is saved while the block is open, and "
                "the model has a module of this name: write 're:block' for the module"
            )
        return [BLOCK]

    def hook(self, attached: Attached) -> None:
        if self.of != "all" and any(map(is_parametrized, attached.model.modules())):
            attached.note(PARAMETRIZED)
        match self.mechanism[-1]:
            case "block":
                self._hook_block(attached)
            case "node":
                hook_saved = partial(self._hook_saved, attached, _Origins(attached.model))
                NodeHooker(self, attached, hook_saved, "node", described(self))
            case _:
                self._hook_modules(attached)

    def _hook_block(self, attached: Attached) -> None:
        if not attached.selects(Place(self.mechanism, BLOCK, whole=True)):
            return
        if attached.stateful:
            raise refusal(self, "stateful transform", BLOCK, what=attached.stateful)
        site, origins = (attached.hook_at(BLOCK), BLOCK), _Origins(attached.model)

        def site_of(tensor: Tensor) -> Site | None:
            if compiling.in_compiled():
                attached.note(COMPILED_SAVES)
            return site if self._chooses(tensor, origins) else None

        pair = self._pair(site_of, autograd.saved_tensor_hooks())
        autograd.push_saved_tensor_hooks(pair)
        attached.stack.callback(autograd.remove_saved_tensor_hooks, pair)

    def _hook_modules(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        calls, site_ids = _OpenCalls(names_of(model), attached), self.site_ids(attached)
        origins_in = cache(_Origins)

        def enter(module: nn.Module, args: tuple[object, ...]) -> None:
            # A recomputation gets no site here: the checkpoint has saved for the forward.
            call = calls.next(module)
            base = None if call is None else site_ids(module, call)
            if base is None:
                return
            if not torch.is_grad_enabled():
                calls.without_graph(module)
                return
            sites: list[str] = []

            def site_of(tensor: Tensor) -> Site | None:
                if not self._chooses(tensor, origins_in(module)):
                    return None
                sites.append(f"{base}.{len(sites)}")
                attached.forget(base)
                return attached.hook_at(sites[-1]), sites[-1]

            outer = calls.foreign_pair()
            pair = self._pair(site_of, outer)
            calls.open.append(_OpenCall(module, base, sites, pair, outer))
            autograd.push_saved_tensor_hooks(pair)

        def enter_compiled(module: nn.Module, args: tuple[object, ...]) -> None:
            attached.note(COMPILED_SAVES)
            enter(module, args)

        stack.callback(calls.begin)
        calls.hook(model, stack)
        first = compiling.untraced(enter, enter_compiled)
        last = compiling.untraced(lambda module, args, output: calls.close(module))
        for module in self.expect_modules(calls.names, attached):
            stack.callback(module.register_forward_pre_hook(first).remove)
            stack.callback(module.register_forward_hook(last, always_call=True).remove)

    def _hook_saved(self, attached: Attached, origins: "_Origins", node: Node, place: str) -> None:
        """Register a pair of hooks on each chosen tensor that a node has saved."""
        for name, saved, read in autograd.saved_by(node):
            site = f"{place}.{name}"
            if saved.unpack_hook is not None:
                raise refusal(self, "other saved-tensor hooks", site)
            # PyTorch checks for in-place changes only without hooks: `read` makes it check now.
            if self._chooses(read(), origins):
                packed = attached.hook_at(site), site
                saved.register_hooks(*self._pair(lambda _, packed=packed: packed, None))

    def _chooses(self, tensor: Tensor, origins: "_Origins") -> bool:
        if not tensor.is_floating_point():
            return False
        origin = origins.of(tensor)
        return origin == self.of or (self.of == "all" and origin != "buffers")

    def _pair(
        self, site_of: Callable[[Tensor], Site | None], outer: autograd.Pair | None
    ) -> autograd.Pair:
        """Return hooks that store a saved tensor as `outer` does and transform it when read."""
        unpack_outer = outer[1] if outer is not None else None

        def pack(tensor: Tensor) -> object:
            site = site_of(tensor)
            if outer is not None:
                return site, outer[0](tensor), 0
            return (
                site,
                tensor.detach(),
                autograd.version_of(tensor),
            )  # holding the tensor itself would leak it

        def unpack(packed: tuple[Site | None, Any, int]) -> Tensor:  # Any: what `outer` stores
            site, stored, version = packed
            tensor = stored if unpack_outer is None else unpack_outer(stored)
            now = autograd.version_of(tensor)
            if unpack_outer is None and now != version:
                where = "" if site is None else f" at site '{site[1]}'"
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {list(tensor.shape)} {tensor.dtype}{where} is at version "
                    f"{now}; expected version {version} instead"
                )
            # Reading a saved tensor outside a backward pass returns it unchanged.
            result = site[0](tensor) if site is not None and autograd.in_backward() else None
            if site is not None and result is not None and torch.is_grad_enabled():
                raise refusal(self, "double backward", site[1])
            return tensor if result is None else result

        return pack, unpack


class _OpenCall(NamedTuple):
    """A running call with its sites; `outer` is the foreign pair of hooks active before it."""

    module: nn.Module
    base: str
    sites: list[str]
    pair: autograd.Pair
    outer: autograd.Pair | None


class _OpenCalls(Calls):
    """The calls whose pair of saved-tensor hooks is active. The innermost acts alone."""

    def __init__(self, names: dict[nn.Module, list[str]], attached: Attached) -> None:
        super().__init__(names)
        self.attached = attached
        self.open: list[_OpenCall] = []

    def begin(self) -> None:
        """Deactivate all hooks: a KeyboardInterrupt runs no forward hooks."""
        while self.open:
            self.close(self.open[-1].module)

    def foreign_pair(self) -> autograd.Pair | None:
        """Return the active pair of hooks, without those of calls that are open."""
        top = autograd.saved_tensor_hooks()
        pairs = (call.outer for call in self.open if top is not None and call.pair[0] is top[0])
        return next(pairs, top)

    def close(self, module: nn.Module) -> None:
        """End a call, if it was entered: the hook of another library may have raised before."""
        while any(call.module is module for call in self.open):
            call = self.open.pop()
            autograd.remove_saved_tensor_hooks(call.pair)
            if not call.sites:
                self.attached.expect(call.base, skipped="saves no such tensor of its own")
            if call.module is module:
                return


class _Origins:
    """Tells parameters, buffers and activations apart among the tensors saved in a module."""

    def __init__(self, module: nn.Module) -> None:
        self.params, self.buffers = autograd.tensor_tables(module)

    def of(self, tensor: Tensor) -> Literal["activations", "parameters", "buffers"]:
        base = autograd.base_of(tensor)
        params = [param for table in self.params for param in table.values() if param is not None]
        # Those of a functional_call.
        given = [param for param in params if not isinstance(param, nn.Parameter)]
        made = {param.grad_fn for param in given if param.grad_fn is not None}
        node = tensor.grad_fn
        while node is not None and node not in made and _is_view(node):
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        if (
            isinstance(base, nn.Parameter)
            or isinstance(leaf, nn.Parameter)
            or (node is not None and node in made)
            or any(param is base or param is leaf for param in given)
        ):
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
