"""Base classes of selectors of modules and parameters, by name, class, position and shape."""

import re
from collections.abc import Collection, Container, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from gradsurg.core.pitfalls import refusal
from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.plugins.messages import shortened
from gradsurg.sites.places import Kind, Leaf, Memory, Named, Place, Stage, Things, call_id
from gradsurg.sites.selection import (
    OUTSIDE,
    ROOT,
    Pattern,
    Range,
    Types,
    in_range,
    is_container,
    matches,
    matches_type,
    nothing_matched,
    scanned,
    uncompiled_name,
)
from gradsurg.torch_internals import compiling


@validated
class NamedSelector(Leaf):
    """Select modules or parameters whose name fits `pattern`; base of the kinds that hook them."""

    pattern: Pattern = "*"
    types: Types = "*"
    depth: Range | None = None
    index: Range | None = None

    stages: ClassVar[tuple[Stage, ...]]

    def matching(self, named: Named) -> list[str]:
        """Return the names under which a module or parameter fits the fields."""
        is_module = isinstance(named.thing, nn.Module)
        return [
            name
            for name, owner in zip(named.names, named.owners, strict=True)
            if (self.pattern == "*" or matches(name, self.pattern))
            and (self.types == "*" or matches_type(owner, self.types))
            and (self.depth is None or in_range(_depth(name, is_module), self.depth))
            and (self.index is None or in_range(_index(name), self.index))
        ]

    def described(self) -> str:
        """Return the pattern and the other selecting fields, for an error that quotes it."""
        extra = ", ".join(f"{name}={getattr(self, name)}" for name in self._asked())
        return f"{self.pattern}' with '{extra}" if extra else self.pattern

    def nothing_near(self, found: Sequence[Named], reason: str = "") -> SelectionError:
        """Return the error for fields that fit none of these, with a `reason` if it is known."""
        asked = self._asked()
        field = asked[0] if len(asked) == 1 and self.pattern == "*" else "pattern"
        return nothing_matched(self, field, self.described(), names_in(found), reason)

    def _asked(self) -> list[str]:
        """The fields besides the pattern that are not at their default."""
        names = ("types", "depth", "index", "ndim", "size")
        return [name for name in names if getattr(self, name, None) not in (None, "*")]


@validated
class ModuleSelector(NamedSelector):
    """Select the modules whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the name of the class or of a base class (or the class itself). `depth`
    is the number of parts of the name: 1 for children of the model, 0 for the model. `index` is the
    last number in the name, such as the position in a Sequential. Each is a number or a pair
    (lowest, highest). `call` picks one call, counted from 0 within one call of the model.

    A module with several names can be selected by each; its calls take the names in turn. The model
    itself is `root`, which only the pattern `root` selects, unless the model has no submodules.
    """

    call: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    def near(self, named: Named) -> Sequence[str]:
        offered = self.offers(named)
        return [name for name in self.matching(named) if name in offered] if offered else ()

    def offers(self, named: Named) -> Sequence[str]:
        return () if is_container(named.owners[0]) else offered_names(named, self.pattern)

    def picks(self, place: Place) -> bool:
        return picks_call(self.call, place)

    @property
    def picks_all(self) -> bool:
        return self.call is None

    def expected(self, name: str) -> str:
        return call_id(name, self.call or 0) + self.kind_at(None).suffix

    def check(self, things: Things, memory: Memory) -> None:
        if memory.near[self]:
            return
        found = things[self.kind_at(memory.stage)]
        fitting = [each for each in found if any(matches(n, self.pattern) for n in each.names)]
        reason = _why_not_called(found, fitting)
        if fitting and not any(matches_type(each.owners[0], self.types) for each in fitting):
            types = sorted({type(each.thing).__name__ for each in fitting})
            raise nothing_matched(self, "types", str(self.types), types, reason)
        raise self.nothing_near(found, reason)


