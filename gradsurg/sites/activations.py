"""Activations: the tensors that flow forward into or out of a module."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradsurg.plugins.fields import validated
from gradsurg.sites.contexts import refusal
from gradsurg.sites.module_calls import Calls, hookable_modules, rebuilt
from gradsurg.sites.places import Attached, Selector, Stage
from gradsurg.sites.selection import ROOT, ModuleSelector, names_of, site_ids
from gradsurg.torch_internals import autograd, compiling

Change = Callable[[str, Tensor], Tensor]

Owner = tuple[ref[Tensor], int, str, str]
"""A tensor with its version, its site, and the module inside which it has that site."""


@validated
class Activations(ModuleSelector):
    """The tensors that flow out of (`side="output"`) or into (`"input"`) the selected modules.

    Every floating tensor that a matching module returns or takes, also inside tuples, lists, dicts,
    dataclasses and keyword arguments, is replaced by the result of the transform, in training and
    in evaluation. `backward="through"` differentiates the transform; `"straight"` takes its
    derivative to be one. Site ids are `name#call`, then `.input`, and the path of the tensor unless
    it is the only one: `mix#0.input.1`, `mix#0.input.mask`.

    A tensor is transformed once, at its first site: a module that returns a tensor as it got it
    from another matching module (an identity, a container with the output of its last child or the
    input of its first) adds no site. A tensor changed in place between them is another value. A
    module that writes to its input writes to the transformed tensor, and to a copy of a container
    or object that holds it, not to those of its caller.

    A call without gradients, as in a validation under `torch.no_grad()`, is transformed and changes
    no state of the transform or the trigger; the forward of a reentrant checkpoint changes it.

    The recomputation of a checkpoint is transformed and counted again, and has to give the same
    values. So RuntimeError is raised if the transform has a state or random numbers or has changed
    since the forward, if the block has ended, or if a later forward changed other tensors.
    """

    side: Literal["output", "input"] = "output"
    backward: Literal["through", "straight"] = "through"

    stages: ClassVar[tuple[Stage, ...]] = ("forward",)
    changes: ClassVar[str] = "activations"

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Activations", self.stage, self.side, self.backward)

    def hook(self, attached: Attached) -> None:
        suffix, straight = ".input" if self.side == "input" else "", self.backward == "straight"
        flow = Flow(self, attached, names_of(attached.model), Records(), suffix, straight)
        flow.hook(attached.model, attached.stack)
        for module in hookable_modules(self, flow, attached, suffix):
            if self.side == "output":
                handle = module.register_forward_hook(output_hook(flow))
            else:
                handle = module.register_forward_pre_hook(input_hook(flow), with_kwargs=True)
            attached.stack.callback(handle.remove)


def output_hook(flow: "Flow") -> Callable[..., object]:
    """Return the forward hook that transforms the output of a module."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> object:
        change = flow.change_at(module)
        if isinstance(output, Tensor) and output.is_floating_point():  # the usual call
            new = change("", output)
        else:
            new = rebuilt(output, change)
        return None if new is output else new

    return hook


