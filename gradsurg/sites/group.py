"""Group: the gradients of several parameters together, when a backward has ended."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import HookRegistry, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.wrapped_models import refuse_averaged
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need, Scope


@validated
class Group(ParamSelector):
    """The `.grad`s of the parameters whose name fits `pattern`, all together, once a backward.

    Stage `backward_end`: when a backward has ended, with the running sums that it leaves. So group
    transforms, as `ClipGlobalNorm`, act without an optimizer to hook, where a loop of the user's
    makes the step. They are selected as `Parameters` are. Only those that this backward has reached
    are of the group: what an earlier one has left in the `.grad` of the others is left alone.

    A backward inside a backward, as a reentrant checkpoint makes one, does not act: its parameters
    are handed on to the one around it. `autograd.grad` adds to no `.grad` and does not act, nor
    does a backward that fails; what it has added by then stays, and the block says so when it ends.
    An optimizer that steps and clears a `.grad` inside the backward has not waited: that is said.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward_end",)
    group_stages: ClassVar[tuple[Stage, ...]] = ("backward_end",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        # Not by `register_multi_grad_hook`: it never fires on a root, twice around a reentrant
        # checkpoint, breaks `autograd.grad`, and comes before `.grad` is written.
        refuse_averaged("Group", model, stack)
        chosen = expect_params(self, model, registry)
        backwards = _Backwards(chosen, registry)
        for name, param in chosen.items():
            handle = param.register_post_accumulate_grad_hook(_reaching(backwards, name))
            stack.callback(handle.remove)


def _reaching(backwards: "_Backwards", name: str) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        backwards.reach((name,))

    return hook


@dataclass(eq=False)
class _Reached:
    """What one backward has reached. Only what is to act on it holds it: failing, it is gone."""

    names: set[str] = field(default_factory=set)


class _Backwards:
    """The backwards at work, and what each has reached. It holds no parameter."""

    def __init__(self, params: Mapping[str, nn.Parameter], registry: HookRegistry) -> None:
        self.params = {name: ref(param) for name, param in params.items()}
        self.gate_all = registry.group_hook(list(self.params), list(self.params.values()))
        self.registry = registry
        self.open: dict[int, ref[_Reached]] = {}  # by the number of the backward

    def reach(self, names: Iterable[str]) -> None:
        """The backward at hand has written to the `.grad` of these."""
        task = autograd.backward_task()
        held = self.open.get(task)
        reached = None if held is None else held()
        if reached is None:
            reached = _Reached()
            # The queue of a backward is dropped when it fails, and no other thread need be asked.
            self.open[task] = ref(reached, partial(self._failed, task))
            autograd.at_end_of_backward(partial(self._end, task, reached))
        reached.names.update(names)

    def _end(self, task: int, reached: _Reached) -> None:
        if autograd.in_inner_backward():
            self._hand_on(task, reached)
        else:
            del self.open[task]
            self._act(reached.names)

    def _hand_on(self, task: int, reached: _Reached) -> None:
        """Let the outer backward know, in which the nodes after the running one come next."""

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
            self.registry.note(
                "a backward was called by a hook on a leaf, inside another backward: at its end "
                "the group was not complete, and was left as it is"
            )

    def _act(self, reached: set[str]) -> None:
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
            self.registry.note(
                f"the .grad of {', '.join(gone)} was gone when the backward had ended: what steps "
                "inside the backward does not wait for the group"
            )
        # As the backward itself has it: on only where it has made a graph.
        graph = any(grad is not None and grad.requires_grad for grad in grads)
        with torch.set_grad_enabled(graph):
            results = self.gate_all(grads)
        for param, grad, result in zip(params, grads, results, strict=True):
            if param is not None and result is not None and result is not grad:
                param.grad = result

    def _failed(self, task: int, held: ref[_Reached]) -> None:
        if self.open.pop(task, None) is not None:
            self.registry.note(
                "a backward has failed, and the group was left as it is: what had been added to "
                "its .grad by then is there unchanged"
            )
