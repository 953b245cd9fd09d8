"""Find the module call in which each autograd node was made."""

import re
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from gradsurg.sites.call_tracker import tensors_in
from gradsurg.sites.selection import ROOT, names_of
from gradsurg.torch_internals import autograd, compiling


@cache
def plain(name: str) -> str:
    """A node's name without its overload: `MulBackward` for `MulBackward1`."""
    name = name.rpartition("::")[2]
    return re.sub(r"(?<=Backward)(Autograd[A-Za-z]+)?\d+(_copy)?$", "", name)


Edge = tuple[Node | None, int]
"""A node and which of its outputs: one tensor's place in the graph. None: takes no gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module by the name that it goes by: the same object at every step."""

    name: str
    number: int
    module: nn.Module

    @property
    def id(self) -> str:
        return f"{self.name}#{self.number}"


class Spot(NamedTuple):
    """Where a node was made: the innermost module call, and its occurrence there."""

    name: str  # as torch spells it
    call: Call
    occurrence: int

    @property
    def id(self) -> str:
        return f"{self.call.id}/{plain(self.name)}[{self.occurrence}]"


class Returned(NamedTuple):
    """A tensor that a call has returned, its edge without a node if it needs no gradient."""

    call: Call
    path: str
    edge: Edge


class Use(NamedTuple):
    """One use of a tensor: the node that took it, and which of that node's inputs it was."""

    edge: Edge
    node: Node
    input: int


Take = Callable[["Graph"], None]


def around(
    names: Mapping[nn.Module, Sequence[str]], chosen: Collection[nn.Module], inside: bool
) -> list[nn.Module]:
    """The chosen modules, those that contain them and, if `inside` is asked for, that they contain.

    The containing ones tell which call is the outermost; those inside take nodes for themselves.
    """
    found = set(chosen)
    for module in names:
        within = set(module.modules())
        if not within.isdisjoint(chosen):
            found.add(module)
        if inside and module in chosen:
            found |= within
    return [module for module in names if module in found]


Wanted = Callable[[str], bool] | None
"""Which nodes are asked for, by their names; None: all."""


class Followed:
    """A module that is followed, and its calls, which are the same objects at every step."""

    __slots__ = ("calls", "left", "module", "names")

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module = module
        self.names = names
        self.calls: list[Call] = []
        self.left = Left(self)

    def call(self, count: int) -> Call:
        """Its call of this number; a module with several names goes by them in turn."""
        while count >= len(self.calls):
            number, turn = divmod(len(self.calls), len(self.names))
            self.calls.append(Call(self.names[turn], number, self.module))
        return self.calls[count]


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """Stands among the marks for the end of a call."""

    of: Followed


