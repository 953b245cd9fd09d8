"""Notice in the first steps that nothing acts, or that steps are not counted."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.torch_internals import autograd

WATCHED = 8  # parameters, spread over the model
ENTRIES = 64  # of each, by which it is seen that its value has changed
ENOUGH = 2  # steps after which it is told


class FirstSteps:
    """Call `tell` once, after the second step, with the number of steps that were counted.

    Steps are those that the clock counts, by `count`. Where none are counted, hooks on a few
    parameters notice in a backward pass that two of them have changed since an earlier pass: twice
    those of the optimizer whose steps should be counted, or once without one. The hooks go once it
    was told.
    """

    def __init__(
        self, params: Iterable[Tensor], steps: OptimizerSteps, tell: Callable[[int], None]
    ) -> None:
        self._steps = steps
        self._tell: Callable[[int], None] | None = tell
        self._seen: dict[int, _Seen] = {}  # the watched parameters that had a gradient
        self._counted = 0
        self._stack = ExitStack()
        trained = [p for p in params if p.requires_grad and not is_lazy(p)]
        watched = trained[:: -(-len(trained) // WATCHED) or 1]
        self._watched = {id(param) for param in watched}
        for param in watched:
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
        self._seen.clear()

    def _see(self, param: Tensor) -> None:
        """Notice at a gradient of a watched parameter whether it has changed since the last."""
        if self._counted or self._steps.is_stepping:  # as in the closures of LBFGS
            return
        version, seen = autograd.version_of(param), self._seen.get(id(param))
        if seen is None:
            self._seen[id(param)] = _Seen(param, version)
        elif version != seen.version and self._is_stepped(param):
            seen.version, seen.changes = version, seen.changes + 1
            if seen.changes < (ENOUGH if self._steps.clock else 1):
                return
            seen.changes, seen.has_changed = 0, seen.differs(param)
            # A single one may be a table that is normalized in each forward.
            if sum(each.has_changed for each in self._seen.values()) >= min(2, len(self._seen)):
                autograd.at_end_of_backward(self._end)

    def _is_stepped(self, param: Tensor) -> bool:
        """Whether the optimizer whose steps should be counted has it, or none of the watched."""
        groups = self._steps.clock.param_groups if self._steps.clock else ()
        held = {id(each) for group in groups for each in group["params"]}
        return id(param) in held or held.isdisjoint(self._watched)

    def _end(self) -> None:
        tell = self._tell
        self.close()
        if tell is not None:
            tell(self._counted)


class _Seen:
    """A watched parameter: its version at its last gradient, some entries at its first.

    A version alone may change without a step, as by weights that are noisy in each forward.
    """

    def __init__(self, param: Tensor, version: int) -> None:
        self.version, self.changes, self.has_changed = version, 0, False
        self.entries = _entries(param).clone()

    def differs(self, param: Tensor) -> bool:
        """Whether they differ by more than rounding from those at first; true on `meta`."""
        now = _entries(param).to(self.entries)  # the model may have moved since
        return param.is_meta or not torch.allclose(self.entries, now)


def _entries(param: Tensor) -> Tensor:
    tensor = param.detach()
    tensor = cast(Any, tensor).to_local() if autograd.is_sharded(tensor) else tensor
    return tensor.reshape(-1)[:ENTRIES]
