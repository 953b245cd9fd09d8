"""Find the module call in which each autograd node was made."""

import re
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.sites.base import Selector
from gradsurg.sites.module_calls import tensors_in
from gradsurg.sites.selection import ROOT, names_of
from gradsurg.torch_internals import autograd, compiling

LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node
WRAPPER = "BackwardHookFunctionBackward"  # the node around a module with full backward hooks
FORWARD = -1  # the backward pass number outside of any backward pass
MAX_GRAPHLESS = 2**14  # calls without a graph that are kept for a recomputation
_CALL = nn.Module._call_impl.__code__

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


class Use(NamedTuple):
    """One use of a tensor: the node that consumed it, and the index of that node's input."""

    edge: Edge
    node: Node
    input: int


class Tracer:
    """Traces module calls by the sequence numbers of autograd nodes.

    Each differentiable operation increments the sequence number. The nodes of a call lie between
    the numbers at its begin and at its end, and a node belongs to the innermost call around it.

    A module call inside a backward pass is the recomputation of a checkpoint. It is ignored if the
    forward has made a graph of it; if not, the checkpoint is reentrant, and the recomputed call
    gets the name and number of the call in the forward.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()
        self._graphless: list[_GraphlessCall] = []
        self._since: frozenset[nn.Module] = frozenset()

    def follow(
        self,
        model: nn.Module,
        modules: Collection[nn.Module],
        take: Callable[["CallGraph"], None],
        stack: ExitStack,
        outputs: Collection[nn.Module] = (),
        since: Collection[nn.Module] = (),
    ) -> None:
        """Hook `modules` and call `take` with the graph of each outermost call when it ends.

        The graph also lists the tensors that `outputs`, a subset of `modules`, return. Nodes made
        before the first call of a module in `since` are left out.
        """
        names = names_of(model)
        self._since = frozenset(since)
        for module in modules:
            tracked = _TrackedModule(module, names[module])
            enter = self._enter(tracked, module is model)
            handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            leave = self._leave(tracked.end, take, module in outputs)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    # These two hooks run at every call of every module, so they do as little as possible. A copy of
    # the model made inside the block has the same hooks; its calls are ignored.

    def _enter(self, tracked: "_TrackedModule", is_model: bool) -> Callable[..., None]:
        thread, module = self._thread, tracked.module
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number
        gradients_on, traced = torch.is_grad_enabled, compiling.traced

        def enter(called: nn.Module, args: object, kwargs: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, kwargs)
                return
            if task_now() != FORWARD:
                self._enter_recomputation(tracked)
                return
            log = thread.forward
            outer = log.outer
            if outer is None or outer is module or is_model:
                self._begin(log, module, (args, kwargs))
            if not gradients_on():
                log.graphless.append(len(log.marks))
            log.numbers.append(number_now())
            log.marks.append(tracked)

        untraced = compiling.untraced(enter)
        return compiling.ModuleHook(enter)

    def _leave(
        self, end: "_CallEnd", take: Callable[["CallGraph"], None], lists_output: bool
    ) -> Callable[..., None]:
        thread, module, traced = self._thread, end.of.module, compiling.traced
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number

        def leave(called: nn.Module, args: object, output: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, output)
                return
            task = task_now()
            log = thread.forward if task == FORWARD else thread.recomputations.get(task)
            if log is None or log.outer is None:
                return
            log.numbers.append(number_now())
            log.marks.append(end)
            if lists_output:
                index = len(log.marks) - 1
                log.returned += ((index, path, edge) for path, edge in _edges(output))
            if log.outer is module:
                if log.deeper:
                    log.deeper -= 1
                else:
                    self._end(log, task, output, take)

        untraced = compiling.untraced(leave)
        return compiling.ModuleHook(leave)

    def _begin(self, log: "_CallLog", module: nn.Module, inputs: object) -> None:
        """Start a new outermost call, unless this call is inside the one that is open.

        A KeyboardInterrupt leaves a call open, since it runs no forward hooks.
        """
        if log.outer is None or not _is_running(log.outer, module):
            self._thread.recomputations.clear()
            log.begin(module, inputs)
        elif log.outer is module:
            log.deeper += 1

    def _end(
        self, log: "_CallLog", task: int, output: object, take: Callable[["CallGraph"], None]
    ) -> None:
        thread = self._thread
        if log.recomputed is not None or log.marks != thread.latest.marks:
            thread.latest = _CallIntervals(log)
        intervals = thread.latest
        if log.graphless:
            self._remember_graphless(log, intervals)
        graph = None
        if log.numbers[-1] > log.numbers[0]:  # nodes were made
            graph = CallGraph(log, intervals, task == FORWARD, output, self._since)
        if log.recomputed is not None:
            thread.latest = _CallIntervals(_CallLog())
        log.clear()
        thread.recomputations.pop(task, None)
        if graph is not None:
            take(graph)

    def _remember_graphless(self, log: "_CallLog", intervals: "_CallIntervals") -> None:
        ident = self._thread.ident
        for index in log.graphless:
            call = _GraphlessCall(ident, log.numbers[index], intervals.begun[index])
            self._graphless.append(call)
        if len(self._graphless) > 2 * MAX_GRAPHLESS:
            del self._graphless[:MAX_GRAPHLESS]

    def _enter_recomputation(self, tracked: "_TrackedModule") -> None:
        """Log a call inside a backward pass if it makes the graph that the forward did not make."""
        thread, task, node = self._thread, autograd.backward_task(), autograd.running_node()
        if not isinstance(node, BackwardCFunction):
            return
        number = node._sequence_nr()
        if thread.recomputing != (task, number):
            # A new checkpoint: its calls come in the order of the forward.
            thread.recomputing = task, number
            thread.upcoming = self._graphless_after(number)
        call = next(thread.upcoming, None)
        if call is None or call.call.module is not tracked.module:
            thread.upcoming = iter(())
            return
        log = thread.recomputations.setdefault(task, _CallLog())
        if log.outer is None:
            log.begin(tracked.module, ())
            log.recomputed = []
        elif log.outer is tracked.module:
            log.deeper += 1
        assert log.recomputed is not None
        log.recomputed.append(call.call)
        if not torch.is_grad_enabled():
            log.graphless.append(len(log.marks))
        log.numbers.append(autograd.next_sequence_number())
        log.marks.append(tracked)

    def _graphless_after(self, number: int) -> Iterator["_GraphlessCall"]:
        """Yield the calls without a graph made after sequence number `number`.

        A GPU's backward has its own thread: then use the thread of the newest call.
        """
        ident = self._thread.ident
        if self._graphless and all(call.thread != ident for call in self._graphless):
            ident = self._graphless[-1].thread
        calls = [call for call in self._graphless if call.thread == ident]
        # Numbers increase within a thread, so a search from the end is short.
        start = len(calls)
        while start and calls[start - 1].number > number:
            start -= 1
        return islice(calls, start, None)


class CallGraph:
    """The autograd nodes made in one outermost module call on which its outputs depend.

    `whole` says that the call was one of the model itself, `outside` that the model was not called;
    `returned` lists the tensors returned by the modules that were asked for.
    """

    def __init__(
        self,
        log: "_CallLog",
        intervals: "_CallIntervals",
        forward: bool,
        output: object,
        since: frozenset[nn.Module],
    ) -> None:
        self._numbers, self._intervals = log.numbers, intervals
        self._inputs, self._since = log.inputs, since
        self._graphless = {log.numbers[index] for index in log.graphless}
        self._roots = {t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None}
        self.whole = forward and intervals.begun[0].name == ROOT
        self.outside = forward and not self.whole
        self.returned = [
            Returned(intervals.ended[index], path, edge) for index, path, edge in log.returned
        ]

    @property
    def empty(self) -> bool:
        """Whether no output depends on a node."""
        return not self._roots

    def nodes(self, wanted: NodeFilter = None) -> Iterator[tuple[Node, NodePlace]]:
        """Yield the nodes in the order in which they were made, with their places.

        If `wanted` selects one overload of a name, all its overloads are included.
        """
        reached = self._reached()
        first, latest = self._numbers[0], self._intervals.latest
        # Most forwards make the same nodes in the same calls as the one before.
        pattern = (
            [number - first for number in self._numbers],
            [(number - first, node.name()) for number, node in reached],
        )
        if wanted not in latest or latest[wanted][0] != pattern:
            latest[wanted] = pattern, self._places(reached, wanted)
        for index, place in latest[wanted][1]:
            yield reached[index][1], place

    def uses(self, edges: Collection[Edge]) -> Sequence[Use]:
        """Return all uses of some tensors, in the order in which their consumers were made."""
        return [use for _, use in self._uses(edges)]

    def hides_nodes(self) -> bool:
        """Return whether it contains a reentrant checkpoint, whose nodes are made in backward."""
        return bool(self._graphless) and any(
            isinstance(node, BackwardCFunction) and number + 1 in self._graphless
            # The node of a checkpoint is made before the calls inside it.
            for number, node in self._reached(self._numbers[0])
        )

    def _places(
        self, reached: Sequence[tuple[int, Node]], wanted: NodeFilter
    ) -> list[tuple[int, NodePlace]]:
        """Return the places of the wanted nodes in order, each with the node's index."""
        nodes = [(number, node.name(), index) for index, (number, node) in enumerate(reached)]
        if wanted is not None:
            # Overloads share their occurrence numbers, so all of a wanted one are needed.
            plains = {plain(name) for name in {name for _, name, _ in nodes} if wanted(name)}
            nodes = [node for node in nodes if plain(node[1]) in plains]
        counts: Counter[tuple[ModuleCall, str]] = Counter()
        places: list[tuple[int, NodePlace]] = []
        for number, name, index in sorted(nodes, key=itemgetter(0)):
            call = self._intervals.owners[bisect_right(self._numbers, number) - 1]
            places.append((index, NodePlace(name, call, counts[call, plain(name)])))
            counts[call, plain(name)] += 1
        return places

    def _uses(self, edges: Collection[Edge]) -> list[tuple[int, Use]]:
        uses = [
            (number, Use(edge, node, index))
            for number, node in self._reached()
            for index, edge in enumerate(node.next_functions)
            if edge in edges
        ]
        # Full backward hooks insert a node around the inputs and outputs of a module: skip it.
        inside: dict[Edge, Edge] = {
            (use.node, use.input): use.edge for _, use in uses if use.node.name() == WRAPPER
        }
        if inside:
            uses = [(number, use) for number, use in uses if use.node.name() != WRAPPER]
            for number, use in self._uses(inside):
                uses.append((number, use._replace(edge=inside[use.edge])))
        uses.sort(key=lambda item: (item[0], item[1].input))
        return uses

    def _reached(self, begin: int | None = None) -> list[tuple[int, Node]]:
        """Return the nodes that the outputs depend on, with their numbers.

        Only those made in the call, from number `begin` on (default: the first call of `since`).
        """
        begin, end = self._first() if begin is None else begin, self._numbers[-1]
        reached: list[tuple[int, Node]] = []
        seen = set(self._inputs)
        pending: list[Iterable[Edge]] = [[(root, 0) for root in self._roots]]
        while pending:
            for node, _ in pending.pop():
                if node is None or node in seen:
                    continue
                number = node._sequence_nr()
                if begin <= number < LEAF:
                    seen.add(node)
                    # A view may get its node when it is looked at after the end of the call.
                    if number < end:
                        reached.append((number, node))
                    pending.append(node.next_functions)
        return reached

    def _first(self) -> int:
        """Return the number at which the first call of `since` began."""
        if not self._since:
            return self._numbers[0]
        calls = zip(self._numbers, self._intervals.owners, strict=False)
        return next((n for n, call in calls if call.module in self._since), self._numbers[-1])


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
    needed = set(chosen)
    for module in names:
        contents = set(module.modules())
        if not contents.isdisjoint(chosen):
            needed.add(module)
        if inside and module in chosen:
            needed |= contents
    return [module for module in names if module in needed]


