"""Select modules and parameters by name, class, position and shape."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import translate
from functools import lru_cache, wraps
from itertools import combinations
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from gradsurg.effects.ledger import OTHER_NAME
from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, Stage
from gradsurg.sites.combined import Selection
from gradsurg.sites.contexts import refusal
from gradsurg.torch_internals import autograd, compiling
from gradsurg.torch_internals.hook_tables import call_tables, foreign_hooks, tensor_tables

T = TypeVar("T")

ROOT = "root"  # the name of the model itself
COMPILED = "_orig_mod"  # the attribute under which torch.compile keeps the original module

OUTSIDE = -1
"""Stands for the number of a call made outside of the forward of the attached model."""

TRACED = (
    "torch.jit.trace has recorded the model, and traced code runs no hooks of modules and nodes: "
    "train the model itself, or attach to the traced one at Parameters"
)

SiteIds = Callable[[nn.Module, tuple[str, int]], str | None]
"""Returns the site id of a module's call, given as name and index; None if it is not selected."""


def _check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and an invalid regular expression."""
    if not pattern:
        raise ValueError("must not be empty")
    try:
        _matcher(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


def _type_name(given: Any) -> str:  # Any: not validated yet
    if not isinstance(given, str | type):
        raise ValueError("must be a string or a class")
    return _check_pattern(given.__name__ if isinstance(given, type) else given)


def _range(given: Any) -> tuple[int, int]:  # Any: not validated yet
    bounds = (given, given) if type(given) is int else given
    match bounds:
        case [int(low), int(high)] if 0 <= low <= high and bool not in map(type, bounds):
            return low, high
        case _:
            raise ValueError("must be a number >= 0 or two of them, low and high")


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A pattern on names: a glob or `re:` and a regular expression (see `matches`)."""

Types = Annotated[str | type[Any], BeforeValidator(_type_name)]
"""A pattern on the name of a class or of one of its bases; a class stands for its name."""


class Patterned(Protocol):
    """A selector with a pattern on names."""

    @property
    def pattern(self) -> str: ...


Range = Annotated[int | tuple[int, int], BeforeValidator(_range)]
"""A number or a pair (lowest, highest); stored as a pair."""


@validated
class NamedSelector(Selector):
    """The modules or parameters whose name fits `pattern`; base of the kinds that hook them.

    A parameter has the class and the depth of the module that owns it.
    """

    pattern: Pattern = "*"
    types: Types = "*"
    depth: Range | None = None
    index: Range | None = None

    @property
    def name_patterns(self) -> frozenset[str]:
        return frozenset({self.pattern})

    def fits(self, place: Place) -> bool:
        """Return whether a module, or a parameter by one of its names, fits the fields."""
        thing = place.thing
        if isinstance(thing, Tensor):
            ndim, size = getattr(self, "ndim", None), getattr(self, "size", None)
            if ndim is not None and not in_range(thing.ndim, ndim):
                return False
            if size is not None and not in_range(thing.numel(), size):
                return False
        for named in (place, *place.aliases):
            name, module, around = named.name, named.owner, named.name.rpartition(".")[0] or ROOT
            if isinstance(thing, nn.Module):
                module, around = thing, name
            if (
                (self.pattern == "*" or matches(name, self.pattern))
                and (self.types == "*" or matches_type(module, self.types))
                and (self.depth is None or in_range(depth_of(around), self.depth))
                and (self.index is None or in_range(index_of(name), self.index))
            ):
                return True
        return False

    def nothing_found(self, choices: Iterable[str], reason: str = "") -> SelectionError:
        """Return the error for fields that select none of the choices, for a known reason."""
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

    def selects(self, place: Place) -> bool | None:
        is_module = place.mechanism == self.mechanism and isinstance(place.thing, nn.Module)
        if not (is_module and self.fits(place) and self.offers(place)):
            return False
        if self.call is None:
            return True
        return None if place.call is None else place.call == self.call

    def offers(self, place: Place) -> bool:
        module = place.thing
        if not isinstance(module, nn.Module) or is_container(module):
            return False
        return place.name != ROOT or self.pattern == ROOT or not any(module.children())

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        named = names_of(model)
        selected = candidates(named, self.mechanism, test or Selection(self))
        if selected:
            return [name for names in selected.values() for name in names]
        fitting = {
            module: names
            for module, names in named.items()
            if any(matches(name, self.pattern) for name in names)
        }
        reason = why_not_called(model, fitting)
        if fitting and not any(matches_type(module, self.types) for module in fitting):
            types = sorted({type(module).__name__ for module in fitting})
            raise nothing_matched(self, "types", str(self.types), types, reason)
        choices = [name for names in named.values() for name in names if name != ROOT]
        raise self.nothing_found(choices, reason)

    def expect_modules(
        self, named: Mapping[nn.Module, Sequence[str]], attached: Attached, suffix: str = ""
    ) -> list[nn.Module]:
        """Return the modules that may be selected, after entering their sites into the ledger.

        `suffix` is the end of their site ids.
        """
        selected = candidates(named, self.mechanism, attached.selects)
        for module, (name, *_) in selected.items():
            # Only the first of its names is sure to be used; a call enters the others.
            first = Place(self.mechanism, name, module, 0)
            # Call 0 is expected, unless nothing selects it and `call` asks for a later one.
            call = self.call if self.call and attached.selects(first) is False else 0
            counted = named[module][0]
            skipped = (
                "" if name == counted else f"{OTHER_NAME}{counted}, which names its first call"
            )
            foreign = foreign_hooks(*call_tables(module))
            attached.expect(f"{name}#{call}{suffix}", skipped=skipped, foreign=foreign)
        return list(selected)

    def site_ids(
        self, attached: Attached, suffix: str = "", undecided: dict[str, Place] | None = None
    ) -> SiteIds:
        """Return a cached function from the calls of modules to site ids."""
        return site_ids(self.mechanism, attached, {}, suffix, undecided)


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

    known_before_forward: ClassVar[bool] = True

    def selects(self, place: Place) -> bool | None:
        is_param = place.mechanism == self.mechanism and isinstance(place.thing, Tensor)
        return is_param and self.fits(place)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        selected = selected_params(self, model, test or Selection(self))
        if not selected:
            raise self.nothing_found(params_of(model))
        trainable = [names[0] for param, names in selected if param.requires_grad]
        may_wait = "step" in self.stages and self.stage in (None, "step")
        if not trainable and not may_wait:
            raise all_frozen(self, [names[0] for _, names in selected])
        return trainable


