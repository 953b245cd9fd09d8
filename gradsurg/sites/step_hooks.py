"""The optimizers of a surgery, and functions that run around each of their steps."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.torch_internals import autograd
from gradsurg.torch_internals.hook_tables import runs_step_hooks

INNER = ("optimizer", "base_optimizer", "_base_optimizer", "_optimizer", "optim", "inner_optimizer")
"""The attributes in which a wrapper holds its optimizer: Accelerate, Lightning, timm, SAM ..."""

SCALED = (
    "call scaler.unscale_(optimizer) for each optimizer before the first scaler.step: at stage "
    "'step' the gradients are still multiplied by the loss scale"
)

Act = Callable[..., None]
"""Transforms a tensor of each of the parameters that it gets; None stands for one left alone."""


@dataclass(frozen=True)
class StepActions:
    """The actions of an intervention around steps of one optimizer; for a group, of several.

    Args:
        order: The position among the other interventions.
        names: The names of `params`.
        before: Runs when the gradients are there. With a closure this is at the end of each call of
            it; for a group, before the first optimizer steps.
        after: Runs after the step, before it is counted.
        copies: Whether it needs the values of the parameters before the step.
    """

    order: int
    optimizers: Sequence[Optimizer]
    names: tuple[str, ...]
    params: Sequence[nn.Parameter | None]
    before: Act | None
    after: Act | None
    copies: bool


Make = Callable[[], Iterable[StepActions]]
Tick = WeakMethod[Callable[[], object]]


@dataclass(eq=False)
class _Step:
    """The running step of an optimizer, or the next one.

    `depth` counts the steps that run, because `super().step()` runs the same hooks once more.
    `skipped` has the parameters of a step that is skipped, with their gradients and versions.
    """

    optimizer: Optimizer
    tick: Tick | None
    depth: int = 0
    has_run_before: bool = False
    skipped: list[tuple[nn.Parameter, Tensor | None, int]] = field(default_factory=list)

    def give_back(self) -> bool:
        """Give the gradients of a skipped step back; return whether it has changed a parameter."""
        skipped, self.skipped = self.skipped, []
        for param, grad, _ in skipped:
            if param.grad is None:
                param.grad = grad
        return any(autograd.version_of(param) != version for param, _, version in skipped)


class OptimizerSteps:
    """The optimizers of a surgery, which step one after another.

    A step inside a step, such as `super().step()` in an optimizer that extends another, belongs to
    the outer one. A group is the parameters of a group transform. If several optimizers hold them,
    it acts once in each round of steps. A new round begins with an optimizer that has stepped in
    this one, or has got gradients since it began.

    `clock` is the optimizer whose steps are counted, `copies` has the values of parameters before
    the step that runs.
    """

    def __init__(self) -> None:
        self.clock: Optimizer | None = None
        self.copies: dict[nn.Parameter, Tensor] = {}
        self._steps: dict[Optimizer, _Step] = {}
        self._made: dict[Make, Sequence[StepActions]] = {}
        self._made_for: list[tuple[int, bool]] = []
        self._actions: list[StepActions] = []  # in their order
        self._waiting: dict[tuple[str, ...], set[Optimizer]] = {}  # yet to step, by a group's names
        self._acting: Sequence[Optimizer] = ()  # those before whose step an action runs
        self._hooks = ExitStack()  # of the optimizers
        self._notices = ExitStack()  # the hooks that notice new gradients of groups

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers, without their wrappers."""
        return tuple(self._steps)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._steps for group in optimizer.param_groups]

    @property
    def is_stepping(self) -> bool:
        """Whether a step of one of them has begun and not ended."""
        return any(step.depth for step in self._steps.values())

    def bind(
        self,
        optimizer: object | Sequence[object],
        clock: object | None = None,
        tick: Tick | None = None,
    ) -> None:
        """Hook one or several optimizers, which replace the present ones.

        `tick` runs after steps of `clock`, or of the first one. Raises TypeError for an object that
        is not an optimizer, ValueError for a wrong clock.
        """
        several = [optimizer] if isinstance(optimizer, str) else optimizer
        several = several if isinstance(several, Sequence) else [several]
        given = [unwrapped(each) for each in several]
        counting = given[0] if clock is None else unwrapped(clock)
        if counting not in given or len({*given}) < len(given):
            raise ValueError("optimizer: give each optimizer once, and clock= must be one of them")
        if self._steps:
            self.close()
        self.clock = counting
        for each in given:
            step = self._steps[each] = _Step(each, tick if each is counting else None)
            begin, end = partial(self._begin, step), partial(self._end, step)
            self._hooks.callback(each.register_step_pre_hook(begin).remove)
            self._hooks.callback(each.register_step_post_hook(end).remove)

    def hook(self, make: Make, made: Iterable[StepActions], stack: ExitStack) -> None:
        """Act around each step until `stack` is closed, at first by the actions in `made`.

        `make` is called whenever parameters are added, replaced, frozen or thawed.
        """
        self._made[make] = [*made]
        self._made_for = self._made_for or self._holds()  # if outdated, a step renews it
        stack.callback(self._unhook, make)
        self._arrange()

    def holders(self) -> dict[nn.Parameter, list[Optimizer]]:
        """Return the optimizers that hold each parameter."""
        holders: dict[nn.Parameter, list[Optimizer]] = {}
        for optimizer in self._steps:
            for param in _params(optimizer):
                holders.setdefault(param, []).append(optimizer)
        return holders

    def skip(self) -> None:
        """Hide the gradients from the optimizers whose step is being acted on.

        The gradients are back after the step. Raises RuntimeError if it has changed a parameter
        nevertheless.
        """
        for optimizer in self._acting:
            params, step = _params(optimizer), self._steps[optimizer]
            step.skipped = [(param, param.grad, autograd.version_of(param)) for param in params]
            for param in params:
                param.grad = None

    def run_before(self, optimizer: object | None, scaler: torch.amp.GradScaler | None) -> None:
        """Run the functions before a step now (of all optimizers, or one), instead of in the next
        step.
        """
        chosen = self.optimizers if optimizer is None else (unwrapped(optimizer),)
        if not chosen or not self._steps.keys() >= {*chosen}:
            raise ValueError("live.before_step: call live.bind(optimizer) first: it is not bound")
        _check_unscaled(scaler, chosen)
        for each in chosen:
            self._act(self._steps[each], scaler)
            self._steps[each].has_run_before = True

    def close(self) -> None:
        """Remove the hooks of all optimizers."""
        self._hooks.close()
        self._notices.close()
        for step in self._steps.values():
            step.give_back()
        for table in (self._steps, self._made, self._waiting):
            table.clear()
        self._actions, self._made_for, self._acting, self.clock = [], [], (), None

    # Which actions there are.

    def _holds(self) -> list[tuple[int, bool]]:
        return [(id(p), p.requires_grad) for each in self._steps for p in _params(each)]

    def _unhook(self, make: Make) -> None:
        self._made.pop(make, None)
        self._arrange()

    def _arrange(self) -> None:
        """Put the actions in order, and watch the gradients of groups."""
        made = [each for actions in self._made.values() for each in actions]
        self._actions = sorted(made, key=attrgetter("order"))
        self._notices.close()
        holders = self.holders()
        groups = {each.names: each.params for each in made if len(each.optimizers) > 1}
        for names, params in groups.items():
            for param in [param for param in params if param is not None]:
                for optimizer in holders.get(param, ()):
                    hook = partial(self._new_gradient, names, optimizer)
                    self._notices.callback(param.register_post_accumulate_grad_hook(hook).remove)

    def _new_gradient(self, names: tuple[str, ...], optimizer: Optimizer, _: Tensor) -> None:
        self._waiting.get(names, set()).discard(optimizer)

    def _renewed(self, optimizer: Optimizer) -> list[StepActions]:
        """The actions of an optimizer, made anew if other parameters are held than before."""
        if self._made and (holds := self._holds()) != self._made_for:
            self._made_for = holds
            self._made = {make: [*make()] for make in self._made}
            self._arrange()
        return [each for each in self._actions if optimizer in each.optimizers]

    # The functions that run around a step.

    def _begin(
        self, step: _Step, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Act before a step, or have its closure do so."""
        # If a step runs already, this one is inside it, or that one has raised and never ended.
        step.depth = autograd.depth_of_steps(optimizer) if step.depth else 1
        if step.depth > 1:
            return None
        actions = self._renewed(optimizer)
        copied = {param for each in actions if each.copies for param in each.params}
        self.copies |= {param: param.detach().clone() for param in copied if param is not None}
        if all(each.before is None for each in actions):
            return None
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": partial(self._call_and_act, step, closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._call_and_act, step, args[1]), *args[2:]), kwargs
        if not step.has_run_before:
            self._act(step)
        return None

    def _call_and_act(self, step: _Step, closure: Callable[[], Any]) -> Any:
        """Call a closure, and act at its end, unless it called `run_before` itself."""
        step.has_run_before = False
        result = closure()
        if not step.has_run_before:
            self._act(step)
        return result

    def _act(self, step: _Step, scaler: torch.amp.GradScaler | None = None) -> None:
        """Act on the gradients before a step; for a group, unless it acted in this round.

        Raises RuntimeError if they are still scaled.
        """
        if any(param.grad is not None for param, _, _ in step.skipped):
            step.skipped = []  # the step that was to be skipped was never made
        optimizer = step.optimizer
        actions = [each for each in self._renewed(optimizer) if each.before is not None]
        # A fused optimizer unscales the gradients itself, after this.
        if actions and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(SCALED)
        done = [names for names, waiting in self._waiting.items() if optimizer in waiting]
        for names in done:
            self._waiting[names].discard(optimizer)
        for each in actions:
            others = {*each.optimizers} - {optimizer}
            if each.before is None or (others and each.names in done):
                continue
            if others:
                _check_unscaled(scaler or autograd.stepping_scaler(), others)
            self._acting = each.optimizers
            each.before(*each.params)
            if others:
                self._waiting[each.names] = others

    def _end(self, step: _Step, optimizer: Optimizer, *_: object) -> None:
        """Act after a step, and count it."""
        step.depth = max(step.depth - 1, 0)
        if step.depth:
            return
        step.has_run_before = False
        for each in self._actions:
            if each.after is not None and optimizer in each.optimizers:
                each.after(*each.params)
        for param in _params(optimizer) if self.copies else ():
            self.copies.pop(param, None)
        if step.skipped and step.give_back():
            raise RuntimeError(
                f"{type(optimizer).__name__} has changed parameters without a gradient in a step "
                "that had to be skipped: use an optimizer of torch.optim, except LBFGS"
            )
        tick = None if step.tick is None else step.tick()
        if tick is not None:
            tick()


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer inside wrappers that hold it, with all their parameters.

    Raises TypeError if there is none, or if its step runs no hooks.
    """
    inner: object = optimizer
    while inner is not None:
        optimizer = inner
        tried = (getattr(optimizer, name, None) for name in INNER)
        held = (each for each in tried if isinstance(each, Optimizer) and each is not optimizer)
        inner = next((each for each in held if {*_params(optimizer)} <= {*_params(each)}), None)
    if not isinstance(optimizer, Optimizer):
        found = repr(optimizer)
        if isinstance(optimizer, nn.Module):
            kind = type(optimizer).__name__
            found = f"the module {kind}; the model comes first: attach(model, optimizer)"
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
