"""Base classes of selectors of modules and parameters, by name, class, position and shape."""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.sites.places import Leaf, Memory, Named, Place, Stage, Things
from gradsurg.sites.selection import (
    OUTSIDE,
    ROOT,
    Pattern,
    Range,
    Types,
    all_frozen,
    asked_of,
    depth_of,
    described,
    in_range,
    index_of,
    is_container,
    matches,
    matches_type,
    nothing_matched,
    scanned,
    uncompiled_name,
    unnumbered,
    why_not_called,
)


@validated
class NamedSelector(Leaf):
    """The modules or parameters whose name fits `pattern`; base of the kinds that hook them."""

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
            and (self.index is None or in_range(index_of(name), self.index))
        ]

    def nothing_near(self, choices: Iterable[str], reason: str = "") -> SelectionError:
        """Return the error for fields that fit none of the choices, for a known reason."""
        asked = asked_of(self)
        field = asked[0] if len(asked) == 1 and self.pattern == "*" else "pattern"
        return nothing_matched(self, field, described(self), choices, reason)


@validated
class ModuleSelector(NamedSelector):
    """The modules whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the name of the class or of a base class (or the class itself). `depth`
    is the number of parts of the name: 1 for children of the model, 0 for the model. `index` is the
    last number in the name, as the position in a Sequential. Each is a number or a pair (lowest,
    highest). `call` picks one call, counted from 0 within one call of the model.

    A module with several names can be selected by each; its calls take the names in turn. The model
    itself is `root`, which a pattern must spell out unless the model has no submodules.
    """

    call: Annotated[int, Field(ge=0)] | None = None
    stage: Stage | None = None

    def near(self, named: Named) -> Sequence[str]:
        offered = self.offers(named)
        return [name for name in self.matching(named) if name in offered] if offered else ()

    def offers(self, named: Named) -> Sequence[str]:
        (module, *_) = named.owners
        if is_container(module):
            return ()
        if ROOT in named.names and self.pattern != ROOT and any(module.children()):
            return [name for name in named.names if name != ROOT]
        return named.names

    def picks(self, place: Place) -> bool:
        if self.call is not None and place.call == OUTSIDE:
            raise unnumbered(place.name)
        return self.call in (None, place.call)

    @property
    def picks_all(self) -> bool:
        return self.call is None

    def expected(self, name: str) -> str:
        return f"{name}#{self.call or 0}{self.suffix}"

    @property
    def suffix(self) -> str:
        """The end of its site ids, after the call."""
        return ""

    def check(self, things: Things, memory: Memory) -> None:
        if memory.near[self]:
            return
        found = things[self.kind_at(memory.stage)]
        by_name = {named.owners[0]: named.names for named in found}
        fitting = {
            module: names
            for module, names in by_name.items()
            if any(matches(name, self.pattern) for name in names)
        }
        model = next(named.owners[0] for named in found if ROOT in named.names)
        reason = why_not_called(model, fitting)
        if fitting and not any(matches_type(module, self.types) for module in fitting):
            types = sorted({type(module).__name__ for module in fitting})
            raise nothing_matched(self, "types", str(self.types), types, reason)
        names = [name for named in found for name in named.names if name != ROOT]
        raise self.nothing_near(names, reason)


@validated
class ParamSelector(NamedSelector):
    """The parameters whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the class of the module that owns the parameter. `depth` and `index`
    describe the name of that module as for `ModuleSelector`, `ndim` and `size` (the number of
    entries) the parameter; each is a number, or a pair (lowest, highest).
    """

    ndim: Range | None = None
    size: Range | None = None
    stage: Stage | None = None

    def near(self, named: Named) -> Sequence[str]:
        param = named.thing
        if (
            not isinstance(param, Tensor)
            or (self.ndim is not None and not in_range(param.ndim, self.ndim))
            or (self.size is not None and not in_range(param.numel(), self.size))
        ):
            return ()
        return named.names[:1] if self.matching(named) else ()

    def offers(self, named: Named) -> Sequence[str]:
        return named.names[:1]

    def picks(self, place: Place) -> bool:
        return True

    @property
    def picks_all(self) -> bool:
        return True

    def check(self, things: Things, memory: Memory) -> None:
        kind = self.kind_at(memory.stage)
        found = [named for named in things[kind] if (kind, named.names[0]) in memory.near[self]]
        if not found:
            raise self.nothing_near([name for named in things[kind] for name in named.names])
        # At `step` a frozen parameter may be trained later.
        may_wait = "step" in self.stages and (memory.stage or self.stage) in (None, "step")
        if not may_wait and all(named.is_frozen for named in found):
            raise all_frozen(self, [named.names[0] for named in found])


@scanned
def params_of(model: nn.Module) -> list[Named]:
    """Return every parameter of a model once, with all its names and owners."""
    named: dict[nn.Parameter, Named] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            names, _, owners = named.get(param, ((), param, ()))
            named[param] = Named((*names, uncompiled_name(name)), param, (*owners, module))
    return [*named.values()]


def _depth(name: str, is_module: bool) -> int:
    """The depth of a module, or of the module that owns a parameter."""
    return depth_of(name if is_module else name.rpartition(".")[0] or ROOT)
