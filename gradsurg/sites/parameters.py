"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import GradFn, GroupFn, HookRegistry, Stage
from gradsurg.sites.call_tracker import tensors_in
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.wrapped_models import refuse_averaged
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope


@validated
class Parameters(ParamSelector):
    """The gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, the gradient of one backward pass before it is added to `.grad` (the default
    of tensor transforms); `accumulating`, the same after all tensor hooks and only in a backward
    pass that adds to `.grad`, not in `autograd.grad`; `accumulated`, the running sum in `.grad`
    after each backward pass; `settled`, the same after all post-accumulate hooks; `reduced`, all
    `.grad`s at the end of a backward pass through the output of the model, averaged over the
    processes if DistributedDataParallel does so; `step`, the unscaled and accumulated gradient that
    the optimizer is about to use (the default of group transforms).

    `types` is a pattern on the class of the module that owns the parameter; `depth`, `index`,
    `ndim` and `size` (its number of entries) are a number or a pair (lowest, highest). A tied
    parameter is one site with several names. A frozen parameter is skipped and reported in the
    ledger.
    """

    stages: ClassVar[tuple[Stage, ...]] = (
        "backward",
        "accumulating",
        "accumulated",
        "settled",
        "reduced",
        "step",
    )
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "reduced")

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "examples", "skip"})

    def hook(
        self,
        model: nn.Module,
        steps: OptimizerSteps,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        params = expect_params(self, model, registry)
        match stage:
            case "backward":
                hooks = [
                    (ref(param), registry.hook_for(name, ref(param)))
                    for name, param in params.items()
                ]

                def register(removals: ExitStack) -> None:
                    for held, hook in hooks:
                        param = held()
                        if param is not None:  # it may have left the model
                            removals.callback(param.register_hook(hook).remove)

                registry.register(register, stack)
            case "accumulated":
                for name, param in params.items():
                    hook = _on_grad_attribute(registry.hook_for(name, ref(param)))
                    stack.callback(param.register_post_accumulate_grad_hook(hook).remove)
            case "accumulating":
                for name, param in params.items():
                    node = _accumulate_grad_node(name, param, registry)
                    hook = _node_prehook(registry.hook_for(name, ref(param)))
                    stack.callback(node.register_prehook(hook).remove)
            case "settled":
                refuse_averaged("Parameters, stage 'settled'", model, stack)
                for name, param in params.items():
                    node = _accumulate_grad_node(name, param, registry)
                    hook = _node_posthook(registry.hook_for(name, ref(param)), ref(param))
                    stack.callback(node.register_hook(hook).remove)
            case "reduced":
                values = [ref(param) for param in params.values()]
                _hook_reduced(model, params, registry.group_hook(list(params), values), stack)
            case "step":
                for optimizer, part in steps.split(params, scope):
                    values = [ref(param) for param in part.values()]
                    if registry.may_skip and isinstance(optimizer, LBFGS):
                        raise ValueError(
                            "LBFGS also steps without gradients, so that no step of it can be "
                            "skipped; choose another optimizer"
                        )
                    skip = partial(steps.skip, optimizer)
                    group_hook = registry.group_hook(list(part), values, skip=skip)
                    function = _before_step(list(part.values()), group_hook)
                    steps.before(optimizer, function, stack)
            case _:
                raise AssertionError(stage)


def _accumulate_grad_node(name: str, param: nn.Parameter, registry: HookRegistry) -> Node:
    """Return the AccumulateGrad node of a parameter and keep it alive until detach.

    Nothing else holds this node, and its hooks are lost with it.
    """
    node = get_gradient_edge(param).node
    held = ref(param)

    def check() -> str:
        now = held()
        if now is None or not now.requires_grad or get_gradient_edge(now).node is node:
            return ""
        return (
            f"site '{name}' got another AccumulateGrad node while the block was open, as by "
            "model.double(), and that is not hooked; convert first, or use stage='backward'"
        )

    registry.check_at_end(check)  # the closure holds the node
    return node


def _node_prehook(
    hook: GradFn,
) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...] | None]:
    def prehook(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        result = hook(grads[0])
        return None if result is None else (result,)

    return prehook


def _node_posthook(hook: GradFn, held: ref[nn.Parameter]) -> Callable[..., None]:
    def posthook(grads: Sequence[Tensor], incoming: Sequence[Tensor | None]) -> None:
        param = held()
        if param is not None:
            result = hook(param.grad)
            if result is not None:
                param.grad = result

    return posthook


def _on_grad_attribute(hook: GradFn) -> Callable[[Tensor], None]:
    def replace_grad(param: Tensor) -> None:
        result = hook(param.grad)
        if result is not None:
            param.grad = result

    return replace_grad


def _before_step(params: Sequence[nn.Parameter], group_hook: GroupFn) -> Callable[[], None]:
    """Return what runs before a step of the optimizer, which does not outlive the surgery."""

    def replace_grads() -> None:
        grads = [param.grad for param in params]
        results = group_hook(grads)
        if results is not grads:
            for param, result in zip(params, results, strict=True):
                param.grad = result

    return replace_grads


def _hook_reduced(
    model: nn.Module, params: Mapping[str, nn.Parameter], act: GroupFn, stack: ExitStack
) -> None:
    """Call `act` on the `.grad`s of all parameters at the end of each backward pass.

    In DistributedDataParallel that is after the averaging, the same on all ranks, and not in a
    backward pass of `no_sync`. Without it, `act` gets None for a parameter that this backward pass
    has not reached. A backward pass that does not reach the output of the model is left alone.
    """
    passes = _ReducedPasses(params, act)
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    hook = compiling.untraced(partial(_watch_output, passes))
    for part in wrappers or [model]:
        stack.callback(part.register_forward_hook(hook).remove)
    for name, param in params.items():
        handle = param.register_post_accumulate_grad_hook(_reach(passes, name))
        stack.callback(handle.remove)
    stack.callback(passes.close)


def _watch_output(
    passes: "_ReducedPasses", module: nn.Module, args: tuple[object, ...], output: object
) -> None:
    # A hook on the output runs on every rank, one on a parameter only on the ranks that use it.
    wrapper = module if isinstance(module, DistributedDataParallel) else autograd.active_ddp()
    if wrapper is not None and not wrapper.require_backward_grad_sync:
        return  # no_sync: the next backward pass averages the sum
    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_begin, passes, wrapper))


