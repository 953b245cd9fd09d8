"""The autograd graph of a call of the model: its nodes with their places, and uses of tensors."""

import re
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.sites.contexts import refusal
from gradsurg.sites.module_calls import tensors_in
from gradsurg.sites.places import Selector
from gradsurg.sites.selection import names_of
from gradsurg.torch_internals import autograd, compiling

LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node
WRAPPER = "BackwardHookFunctionBackward"  # the node around a module with full backward hooks
FORWARD = -1  # the backward pass number outside of any backward pass

Edge = tuple[Node | None, int]
"""A node and the index of one of its outputs, as a tensor's place in the graph; the node is None
for a tensor without a gradient."""

NodeFilter = Callable[[str], bool] | None
"""Selects nodes by name; None selects all."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of a module under one of its names; the same object in every step."""

    name: str
    number: int
    module: nn.Module

    @property
    def id(self) -> str:
        return f"{self.name}#{self.number}"


class NodePlace(NamedTuple):
    """The innermost module call in which a node was made, and the node's occurrence in it."""

    name: str  # with its overload, as PyTorch spells it
    call: ModuleCall
    occurrence: int

    @property
    def id(self) -> str:
        return f"{self.call.id}/{plain(self.name)}[{self.occurrence}]"


class Returned(NamedTuple):
    """A tensor that a module call has returned, by its path in the output."""

    call: ModuleCall
    path: str
    edge: Edge


class CallGraph:
    """The autograd nodes made in one outermost module call on which its outputs depend.

    Each differentiable operation increments the sequence number of its thread. At number
    `numbers[i]` a module call began or ended, and `owners[i]` is the innermost call from there on;
    the nodes made until the next change belong to it. `returned` lists the tensors returned by the
    modules that were asked for. `whole` says that the model itself was called in a forward pass,
    `outside` that a part of it was.
    """

    def __init__(self, tracer: "Tracer", outer: nn.Module, inputs: object, forward: bool) -> None:
        self.outer = outer
        self.whole = forward and outer is tracer.model
        self.outside = forward and outer is not tracer.model
        self.running: list[ModuleCall] = []
        self.counts: Counter[nn.Module] = Counter()
        self.numbers: list[int] = []
        self.owners: list[ModuleCall | None] = []
        self.returned: list[Returned] = []
        self.roots: set[Node] = set()
        self._inputs = _nodes_of(inputs)  # they do not belong to the call
        self._repeated = tracer.repeated
        self._latest = tracer.state.latest if forward else {}

    @property
    def empty(self) -> bool:
        """Whether no output depends on a node."""
        return not self.roots

    def nodes(self, wanted: NodeFilter = None) -> Iterator[tuple[Node, NodePlace]]:
        """Yield the nodes in the order in which they were made, with their places.

        If `wanted` selects one overload of a name, all its overloads are included.
        """
        reached, begin = self._reached(), self.numbers[0]
        # Most forwards make the same nodes in the same calls as the one before.
        numbers = [number - begin for number in self.numbers]
        pattern = self.owners, numbers, [(number - begin, node.name()) for number, node in reached]
        key = self.owners[0], wanted
        known, places = self._latest.get(key, (None, []))
        if known != pattern:
            places = self._places(reached, wanted)
            self._latest[key] = pattern, places
        for index, place in places:
            yield reached[index][1], place

    def uses(self, edges: Collection[Edge]) -> list[tuple[Edge, Node, int]]:
        """Return all uses of some tensors: the edge, the node that took it, the node's input.

        They are in the order in which these nodes were made.
        """
        uses: list[tuple[int, int, Edge, Node]] = []
        for number, node in self._reached():
            if node.name() == WRAPPER:
                continue
            for index, edge in enumerate(node.next_functions):
                # Full backward hooks insert a node around the inputs and outputs of a module.
                while edge[0] is not None:
                    if edge in edges:
                        uses.append((number, index, edge, node))
                    if edge[0].name() != WRAPPER:
                        break
                    edge = edge[0].next_functions[edge[1]]
        return [(edge, node, index) for _, index, edge, node in sorted(uses, key=itemgetter(0, 1))]

    def hides_nodes(self) -> bool:
        """Return whether it contains a reentrant checkpoint, whose nodes are made in backward."""
        reached = self._reached() if self._repeated else ()
        return any(node in self._repeated for _, node in reached)

    def _reached(self) -> list[tuple[int, Node]]:
        """Return the nodes of the call that the outputs depend on, with their numbers."""
        begin, end = self.numbers[0], self.numbers[-1]
        reached: list[tuple[int, Node]] = []
        seen = set(self._inputs)
        pending: list[Iterable[Edge]] = [[(root, 0) for root in self.roots]]
        while pending:
            for node, _ in pending.pop():
                if node is None or node in seen:
                    continue
                number = autograd.number_of(node)
                if begin <= number < LEAF:
                    seen.add(node)
                    # A view may get its node when it is looked at after the end of the call.
                    if number < end:
                        reached.append((number, node))
                    pending.append(node.next_functions)
        return reached

    def _places(
        self, reached: Sequence[tuple[int, Node]], wanted: NodeFilter
    ) -> list[tuple[int, NodePlace]]:
        """Return the places of the wanted nodes in order, each with the node's index."""
        nodes = [(number, node.name(), index) for index, (number, node) in enumerate(reached)]
        # Overloads share their occurrence numbers, so all of a wanted one are needed.
        names = {name for _, name, _ in nodes if wanted is None or wanted(name)}
        plains = {plain(name) for name in names}
        counts: Counter[tuple[ModuleCall, str]] = Counter()
        places: list[tuple[int, NodePlace]] = []
        for number, name, index in sorted(nodes, key=itemgetter(0)):
            call = self.owners[bisect_right(self.numbers, number) - 1]
            if call is not None and plain(name) in plains:
                places.append((index, NodePlace(name, call, counts[call, plain(name)])))
                counts[call, plain(name)] += 1
        return places


