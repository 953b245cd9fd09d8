"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import GradFn, GroupFn, HookRegistry, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.wrapped_models import refuse_averaged
from gradsurg.transforms.base import Need, Scope


@validated
class Parameters(ParamSelector):
    """The parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, one backward's gradient before it is added to `.grad` (the default of tensor
    transforms); `accumulating`, the same, after all tensor hooks and only in a backward that adds
    to `.grad`, not in `autograd.grad`; `accumulated`, the running sum in `.grad` after each
    backward; `settled`, the same after all post-accumulate hooks; `step`, what the optimizer is
    about to use, unscaled and accumulated (the default of group transforms). `types` is a pattern
    on the class of the module it belongs to; `depth`, `index`, `ndim` and `size` (its number of
    entries) are a number or a lowest and a highest. A tied parameter is one site with several
    names; a frozen one is left out, and the ledger says so.
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
        chosen = expect_params(self, model, registry)
        match stage:
            case "backward":
                hooks = [_weak(param, name, registry) for name, param in chosen.items()]

                def register(own: ExitStack) -> None:
                    for held, gate in hooks:
                        param = held()
                        if param is not None:  # it may have left the model
                            own.callback(param.register_hook(gate).remove)

                registry.register(register, stack)
            case "accumulated":
                for name, param in chosen.items():
                    gate = _in_place_of_grad(registry.hook_for(name, ref(param)))
                    stack.callback(param.register_post_accumulate_grad_hook(gate).remove)
            case "accumulating":
                for name, param in chosen.items():
                    gate = registry.hook_for(name, ref(param))
                    node = held_node(name, param, registry)
                    stack.callback(node.register_prehook(_of_one(gate)).remove)
            case "settled":
                refuse_averaged("Parameters, stage 'settled'", model, stack)
                for name, param in chosen.items():
                    gate = registry.hook_for(name, ref(param))
                    node = held_node(name, param, registry)
                    stack.callback(node.register_hook(_settled(gate, ref(param))).remove)
            case "step":
                if optimizer is None:
                    raise ValueError("stage 'step' needs the optimizer: attach(model, optimizer)")
                params = list(chosen.values())
                check_owned(optimizer, chosen)
                gate_all = registry.group_hook(list(chosen), [ref(param) for param in params])
                stack.callback(
                    optimizer.register_step_pre_hook(_before_step(params, gate_all)).remove
                )
            case _:
                raise AssertionError(stage)


def held_node(name: str, param: nn.Parameter, registry: HookRegistry) -> Node:
    """The AccumulateGrad node of a parameter, kept alive: its hooks would vanish with it."""
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

    registry.check_at_end(check)  # which holds on to the node until then
    return node


def _weak(
    param: nn.Parameter, name: str, registry: HookRegistry
) -> tuple[ref[nn.Parameter], GradFn]:
    held = ref(param)
    return held, registry.hook_for(name, held)


def _of_one(gate: GradFn) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...] | None]:
    def hook(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        result = gate(grads[0])
        return None if result is None else (result,)

    return hook


def _settled(gate: GradFn, param: ref[nn.Parameter]) -> Callable[..., None]:
    def hook(grads: Sequence[Tensor], incoming: Sequence[Tensor | None]) -> None:
        held = param()
        if held is not None:
            result = gate(held.grad)
            if result is not None:
                held.grad = result

    return hook


def _in_place_of_grad(gate: GradFn) -> Callable[[Tensor], None]:
    def hook(param: Tensor) -> None:
        result = gate(param.grad)
        if result is not None:
            param.grad = result

    return hook


def _before_step(params: Sequence[nn.Parameter], gate_all: GroupFn) -> Callable[..., None]:
    """The hook before a step. It dies with the block, so it may hold the parameters."""

    def hook(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
            raise RuntimeError(
                "stage 'step' acts before optimizer.step(); with a closure the gradients are made "
                "inside it. Use stage='accumulated' or 'backward'."
            )
        # A fused optimizer unscales the gradients itself, after this hook.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "stage 'step': this optimizer gets gradients that are still times the loss scale; "
                "call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        grads = [param.grad for param in params]
        results = gate_all(grads)
        if results is not grads:
            for param, result in zip(params, results, strict=True):
                param.grad = result

    return hook


def check_owned(optimizer: Optimizer, chosen: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that the optimizer does not have."""
    owned = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strangers = [name for name, param in chosen.items() if id(param) not in owned]
    if strangers:
        raise ValueError(f"stage 'step': the optimizer does not have {', '.join(strangers)}")
