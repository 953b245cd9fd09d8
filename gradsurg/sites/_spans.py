"""Which module call made which autograd node, told by the sequence numbers of the nodes."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gradsurg.sites._marks import Followed, Left, Reading, Track
from gradsurg.sites._modules import names_of
from gradsurg.sites._nested import tensors_in
from gradsurg.sites._resolver import Call, Edge, Take
from gradsurg.sites._span_graph import LEAF, SpanGraph
from gradsurg.torch_internals import autograd, compiling

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


class Spans:
    """Tells nodes by sequence numbers, which go up by one with each differentiable node.

    Those of a call form a span, and the innermost span that holds a node's number is its module's.
    A call inside a backward is the recomputation of a checkpoint: not followed, unless the forward
    has made no graph of it. Then it is reentrant, and the call goes by the same name and number.
    """

    needs: ClassVar[str] = ""

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
        graph = SpanGraph(track, reading, task == FORWARD, output, self._since) if made else None
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
