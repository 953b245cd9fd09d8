"""The optimizers of a surgery, and functions that run around each of their steps."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.torch_internals import autograd
from gradsurg.torch_internals.hook_tables import runs_step_hooks
from gradsurg.transforms.base import Scope

INNER = ("optimizer", "base_optimizer", "_base_optimizer", "_optimizer", "optim", "inner_optimizer")
"""The attributes in which a wrapper holds its optimizer: Accelerate, Lightning, timm, SAM ..."""

SCALED = (
    "stage 'step': the gradients are still times the loss scale; call scaler.unscale_(optimizer) "
    "before scaler.step(optimizer), for each optimizer before the first one steps"
)

Params = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class StepActions:
    """What an intervention does around a step of an optimizer.

    `begin` runs when a step begins. `before` runs when the gradients are there: with a closure, at
    the end of each call of it. `after` runs after the step, before it is counted.
    """

    begin: Callable[[], None] | None = None
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


NO_ACTIONS = StepActions()
Select = Callable[[], Params]
Make = Callable[[Params, Sequence[Optimizer]], StepActions]


class OptimizerSteps:
    """The optimizers of a surgery, which step one after another. The step clock advances with the
    first one, or with `clock` if given.

    A step inside a step, as `super().step()` in an optimizer that extends another, belongs to the
    outer one.
    """

    def __init__(self) -> None:
        self.clock: Optimizer | None = None  # the one whose steps are counted
        self._watched: dict[Optimizer, _Watched] = {}
        self._members: list[_Member] = []

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, without their wrappers."""
        return tuple(self._watched)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._watched for group in optimizer.param_groups]

    @property
    def is_stepping(self) -> bool:
        """Whether a step of one of them has begun and not ended."""
        return any(watched.depth for watched in self._watched.values())

    def bind(
        self,
        optimizer: object | Sequence[object],
        clock: object | None = None,
        tick: WeakMethod[Callable[[], object]] | None = None,
    ) -> None:
        """Watch one or several optimizers in the place of those so far; `tick` runs after steps of
        `clock`.

        Raises TypeError for something that is no optimizer, ValueError for a wrong clock.
        """
        several = [optimizer] if isinstance(optimizer, str) else optimizer
        several = several if isinstance(several, Sequence) else [several]
        given = [unwrapped(each) for each in several]
        counting = given[0] if clock is None else unwrapped(clock)
        if counting not in given or len({*given}) < len(given):
            raise ValueError("the optimizers must differ, and clock be one of them")
        self.close()
        self.clock = counting
        for each in given:
            self._watched[each] = _Watched(each, self._members, tick if each is counting else None)

    def hook(self, select: Select, make: Make, scope: Scope, stack: ExitStack) -> Callable[[], str]:
        """Run the functions that `make` returns around each step, until `stack` is closed.

        `make(params, optimizers)` is called once per optimizer with the selected parameters that it
        holds; with scope `group` once for all optimizers together. It is called again whenever
        parameters are added, replaced, frozen or thawed. Returns a function that gives the warning
        for the end, empty if there is none. Raises ValueError if there is no optimizer yet, if two
        hold a parameter, or if at first none does.
        """
        if not self._watched:
            raise ValueError("stage 'step' needs the optimizer: bind(optimizer)")
        member = _Member(self.optimizers, scope, select, make)
        member.renew()
        self._members.append(member)
        stack.callback(self._members.remove, member)
        stack.enter_context(member.handles)
        return member.end_warning

    def skip(self, optimizers: Sequence[Optimizer]) -> None:
        """Have each optimizer find no gradient in its next step; they are back after it.

        Raises RuntimeError after a step that has changed a parameter nevertheless.
        """
        for optimizer in optimizers:
            self._watched[optimizer].skip()

    def run_before(self, optimizer: object | None, scaler: torch.amp.GradScaler | None) -> None:
        """Run the functions before a step now (of all optimizers, or one), not in the next step."""
        chosen = self.optimizers if optimizer is None else (unwrapped(optimizer),)
        if not chosen or not self._watched.keys() >= set(chosen):
            raise ValueError("before_step: the surgery has no such optimizer; bind it first")
        _check_unscaled(scaler, chosen)
        for each in chosen:
            self._watched[each].run_before(scaler)
            self._watched[each].has_run_before = True

    def close(self) -> None:
        """Watch no optimizer any more."""
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()
        self.clock = None


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer inside wrappers that hold it, with all their parameters.

    Raises TypeError if there is none, or if its step runs no hooks.
    """
    inner = [optimizer]
    while inner:
        optimizer = inner[0]
        own = {*_params(optimizer)}
        tried = (getattr(optimizer, name, None) for name in INNER)
        inner = [each for each in tried if isinstance(each, Optimizer) and each is not optimizer]
        inner = [each for each in inner if own <= {*_params(each)}]
    if not isinstance(optimizer, Optimizer):
        found = repr(optimizer)
        if isinstance(optimizer, nn.Module):
            kind = type(optimizer).__name__
            found = f"the module {kind}; the model comes first, as in attach(model, optimizer)"
        raise TypeError(f"optimizer: must be a torch.optim.Optimizer, found {found}")
    if not runs_step_hooks(optimizer):
        raise TypeError(
            f"optimizer: the step of {type(optimizer).__name__} runs no hooks, as its class does "
            "not call Optimizer.__init__; attach or bind the optimizer inside it"
        )
    return optimizer


def _params(optimizer: object) -> list[nn.Parameter]:
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    return [param for group in groups for param in group["params"]]


def _check_unscaled(scaler: torch.amp.GradScaler | None, optimizers: Iterable[Optimizer]) -> None:
    """Raise RuntimeError if an optimizer has gradients that the scaler has not unscaled."""
    for each in optimizers if scaler else ():
        has_any = any(param.grad is not None for param in _params(each))
        if has_any and scaler and autograd.has_scaled_gradients(scaler, each):
            raise RuntimeError(SCALED)


class _Member:
    """One intervention: its actions around the steps of each optimizer.

    A group in several optimizers is acted on before the first of them steps. A new round of steps
    begins with an optimizer that has stepped in this one, or has got gradients since it began.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], scope: Scope, select: Select, make: Make
    ) -> None:
        self._optimizers, self._scope, self._select, self._make = optimizers, scope, select, make
        self.actions: dict[Optimizer, StepActions] = {}
        self.handles = ExitStack()
        self._joint: set[Optimizer] = set()  # that hold a group together
        self._waiting: set[Optimizer] = set()  # to step in this round
        self._made_for: list[tuple[int, bool]] | None = None

    def renew(self) -> None:
        """Make the actions anew if the optimizers hold other parameters than before."""
        key = [(id(p), p.requires_grad) for each in self._optimizers for p in _params(each)]
        if key == self._made_for:
            return
        params, is_first, self._made_for = self._select(), self._made_for is None, key
        owned = {each: {*_params(each)} for each in self._optimizers}
        parts = {
            each: {name: param for name, param in params.items() if param in own}
            for each, own in owned.items()
            if not own.isdisjoint(params.values())
        }
        owners = Counter(name for part in parts.values() for name in part)
        if several := [name for name, number in owners.items() if number > 1]:
            raise ValueError(f"stage 'step': two optimizers have {', '.join(several)}")
        if is_first and (missing := [name for name in params if name not in owners]):
            raise ValueError(f"stage 'step': the optimizer does not have {', '.join(missing)}")
        self.handles.close()
        self._joint = {*parts} if self._scope == "group" and len(parts) > 1 else set()
        self._waiting &= self._joint
        if not self._joint:
            self.actions = {each: self._make(part, (each,)) for each, part in parts.items()}
            return
        group = {name: param for name, param in params.items() if name in owners}
        self.actions = dict.fromkeys(parts, self._make(group, tuple(parts)))
        for each, part in parts.items():
            for param in part.values():
                hook = param.register_post_accumulate_grad_hook(partial(self._new_gradient, each))
                self.handles.callback(hook.remove)

    def end_warning(self) -> str:
        """A warning of selected parameters that no optimizer holds, else empty."""
        held = {param for each in self._optimizers for param in _params(each)}
        missing = [name for name, param in self._select().items() if param not in held]
        if not missing:
            return ""
        return (
            "parameters were replaced, added or unfrozen while the block was open, and no "
            f"optimizer of the surgery holds {', '.join(missing)}"
        )

    def before(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Act on the gradients, unless that was done in this round."""
        act = self.actions.get(optimizer, NO_ACTIONS).before
        if act is None or optimizer in self._waiting:
            self._waiting.discard(optimizer)
            return
        others = self._joint - {optimizer}
        if others:
            _check_unscaled(scaler or autograd.stepping_scaler(), others)
        act()
        self._waiting = others

    def _new_gradient(self, optimizer: Optimizer, _: Tensor) -> None:
        self._waiting.discard(optimizer)


class _Watched:
    """One optimizer: the hooks at the beginning and the end of its steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        members: Sequence[_Member],
        tick: WeakMethod[Callable[[], object]] | None,
    ) -> None:
        self._optimizer, self._members, self._tick = optimizer, members, tick
        self.depth = 0  # of steps that run: `super().step()` runs the same hooks once more
        self.has_run_before = False
        self._skipped: list[tuple[Tensor, Tensor | None, int]] = []  # with gradient and version
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def close(self) -> None:
        """Remove the hooks, and give back the gradients of a step that was to be skipped."""
        for handle in self._handles:
            handle.remove()
        self._give_back()

    def _actions(self) -> list[StepActions]:
        return [each.actions.get(self._optimizer, NO_ACTIONS) for each in self._members]

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run what comes before a step, or put it into the closure."""
        # If one runs already, this is inside of it, or that one has raised and never ended.
        self.depth = autograd.depth_of_steps(optimizer) if self.depth else 1
        if self.depth > 1 or not self._members:
            return None
        for member in self._members:
            member.renew()
        actions = self._actions()
        for each in actions:
            if each.begin is not None:
                each.begin()
        if all(each.before is None for each in actions):
            return None
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": partial(self._call_and_run, closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._call_and_run, args[1]), *args[2:]), kwargs
        if not self.has_run_before:
            self.run_before()
        return None

    def _end(self, *_: object) -> None:
        """Run what comes after a step, and count it."""
        self.depth = max(self.depth - 1, 0)
        if self.depth:
            return
        self.has_run_before = False
        for each in self._actions() if self._members else ():
            if each.after is not None:
                each.after()
        skipped = self._give_back() if self._skipped else []
        if any(autograd.version_of(param) != version for param, _, version in skipped):
            raise RuntimeError(
                f"a step was to be skipped, and {type(self._optimizer).__name__} has changed "
                "parameters that had no gradient: it does not skip them, so choose another "
                "optimizer"
            )
        tick = None if self._tick is None else self._tick()
        if tick is not None:
            tick()

    def run_before(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Run what comes before a step. Raises RuntimeError if the gradients are still scaled."""
        if any(param.grad is not None for param, _, _ in self._skipped):
            self._skipped = []  # the step that was to be skipped was never made
        for member in self._members:
            member.renew()
        # A fused optimizer unscales the gradients itself, after this.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        if is_scaled and any(each.before is not None for each in self._actions()):
            raise RuntimeError(SCALED)
        for member in self._members:
            member.before(self._optimizer, scaler)

    def _call_and_run(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, and run what comes before a step at its end, unless it did so itself."""
        self.has_run_before = False
        result = closure()
        if not self.has_run_before:
            self.run_before()
        return result

    def skip(self) -> None:
        """Take the gradients of all parameters away until the end of the step."""
        params = _params(self._optimizer)
        self._skipped = [(param, param.grad, autograd.version_of(param)) for param in params]
        for param in params:
            param.grad = None

    def _give_back(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Give the gradients of a skipped step back; return what was skipped."""
        skipped, self._skipped = self._skipped, []
        for param, grad, _ in skipped:
            if param.grad is None:
                param.grad = grad
        return skipped
