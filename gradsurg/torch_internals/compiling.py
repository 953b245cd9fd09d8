"""The corners of torch.compile that it has but does not export, each pinned by a test in
`tests/test_compiler.py`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from math import nan
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


_tracing: Callable[[], object]
_tracing = import_module("torch._C._dynamo.eval_frame").get_eval_frame_callback


def untraced(function: Function, compiled: Function | None = None) -> Function:
    """The same function, and Dynamo runs it as it is: traced, what it remembers would be lost.

    Every hook on a module needs this. Outside of what is compiled it costs a fifth of what
    `torch.compiler.disable` does. `compiled` is what takes its place in what is compiled.
    """
    disable: Callable[..., Any] = torch.compiler.disable  # Any: it gives back what it was given
    disabled = disable(compiled or function)

    def run(*args: object) -> object:
        return function(*args) if _tracing() is None else disabled(*args)

    # Neither this frame is compiled nor is it made part of another.
    skip: Callable[..., Any] = import_module("torch._dynamo.decorators").skip
    return skip(run)


traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether Dynamo is tracing this code: a cheaper question than `untraced` at every call."""


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process since it was last reset."""
    library = sys.modules.get("torch._dynamo.convert_frame")  # slow to import, and only for that
    return library is not None and bool(library.output_codes.seen)


def in_compiled() -> bool:
    """Whether this is called, however deep, by something that torch.compile has given back."""
    frame = sys._getframe() if has_compiled() else None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def keeping_buffers() -> Iterator[None]:
    """A block in which what torch.compile compiles, of any model, may be sent back through more
    than once. Blocks may overlap: the last that ends restores what was before the first.

    Else its backward may write to what its forward has saved, its "donated buffers". The caches on
    disk do not tell the two apart, and so they get a tag.

    PyTorch's settings are of a thread (of a context, as `contextvars` has them), and so are the
    blocks: each holds for what the thread that opened it compiles, whatever others do. It must
    close it, too: closed by another it ends nowhere.
    """
    functorch: Any = import_module("torch._functorch.config")  # Any: modules of settings
    compiler: Any = import_module("torch.compiler.config")
    block = object()
    if not _open.get():
        _before.set((functorch.donated_buffer, compiler.cache_key_tag))
        functorch.donated_buffer = False
        compiler.cache_key_tag += _KEPT
    _open.set((*_open.get(), block))
    try:
        yield
    finally:
        were = _open.get()
        _open.set(tuple(own for own in were if own is not block))
        if were and not _open.get():
            functorch.donated_buffer, compiler.cache_key_tag = _before.get()


COMPILED = "CompiledFunctionBackward"
"""The name of the autograd node of all that has become one graph."""

_KEPT = "/gradsurg keeps buffers"
_open: ContextVar[tuple[object, ...]] = ContextVar("gradsurg_keeping", default=())
_before: ContextVar[tuple[bool, str]] = ContextVar("gradsurg_before")  # the first was opened


def runs_again(node: Any) -> bool:
    """Whether a graph that torch.compile has made may be sent back through more than once: the
    first time with `retain_graph`, if it was not yet. Any: a node of its `CompiledFunction`.
    """
    function = node._forward_cls
    metadata = function.metadata
    if metadata.bw_donated_idxs is None:
        # It was compiled while buffers were kept. PyTorch takes a list alone for a sign of that,
        # where its setting, which each thread has for itself, says otherwise.
        metadata.bw_donated_idxs = []
    return not metadata.bw_donated_idxs or function.compiled_bw is None


def lets_through(node: Any, number: int) -> list[int]:
    """To which of the nodes after it a gradient flows that enters a graph of torch.compile at its
    output `number`; nodes that are None are not counted.

    It gives zero to all others that it holds. A gradient of NaN tells them apart from most of those
    to which none but zeros flow today, but not from what a relu or a mask holds back; no hook sees
    it. Any: as above.
    """
    with torch.no_grad():
        given = [
            torch.full(
                tuple(own.shape),
                nan if index == number and not _is_whole(own.dtype) else 0,
                dtype=own.dtype,
                device=own.device,
            )
            for index, own in enumerate(node._input_metadata)
        ]
        found = node.apply(*given)
    grads = [grad for grad, asked in zip(found, node.needs_input_grad, strict=True) if asked]
    return [i for i, grad in enumerate(grads) if grad is not None and bool(grad.isnan().any())]


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)
