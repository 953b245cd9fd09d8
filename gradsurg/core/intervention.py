"""Intervention: a transform or an aggregator, its sites and its trigger."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradsurg.aggregators.base import Aggregator
from gradsurg.core.pitfalls.loss_scale import LossScale
from gradsurg.core.pitfalls.sparse import SparseGradient
from gradsurg.plugins.fields import FieldError, in_short
from gradsurg.plugins.messages import shortened, unknown
from gradsurg.plugins.reductions import reduced_axes
from gradsurg.plugins.registry import snake
from gradsurg.sites.parameters import Parameters
from gradsurg.sites.places import SCALED, Ask, Selector, Stage
from gradsurg.sites.selection import names_of, params_by_name
from gradsurg.transforms.base import (
    SKIPPED,
    Function,
    Need,
    Scope,
    Stateless,
    Transform,
    TransformContext,
    TransformState,
    acts_on_values,
    as_transform,
)
from gradsurg.transforms.chain import Chain, links_of
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import TensorTrigger, Trigger
from gradsurg.triggers.flag import Flag

TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose gradient is sparse if their field `sparse` is True."""

GradCallable = Callable[[Tensor], Tensor]


class Facts(NamedTuple):
    """Facts for hooks about a transform of an intervention, or about a link of its `Chain`."""

    transform: Transform
    apply: Callable[[Tensor, TransformContext], Tensor] | None  # None if it keeps a state
    is_trusted: bool  # whether it is gradsurg's own, whose contract is tested
    keeps_shape: bool  # whether its results need no check after the first one
    refuses_graph: bool  # whether it is known not to be differentiable
    label: str = ""  # known once it is attached

    def chosen(
        self, state: TransformState, before: TransformState, fires: Tensor
    ) -> TransformState:
        """The next state or the one before, chosen by a trigger evaluated on the device."""
        if state.keys() != before.keys():
            raise TypeError(
                f"{self.label}: make all of the state in init() of {self.transform!r}, because the "
                f"trigger may keep it: found {shortened(before) or 'none'}, then {shortened(state)}"
            )
        return {name: torch.where(fires, new, before[name]) for name, new in state.items()}


