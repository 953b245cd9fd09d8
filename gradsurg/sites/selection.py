"""Select modules and parameters by name, class, position and shape."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn

from gradsurg.plugins.fields import SelectionError, nearest, validated
from gradsurg.sites.base import HookRegistry, Place, PlaceTest, Selector, Stage
from gradsurg.torch_internals import autograd


def _check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and a regex that does not compile."""
    if not pattern:
        raise ValueError("must not be empty")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


def _type_name(given: Any) -> str:  # Any: pydantic has not looked yet
    if not isinstance(given, str | type):
        raise ValueError("must be a string or a class")
    return _check_pattern(given.__name__ if isinstance(given, type) else given)


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A pattern on names, as `matches` reads it."""

Types = Annotated[str | type[Any], BeforeValidator(_type_name)]
"""A glob or `re:` on a class's name or that of one of its bases; a class becomes its name."""


def matches(name: str, pattern: str) -> bool:
    """Whether `name` fits a glob (`layer1.*`, `*` crosses dots) or, whole, a regex (`re:...`)."""
    if pattern == "*":
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def matches_type(module: nn.Module | None, types: Types) -> bool:
    """Whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if types == "*":
        return True
    pattern = _type_name(types)
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def nothing_matched(
    selector: object, field: str, pattern: str, names: Iterable[str]
) -> SelectionError:
    """Return the error for a selector whose `field` matches none of `names`, which it lists."""
    choices = list(names)
    # A glob stands for a prefix, as 'hiden.*': the nearest prefix is what was meant.
    literal = pattern.removeprefix("re:").strip("*.")
    parts = [name.split(".") for name in choices]
    prefixes = {".".join(part[:size]) for part in parts for size in range(1, len(part) + 1)}
    close = get_close_matches(literal, sorted(prefixes), n=1, cutoff=0.6)
    listed = nearest(pattern, choices)
    if close and literal != pattern:
        listed = listed.split(" Did you mean")[0]
        listed += f" Did you mean '{pattern.replace(literal, close[0])}'?"
    return SelectionError(selector, field, f"nothing matches '{pattern}'. {listed}")


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

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        test = test or self.selects
        named = names_of(model)
        found = [name for names in possible(named, self.mechanism, test).values() for name in names]
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
            raise nothing_matched(self, _asked_field(self), self.said(), choices)
        return found

    def hookable(
        self, named: Mapping[nn.Module, Sequence[str]], registry: HookRegistry, tail: str = ""
    ) -> list[nn.Module]:
        """The modules that may be selected, their sites put into the ledger; ids end in `tail`."""
        found = possible(named, self.mechanism, registry.selects)
        for module, names in found.items():
            others = foreign(*(table for key, table in vars(module).items() if key in TABLES))
            # Under its other names it may be called or not: that is seen when it is.
            first = Place(self.mechanism, names[0], module, 0)
            # In a combination others may take the first call of a module.
            call = self.call if self.call and registry.selects(first) is False else 0
            registry.expect(f"{names[0]}#{call}{tail}", foreign=others)
        return list(found)

    def chosen(self, registry: HookRegistry, tail: str = "") -> Chosen:
        """A memory of which calls are selected, and of the ids of their sites."""
        return remembered(self.mechanism, registry, {}, tail)

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
    named: Mapping[nn.Module, Sequence[str]], mechanism: tuple[object, ...], test: PlaceTest
) -> dict[nn.Module, list[str]]:
    """The modules that may be selected, each with the names by which it may be."""
    found = {
        module: [name for name in names if test(Place(mechanism, name, module)) is not False]
        for module, names in named.items()
    }
    return {module: names for module, names in found.items() if names}


def remembered(
    mechanism: tuple[object, ...],
    registry: HookRegistry,
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
            kept = registry.selects(Place(mechanism, name, module, number, whole=True))
            own[call] = f"{name}#{number}{tail}" if kept else None
            if not kept:
                registry.forget(f"{name}#{number}{tail}")
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


class ParamFields(Protocol):
    """The fields that parameters are selected by."""

    @property
    def pattern(self) -> str: ...
    @property
    def types(self) -> Types: ...
    @property
    def depth(self) -> Range | None: ...
    @property
    def index(self) -> Range | None: ...
    @property
    def ndim(self) -> Range | None: ...
    @property
    def size(self) -> Range | None: ...
    @property
    def mechanism(self) -> tuple[object, ...]: ...


@validated
class ParamSelector(Selector):
    """The parameters whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the class of the module it belongs to; `depth`, `index`, `ndim` and
    `size` (its number of entries) are a number or a lowest and a highest.
    """

    pattern: Pattern = "*"
    types: Types = "*"
    depth: Range | None = None
    index: Range | None = None
    ndim: Range | None = None
    size: Range | None = None
    stage: Stage | None = None

    known_before_forward: ClassVar[bool] = True

    def selects(self, place: Place) -> bool | None:
        return place.mechanism == self.mechanism and chooses(self, place)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        return found(self, model, test or self.selects)


def chooses(fields: ParamFields, place: Place) -> bool:
    """Whether a parameter fits the fields, under one of its names."""
    return any(_fits(fields, own) for own in (place, *place.aliases))


def _fits(fields: ParamFields, place: Place) -> bool:
    param = place.thing
    owner = place.name.rpartition(".")[0] or ROOT
    return (
        isinstance(param, Tensor)
        and matches(place.name, fields.pattern)
        and matches_type(place.owner, fields.types)
        and within(depth(owner), fields.depth)
        and within(index(place.name), fields.index)
        and within(param.ndim, fields.ndim)
        and within(param.numel(), fields.size)
    )


def selected_params(
    fields: ParamFields, model: nn.Module, test: PlaceTest
) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter that is kept, once, with all its names."""
    chosen = []
    for param, own in owned_params(model).items():
        first, *others = (
            Place(fields.mechanism, name, param, owner=owner, whole=True) for name, owner in own
        )
        if test(replace(first, aliases=tuple(others))):
            chosen.append((param, [name for name, _ in own]))
    return chosen