class Track:
    """One outermost call while it runs: its marks are all that is kept of the calls inside.

    At the sequence number `numbers[i]` a call of `marks[i]` began, or ended if that is a `Left`.
    """

    __slots__ = (
        "before",
        "blank",
        "deeper",
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
        self.deeper = 0  # calls of the outermost module inside itself
        self.blank: list[int] = []  # the marks of calls that make no graph: gradients were off
        self.numbers: list[int] = []
        self.marks: list[Followed | Left] = []
        self.returned: list[tuple[int, str, Edge]] = []  # by the mark of the call's end
        self.recomputed: list[Call] | None = None  # which calls these are, if it is known
        self.before: set[Node] = set()

    def begin(self, module: nn.Module, given: object) -> None:
        """An outermost call begins, with these inputs: how they were made is not its own."""
        self.clear()
        self.outer = module
        self.before = {t.grad_fn for _, t in tensors_in(given) if t.grad_fn is not None}


class Reading:
    """What the marks of a track say: which call was the innermost from each mark on.

    `latest` is what nodes were last made at these marks: their pattern, and where the wanted ones
    were made.
    """

    __slots__ = ("begun", "ended", "latest", "marks", "owners")

    def __init__(self, track: Track) -> None:
        self.marks = track.marks
        self.begun: dict[int, Call] = {}  # by their marks
        self.ended: dict[int, Call] = {}
        self.owners: list[Call] = []
        self.latest: dict[Wanted, tuple[object, list[tuple[int, Spot]]]] = {}
        known = iter(track.recomputed) if track.recomputed is not None else None
        counts: dict[Followed, int] = {}
        opened: list[Call] = []
        for place, mark in enumerate(track.marks):
            if isinstance(mark, Followed):
                count = counts[mark] = counts.get(mark, -1) + 1
                opened.append(mark.call(count) if known is None else next(known))
                self.begun[place] = opened[-1]
            elif any(call.module is mark.of.module for call in opened):
                # What is open inside it was left by an exception that runs no hooks.
                while opened[-1].module is not mark.of.module:
                    opened.pop()
                self.ended[place] = opened.pop()
            if opened:
                self.owners.append(opened[-1])


FORWARD = -1  # the number of the backward pass that a forward is inside
REMEMBERED = 2**14  # calls without a graph that a recomputation may ask for
_CALL = nn.Module._call_impl.__code__


class Blank(NamedTuple):
    """A call that has made no graph, for gradients were off."""

    thread: int
    number: int
    call: Call


class _Thread(threading.local):
    """Sequence numbers are counted per thread, so calls are followed per thread too."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.forward = Track()
        self.latest = Reading(self.forward)
        self.again: dict[int, Track] = {}  # by the backward pass that recomputes
        self.recomputing: tuple[int, int] = FORWARD, LEAF  # that pass, and the checkpoint's node
        self.coming: Iterator[Blank] = iter(())


class Tracer:
    """Tells nodes by sequence numbers, which go up by one with each differentiable node.

    Those of a call form a span, and the innermost span that holds a node's number is its module's.
    A call inside a backward is the recomputation of a checkpoint: not followed, unless the forward
    has made no graph of it. Then it is reentrant, and the call goes by the same name and number.
    """

    def __init__(self) -> None:
        self._thread = _Thread()
        self._blanks: list[Blank] = []
        self._since: frozenset[nn.Module] = frozenset()

    def follow(
        self,
        model: nn.Module,
        modules: Collection[nn.Module],
        take: Take,
        stack: ExitStack,
        outputs: Collection[nn.Module] = (),
        since: Collection[nn.Module] = (),
    ) -> None:
        names = names_of(model)
        self._since = frozenset(since)
        for module in modules:
            me = Followed(module, names[module])
            enter = self._enter(me, module is model)
            handle = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            leave = self._leave(me.left, take, module in outputs)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    # These two run at every call of every module: they look up as little as they can. A copy of the
    # model, made in the block, has the same hooks and is left alone.

    def _enter(self, me: Followed, is_model: bool) -> Callable[..., None]:
        thread, module = self._thread, me.module
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number
        gradients_on, traced = torch.is_grad_enabled, compiling.traced

        def enter(called: nn.Module, args: object, kwargs: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, kwargs)
                return
            if task_now() != FORWARD:
                self._again(me)
                return
            track = thread.forward
            outer = track.outer
            if outer is None or outer is module or is_model:
                self._begin(track, module, (args, kwargs))
            if not gradients_on():
                track.blank.append(len(track.marks))
            track.numbers.append(number_now())
            track.marks.append(me)

        untraced = compiling.untraced(enter)
        return enter

    def _leave(self, left: Left, take: Take, tells: bool) -> Callable[..., None]:
        thread, module, traced = self._thread, left.of.module, compiling.traced
        task_now, number_now = autograd.backward_task, autograd.next_sequence_number

        def leave(called: nn.Module, args: object, output: object) -> None:
            if called is not module:
                return
            if traced():
                untraced(called, args, output)
                return
            task = task_now()
            track = thread.forward if task == FORWARD else thread.again.get(task)
            if track is None or track.outer is None:
                return
            track.numbers.append(number_now())
            track.marks.append(left)
            if tells:
                place = len(track.marks) - 1
                track.returned += ((place, path, edge) for path, edge in _edges(output))
            if track.outer is module:
                if track.deeper:
                    track.deeper -= 1
                else:
                    self._end(track, task, output, take)

        untraced = compiling.untraced(leave)
        return leave

    def _begin(self, track: Track, module: nn.Module, given: object) -> None:
        """A call begins that may be the outermost: is the one that is open still running?

        It may have been left by a KeyboardInterrupt, which runs no forward hook.
        """
        if track.outer is None or not _runs(track.outer, module):
            self._thread.again.clear()
            track.begin(module, given)
        elif track.outer is module:
            track.deeper += 1

    def _end(self, track: Track, task: int, output: object, take: Take) -> None:
        thread = self._thread
        if track.recomputed is not None or track.marks != thread.latest.marks:
            thread.latest = Reading(track)
        reading = thread.latest
        if track.blank:
            self._remember(track, reading)
        made = track.numbers[-1] > track.numbers[0]
        graph = Graph(track, reading, task == FORWARD, output, self._since) if made else None
        if track.recomputed is not None:
            thread.latest = Reading(Track())
        track.clear()
        thread.again.pop(task, None)
        if graph is not None:
            take(graph)

    def _remember(self, track: Track, reading: Reading) -> None:
        ident = self._thread.ident
        for mark in track.blank:
            self._blanks.append(Blank(ident, track.numbers[mark], reading.begun[mark]))
        if len(self._blanks) > 2 * REMEMBERED:
            del self._blanks[:REMEMBERED]

    def _again(self, me: Followed) -> None:
        """A call inside a backward: follow it if it makes the graph that the forward did not."""
        thread, task, node = self._thread, autograd.backward_task(), autograd.running_node()
        if not isinstance(node, BackwardCFunction):
            return
        number = node._sequence_nr()
        if thread.recomputing != (task, number):
            # From here on its calls come in the order of the forward.
            thread.recomputing = task, number
            thread.coming = self._made_after(number)
        blank = next(thread.coming, None)
        if blank is None or blank.call.module is not me.module:
            thread.coming = iter(())
            return
        track = thread.again.setdefault(task, Track())
        if track.outer is None:
            track.begin(me.module, ())
            track.recomputed = []
        elif track.outer is me.module:
            track.deeper += 1
        assert track.recomputed is not None
        track.recomputed.append(blank.call)
        if not torch.is_grad_enabled():
            track.blank.append(len(track.marks))
        track.numbers.append(autograd.next_sequence_number())
        track.marks.append(me)

    def _made_after(self, number: int) -> Iterator[Blank]:
        """The calls without a graph that came after a node of this thread was made.

        On a GPU a backward runs in a thread of its own: then those of the newest one.
        """
        own = self._thread.ident
        if self._blanks and all(blank.thread != own for blank in self._blanks):
            own = self._blanks[-1].thread
        mine = [blank for blank in self._blanks if blank.thread == own]
        # Numbers go up within a thread, so a search from the newest ends early.
        start = len(mine)
        while start and mine[start - 1].number > number:
            start -= 1
        return islice(mine, start, None)


def _runs(outer: nn.Module, module: nn.Module) -> bool:
    """Whether a call of `outer` is around the call of `module` that has just begun."""
    frame, own = sys._getframe(3), True
    while frame is not None:
        if frame.f_code is _CALL:
            running = frame.f_locals["self"]
            if own and running is not module:
                return True  # another library calls modules in its own way: trust the hooks
            if not own and running is outer:
                return True
            own = False
        frame = frame.f_back
    return own


def _edges(output: object) -> Iterator[tuple[str, Edge]]:
    for path, tensor in tensors_in(output):
        yield path, get_gradient_edge(tensor)[:2] if tensor.requires_grad else (None, 0)


LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node
WRAPPER = "BackwardHookFunctionBackward"  # around a module with full-backward hooks


class Graph:
    """What one outermost call has made."""

    def __init__(
        self,
        track: Track,
        reading: Reading,
        forward: bool,
        output: object,
        since: frozenset[nn.Module],
    ) -> None:
        self._numbers, self._reading = track.numbers, reading
        self._before, self._since = track.before, since
        self._blanks = {track.numbers[mark] for mark in track.blank}
        self._roots = {t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None}
        self.whole = forward and reading.begun[0].name == ROOT
        self.returned = [
            Returned(reading.ended[mark], path, edge) for mark, path, edge in track.returned
        ]

    @property
    def empty(self) -> bool:
        return not self._roots

    def nodes(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[Node, Spot]]:
        found = self._reached()
        first, latest = self._numbers[0], self._reading.latest
        # Most forwards make the same nodes after the same calls as the last one did.
        pattern = (
            [number - first for number in self._numbers],
            [(number - first, node.name()) for number, node in found],
        )
        if wanted not in latest or latest[wanted][0] != pattern:
            latest[wanted] = pattern, self._spots(found, wanted)
        for place, spot in latest[wanted][1]:
            yield found[place][1], spot

    def _spots(
        self, reached: Sequence[tuple[int, Node]], wanted: Callable[[str], bool] | None
    ) -> list[tuple[int, Spot]]:
        """Where the wanted nodes were made, in that order, each with its place among all."""
        found = [(number, node.name(), place) for place, (number, node) in enumerate(reached)]
        if wanted is not None:
            # All overloads of a name count as its occurrences, so if one is wanted, all are told.
            kinds = {plain(name) for name in {name for _, name, _ in found} if wanted(name)}
            found = [made for made in found if plain(made[1]) in kinds]
        counts: Counter[tuple[Call, str]] = Counter()
        spots: list[tuple[int, Spot]] = []
        for number, name, place in sorted(found, key=itemgetter(0)):
            call = self._reading.owners[bisect_right(self._numbers, number) - 1]
            spots.append((place, Spot(name, call, counts[call, plain(name)])))
            counts[call, plain(name)] += 1
        return spots

    def uses(self, edges: Collection[Edge]) -> Sequence[Use]:
        return [use for _, use in self._uses(edges)]

    def _uses(self, edges: Collection[Edge]) -> list[tuple[int, Use]]:
        found = [
            (number, Use(edge, node, index))
            for number, node in self._reached()
            for index, edge in enumerate(node.next_functions)
            if edge in edges
        ]
        # Full-backward hooks put a node around what a module takes and returns: look behind it.
        inside: dict[Edge, Edge] = {
            (use.node, use.input): use.edge for _, use in found if use.node.name() == WRAPPER
        }
        if inside:
            found = [(number, use) for number, use in found if use.node.name() != WRAPPER]
            for number, use in self._uses(inside):
                found.append((number, use._replace(edge=inside[use.edge])))
        found.sort(key=lambda item: (item[0], item[1].input))
        return found

    def hides(self) -> bool:
        return bool(self._blanks) and any(
            isinstance(node, BackwardCFunction) and number + 1 in self._blanks
            # A checkpoint's own node is made before what it calls.
            for number, node in self._reached(self._numbers[0])
        )

    def _reached(self, begin: int | None = None) -> list[tuple[int, Node]]:
        """The nodes made in the call, from `begin` or the first call of interest on, that its
        outputs depend on, each with its number.
        """
        begin, end = self._first() if begin is None else begin, self._numbers[-1]
        waiting = list(self._roots.difference(self._before))
        seen, found = self._before.union(waiting), []
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number >= begin and number != LEAF:
                # An output that is a view may get its node when it is looked at, after the end.
                if number < end:
                    found.append((number, node))
                for source, _ in node.next_functions:
                    if source is not None and source not in seen:
                        seen.add(source)
                        waiting.append(source)
        return found

    def _first(self) -> int:
        """The number at which the first call of interest began."""
        if not self._since:
            return self._numbers[0]
        calls = zip(self._numbers, self._reading.owners, strict=False)
        return next((n for n, call in calls if call.module in self._since), self._numbers[-1])


def may_meet_more_sites(output: object, at: Selector) -> bool:
    """Whether a backward from `output` may meet sites of `at` that the forward did not.

    A reentrant checkpoint makes its nodes then; and which outputs of a node get a gradient is seen
    when they do.
    """
    enters = any(kind.known_in_backward for kind in at.kinds)
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
