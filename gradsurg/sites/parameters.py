"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import LBFGS

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import GradFn, GroupFn, HookRegistry, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.wrapped_models import refuse_averaged
from gradsurg.transforms.base import Need, Scope


@validated
class Parameters(ParamSelector):
    """The gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, the gradient of one backward pass before it is added to `.grad` (the default
    of tensor transforms); `accumulating`, the same after all tensor hooks and only in a backward
    pass that adds to `.grad`, not in `autograd.grad`; `accumulated`, the running sum in `.grad`
    after each backward pass; `settled`, the same after all post-accumulate hooks; `step`, the
    unscaled and accumulated gradient that the optimizer is about to use (the default of group
    transforms).

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
        "step",
    )
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)

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