def may_meet_more_sites(output: object, at: Selector) -> bool:
    """Return whether a backward pass from `output` may reach sites that the forward did not show.

    A reentrant checkpoint makes its nodes in the backward pass; and only there it is known which
    outputs of a node get a gradient.
    """
    by_gradient = any(kind.known_in_backward for kind in at.kinds)
    pending = [tensor.grad_fn for _, tensor in tensors_in(output) if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction) and node.name() != WRAPPER:
            return True
        if by_gradient and len(node._input_metadata) > 1:
            return True
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
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


class _GraphlessCall(NamedTuple):
    """A call that made no graph because gradients were off."""

    thread: int
    number: int
    call: ModuleCall


class _TrackedModule:
    """A hooked module with its calls, which are the same objects in every step."""

    __slots__ = ("calls", "end", "module", "names")

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module = module
        self.names = names
        self.calls: list[ModuleCall] = []
        self.end = _CallEnd(self)

    def call(self, count: int) -> ModuleCall:
        """Return call `count`; the calls of a module with several names take them in turn."""
        while count >= len(self.calls):
            number, turn = divmod(len(self.calls), len(self.names))
            self.calls.append(ModuleCall(self.names[turn], number, self.module))
        return self.calls[count]


@dataclass(frozen=True, slots=True, eq=False)
class _CallEnd:
    """Marks the end of a call in a log."""

    of: _TrackedModule


