"""Select modules and parameters by name, class, position and shape."""

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Annotated, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from gradsurg.effects.ledger import OTHER_NAME
from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.plugins.messages import nearest
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, Stage
from gradsurg.torch_internals import autograd

ROOT = "root"  # the name of the model itself
COMPILED = "_orig_mod"  # the attribute under which torch.compile keeps the original module
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OUTSIDE = -1
"""The index of a call that no call of the model contains, so that it has no number."""

SiteIds = Callable[[nn.Module, tuple[str, int]], str | None]
"""Returns the site id of a module's call, given as name and index; None if it is not selected."""


def _check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and an invalid regular expression."""
    if not pattern:
        raise ValueError("must not be empty")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
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

Range = Annotated[int | tuple[int, int], BeforeValidator(_range)]
"""A number or a pair (lowest, highest); stored as a pair."""


@validated
class ModuleSelector(Selector):
    """The modules whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the name of the class or of a base class (or the class itself). `depth`
    is the number of parts of the name: 1 for children of the model, 0 for the model. `index` is the
    last number in the name, as the position in a Sequential. Each is a number or a pair (lowest,
    highest). `call` picks one call, counted from 0 within one call of the model.

    A module with several names can be selected by each; its calls take the names in turn. The model
    itself is `root`, which a pattern must spell out unless the model has no submodules.
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
            and _in_range(_depth(place.name), self.depth)
            and _in_range(_index(place.name), self.index)
        ):
            return False
        if self.call is None:
            return True
        return None if place.call is None else place.call == self.call

    def offers(self, place: Place) -> bool:
        module = place.thing
        if not isinstance(module, nn.Module):
            return False
        # A container such as ModuleList is never called. A class of TorchScript has no forward.
        if getattr(type(module), "forward", None) is nn.Module.forward:
            return False
        return place.name != ROOT or self.pattern == ROOT or not any(module.children())

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        named = names_of(model)
        selected = candidates(named, self.mechanism, test or self.selects)
        if selected:
            return [name for names in selected.values() for name in names]
        by_name = [
            module
            for module, names in named.items()
            if any(matches(name, self.pattern) for name in names)
        ]
        if by_name and not any(matches_type(module, self.types) for module in by_name):
            types = sorted({type(module).__name__ for module in by_name})
            raise nothing_matched(self, "types", str(self.types), types)
        choices = [name for names in named.values() for name in names if name != ROOT]
        raise nothing_matched(self, _selecting_field(self), described(self), choices)

    def expect_modules(
        self, named: Mapping[nn.Module, Sequence[str]], attached: Attached, suffix: str = ""
    ) -> list[nn.Module]:
        """Return the modules that may be selected, after entering their sites into the ledger.

        `suffix` is the end of their site ids.
        """
        selected = candidates(named, self.mechanism, attached.selects)
        for module, names in selected.items():
            tables = (table for key, table in vars(module).items() if key in HOOK_TABLES)
            # Only the first name is certain to be called; the others are entered at their call.
            first = Place(self.mechanism, names[0], module, 0)
            # In a combination another part may select call 0 of the module.
            call = self.call if self.call and attached.selects(first) is False else 0
            counted, skipped = named[module][0], ""
            if names[0] != counted:
                skipped = f"{OTHER_NAME}{counted}, which names its first call"
            site = f"{names[0]}#{call}{suffix}"
            attached.expect(site, skipped=skipped, foreign=foreign_hooks(*tables))
        return list(selected)

    def site_ids(self, attached: Attached, suffix: str = "") -> SiteIds:
        """Return a cached function from the calls of modules to site ids."""
        return site_ids(self.mechanism, attached, {}, suffix)


class ParamFields(Protocol):
    """The fields that select parameters."""

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

    `types` is a pattern on the class of the module that owns the parameter. `depth` and `index`
    describe the name of that module as for `ModuleSelector`, `ndim` and `size` (the number of
    entries) the parameter; each is a number, or a pair (lowest, highest).
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
        return place.mechanism == self.mechanism and fits_param(self, place)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        selected = selected_params(self, model, test or self.selects)
        if not selected:
            choices = params_of(model)
            raise nothing_matched(self, _selecting_field(self), described(self), choices)
        trainable = [names[0] for param, names in selected if param.requires_grad]
        may_wait = "step" in self.stages and self.stage in (None, "step")
        if not trainable and not may_wait:
            raise all_frozen(self, [names[0] for _, names in selected])
        return trainable


