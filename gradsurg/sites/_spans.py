"""Which module made which autograd node, told by the sequence numbers of the nodes."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn
from torch.autograd.graph import Node

from gradsurg import engine
from gradsurg.sites._nested import tensors_in

LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node


@dataclass(frozen=True, slots=True)
class Located:
    """A node with its place: the innermost module call it was made in, its occurrence there."""

    node: Node
    name: str
    module: str
    call: int
    occurrence: int
    thing: nn.Module

    @property
    def id(self) -> str:
        return f"{self.module}#{self.call}/{self.name}Backward[{self.occurrence}]"


@dataclass(slots=True)
class _Span:
    module: str
    call: int
    begin: int
    thing: nn.Module
    end: int = 0


class _Thread(threading.local):
    """Sequence numbers are counted per thread, so spans are kept per thread too."""

    def __init__(self) -> None:
        self.open: list[_Span] = []
        self.closed: list[_Span] = []
        self.calls: Counter[str] = Counter()


class Spans:
    """Follows the calls of every module and hands over the nodes that an outermost call has made.

    Sequence numbers go up by one with each differentiable node, so those of a call form a span, and
    the innermost span that holds a node's number is its module's. Calls inside a backward pass, the
    recomputation of a checkpoint, are not followed.
    """

    def __init__(self, made: Callable[[list[Located], bool], None]) -> None:
        self.made = made
        self.thread = _Thread()

    def hook(self, model: nn.Module, stack: ExitStack) -> None:
        """Hook every module; `made` gets the nodes and whether `model` itself was called."""
        for name, module in model.named_modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                raise ValueError(
                    "Nodes: a compiled model runs as one node; attach before torch.compile, or use "
                    "Parameters or Outputs"
                )
            enter, leave = self._follow(name or "root")
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _follow(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        thread = self.thread

        def enter(module: nn.Module, args: tuple[object, ...]) -> None:
            if engine.in_backward():
                return
            if not thread.open:
                thread.calls.clear()
                thread.closed.clear()
            begin = engine.next_sequence_number()
            thread.open.append(_Span(name, thread.calls[name], begin, module))
            thread.calls[name] += 1

        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if engine.in_backward() or not thread.open:
                return
            span = thread.open.pop()
            span.end = engine.next_sequence_number()
            thread.closed.append(span)
            if not thread.open and span.end > span.begin:
                roots = [t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None]
                self.made(list(_locate(roots, thread.closed)), name == "root")

        return enter, leave


def _locate(roots: list[Node], closed: list[_Span]) -> Iterator[Located]:
    outermost = closed[-1]
    owner = [outermost] * (outermost.end - outermost.begin)
    # Inner calls close before outer ones: painting backwards leaves the innermost on top.
    for span in reversed(closed):
        low, high = span.begin - outermost.begin, span.end - outermost.begin
        owner[low:high] = [span] * (high - low)
    seen: Counter[tuple[str, int, str]] = Counter()
    for number, node in sorted(_walk(roots, outermost.begin).items()):
        if number < outermost.end:
            span = owner[number - outermost.begin]
            name = re.sub(r"Backward\d*$", "", node.name())
            key = (span.module, span.call, name)
            yield Located(node, name, span.module, span.call, seen[key], span.thing)
            seen[key] += 1


def _walk(roots: list[Node], begin: int) -> dict[int, Node]:
    """Every node reachable from `roots` and made since `begin`, by its sequence number."""
    found: dict[int, Node] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if number >= begin and number != LEAF and number not in found:
            found[number] = node
            waiting.extend(source for source, _ in node.next_functions if source is not None)
    return found
