"""Captured: the gradients that `torch.autograd.grad` returns."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Shared, hook_calls, modules_of, refuse_scripted
from gradsurg.sites.places import NO_GRADIENT, Door, Hook, Kind, Memory, Named, Place, Stage, Things
from gradsurg.sites.selection import Range
from gradsurg.sites.selectors import (
    ModuleSelector,
    fits_shape,
    near_in,
    params_of,
    refuse_exported,
    refuse_frozen,
)
from gradsurg.sites.tensors import tensors_in
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need

NOT_ASKED = "not an input of autograd.grad"
UNUSED = "what was differentiated does not depend on it"
CHANGED = "it was changed in place since its module returned it"


Pairs = tuple[tuple[Place, Hook], ...]
"""The places of a tensor, each with the hook that acts there."""


class _GradMode(TorchFunctionMode):
    """Intercepts `torch.autograd.grad`. It runs at every torch function, so it is kept short.

    It knows the tensors that are sites by identity, without holding them. An intervention acts on
    a tensor at one site, the first: a parameter that a module returns keeps its own name.
    """

    def __init__(self, door: Door) -> None:
        super().__init__()
        self.door = door
        self.known = WeakIdKeyDictionary()  # tensor -> its version there, and its `Pairs`
        self.hooks: dict[tuple[Place, object], Hook | None] = {}
        self.noted: set[Place] = set()
        self.later = 0  # the number of modes pushed after this one, when it was last removed

    def begin(self) -> None:
        """Intercept from now on, for interventions that may have changed.

        It returns to its place in the stack of modes, below those that others pushed after it.
        """
        self.hooks.clear()
        self.noted.clear()
        autograd.insert_function_mode(self, self.later)

    def close(self) -> None:
        self.later = autograd.remove_function_mode(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: the arguments and results of any torch function
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._changed(result, args, kwargs or {}) if func is torch.autograd.grad else result

    def add(self, tensor: Tensor, place: Place) -> None:
        """Record that a tensor is at this place, for the interventions that do not know it yet."""
        if autograd.in_functorch() or not self.door.picking_at(place):
            return
        if not tensor.requires_grad:
            if place not in self.noted:
                self.noted.add(place)
                self.door.note_no_gradient(place, NO_GRADIENT)
            return
        places, is_current = self._at(tensor)
        others = [pair for pair in places if is_current and pair[0] != place]
        acted = tuple(hook.call for _, hook in others)
        if (place, acted) not in self.hooks:
            self.hooks[place, acted] = hook = self.door.meet(place, acted=acted)
            if hook is not None:
                self.door.note_no_gradient(place, NOT_ASKED)
        hook = self.hooks[place, acted]
        if hook is not None:
            self.known[tensor] = _version(tensor), (*others, (place, hook))

    def _changed(
        self, grads: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the result of `grad`, with transformed gradients of the inputs that are sites."""
        inputs = args[1]  # `torch.autograd.grad` itself passes them by position, in a tuple
        results: dict[int, Any] = {}
        with torch.set_grad_enabled(bool(kwargs.get("create_graph"))):
            for tensor, grad in zip(inputs, grads, strict=True):
                if id(tensor) not in results:
                    results[id(tensor)] = self._transformed(tensor, grad, kwargs)
        return tuple(results[id(tensor)] for tensor in inputs)

    def _transformed(self, tensor: Any, grad: Any, kwargs: dict[str, Any]) -> Any:
        places, is_current = self._at(tensor)
        for place, hook in places:
            if not self.door.picking_at(place):  # its intervention was removed
                continue
            if not is_current:
                self.door.note(CAPTURED, f"'{place.site}' was requested, not changed: {CHANGED}")
            elif grad is None:
                self.door.note_no_gradient(place, UNUSED)
            elif kwargs.get("is_grads_batched"):
                self.door.refuse("is_grads_batched", CAPTURED, place.site)
            else:
                result = hook.call(grad, tensor if "value" in hook.asks else None)
                grad = grad if result is None else result
        return grad

    def _at(self, tensor: object) -> tuple[Pairs, bool]:
        """Return the places of an input, and whether its version is still the same."""
        if not isinstance(tensor, Tensor) or tensor not in self.known:
            return (), False
        version, places = self.known[tensor]
        return places, version == _version(tensor)


def watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Intercept `torch.autograd.grad`, and note the tensors that the modules return."""
    modules = [named for named in found if isinstance(named.thing, nn.Module)]
    refuse_scripted(door, CAPTURED, modules)
    # The same mode after a change of the interventions, which may follow a forward.
    mode: _GradMode = door.kept.setdefault(CAPTURED, _GradMode(door))
    mode.begin()
    door.stack.callback(mode.close)
    for names, param, _ in found:
        if not isinstance(param, Tensor):
            continue
        place = Place(CAPTURED, names, ref(param))
        if not param.requires_grad:
            door.note_no_gradient(place, "frozen")
        elif door.picking_at(place):
            if autograd.is_sharded(param):
                door.refuse("FSDP2", CAPTURED, place.site)
            mode.add(param, place)
    # Without module hooks, compiled code keeps its graph in one piece.
    if modules:
        _record_outputs(door, modules, shared, mode)


def _record_outputs(door: Door, found: Sequence[Named], shared: Shared, mode: _GradMode) -> None:
    thread = shared.follow(door.stack)

    def record(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        call = thread.calls.next(module)
        if call is None:
            return
        for path, tensor in tensors_in(output):
            mode.add(tensor, Place(CAPTURED, call[:1], ref(module), call[1], path[1:]))

    hook_calls(door, found, after=record)


def _things(model: nn.Module) -> list[Named]:
    return [*params_of(model), *modules_of(model)]


CAPTURED = Kind("Captured", "", _things, watch)


@validated
class Captured(ModuleSelector):
    """Select the gradients that `torch.autograd.grad` returns for parameters and module outputs.

    `pattern` and the other fields select parameters, whose site is their name, and modules, whose
    outputs are the sites `name#call`, followed by a path like for `Outputs`. `call` selects outputs
    only, `ndim` and `size` (see `Parameters`) parameters only.

    The tensor itself must be among the inputs of the call: for other tensors and for gradient edges
    the result of PyTorch is unchanged. Only the returned gradient changes, not the one that flows
    on to other inputs: for that use `Outputs`. The transform gets the gradient that PyTorch
    returns. Tensor hooks on an output have changed it already, unless the inputs also include a
    tensor from which that output was computed.

    An unused input has no gradient, unless `materialize_grads` makes zeros of it.
    `is_grads_batched` is refused, since a transform takes one gradient. Inside `torch.func` all
    tensors are wrapped, and none is a site.

    A `TorchFunctionMode` sees the torch functions of the thread that opened the block. Each of them
    costs 1.5 to 2.5 us more (one core, torch 2.13), and a call of code compiled by Inductor 4 us.
    Calls in other threads are not seen. In compiled code a module whose output is a site breaks the
    graph.
    """

    ndim: Range | None = None
    size: Range | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("captured",)

    def kind_at(self, stage: Stage | None) -> Kind:
        return CAPTURED

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def near(self, named: Named) -> Sequence[str]:
        if not isinstance(named.thing, Tensor):
            return super().near(named) if self.ndim is None and self.size is None else ()
        is_chosen = self.call is None and fits_shape(named.thing, self.ndim, self.size)
        return named.names[:1] if is_chosen and self.matching(named) else ()

    def offers(self, named: Named) -> Sequence[str]:
        return named.names[:1] if isinstance(named.thing, Tensor) else super().offers(named)

    def expected(self, name: str) -> str:
        return ""  # only tensors that `torch.autograd.grad` is asked for get a gradient

    def picks(self, place: Place) -> bool:
        return place.call is None or super().picks(place)

    def check(self, things: Things, memory: Memory) -> None:
        found = near_in(things[CAPTURED], CAPTURED, memory.near[self])
        if any(isinstance(named.thing, Tensor) and not named.is_frozen for named in found):
            return
        refuse_exported(self, things[CAPTURED], found)
        if not found:
            raise self.nothing_near(things[CAPTURED])
        refuse_frozen(self, self.pattern, found)


def _version(tensor: Any) -> int:
    """Return the version counter; 0 for a leaf, which stays the same site after an update."""
    return 0 if tensor.is_leaf else autograd.version_of(tensor)