def expect_params(
    fields: ParamFields, model: nn.Module, attached: Attached, takes_shards: bool = False
) -> dict[str, nn.Parameter]:
    """Return the selected trainable parameters by name, after entering them into the ledger.

    Raises TypeError for a parameter that is sharded, unless the caller `takes_shards`.
    """
    params: dict[str, nn.Parameter] = {}
    for param, (name, *aliases) in selected_params(fields, model, attached.selects):
        tables = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
        skipped = "" if param.requires_grad else "frozen"
        attached.expect(name, aliases, skipped, foreign_hooks(*tables) if any(tables) else ())
        if skipped:
            continue
        if not takes_shards and type(param) is not nn.Parameter and autograd.is_sharded(param):
            raise TypeError(
                f"{type(fields).__name__}: parameter '{name}' is a DTensor, as fully_shard "
                "makes it: autograd computes with another tensor in its place, and hooks of this "
                "one do not run. Use Parameters with stage='step' or stage='accumulated' for the "
                "averaged gradient, or Outputs, Inputs or Nodes."
            )
        params[name] = param
    if any(map(is_parametrized, model.modules())):
        _note_parametrized(fields, model, attached, params)
    return params


def _note_parametrized(
    fields: ParamFields, model: nn.Module, attached: Attached, params: Mapping[str, object]
) -> None:
    """Tell of weights that fit by their usual name and have other parameters behind them."""
    for prefix, module in model.named_modules():
        if not is_parametrized(module):
            continue
        of_tensor = module.parametrizations
        assert isinstance(of_tensor, nn.ModuleDict)
        for tensor, parametrization in of_tensor.items():
            name = f"{prefix}.{tensor}".lstrip(".")
            behind = {
                f"{prefix}.parametrizations.{tensor}.{key}".lstrip("."): param
                for key, param in parametrization.named_parameters(recurse=False)
            }
            places = [Place(fields.mechanism, name, one, owner=module) for one in behind.values()]
            if not {*behind} & {*params} and any(map(attached.selects, places)):
                attached.note(
                    f"'{name}' is parametrized and not selected: its parameters are "
                    f"{', '.join(behind)}"
                )


def selected_params(
    fields: ParamFields, model: nn.Module, test: PlaceTest
) -> list[tuple[nn.Parameter, list[str]]]:
    """Return each selected parameter once, frozen ones too, with all its names."""
    selected = []
    for param, owners in owned_params(model).items():
        first, *others = (
            Place(fields.mechanism, name, param, owner=owner, whole=True) for name, owner in owners
        )
        if test(replace(first, aliases=tuple(others)) if others else first):
            selected.append((param, [name for name, _ in owners]))
    return selected


def fits_param(fields: ParamFields, place: Place) -> bool:
    """Return whether a parameter fits the fields under one of its names."""
    param = place.thing
    if not isinstance(param, Tensor):
        return False
    for named in (place, *place.aliases):
        if (
            (fields.pattern == "*" or matches(named.name, fields.pattern))
            and (fields.types == "*" or matches_type(named.owner, fields.types))
            and (fields.depth is None or _in_range(_depth(_owner_name(named.name)), fields.depth))
            and (fields.index is None or _in_range(_index(named.name), fields.index))
            and (fields.ndim is None or _in_range(param.ndim, fields.ndim))
            and (fields.size is None or _in_range(param.numel(), fields.size))
        ):
            return True
    return False


def candidates(
    named: Mapping[nn.Module, Sequence[str]], mechanism: tuple[object, ...], test: PlaceTest
) -> dict[nn.Module, list[str]]:
    """Return the modules that may be selected, each with the names by which it may be."""
    selected = {
        module: [name for name in names if test(Place(mechanism, name, module)) is not False]
        for module, names in named.items()
    }
    return {module: names for module, names in selected.items() if names}


def site_ids(
    mechanism: tuple[object, ...],
    attached: Attached,
    known: MutableMapping[nn.Module, dict[tuple[str, int], str | None]],
    suffix: str = "",
) -> SiteIds:
    """Return a function from the calls of modules to site ids, cached in `known`."""

    def site_id(module: nn.Module, call: tuple[str, int]) -> str | None:
        calls = known.get(module)
        if calls is None:
            calls = known[module] = {}
        if call not in calls:
            name, number = call
            counted = None if number == OUTSIDE else number
            selected = attached.selects(Place(mechanism, name, module, counted, whole=True))
            number = counted or 0
            if selected is None:
                raise unnumbered(name)
            calls[call] = f"{name}#{number}{suffix}" if selected else None
            if not selected:
                attached.forget(f"{name}#{number}{suffix}")
        return calls[call]

    return site_id


def unnumbered(name: str) -> RuntimeError:
    """Return the error for a selection by call number of a module called by itself."""
    return RuntimeError(
        f"'{name}' is called, but not the model that is attached, so that calls cannot be "
        "numbered: leave out call=, or attach to the module that is called"
    )


