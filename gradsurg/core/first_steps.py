"""Notice in the first steps that nothing acts, or that steps are not counted."""

from collections.abc import Callable
from contextlib import ExitStack
from weakref import WeakMethod

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.torch_internals import autograd

WATCHED = 8  # parameters, spread over the model
ENOUGH = 2  # steps, or backward passes, after which it is told


class FirstSteps:
    """Call `tell` once, after the second step.

    Steps are those that the clock counts, by `count`. Where none are counted, hooks on a few
    parameters count the backward passes after which the weights have changed; without an optimizer
    all backward passes count. The hooks go once it was told.
    """

    def __init__(self, model: nn.Module, steps: OptimizerSteps, tell: Callable[[], None]) -> None:
        self._steps = steps
        self._tell: WeakMethod[Callable[[], None]] | None = WeakMethod(tell)
        self._task = -1  # the last backward pass
        self._versions: dict[int, int] = {}  # of the watched parameters
        self._has_changed = False
        self._counted = self._passes = self._updates = 0
        self._stack = ExitStack()
        params = [p for p in model.parameters() if p.requires_grad and not is_lazy(p)]
        for param in params[:: -(-len(params) // WATCHED) or 1]:
            handle = param.register_post_accumulate_grad_hook(self._see)
            self._stack.callback(handle.remove)

    def count(self) -> None:
        """Count a step of the optimizer."""
        self._counted += 1
        if self._counted == ENOUGH:
            self._end()

    def close(self) -> None:
        """Remove the hooks."""
        self._tell = None
        self._stack.close()

    def _see(self, param: Tensor) -> None:
        """Note a gradient of a watched parameter, and whether its value has changed since."""
        version = autograd.version_of(param)
        self._has_changed |= self._versions.setdefault(id(param), version) != version
        self._versions[id(param)] = version
        if (task := autograd.backward_task()) != self._task:
            self._task = task
            autograd.at_end_of_backward(self._end_pass)

    def _end_pass(self) -> None:
        if autograd.in_inner_backward():  # of a reentrant checkpoint: the outer pass goes on
            return
        self._passes += 1
        self._updates += self._has_changed
        self._has_changed = False
        is_counting = self._counted > 0
        seen = self._updates if self._steps.optimizers else self._passes
        if not is_counting and seen >= ENOUGH:
            self._end()

    def _end(self) -> None:
        tell = None if self._tell is None else self._tell()
        self.close()
        if tell is not None:
            tell()
