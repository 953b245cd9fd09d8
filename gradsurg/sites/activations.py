"""Activations: the tensors that flow forward into or out of a module."""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, Stage
from gradsurg.sites.call_tracker import Calls, rebuilt
from gradsurg.sites.selection import ROOT, ModuleSelector, SiteIds, names_of
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
    module that writes to its input writes to the transformed tensor, not to that of its caller.

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
        model, stack = attached.model, attached.stack
        block = ["open"]
        stack.callback(block.clear)
        flow = Flow(names_of(model), self, attached, {}, block)
        flow.calls.hook(model, stack)
        for module in self.expect_modules(flow.calls.names, attached, flow.suffix):
            if self.side == "output":
                handle = module.register_forward_hook(output_hook(flow))
            else:
                handle = module.register_forward_pre_hook(input_hook(flow), with_kwargs=True)
            stack.callback(handle.remove)


def output_hook(flow: "Flow") -> Callable[..., object]:
    """Return the forward hook that transforms the output of a module."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> object:
        change = flow.change_at(module)
        if isinstance(output, Tensor) and output.is_floating_point():  # as `rebuilt` does
            new = change("", output)
        else:
            new = rebuilt(output, change)
        return None if new is output else new

    return hook


def input_hook(flow: "Flow") -> Callable[..., object]:
    """Return the forward pre-hook that transforms the input of a module."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        change = flow.change_at(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            single = rebuilt(args[0], change)
            return None if single is args[0] else ((single,), kwargs)
        new = rebuilt(args, change), rebuilt(kwargs, change)
        return None if new[0] is args and new[1] is kwargs else new

    return hook


@dataclass(slots=True)
class CallRecord:
    """The outcome of a module call, for its recomputation."""

    module: ref[nn.Module]
    moment: object
    base: str | None
    changed: dict[str, bool] = field(default_factory=dict)  # by path: whether the hook changed it


class ActivationFields(Protocol):
    """The fields of a selector of activations."""

    @property
    def side(self) -> str: ...
    @property
    def backward(self) -> str: ...
    def site_ids(self, attached: Attached, suffix: str = "") -> SiteIds: ...


class OwnedTensors(Calls):
    """Call counts that also record the site of each tensor of a call of the model."""

    def __init__(self, names: dict[nn.Module, list[str]]) -> None:
        super().__init__(names)
        self.owners: dict[int, Owner] = {}  # by the id of the tensor
        self.recorded: set[nn.Module] = set()  # modules with calls recorded for a recomputation

    def begin(self) -> None:
        self.owners.clear()
        self.recorded.clear()


class Flow:
    """Transforms the tensors of each call of the model, and repeats that in a recomputation."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        at: ActivationFields,
        attached: Attached,
        records: MutableMapping[nn.Module, list[CallRecord]],
        block: list[str],
    ) -> None:
        self.calls = OwnedTensors(names)
        self.names = names
        self.kind = type(at).__name__
        self.attached = attached
        # The calls in the newest forward, in order. Shared by all threads, as is `block` (not empty
        # while attached): a backward pass may run in another thread.
        self.records = records
        self.block = block
        self.suffix = ".input" if at.side == "input" else ""
        self.straight = at.backward == "straight"
        self.site_ids = at.site_ids(attached, self.suffix)

    def change_at(self, module: nn.Module) -> Change:
        """Return the function that maps each tensor of the current call to its new value."""
        if autograd.backward_task() != -1 and module in self.records:
            return self._repeat(module, self.records[module])
        calls = self.calls
        counter = calls.counter
        call = counter.next(module)
        if call is None:
            names = self.names.get(module)
            if names is None:  # a copy of the model
                return _unchanged
            call = names[0], 0
        if not counter.inside:
            calls.owners = {
                key: owner for key, owner in calls.owners.items() if owner[0]() is not None
            }
        base = self.site_ids(module, call)
        record = None
        # A checkpoint, which recomputes this call, turns gradients off or packs saved tensors.
        if not torch.is_grad_enabled() or autograd.saved_tensor_hooks() is not None:
            record = CallRecord(ref(module), self.attached.moment, base)
            if counter.inside and module in calls.recorded:
                self.records[module].append(record)
            else:
                self.records[module] = [record]
                calls.recorded.add(module)
        return _unchanged if base is None else partial(self._changed, call[0], base, record)

    def _changed(
        self, name: str, base: str, record: CallRecord | None, path: str, tensor: Tensor
    ) -> Tensor:
        """Return the new value of a tensor in the forward, and record the outcome."""
        site = base + path
        if path:
            self.attached.forget(base)
        owners = self.calls.owners
        if id(tensor) in owners:
            owner = _site_in(owners[id(tensor)], tensor, name)
            # An identity called outside the model may get the same tensor at each call.
            if owner is not None and owner != site:
                self.attached.expect(owner, [site])
                return tensor
        result = self._transformed(tensor, site)
        if record is not None:
            record.changed[path] = result is not tensor
            self._guard_recomputation(result, site, record)
        # An unchanged input may be taken by several modules side by side, each a site of its own.
        scope = name if result is tensor and self.suffix else ROOT
        owners[id(result)] = ref(result), autograd.version_of(result), site, scope
        return result

    def _repeat(self, module: nn.Module, calls: Sequence[CallRecord]) -> Change:
        """Return the function that repeats in a recomputation what was done in the forward."""
        record = calls[0]
        paths = [path for path, changed in record.changed.items() if changed]
        site = f"{record.base or self.names[module][0]}{paths[0] if paths else ''}"
        if any(other.changed != record.changed for other in calls):
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, its module was called "
                "several times with a different outcome, and a recomputation does not say which "
                "call it is. Choose all of its calls or none."
            )
        if paths and self.attached.unsteady:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, which must give the "
                f"same values again, and {self.attached.unsteady}"
            )
        if paths and record.moment != self.attached.moment:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, which must give the "
                "same values again, and the step, a switch or the intervention changed since the "
                "forward"
            )
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
        return tensor if result is None else _straight_through(tensor, result)

    def _guard_recomputation(self, result: Tensor, site: str, record: CallRecord) -> None:
        """Hook the backward pass to refuse it if a recomputation would give other values."""
        guard = _guard(self.block, self.kind, site, self._is_stale(record))
        if not torch.is_grad_enabled():
            for function in autograd.running_functions():
                function.register_prehook(guard)
        elif result.requires_grad and autograd.in_checkpoint():
            result.register_hook(guard)

    def _is_stale(self, record: CallRecord) -> Callable[[], bool]:
        """Return a test whether the module's newest call differs from the record."""
        held = ref(self)  # a graph holds its hooks

        def is_stale() -> bool:
            flow, module = held(), record.module()
            calls = None if flow is None or module is None else flow.records.get(module)
            if not calls:
                return True
            return (calls[0].moment, calls[0].changed) != (record.moment, record.changed)

        return is_stale


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
    block: list[str], kind: str, site: str, is_stale: Callable[[], bool]
) -> Callable[[object], None]:
    """Return a hook that raises if a recomputation would not be transformed as the forward was."""

    def hook(_: object) -> None:
        if not block:
            why = "the block has ended between the forward and its backward"
        elif is_stale():
            why = (
                "its module was called again since, and the step, a switch or the outcome was "
                "another one: run a backward before the next step"
            )
        else:
            return
        raise RuntimeError(
            f"{kind}: site '{site}' is recomputed by a checkpoint, which would now give other "
            f"values: {why}"
        )

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


def _straight_through(value: Tensor, changed: Tensor) -> Tensor:
    result = _StraightThrough.apply(value, changed)
    assert isinstance(result, Tensor)
    return result
