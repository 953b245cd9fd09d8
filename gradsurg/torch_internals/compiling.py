"""Private functions of torch.compile; each has a test."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from math import nan
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from gradsurg.torch_internals import lookup, needs, private

Function = TypeVar("Function", bound=Callable[..., object])

_tracing: Callable[[], object]
_tracing = private("torch._C._dynamo.eval_frame:get_eval_frame_callback")


class ModuleHook(partial[Any]):
    """A hook of a module that has no effect in copies and pickles of the module.

    A copy made while a surgery is attached, such as an average of the weights, is a plain model.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything and returns None

    def close(self) -> None:
        """Do nothing from now on, whatever the arguments."""
        # The function stays held: it may be running, and nothing else need hold it.
        hook: Any = self  # its type does not declare the method, by which partials are unpickled
        hook.__setstate__((lambda *_: None, (), {}, {**vars(self), "closed": self.func}))


def untraced(function: Function, compiled: Function | None = None) -> Function:
    """Wrap a function so that Dynamo does not trace it, which would lose its side effects.

    Every hook on a module needs this. In eager code it costs a fifth of `torch.compiler.disable`.
    In compiled code `compiled` is called instead of the function, if given.
    """
    if _uncompiled.get() and _DYNAMO not in sys.modules:
        return _hook(function)
    disable: Callable[..., Any] = torch.compiler.disable  # Any: it returns its argument
    disabled = disable(compiled or function, reason=REASON)

    def run(*args: object) -> object:
        return function(*args) if _tracing() is None else disabled(*args)

    # Dynamo neither compiles nor inlines this frame.
    return _hook(_skip()(run))


def traceable(function: Function, traced: Function) -> Function:
    """Wrap a hook of a module for which Dynamo traces another function, without side effects."""

    def run(*args: object) -> object:
        if torch.compiler.is_dynamo_compiling():
            return traced(*args)
        return function(*args)

    return _hook(run)


def called_when_traced(function: Function) -> Function:
    """Mark a function that Dynamo calls once, while it traces; its result is a constant."""
    # As `torch.compiler.assume_constant_result`, which imports Dynamo.
    vars(function)["_dynamo_marked_constant"] = True
    return function


class LeftOut:
    """Hooks of modules that compiled code does not need, as long as `needed` is empty.

    Dynamo guards on `needed`: once it is not empty, code that left out a hook is compiled anew.
    `has_any` says that there is compiled code which left out a hook.
    """

    def __init__(self) -> None:
        self.needed: list[object] = []
        self.has_any = False

        def note() -> None:
            self.has_any = True

        self._note = called_when_traced(note)

    def hook(self, function: Callable[..., object]) -> Callable[..., object]:
        """Wrap a hook of a module."""
        whole = untraced(function)

        def run(*args: object) -> object:
            if not torch.compiler.is_dynamo_compiling():
                return function(*args)
            return whole(*args) if self.needed else self._note()

        return _hook(run)


def trace_as_one(function: Callable[..., object]) -> None:
    """Let Dynamo take a function as one operation, whose numbers are constants.

    It would trace a number that changes as a variable, which it does not allow in a tensor's hook.
    """
    torch.compiler.allow_in_graph(function)


_skip = cache(partial(lookup, "torch._dynamo.decorators:skip"))  # slow to import


def _hook(function: Callable[..., Any]) -> Any:  # Any: it is called like the function
    return ModuleHook(function)


traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo traces this code; cheaper than wrapping a function in `untraced`."""

in_jit_trace: Callable[[], bool] = private("torch.jit:is_tracing")
"""Whether `torch.jit.trace` records the running forward."""


def recording() -> bool:
    """Whether `torch.jit.trace` or `torch.export` records this code."""
    return in_jit_trace() or torch.compiler.is_exporting()


def is_exported(model: torch.nn.Module) -> bool:
    """Whether a model is the graph of operations that `torch.export` makes of one.

    It calls none of its modules, which hold the parameters, but one that checks the inputs.
    """
    return isinstance(model, torch.fx.GraphModule) and all(
        node.target == "_guards_fn" for node in model.graph.nodes if node.op == "call_module"
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let `untraced` return functions as they are while Dynamo, slow to import, is not there.

    For hooks that are removed in this block, in which nothing is compiled.
    """
    token = _uncompiled.set(True)
    try:
        yield
    finally:
        _uncompiled.reset(token)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Make and step optimizers of torch.optim without importing Dynamo, which takes a second.

    They import it to exclude themselves from compiled graphs. Compile nothing in this block.
    """
    if _DYNAMO in sys.modules:
        yield
        return
    disabled: list[object] = []

    def disable(function: object, *_: object, **__: object) -> object:
        disabled.append(function)
        return function

    stand_in = ModuleType(_DYNAMO)
    vars(stand_in).update(disable=disable, graph_break=lambda: None)
    sys.modules[_DYNAMO] = torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[_DYNAMO], torch._dynamo
        for function in disabled:
            # PyTorch keeps the result of `disable` here: from now on it must be Dynamo's.
            vars(function).pop("__dynamo_disable", None)


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process since it was last reset."""
    return "torch._dynamo.convert_frame" in sys.modules and bool(_output_codes().seen)


