"""The optimizers of a surgery, and functions that run before and after each of their steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Scope


class OptimizerSteps:
    """The optimizers of a surgery, one after another steps; the first counts, or `clock`.

    A step inside a step, as `super().step()` in an optimizer that extends another, belongs to the
    outer one. If a step has a closure, the functions before the step run after each call of it,
    since that is when the gradients are there.
    """

    def __init__(self) -> None:
        self.optimizers: tuple[Optimizer, ...] = ()  # without their wrappers
        self._watched: dict[Optimizer, _WatchedOptimizer] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self._watched for group in optimizer.param_groups]

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
        if self.optimizers:
            self.close()
        self.optimizers = tuple(given)
        for each in given:
            self._watched[each] = _WatchedOptimizer(each, tick if each is counting else None)

    def split(
        self, params: Mapping[str, nn.Parameter], scope: Scope
    ) -> list[tuple[Optimizer, dict[str, nn.Parameter]]]:
        """Return each optimizer that holds some of the parameters, with these.

        Raises ValueError if there is no optimizer yet, for a parameter that none holds or two, and
        if a group is not all in one.
        """
        if not self._watched:
            raise ValueError("stage 'step' needs the optimizer: bind(optimizer)")
        parts: list[tuple[Optimizer, dict[str, nn.Parameter]]] = []
        owners = dict.fromkeys(params, 0)
        for optimizer in self._watched:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            part = {name: param for name, param in params.items() if id(param) in held}
            for name in part:
                owners[name] += 1
            if part:
                parts.append((optimizer, part))
        if missing := [name for name, number in owners.items() if not number]:
            raise ValueError(f"stage 'step': the optimizer does not have {', '.join(missing)}")
        if several := [name for name, number in owners.items() if number > 1]:
            raise ValueError(f"stage 'step': two optimizers have {', '.join(several)}")
        if scope == "group" and len(parts) > 1:
            raise ValueError(
                "stage 'step': the transform needs a whole group at once, and two optimizers share "
                "it; select the parameters of each in an intervention of its own"
            )
        return parts

    def at_begin(
        self, optimizer: Optimizer, function: Callable[[], None], stack: ExitStack
    ) -> None:
        """Call `function` when a step begins: before a closure, and also after `run_before`."""
        watched = self._watched[optimizer]
        watched.watch_begin()
        _add(watched.at_begin, function, stack)

    def before(self, optimizer: Optimizer, function: Callable[[], None], stack: ExitStack) -> None:
        """Call `function` before each step of the optimizer until `stack` is closed."""
        watched = self._watched[optimizer]
        watched.watch_begin()
        _add(watched.before, function, stack)

    def after(self, optimizer: Optimizer, function: Callable[[], None], stack: ExitStack) -> None:
        """Call `function` after each step of the optimizer, and before the step is counted."""
        _add(self._watched[optimizer].after, function, stack)

    def skip(self, optimizer: Optimizer) -> None:
        """Have the optimizer find no gradient in this step; they are back after it.

        Called before a step. Raises RuntimeError after the step if it has changed a parameter.
        """
        self._watched[optimizer].skip()

    def run_before(self, optimizer: object | None, scaler: torch.amp.GradScaler | None) -> None:
        """Run the functions before a step now (of all optimizers, or one), not in the next step."""
        chosen = self.optimizers if optimizer is None else (unwrapped(optimizer),)
        if not chosen or not self._watched.keys() >= set(chosen):
            raise ValueError("before_step: the surgery has no such optimizer; bind it first")
        for each in chosen:
            if scaler is not None and autograd.has_scaled_gradients(scaler, each):
                raise RuntimeError(
                    "before_step: the gradients are still times the loss scale; call "
                    "scaler.unscale_(optimizer) first"
                )
            self._watched[each].run_before()
            self._watched[each].has_run_before = True

    def close(self) -> None:
        """Watch no optimizer any more."""
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()
        self.optimizers = ()


def unwrapped(optimizer: object) -> Optimizer:
    """Return the optimizer inside wrappers that hold it as `.optimizer` (Accelerate, Lightning).

    Raises TypeError if there is none.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if isinstance(optimizer, nn.Module):
        kind = type(optimizer).__name__
        raise TypeError(
            f"optimizer: must be a torch.optim.Optimizer, found the module {kind}; the model comes "
            "first, as in attach(model, optimizer)"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: must be a torch.optim.Optimizer, found {optimizer!r}")
    return optimizer


def _add(
    functions: list[Callable[[], None]], function: Callable[[], None], stack: ExitStack
) -> None:
    functions.append(function)
    stack.callback(functions.remove, function)


class _WatchedOptimizer:
    """The hooks around the steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, tick: WeakMethod[Callable[[], object]] | None) -> None:
        self.optimizer = optimizer
        self.tick = tick
        self.at_begin: list[Callable[[], None]] = []
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        self.has_run_before = False
        self.skipped: list[tuple[Tensor, Tensor | None, int]] = []  # with gradient and version
        # A step that calls the one of the class it extends has the hooks of both.
        classes = [kind for kind in type(optimizer).__mro__ if "step" in vars(kind)]
        self.nests = len(classes) > 2  # one of them is Optimizer
        self.depth = 0  # of steps inside steps
        self.handles = [optimizer.register_step_post_hook(self.end)]
        if self.nests:
            self.watch_begin()

    def watch_begin(self) -> None:
        """Hook the beginning of steps, once."""
        if len(self.handles) == 1:
            self.handles.append(self.optimizer.register_step_pre_hook(self.begin))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run what comes before a step, or put it into the closure."""
        if self.nests and self.depth:
            # Either a step inside a step, or an earlier step has raised and never ended.
            self.depth = autograd.depth_of_steps(optimizer)
            if self.depth > 1:
                return None
        self.depth = 1
        for function in self.at_begin:
            function()
        if not self.before:
            return None
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": self._extended(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._extended(args[1]), *args[2:]), kwargs
        if not self.has_run_before:
            self.run_before()
        return None

    def end(self, *_: object) -> None:
        """Run what comes after a step, and count it."""
        if self.nests:
            self.depth -= 1
            if self.depth:
                return
        self.has_run_before = False
        for function in self.after:
            function()
        if self.skipped:
            self.end_skip()
        tick = None if self.tick is None else self.tick()
        if tick is not None:
            tick()

    def skip(self) -> None:
        """Take the gradients of all parameters away until the end of the step."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self.skipped = [(param, param.grad, autograd.version_of(param)) for param in params]
        for param in params:
            param.grad = None

    def end_skip(self) -> None:
        """Give the gradients back. Raises RuntimeError if the step has changed a parameter."""
        skipped, self.skipped = self.skipped, []
        for param, grad, _ in skipped:
            if param.grad is None:
                param.grad = grad
        if any(autograd.version_of(param) != version for param, _, version in skipped):
            raise RuntimeError(
                f"a step was to be skipped, and {type(self.optimizer).__name__} has changed "
                "parameters that had no gradient: it does not skip them, so choose another "
                "optimizer"
            )

    def run_before(self) -> None:
        """Run what comes before a step. Raises RuntimeError if the gradients are still scaled."""
        # A fused optimizer unscales the gradients itself, after this.
        if self.before and getattr(self.optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "stage 'step': this optimizer gets gradients that are still times the loss scale; "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        for function in self.before:
            function()

    def _extended(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that runs what comes before a step at its end, unless the closure did so."""
        return partial(self._call_and_run, closure)

    def _call_and_run(self, closure: Callable[[], Any]) -> Any:
        self.has_run_before = False
        result = closure()
        if not self.has_run_before:
            self.run_before()
        return result
