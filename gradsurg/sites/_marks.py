"""The marks that the calls of modules leave among the sequence numbers of autograd nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.autograd.graph import Node

from gradsurg.sites._nested import tensors_in
from gradsurg.sites._resolver import Call, Edge, Spot

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
