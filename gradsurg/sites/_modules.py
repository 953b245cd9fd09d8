"""Selecting modules by name, type, depth and index, and telling their calls apart."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from torch import nn
from torch.autograd.function import BackwardCFunction

from gradsurg import engine
from gradsurg.fields import validated
from gradsurg.sites.base import (
    Gates,
    Keeps,
    Place,
    Put,
    Selector,
    Stage,
    check_pattern,
    foreign,
    matches,
    nothing_matched,
)

ROOT = "root"  # what the model itself goes by
COMPILED = "_orig_mod"  # what torch.compile calls a module inside the one that it makes of it
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Chosen = Callable[[nn.Module, tuple[str, int]], str | None]
"""The site id of a module's call, None if it is not selected."""

Pattern = Annotated[str, AfterValidator(check_pattern)]


def _type_name(given: Any) -> Any:  # Any: pydantic refuses what is neither a class nor a string
    return given.__name__ if isinstance(given, type) else given


def _range(given: Any) -> tuple[int, int]:  # Any: as above
    bounds = (given, given) if type(given) is int else given
    match bounds:
        case [int(low), int(high)] if 0 <= low <= high and bool not in map(type, bounds):
            return low, high
        case _:
            raise ValueError("must be a number >= 0 or two of them, low and high")


Types = Annotated[str, BeforeValidator(_type_name), AfterValidator(check_pattern)]
"""A glob or `re:` on a class's name or that of one of its bases, or the class itself."""

Range = Annotated[tuple[int, int], BeforeValidator(_range)]
"""A number, or the lowest and the highest."""


@validated
class ModuleSelector(Selector):
    """The modules whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the class's name or on that of a base class (or the class itself);
    `depth` counts the parts of the name (children of the model have 1, the model itself 0), `index`
    is the number in the name's last numbered part, as the place in a Sequential; each is a number
    or a lowest and a highest. `call` picks one call, counted from 0 within one call of the model. A
    module with several names answers to each: its calls take its names in turn. The model itself is
    `root`, which a pattern has to spell out unless the model has no modules inside.
    """

    pattern: Pattern = "*"
    types: Types = "*"
    depth: Range | None = None
    index: Range | None = None
    call: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    def selects(self, place: Place) -> bool | None:
        if place.mechanism != self.mechanism or not (
            isinstance(place.thing, nn.Module)
            and matches(place.name, self.pattern)
            and self.offers(place)
            and matches_type(place.thing, self.types)
            and within(depth(place.name), self.depth)
            and within(index(place.name), self.index)
        ):
            return False
        if self.call is None:
            return True
        return None if place.call is None else place.call == self.call

    def offers(self, place: Place) -> bool:
        module = place.thing
        if not isinstance(module, nn.Module) or type(module).forward is nn.Module.forward:
            return False  # a ModuleList, as it were: nobody calls it
        return place.name != ROOT or self.pattern == ROOT or not any(module.children())

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        keeps = keeps or self.selects
        named = names_of(model)
        found = [
            name
            for module, names in named.items()
            for name in names
            if keeps(Place(self.mechanism, name, module)) is not False
        ]
        if not found:
            named_so = [module for module, own in named.items() if self._names(own)]
            types = sorted({type(module).__name__ for module in named_so})
            if named_so and not any(matches_type(module, self.types) for module in named_so):
                raise nothing_matched(f"{type(self).__name__}: types", self.types, types)
            choices = [name for names in named.values() for name in names if name != ROOT]
            raise nothing_matched(type(self).__name__, self.said(), choices)
        return found

    def _names(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if matches(name, self.pattern)]

    def hookable(
        self, named: Mapping[nn.Module, Sequence[str]], gates: Gates, tail: str = ""
    ) -> list[nn.Module]:
        """The modules that may be selected, their sites put into the ledger; ids end in `tail`."""
        found = []
        for module, names in named.items():
            kept = [
                name
                for name in names
                if gates.keeps(Place(self.mechanism, name, module)) is not False
            ]
            others = foreign(*(table for key, table in vars(module).items() if key in TABLES))
            if kept:
                # Under its other names it may be called or not: that is seen when it is.
                first = Place(self.mechanism, kept[0], module, 0)
                # In a combination others may take the first call of a module.
                call = self.call if self.call and gates.keeps(first) is False else 0
                gates.expect(f"{kept[0]}#{call}{tail}", foreign=others)
                found.append(module)
        return found

    def chosen(self, gates: Gates, tail: str = "") -> Chosen:
        """A memory of which calls are selected, and of the ids of their sites."""
        known: dict[nn.Module, dict[tuple[str, int], str | None]] = {}

        def chosen(module: nn.Module, call: tuple[str, int]) -> str | None:
            own = known.get(module)
            if own is None:
                own = known[module] = {}
            if call not in own:
                name, number = call
                kept = gates.keeps(Place(self.mechanism, name, module, number, whole=True))
                own[call] = f"{name}#{number}{tail}" if kept else None
                if not kept:
                    gates.forget(f"{name}#{number}{tail}")
            return own[call]

        return chosen

    def said(self) -> str:
        """What was asked for, for an error."""
        asked = {
            "types": self.types if self.types != "*" else None,
            "depth": self.depth,
            "index": self.index,
        }
        extra = ", ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
        return f"{self.pattern}' with '{extra}" if extra else self.pattern


