"""Group: the gradients of several parameters together, at the end of a backward pass."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.wrapped_models import refuse_averaged
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need


@validated
class Group(ParamSelector):
    """The `.grad`s of the parameters whose name fits `pattern`, all together, per backward pass.

    Stage `backward_end`: the running sums at the end of a backward pass. So group transforms such
    as `ClipGlobalNorm` work without an optimizer to hook, if the training loop updates the weights
    itself. Parameters are selected as by `Parameters`. The group consists of the parameters that
    this backward pass has reached; an older `.grad` of the others is left alone.

    After a nested backward pass (reentrant checkpoint) nothing is done: its parameters join the
    outer pass. The same holds after `autograd.grad`, which adds to no `.grad`, or a backward pass
    that raises. Warnings on detach report gradients added before the exception, and an optimizer
    that steps and clears `.grad` inside the backward pass.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward_end",)
    group_stages: ClassVar[tuple[Stage, ...]] = ("backward_end",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def hook(self, attached: Attached) -> None:
        # `register_multi_grad_hook` will not do: it never fires for a root, fires twice around a
        # reentrant checkpoint, breaks `autograd.grad`, and runs before `.grad` is written.
        model, stack = attached.model, attached.stack
        refuse_averaged("Group", model, stack)
        params = expect_params(self, model, attached)
        passes = _BackwardPasses(params, attached)
        for name, param in params.items():
            handle = param.register_post_accumulate_grad_hook(_reach(passes, name))
            stack.callback(handle.remove)


def _reach(passes: "_BackwardPasses", name: str) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        passes.reach((name,))

    return hook


@dataclass(eq=False)
class _Reached:
    """The parameters that one backward pass has reached.

    Only the callback at the end of the pass holds it, so it is freed if the pass raises.
    """

    names: set[str] = field(default_factory=set)


class _BackwardPasses:
    """The running backward passes and the parameters that each has reached, by name."""

    def __init__(self, params: Mapping[str, nn.Parameter], attached: Attached) -> None:
        self.params = {name: ref(param) for name, param in params.items()}
        self.group_hook = attached.group_hook(list(self.params), list(self.params.values()))
        self.attached = attached
        self.open: dict[int, ref[_Reached]] = {}  # by the number of the backward pass

    def reach(self, names: Iterable[str]) -> None:
        """Record that the running backward pass has written to the `.grad` of some parameters."""
        task = autograd.backward_task()
        held = self.open.get(task)
        reached = None if held is None else held()
        if reached is None:
            reached = _Reached()
            # A backward pass that raises drops its callbacks, and with them `reached`.
            self.open[task] = ref(reached, partial(self._failed, task))
            autograd.at_end_of_backward(partial(self._end, task, reached))
        reached.names.update(names)

    def _end(self, task: int, reached: _Reached) -> None:
        if autograd.in_inner_backward():
            self._hand_to_outer(task, reached)
        else:
            del self.open[task]
            self._apply(reached.names)

    def _hand_to_outer(self, task: int, reached: _Reached) -> None:
        """Add the parameters to the outer pass, at the next node that it runs."""

        def hook(grads: Sequence[Tensor | None]) -> None:
            if self.open.pop(task, None) is not None:
                self.reach(reached.names)
            for handle in handles:
                handle.remove()

        running = autograd.running_node()
        edges = running.next_functions if isinstance(running, Node) else ()
        handles = [node.register_prehook(hook) for node, _ in edges if node is not None]
        if not handles:
            del self.open[task]
            self.attached.note(
                "a backward was called by a hook on a leaf, inside another backward: at its end "
                "the group was not complete, and was left as it is"
            )

    def _apply(self, reached: set[str]) -> None:
        params = [held() for held in self.params.values()]
        grads = [
            param.grad if param is not None and name in reached else None
            for name, param in zip(self.params, params, strict=True)
        ]
        gone = [
            name
            for name, grad in zip(self.params, grads, strict=True)
            if grad is None and name in reached
        ]
        if gone:
            self.attached.note(
                f"the .grad of {', '.join(gone)} was gone when the backward had ended: what steps "
                "inside the backward does not wait for the group"
            )
        # Gradients are on only if the backward pass itself made a graph.
        graph = any(grad is not None and grad.requires_grad for grad in grads)
        with torch.set_grad_enabled(graph):
            results = self.group_hook(grads)
        for param, grad, result in zip(params, grads, results, strict=True):
            if param is not None and result is not None and result is not grad:
                param.grad = result

    def _failed(self, task: int, held: ref[_Reached]) -> None:
        if self.open.pop(task, None) is not None:
            self.attached.note(
                "a backward has failed, and the group was left as it is: what had been added to "
                "its .grad by then is there unchanged"
            )
