"""The calls of modules, each with what is saved while it runs and no other inside it does."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsurg.sites._calls import Calls
from gradsurg.sites._modules import Chosen
from gradsurg.sites._saved_pairs import Site, pair
from gradsurg.sites._sorts import Sorts
from gradsurg.sites.base import HookRegistry
from gradsurg.torch_internals import autograd

Wanted = Callable[[Tensor], bool]

COMPILED_SAVES = (
    "what torch.compile has compiled chooses by itself what it saves: there may be fewer sites "
    "than in eager, and other tensors in them"
)


class Saving(Calls):
    """The calls that are running, each with the pair of hooks that it has put in force."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        chosen: Chosen,
        gates: HookRegistry,
        sorts: Sorts,
        wanted: Wanted,
    ) -> None:
        super().__init__(names)
        self.gates = gates
        self.sorts = sorts
        self.wanted = wanted
        self.chosen = chosen
        self.open: list[_Open] = []

    def begin(self) -> None:
        self.end()

    def end(self) -> None:
        """Take all out of force: a KeyboardInterrupt runs no forward hook."""
        while self.open:
            self._close()

    def enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        # A recomputation takes what its checkpoint has been given of the forward.
        call = self.next(module)
        base = None if call is None else self.chosen(module, call)
        if base is None:
            return
        if not torch.is_grad_enabled():
            self.without_graph(module)
            return
        self.sorts.look(module)
        outer = autograd.saving()
        for other in self.open:
            # Of two calls inside one another the inner one takes the place of the outer.
            if outer is not None and outer[0] is other.pair[0]:
                outer = other.outer
        numbered = _Numbered(base, self.gates, self.wanted)
        own = pair(numbered, outer)
        self.open.append(_Open(module, own, outer, numbered))
        autograd.begin_saving(own)

    def enter_compiled(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """As `enter`, in a compiled model: what is saved there is told of."""
        self.gates.note(COMPILED_SAVES)
        self.enter(module, args)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        # A call that nobody has entered, as after a hook that has raised before, has nothing open.
        if any(own.module is module for own in self.open):
            while self._close() is not module:
                pass

    def _close(self) -> nn.Module:
        own = self.open.pop()
        autograd.end_saving(own.pair)
        if not own.numbered.number:
            self.gates.expect(own.numbered.base, skipped="saves no such tensor of its own")
        return own.module


class _Numbered:
    """The sites of one call: a number for each tensor that it saves and that is wanted."""

    def __init__(self, base: str, gates: HookRegistry, wanted: Wanted) -> None:
        self.base = base
        self.gates = gates
        self.wanted = wanted
        self.number = 0

    def __call__(self, tensor: Tensor) -> Site | None:
        if not self.wanted(tensor):
            return None
        site = f"{self.base}.{self.number}"
        self.number += 1
        self.gates.forget(self.base)
        return self.gates.gate(site), site


@dataclass(frozen=True, slots=True)
class _Open:
    """A call that is running; `outer` are the hooks that were in force before it."""

    module: nn.Module
    pair: autograd.Pair
    outer: autograd.Pair | None
    numbered: _Numbered
