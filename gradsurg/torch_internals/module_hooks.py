"""Private tables of hooks on modules and tensors; each function has a test."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules import module as process
from torch.utils.hooks import RemovableHandle

from gradsurg.torch_internals import needs

BackwardHook = Callable[..., Any]  # Any: PyTorch's own types do not allow missing gradients
Kind = Literal["full_backward_pre", "full_backward"]

TABLES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


@needs(*(f"torch.nn.modules.module:{table}" for table in TABLES))
def global_hooks() -> list[dict[int, Callable[..., object]]]:
    """Return the tables of the hooks on all modules of the process."""
    return [vars(process)[table] for table in TABLES]


@needs("torch:Tensor._backward_hooks")
def hooks_of(tensor: Tensor) -> Mapping[int, Callable[..., object]]:
    """Return the hooks that `Tensor.register_hook` has registered on a tensor."""
    return tensor._backward_hooks or {}


@needs("torch:Tensor._backward_hooks")
def is_hookable(value: object) -> TypeGuard[Tensor]:
    """Return whether it is a plain tensor with a graph and without hooks."""
    return (
        type(value) is Tensor
        and value.requires_grad
        and value._backward_hooks is None
        and value.grad_fn is not None
    )


@needs("torch:Tensor._version")
def version(tensor: Tensor) -> int:
    """Return how often a tensor that requires a gradient was modified; faster than `version_of`."""
    return tensor._version


@needs("torch:Tensor._base", "torch:Tensor._is_view")
def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which it is a view, or the tensor itself."""
    return tensor._base if tensor._is_view() else tensor


@needs("torch:Tensor._is_view")
def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view: in-place writes discard its hooks."""
    return tensor._is_view()


@needs("torch.nn:Module._forward_pre_hooks")
def register_pre_hook_before(
    others: Callable[[object], bool], module: nn.Module, hook: Callable[..., object]
) -> RemovableHandle:
    """Register a forward pre-hook with keyword arguments that runs before the hooks `others`."""
    table = module._forward_pre_hooks
    later = [key for key, other in table.items() if others(other)]
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    for key in later:
        table[key] = table.pop(key)
    return handle


def is_scripted(module: nn.Module) -> bool:
    """Return whether TorchScript has compiled a module, which then runs no Python hooks inside."""
    return isinstance(module, torch.jit.ScriptModule)


@needs(
    "torch.nn.modules.module:_global_is_full_backward_hook",
    "torch.nn:Module._is_full_backward_hook",
    "torch.nn:Module._backward_hooks",
)
def register_full_backward(
    module: nn.Module | None, kind: str, hook: BackwardHook, stack: ExitStack
) -> bool:
    """Register a hook of a `Kind` on a module, or on all modules for None.

    Returns False, and registers nothing, if there were hooks of the deprecated kind, which PyTorch
    does not have beside full ones. It does not reset its flag when the last hook is removed, and
    would refuse deprecated hooks from then on: this does.
    """
    state: Any  # the attributes of a module, which are written to
    if module is None:
        state, flag, table = vars(process), "_global_is_full_backward_hook", TABLES[3]
        register = state[f"register_module_{kind}_hook"]
    else:
        state, flag, table = vars(module), "_is_full_backward_hook", "_backward_hooks"
        register = getattr(module, f"register_{kind}_hook")
    before = state[flag]
    if before is False:
        return False

    def restore() -> None:
        if not state[table]:
            state[flag] = before

    if kind == "full_backward":
        stack.callback(restore)
    stack.callback(register(hook).remove)
    return True
