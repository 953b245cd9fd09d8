"""Activations: the tensors that flow forward into or out of a module."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradsurg.core.pitfalls import refusal
from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Call, Shared, hook_calls, modules_of, name_in, refuse_scripted
from gradsurg.sites.places import Door, Hook, Kind, Leaf, Named, Place, SiteFn, Stage
from gradsurg.sites.selection import ROOT
from gradsurg.sites.selectors import ModuleSelector
from gradsurg.sites.tensors import bare, rebuilt
from gradsurg.torch_internals import autograd

Change = Callable[[str, Tensor], Tensor]

Acted = tuple[SiteFn, tuple[str, int, str], str]
"""A function that has acted on a tensor. Then the name, index and path at which it did, and the
module inside which it must not act on this tensor again."""


Owners = dict[int, tuple[ref[Tensor], int, list[Acted]]]
"""By the id of a tensor: the tensor, its version then, and the functions that have acted on it."""


class Outcome(NamedTuple):
    """The action of a hook on one tensor of a call, repeated in a recomputation of the call."""

    site: str
    hook: Hook
    moment: object
    is_changed: bool


Record = dict[str, Outcome]
"""The outcomes of one call of a module, by the paths of the tensors."""

Records = WeakKeyDictionary[nn.Module, list[Record]]
"""The calls of each module in the newest forward, in order.