class Turns:
    """What `Calls` counts in one thread. A hook looks it up once, for a thread's own are dear."""

    __slots__ = ("blank", "counts", "inside", "latest", "names")

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.inside = False
        self.counts: dict[nn.Module, int] = {}
        self.blank: list[tuple[int, nn.Module, tuple[str, int]]] = []
        self.latest = "", 0

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """The name that this call of the module goes by, and its index under that name.

        A module called outside the model is at its call 0. None for a module of a copy; and for a
        recomputation inside a backward, but not for that of a reentrant checkpoint: it makes the
        graph which the call in the forward did not make, and goes by its name and index.
        """
        if engine.backward_task() != -1:
            return self._again(module)
        names = self.names.get(module)
        if names is None:
            return None
        counts = self.counts
        count = counts.get(module, 0) if self.inside else 0
        counts[module] = count + 1
        if len(names) == 1:
            latest = names[0], count
        else:
            latest = names[count % len(names)], count // len(names)
        self.latest = latest
        return latest

    def _again(self, module: nn.Module) -> tuple[str, int] | None:
        node = engine.running_node()
        if not isinstance(node, BackwardCFunction) or not torch.is_grad_enabled():
            return None
        # A checkpoint has one node, made before its modules were called: those that were called
        # next after it are its own, and they are called again in the same order.
        made = node._sequence_nr()
        own = [blank for blank in self.blank if blank[0] > made and blank[1] is module]
        if not own:
            return None
        again = min(own, key=lambda blank: blank[0])
        self.blank.remove(again)
        return again[2]


class Calls(threading.local):
    """Tells the calls of each module apart within one call of the model, thread by thread."""

    def __init__(self, names: Mapping[nn.Module, Sequence[str]]) -> None:
        self.names = names
        self.turns = Turns(names)

    def hook(self, model: nn.Module, stack: ExitStack) -> None:
        """Follow the calls of the model itself; a copy of it, made in the block, is left alone."""
        self.following(model)(stack)

    def following(self, model: nn.Module) -> Put:
        """What hooks the model so that its calls are followed."""
        # Functions, not methods: a model is copied with its hooks, and a method with its object.

        @engine.untraced
        def begin(module: nn.Module, args: tuple[object, ...]) -> None:
            if module in self.names:
                self.start()

        @engine.untraced
        def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self.stop()

        def put(own: ExitStack) -> None:
            own.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
            own.callback(model.register_forward_hook(end, always_call=True).remove)

        return put

    def start(self) -> None:
        """A call of the model begins, or a part of it is recomputed."""
        if not engine.in_backward():
            turns = self.turns
            turns.inside = True
            turns.counts.clear()
            turns.blank.clear()
            self.begin()

    def stop(self) -> None:
        """A call of the model has ended, or a recomputation."""
        turns = self.turns
        turns.inside = turns.inside and engine.in_backward()

    def next(self, module: nn.Module) -> tuple[str, int] | None:
        """As `Turns.next`, in the thread at hand."""
        return self.turns.next(module)

    def without_graph(self, module: nn.Module) -> None:
        """The call that `next` has just told of has made no graph."""
        if not engine.in_backward():
            turns = self.turns
            turns.blank.append((engine.next_sequence_number(), module, turns.latest))

    def begin(self) -> None:
        """The model is called: what a subclass counts begins again."""


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with all its names; the model's own is `root`.

    What torch.compile puts around a module is left out, and the module has its name.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if COMPILED not in module._modules:
            names.setdefault(module, []).append(own_name(name) or ROOT)
    return names


def params_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {own_name(name): param for name, param in named}


def own_name(name: str) -> str:
    """The name of a module or a parameter without what torch.compile has put into it."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def matches_type(module: nn.Module | None, pattern: str) -> bool:
    """Whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if pattern == "*":
        return True
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def depth(name: str) -> int:
    """How many parts a name has; the model's own has none."""
    return 0 if name == ROOT else len(name.split("."))


def index(name: str) -> int | None:
    """The number in the last numbered part of a name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else None


def within(number: int | None, bounds: tuple[int, int] | None) -> bool:
    """Whether a number is inside its bounds; no bounds hold it all."""
    return bounds is None or (number is not None and bounds[0] <= number <= bounds[1])