class _CallLog:
    """The begins and ends of the calls inside one outermost call, recorded while it runs.

    At sequence number `numbers[i]` a call of the module `marks[i]` began, or ended if `marks[i]` is
    a `_CallEnd`.
    """

    __slots__ = (
        "deeper",
        "graphless",
        "inputs",
        "marks",
        "numbers",
        "outer",
        "recomputed",
        "returned",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.outer: nn.Module | None = None
        self.deeper = 0  # open calls of the outermost module inside itself
        self.graphless: list[int] = []  # marks of calls that make no graph, since gradients are off
        self.numbers: list[int] = []
        self.marks: list[_TrackedModule | _CallEnd] = []
        self.returned: list[tuple[int, str, Edge]] = []  # with the mark of the call's end
        self.recomputed: list[ModuleCall] | None = None  # the calls, if they are known beforehand
        self.inputs: set[Node] = set()

    def begin(self, module: nn.Module, inputs: object) -> None:
        """Start an outermost call; the nodes that made its inputs do not belong to it."""
        self.clear()
        self.outer = module
        self.inputs = {t.grad_fn for _, t in tensors_in(inputs) if t.grad_fn is not None}


class _CallIntervals:
    """The innermost call from each mark of a log to the next.

    `latest` caches the nodes last made at these marks: a pattern to compare, and the places of the
    wanted nodes.
    """

    __slots__ = ("begun", "ended", "latest", "marks", "owners")

    def __init__(self, log: _CallLog) -> None:
        self.marks = log.marks
        self.begun: dict[int, ModuleCall] = {}  # by mark
        self.ended: dict[int, ModuleCall] = {}
        self.owners: list[ModuleCall] = []
        self.latest: dict[NodeFilter, tuple[object, list[tuple[int, NodePlace]]]] = {}
        known = iter(log.recomputed) if log.recomputed is not None else None
        counts: dict[_TrackedModule, int] = {}
        running: list[ModuleCall] = []
        for index, mark in enumerate(log.marks):
            if isinstance(mark, _TrackedModule):
                count = counts[mark] = counts.get(mark, -1) + 1
                running.append(mark.call(count) if known is None else next(known))
                self.begun[index] = running[-1]
            elif any(call.module is mark.of.module for call in running):
                # An exception may end calls without running their hooks.
                while running[-1].module is not mark.of.module:
                    running.pop()
                self.ended[index] = running.pop()
            if running:
                self.owners.append(running[-1])


class _ThreadState(threading.local):
    """The logs of one thread: PyTorch counts sequence numbers per thread."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.forward = _CallLog()
        self.latest = _CallIntervals(self.forward)
        self.recomputations: dict[int, _CallLog] = {}  # by the number of the backward pass
        self.recomputing: tuple[int, int] = FORWARD, LEAF  # that pass, and the checkpoint's node
        self.upcoming: Iterator[_GraphlessCall] = iter(())


def _is_running(outer: nn.Module, module: nn.Module) -> bool:
    """Return whether the call of `module` that has just begun is inside a call of `outer`."""
    frame, is_own_call = sys._getframe(3), True
    while frame is not None:
        if frame.f_code is _CALL:
            running = frame.f_locals["self"]
            if is_own_call and running is not module:
                return True  # another library calls modules in its own way: trust the hooks
            if not is_own_call and running is outer:
                return True
            is_own_call = False
        frame = frame.f_back
    return is_own_call


def _edges(output: object) -> Iterator[tuple[str, Edge]]:
    for path, tensor in tensors_in(output):
        yield path, get_gradient_edge(tensor)[:2] if tensor.requires_grad else (None, 0)
