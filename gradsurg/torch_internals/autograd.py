"""The corners of PyTorch that it has but does not export; those of torch.compile are in `compiler`.

Each is used by PyTorch's own Python code, and each is pinned by a test in `tests/test_engine.py` or
in `tests/pitfalls`.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import distributed
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

_foreach = vars(torch)
foreach_norm = _foreach["_foreach_norm"]
foreach_mul = _foreach["_foreach_mul"]

next_sequence_number: Callable[[], int] = import_module("torch._C._autograd")._get_sequence_nr
"""The number that the next autograd node of this thread will get."""

_functorch = import_module("torch._C._functorch")
_interpreters: Callable[[], object] = _functorch.peek_interpreter_stack
_running_node: Callable[[], object] = vars(torch._C)["_current_autograd_node"]


flat: Callable[[list[torch.Tensor]], torch.Tensor]
flat = import_module("torch._utils")._flatten_dense_tensors
"""The entries of several dense tensors of one dtype and device, one after the other."""


any_autocast: Callable[[], bool] = vars(torch._C)["_is_any_autocast_enabled"]
"""Whether this thread is under the autocast of any device."""


def undisturbed(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """A block in which what is calculated of these has their own dtype, and what is made besides is
    on the CPU, whatever autocast and whatever default device this thread is under.
    """
    away = torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"
    if not away and not any_autocast():
        return nullcontext()
    stack = ExitStack()
    for kind in {"cpu", *(tensor.device.type for tensor in tensors)}:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    if away:
        stack.enter_context(torch.device("cpu"))
    return stack


FIRST = -1  # no handle of PyTorch's has such a number


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Hook a tensor that an operation has made and that has no hooks yet, as long as it lives.

    As `register_hook`, without a handle to take the hook off, which is a third of what that takes.
    """
    assert tensor.grad_fn is not None
    table: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]]
    table = OrderedDict()
    table[FIRST] = hook
    tensor._backward_hooks = table
    cast(Any, tensor.grad_fn)._register_hook_dict(tensor)  # Any: a node's type does not name it


backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread is inside, -1 outside."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return backward_task() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the backward pass at hand ends; not if it fails."""
    Variable._execution_engine.queue_callback(call)


def running_node() -> object:
    """The autograd node that is being executed in this thread, None if none is."""
    return _running_node()


def in_inner_backward() -> bool:
    """In a call at the end of a backward: whether it is one inside another, that still runs."""
    return _running_node() is not None


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler that makes the step which this is called in, if one does and is at work.

    It leaves nothing on an optimizer that shows it: it stands on the stack.
    """
    if torch.compiler.is_compiling():
        return None
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    return scaler if scaler is not None and scaler.is_enabled() else None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is one of a transform of `torch.func` or of a vmap: it has no storage to tell."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(
        tensor
    )


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for many tensors at once, as those inside a vmap do."""
    while _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return _functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def in_functorch() -> bool:
    """Whether vmap, grad or another transform of `torch.func` is at work."""
    return _interpreters() is not None


def is_distributed() -> bool:
    """Whether this process is one of a group."""
    return distributed.is_available() and distributed.is_initialized()


def averaging() -> DistributedDataParallel | None:
    """The DDP inside whose forward this is: it averages the gradients over processes."""
    return DistributedDataParallel._get_active_ddp_module()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, as `fully_shard` makes one of each parameter."""
    library = sys.modules.get("torch.distributed.tensor")  # slow to import, and mostly for nothing
    return library is not None and isinstance(tensor, library.DTensor)


Pair = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]
"""A pack hook and an unpack hook. Any: whatever pack has made of a saved tensor."""

_saved = import_module("torch._C._autograd")


def saving() -> Pair | None:
    """The innermost pair of hooks for tensors saved for backward that is in force here."""
    return _saved._top_saved_tensors_default_hooks(False)


def begin_saving(pair: Pair) -> None:
    """Put a pair of hooks in force in this thread."""
    _saved._push_saved_tensors_default_hooks(*pair)


def end_saving(pair: Pair) -> None:
    """Take that pair out of force and no other, though it is not the innermost any more."""
    inner: list[Pair] = []
    while (top := saving()) is not None:
        _saved._pop_saved_tensors_default_hooks()
        if top[0] is pair[0]:
            break
        inner.append(top)
    for other in reversed(inner):
        begin_saving(other)


def in_checkpoint() -> bool:
    """Whether this is the forward of a checkpoint that is not reentrant: it will be run again."""
    top = saving()
    return top is not None and top[0].__qualname__.startswith("_checkpoint_hook")


def running_functions() -> list[BackwardCFunction]:
    """The autograd functions whose forward is running in this thread, the innermost first.

    A reentrant checkpoint is one: it takes gradients off, and will run its modules again.
    """
    found: list[BackwardCFunction] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] not in ((), ("self",)):
            given = frame.f_locals.get(code.co_varnames[0])
            if isinstance(given, BackwardCFunction):
                found.append(given)
        frame = frame.f_back
    return found


Mode = TorchFunctionMode

_overrides = vars(torch.overrides)


def function_modes() -> list[Mode]:
    """The modes that see the torch functions of this thread, the innermost last."""
    return _overrides["_get_current_function_mode_stack"]()


def begin_functions(mode: Mode) -> None:
    """Let a mode see the torch functions that this thread calls."""
    _overrides["_push_mode"](mode)


def end_functions(mode: Mode) -> None:
    """Take that mode out of force and no other, though it is not the innermost any more."""
    if all(other is not mode for other in function_modes()):
        return
    inner: list[Mode] = []
    while (top := _overrides["_pop_mode"]()) is not mode:
        inner.append(top)
    for other in reversed(inner):
        begin_functions(other)


def remove_global_forward_hook(handle: RemovableHandle) -> None:
    """Take off a global forward hook; what PyTorch notes of one with keywords it leaves behind."""
    handle.remove()
    vars(import_module("torch.nn.modules.module"))["_global_forward_hooks_with_kwargs"].pop(
        handle.id, None
    )


_process = vars(import_module("torch.nn.modules.module"))
_TABLES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


@dataclass(frozen=True)
class Surroundings:
    """What is in force for all modules of the process and all tensors of this thread."""

    hooks: tuple[frozenset[int], ...]
    modes: tuple[Mode, ...]
    pair: Pair | None


def surroundings() -> Surroundings:
    """Those of here and now."""
    hooks = tuple(frozenset(_process[name]) for name in _TABLES)
    return Surroundings(hooks, tuple(function_modes()), saving())


@contextmanager
def within(known: Surroundings) -> Iterator[None]:
    """A block in which nothing is in force that came after these surroundings."""
    tables = [dict(_process[name]) for name in _TABLES]
    modes = function_modes()
    pairs: list[Pair] = []
    for name, ids in zip(_TABLES, known.hooks, strict=True):
        for key in set(_process[name]) - ids:
            del _process[name][key]
    while function_modes():
        _overrides["_pop_mode"]()
    for mode in modes:
        if any(mode is own for own in known.modes):
            begin_functions(mode)
    while (top := saving()) is not None and (known.pair is None or top[0] is not known.pair[0]):
        pairs.append(top)
        _saved._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(pairs):
            begin_saving(pair)
        while function_modes():
            _overrides["_pop_mode"]()
        for mode in modes:
            begin_functions(mode)
        for name, table in zip(_TABLES, tables, strict=True):
            _process[name].clear()
            _process[name].update(table)