Shared by all threads, because a backward pass may run in another one.
"""


class Flow:
    """Transforms the tensors of each call of the modules, and repeats that in a recomputation.

    `like` is a selector of this kind of site. `name_of` returns the name of a module, empty for a
    module that is left unchanged.
    """

    def __init__(
        self,
        like: Leaf,
        door: Door,
        shared: Shared,
        name_of: Callable[[nn.Module], str],
        straight: bool = False,
    ) -> None:
        self.like, self.kind, self.door, self.name_of = like, like.kind_at(None), door, name_of
        self.straight, self.thread = straight, shared.follow(door.stack)
        # Interventions may change between a forward and its recomputation.
        self.records: Records = door.kept.setdefault(self.kind, WeakKeyDictionary())
        self.hooks: dict[tuple[Call, str, tuple[SiteFn, ...]], tuple[str, Hook | None]] = {}

    def on_output(self, module: nn.Module, args: object, *given: object) -> object:
        """Transform the output of a module, in a forward hook; a global hook gets no keywords."""
        output = given[-1]
        new = rebuilt(output, self._change_at(module))
        return None if new is output else new

    # Any: a user's values, and PyTorch types the two registrations differently
    def on_input(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Transform the input of a module, in a pre-hook; see `on_output`."""
        change = self._change_at(module)
        is_bare = bare(args, kwargs) is not None
        at_path: Change = (lambda _, tensor: change("", tensor)) if is_bare else change
        new, by_key = rebuilt(args, at_path), rebuilt(kwargs, at_path)
        if new is args and by_key is kwargs:
            return None
        return new if kwargs is None else (new, by_key)

    def _change_at(self, module: nn.Module) -> Change:
        """Return the function that maps each tensor of the present call to its new value."""
        name, calls = self.name_of(module), self.thread.calls
        in_backward = autograd.backward_task() != -1
        if in_backward and module in self.records:
            return self._repeat(self.records[module])
        # A module that is recomputed, and has no records, was not hooked in the forward.
        if not name or (in_backward and autograd.in_recomputation()):
            return lambda path, tensor: tensor
        call = calls.next(module, name) or (name, 0)
        if not calls.depth and (owners := calls.kept.get("owners")):  # nothing else clears it
            calls.kept["owners"] = {
                key: each for key, each in owners.items() if each[0]() is not None
            }
        record: Record | None = None
        # A checkpoint, which recomputes this call, turns gradients off or packs saved tensors.
        if not torch.is_grad_enabled() or autograd.saved_tensor_hooks() is not None:
            recorded = calls.kept.setdefault("recorded", WeakSet[nn.Module]())
            if not calls.depth or module not in recorded:  # the first one in this forward
                self.records[module] = []
                recorded.add(module)
            self.records[module].append(record := {})
        return partial(self._changed, module, call, record)

    def _changed(
        self, module: nn.Module, call: Call, record: Record | None, path: str, tensor: Tensor
    ) -> Tensor:
        """Return the new value of a tensor in the forward, and record the outcome."""
        spot = call[0], max(call[1], 0), path
        owners: Owners = self.thread.calls.kept.setdefault("owners", {})
        # An identity called outside the model may get the same tensor at each call.
        acted = [each for each in _acted_on(tensor, owners, call[0]) if each[1] != spot]
        key = call, path, tuple([function for function, _, _ in acted])
        if key not in self.hooks:
            place = Place(self.kind, call[:1], ref(module), call[1], path[1:])
            met = self.door.meet(place, acted=key[2]) if self.door.picking_at(place) else None
            self.hooks[key] = place.site, met
        site, hook = self.hooks[key]
        if hook is None:
            return tensor
        with nullcontext() if _makes_graph() else hook.keeping_states():
            result = self._transformed(tensor, hook)
        if record is not None:
            record[path] = Outcome(site, hook, hook.moment, result is not tensor)
            guard = self._guard(module, record, path)
            if not torch.is_grad_enabled():
                for function in autograd.running_functions():
                    function.register_prehook(guard)
            elif result.requires_grad and autograd.in_checkpoint():
                result.register_hook(guard)
        # An unchanged input may be taken by several modules side by side, each a site of its own.
        scope = call[0] if result is tensor and self.kind.suffix else ROOT
        acted.append((hook.call, spot, scope))
        owners[id(result)] = ref(result), autograd.version_of(result), acted
        return result

    def _transformed(self, tensor: Tensor, hook: Hook) -> Tensor:
        """Return the new value of a tensor, or the tensor itself."""
        is_straight = self.straight and torch.is_grad_enabled()
        with torch.no_grad() if is_straight else nullcontext():
            result: Any = hook.call(tensor.detach() if is_straight else tensor)
        if is_straight and result is not None:
            result = _StraightThrough.apply(tensor, result)  # Any: `apply` is untyped
        return tensor if result is None else result

    def _repeat(self, calls: Sequence[Record]) -> Change:
        """Return the function that repeats in a recomputation what was done in the forward."""
        changed = {path: outcome for path, outcome in calls[0].items() if outcome.is_changed}
        if any(_facts(call) != _facts(calls[0]) for call in calls):
            why = (
                "its calls were transformed differently, and a recomputation does not say which "
                "call it is (select all calls of the module or none)"
            )
        elif any(outcome.hook.moment != outcome.moment for outcome in changed.values()):
            why = "the step, a switch or the intervention changed since the forward"
        else:
            why = next(filter(None, (outcome.hook.unsteady for outcome in changed.values())), "")
        if why:
            site = next(outcome.site for call in (changed, *calls) for outcome in call.values())
            raise refusal(self.like, "checkpoint, not repeatable", site, why=why)
        return lambda path, tensor: (
            self._transformed(tensor, changed[path].hook) if path in changed else tensor
        )

    def _guard(self, module: nn.Module, record: Record, path: str) -> Callable[[object], None]:
        """Return a hook that refuses a backward pass whose recomputation gives other values."""
        # A graph holds its hooks: nothing here may hold the module or the door.
        called, outcome, records, like = ref(module), record[path], self.records, self.like

        def guard(_: object) -> None:
            module = called()
            newest = None if module is None else records.get(module)
            if newest is None or outcome.hook.moment is None:
                why = "the block has ended between the forward and its backward"
            elif _facts(newest[0]) != _facts(record):
                why = (
                    "its module was called again since, and the step, a switch or the result had "
                    "changed (call backward() before the next step)"
                )
            else:
                return
            raise refusal(like, "checkpoint, not repeatable", outcome.site, why=why)

        return guard


