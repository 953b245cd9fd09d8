"""The corners of PyTorch that it has but does not export, all in one place.

Each is used by PyTorch's own Python code, and each is pinned by a test in `tests/test_engine.py`.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch.autograd import Variable

_foreach = vars(torch)
foreach_norm = _foreach["_foreach_norm"]
foreach_mul = _foreach["_foreach_mul"]

next_sequence_number: Callable[[], int] = import_module("torch._C._autograd")._get_sequence_nr
"""The number that the next autograd node of this thread will get."""

_interpreters: Callable[[], object] = import_module("torch._C._functorch").peek_interpreter_stack


flat: Callable[[list[torch.Tensor]], torch.Tensor]
flat = import_module("torch._utils")._flatten_dense_tensors
"""The entries of several dense tensors of one dtype and device, one after the other."""


def backward_task() -> int:
    """The number of the backward pass that this thread is inside, -1 outside."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return backward_task() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward pass at hand ends; not if it fails."""
    Variable._execution_engine.queue_callback(call)


def in_functorch() -> bool:
    """Whether vmap, grad or another transform of `torch.func` is at work."""
    return _interpreters() is not None
