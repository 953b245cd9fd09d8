"""Selecting parameters by name, by their module, by their shape."""

from dataclasses import replace
from typing import ClassVar, Protocol

from torch import Tensor, nn

from gradsurg.plugins.fields import SelectionError, validated
from gradsurg.sites._foreign import foreign
from gradsurg.sites._modules import ROOT, Range, depth, index, own_name, params_of, within
from gradsurg.sites._patterns import Pattern, Types, matches, matches_type, nothing_matched
from gradsurg.sites.base import HookRegistry, Keeps, Place, Selector, Stage
from gradsurg.torch_internals import autograd


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

    known_at_once: ClassVar[bool] = True

    def selects(self, place: Place) -> bool | None:
        return place.mechanism == self.mechanism and chooses(self, place)

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        return found(self, model, keeps or self.selects)


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


def selected(
    fields: ParamFields, model: nn.Module, keeps: Keeps
) -> list[tuple[nn.Parameter, list[str]]]:
    """Each parameter that is kept, once, with all its names."""
    chosen = []
    for param, own in owned_params(model).items():
        first, *others = (
            Place(fields.mechanism, name, param, owner=owner, whole=True) for name, owner in own
        )
        if keeps(replace(first, aliases=tuple(others))):
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


def found(fields: ParamFields, model: nn.Module, keeps: Keeps) -> list[str]:
    """The first name of each trainable parameter that is kept. Raises LookupError if none is."""
    chosen = selected(fields, model, keeps)
    if not chosen:
        raise nothing_matched(fields, _asked_field(fields), _said(fields), params_of(model))
    if not any(param.requires_grad for param, _ in chosen):
        frozen = ", ".join(names[0] for _, names in chosen)
        raise SelectionError(
            fields, "pattern", f"all that '{fields.pattern}' matches is frozen: {frozen}"
        )
    return [names[0] for param, names in chosen if param.requires_grad]


def _asked_field(fields: ParamFields) -> str:
    """Return the field that selects, `pattern` if several do."""
    names = ("types", "depth", "index", "ndim", "size")
    asked = [name for name in names if getattr(fields, name) not in (None, "*")]
    return asked[0] if len(asked) == 1 and fields.pattern == "*" else "pattern"


def _said(fields: ParamFields) -> str:
    """What was asked for, for an error."""
    asked = {key: getattr(fields, key) for key in ("types", "depth", "index", "ndim", "size")}
    extra = ", ".join(f"{key}={value}" for key, value in asked.items() if value not in (None, "*"))
    return f"{fields.pattern}' with '{extra}" if extra else fields.pattern


def expected(fields: ParamFields, model: nn.Module, gates: HookRegistry) -> dict[str, nn.Parameter]:
    """The parameters that are kept, by name, their sites put into the ledger."""
    chosen: dict[str, nn.Parameter] = {}
    for param, (name, *aliases) in selected(fields, model, gates.keeps):
        skipped = "" if param.requires_grad else "frozen"
        tables = param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)
        gates.expect(name, aliases, skipped, foreign(*tables))
        if not skipped:
            if autograd.is_sharded(param):
                raise TypeError(
                    f"{type(fields).__name__}: parameter '{name}' is a DTensor, as fully_shard "
                    "makes it: autograd computes with another tensor in its place, and a transform "
                    "would see one shard of it. Use Outputs, Inputs or Nodes."
                )
            chosen[name] = param
    return chosen
