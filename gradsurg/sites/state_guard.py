"""Run a model and restore its state afterwards."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradsurg.plugins.messages import shortened
from gradsurg.sites.tensors import tensors_in
from gradsurg.torch_internals.autograd import buffer_table, version_of
from gradsurg.torch_internals.hook_tables import module_tables, process_tables, remove_own
from gradsurg.torch_internals.random_state import get_states, set_states

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run code on a model with gradients on, and restore the model when the block ends.

    Inside the block, buffers and other tensors of the modules are copies. Attributes, the contents
    of their lists and dicts, `.grad`, `requires_grad` and random states are restored. gradsurg's
    own hooks on the modules and on all modules of the process are removed, so an attached surgery
    sees nothing.

    The values of parameters are not copied: `param_versions` shows whether they were written to.
    Raises ValueError for a lazy module.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(
            "call the model once before: the first forward of a lazy module makes its parameters, "
            f"which cannot be undone. Not made yet: {shortened(lazy)}"
        )
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this also turns gradients on
        # A cast cached here would be reused by the user's own forward.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        for undo in _random_states(model, {tensor.device for _, tensor in tensors}):
            stack.callback(undo)
        for param in model.parameters():
            stack.callback(_restore_gradient, param, param.requires_grad, param.grad)
            param.grad = None
        for module in model.modules():
            attributes = vars(module)
            _restore(attributes, stack)
            for value in list(attributes.values()):
                if type(value) in CONTAINERS:
                    _restore(value, stack)
            for table in (attributes, buffer_table(module)):
                _copy_tensors(table, copies)
            for table in module_tables(module):
                remove_own(table)
        for table in process_tables():
            _restore(table, stack)
            remove_own(table)
        yield


def param_versions(model: nn.Module) -> dict[str, int]:
    """Return the version counters of the parameters, without inference tensors, which have none."""
    params = model.named_parameters()
    return {name: version_of(p) for name, p in params if not (is_lazy(p) or p.is_inference())}


def copy_inputs(value: Any) -> Any:  # Any: the inputs of a model
    """Return a deep copy with copied tensors, because a forward may write to its input."""
    # deepcopy refuses tensors that are not leaves.
    memo: dict[int, Any] = {  # Any: deepcopy's own
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for _, tensor in tensors_in(value)
    }
    return deepcopy(value, memo)


def _random_states(model: nn.Module, devices: set[torch.device]) -> Iterator[Callable[[], object]]:
    """Yield a function for each random generator that restores its state."""
    yield partial(set_states, get_states())
    for device in devices:
        if device.type == "cuda":
            yield partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())


def _restore_gradient(param: nn.Parameter, requires_grad: bool, grad: Tensor | None) -> None:
    if param.requires_grad != requires_grad:
        param.requires_grad_(requires_grad)
    param.grad = grad


def _restore(container: Any, stack: ExitStack) -> None:  # Any: each of CONTAINERS
    """Restore the contents of a container when the stack is closed."""
    before = container.copy()

    def refill() -> None:
        container.clear()
        fill = container.extend if isinstance(container, list | deque) else container.update
        fill(before)

    stack.callback(refill)


def _copy_tensors(table: dict[str, Any], copies: dict[int, Tensor]) -> None:  # Any: attributes
    for key, value in table.items():
        # A tensor that requires a gradient is kept: its copy would not be the same leaf.
        if isinstance(value, Tensor) and not value.requires_grad:
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            table[key] = copies[id(value)]
