"""Values: what flows forward into or out of a module."""

from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from gradsurg import engine
from gradsurg.fields import validated
from gradsurg.sites._modules import ROOT, Calls, Chosen, ModuleSelector, names_of
from gradsurg.sites._nested import rebuilt
from gradsurg.sites.base import Gates, Stage
from gradsurg.transforms.base import Scope

Change = Callable[[str, Tensor], Tensor]


@validated
class Values(ModuleSelector):
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
    has_value: ClassVar[bool] = False

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Values", self.stage, self.side, self.backward)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        block = ["open"]
        stack.callback(block.clear)
        flow = Flow(names_of(model), self, gates, {}, block)
        flow.hook(model, stack)
        for module in self.hookable(flow.names, gates, flow.tail):
            if self.side == "output":
                handle = module.register_forward_hook(leaving(flow))
            else:
                handle = module.register_forward_pre_hook(entering(flow), with_kwargs=True)
            stack.callback(handle.remove)


def leaving(flow: "Flow") -> Callable[..., object]:
    @engine.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> object:
        new = flow.passing(module, lambda change: rebuilt(output, change))
        return None if new is output else new

    return hook


def entering(flow: "Flow") -> Callable[..., object]:
    @engine.untraced
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        def rebuild(change: Change) -> tuple[object, object]:
            if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
                alone = rebuilt(args[0], change)
                return (args if alone is args[0] else (alone,)), kwargs
            return rebuilt(args, change), rebuilt(kwargs, change)

        new = flow.passing(module, rebuild)
        return None if new[0] is args and new[1] is kwargs else new

    return hook


@dataclass(slots=True)
class Done:
    """What was done at the calls of a module in the newest forward, for their recomputation."""

    moment: object
    base: str | None
    changed: dict[str, bool] = field(default_factory=dict)  # the paths where a gate was asked
    differs: bool = False  # among its calls: a recomputation does not say which one it is


class Flowing(Protocol):
    """The fields that say what is done to values."""

    @property
    def side(self) -> str: ...
    @property
    def backward(self) -> str: ...
    def chosen(self, gates: Gates, tail: str = "") -> Chosen: ...


class Flow(Calls):
    """The values of one call of the model: which site each of them is, and what was done there."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        at: Flowing,
        gates: Gates,
        done: MutableMapping[nn.Module, Done],
        block: list[str],
    ) -> None:
        super().__init__(names)
        self.at = at
        self.kind = type(at).__name__
        self.gates = gates
        self.done = done  # of all threads, as `block` is: a backward may run in another one
        self.block = block
        self.tail = ".input" if at.side == "input" else ""
        self.chosen = at.chosen(gates, self.tail)
        self.owners: dict[int, tuple[ref[Tensor], int, str, str]] = {}

    def begin(self) -> None:
        self.owners.clear()

    def passing(self, module: nn.Module, rebuild: Callable[[Change], Any]) -> Any:  # Any: nested
        """What `rebuild` makes of the values with the change that is due at this call."""
        if engine.in_backward() and module in self.done:
            return rebuild(self._repeated(module, self.done[module]))
        if self.names.get(module) is None:  # of a copy
            return rebuild(lambda path, tensor: tensor)
        call = self.next(module) or (self.names[module][0], 0)
        if not self.inside:
            self.owners = {key: own for key, own in self.owners.items() if own[0]() is not None}
        done = Done(self.gates.moment, self.chosen(module, call))
        stale = self._stale(module, done)
        value = rebuild(lambda path, tensor: self._passed(path, tensor, call[0], done, stale))
        before = self.done.get(module)
        if before is None or self.turns.counts[module] == 1:
            self.done[module] = done
        else:
            before.differs |= before.changed != done.changed
        return value

    def _passed(
        self, path: str, tensor: Tensor, name: str, done: Done, stale: Callable[[], bool]
    ) -> Tensor:
        """What becomes of a tensor in the forward."""
        if done.base is None:
            return tensor
        site = done.base + path
        if path:
            self.gates.forget(done.base)
        owner = self._owner(tensor, name)
        # An identity that is called on its own gets the same tensor as often as it is given it.
        if owner not in (None, site):
            self.gates.expect(owner, [site])
            return tensor
        result = self._through(tensor, site)
        done.changed[path] = result is not tensor
        self._before_recomputing(result, site, stale)
        # What was left alone may be taken by several modules side by side, each a site of its own.
        within = name if result is tensor and self.at.side == "input" else ROOT
        self.owners[id(result)] = ref(result), _version(result), site, within
        return result

    def _repeated(self, module: nn.Module, done: Done) -> Change:
        """What becomes of the tensors of a recomputation: the same as in the forward."""
        wanted = [path for path, changed in done.changed.items() if changed]
        site = f"{done.base or self.names[module][0]}{wanted[0] if wanted else ''}"
        if done.differs:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, its module was called "
                "several times with a different outcome, and a recomputation does not say which "
                "call it is. Choose all of its calls or none."
            )
        if wanted and self.gates.unsteady:
            raise RuntimeError(
                f"{self.kind}: site '{site}' is recomputed by a checkpoint, which must give the "
                f"same values again, and {self.gates.unsteady}"
            )
        if wanted and done.moment != self.gates.moment:
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
        gate = self.gates.gate(site)
        if self.at.backward == "straight" and torch.is_grad_enabled():
            with torch.no_grad():
                result = gate(tensor.detach())
            result = None if result is None else _straight(tensor, result)
        else:
            result = gate(tensor)
        return tensor if result is None else result

    def _before_recomputing(self, result: Tensor, site: str, stale: Callable[[], bool]) -> None:
        """Have a backward refused whose recomputation could not give this value again."""
        if not torch.is_grad_enabled():
            for function in engine.running_functions():
                function.register_prehook(_inside(self.block, self.kind, site, stale))
        elif result.requires_grad and engine.in_checkpoint():
            result.register_hook(_inside(self.block, self.kind, site, stale))

    def _stale(self, module: nn.Module, done: Done) -> Callable[[], bool]:
        """Whether what is known of the newest call of a module is not true of this one."""
        held, of = ref(self), ref(module)  # a graph keeps its hooks

        def stale() -> bool:
            flow, called = held(), of()
            newest = None if flow is None or called is None else flow.done.get(called)
            return newest is None or (newest.moment, newest.changed) != (done.moment, done.changed)

        return stale

    def _owner(self, tensor: Tensor, name: str) -> str | None:
        held, version, site, within = self.owners.get(id(tensor), (None, 0, "", ""))
        # An id is used again once its tensor is gone; what was written to is another value.
        if held is None or held() is not tensor or version != _version(tensor):
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
