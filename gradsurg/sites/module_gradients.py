"""ModuleGradients: PyTorch's own full backward hooks of a module."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites._backward_hooks import (
    entering,
    forbid_legacy,
    leaving,
    note_in_place,
    without_warning,
)
from gradsurg.sites._calls import Calls
from gradsurg.sites._modules import ModuleSelector, names_of
from gradsurg.sites._tickets import Hook, tickets
from gradsurg.sites.base import HookRegistry, Stage
from gradsurg.transforms.base import Scope


@validated
class ModuleGradients(ModuleSelector):
    """The full backward hooks of the modules whose name fits `pattern`, for who wants just these.

    `kind="full_backward_pre"`: the gradients of what a module returned, at sites `name#call`.
    `kind="full_backward"`: those of what it took by place, at sites `name#call.input`: as those of
    `Inputs`, a branch, and what is changed there never reaches the module's own parameters. With
    the path of the tensor behind it where there are several: `lstm#0.0`.

    Prefer `Outputs` and `Inputs`. PyTorch wraps what such a module takes and returns in a view, at
    every call, selected or not, and so: what comes behind the module must not write to its output
    in place (the error says so); an input that is not used gets a gradient of zeros instead of
    none; `torch.autograd.grad(y, weight)` does not come by `full_backward`; `torch.compile` breaks
    its graph there and refuses `fullgraph=True`; inside `torch.func` it is refused. Tensors by
    keyword or inside lists and dicts are not seen: the ledger names them, and a call with no others
    is refused. That no input needs a gradient, of which PyTorch warns in each backward, the ledger
    says once; PyTorch's warning is left out while the block is open. The deprecated
    `register_backward_hook` is not offered, and a module that has such a hook is refused.
    """

    kind: Literal["full_backward_pre", "full_backward", "backward"] = "full_backward_pre"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    def __post_init__(self) -> None:
        if self.kind == "backward":
            raise Contradiction(
                "kind",
                "must be full_backward_pre or full_backward: the hook of register_backward_hook, "
                "which is deprecated, sees the inputs of the last operation inside the module as "
                "those of the module",
            )

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("ModuleGradients", self.stage, self.kind)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: HookRegistry,
        stack: ExitStack,
    ) -> None:
        side = "full_backward" if self.kind == "full_backward" else "full_backward_pre"
        tail = ".input" if side == "full_backward" else ""
        calls = Calls(names_of(model))
        chosen = self.chosen(gates, tail)
        for module in self.hookable(calls.names, gates, tail):
            whose = f"module '{calls.names[module][0]}'"
            forbid_legacy(module._is_full_backward_hook, whose, "ModuleGradients")
            one = tickets(self._register(module, stack))
            stack.callback(one.remove)
            enter = entering(calls, one, "ModuleGradients")
            stack.callback(module.register_forward_pre_hook(enter).remove)
            leave = leaving(calls, one, chosen, gates, side, "ModuleGradients")
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        note_in_place(model, stack)
        without_warning(stack)
        calls.hook(model, stack)

    def _register(self, module: nn.Module, stack: ExitStack) -> Callable[[Hook], RemovableHandle]:
        if self.kind == "full_backward_pre":
            return module.register_full_backward_pre_hook
        before = module._is_full_backward_hook

        def restore() -> None:
            # PyTorch does not, and would refuse the hooks of the other kind for ever.
            if not module._backward_hooks:
                module._is_full_backward_hook = before

        stack.callback(restore)
        return module.register_full_backward_hook
