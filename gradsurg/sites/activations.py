"""Activations: what flows forward into or out of a module."""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import HookRegistry, Stage
from gradsurg.sites.call_tracker import Calls, rebuilt
from gradsurg.sites.selection import ROOT, ModuleSelector, SiteIds, names_of
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope


@validated
class Activations(ModuleSelector):
    """What flows forward out of (`side="output"`) or into (`"input"`) the modules that fit.

    Every floating tensor that a matching module returns or takes, also inside tuples, lists, dicts,
    dataclasses and keyword arguments, is replaced by what the transform makes of it, in training
    and in evaluation. The backward pass goes `through` the transform as autograd has it, or
    `straight`: its derivative is then taken to be one. Site ids are `name#call`, then `.input`, and
    the path of the tensor if there is anything but one tensor: `mix#0.input.1`, `mix#0.input.mask`.

    One tensor, one site: what a matching module hands on as it got it from another one (an
    identity, a container with the output of its last child or the input of its first) is
    transformed once, where it came first; what was changed in place between them is another value.
    A module that writes to its input writes to the transformed one, and its caller's stays.

    The recomputation of a checkpoint is transformed again and counted again. It has to give the
    same values: a transform that remembers or draws random numbers is refused there, and so is one
    that was changed since the forward; and a backward that comes after the block, or after another
    forward in which something else was done to these values.
    """

    side: Literal["output", "input"] = "output"
    backward: Literal["through", "straight"] = "through"

    stages: ClassVar[tuple[Stage, ...]] = ("forward",)

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Activations", self.stage, self.side, self.backward)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        block = ["open"]
        stack.callback(block.clear)
        flow = Flow(names_of(model), self, registry, {}, block)
        flow.calls.hook(model, stack)
        for module in self.expect_modules(flow.calls.names, registry, flow.suffix):
            if self.side == "output":
                handle = module.register_forward_hook(output_hook(flow))
            else:
                handle = module.register_forward_pre_hook(input_hook(flow), with_kwargs=True)
            stack.callback(handle.remove)


Change = Callable[[str, Tensor], Tensor]

Own = tuple[ref[Tensor], int, str, str]
"""A tensor with its version, the site that it is, and the module inside which it is that site."""


def output_hook(flow: "Flow") -> Callable[..., object]:
    """The forward hook that changes what a module returns."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> object:
        new = rebuilt(output, flow.due(module))
        return None if new is output else new

    return hook


def input_hook(flow: "Flow") -> Callable[..., object]:
    """The forward pre-hook that changes what a module takes."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        change = flow.due(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            alone = rebuilt(args[0], change)
            return None if alone is args[0] else ((alone,), kwargs)
        new = rebuilt(args, change), rebuilt(kwargs, change)
        return None if new[0] is args and new[1] is kwargs else new

    return hook


@dataclass(slots=True)
class Done:
    """What was done at a call of a module, for its recomputation."""

    module: ref[nn.Module]
    moment: object
    base: str | None
    changed: dict[str, bool] = field(default_factory=dict)  # the paths where a gate was asked


class Flowing(Protocol):
    """The fields that say what is done to values."""

    @property
    def side(self) -> str: ...
    @property
    def backward(self) -> str: ...
    def site_ids(self, registry: HookRegistry, suffix: str = "") -> SiteIds: ...


class Owned(Calls):
    """What is known of one call of the model, thread by thread."""

    def __init__(self, names: dict[nn.Module, list[str]]) -> None:
        super().__init__(names)
        self.owners: dict[int, Own] = {}
        self.noted: set[nn.Module] = set()  # the modules whose calls were noted for a recomputation

    def begin(self) -> None:
        self.owners.clear()
        self.noted.clear()


