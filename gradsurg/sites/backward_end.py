"""Stage `backward_end` of `Parameters`: all `.grad`s at the end of a backward pass."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.messages import shortened
from gradsurg.sites.grads import Access, actor
from gradsurg.sites.places import Door, Place, PlacesHook
from gradsurg.sites.step_hooks import Act
from gradsurg.sites.tensors import tensors_in
from gradsurg.sites.wrapped_models import wrappers_of
from gradsurg.torch_internals import autograd, compiling


def hook_backward_ends(door: Door, places: Sequence[Place]) -> None:
    """Transform the `.grad`s of the parameters at the end of each backward pass.

    In DistributedDataParallel this is after the average, in the passes through its output that
    average. Otherwise it is in each pass that reaches one of the parameters.
    """
    # `register_multi_grad_hook` will not do: it never fires for a root, fires twice around a
    # reentrant checkpoint, breaks `autograd.grad`, and runs before `.grad` is written.
    stack = door.stack
    # Kept over changes of the interventions: the hooks on older graphs call this object.
    wrappers = wrappers_of(door.model)
    passes: _BackwardPasses
    passes = door.kept.setdefault(_BackwardPasses, _BackwardPasses(bool(wrappers)))
    passes.set(door.meet_all(places), any(each.require_forward_param_sync for each in wrappers))
    stack.callback(passes.set, ())
    for place in places:
        param = cast(nn.Parameter, place.thing)
        handle = param.register_post_accumulate_grad_hook(partial(passes.reach, {place.name}))
        stack.callback(handle.remove)
    if distributed.is_available() and distributed.is_initialized():
        hook = compiling.untraced(passes.watch_output)
        inner = [part for part in door.model.modules() if part in wrappers]
        for part in inner or [door.model]:
            stack.callback(part.register_forward_hook(hook).remove)


@dataclass(eq=False)
class _Pass:
    """One backward pass: whether it averages, and the parameters that it has reached.

    Only the callback at its end holds it, so it is freed if the pass raises.
    """

    averages: bool
    reached: set[str] = field(default_factory=set)


class _BackwardPasses:
    """The running backward passes.

    `is_averaged` says that DistributedDataParallel averages the gradients, `has_views` that they
    are views of its buckets, `may_be_old` that the next pass may average and use a graph that was
    made before its output could be hooked.
    """

    def __init__(self, is_averaged: bool) -> None:
        self.is_averaged, self.has_views, self.may_be_old = is_averaged, False, False
        self.acts: list[tuple[PlacesHook, Act]] = []
        self.open: dict[int, ref[_Pass]] = {}  # by the number of the backward pass

    def set(self, hooks: Sequence[PlacesHook], may_be_old: bool = False) -> None:
        """Let these hooks act from now on, also at the end of a graph that is already built."""
        self.may_be_old = may_be_old
        self.acts = [(hook, actor(hook, Access(write=self._write))) for hook in hooks]

    def watch_output(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Hook the output of a model: on every rank, not only on those that use a parameter."""
        wrapper = module if isinstance(module, DistributedDataParallel) else autograd.active_ddp()
        self.is_averaged, self.may_be_old = wrapper is not None, False
        if wrapper is None or not wrapper.require_backward_grad_sync:
            return  # in no_sync the next backward pass averages the sum
        self.has_views = wrapper.gradient_as_bucket_view
        for _, tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.reach, (), averages=True))

    def reach(
        self, names: Collection[str], grad: Tensor | None = None, averages: bool = False
    ) -> None:
        """Record that the running backward pass has written to the `.grad` of some parameters.

        Act at its end, unless DistributedDataParallel overwrites the result.
        """
        task = autograd.backward_task()
        held = self.open.get(task)
        running = None if held is None else held()
        if running is None and averages >= self.is_averaged and self.acts:
            running = _Pass(averages)
            # A backward pass that raises drops its callbacks, and with them `running`.
            self.open[task] = ref(running, partial(self._failed, task, running.reached))
            end = partial(self._end, task, running)
            # DistributedDataParallel averages in a callback of its own, queued after this one. One
            # that is queued when the callbacks run comes last.
            late = partial(autograd.at_end_of_backward, end)
            autograd.at_end_of_backward(late if averages else end)
        if running is not None:
            running.reached.update(names)
        elif self.may_be_old:
            self._note(
                names,
                "the gradients of a backward pass were not transformed: the graph was built "
                "before the intervention was added and DistributedDataParallel overwrites them",
            )

    def _end(self, task: int, ended: _Pass) -> None:
        if autograd.in_inner_backward() and not ended.averages:
            self._hand_to_outer(task, ended)
        elif self.open.pop(task, None) is not None:
            for hook, act in self.acts:
                self._apply(ended, hook, act)

    def _hand_to_outer(self, task: int, inner: _Pass) -> None:
        """Add the parameters to the outer pass, at the next node that it runs."""

        def hook(grads: Sequence[Tensor | None]) -> None:
            if self.open.pop(task, None) is not None:
                self.reach(inner.reached)
            for handle in handles:
                handle.remove()

        running = autograd.running_node()
        edges = running.next_functions if isinstance(running, Node) else ()
        handles = [node.register_prehook(hook) for node, _ in edges if node is not None]
        if not handles:
            del self.open[task]
            self._note(
                inner.reached,
                "a hook on a leaf called backward() inside another backward pass. The group was "
                "not complete when it ended, so its gradients were not transformed",
            )

    def _apply(self, ended: _Pass, hook: PlacesHook, act: Act) -> None:
        params = {place.name: cast(nn.Parameter, place.thing) for place in hook.places}
        gone = [name for name in params if name in ended.reached and params[name].grad is None]
        if gone:
            hook.note(
                f"{shortened(gone)} had no .grad when the backward pass ended: an optimizer that "
                "steps inside the pass used it before the group was transformed"
            )
        acting = [
            param if ended.averages or name in ended.reached else None
            for name, param in params.items()
        ]
        # Gradients are on only if the backward pass itself made a graph.
        grads = (None if param is None else param.grad for param in acting)
        with torch.set_grad_enabled(any(grad is not None and grad.requires_grad for grad in grads)):
            act(*acting)

    def _write(self, param: Tensor, grad: Tensor) -> None:
        if self.has_views and param.grad is not None:
            param.grad.copy_(grad)  # .grad must stay a view of the bucket
        else:
            param.grad = grad

    def _failed(self, task: int, reached: Collection[str], failed: ref[_Pass]) -> None:
        if self.open.pop(task, None) is not None:
            self._note(
                reached,
                "a backward pass has failed, and the group was not transformed: the gradients "
                "added before the error are in .grad unchanged",
            )

    def _note(self, reached: Collection[str], text: str) -> None:
        """Note a text about the interventions of which some parameters were reached."""
        for hook, _ in self.acts:
            if any(place.name in reached for place in hook.places):
                hook.note(text)
