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

from gradsurg.sites.call_tracker import tensors_in
from gradsurg.torch_internals.random_state import generators, put_back

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What runs in this block finds gradients on, and the model is as before when the block ends.

    Buffers and other tensors of its modules are copies inside the block; attributes, what lists and
    dicts among them hold, gradients, `requires_grad` and random numbers are put back. gradsurg's
    own hooks on modules are away, those of all modules of the process too: a surgery that is
    attached sees nothing. The values of parameters are not copied: `versions` tell whether they
    were written to. A lazy module is refused.
    """
    _refuse_lazy(model)
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # gradients are on in it, too
        # A cast that is cached now would be taken again by the user's own forward.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for undo in _random_numbers(model):
            stack.callback(undo)
        for param in model.parameters():
            stack.callback(_give_back, param, param.requires_grad, param.grad)
            param.grad = None
        for module in model.modules():
            _keep(module, stack)
            for table in (vars(module), module._buffers):
                _copy_tensors(table, copies)
            for table in _tables(vars(module)):
                _send_away(table)
        for table in _tables(vars(module_hooks)):
            stack.callback(_refill, table, table.copy())
            _send_away(table)
        yield


def is_ours(hook: object) -> bool:
    """Whether a hook is gradsurg's."""
    hook = hook.func if isinstance(hook, partial) else hook
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "gradsurg"


def versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written to; of inference mode there is no count."""
    params = model.named_parameters()
    return {
        name: param._version
        for name, param in params
        if not (is_lazy(param) or param.is_inference())
    }


def copied(value: Any) -> Any:  # Any: the inputs of a model
    """The same nesting with a copy of each tensor: a forward may write to its input."""
    # A tensor that is not a leaf cannot be copied in depth.
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


def _random_numbers(model: nn.Module) -> Iterator[Callable[[], object]]:
    """For each source of random numbers what puts it back."""
    yield partial(put_back, generators())
    tensors = [*model.parameters(), *model.buffers()]
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        yield partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                yield partial(value.set_state, value.get_state())


def _give_back(param: nn.Parameter, requires_grad: bool, grad: Tensor | None) -> None:
    if param.requires_grad != requires_grad:
        param.requires_grad_(requires_grad)
    param.grad = grad


def _keep(module: nn.Module, stack: ExitStack) -> None:
    """Have the attributes of a module put back, and what is in those that hold others."""
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
        # A tensor with a graph behind it stays: its copy would have none.
        if isinstance(value, Tensor) and not value.requires_grad:
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            table[key] = copies[id(value)]


def _tables(attributes: Mapping[str, Any]) -> list[dict[int, object]]:  # Any: attributes
    """The tables of hooks among the attributes of a module, or of PyTorch's own one."""
    return [
        table
        for key, table in attributes.items()
        if key.endswith("_hooks") and isinstance(table, dict)
    ]


def _send_away(table: dict[int, object]) -> None:
    """Take gradsurg's hooks out of a table, until it is put back."""
    for number in [number for number, hook in table.items() if is_ours(hook)]:
        del table[number]
