"""Sites that are met only in a backward, told from the graph that a forward has made."""

from collections.abc import Callable, Iterator

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradsurg.sites._nested import tensors_in
from gradsurg.sites._span_graph import WRAPPER
from gradsurg.sites.base import Selector
from gradsurg.sites.nodes import Nodes
from gradsurg.torch_internals import autograd


def may_come(output: object, at: Selector) -> bool:
    """Whether a backward from `output` may meet sites of `at` that the forward did not.

    A reentrant checkpoint makes its nodes then; and which outputs of a node get a gradient is seen
    when they do.
    """
    enters = any(isinstance(kind, Nodes) and kind.side == "enter" for kind in at.kinds)
    return any(
        (isinstance(node, BackwardCFunction) and node.name() != WRAPPER)
        or (enters and len(node._input_metadata) > 1)
        for node in _reached(output)
    )


def after_backward(output: object, call: Callable[[], None]) -> None:
    """Have `call` called once, at the end of the first backward that comes by `output`."""
    waiting = [call]

    def end() -> None:
        if waiting:
            waiting.pop()()

    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: autograd.at_end_of_backward(end) if waiting else None)


def _reached(output: object) -> Iterator[Node]:
    waiting = [tensor.grad_fn for _, tensor in tensors_in(output) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