@dataclass(frozen=True)
class Intervention:
    """A transform (or a plain callable), the sites where it acts and the trigger that says when.

    An aggregator acts at `SharedParameters`: it combines the gradients of several tasks in
    `live.backward(losses)`. They are summed while its trigger does not fire.

    `names` labels the transform, or each link of a `Chain`, in logs. `stage` and all fields after
    it are computed when the intervention is made. `stage` is the selector's, or the default of the
    kind of site for transforms of one gradient or of a group; an aggregator has none. Raises
    ValueError if the transform cannot act at this stage or needs something that the sites do not
    provide.
    """

    transform: Transform | Aggregator | GradCallable
    at: Selector = field(default_factory=Parameters)
    when: Trigger = field(default_factory=Always)
    names: tuple[str, ...] = ()
    stage: Stage = field(init=False, repr=False, compare=False)
    # The `names`, or their defaults.
    link_names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    # The parts of the trigger that are switches, and those that read the batch or a module.
    flags: tuple[Flag, ...] = field(init=False, repr=False, compare=False)
    forward_triggers: tuple[TensorTrigger, ...] = field(init=False, repr=False, compare=False)
    # Whether the trigger reads the gradient, and whether a part of it is a user's.
    reads_gradient: bool = field(init=False, repr=False, compare=False)
    has_own_trigger: bool = field(init=False, repr=False, compare=False)
    # Facts about each link, and the arguments that hooks need besides the gradient (`places.Ask`).
    facts: tuple[Facts, ...] = field(init=False, repr=False, compare=False)
    asks: frozenset[Ask] = field(init=False, repr=False, compare=False)
    # Whether it has to see each forward pass.
    observes: bool = field(init=False, repr=False, compare=False)
    # The selector's `changed_tensors`, such as "gradients".
    changed_tensors: str = field(init=False, repr=False, compare=False)
    # The links that check parameters; the transform or trigger that refuses a sparse gradient.
    checking_links: tuple[Transform, ...] = field(init=False, repr=False, compare=False)
    dense: Transform | Trigger | None = field(init=False, repr=False, compare=False)
    # Whether `check_sites` must look at each site, and `Attachment.check` at anything.
    checks_sites: bool = field(init=False, repr=False, compare=False)
    is_checked_at_attach: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.aggregator is None:
            transform = as_transform(self.transform)
            if not isinstance(transform, Transform):
                kind = transform.__name__ if isinstance(transform, type) else ""
                found = f"the class: write {kind}()" if kind else repr(transform)
                raise TypeError(f"transform: must be a Transform or a callable, found {found}")
            object.__setattr__(self, "transform", transform)
        links, parts = self.links or (self.transform,), self.when.parts
        plain = Transform.check_parameters  # which checks nothing: a link overrides it, or not
        self._check_names(len(links))
        vars(self).update(  # the class is frozen
            link_names=self.names or tuple(snake(type(link).__name__) for link in links),
            flags=tuple(part for part in parts if isinstance(part, Flag)),
            forward_triggers=tuple(
                part for part in parts if isinstance(part, TensorTrigger) and part.reads_forward
            ),
            checking_links=tuple(
                link
                for link in links
                if getattr(type(link), "check_parameters", plain) is not plain
            ),
        )
        if self.aggregator is None:
            self._check_fit()
            self._find_facts()

    def _find_facts(self) -> None:
        """Compute what would otherwise be computed at each attach or gradient."""
        sources = {part.source for part in self.when.parts if isinstance(part, TensorTrigger)}
        # Whether this process's part of a sharded gradient is enough, so that none is gathered.
        takes_parts = not (self.reads_value or "grad" in sources) and all(
            link.acts_on_shards for link in self.links
        )
        asks: dict[Ask, bool] = {
            "value": self.reads_value,
            "storage": not all(map(is_trusted, self.links)),
            "layer": "layer" in self.needs,
            "entering": "entering" in self.needs,
            "gradient": "gradient" in self.needs,
            "skip": "skip" in self.needs,
            "whole": not takes_parts,
        }
        dense = self._dense_part()
        checks_sites = bool(
            self.checking_links
            or "examples" in self.needs
            or any(isinstance(getattr(link, "per", None), str) for link in self.links)
        )
        vars(self).update(
            facts=tuple(map(_facts_of, self.links)),
            observes=bool(self.flags or self.forward_triggers)
            or not self.needs.isdisjoint({"error", "examples"}),
            changed_tensors=self.at.changed_tensors,
            is_checked_at_attach=bool(checks_sites or dense is not None or self.flags),
            asks=frozenset(ask for ask, is_asked in asks.items() if is_asked),
            reads_gradient="grad" in sources,
            dense=dense,
            checks_sites=checks_sites,
            has_own_trigger=any(
                type(part).__module__.partition(".")[0] != "gradsurg" for part in self.when.parts
            ),
        )

    # Cached: they are read at each attach, and the fields never change.

    @cached_property
    def aggregator(self) -> Aggregator | None:
        """The aggregator; None if the intervention has a transform."""
        return self.transform if isinstance(self.transform, Aggregator) else None

    @cached_property
    def operator(self) -> Transform:
        """The `transform`, by a type without aggregators; a plain callable was wrapped in one."""
        assert isinstance(self.transform, Transform)
        return self.transform

    @cached_property
    def links(self) -> tuple[Transform, ...]:
        """The transforms of a `Chain`, in order, each measured by itself, or the transform."""
        if self.aggregator is not None:
            return ()
        return links_of(self.operator)

    @cached_property
    def scope(self) -> Scope:
        """The scope of the transform."""
        return self.operator.scope

    @cached_property
    def needs(self) -> frozenset[Need]:
        """The inputs that the transform requires besides the gradient."""
        return self.operator.needs

    @cached_property
    def reads_value(self) -> bool:
        """Whether the transform or the trigger reads the tensor whose gradient passes."""
        parts = (part for part in self.when.parts if isinstance(part, TensorTrigger))
        return not self.needs.isdisjoint({"value", "layer"}) or any(
            part.source == "value" for part in parts
        )

    @property
    def acts_on_parameters(self) -> bool:
        """Whether all its sites are parameters."""
        return all(isinstance(leaf, Parameters) for leaf in self.at.leaves)

    @property
    def differs_from_sum(self) -> bool:
        """Whether acting on the gradient of each backward pass differs from acting on their sum."""
        properties = self.operator.properties
        match self.stage:
            case "backward" if self.acts_on_parameters:
                return "linear" not in properties
            case "accumulated" | "sent" | "reduced" | "backward_end":
                # The running sum is transformed again after each pass, with its earlier content.
                return not {"linear", "idempotent"} <= properties
            case _:
                return False

    @property
    def differs_from_average(self) -> bool:
        """Whether acting on the gradient of each process differs from acting on their average."""
        early = self.stage in ("backward", "accumulated")
        return early and "linear" not in self.operator.properties and self.acts_on_parameters

    def loss_scale_error(self) -> str:
        """Why a loss scale changes the result, and what to do; empty if it does not."""
        if self.aggregator is not None:
            error = self.aggregator.loss_scale_error()
            return error and f"{error}. Use a precision that needs no loss scale, such as bfloat16."
        if self.stage not in SCALED:
            return ""
        sized: Transform | Trigger | None = None
        # Homogeneous: f(c g) = c f(g), so that unscaling gives the result of the unscaled gradient.
        if "homogeneous" not in self.operator.properties:
            sized = next(link for link in self.links if "homogeneous" not in link.properties)
        else:
            parts = (part for part in self.when.parts if isinstance(part, TensorTrigger))
            sized = next((p for p in parts if p.source == "grad" and not p.homogeneous), None)
        if sized is None:
            return ""
        return LossScale.text("loss scale", transform=in_short(sized))

    def check_loss_scale(self, scaler: torch.amp.GradScaler | None) -> None:
        """Raise ValueError if the scaler is enabled and its loss scale changes the result."""
        if scaler is not None and scaler.is_enabled() and (error := self.loss_scale_error()):
            raise ValueError(error)

    def check_sites(self, model: nn.Module) -> None:
        """Raise ValueError if it cannot act at its sites of the model.

        That is, if the axes of a field `per` do not fit a parameter, a gradient will be sparse, or
        the gradients of single examples are unknown there.
        """
        if self.dense is not None and any(
            isinstance(part, TABLES) and part.sparse for part in names_of(model)
        ):
            self._check_sparse(model, self.dense)
        if not self.checks_sites:
            return
        if "examples" in self.needs:
            _check_examples(model, self.at.find(model))
        pairs = [(link, getattr(link, "per", None)) for link in self.links]
        links = [(link, per) for link, per in pairs if isinstance(per, str)]
        is_used = (links or self.checking_links) and self.acts_on_parameters
        if not is_used:
            return
        params, sites = params_by_name(model), self.at.find(model)
        for link in self.checking_links:
            link.check_parameters({site: params[site] for site in sites})
        for link, per in links:
            for site in sites:
                try:
                    reduced_axes(per, params[site].ndim)
                except ValueError as error:
                    advice = f"as '{site}' is. Select with ndim=, or change the pattern"
                    raise ValueError(f"{type(link).__name__}.{error}, {advice}") from None

    def _dense_part(self) -> Transform | Trigger | None:
        """The transform or trigger that refuses a sparse gradient, None if there is none."""
        if self.at.changed_tensors != "gradients":
            return None
        if not acts_on_values(self.operator):
            return self.operator
        parts = (part for part in self.when.parts if isinstance(part, TensorTrigger))
        return next((part for part in parts if part.source == "grad"), None)

    def _check_sparse(self, model: nn.Module, dense: Transform | Trigger) -> None:
        """Raise ValueError if a gradient will be sparse, which a transform or a trigger refuses.

        A table's gradient is sparse only if all its uses are of modules with sparse=True: PyTorch
        adds a sparse and a dense gradient to a dense one.
        """
        uses: dict[Tensor, bool] = {}  # whether the gradients of all uses are sparse
        for module in model.modules():
            is_sparse = isinstance(module, TABLES) and module.sparse
            for param in module.parameters(recurse=False):
                uses[param] = uses.get(param, True) and is_sparse
        params = params_by_name(model)
        for site in self.at.find(model):
            if site in params and uses[params[site]] and params[site].requires_grad:
                text = SparseGradient.text("sparse gradient", transform=in_short(dense))
                raise ValueError(f"site '{site}': {text}")

    def changed(
        self,
        labels: Sequence[str],
        label: str,
        when: Trigger | None,
        changes: Mapping[str, object],
    ) -> "Intervention":
        """A copy with another trigger, or with `changes` of fields of the link named `label`.

        `labels` name its links. Raises LookupError if `label` names several links, ValueError or
        TypeError for wrong fields, and if the copy would have to be hooked elsewhere.
        """
        if when is None and not changes:
            raise ValueError(f"'{label}': nothing to change was given, no field and no `when`")
        if changes and label not in labels:
            raise LookupError(f"name one link of '{label}': {', '.join(labels)}")
        if when is not None and not isinstance(when, Trigger):
            raise TypeError(f"when: must be a trigger such as Steps(stop=100), found {when!r}")
        transform = self.operator
        if changes:
            links = [
                _replaced(link, label, changes) if name == label else link
                for name, link in zip(labels, self.links, strict=True)
            ]
            transform = Chain(*links) if isinstance(transform, Chain) else links[0]
        new = Intervention(transform, self.at, when or self.when, self.names)
        # Hooks stay registered while a transform is replaced: so must their places.
        if (new.stage, new.scope) != (self.stage, self.scope):
            raise ValueError(
                f"use live.remove('{label}') and live.add(..): it is hooked at '{self.stage}' for "
                f"a {self.scope}, and would act at '{new.stage}' for a {new.scope}"
            )
        return new

    def _check_kinds(self) -> None:
        if not isinstance(self.at, Selector):
            raise TypeError(f"at: must be a selector such as Parameters('*'), found {self.at!r}")
        if not isinstance(self.when, Trigger):
            raise TypeError(f"when: must be a trigger such as Steps(stop=100), found {self.when!r}")
        if self.aggregator is not None:
            self.at.check_aggregator(self.aggregator)
        elif self.at.for_aggregators:
            if isinstance(self.transform, type):
                name = self.transform.__name__
                raise TypeError(f"transform: must be an aggregator, found a class: write {name}()")
            raise ValueError(
                "at: use Parameters, with stage='backward' for the gradient of each task, 'step' "
                f"for the combined one; SharedParameters takes aggregators, not {self.transform!r}"
            )

    def _check_names(self, count: int) -> None:
        if self.names and len(self.names) != count:
            raise ValueError(f"names: must be {count}, one for each link, found {len(self.names)}")
        wrong = [name for name in self.names if not name or "/" in name]
        if wrong:
            raise ValueError(f"names: must not be empty nor hold a '/', found {wrong[0]!r}")

    def _check_fit(self) -> None:
        try:
            object.__setattr__(self, "stage", self.at.resolve(self.scope))
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(_group_link(self), [("", str(error))]) from None
        provided = self.at.provides
        if self.needs - provided:
            link = next(link for link in self.links if link.needs - provided)
            lacks = sorted(link.needs - provided)
            raise FieldError(link, [("", lack(in_short(self.at), lacks[0]))])
        for link in self.links:
            # A wrapper has the needs of the transform inside, but its state has no `SKIPPED`.
            if "skip" in link.needs and SKIPPED not in link.init(torch.zeros(1)):
                text = "use Chain(.., SkipUpdate()): a transform inside another cannot skip steps"
                raise FieldError(link, [("", text)])
        for part in self.when.parts:
            source = part.source if isinstance(part, TensorTrigger) else ""
            if source == "value" and source not in self.at.provides:
                text = (
                    "use 'grad' or 'batch': 'value' is the tensor whose gradient passes, and "
                    f"{type(self.at).__name__} has none"
                )
                raise FieldError(part, [("source", text)])
            if source in ("grad", "value") and self.scope == "group":
                text = (
                    f"use 'batch' or a module: '{source}' is of one gradient, and "
                    f"{type(_group_link(self)).__name__} acts on all of a group at once"
                )
                raise FieldError(part, [("source", text)])