def fits_param(fields: NamedSelector, place: Place) -> bool:
    """Return whether the place is a parameter that fits the fields under one of its names."""
    return isinstance(place.thing, Tensor) and fields.fits(place)


def expect_params(
    fields: NamedSelector, model: nn.Module, attached: Attached, takes_shards: bool = False
) -> dict[str, nn.Parameter]:
    """Return the selected trainable parameters by name, after entering them into the ledger.

    Raises TypeError for a parameter that is sharded, unless the caller `takes_shards`.
    """
    params: dict[str, nn.Parameter] = {}
    for param, (name, *aliases) in selected_params(fields, model, attached.selects):
        skipped = "" if param.requires_grad else "frozen"
        tables = tensor_tables(param)
        attached.expect(name, aliases, skipped, foreign_hooks(*tables) if tables else ())
        if skipped:
            continue
        if not takes_shards and type(param) is not nn.Parameter and autograd.is_sharded(param):
            raise refusal(fields, "FSDP2", name, attached.stage)
        params[name] = param
    for name, owner, behind in _parametrized(model):
        places = [Place(fields.mechanism, name, param, owner=owner) for param in behind.values()]
        if behind.keys().isdisjoint(params) and any(map(attached.selects, places)):
            attached.note(
                f"'{name}' is parametrized and not selected: its parameters are {', '.join(behind)}"
            )
    return params


def selected_params(
    fields: NamedSelector, model: nn.Module, test: PlaceTest
) -> list[tuple[nn.Parameter, list[str]]]:
    """Return each selected parameter once, frozen ones too, with all its names."""
    owned, numbered, selected = owned_params(model), _by_name(model), []
    mechanism = fields.mechanism
    # By position: a tied parameter once, and all in the order of the model.
    by_position = dict(numbered[name] for name in filter(_may_fit(test), numbered))
    for _, param in sorted(by_position.items(), key=itemgetter(0)):
        first, *others = (
            Place(mechanism, name, param, owner=owner, whole=True) for name, owner in owned[param]
        )
        if test(replace(first, aliases=tuple(others)) if others else first):
            selected.append((param, [name for name, _ in owned[param]]))
    return selected


