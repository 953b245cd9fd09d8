"""Run a model and restore its state afterwards."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy

from gradsurg.sites.module_calls import tensors_in
from gradsurg.torch_internals.random_state import get_states, set_states

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run code on a model with gradients on, and restore the model when the block ends.

    Inside the block, buffers and other tensors of the modules are copies. Attributes, the contents
    of lists and dicts among them, `.grad`, `requires_grad` and random states are restored.
    gradsurg's own hooks on the modules and on all modules of the process are removed, so an
    attached surgery sees nothing. The values of parameters are not copied: `param_versions` shows
    whether they were written to. Raises ValueError for a lazy module.
    """
    _refuse_lazy(model)
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this also turns gradients on
        # A cast cached here would be reused by the user's own forward.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for undo in _restore_random_states(model):
            stack.callback(undo)
        for param in model.parameters():
            stack.callback(_restore_gradient, param, param.requires_grad, param.grad)
            param.grad = None
        for module in model.modules():
            _restore_attributes(module, stack)
            for table in (vars(module), module._buffers):
                _copy_tensors(table, copies)
            for table in _hook_tables(vars(module)):
                _remove_own_hooks(table)
        for table in _hook_tables(vars(module_hooks)):
            stack.callback(_refill, table, table.copy())
            _remove_own_hooks(table)
        yield


def is_own_hook(hook: object) -> bool:
    """Return whether gradsurg has registered a hook."""
    hook = hook.func if isinstance(hook, partial) else hook
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "gradsurg"


def param_versions(model: nn.Module) -> dict[str, int]:
    """Return the version counters of the parameters, without inference tensors, which have none."""
    params = model.named_parameters()
    return {
        name: param._version
        for name, param in params
        if not (is_lazy(param) or param.is_inference())
    }


def copy_inputs(value: Any) -> Any:  # Any: the inputs of a model
    """Return a deep copy with copied tensors, as a forward may write to its input."""
    # deepcopy refuses tensors that are not leaves.
    memo: dict[int, Any] = {  # Any: deepcopy's own
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for _, tensor in tensors_in(value)
    }
    return deepcopy(value, memo)


def _refuse_lazy(model: nn.Module) -> None:
    tables = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tables if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            "the first forward of a lazy module makes its parameters, which cannot be undone; "
            f"call the model once before. Not made yet: {', '.join(lazy)}"
        )


def _restore_random_states(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield a function for each random generator that restores its state."""
    yield partial(set_states, get_states())
    tensors = [*model.parameters(), *model.buffers()]
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        yield partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield partial(value.set_state, value.get_state())


def _restore_gradient(param: nn.Parameter, requires_grad: bool, grad: Tensor | None) -> None:
    if param.requires_grad != requires_grad:
        param.requires_grad_(requires_grad)
    param.grad = grad


def _restore_attributes(module: nn.Module, stack: ExitStack) -> None:
    """Restore the attributes of a module and the contents of its containers on exit."""
    state = vars(module)
    stack.callback(_refill, state, dict(state))
    for value in list(state.values()):
        if type(value) in CONTAINERS:
            stack.callback(_refill, value, value.copy())


def _refill(container: Any, before: Any) -> None:  # Any: each of CONTAINERS
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


def _copy_tensors(table: dict[str, Any], copies: dict[int, Tensor]) -> None:  # Any: attributes
    for key, value in table.items():
        # A tensor that requires a gradient is kept: its copy would not be the same leaf.
        if isinstance(value, Tensor) and not value.requires_grad:
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            table[key] = copies[id(value)]


def _hook_tables(attributes: Mapping[str, Any]) -> list[dict[int, object]]:  # Any: attributes
    """Return the hook tables among the attributes of a module, or of torch.nn.modules.module."""
    return [
        table
        for key, table in attributes.items()
        if key.endswith("_hooks") and isinstance(table, dict)
    ]


def _remove_own_hooks(table: dict[int, object]) -> None:
    """Remove gradsurg's hooks from a table."""
    for number in [number for number, hook in table.items() if is_own_hook(hook)]:
        del table[number]
