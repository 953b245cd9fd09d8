"""The autograd nodes that are made in a call of a module, and which call inside it made each."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple
from weakref import ref

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.sites.calls import Call, CallNumbers, Shared, hook_calls
from gradsurg.sites.node_names import plain
from gradsurg.sites.places import Door, Named
from gradsurg.sites.tensors import tensors_in
from gradsurg.torch_internals import autograd, compiling

LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node
WRAPPER = "BackwardHookFunctionBackward"  # the node around a module with full backward hooks
FORWARD = -1  # stands for the id of a backward pass where none runs

Edge = tuple[Node | None, int]
"""The place of a tensor in the graph: a node and the index of one of its outputs. The node is None
for a tensor without a gradient.
"""


class Returned(NamedTuple):
    """A tensor that a call of a module has returned, by its path in the output."""

    call: Call
    path: str
    edge: Edge


class CallGraph:
    """The autograd nodes made in one outermost call of a module, on which its outputs depend.

    Each differentiable operation increments the sequence number of its thread. At number
    `numbers[i]` a module call began or ended, and `owners[i]` is the innermost call from there on;
    the nodes made until the next change belong to it. `task` is the backward pass in which the call
    runs, FORWARD if it runs in none. `reached` are the nodes with their numbers, after the call;
    `returned` are the requested tensors that the modules return.
    """

    def __init__(self, outer: nn.Module, task: int, inputs: object) -> None:
        self.outer, self.task = ref(outer), task
        self.numbers: list[int] = []
        self.owners: list[Call | None] = []
        self.reached: list[tuple[int, Node]] = []
        self.returned: list[Returned] = []
        self._inputs = _nodes_of(inputs)  # they do not belong to the call

    def change(self, owner: Call | None) -> None:
        """Note that nodes from here on belong to another call."""
        self.numbers.append(autograd.next_sequence_number())
        self.owners.append(owner)

    def hand_over(self, interrupted: Collection[tuple["CallGraph", Call]], owner: Call) -> None:
        """Give a call the nodes of calls inside it, which were interrupted."""
        calls = {call for graph, call in interrupted if graph is self}
        self.owners = [owner if each in calls else each for each in self.owners]

    def end(self, output: object) -> None:
        """Find the nodes that the output of the call depends on."""
        begin, end = self.numbers[0], self.numbers[-1]
        seen = set(self._inputs)
        pending: list[Iterable[Edge]] = [[(root, 0) for root in _nodes_of(output)]]
        while pending:
            for node, _ in pending.pop():
                if node is None or node in seen:
                    continue
                number = autograd.number_of(node)
                if begin <= number < LEAF:
                    seen.add(node)
                    # A view may get its node when it is looked at after the end of the call.
                    if number < end:
                        self.reached.append((number, node))
                    pending.append(node.next_functions)

    @property
    def pattern(self) -> tuple[object, ...]:
        """The calls and the names of the nodes: equal in forwards that make the same nodes."""
        begin = self.numbers[0]
        nodes = [(number - begin, node.name()) for number, node in self.reached]
        return self.owners, [number - begin for number in self.numbers], nodes

    def made(self) -> Iterator[tuple[int, str, Call, int]]:
        """Yield the nodes in the order in which they were made.

        Each as its index among those reached, its name, the call that made it, and its occurrence
        among the nodes of that name, without overload, in the call.
        """
        counts: Counter[tuple[Call, str]] = Counter()
        for index in sorted(range(len(self.reached)), key=lambda i: self.reached[i][0]):
            number, node = self.reached[index]
            call = self.owners[bisect_right(self.numbers, number) - 1]
            if call is not None:
                name = node.name()
                yield index, name, call, counts[call, plain(name)]
                counts[call, plain(name)] += 1

    def uses(self, edges: Collection[Edge]) -> list[tuple[Edge, Node, int]]:
        """Return all uses of some tensors: the edge, the node that took it, the node's input.

        They are in the order in which these nodes were made.
        """
        uses: list[tuple[int, int, Edge, Node]] = []
        for number, node in self.reached:
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


Take = Callable[[CallGraph], None]
_Note = tuple[CallGraph, Call]


def follow(
    door: Door,
    found: Sequence[Named],
    shared: Shared,
    take: Take,
    returning: Collection[nn.Module] = (),
) -> None:
    """Call `take` with the graph of each outermost call of the modules, when it ends.

    It lists the tensors that the modules `returning` return. A call inside a backward pass is the
    recomputation of a checkpoint; it has a graph of its own if the forward has made none. A call
    that `torch.jit.trace` or `torch.export` records is ignored: no backward pass follows.
    """
    graphs = _Graphs(door, found, shared, take, returning)
    # First, so that nodes made by the pre-hooks of others belong to the call.
    hook_calls(door, found, graphs.enter, graphs.leave, first=True, always=True)


class _Graphs:
    """The graphs of the outermost calls that run; the note of a call is its graph and the call."""

    def __init__(
        self,
        door: Door,
        found: Sequence[Named],
        shared: Shared,
        take: Take,
        returning: Collection[nn.Module],
    ) -> None:
        modules = [named.owners[0] for named in found]
        # The modules inside each, by id.
        self.parts = {id(one): {id(part) for part in one.modules()} - {id(one)} for one in modules}
        self.thread, self.root, self.take = shared.follow(door.stack), ref(door.model), take
        self.returning = frozenset(map(id, returning))  # the modules themselves hold this object

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        calls, task = self.thread.calls, autograd.backward_task()
        graph, call = self._running(calls, module, task), calls.next(module)
        if call is None or (graph is None and task == FORWARD and compiling.recording()):
            calls.enter(module, None)
            return
        graph = graph or CallGraph(module, task, (args, kwargs))
        graph.change(call)
        calls.enter(module, (graph, call))

    def leave(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        calls = self.thread.calls
        opened = [*calls.running]
        note = calls.leave(module)
        if note is None:
            return
        graph: CallGraph = note[0]
        if interrupted := opened[len(calls.running) + 1 :]:
            graph.hand_over([other for _, other in interrupted if other], note[1])
        around = (other[1] for _, other in reversed(calls.running) if other and other[0] is graph)
        owner = next(around, None)
        graph.change(owner)
        if id(module) in self.returning:
            for path, tensor in tensors_in(output):
                edge = get_gradient_edge(tensor)[:2] if tensor.requires_grad else (None, 0)
                graph.returned.append(Returned(note[1], path, edge))
        if owner is None:
            if graph.task == FORWARD and module is not self.root():
                calls.depth = 0  # a part of the model was called by itself
            if graph.numbers[-1] > graph.numbers[0]:  # nodes were made
                graph.end(output)
                self.take(graph)

    def _running(self, calls: CallNumbers, module: nn.Module, task: int) -> CallGraph | None:
        """The graph of the call around this one, in the same backward pass or in none."""
        running = calls.running
        # To search the stack takes longer than all else here: a module that is inside another one
        # is taken to be called by it.
        if running and id(module) not in self.parts.get(running[-1][0], ()):
            self._end_interrupted(calls)
        note: _Note | None = running[-1][1] if running else None
        graph = note[0] if note is not None and note[0].task == task else None
        if task == FORWARD and graph is None and not calls.depth:
            calls.begin()
        return graph

    def _end_interrupted(self, calls: CallNumbers) -> None:
        """End the calls that do not run: a KeyboardInterrupt runs no forward hooks."""
        running, interrupted = calls.running, list[_Note]()
        _, *around = autograd.calls_on_stack() or [0]
        # Compiled code has other frames on the stack.
        if compiling.in_compiled():
            return
        while running and (note := running[-1][1]) and running[-1][0] not in around:
            interrupted.append(note)
            running.pop()
        if not running:
            calls.depth = 0
        elif interrupted and (note := running[-1][1]):
            note[0].hand_over(interrupted, note[1])


def meets_more(output: object, by_gradient: bool) -> bool:
    """Return whether a backward pass from `output` may reach places that the forward did not show.

    A reentrant checkpoint makes its nodes in the backward pass. With `by_gradient`, only the
    backward pass shows which outputs of a node get a gradient.
    """
    seen = _nodes_of(output)
    pending = [*seen]
    while pending:
        node = pending.pop()
        is_checkpoint = isinstance(node, BackwardCFunction) and node.name() != WRAPPER
        if is_checkpoint or (by_gradient and len(autograd.outputs_of(node)) > 1):
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
