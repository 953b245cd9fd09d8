"""Inputs: the gradient with respect to the input of a module."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import (
    Args,
    Call,
    Keywords,
    Shared,
    WatchedCalls,
    hook_tensor,
    modules_of,
)
from gradsurg.sites.places import NO_GRADIENT, Door, Hook, Kind, Named, Place, Stage, Traced
from gradsurg.sites.selectors import ModuleSelector
from gradsurg.sites.tensors import (
    alias_of,
    bare,
    is_new,
    layout,
    original,
    rebuilt,
    tensors_in,
    unwritten,
)
from gradsurg.torch_internals import autograd, module_hooks
from gradsurg.transforms.base import Need
from gradsurg.transforms.layer_calls import LayerCall

NO_TENSOR = "takes no floating-point tensor"  # the reason recorded for a call that is skipped

Arguments = tuple[Args, Keywords]


class _Running:
    """A running call: tensors and copies of containers that it must not write to, and a `LayerCall`
    for each input whose hook asks for the layer.
    """

    __slots__ = ("containers", "layers", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[Tensor, int, str]] = []  # with its version and its site
        self.containers: list[tuple[object, object, str]] = []  # with its layout and its site
        self.layers: list[LayerCall] = []

    def keep(self, tensor: Tensor, site: str, is_alias: bool) -> None:
        """Note a tensor whose hook is lost if it is written to: an alias or a view."""
        if is_alias or module_hooks.is_view(tensor):
            self.tensors.append((tensor, module_hooks.version(tensor), site))


class _Watched(WatchedCalls):
    """The inputs of the modules, hooked at the beginning of each of their calls."""

    always_ends = True

    def __init__(self, mode: str, door: Door, found: Sequence[Named], shared: Shared) -> None:
        self.acts_before = mode == "branch"
        # By calls that have taken one bare tensor, and whether that needed a gradient; None if no
        # intervention acts there.
        self.single: dict[tuple[Call, bool], tuple[Hook, str] | None] = {}
        # Compiled code sees neither writes to an input nor that modules take the same tensor.
        known = [named for named in found if self.acts_before and _leaves_inputs(named.owners[0])]
        super().__init__(KINDS[mode], door, found, shared, door.traced(KINDS[mode], known))

    def before(self, module: nn.Module, args: Args, kwargs: Keywords) -> Arguments | None:
        """Hook the inputs of a call, and return aliases to call the module with."""
        calls, running = self.thread.calls, _Running()
        call = calls.next(module)
        calls.enter(module, running)
        if call is None:
            return None
        if (given := bare(args, kwargs)) is None:
            return self._hooked_arguments(module, call, running, args, kwargs)
        key = call, given.requires_grad and torch.is_grad_enabled()
        if key in self.single:
            known = self.single[key]
            if known is None:
                return None
            hook, site = known
            is_plain = type(given) is Tensor if self.acts_before else is_new(given)
            if is_plain and hook.asks.isdisjoint({"value", "layer"}):
                own = alias_of(given) if self.acts_before else given
                autograd.hook_first(own, hook.call)
                running.keep(own, site, self.acts_before)
                return ((own,), kwargs) if self.acts_before else None
        elif not (key[1] and self.door.picking_at(self._place(module, call))):
            self.single[key] = None
        return self._hooked_arguments(module, call, running, args, kwargs)

    def traced(self, hook: Traced, args: Args, kwargs: Keywords, output: object = None) -> object:
        given = bare(args, kwargs)
        if given is None or not given.is_floating_point():
            return None
        if given.requires_grad and hook.mark(hook.key):
            given = given[...]
            given.register_hook(hook.call)
        return (given,), kwargs

    def after(self, module: nn.Module, args: Args, kwargs: Keywords, output: object) -> None:
        """Check that a call has not written to its inputs."""
        running = self.thread.calls.leave(module)
        if running is None:
            return
        if running.tensors or running.containers:
            self._check_unwritten(running, output)
        if len(running.layers) == 1 and isinstance(output, Tensor):
            running.layers[0].watch(output)

    def _place(self, module: nn.Module, call: Call) -> Place:
        return Place(self.kind, call[:1], ref(module), call[1])

    def _hooked_arguments(
        self, module: nn.Module, call: Call, running: _Running, args: Args, kwargs: Keywords
    ) -> Arguments | None:
        """Hook the tensors in the arguments; return the arguments to call the module with."""
        base, is_bare = self._place(module, call), bare(args, kwargs) is not None
        given: dict[int, Tensor] = {}  # to the module, by the id of the tensor in the arguments

        def change(path: str, tensor: Tensor) -> Tensor:
            place = replace(base, item=path[1:]) if path else base
            if not self.door.picking_at(place):
                return tensor
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                self.door.note_no_gradient(place, NO_GRADIENT)
                given[id(tensor)] = tensor
            elif id(tensor) not in given:
                given[id(tensor)] = self._hooked(module, running, tensor, place)
            # A tensor that is passed twice is one site with two names.
            elif (hook := self.door.meet(place, given[id(tensor)], own=True)) is not None:
                hook_tensor(self.door, given[id(tensor)], hook)
            return given[id(tensor)]

        def hooked(value: object, path: str) -> object:
            new = rebuilt(value, change, path)
            if new is not value and not isinstance(new, Tensor):
                running.containers.append((new, layout(new), f"{base.site}{path}"))
            return new

        new = [hooked(arg, "" if is_bare else f".{index}") for index, arg in enumerate(args)]
        by_key = {key: hooked(arg, f".{key}") for key, arg in kwargs.items()}
        if not given:
            self.door.note_no_gradient(base, NO_TENSOR)
        same = all(map(operator.is_, [*new, *by_key.values()], [*args, *kwargs.values()]))
        return None if same else (tuple(new), by_key)

    def _hooked(self, module: nn.Module, running: _Running, tensor: Tensor, place: Place) -> Tensor:
        """Hook a tensor or an alias of it; return the one to pass to the module."""
        assert place.call is not None
        given = alias_of(tensor) if self.acts_before else tensor
        source = given if self.acts_before else original(tensor)
        is_first = not module_hooks.hooks_of(source)
        if (hook := self.door.meet(place, source, own=True)) is not None:
            if "layer" in hook.asks:
                layer = LayerCall(module, given.detach().clone())
                running.layers.append(layer)
                given.register_hook(partial(hook.call, value=layer.input, layer=layer))
            else:
                hook_tensor(self.door, source, hook)
            if is_first and not place.item:
                self.single[(place.name, place.call), True] = hook, place.site
        running.keep(given, place.site, self.acts_before)
        return given

    def _check_unwritten(self, running: _Running, output: object) -> None:
        """Refuse a call that wrote to its inputs, and later writes to inputs that it returned."""
        calls = self.thread.calls
        for tensor, version, site in running.tensors:
            if module_hooks.version(tensor) != version:
                self._refuse(site, "wrote to its input")
            if calls.depth:
                base = module_hooks.base_of(tensor)
                for _, other in tensors_in(output):
                    if module_hooks.base_of(other) is base:
                        returned = other.detach()  # it must not keep the graph
                        calls.at_end.append(
                            unwritten(self.door, self.kind, site, returned, version)
                        )
        for copy, before, site in running.containers:
            if layout(copy) != before:
                self._refuse(site, "changed a container among its inputs, of which it got a copy")

    def _refuse(self, site: str, fault: str) -> None:
        self.door.refuse("in-place write", self.kind, site, fault=fault)


def _leaves_inputs(module: nn.Module) -> bool:
    """Whether it is a layer of PyTorch that does not write to its input."""
    is_known = type(module).__module__.startswith("torch.nn.modules.")
    return is_known and not getattr(module, "inplace", False)


KINDS = {
    mode: Kind("Inputs", mode, modules_of, partial(_Watched, mode), ".input", is_traced=is_traced)
    for mode, is_traced in (("branch", True), ("total", False))
}


@validated
class Inputs(ModuleSelector):
    """Select the gradients with respect to the inputs of the modules whose name fits `pattern`.

    `path="branch"` is the gradient that flows back through this module alone: in `h + f(h)` the
    gradient that bypasses `f` is left alone. `path="total"` is the sum over all uses of the tensor,
    and modules that take the same tensor are one site. Site ids are `name#call.input`, followed by
    the path of the tensor unless the module is called with one tensor: `mix#0.input.1` by position,
    `mix#0.input.mask` by keyword, `.input.0.h` in a nested value. `types`, `depth`,
    `index` and `call` are those of `Outputs`.

    Every floating tensor that a module takes is hooked, also by keyword. For a branch the module
    gets an alias of its input, and the alias is hooked. So a container and its first child are two
    sites, and the gradient passes both. For a total the tensor itself is hooked. A tensor passed
    twice is one site with two names.

    A branch input that is written to in place is refused, since a hook would see none or a part of
    its gradient. For call counts and recomputations see `Outputs`; inside a reentrant checkpoint a
    total is the sum over the uses in it. Calls without gradients are not hooked. An alias changes
    no value. But if a module reads its input several times and others read it too, gradients are
    summed branch by branch, which may change the last bit of the sum.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Inputs("1"))).attach(model):
    ...     model(torch.ones(2)).sum().backward()
    >>> model[0].bias.grad, model[1].bias.grad
    (tensor([0., 0.]), tensor([1.]))
    """

    path: Literal["branch", "total"] = "branch"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        layer: set[Need] = {"layer"} if self.path == "branch" else set()
        return frozenset({"value", "error", "labels", *layer})

    def kind_at(self, stage: Stage | None) -> Kind:
        return KINDS[self.path]