@validated
class Activations(ModuleSelector):
    """Transform the tensors that flow out of or into the selected modules, in the forward pass.

    `side="output"` selects the tensors that flow out of a module, `"input"` those that flow into
    it. `backward="through"` differentiates the transform; `"straight"` takes its derivative to be
    one. Site ids are `name#call`, then `.input`, and the path of the tensor unless it is the only
    one: `mix#0.input.1`, `mix#0.input.mask`. `types`, `depth`, `index` and `call` are
    those of `Outputs`.

    Every floating tensor that a matching module returns or takes is replaced by the result of the
    transform, in training and in evaluation. Tensors inside tuples, lists, dicts, dataclasses and
    keyword arguments are included.

    A tensor is transformed once, at its first site. A module that returns a tensor of another
    matching module unchanged adds no site: an identity, or a container that returns the output of
    its last child. A tensor changed in place between them is another value. A module that writes to
    its input writes to the transformed tensor, and to a copy of a container or object that holds
    it; the caller's remain unchanged.

    A call without gradients, such as a validation under `torch.no_grad()`, is transformed and
    changes no state of the transform or the trigger, unless it is the forward of a reentrant
    checkpoint.

    The recomputation of a checkpoint is transformed and counted again, and has to give the same
    values. So RuntimeError is raised if the transform has a state or random numbers, if the step, a
    switch or the intervention has changed since the forward, if the block has ended, or if another
    call of the module, in the same forward or a later one, was transformed differently.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Activations("0"))).attach(model):
    ...     print(torch.equal(model(torch.ones(2)), model[1].bias))
    True
    """

    side: Literal["output", "input"] = "output"
    backward: Literal["through", "straight"] = "through"

    stages: ClassVar[tuple[Stage, ...]] = ("forward",)
    changes: ClassVar[str] = "activations"

    def kind_at(self, stage: Stage | None) -> Kind:
        return _kind(self.side, self.backward)


def _watch(like: Activations, door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Transform what the modules take or return in each of their calls."""
    refuse_scripted(door, like.kind_at(None), found)
    straight = like.backward == "straight"
    flow = Flow(like, door, shared, name_in(found), straight)
    if like.side == "output":
        hook_calls(door, found, after=flow.on_output)
    else:
        hook_calls(door, found, flow.on_input)


@cache
def _kind(side: Literal["output", "input"], backward: Literal["through", "straight"]) -> Kind:
    like = Activations(side=side, backward=backward)
    suffix = ".input" if side == "input" else ""
    return Kind("Activations", f"{side} {backward}", modules_of, partial(_watch, like), suffix)


def _makes_graph() -> bool:
    """Whether gradients are on, or a reentrant checkpoint has turned them off for its forward."""
    # Only a checkpoint called with gradients on has edges in the graph.
    return torch.is_grad_enabled() or any(
        function.next_functions for function in autograd.running_functions()
    )


def _acted_on(tensor: Tensor, owners: Owners, name: str) -> list[Acted]:
    """Return what has acted on a tensor, if that holds inside the named module."""
    held, version, acted = owners.get(id(tensor)) or (None, 0, [])
    # An id is reused once its tensor is freed; a tensor written to is another value.
    if held is None or held() is not tensor or version != autograd.version_of(tensor):
        return []
    return [each for each in acted if each[2] in (ROOT, name) or name.startswith(f"{each[2]}.")]


def _facts(record: Record) -> dict[str, tuple[object, bool]]:
    """The parts of an outcome that are the same in equal calls."""
    return {path: (outcome.moment, outcome.is_changed) for path, outcome in record.items()}


class _StraightThrough(torch.autograd.Function):
    """The changed value with the identity's derivative, exact unlike `x + (y - x).detach()`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, changed: Tensor) -> Tensor:
        # A copy: a view of the input could not be written to in place.
        return changed.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