def input_hook(flow: "Flow") -> Callable[..., Any]:  # Any: for both registrations
    """Return the forward pre-hook that transforms the input of a module.

    A global one gets no keyword arguments, and returns none. PyTorch types the two differently.
    """

    # Any: a user's values
    @compiling.untraced
    def hook(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any] | None = None
    ) -> object:
        change = flow.change_at(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            single = rebuilt(args[0], change)
            new, by_key = args if single is args[0] else (single,), kwargs
        else:
            new, by_key = rebuilt(args, change), rebuilt(kwargs, change)
        if new is args and by_key is kwargs:
            return None
        return new if kwargs is None else (new, by_key)

    return hook


@dataclass(slots=True)
class CallRecord:
    """The outcome of a module call, for its recomputation."""

    moment: object
    base: str | None
    changed: dict[str, bool] = field(default_factory=dict)  # by path: whether the hook changed it


Records = WeakKeyDictionary[nn.Module, list[CallRecord]]
"""The calls of each module in the newest forward, in order; empty when the block has ended.

Shared by all threads, as a backward pass may run in another one.
"""


class Flow(Calls):
    """Transforms the tensors of each call of the model, and repeats that in a recomputation."""

    def __init__(
        self,
        selector: Selector,
        attached: Attached,
        names: Mapping[nn.Module, Sequence[str]],
        records: Records,
        suffix: str,
        straight: bool = False,
    ) -> None:
        super().__init__(names)
        self.selector = selector
        self.attached = attached
        self.records = records
        self.suffix = suffix
        self.straight = straight
        # Weak keys: modules outside the model may be freed.
        self.site_ids = site_ids(selector.mechanism, attached, WeakKeyDictionary(), suffix)
        self.owners: dict[int, Owner] = {}  # by the id of the tensor
        self.recorded: set[nn.Module] = set()  # in this call of the model
        attached.stack.callback(records.clear)

    def begin(self) -> None:
        self.owners.clear()
        self.recorded.clear()

    def change_at(self, module: nn.Module) -> Change:
        """Return the function that maps each tensor of the current call to its new value."""
        if autograd.backward_task() != -1 and module in self.records:
            return self._repeat(module, self.records[module])
        counter = self.counter
        call = counter.next(module)
        if call is None:
            names = self.names.get(module)
            if names is None:  # a copy of the model
                return _unchanged
            call = names[0], 0
        if not counter.inside:
            owners = self.owners.items()
            self.owners = {key: owner for key, owner in owners if owner[0]() is not None}
        base = self.site_ids(module, call)
        record = None
        # A checkpoint, which recomputes this call, turns gradients off or packs saved tensors.
        if not torch.is_grad_enabled() or autograd.saved_tensor_hooks() is not None:
            record = CallRecord(self.attached.moment, base)
            if not (counter.inside and module in self.recorded):
                self.records[module] = []
                self.recorded.add(module)
            self.records[module].append(record)
        if base is None:
            return _unchanged
        return partial(self._changed, module, call[0], base, record)

    def _changed(
        self,
        module: nn.Module,
        name: str,
        base: str,
        record: CallRecord | None,
        path: str,
        tensor: Tensor,
    ) -> Tensor:
        """Return the new value of a tensor in the forward, and record the outcome."""
        site = base + path
        if path:
            self.attached.forget(base)
        owners = self.owners
        if id(tensor) in owners:
            owner = _site_in(owners[id(tensor)], tensor, name)
            # An identity called outside the model may get the same tensor at each call.
            if owner is not None and owner != site:
                self.attached.expect(owner, [site])
                return tensor
        with nullcontext() if _makes_graph() else self.attached.keeping_states(site):
            result = self._transformed(tensor, site)
        if record is not None:
            record.changed[path] = result is not tensor
            guard = _guard(self.selector, self.records, module, site, record)
            if not torch.is_grad_enabled():
                for function in autograd.running_functions():
                    function.register_prehook(guard)
            elif result.requires_grad and autograd.in_checkpoint():
                result.register_hook(guard)
        # An unchanged input may be taken by several modules side by side, each a site of its own.
        scope = name if result is tensor and self.suffix else ROOT
        owners[id(result)] = ref(result), autograd.version_of(result), site, scope
        return result

    def _repeat(self, module: nn.Module, calls: Sequence[CallRecord]) -> Change:
        """Return the function that repeats in a recomputation what was done in the forward."""
        record = calls[0]
        paths = [path for path, changed in record.changed.items() if changed]
        why = ""
        if any(other.changed != record.changed for other in calls):
            why = (
                "its module was called several times with a different outcome, and a recomputation "
                "does not say which call it is. Choose all of its calls or none"
            )
        elif paths and self.attached.unsteady:
            why = self.attached.unsteady
        elif paths and record.moment != self.attached.moment:
            why = "the step, a switch or the intervention changed since the forward"
        if why:
            site = f"{record.base or self.names[module][0]}{paths[0] if paths else ''}"
            raise refusal(self.selector, "checkpoint", site, why=why)
        return lambda path, tensor: (
            self._transformed(tensor, f"{record.base}{path}") if path in paths else tensor
        )

    def _transformed(self, tensor: Tensor, site: str) -> Tensor:
        """Return the new value of a tensor, or the tensor itself."""
        hook = self.attached.hook_at(site)
        if not (self.straight and torch.is_grad_enabled()):
            result = hook(tensor)
            return tensor if result is None else result
        with torch.no_grad():
            result = hook(tensor.detach())
        if result is None:
            return tensor
        straight: Any = _StraightThrough.apply(tensor, result)  # Any: `apply` is untyped
        return straight


def _makes_graph() -> bool:
    """Whether gradients are on, or a reentrant checkpoint has turned them off for its forward."""
    # Only a checkpoint called with gradients on has edges in the graph.
    return torch.is_grad_enabled() or any(
        function.next_functions for function in autograd.running_functions()
    )


def _unchanged(path: str, tensor: Tensor) -> Tensor:
    return tensor


def _site_in(owner: Owner, tensor: Tensor, name: str) -> str | None:
    """Return the site recorded for the id of a tensor, if it holds inside the named module."""
    held, version, site, scope = owner
    # An id is reused once its tensor is freed; a tensor written to is another value.
    if held() is not tensor or version != autograd.version_of(tensor):
        return None
    return site if scope in (ROOT, name) or name.startswith(f"{scope}.") else None


def _guard(
    selector: Selector, records: Records, module: nn.Module, site: str, record: CallRecord
) -> Callable[[object], None]:
    """Return a hook that refuses a backward pass whose recomputation would give other values."""
    called = ref(module)  # a graph holds its hooks

    def hook(_: object) -> None:
        module = called()
        newest = None if module is None else records.get(module)
        if newest is None:
            why = "the block has ended between the forward and its backward"
        elif (newest[0].moment, newest[0].changed) != (record.moment, record.changed):
            why = (
                "its module was called again since, and the step, a switch or the outcome was "
                "another one: run a backward before the next step"
            )
        else:
            return
        raise refusal(selector, "checkpoint", site, why=why)

    return hook


class _StraightThrough(torch.autograd.Function):
    """The changed value with the derivative of the identity, exact unlike `x + (y -
    x).detach()`."""

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