def _begin(passes: "_ReducedPasses", wrapper: DistributedDataParallel | None, _: Tensor) -> None:
    passes.begin(wrapper)


def _reach(passes: "_ReducedPasses", name: str) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        passes.reached.add(name)

    return hook


class _ReducedPasses:
    """The running backward pass, and the parameters to whose `.grad` it has added."""

    def __init__(self, params: Mapping[str, nn.Parameter], act: GroupFn) -> None:
        self.params = {name: ref(param) for name, param in params.items()}
        self.act: GroupFn | None = act
        self.task = -1  # the number of the last backward pass
        self.reached: set[str] = set()

    def close(self) -> None:
        """Do nothing from now on, also at the end of a graph that is already built."""
        self.act = None

    def begin(self, wrapper: DistributedDataParallel | None) -> None:
        """Act at the end of the running backward pass; once, however many outputs it has."""
        task = autograd.backward_task()
        if task == self.task:
            return
        self.task = task
        self.reached.clear()
        # DistributedDataParallel averages in a callback of its own, queued after this one. One
        # that is queued when the callbacks run comes last.
        end = partial(self._end, wrapper)
        autograd.at_end_of_backward(partial(autograd.at_end_of_backward, end))

    def _end(self, wrapper: DistributedDataParallel | None) -> None:
        if self.act is None:
            return
        params = [held() for held in self.params.values()]
        grads = [
            param.grad
            if param is not None and (wrapper is not None or name in self.reached)
            else None
            for name, param in zip(self.params, params, strict=True)
        ]
        if all(grad is None for grad in grads):  # autograd.grad adds to no .grad
            return
        graph = any(grad is not None and grad.requires_grad for grad in grads)
        with torch.set_grad_enabled(graph):
            results = self.act(grads)
            for param, grad, result in zip(params, grads, results, strict=True):
                if param is None or result is None or result is grad:
                    continue
                if grad is not None and wrapper is not None and wrapper.gradient_as_bucket_view:
                    grad.copy_(result)  # .grad must stay a view of the bucket
                else:
                    param.grad = result
