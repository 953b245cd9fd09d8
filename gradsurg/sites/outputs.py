"""Outputs: the gradient with respect to the output of a module."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import (
    Call,
    Shared,
    hook_tensor,
    modules_of,
    refuse_scripted,
    register,
)
from gradsurg.sites.places import Door, Hook, Kind, Named, Place, Stage, Traced
from gradsurg.sites.selection import Pattern, matches
from gradsurg.sites.selectors import ModuleSelector
from gradsurg.sites.tensors import is_new, original, rebuilt, tensors_in, unwritten
from gradsurg.torch_internals import autograd, compiling, module_hooks
from gradsurg.transforms.base import Need


def watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook each tensor that the modules return, at the end of each of their calls."""
    refuse_scripted(door, OUTPUTS, found)
    hooks = door.traced(OUTPUTS, found)
    thread = shared.follow(door.stack, is_traced=len(hooks) == len(found))
    single: dict[Call, Hook | None] = {}  # of the calls that have returned one bare tensor

    # Any: a user's values
    def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        given = _given(args, kwargs) if torch.is_grad_enabled() else ()
        thread.calls.enter(module, [autograd.version_of(tensor) for tensor in given])

    def after(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        calls = thread.calls
        versions, call = calls.leave(module) or (), calls.next(module)
        if call is None:
            return output
        given, is_bare = _given(args, kwargs), isinstance(output, Tensor)
        if is_bare and call in single:
            hook = single[call]
            if hook is None:
                return output
            is_own = not any(output is each for each in given)
            if is_own and is_new(output) and "value" not in hook.asks:
                autograd.hook_first(output, hook.call)
                return output

        def hooked(path: str, tensor: Tensor) -> Tensor:
            place = Place(OUTPUTS, call[:1], ref(module), call[1], path[1:])
            if not door.wants(place):
                if is_bare:
                    single[call] = None
                return tensor
            if any(tensor is other for other in unchanged):
                # A module that returns its input: the alias has the gradient of its output alone.
                tensor = tensor[...]
                if calls.depth:
                    version = autograd.version_of(tensor)
                    calls.at_end.append(unwritten(door, OUTPUTS, place.site, tensor, version))
            source = original(tensor)
            is_first = not module_hooks.hooks_of(source)
            if (hook := door.meet(place, source, own=True)) is not None:
                hook_tensor(door, source, hook)
                if is_bare and is_first:
                    single[call] = hook
            return tensor

        unchanged = _unchanged(given, versions)
        # A complex tensor is hooked too, to refuse its gradient.
        if isinstance(output, Tensor) and output.is_complex():
            return hooked("", output)
        return rebuilt(output, hooked)

    def traced(hook: Traced) -> Callable[..., object]:
        breaking = compiling.untraced(after)

        def acting(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
        ) -> object:
            if not (isinstance(output, Tensor) and output.is_floating_point()):
                return breaking(module, args, kwargs, output)
            if output.requires_grad and hook.mark(hook.key):
                if any(output is given for given in (*args, *kwargs.values())):
                    output = output[...]
                output.register_hook(hook.call)
            return output

        return acting

    pairs = {module: traced(hook) for module, hook in hooks.items()}
    register(door, found, before, after, traced=pairs)


OUTPUTS = Kind("Outputs", "", modules_of, watch, is_traced=True)


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: its gradient is the sum over all uses of that output. Site ids are
    `name#call`, followed by the path of the tensor if there are several: `encoder.lstm#0.1.0`.
    `item` picks tensors by that path, as "0" or "1.*"; a module without such a tensor is left out.
    Calls are counted from 0 within one call of the model. Modules that return the same tensor (a
    container and its last child) are one site, unless it was changed in place between them. A
    module that returns its input (an identity, dropout in evaluation) returns an alias of it while
    it is hooked: the gradient is that of its output alone, not of other uses of the input. As for
    `Inputs`, sums over several uses may then differ in the last bit. The recomputation of a
    checkpoint is not hooked again; that of a reentrant checkpoint is, since its forward makes no
    graph.
    """

    item: Pattern = "*"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error", "labels"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return OUTPUTS

    @property
    def picks_all(self) -> bool:
        return super().picks_all and not self.picks_items

    @property
    def picks_items(self) -> bool:
        return self.item != "*"

    def picks(self, place: Place) -> bool:
        return super().picks(place) and matches(place.item, self.item)


def _given(args: tuple[object, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """The tensors in the arguments of a call."""
    if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # the usual call
        return (args[0],)
    return [tensor for _, tensor in tensors_in((args, kwargs), every=True)]


def _unchanged(given: Sequence[Tensor], versions: Sequence[int]) -> list[Tensor]:
    """Return the inputs that have a gradient and were not written to in the call."""
    if len(given) != len(versions):
        return []  # gradients were off when the call began, or hooks of others changed its inputs
    pairs = zip(given, versions, strict=True)
    return [one for one, was in pairs if one.requires_grad and autograd.version_of(one) == was]