_output_codes = cache(partial(lookup, "torch._dynamo.convert_frame:output_codes"))  # slow to import


@needs("torch.nn:Module._modules")
def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is the wrapper that torch.compile returns."""
    return "_orig_mod" in module._modules


@needs("torch.nn:Module._compiled_call_impl")
def is_compiled(module: nn.Module) -> bool:
    """Whether a module is the wrapper that torch.compile returns, or was compiled in place."""
    return is_wrapper(module) or module._compiled_call_impl is not None


def in_compiled() -> bool:
    """Whether a compiled function is on the call stack."""
    frame = sys._getframe() if has_compiled() else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def keeping_buffers() -> Iterator[None]:
    """Let the backward of graphs compiled in this block run more than once.

    Otherwise a compiled backward may write to tensors that its forward has saved, its "donated
    buffers". The caches on disk do not distinguish the two, so they get a tag.

    Blocks may overlap: the last to end restores the settings of before the first. PyTorch's
    settings are per `contextvars` context, so a block must end in the thread that opened it. Before
    torch 2.12 they belong to the process.
    """
    functorch: Any = import_module("torch._functorch.config")  # Any: modules of settings
    compiler: Any = import_module("torch.compiler.config")
    block = object()
    if not _open.get():
        buffers = lookup("torch._functorch.config:donated_buffer")
        _before.set((buffers, lookup("torch.compiler.config:cache_key_tag")))
        functorch.donated_buffer = False
        compiler.cache_key_tag += _KEPT
    _open.set((*_open.get(), block))
    try:
        yield
    finally:
        were = _open.get()
        _open.set(tuple(other for other in were if other is not block))
        if were and not _open.get():
            functorch.donated_buffer, compiler.cache_key_tag = _before.get()


COMPILED = "CompiledFunctionBackward"
"""The name of the autograd node of a compiled graph."""

REASON = "a hook of gradsurg: compile without fullgraph, export before attaching"
_DYNAMO = "torch._dynamo"
_KEPT = "/gradsurg keeps buffers"
_uncompiled: ContextVar[bool] = ContextVar("gradsurg_uncompiled", default=False)


class _OfProcess:
    """A variable with the interface of a ContextVar."""

    def __init__(self, _: str, default: object = None) -> None:
        self._value = default

    def get(self) -> Any:  # Any: as of a ContextVar
        return self._value

    def set(self, value: object) -> None:
        self._value = value


_per_context = hasattr(import_module("torch.utils._config_module"), "ContextVar")
_Setting: Any = ContextVar if _per_context else _OfProcess  # Any: one of the two
_open = _Setting("gradsurg_keeping", default=())
_before = _Setting("gradsurg_before", default=None)  # the settings before the first block


def can_run_again(node: Any) -> bool:
    """Whether the backward of a compiled graph may run more than once.

    The first pass needs `retain_graph`. `node` is a `CompiledFunction` node.
    """
    # Raises if this version lacks it. `needs` would import the module with this one, which is slow.
    lookup("torch._functorch._aot_autograd.schemas:ViewAndMutationMeta.bw_donated_idxs")
    function = node._forward_cls
    metadata = function.metadata
    if metadata.bw_donated_idxs is None:
        # It was compiled inside `keeping_buffers`. If the setting differs in the present thread,
        # PyTorch recognizes that by a list alone.
        metadata.bw_donated_idxs = []
    return not metadata.bw_donated_idxs or function.compiled_bw is None


def dependent_inputs(node: Any, number: int) -> list[int]:
    """The indices of a compiled node's next nodes that get a gradient from output `number`.

    Sends a gradient of NaN through the graph, bypassing all hooks; other nodes get zeros. Nodes
    behind a relu or a mask that is zero now are missed. Nodes that are None are not counted.
    """
    with torch.no_grad():
        grads_in = [
            torch.full(
                tuple(output.shape),
                nan if index == number and not _is_whole(output.dtype) else 0,
                dtype=output.dtype,
                device=output.device,
            )
            for index, output in enumerate(node._input_metadata)
        ]
        results = node.apply(*grads_in)
    grads = [grad for grad, asked in zip(results, node.needs_input_grad, strict=True) if asked]
    return [i for i, grad in enumerate(grads) if grad is not None and bool(grad.isnan().any())]


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