class Flow:
    """The values of each call of the model: which site each is, and what was done there."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        at: Flowing,
        registry: HookRegistry,
        done: MutableMapping[nn.Module, list[Done]],
        block: list[str],
    ) -> None:
        self.calls = Owned(names)
        self.names = names
        self.kind = type(at).__name__
        self.registry = registry
        # The calls in the newest forward, the first one first. Of all threads, as `block` is: a
        # backward may run in another one.
        self.done = done
        self.block = block
        self.suffix = ".input" if at.side == "input" else ""
        self.straight = at.backward == "straight"
        self.site_ids = at.site_ids(registry, self.suffix)

    def due(self, module: nn.Module) -> Change:
        """What is to become of the tensors of this call."""
        if autograd.in_backward() and module in self.done:
            return self._repeated(module, self.done[module])
        names = self.names.get(module)
        if names is None:  # of a copy
            return _as_it_is
        calls = self.calls
        call = calls.counter.next(module) or (names[0], 0)
        if not calls.counter.inside:
            calls.owners = {key: own for key, own in calls.owners.items() if own[0]() is not None}
        base = self.site_ids(module, call)
        done = None
        # A checkpoint, which will run this again, takes gradients off or sees what is saved.
        if not torch.is_grad_enabled() or autograd.saving() is not None:
            done = Done(ref(module), self.registry.moment, base)
            if calls.counter.inside and module in calls.noted:
                self.done[module].append(done)
            else:
                self.done[module] = [done]
                calls.noted.add(module)
        return _as_it_is if base is None else partial(self._passed, call[0], base, done)

    def _passed(self, name: str, base: str, done: Done | None, path: str, tensor: Tensor) -> Tensor:
        """What becomes of a tensor in the forward; what may be run again is noted as `done`."""
        site = base + path
        if path:
            self.registry.forget(base)
        owners = self.calls.owners
        if id(tensor) in owners:
            owner = _owner(owners[id(tensor)], tensor, name)
            # An identity that is called on its own gets the same tensor as often as it is given it.
            if owner is not None and owner != site:
                self.registry.expect(owner, [site])
                return tensor
        result = self._through(tensor, site)
        if done is not None:
            done.changed[path] = result is not tensor
            self._before_recomputing(result, site, done)
        # What was left alone may be taken by several modules side by side, each a site of its own.
        within = name if result is tensor and self.suffix else ROOT
        owners[id(result)] = ref(result), _version(result), site, within
        return result

    def _repeated(self, module: nn.Module, calls: Sequence[Done]) -> Change:
        """What becomes of the tensors of a recomputation: the same as in the forward."""
        done = calls[0]
        wanted = [path for path, changed in done.changed.items() if changed]
        site = f"{done.base or self.names[module][0]}{wanted[0] if wanted else ''}"
        if any(other.changed != done.changed for other in calls):
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, its module was called "
                "several times with a different outcome, and a recomputation does not say which "
                "call it is. Choose all of its calls or none."
            )
        if wanted and self.registry.unsteady:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, which must give the "
                f"same values again, and {self.registry.unsteady}"
            )
        if wanted and done.moment != self.registry.moment:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, which must give the "
                "same values again, and the step, a switch or the intervention changed since the "
                "forward"
            )
        return lambda path, tensor: (
            self._through(tensor, f"{done.base}{path}") if path in wanted else tensor
        )

    def _through(self, tensor: Tensor, site: str) -> Tensor:
        """The new value of a tensor, or the tensor itself."""
        gate = self.registry.hook_for(site)
        if self.straight and torch.is_grad_enabled():
            with torch.no_grad():
                result = gate(tensor.detach())
            result = None if result is None else _straight(tensor, result)
        else:
            result = gate(tensor)
        return tensor if result is None else result

    def _before_recomputing(self, result: Tensor, site: str, done: Done) -> None:
        """Have a backward refused whose recomputation could not give this value again."""
        guard = _inside(self.block, self.kind, site, self._stale(done))
        if not torch.is_grad_enabled():
            for function in autograd.running_functions():
                function.register_prehook(guard)
        elif result.requires_grad and autograd.in_checkpoint():
            result.register_hook(guard)

    def _stale(self, done: Done) -> Callable[[], bool]:
        """Whether what is known of the newest call of a module is not true of this one."""
        held = ref(self)  # a graph keeps its hooks

        def stale() -> bool:
            flow, module = held(), done.module()
            calls = None if flow is None or module is None else flow.done.get(module)
            if not calls:
                return True
            return (calls[0].moment, calls[0].changed) != (done.moment, done.changed)

        return stale


def _as_it_is(path: str, tensor: Tensor) -> Tensor:
    return tensor


def _owner(own: Own, tensor: Tensor, name: str) -> str | None:
    """The site that a tensor is, seen from the module of this name, by what is known of its id."""
    held, version, site, within = own
    # An id is used again once its tensor is gone; what was written to is another value.
    if held() is not tensor or version != _version(tensor):
        return None
    return site if within in (ROOT, name) or name.startswith(f"{within}.") else None


def _inside(
    block: list[str], kind: str, site: str, stale: Callable[[], bool]
) -> Callable[[object], None]:
    """A hook that refuses a backward whose recomputation would not be transformed as it was."""

    def hook(_: object) -> None:
        if not block:
            why = "the block has ended between the forward and its backward"
        elif stale():
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


class _Straight(torch.autograd.Function):
    """The changed value, with the derivative of an identity: exact, unlike a sum and difference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, changed: Tensor) -> Tensor:
        # A copy: as a view of its input it could not be written to in place.
        return changed.clone()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _straight(value: Tensor, changed: Tensor) -> Tensor:
    result = _Straight.apply(value, changed)
    assert isinstance(result, Tensor)
    return result


def _version(tensor: Tensor) -> int:
    """How often it was written to; what inference mode has made does not count."""
    return 0 if tensor.is_inference() else tensor._version