def owned_params(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Every parameter with all its names and the module that has it by that name."""
    names: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = own_name(f"{prefix}.{own}" if prefix else own)
            names.setdefault(param, []).append((name, module))
    return names


def found(fields: ParamFields, model: nn.Module, test: PlaceTest) -> list[str]:
    """The first name of each trainable parameter that is kept. Raises LookupError if none is."""
    chosen = selected_params(fields, model, test)
    if not chosen:
        raise nothing_matched(fields, _asked_field(fields), _said(fields), params_of(model))
    if not any(param.requires_grad for param, _ in chosen):
        frozen = ", ".join(names[0] for _, names in chosen)
        raise SelectionError(
            fields, "pattern", f"all that '{fields.pattern}' matches is frozen: {frozen}"
        )
    return [names[0] for param, names in chosen if param.requires_grad]


def _asked_field(fields: Any) -> str:  # Any: a selector of modules or of parameters
    """Return the field that selects, `pattern` if several do."""
    names = ("types", "depth", "index", "ndim", "size")
    asked = [name for name in names if getattr(fields, name, None) not in (None, "*")]
    return asked[0] if len(asked) == 1 and fields.pattern == "*" else "pattern"


def _said(fields: ParamFields) -> str:
    """What was asked for, for an error."""
    asked = {key: getattr(fields, key) for key in ("types", "depth", "index", "ndim", "size")}
    extra = ", ".join(f"{key}={value}" for key, value in asked.items() if value not in (None, "*"))
    return f"{fields.pattern}' with '{extra}" if extra else fields.pattern


def expect_params(
    fields: ParamFields, model: nn.Module, registry: HookRegistry
) -> dict[str, nn.Parameter]:
    """The parameters that are kept, by name, their sites put into the ledger."""
    chosen: dict[str, nn.Parameter] = {}
    for param, (name, *aliases) in selected_params(fields, model, registry.selects):
        skipped = "" if param.requires_grad else "frozen"
        tables = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
        registry.expect(name, aliases, skipped, foreign(*tables))
        if not skipped:
            if autograd.is_sharded(param):
                raise TypeError(
                    f"{type(fields).__name__}: parameter '{name}' is a DTensor, as fully_shard "
                    "makes it: autograd computes with another tensor in its place, and a transform "
                    "would see one shard of it. Use Outputs, Inputs or Nodes."
                )
            chosen[name] = param
    return chosen


def foreign(*tables: object) -> list[str]:
    """The names of the hooks in PyTorch's hook tables that are not gradsurg's own."""
    return [
        f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        for module, hook in _hooks(tables)
        if module.partition(".")[0] != "gradsurg"
    ]


def _hooks(tables: Iterable[object]) -> Iterator[tuple[str, object]]:
    for table in tables:
        for hook in list(table.values()) if isinstance(table, dict) else []:
            hook = getattr(hook, "func", hook)  # of a partial
            yield getattr(hook, "__module__", None) or type(hook).__module__, hook