def candidates(
    named: Mapping[nn.Module, Sequence[str]], mechanism: tuple[object, ...], test: PlaceTest
) -> dict[nn.Module, list[str]]:
    """Return the modules that may be selected, each with the names by which it may be."""
    may_fit = _may_fit(test)
    selected: dict[nn.Module, list[str]] = {}
    for module, names in named.items():
        for name in filter(may_fit, names):
            if test(Place(mechanism, name, module)) is not False:
                selected.setdefault(module, []).append(name)
    return selected


def _may_fit(test: PlaceTest) -> Callable[[str], object]:
    """Return a cheap first filter on names: it may let through too many, never too few."""
    patterns = test.selector.name_patterns if isinstance(test, Selection) else {"*"}
    if "*" in patterns:
        return bool  # all of them, as no name is empty
    first, *others = map(_matcher, patterns)
    return (lambda name: any(fits(name) for fits in (first, *others))) if others else first


def site_ids(
    mechanism: tuple[object, ...],
    attached: Attached,
    known: MutableMapping[nn.Module, dict[tuple[str, int], str | None]],
    suffix: str = "",
    undecided: dict[str, Place] | None = None,
) -> SiteIds:
    """Return a function that gives the site id of a call of a module, None if not selected.

    Calls of which items may be selected are put into `undecided`, by site id.
    It keeps its answers in `known`. The first time it sees a call it updates the ledger.
    """

    def site_id(module: nn.Module, call: tuple[str, int]) -> str | None:
        calls = known.setdefault(module, {})
        if call not in calls:
            name, number = call
            counted = None if number == OUTSIDE else number
            place = Place(mechanism, name, module, counted, whole=True)
            selected = attached.selects(place)
            site = f"{name}#{counted or 0}{suffix}"
            if selected is None and undecided is None:
                raise unnumbered(name)
            if selected is None and undecided is not None:
                undecided[site] = place
            calls[call] = None if selected is False else site
            if selected is False:
                attached.forget(site)
            elif compiling.in_jit_trace():
                attached.note(TRACED)
        return calls[call]

    return site_id


def unnumbered(name: str) -> RuntimeError:
    """Return the error for a selection by call number of a module called by itself."""
    return RuntimeError(
        f"'{name}' is called, but not the model that is attached, so that calls cannot be "
        "numbered: leave out call=, or attach to the module that is called"
    )


_tables: ContextVar[tuple[nn.Module, dict[object, Any]] | None] = ContextVar(
    "_tables", default=None
)
"""The model of `one_scan`, and the results of `scanned` functions. Any: each its own type."""


@contextmanager
def one_scan(model: nn.Module) -> Iterator[None]:
    """Keep in the block the results of `scanned` functions; the model must not change there."""
    token = _tables.set((model, {}))
    try:
        yield
    finally:
        _tables.reset(token)


