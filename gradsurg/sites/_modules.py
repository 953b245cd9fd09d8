"""Selecting modules by name, type, depth and index."""

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from torch import nn

from gradsurg.plugins.fields import validated
from gradsurg.sites._foreign import foreign
from gradsurg.sites._patterns import Pattern, Types, matches, matches_type, nothing_matched
from gradsurg.sites.base import HookRegistry, Keeps, Place, Selector, Stage

ROOT = "root"  # what the model itself goes by
COMPILED = "_orig_mod"  # what torch.compile calls a module inside the one that it makes of it
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Chosen = Callable[[nn.Module, tuple[str, int]], str | None]
"""The site id of a module's call, None if it is not selected."""


def _range(given: Any) -> tuple[int, int]:  # Any: pydantic refuses what is no numbers
    bounds = (given, given) if type(given) is int else given
    match bounds:
        case [int(low), int(high)] if 0 <= low <= high and bool not in map(type, bounds):
            return low, high
        case _:
            raise ValueError("must be a number >= 0 or two of them, low and high")


Range = Annotated[int | tuple[int, int], BeforeValidator(_range)]
"""A number, or the lowest and the highest, which is what it becomes."""


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
            name for names in possible(named, self.mechanism, keeps).values() for name in names
        ]
        if not found:
            named_so = [
                module
                for module, own in named.items()
                if any(matches(name, self.pattern) for name in own)
            ]
            types = sorted({type(module).__name__ for module in named_so})
            if named_so and not any(matches_type(module, self.types) for module in named_so):
                raise nothing_matched(self, "types", str(self.types), types)
            choices = [name for names in named.values() for name in names if name != ROOT]
            raise nothing_matched(self, self._asked_field, self.said(), choices)
        return found

    def hookable(
        self, named: Mapping[nn.Module, Sequence[str]], gates: HookRegistry, tail: str = ""
    ) -> list[nn.Module]:
        """The modules that may be selected, their sites put into the ledger; ids end in `tail`."""
        found = possible(named, self.mechanism, gates.keeps)
        for module, names in found.items():
            others = foreign(*(table for key, table in vars(module).items() if key in TABLES))
            # Under its other names it may be called or not: that is seen when it is.
            first = Place(self.mechanism, names[0], module, 0)
            # In a combination others may take the first call of a module.
            call = self.call if self.call and gates.keeps(first) is False else 0
            gates.expect(f"{names[0]}#{call}{tail}", foreign=others)
        return list(found)

    def chosen(self, gates: HookRegistry, tail: str = "") -> Chosen:
        """A memory of which calls are selected, and of the ids of their sites."""
        return remembered(self.mechanism, gates, {}, tail)

    @property
    def _asked_field(self) -> str:
        """The field that selects, `pattern` if several do."""
        asked = [
            name for name in ("types", "depth", "index") if getattr(self, name) not in (None, "*")
        ]
        return asked[0] if len(asked) == 1 and self.pattern == "*" else "pattern"

    def said(self) -> str:
        """What was asked for, for an error."""
        asked = {
            "types": self.types if self.types != "*" else None,
            "depth": self.depth,
            "index": self.index,
        }
        extra = ", ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
        return f"{self.pattern}' with '{extra}" if extra else self.pattern


def possible(
    named: Mapping[nn.Module, Sequence[str]], mechanism: tuple[object, ...], keeps: Keeps
) -> dict[nn.Module, list[str]]:
    """The modules that may be selected, each with the names by which it may be."""
    found = {
        module: [name for name in names if keeps(Place(mechanism, name, module)) is not False]
        for module, names in named.items()
    }
    return {module: names for module, names in found.items() if names}


def remembered(
    mechanism: tuple[object, ...],
    gates: HookRegistry,
    known: MutableMapping[nn.Module, dict[tuple[str, int], str | None]],
    tail: str = "",
) -> Chosen:
    """A memory, in `known`, of which calls are selected, and of the ids of their sites."""

    def chosen(module: nn.Module, call: tuple[str, int]) -> str | None:
        own = known.get(module)
        if own is None:
            own = known[module] = {}
        if call not in own:
            name, number = call
            kept = gates.keeps(Place(mechanism, name, module, number, whole=True))
            own[call] = f"{name}#{number}{tail}" if kept else None
            if not kept:
                gates.forget(f"{name}#{number}{tail}")
        return own[call]

    return chosen


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


def depth(name: str) -> int:
    """How many parts a name has; the model's own has none."""
    return 0 if name == ROOT else len(name.split("."))


def index(name: str) -> int | None:
    """The number in the last numbered part of a name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else None


def within(number: int | None, bounds: Range | None) -> bool:
    """Whether a number is inside its bounds; no bounds hold it all."""
    if bounds is None or number is None:
        return bounds is None
    low, high = _range(bounds)
    return low <= number <= high
