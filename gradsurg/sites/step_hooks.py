"""The optimizers of a surgery, and functions that run around each of their steps."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
    "stage 'step': the gradients are still times the loss scale; call scaler.unscale_(optimizer) "
    "before scaler.step(optimizer), for each optimizer before the first one steps"
)


Action = Callable[[], None]
Params = Sequence[nn.Parameter | None]
"""The parameters at the places of a list; None for one that is left alone."""


@dataclass(frozen=True)
class StepActions:
    """The actions of an intervention around steps of an optimizer, or of several with a group.

    `order` is its position among the others, `names` are those of `params`. `before` runs when the
    gradients are there: with a closure, at the end of each call of it; for a group, before the
    first optimizer steps. `after` runs after the step, before it is counted. `copies` says that it
    needs the values of the parameters before the step.
    """

    order: int
    optimizers: Sequence[Optimizer]
    names: tuple[str, ...]
    params: Params
    before: Action | None = None
    after: Action | None = None
    copies: bool = False


Make = Callable[[], Sequence[StepActions]]


class OptimizerSteps:
    """The optimizers of a surgery, which step one after another. The step clock advances with the
    first one, or with `clock` if given.

    A step inside a step, as `super().step()` in an optimizer that extends another, belongs to the
    outer one. A group in several optimizers is acted on once in each round of steps: a new round
    begins with an optimizer that has stepped in this one, or has got gradients since it began.

    `clock` is the optimizer whose steps are counted, `copies` has the values of parameters before
    the step that runs.
    """

    def __init__(self) -> None:
        self.clock: Optimizer | None = None
        self.copies: dict[nn.Parameter, Tensor] = {}
        self._watched: dict[Optimizer, _Watched] = {}
        self._made: dict[Make, Sequence[StepActions]] = {}
        self._made_for: list[tuple[int, bool]] = []
        self._actions: list[StepActions] = []  # in their order
        self._waiting: dict[tuple[str, ...], set[Optimizer]] = {}  # to step, by names of a group
        self._acting: Sequence[Optimizer] = ()  # whose step is being acted on
        self._notices = ExitStack()  # the hooks that notice new gradients of groups

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
            self._watched[each] = _Watched(each, self, tick if each is counting else None)

    def hook(self, make: Make, made: Sequence[StepActions], stack: ExitStack) -> None:
        """Act around each step until `stack` is closed, at first as `made` says.

        `make` is called whenever parameters are added, replaced, frozen or thawed.
        """
        self._made_for = self._made_for or self._holds()  # if older, it is made anew at a step
        self._made[make] = made
        stack.callback(self._unhook, make)
        self._arrange()

    def holders(self) -> dict[nn.Parameter, list[Optimizer]]:
        """Return the optimizers that hold each parameter."""
        holders: dict[nn.Parameter, list[Optimizer]] = {}
        for optimizer in self._watched:
            for param in _params(optimizer):
                holders.setdefault(param, []).append(optimizer)
        return holders

    def actions(self, optimizer: Optimizer) -> list[StepActions]:
        """Return the actions around a step of an optimizer, in order."""
        return [each for each in self._actions if optimizer in each.optimizers]

    def renew(self) -> None:
        """Make the actions anew if the optimizers hold other parameters than before."""
        if self._made and (holds := self._holds()) != self._made_for:
            self._made_for = holds
            self._made = {make: make() for make in self._made}
            self._arrange()

    def act(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Act on the gradients before a step, on those of a group unless done in this round."""
        done = {names for names, waiting in self._waiting.items() if optimizer in waiting}
        for names in done:
            self._waiting[names].discard(optimizer)
        for each in self.actions(optimizer):
            others = {*each.optimizers} - {optimizer}
            if each.before is None or (others and each.names in done):
                continue
            if others:
                _check_unscaled(scaler or autograd.stepping_scaler(), others)
            self._acting = each.optimizers
            each.before()
            if others:
                self._waiting[each.names] = others

    def skip(self) -> None:
        """Have the optimizers whose step is being acted on find no gradient in it.

        The gradients are back after it. It raises RuntimeError if it has changed a parameter
        nevertheless.
        """
        for optimizer in self._acting:
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
        self._notices.close()
        for table in (self._watched, self._made, self._waiting):
            table.clear()
        self._actions, self._made_for, self._acting, self.clock = [], [], (), None

    def _holds(self) -> list[tuple[int, bool]]:
        return [(id(p), p.requires_grad) for each in self._watched for p in _params(each)]

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
                    notice = partial(self._new_gradient, names, optimizer)
                    handle = param.register_post_accumulate_grad_hook(notice)
                    self._notices.callback(handle.remove)

    def _new_gradient(self, names: tuple[str, ...], optimizer: Optimizer, _: Tensor) -> None:
        self._waiting.get(names, set()).discard(optimizer)


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


class _Watched:
    """One optimizer: the hooks at the beginning and the end of its steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        steps: OptimizerSteps,
        tick: WeakMethod[Callable[[], object]] | None,
    ) -> None:
        self._optimizer, self._steps, self._tick = optimizer, steps, tick
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

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run what comes before a step, or put it into the closure."""
        # If one runs already, this is inside of it, or that one has raised and never ended.
        self.depth = autograd.depth_of_steps(optimizer) if self.depth else 1
        if self.depth > 1:
            return None
        self._steps.renew()
        actions = self._steps.actions(optimizer)
        copied = {param: None for each in actions if each.copies for param in each.params}
        self._steps.copies |= {p: p.detach().clone() for p in copied if p is not None}
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
        for each in self._steps.actions(self._optimizer):
            if each.after is not None:
                each.after()
        for param in _params(self._optimizer) if self._steps.copies else ():
            self._steps.copies.pop(param, None)
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
        steps, optimizer = self._steps, self._optimizer
        steps.renew()
        # A fused optimizer unscales the gradients itself, after this.
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        if is_scaled and any(each.before is not None for each in steps.actions(optimizer)):
            raise RuntimeError(SCALED)
        steps.act(optimizer, scaler)

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
