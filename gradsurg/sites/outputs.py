"""Outputs: the gradient with respect to the output of a module."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar
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
from gradsurg.sites.places import Door, Hook, Kind, Named, Place, Stage, Traced
from gradsurg.sites.selection import Pattern, matches
from gradsurg.sites.selectors import ModuleSelector
from gradsurg.sites.tensors import bare, is_new, original, rebuilt, tensors_in, unwritten
from gradsurg.torch_internals import autograd, module_hooks
from gradsurg.transforms.base import Need


class _Watched(WatchedCalls):
    """The outputs of the modules, hooked at the end of each of their calls."""

    def __init__(self, door: Door, found: Sequence[Named], shared: Shared) -> None:
        # Of the calls that have returned one bare tensor; None if no intervention acts there.
        self.single: dict[Call, Hook | None] = {}
        super().__init__(OUTPUTS, door, found, shared, door.traced(OUTPUTS, found))

    def before(self, module: nn.Module, args: Args, kwargs: Keywords) -> None:
        """Note the versions of the inputs, which a module may return."""
        given = _given(args, kwargs) if torch.is_grad_enabled() else ()
        self.thread.calls.enter(module, [autograd.version_of(tensor) for tensor in given])

    def after(self, module: nn.Module, args: Args, kwargs: Keywords, output: object) -> object:
        """Hook the output, and return that or aliases of inputs in it."""
        calls = self.thread.calls
        versions, call = calls.leave(module) or (), calls.next(module)
        if call is None:
            return output
        given = _given(args, kwargs)
        if isinstance(output, Tensor) and call in self.single:
            hook = self.single[call]
            if hook is None:
                return output
            is_own = not any(output is each for each in given)
            if is_own and is_new(output) and "value" not in hook.asks:
                autograd.hook_first(output, hook.call)
                return output
        change = partial(self._hooked, module, call, _unchanged(given, versions))
        # A complex tensor is hooked too, to refuse its gradient.
        if isinstance(output, Tensor) and output.is_complex():
            return change("", output)
        return rebuilt(output, change)

    def _hooked(
        self, module: nn.Module, call: Call, unchanged: Sequence[Tensor], path: str, tensor: Tensor
    ) -> Tensor:
        """Hook a tensor, or an alias of it if it is an unchanged input; return the hooked one."""
        door, place = self.door, Place(OUTPUTS, call[:1], ref(module), call[1], path[1:])
        if not door.picking_at(place):
            if not path:
                self.single[call] = None
            return tensor
        if any(tensor is other for other in unchanged):
            # A module that returns its input: the alias has the gradient of its output alone.
            tensor = tensor[...]
            if (calls := self.thread.calls).depth:
                version = autograd.version_of(tensor)
                calls.at_end.append(unwritten(door, OUTPUTS, place.site, tensor, version))
        source = original(tensor)
        is_first = not module_hooks.hooks_of(source)
        if (hook := door.meet(place, source, own=True)) is not None:
            hook_tensor(door, source, hook)
            if is_first and not path:
                self.single[call] = hook
        return tensor

    def traced(self, hook: Traced, args: Args, kwargs: Keywords, output: object = None) -> object:
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return None
        if output.requires_grad and hook.mark(hook.key):
            if any(output is given for given in (*args, *kwargs.values())):
                output = output[...]
            output.register_hook(hook.call)
        return output


OUTPUTS = Kind("Outputs", "", modules_of, _Watched, is_traced=True)


@validated
class Outputs(ModuleSelector):
    """Select the gradients with respect to the outputs of the modules whose name fits `pattern`.

    `types` is a pattern on the class of the module or of a base class. `depth` is the number of
    parts in its name and `index` the last number in it, each a number or a pair (lowest, highest).
    `call` picks one call, counted from 0 within one call of the model. `item` picks
    tensors by their path in the output, such as "0" or "1.*"; a module without such a tensor is
    left out. Site ids are `name#call`, followed by the path of the tensor if there are several:
    `encoder.lstm#0.1.0`.

    A tensor hook is registered on every floating tensor that a matching module returns, also inside
    tuples, lists, dicts and dataclasses. Its gradient is the sum over all uses of that output.

    Modules that return the same tensor (a container and its last child) are one site, unless it was
    changed in place between them. A module that returns its input (an identity, dropout in
    evaluation) returns an alias of it while it is hooked. The gradient then comes from its output
    alone, without other uses of the input, and sums over several uses may differ in the last bit
    (see `Inputs`). The recomputation of a checkpoint is not hooked again, except in a reentrant
    checkpoint, whose forward makes no graph.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Outputs("0"))).attach(model):
    ...     model(torch.ones(2)).sum().backward()
    >>> model[0].bias.grad, model[1].bias.grad
    (tensor([0., 0.]), tensor([1.]))
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


def _given(args: Args, kwargs: Keywords) -> Sequence[Tensor]:
    """The tensors in the arguments of a call."""
    if (given := bare(args, kwargs)) is not None:  # the usual call
        return (given,)
    return [tensor for _, tensor in tensors_in((args, kwargs), every=True)]


def _unchanged(given: Sequence[Tensor], versions: Sequence[int]) -> list[Tensor]:
    """Return the inputs that have a gradient and were not written to in the call."""
    if len(given) != len(versions):
        return []  # gradients were off when the call began, or hooks of others changed its inputs
    pairs = zip(given, versions, strict=True)
    return [one for one, was in pairs if one.requires_grad and autograd.version_of(one) == was]
