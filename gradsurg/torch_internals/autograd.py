"""Private functions of PyTorch for autograd, hooks and modes; `compiling` has those of Dynamo.

Each is used by PyTorch's own Python code, and each has a test.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradsurg.torch_internals import exists, needs, private

foreach_norm = private("torch:_foreach_norm")
foreach_mul = private("torch:_foreach_mul")
foreach_mul_ = private("torch:_foreach_mul_")
foreach_add_ = private("torch:_foreach_add_")
foreach_copy_ = private("torch:_foreach_copy_")

next_sequence_number: Callable[[], int] = private("torch._C._autograd:_get_sequence_nr")
"""The sequence number of the next autograd node made in this thread."""

flatten: Callable[[list[torch.Tensor]], torch.Tensor]
flatten = private("torch._utils:_flatten_dense_tensors")
"""Flatten dense tensors of one dtype and device into one tensor."""

any_autocast: Callable[[], bool] = private("torch._C:_is_any_autocast_enabled")
"""Whether autocast is enabled in this thread, for any device."""


@needs("torch._C:_len_torch_function_stack")
def without_autocast(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Disable autocast for the devices of these tensors, and make the CPU the default device."""
    # A default device is a torch-function mode, so without any mode it is the CPU.
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


FIRST = -1  # a key that no handle of PyTorch has