def scanned(function: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
    """Decorate a function of a model: inside `one_scan` its result is kept, and shared."""

    @wraps(function, updated=())
    def shared(model: nn.Module) -> T:
        held = _tables.get()
        if held is None or held[0] is not model:
            return function(model)
        if function not in held[1]:
            held[1][function] = function(model)
        return held[1][function]

    return shared


WRAPPERS: "WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]]" = WeakKeyDictionary()
"""The DistributedDataParallel around a model."""


def inner_model(model: nn.Module) -> nn.Module:
    """The model in a compiled one and in a DistributedDataParallel, whose names are used."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return model
    WRAPPERS[model.module] = ref(model)
    return model.module


@scanned
def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all its names; the model itself is `root`. Not to be changed.

    The wrapper that torch.compile puts around a module is left out.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not compiling.is_wrapper(module):
            full = uncompiled_name(name) if COMPILED in name else name
            names.setdefault(module, []).append(full or ROOT)
    return names


@scanned
def params_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under each of its names. Not to be changed."""
    named = model.named_parameters(remove_duplicate=False)
    return {uncompiled_name(name): param for name, param in named}


@scanned
def owned_params(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Return every parameter with all its names and the module that owns it under each."""
    names: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            full = uncompiled_name(name) if COMPILED in name else name
            names.setdefault(param, []).append((full, module))
    return names


@scanned
def _by_name(model: nn.Module) -> dict[str, tuple[int, nn.Parameter]]:
    """Return the position in `owned_params` and the parameter with each name."""
    owned = owned_params(model).items()
    return {name: (i, param) for i, (param, owners) in enumerate(owned) for name, _ in owners}


@scanned
def _parametrized(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Return each parametrized tensor by its usual name, its module and its parameters."""
    found = []
    for prefix, module in model.named_modules():
        of_tensor = getattr(module, "parametrizations", None) if is_parametrized(module) else None
        for tensor, parametrization in of_tensor.items() if of_tensor else ():
            inside = f"{prefix}.parametrizations.{tensor}".lstrip(".")
            behind = dict(parametrization.named_parameters(inside, recurse=False))
            found.append((f"{prefix}.{tensor}".lstrip("."), module, behind))
    return found


def uncompiled_name(name: str) -> str:
    """Return the name of a module or parameter without the parts added by torch.compile."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> Callable[[str], object]:
    """Return the compiled test of a pattern on full names."""
    is_regular = pattern.startswith("re:")
    return re.compile(pattern[3:] if is_regular else translate(pattern)).fullmatch


def matches(name: str, pattern: str) -> bool:
    """Return whether a name fits a glob (`layer1.*`; `*` also crosses dots) or `re:` and a regular
    expression for the full name.
    """
    return pattern == "*" or _matcher(pattern)(name) is not None


def matches_type(module: nn.Module | None, types: Types) -> bool:
    """Return whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if types == "*":
        return True
    pattern = _type_name(types)
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def is_container(module: nn.Module) -> bool:
    """Return whether a module, such as a ModuleList, has no forward and so is never called."""
    return getattr(type(module), "forward", None) is nn.Module.forward  # TorchScript has none


def nothing_matched(
    selector: object, field: str, pattern: str, names: Iterable[str], reason: str = ""
) -> SelectionError:
    """Return the error for a selector whose `field` matches none of `names`, which it lists.

    A known `reason`, a sentence, takes the place of the nearest name.
    """
    choices = list(names)
    # The literal part of a glob such as 'hiden.*' is compared with the parts of the names.
    literal = pattern.removeprefix("re:").strip("*.")
    paths = [name.split(".") for name in choices]
    parts = {
        ".".join(path[i:j]) for path in paths for i, j in combinations(range(len(path) + 1), 2)
    }
    close = get_close_matches(literal, sorted(parts - {literal}), n=5, cutoff=0.6)
    offers = [pattern.replace(literal, part) for part in close] if literal != pattern else []
    offers = [offer for offer in offers if any(matches(name, offer) for name in choices)]
    if reason:
        listed = f"{reason} {nearest('', choices)}"
    else:
        listed = nearest("" if pattern in choices else pattern, choices, offers[:1])
    found = "nothing that is called matches" if reason else "nothing matches"
    return SelectionError(selector, field, f"{found} '{pattern}'. {listed}")


def why_not_called(model: nn.Module, fitting: Mapping[nn.Module, Sequence[str]]) -> str:
    """Return why modules that fit by name are never called, as a sentence; else empty."""
    holders = [names[0] for module, names in fitting.items() if type(module) is nn.Module]
    if holders and any(matches_type(part, "GraphModule") for part in names_of(model)):
        return (
            "The model is a GraphModule, as torch.export makes it: its operations are nodes of one "
            f"forward, and '{holders[0]}' only holds parameters. Use Nodes or Parameters."
        )
    if not fitting or not all(map(is_container, fitting)):
        return ""
    module, (name, *_) = next(iter(fitting.items()))
    kind = type(module).__name__
    return f"'{name}' is in the model and never called: {kind} has no forward of its own."


def all_frozen(fields: Patterned, names: Iterable[str]) -> SelectionError:
    """Return the error for a selector that selects frozen parameters alone, with their names."""
    text = f"all that '{fields.pattern}' matches is frozen: {', '.join(names)}"
    return SelectionError(fields, "pattern", text)


def described(selector: Patterned) -> str:
    """Return the pattern and the other selecting fields, for an error that quotes the pattern."""
    extra = ", ".join(f"{name}={getattr(selector, name)}" for name in asked_of(selector))
    return f"{selector.pattern}' with '{extra}" if extra else selector.pattern


def asked_of(selector: object) -> list[str]:
    """Return the names of the fields besides the pattern that are not at their default."""
    names = ("types", "depth", "index", "ndim", "size")
    return [name for name in names if getattr(selector, name, None) not in (None, "*")]


def depth_of(name: str) -> int:
    return 0 if name == ROOT else name.count(".") + 1


def index_of(name: str) -> int | None:
    """Return the number in the last numeric part of a name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else None


def in_range(number: int | None, bounds: Range | None) -> bool:
    if bounds is None or number is None:
        return bounds is None
    low, high = _range(bounds)
    return low <= number <= high