class Tracer:
    """Follows the calls of modules, and hands over the graph of each outermost call.

    A module call inside a backward pass is the recomputation of a checkpoint. It is ignored if the
    forward has made a graph of it; if not, the checkpoint is reentrant, and the recomputed calls
    get the names and numbers of those in the forward. A call that `torch.jit.trace` or
    `torch.export` records is ignored: no backward pass follows.
    """

    def __init__(self) -> None:
        self.state = _ThreadState()
        self.model: nn.Module | None = None
        self.repeated: WeakKeyDictionary[BackwardCFunction, list[ModuleCall]] = WeakKeyDictionary()
        """The calls in each autograd function that disables gradients, as such checkpoints do."""

    def follow(
        self,
        model: nn.Module,
        modules: Collection[nn.Module],
        take: Callable[[CallGraph], None],
        stack: ExitStack,
        outputs: Collection[nn.Module] = (),
    ) -> None:
        """Hook `modules` and call `take` with the graph of each outermost call when it ends.

        The graph also lists the tensors that `outputs`, a subset of `modules`, return.
        """
        names = names_of(model)
        self.model = model
        for module in modules:
            enter = self._enter(module, names[module])
            handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            leave = self._leave(module, take, module in outputs)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    # These two hooks run at every call of every module, so they do as little as possible. A copy of
    # the model made inside the block has the same hooks; its calls are ignored.

    def _enter(self, module: nn.Module, names: Sequence[str]) -> Callable[..., None]:
        state, repeated, traced = self.state, self.repeated, compiling.traced
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number
        gradients_on = torch.is_grad_enabled

        @cache
        def call_at(count: int) -> ModuleCall:
            """The calls of a module with several names take them in turn."""
            number, turn = divmod(count, len(names))
            return ModuleCall(names[turn], number, module)

        def enter(called: nn.Module, args: object, kwargs: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, kwargs)
                return
            task, call = task_now(), None
            graph = state.graphs.get(task)
            if task != FORWARD:
                call = self._recomputed(task, module)
                if call is None:
                    return
            elif (
                graph is not None
                and module in (self.model, graph.outer)
                and autograd.calls_on_stack(graph.outer) <= (graph.outer is module)
            ):
                graph = None  # left open by a KeyboardInterrupt, which runs no forward hooks
            if graph is None:
                if compiling.recording():
                    return
                graph = CallGraph(self, module, (args, kwargs), task == FORWARD)
                if task == FORWARD:
                    state.graphs.clear()
                state.graphs[task] = graph
            if call is None:
                call = call_at(graph.counts[module])
                graph.counts[module] += 1
            if not gradients_on():
                for function in autograd.running_functions():
                    repeated.setdefault(function, []).append(call)
            graph.running.append(call)
            graph.numbers.append(number_now())
            graph.owners.append(call)

        untraced = compiling.untraced(enter)
        return compiling.ModuleHook(enter)

    def _leave(
        self, module: nn.Module, take: Callable[[CallGraph], None], lists_output: bool
    ) -> Callable[..., None]:
        state, traced = self.state, compiling.traced
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number

        def leave(called: nn.Module, args: object, output: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, output)
                return
            graph = state.graphs.get(task_now())
            if graph is None or all(call.module is not module for call in graph.running):
                return
            running = graph.running
            # An exception may end calls without running their hooks.
            while (call := running.pop()).module is not module:
                pass
            graph.numbers.append(number_now())
            graph.owners.append(running[-1] if running else None)
            if lists_output:
                graph.returned += (Returned(call, path, edge) for path, edge in _edges(output))
            if not running:
                del state.graphs[task_now()]
                if graph.numbers[-1] > graph.numbers[0]:  # nodes were made
                    graph.roots = _nodes_of(output)
                    take(graph)

        untraced = compiling.untraced(leave)
        return compiling.ModuleHook(leave)

    def _recomputed(self, task: int, module: nn.Module) -> ModuleCall | None:
        """Return the forward's call that a call inside a backward pass repeats to make its graph.

        The calls in a checkpoint are repeated in their order.
        """
        state, node = self.state, autograd.running_node()
        if not isinstance(node, BackwardCFunction):
            return None
        checkpoint = task, autograd.number_of(node)
        if state.checkpoint != checkpoint:
            state.checkpoint = checkpoint
            state.upcoming = iter(self.repeated.get(node, ()))
        call = next(state.upcoming, None)
        if call is None or call.module is not module:
            state.upcoming = iter(())
            return None
        return call