@validated
class ParamSelector(NamedSelector):
    """Select the parameters whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the class of the module that owns the parameter. `depth` describes the
    name of that module, `index` the name of the parameter (see `ModuleSelector`), `ndim` and `size`
    (the number of entries) the parameter. Each is a number, or a pair (lowest, highest).
    """

    ndim: Range | None = None
    size: Range | None = None
    stage: Stage | None = None

    def near(self, named: Named) -> Sequence[str]:
        # Asked for each parameter of a model: most selectors fit any shape.
        fits = isinstance(named.thing, Tensor) and self.ndim is None and self.size is None
        fits = fits or fits_shape(named.thing, self.ndim, self.size)
        return named.names[:1] if fits and self.matching(named) else ()

    def offers(self, named: Named) -> Sequence[str]:
        return named.names[:1]

    def picks(self, place: Place) -> bool:
        return True

    @property
    def picks_all(self) -> bool:
        return True

    def check(self, things: Things, memory: Memory) -> None:
        kind = self.kind_at(memory.stage)
        found = near_in(things[kind], kind, memory.near[self])
        if not found:
            raise self.nothing_near(things[kind])
        # At `step` a frozen parameter may be trained later.
        may_wait = "step" in self.stages and (memory.stage or self.stage) in (None, "step")
        if not may_wait:
            refuse_frozen(self, self.pattern, found)


@scanned
def params_of(model: nn.Module) -> list[Named]:
    """Return every parameter of a model once, with all its names and owners."""
    named: dict[nn.Parameter, Named] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            names, _, owners = named.get(param, ((), param, ()))
            named[param] = Named((*names, uncompiled_name(name)), param, (*owners, module))
    return [*named.values()]


def near_in(found: Sequence[Named], kind: Kind, near: Container[tuple[Kind, str]]) -> list[Named]:
    """Return the modules and parameters at which places of a kind may be picked."""
    return [named for named in found if any((kind, name) in near for name in named.names)]


def names_in(found: Sequence[Named]) -> list[str]:
    """Return all names except the model's, for the choices in an error."""
    return [name for named in found for name in named.names if name != ROOT]


def offered_names(named: Named, pattern: str) -> Sequence[str]:
    """Return the names of a module. A model with submodules has a name only if the pattern spells
    it out.
    """
    if ROOT in named.names and pattern != ROOT and any(named.owners[0].children()):
        return [name for name in named.names if name != ROOT]
    return named.names


def picks_call(call: int | None, place: Place) -> bool:
    """Return whether a place is in the picked call; None picks all calls."""
    if call is not None and place.call == OUTSIDE:
        raise RuntimeError(
            f"leave out call=, or attach to the module that you call: '{place.name}' is called "
            "outside the attached model, so that its calls have no numbers"
        )
    return call in (None, place.call)


def fits_shape(thing: object, ndim: Range | None, size: Range | None) -> bool:
    """Return whether it is a parameter with this number of dimensions and of entries."""
    return (
        isinstance(thing, Tensor)
        and (ndim is None or in_range(thing.ndim, ndim))
        and (size is None or in_range(thing.numel(), size))
    )


def refuse_frozen(query: Leaf, pattern: str, found: Collection[Named]) -> None:
    """Raise the error for a selector that selects only frozen parameters."""
    if found and all(named.is_frozen for named in found):
        names = shortened(named.names[0] for named in found)
        text = f"call requires_grad_() or change '{pattern}', which selects frozen ones: {names}"
        raise SelectionError(query, "pattern", text)


def refuse_exported(query: Leaf, found: Sequence[Named], near: Sequence[Named]) -> None:
    """Raise the error for modules of a model made by torch.export, which calls no modules."""
    (model,) = (named for named in found if ROOT in named.names)
    if model not in near and compiling.is_exported(model.owners[0]):
        raise refusal(query, "torch.export")


def _why_not_called(found: Sequence[Named], fitting: Sequence[Named]) -> str:
    """Return a sentence about modules that fit by name and are never called, or ""."""
    holders = [named.names[0] for named in fitting if type(named.thing) is nn.Module]
    if holders and any(matches_type(named.owners[0], "GraphModule") for named in found):
        text = "Use Nodes or Parameters: in the GraphModule of torch.export"
        return f"{text} '{holders[0]}' only holds parameters."
    if not fitting or not all(is_container(named.owners[0]) for named in fitting):
        return ""
    (name, *_), module, _ = fitting[0]
    kind = type(module).__name__
    return f"Use '{name}.*': {kind} has no forward, so '{name}' itself is never called."


def _depth(name: str, is_module: bool) -> int:
    """The depth of a module, or of the module that owns a parameter."""
    module = name if is_module else name.rpartition(".")[0] or ROOT
    return 0 if module == ROOT else module.count(".") + 1


def _index(name: str) -> int | None:
    """The number in the last numeric part of a name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else None