WRAPPERS: "WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]]" = WeakKeyDictionary()
"""The DistributedDataParallel around a model."""


def inner_model(model: nn.Module) -> nn.Module:
    """The model in a compiled one and in a DistributedDataParallel, whose names are used."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return model
    WRAPPERS[model.module] = ref(model)
    return model.module


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module with all its names; the model itself is `root`.

    The wrapper that torch.compile puts around a module is left out.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if COMPILED not in module._modules:
            names.setdefault(module, []).append(uncompiled_name(name) or ROOT)
    return names


def params_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {uncompiled_name(name): param for name, param in named}


def owned_params(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """Return every parameter with all its names and the module that owns it under each."""
    names: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            full = uncompiled_name(name) if COMPILED in name else name
            names.setdefault(param, []).append((full, module))
    return names


def uncompiled_name(name: str) -> str:
    """Return the name of a module or parameter without the parts added by torch.compile."""
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def matches(name: str, pattern: str) -> bool:
    """Return whether a name fits a glob (`layer1.*`; `*` also crosses dots) or `re:` and a regular
    expression for the full name.
    """
    if pattern == "*":
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def matches_type(module: nn.Module | None, types: Types) -> bool:
    """Return whether the class of a module, or a base of it below nn.Module, fits the pattern."""
    if types == "*":
        return True
    pattern = _type_name(types)
    bases = [base for base in type(module).__mro__ if base not in nn.Module.__mro__]
    return any(matches(base.__name__, pattern) for base in bases)


def foreign_hooks(*tables: object) -> list[str]:
    """Return the names of the hooks in PyTorch's hook tables that gradsurg did not register."""
    hooks = [hook for table in tables if isinstance(table, dict) for hook in list(table.values())]
    names = []
    for hook in hooks:
        hook = getattr(hook, "func", hook)  # of a partial
        module = getattr(hook, "__module__", None) or type(hook).__module__
        if module.partition(".")[0] != "gradsurg":
            names.append(f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}")
    return names


def nothing_matched(
    selector: object, field: str, pattern: str, names: Iterable[str]
) -> SelectionError:
    """Return the error for a selector whose `field` matches none of `names`, which it lists."""
    choices = list(names)
    # The literal part of a glob such as 'hiden.*' is compared with the parts of the names.
    literal = pattern.removeprefix("re:").strip("*.")
    paths = [name.split(".") for name in choices]
    parts = {
        ".".join(path[i:j]) for path in paths for i, j in combinations(range(len(path) + 1), 2)
    }
    close = get_close_matches(literal, sorted(parts), n=5, cutoff=0.6)
    offers = [pattern.replace(literal, part) for part in close] if literal != pattern else []
    offers = [offer for offer in offers if any(matches(name, offer) for name in choices)]
    listed = nearest(pattern, choices)
    if offers:
        listed = f"{listed.split(' Did you mean')[0]} Did you mean '{offers[0]}'?"
    return SelectionError(selector, field, f"nothing matches '{pattern}'. {listed}")


def all_frozen(fields: ParamFields, names: Iterable[str]) -> SelectionError:
    """Return the error for a selector that selects frozen parameters alone, with their names."""
    text = f"all that '{fields.pattern}' matches is frozen: {', '.join(names)}"
    return SelectionError(fields, "pattern", text)


def described(selector: Any) -> str:  # Any: a selector of modules or of parameters
    """Return the pattern and the other selecting fields, for an error that quotes the pattern."""
    extra = ", ".join(f"{name}={getattr(selector, name)}" for name in _asked(selector))
    return f"{selector.pattern}' with '{extra}" if extra else selector.pattern


def _selecting_field(selector: Any) -> str:  # Any: a selector of modules or of parameters
    """Return the only field that selects; `pattern` if several do."""
    asked = _asked(selector)
    return asked[0] if len(asked) == 1 and selector.pattern == "*" else "pattern"


def _asked(selector: Any) -> list[str]:
    """Return the names of the fields besides the pattern that are not at their default."""
    names = ("types", "depth", "index", "ndim", "size")
    return [name for name in names if getattr(selector, name, None) not in (None, "*")]


def _owner_name(param: str) -> str:
    return param.rpartition(".")[0] or ROOT


def _depth(name: str) -> int:
    return 0 if name == ROOT else len(name.split("."))


def _index(name: str) -> int | None:
    """Return the number in the last numeric part of a name."""
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[-1]) if numbers else None


def _in_range(number: int | None, bounds: Range | None) -> bool:
    if bounds is None or number is None:
        return bounds is None
    low, high = _range(bounds)
    return low <= number <= high