class _ThreadState(threading.local):
    """The open graphs of one thread: PyTorch counts sequence numbers per thread."""

    def __init__(self) -> None:
        self.graphs: dict[int, CallGraph] = {}  # by the number of the backward pass
        # A pattern of nodes to compare and the places of the wanted ones, by the outermost call.
        self.latest: dict[object, tuple[object, list[tuple[int, NodePlace]]]] = {}
        self.checkpoint: tuple[int, int] = (
            FORWARD,
            LEAF,
        )  # the backward pass and the node of the running one
        self.upcoming: Iterator[ModuleCall] = iter(())


@cache
def plain(name: str) -> str:
    """Return a node's name without its overload: `MulBackward` for `MulBackward1`."""
    name = name.rpartition("::")[2]
    return re.sub(r"(?<=Backward)(Autograd[A-Za-z]+)?\d+(_copy)?$", "", name)


def around(
    names: Mapping[nn.Module, Sequence[str]], chosen: Collection[nn.Module], inside: bool
) -> list[nn.Module]:
    """Return the chosen modules, all modules that contain them and, if `inside`, that they contain.

    The containing modules are needed to find the outermost call, those inside because they own the
    nodes that they make.
    """
    needed = {module for module in names if not set(chosen).isdisjoint(module.modules())}
    if inside:
        needed.update(part for module in chosen for part in module.modules())
    return [module for module in names if module in needed]


def check_called(selector: Selector, model: nn.Module, selected: Collection[nn.Module]) -> None:
    """Raise LookupError if the selected modules are those of an exported model, never called."""
    if model not in selected and compiling.is_exported(model):
        raise refusal(selector, "torch.export")


def may_meet_more_sites(output: object, at: Selector) -> bool:
    """Return whether a backward pass from `output` may reach sites that the forward did not show.

    A reentrant checkpoint makes its nodes in the backward pass; and only there it is known which
    outputs of a node get a gradient.
    """
    by_gradient = any(kind.known_in_backward for kind in at.kinds)
    seen = _nodes_of(output)
    pending = [*seen]
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction) and node.name() != WRAPPER:
            return True
        if by_gradient and len(autograd.outputs_of(node)) > 1:
            return True
        sources = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= sources
        pending += sources
    return False


def after_backward(output: object, call: Callable[[], None]) -> None:
    """Call `call` once, at the end of the first backward pass through `output`."""
    pending = [call]

    def end() -> None:
        if pending:
            pending.pop()()

    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: autograd.at_end_of_backward(end) if pending else None)


def _nodes_of(value: object) -> set[Node]:
    """Return the nodes that made the tensors in a nested value."""
    return {tensor.grad_fn for _, tensor in tensors_in(value) if tensor.grad_fn is not None}


def _edges(output: object) -> Iterator[tuple[str, Edge]]:
    for path, tensor in tensors_in(output):
        yield path, get_gradient_edge(tensor)[:2] if tensor.requires_grad else (None, 0)
