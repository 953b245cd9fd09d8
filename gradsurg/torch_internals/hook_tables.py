"""The tables in which PyTorch keeps the hooks of modules and tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as process
from torch.optim import Optimizer

from gradsurg.torch_internals import needs

HookTable = dict[int, Any]  # Any: hooks have many signatures

CALL_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@needs(*(f"torch.nn:Module.{table}" for table in CALL_TABLES))
def call_tables(module: nn.Module) -> list[HookTable]:
    """Return the tables of the hooks that run at calls of a module."""
    attributes = vars(module)
    return [attributes[key] for key in CALL_TABLES]


def module_tables(module: nn.Module) -> list[HookTable]:
    """Return all hook tables of a module, also the tables of its state_dict."""
    return _tables(vars(module))


def process_tables() -> list[HookTable]:
    """Return the tables of the hooks that run at calls of every module of the process."""
    return _tables(vars(process))


@needs("torch:Tensor._backward_hooks", "torch:Tensor._post_accumulate_grad_hooks")
def tensor_tables(tensor: Any) -> list[HookTable]:  # Any: PyTorch declares only the first table
    """Return the tables of a tensor that has hooks."""
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [table for table in tables if table]


@needs("torch:Tensor._post_accumulate_grad_hooks")
def accumulate_hooks(tensor: Any) -> HookTable | None:  # Any: PyTorch does not declare the table
    """Return the table of the hooks that run after a gradient is added to `.grad`; or None."""
    return tensor._post_accumulate_grad_hooks


@needs("torch:Tensor._post_accumulate_grad_hooks")
def set_accumulate_hooks(tensor: Any, table: HookTable | None) -> None:  # Any: as above
    """Replace the table of the hooks that run after a gradient is added to `.grad`."""
    tensor._post_accumulate_grad_hooks = table


@needs("torch.nn:Module._forward_hooks", "torch.nn:Module._forward_pre_hooks")
def number_of_forward_hooks(module: nn.Module) -> int:
    """The number of forward hooks and forward pre-hooks of a module."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


@needs("torch.optim:Optimizer._optimizer_step_pre_hooks")
def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the `step` of an optimizer runs hooks: `Optimizer.__init__` makes it do so."""
    has_tables = hasattr(optimizer, "_optimizer_step_pre_hooks")
    return has_tables and getattr(type(optimizer).step, "hooked", False)


def foreign_hooks(*tables: object) -> list[str]:
    """Return the names of the hooks in PyTorch's hook tables that gradsurg did not register."""
    hooks = [hook for table in tables if isinstance(table, dict) for hook in list(table.values())]
    names = []
    for hook in hooks:
        hook = getattr(hook, "func", hook)  # of a partial
        module = getattr(hook, "__module__", None) or type(hook).__module__
        if module.partition(".")[0] != "gradsurg":
            names.append(f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}")
    return names


def remove_own(table: HookTable) -> None:
    """Remove the hooks that gradsurg has registered from a table."""
    for number, hook in list(table.items()):
        hook = hook.func if isinstance(hook, partial) else hook
        if str(getattr(hook, "__module__", "")).partition(".")[0] == "gradsurg":
            del table[number]


def _tables(attributes: Mapping[str, Any]) -> list[HookTable]:  # Any: attributes
    return [
        table
        for key, table in attributes.items()
        if key.endswith("_hooks") and isinstance(table, dict)
    ]
