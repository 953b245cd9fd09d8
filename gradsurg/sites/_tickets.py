"""A full backward hook that is another one for every call of its module."""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurg.sites.base import GradFn, through

Grads = tuple[Tensor | None, ...]
Hook = Callable[..., Any]  # Any: PyTorch's own types know no missing gradients

FEW = 64  # hooks whose graphs may be gone before it is asked which are


class Notes(list[tuple[int, ref[nn.Module], Sequence[GradFn]]]):
    """What calls have to say to the backward hook they got: thread, module, and its gates."""

    def write(self, module: nn.Module, gates: Sequence[GradFn]) -> None:
        """The gates of a call of this thread, one for each gradient."""
        self.append((threading.get_ident(), ref(module), gates))

    def hook(self) -> Hook:
        """A backward hook that goes by them."""

        # A function: a model is copied with its hooks, and a method with its object.
        def hook(module: nn.Module, grads: Grads, *_: object) -> Grads | None:
            own = [note for note in self if note[1]() is module]
            if len(own) > 1:
                own = [note for note in own if note[0] == threading.get_ident()]
                if not own:
                    raise RuntimeError(
                        f"several threads have called a {type(module).__name__} at a time, and in "
                        "the backward of another thread a full backward hook cannot tell these "
                        "calls apart. Use Outputs or Inputs."
                    )
            if not own:
                return None
            gates = own[0][2]
            if len(gates) > 1:
                return through(gates, grads)
            result = gates[0](grads[0])
            return None if result is None else (result,)

        return hook


class _Counter:
    """The place in PyTorch's table of hooks where a new hook stands for every call."""

    def __init__(self, register: Callable[[Hook], RemovableHandle]) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.newest = Notes()
        self.alive: dict[int, ref[Notes]] = {}  # as long as their graphs
        self.most = FEW
        self.handle = register(self.newest.hook())

    def next(self) -> tuple[int, Notes]:
        """Put a new hook in place; the number and the notes of the one that was there."""
        with self.lock:
            number, notes = self.number, self.newest
            self.number, self.newest = number + 1, Notes()
            self.alive[number] = ref(notes)
            if len(self.alive) > self.most:
                self.alive = {key: own for key, own in self.alive.items() if own() is not None}
                self.most = FEW + 2 * len(self.alive)
            table = self.handle.hooks_dict_ref()
            if table is not None and self.handle.id in table:
                table[self.handle.id] = self.newest.hook()
            return number, notes

    def since(self, first: int, last: int) -> list[Notes]:
        """The notes of the graphs there are, from one number up to another."""
        with self.lock:
            found = [own() for key, own in self.alive.items() if first <= key < last]
        return [notes for notes in found if notes is not None]


class Tickets(threading.local):
    """A full backward hook that is another one for every call.

    PyTorch reads the table of backward hooks before it runs the forward pre-hooks of a call. The
    pre-hook puts a new one there for the next call, and the forward hook tells the one that was
    read which gates there are. Another thread may have come between: then it is one of those that
    stood there since the last call in this thread, and all of them are told.
    """

    def __init__(self, counter: _Counter) -> None:
        self.counter = counter
        self.first = 0
        self.open: list[tuple[nn.Module, list[Notes]]] = []

    def take(self, module: nn.Module) -> None:
        """A call of `module` begins."""
        number, notes = self.counter.next()
        others = [] if number == self.first else self.counter.since(self.first, number)
        self.open.append((module, [*others, notes]))
        self.first = number + 1

    def give(self, module: nn.Module) -> list[Notes]:
        """Where the call of `module` that ends may write; calls that raised are passed over."""
        while self.open:
            called, notes = self.open.pop()
            if called is module:
                return notes
        return []

    def remove(self) -> None:
        """Take the hook off; those that calls have read stay with their graphs."""
        self.counter.handle.remove()


def tickets(register: Callable[[Hook], RemovableHandle]) -> Tickets:
    """Register a hook that is another one for every call."""
    return Tickets(_Counter(register))