def _check_examples(model: nn.Module, sites: Sequence[str]) -> None:
    """Raise ValueError if a site is a parameter whose gradients of single examples are unknown."""
    for name, module in model.named_modules():
        own = [f"{name}.{param}" if name else param for param, _ in module.named_parameters()]
        refused = [site for site in own if site in sites]
        if refused and isinstance(module, nn.RNNBase):
            raise ValueError(
                f"PerSample: leave out {shortened(refused)}, by the site's pattern: vmap has no "
                f"rule for {type(module).__name__}, so it has no gradients of single examples"
            )


def _facts_of(transform: Transform) -> Facts:
    trusted, properties = is_trusted(transform), transform.properties
    # Whether a user's transform is differentiable need not be declared.
    refuses_graph = trusted and "differentiable" not in properties
    apply = transform.apply if isinstance(transform, Stateless) else None
    return Facts(transform, apply, trusted, "elementwise" in properties, refuses_graph)


def is_trusted(transform: Transform) -> bool:
    """Whether gradsurg defines all parts; results of other transforms are always checked."""
    if isinstance(transform, Function) or type(transform).__module__.split(".")[0] != "gradsurg":
        return False
    # Transforms in its fields, such as the links of a `Chain`, may be a user's.
    values = [value if isinstance(value, tuple) else (value,) for value in vars(transform).values()]
    parts = [part for value in values for part in value if isinstance(part, Transform)]
    return all(is_trusted(part) for part in parts)