@needs("torch:Tensor._backward_hooks", "torch._C:_FunctionBase._register_hook_dict")
def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Register the first hook of a tensor that is no leaf, for the lifetime of the tensor.

    Like `register_hook`, in two thirds of the time: there is no handle to remove the hook.
    """
    assert tensor.grad_fn is not None
    table: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]]
    table = OrderedDict()
    table[FIRST] = hook
    tensor._backward_hooks = table
    cast(Any, tensor.grad_fn)._register_hook_dict(tensor)  # Any: a node's type does not name it


backward_task: Callable[[], int] = private("torch._C:_current_graph_task_id")
"""The id of the backward pass running in this thread; -1 if none is."""


def in_backward() -> bool:
    """Whether a backward pass runs in this thread."""
    return backward_task() != -1


at_end_of_backward: Callable[[Callable[[], None]], None]
at_end_of_backward = private("torch.autograd:Variable._execution_engine.queue_callback")
"""Call a function when the running backward pass ends; not if it fails."""


@needs("torch.nn:Module._buffers")
def buffer_table(module: torch.nn.Module) -> dict[str, Any]:
    """The buffers of a module itself, to be replaced. Any: a tensor or None."""
    return module._buffers


number_of: Callable[[Any], int]
number_of = needs("torch._C:_FunctionBase._sequence_nr")(methodcaller("_sequence_nr"))
"""The sequence number of a node; nodes made later in a thread have higher numbers."""

outputs_of: Callable[[Node], Sequence[Any]]
outputs_of = needs("torch._C:_FunctionBase._input_metadata")(attrgetter("_input_metadata"))
"""The shape and dtype of each output of the operation of a node. Any: no public type."""

running_node: Callable[[], object] = private("torch._C:_current_autograd_node")
"""The autograd node that runs in this thread; None if none does."""

_run_backward = private("torch.autograd.graph:_engine_run_backward")


def gradients_of(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor], keep_graph: bool
) -> Sequence[torch.Tensor | None]:
    """Return the gradient of a scalar by each leaf, None for those that it does not reach.

    The same as `torch.autograd.grad`, which spends a fifth of the time of a small model on checks.
    """
    return _run_backward(
        (loss,),
        (torch.ones_like(loss),),
        keep_graph,
        False,  # create_graph
        tuple(leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def accumulate(grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Add gradients of their own shapes to those of leaves, and run the hooks of the leaves.

    The same as `torch.autograd.backward`, which spends most of its time on checks of the shapes.
    """
    _run_backward(
        tuple(grads),
        tuple(grads.values()),
        False,  # retain_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@needs("torch.autograd.graph:_engine_run_backward.t_outputs")
def root_of_nested_backward() -> torch.Tensor | None:
    """The tensor whose backward is the outermost one; None if backward passes are not nested.

    A reentrant checkpoint runs a backward of its own inside. The stack is searched.
    """
    frame, roots, code = sys._getframe(), [], _run_backward.__code__
    while frame is not None:
        if frame.f_code is code:
            roots.append(frame.f_locals["t_outputs"][0])
        frame = frame.f_back
    return roots[-1] if len(roots) > 1 and isinstance(roots[-1], torch.Tensor) else None


def in_inner_backward() -> bool:
    """In an `at_end_of_backward` callback: whether the ending pass is nested."""
    return running_node() is not None  # the node whose backward has run the nested pass


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The enabled GradScaler whose `step` is on the call stack; None if there is none.

    It leaves no mark on the optimizer, so the stack is searched.
    """
    if torch.compiler.is_compiling():
        return None
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    return scaler if scaler is not None and scaler.is_enabled() else None


@needs("torch.amp:GradScaler._per_optimizer_states")
def has_scaled_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients of an optimizer wait to be unscaled by an enabled scaler."""
    if not scaler.is_enabled():
        return False
    state = vars(scaler)["_per_optimizer_states"].get(id(optimizer), {})
    return state.get("stage", OptState.READY) is OptState.READY


@needs("torch.optim:Optimizer.profile_hook_step.wrapper")
def depth_of_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many steps of this optimizer are on the call stack, one inside the other.

    A step that raises calls no post-hook, so hooks cannot count steps: the stack is searched.
    """
    frame, depth = sys._getframe(), 0
    file = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == file:
            depth += frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return depth


@needs("torch:Tensor._version")
def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was modified; 0 for one made in inference mode, which has no counter."""
    return 0 if tensor.is_inference() else tensor._version


@needs("torch:Tensor._base")
def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was made of; any other tensor itself."""
    return tensor if tensor._base is None else tensor._base


@needs("torch.nn.modules.conv:_ConvNd._reversed_padding_repeated_twice")
def convolution_padding(layer: Any) -> list[int]:  # Any: a convolution of any dimension
    """The padding of a convolution as `torch.nn.functional.pad` takes it, the last dimension first.

    The two sides of padding="same" may differ.
    """
    return layer._reversed_padding_repeated_twice


Table = dict[str, torch.Tensor | None]


@needs("torch.nn:Module._parameters", "torch.nn:Module._buffers")
def tensor_tables(module: torch.nn.Module) -> tuple[list[Table], list[Table]]:
    """The dicts of parameters and those of buffers, of a module and all in it; they change with it.

    A `functional_call` puts other tensors in the place of parameters.
    """
    parts: list[Any] = [*module.modules()]  # Any: the type of the tables of an nn.Module
    return [part._parameters for part in parts], [part._buffers for part in parts]


_is_functorch_tensor = private("torch._C._functorch:is_functorch_wrapped_tensor")
_is_legacy_batched = private("torch._C._functorch:is_legacy_batchedtensor")
_is_batched = private("torch._C._functorch:is_batchedtensor")
_is_gradtracking = private("torch._C._functorch:is_gradtrackingtensor")
_get_unwrapped = private("torch._C._functorch:get_unwrapped")


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is wrapped by `torch.func` or vmap, and so has no storage to compare."""
    return _is_functorch_tensor(tensor) or _is_legacy_batched(tensor)


_storage_holders: Callable[[int], int] = private("torch._C:_storage_Use_Count")
_counts_holders = (
    exists("torch._C:_storage_Use_Count")
    and exists("torch:Tensor._use_count")
    and exists("torch:UntypedStorage._cdata")
)


def _holders(param: torch.Tensor) -> tuple[int, int, int]:
    """How many objects of Python, tensors and storages refer to a gradient and to its memory."""
    grad: Any = param.grad  # Any: PyTorch does not declare the count
    memory = _storage_holders(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), memory


@cache
def _of_one_holder() -> tuple[int, int, int]:  # measured: versions may count differently
    param = torch.zeros(1, device="cpu", requires_grad=True)
    param.grad = torch.zeros(1, device="cpu")
    return _holders(param)


def owns_grad(param: torch.Tensor) -> bool:
    """Whether nothing but the parameter holds its gradient, so that it may be written to.

    A view, a NumPy array, a graph that has saved it or a bucket of DDP holds its memory. False if
    this version of PyTorch does not count the holders.
    """
    if not (_counts_holders and _is_writable(param.grad)):
        return False
    return _holders(param) == _of_one_holder()


def _is_writable(grad: torch.Tensor | None) -> bool:
    return (
        type(grad) is torch.Tensor
        and grad.dtype in (torch.float32, torch.float64)  # half precision is multiplied in float32
        and grad.is_contiguous()
        and not (grad.requires_grad or grad.is_inference() or is_wrapped(grad))
        and grad.untyped_storage().resizable()  # the memory is PyTorch's own
    )


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, inside vmap."""
    while _is_gradtracking(tensor):
        tensor = _get_unwrapped(tensor)
    return _is_batched(tensor) or _is_legacy_batched(tensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor at all levels of `torch.func.grad`, and take it out of their wrappers."""
    tensor = tensor.detach()  # first: inside `torch.func.grad` every result is wrapped
    while _is_gradtracking(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor; inside vmap copy it, for `is_grads_batched` cannot detach."""
    if torch.compiler.is_compiling() or not is_batched(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.clone()


_interpreter_stack = private("torch._C._functorch:get_interpreter_stack")
_innermost_interpreter = private("torch._C._functorch:peek_interpreter_stack")
_transform_type = private("torch._C._functorch:TransformType")


def in_vmap() -> bool:
    """Whether the vmap of `torch.func` is active, under which a tensor may be many."""
    stack = _interpreter_stack() or ()
    return any(one.key() == _transform_type.Vmap for one in stack)


def in_functorch() -> bool:
    """Whether vmap, grad or another transform of `torch.func` is active."""
    return _innermost_interpreter() is not None


active_ddp: Callable[[], DistributedDataParallel | None]
active_ddp = private("torch.nn.parallel:DistributedDataParallel._get_active_ddp_module")
"""The DistributedDataParallel module whose forward runs; None outside."""


@needs("torch.nn.parallel:DistributedDataParallel._comm_hooks")
def comm_hooks(wrapper: DistributedDataParallel) -> list[str]:
    """Return the names of the communication hooks of a DistributedDataParallel."""
    hooks = (hook for hook, _ in vars(wrapper)["_comm_hooks"])
    return [f"{hook.__module__}.{hook.__qualname__}" for hook in hooks]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, as the parameters of `fully_shard` are."""
    library = sys.modules.get("torch.distributed.tensor")  # slow to import
    return library is not None and isinstance(tensor, library.DTensor)


def sharded(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return the DTensor sharded as `like`, another one, of which this process has `part`."""
    library = sys.modules["torch.distributed.tensor"]
    return library.DTensor.from_local(
        part.contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


Pair = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]
"""A pack hook and an unpack hook. Any: pack may return any object."""

_top_pair = private("torch._C._autograd:_top_saved_tensors_default_hooks")
_push_pair = private("torch._C._autograd:_push_saved_tensors_default_hooks")
_pop_pair = private("torch._C._autograd:_pop_saved_tensors_default_hooks")


def saved_tensor_hooks() -> Pair | None:
    """The innermost active pair of hooks for tensors saved for backward."""
    return _top_pair(False)


def push_saved_tensor_hooks(pair: Pair) -> None:
    """Push a pair of hooks for saved tensors, in this thread."""
    _push_pair(*pair)


def remove_saved_tensor_hooks(pair: Pair) -> None:
    """Remove this pair of hooks for saved tensors, also if it is no longer the innermost."""
    inner: list[Pair] = []
    while (top := saved_tensor_hooks()) is not None:
        _pop_pair()
        if top[0] is pair[0]:
            break
        inner.append(top)
    for other in reversed(inner):
        push_saved_tensor_hooks(other)


def saved_by(node: Node) -> Iterator[tuple[str, Any, Callable[[], torch.Tensor]]]:
    """Yield each tensor saved by a node: its name, its SavedTensor, and a function to read it.

    Any: PyTorch declares no type for a SavedTensor, which takes hooks by `register_hooks`.
    """
    for key in dir(node):  # a tensor has two attributes, such as `_saved_self`, `_raw_saved_self`
        name = key.removeprefix("_raw_saved_")
        if name != key:
            raw, attribute = getattr(node, key), f"_saved_{name}"
            if not isinstance(raw, tuple):
                if raw.data is not None:
                    yield name, raw, partial(getattr, node, attribute)
                continue
            for index, saved in enumerate(raw):
                if saved.data is not None:
                    attribute = "saved_tensors" if name == "tensors" else attribute  # of a Function
                    yield f"{name}.{index}", saved, partial(_item, node, attribute, index)


def _item(node: Node, attribute: str, index: int) -> torch.Tensor:
    return getattr(node, attribute)[index]


@needs("torch.utils.checkpoint:_checkpoint_hook")
def in_checkpoint() -> bool:
    """Whether the forward of a non-reentrant checkpoint runs, which will be recomputed."""
    top = saved_tensor_hooks()
    return top is not None and top[0].__qualname__.startswith("_checkpoint_hook")


def in_recomputation() -> bool:
    """Whether a checkpoint runs its forward again, of either kind."""
    top, node = saved_tensor_hooks(), running_node()
    is_packed = top is not None and top[0].__qualname__.startswith("_recomputation_hook")
    return is_packed or type(node).__name__ == "CheckpointFunctionBackward"


def running_functions() -> list[BackwardCFunction]:
    """The autograd functions whose forward runs in this thread, innermost first.

    A reentrant checkpoint is one: it disables gradients, and will run its modules again.
    """
    functions: list[BackwardCFunction] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] not in ((), ("self",)):
            given = frame.f_locals.get(code.co_varnames[0])
            if isinstance(given, BackwardCFunction):
                functions.append(given)
        frame = frame.f_back
    return functions


_call_impl = private("torch.nn:Module._call_impl")


def calls_on_stack() -> list[int]:
    """The ids of the modules whose calls are on the stack of this thread, innermost first."""
    frame, calls, code = sys._getframe(1), list[int](), _call_impl.__code__
    while frame is not None:
        if frame.f_code is code:
            calls.append(id(frame.f_locals["self"]))
        frame = frame.f_back
    return calls


Mode = TorchFunctionMode

function_modes: Callable[[], list[Mode]]
function_modes = private("torch.overrides:_get_current_function_mode_stack")
"""The active torch-function modes of this thread, innermost last."""

push_function_mode: Callable[[Mode], None] = private("torch.overrides:_push_mode")
"""Push a torch-function mode, in this thread."""

_pop_mode = private("torch.overrides:_pop_mode")


def insert_function_mode(mode: Mode, inner: int) -> None:
    """Push a torch-function mode below this number of modes that were pushed later."""
    above = [_pop_mode() for _ in function_modes()[-inner:]] if inner else []
    for other in (mode, *reversed(above)):
        push_function_mode(other)


def remove_function_mode(mode: Mode) -> int:
    """Remove this torch-function mode; return the number of modes that were pushed later."""
    if all(other is not mode for other in function_modes()):
        return 0
    inner: list[Mode] = []
    while (top := _pop_mode()) is not mode:
        inner.append(top)
    for other in reversed(inner):
        push_function_mode(other)
    return len(inner)


_global_hook_keywords: dict[int, bool]
_global_hook_keywords = private("torch.nn.modules.module:_global_forward_hooks_with_kwargs")


def remove_global_forward_hook(handle: RemovableHandle) -> None:
    """Remove a global forward hook, and the note of its keywords, which PyTorch leaves behind."""
    handle.remove()
    _global_hook_keywords.pop(handle.id, None)


@needs("torch.nn:Module._call_impl.inner")
def replace_backward_hook(
    module: torch.nn.Module, old: Callable[..., Any], new: Callable[..., Any]
) -> None:
    """In a forward hook: replace a full backward hook, for the ending call of the module alone.

    PyTorch has read the hooks for this call into lists that its frame holds.
    """
    frame, constants = sys._getframe(1), _call_impl.__code__.co_consts
    run_hooks = next(code for code in constants if hasattr(code, "co_freevars"))
    while frame is not None and frame.f_code is not run_hooks:
        frame = frame.f_back
    local = {} if frame is None else frame.f_locals
    if local.get("self") is module and local["bw_hook"] is not None:
        for hooks in (local["bw_hook"].user_pre_hooks, local["bw_hook"].user_hooks):
            if old in hooks:
                hooks[hooks.index(old)] = new


_without_modes: Callable[[], AbstractContextManager[object]] = private(
    "torch._C:DisableTorchFunction"
)


def without_hooks(leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves whose hooks do not run: `Tensor::register_hook` of C++ discards them.

    Each leaf's hooks are replaced by a single one for the time of a pass with gradients of zeros.
    """
    tried = [
        leaf
        for leaf in leaves
        if leaf._backward_hooks
        and leaf.requires_grad
        and type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
    ]
    if not tried:
        return []
    own = [dict(leaf._backward_hooks or {}) for leaf in tried]
    # The dicts are changed in place: assigning another one would register the hooks again.
    passed: set[int] = set()
    for index, leaf in enumerate(tried):
        assert leaf._backward_hooks is not None
        leaf._backward_hooks.clear()
        leaf._backward_hooks[FIRST] = lambda _, index=index: passed.add(index)
    try:
        zeros = tuple(leaf.detach().new_zeros(()).expand_as(leaf) for leaf in tried)
        with _without_modes():  # a surgery at `Captured` would count this one
            torch.autograd.grad(tried, tried, zeros)
    finally:
        for leaf, hooks in zip(tried, own, strict=True):
            assert leaf._backward_hooks is not None
            leaf._backward_hooks.clear()
            leaf._backward_hooks.update(hooks)
    return [leaf for index, leaf in enumerate(tried) if index not in passed]