LACKS: dict[Need, tuple[str, str]] = {
    "value": ("the value of the tensor", "Parameters, Outputs or Inputs"),
    "entering": ("the gradient that enters the autograd node", "Nodes with side='leave'"),
    "layer": ("the module whose input has the gradient", "Inputs"),
    "gradient": ("the gradient that the optimizer used", "Updates"),
    "product": (
        "the gradient of the input of a matrix product",
        "Nodes with pattern='Addmm' and edge=1, or pattern='Mm' and edge=0",
    ),
    "examples": ("the gradients of the single examples", "Parameters"),
    "skip": ("an optimizer's step that it can skip", "Parameters, stage 'step'"),
    "labels": ("a gradient with an axis of examples", "Outputs or Inputs"),
    "error": ("the gradient of the model's output for the same examples", "Outputs or Inputs"),
}
"""An input that a transform may need besides the gradient, and the sites that have it."""


def lack(place: str, need: Need) -> str:
    """Describe an input that a place does not provide, and name the sites that do."""
    what, sites = LACKS[need]
    return f"use it at {sites}: it needs {what}, which {place} does not provide"


def _group_link(intervention: Intervention) -> Transform:
    """Return the link that acts on a group of gradients, or the whole transform without one."""
    group_links = (link for link in intervention.links if link.scope == "group")
    return next(group_links, intervention.operator)


def labels_of(intervention: Intervention, others: Iterable[Sequence[str]] = ()) -> tuple[str, ...]:
    """A label for every link: its name or its class in snake case, with `_2` if `others` has it."""
    used = {label for labels in others for label in labels}
    labels: list[str] = []
    for name in intervention.link_names:
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        labels.append(next(label for label in numbered if label not in used))
        used.add(labels[-1])
    return tuple(labels)


def _replaced(link: Transform, label: str, changes: Mapping[str, object]) -> Transform:
    known = [field.name for field in fields(link)] if hasattr(link, "__dataclass_fields__") else []  # pyright: ignore[reportArgumentType]
    wrong = [
        (key, unknown(f"there is no field '{key}'", key, known))
        for key in changes
        if key not in known
    ]
    if wrong:
        raise FieldError(label, wrong)
    return replace(link, **changes)  # pyright: ignore[reportArgumentType, reportCallIssue, reportType]
