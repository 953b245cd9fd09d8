"""What, where and when: an intervention."""

import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import chain, count

import torch
from torch import Tensor, nn

from gradsurg.aggregators.base import Aggregator
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.per import reduced_axes
from gradsurg.plugins.registry import snake
from gradsurg.sites.base import SCALED, Selector, Stage
from gradsurg.sites.parameters import Parameters
from gradsurg.sites.selection import params_of
from gradsurg.transforms.base import FunctionTransform, Need, Transform, as_transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import TensorTrigger, Trigger

GradCallable = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Intervention:
    """What, where and when: a transform (or a plain callable) at the sites of a selector.

    Or an aggregator at `SharedParameters`, which makes one gradient of those of several tasks, in
    `live.backward(losses)`. While its trigger does not fire they get their sum.

    `names` labels the transform, or each link of a `Chain`, in logs. Raises ValueError if the
    transform cannot act at the selector's stage or needs what the sites do not have.
    """

    transform: Transform | Aggregator | GradCallable
    at: Selector = field(default_factory=Parameters)
    when: Trigger = field(default_factory=Always)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.aggregator is not None:
            self._check_names(1)
            return
        transform = as_transform(self.transform)
        if not isinstance(transform, Transform):
            hint = f": did you mean {transform.__name__}()?" if isinstance(transform, type) else ""
            raise TypeError(
                f"transform: must be a Transform or a callable, found {transform!r}{hint}"
            )
        object.__setattr__(self, "transform", transform)
        self._check_names(len(self.links))
        self._check_fit()
        for link in self.links:
            if isinstance(link, FunctionTransform):
                warnings.warn(
                    f"{link!r} is a plain callable: nothing is known of its properties, so a stage that "
                    "changes its meaning cannot be told",
                    SurgeryWarning,
                    stacklevel=3,
                )

    @property
    def aggregator(self) -> Aggregator | None:
        """The aggregator, if it is one and not a transform."""
        return self.transform if isinstance(self.transform, Aggregator) else None

    @property
    def operator(self) -> Transform:
        """The transform; a plain callable has become one."""
        assert isinstance(self.transform, Transform)
        return self.transform

    @property
    def links(self) -> tuple[Transform, ...]:
        """The transforms that act one after the other, each measured by itself."""
        if self.aggregator is not None:
            return ()
        operator = self.operator
        return operator.links if isinstance(operator, Chain) else (operator,)

    @property
    def stage(self) -> Stage:
        """The moment at which it acts."""
        return self.at.resolve(self.operator.scope)

    def _check_kinds(self) -> None:
        if not isinstance(self.at, Selector):
            raise TypeError(
                f"at: must be a selector of sites, as Parameters('*'), found {self.at!r}"
            )
        if not isinstance(self.when, Trigger):
            raise TypeError(f"when: must be a trigger, as Steps(stop=100), found {self.when!r}")
        if self.aggregator is not None:
            self.at.check_aggregator(self.aggregator)
        elif self.at.for_aggregators:
            if isinstance(self.transform, type):
                hint = f"{self.transform.__name__}()"
                raise TypeError(
                    f"transform: must be an aggregator, found a class: did you mean {hint}?"
                )
            raise ValueError(
                "at: SharedParameters is for aggregators, as those that derive from Weighting of "
                f"gradsurg.aggregators.base, found {self.transform!r}; Parameters "
                "with stage='backward' has the gradient of each task, stage='step' what was made "
                "of them"
            )

    def _check_names(self, count: int) -> None:
        if self.names and len(self.names) != count:
            raise ValueError(f"names: {count} links, found {len(self.names)} names")
        wrong = [name for name in self.names if not name or "/" in name]
        if wrong:
            raise ValueError(f"names: must not be empty nor hold a '/', found {wrong[0]!r}")

    def _check_fit(self) -> None:
        try:
            _ = self.stage
        except FieldError:
            raise
        except ValueError as error:
            raise FieldError(_group_link(self), [("", str(error))]) from None
        for link in self.links:
            if lacks := sorted(link.needs - self.at.provides):
                raise FieldError(link, [("", f"needs {_lack(self.at, lacks[0])}")])
        for part in self.when.parts:
            source = part.source if isinstance(part, TensorTrigger) else ""
            if source == "value" and source not in self.at.provides:
                text = (
                    "source 'value' is the tensor whose gradient passes, and "
                    f"{type(self.at).__name__} has none; it can look at 'grad' or the 'batch'"
                )
                raise FieldError(part, [("source", text)])
            if source in ("grad", "value") and self.operator.scope == "group":
                text = (
                    f"looks at one gradient, and {type(_group_link(self)).__name__} acts on "
                    "all of a group at once; it can look at the 'batch' or at a module"
                )
                raise FieldError(part, [("source", text)])


def _lack(at: Selector, need: Need) -> str:
    """What a transform needs and the sites of a selector do not give it, and where it is given."""
    match need:
        case "value":
            return (
                f"the value whose gradient it gets, and {type(at).__name__} has none; it can act "
                "at Parameters, Outputs or Inputs"
            )
        case "entering":
            return (
                f"the gradient that enters the node which its own leaves, and {at!r} has none; it "
                "can act at Nodes with side='leave'"
            )
        case "product":
            return (
                f"what leaves a product for its input, and {at!r} has other gradients too; it can "
                "act at Nodes with pattern='Addmm' and edge=1, or pattern='Mm' and edge=0"
            )
        case "error":
            return (
                "the gradient of what the model has returned, which stands beside those of the "
                f"same examples, and {at!r} has others; it can act at Outputs or Inputs"
            )


def _group_link(intervention: Intervention) -> Transform:
    """Return the link that acts on a group of gradients, else the whole transform."""
    needy = (link for link in intervention.links if link.scope == "group")
    return next(needy, intervention.operator)


def labels_of(intervention: Intervention, given: Container[str] = ()) -> tuple[str, ...]:
    """A label for every link: as given, or its class's name in snake case; a second gets `_2`.

    `given` are those that are taken.
    """
    taken: set[str] = set()

    def label(wanted: str) -> str:
        numbered = (f"{wanted}_{number}" for number in count(2))
        free = next(
            name for name in chain([wanted], numbered) if name not in taken and name not in given
        )
        taken.add(free)
        return free

    parts = intervention.links or (intervention.transform,)
    wanted = intervention.names or [snake(type(part).__name__) for part in parts]
    return tuple(label(name) for name in wanted)


def sum_matters(intervention: Intervention) -> bool:
    """Whether acting on each of several backward passes differs from acting on their sum."""
    properties = intervention.operator.properties
    match intervention.stage:
        case "backward" | "accumulating" if _of_parameters(intervention.at):
            return "linear" not in properties
        case "accumulated" | "settled" | "backward_end":
            return not {"linear", "idempotent"} <= properties
        case _:
            return False


def check_scaled(intervention: Intervention, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse what depends on the size of gradients where a loss scale is on them."""
    if scaler is not None and scaler.is_enabled() and (said := scale_matters(intervention)):
        way = "Use Parameters(stage='step')"
        if intervention.aggregator is not None:
            way = "Use a precision that needs no loss scale, as bfloat16"
        raise ValueError(f"{said}. {way}.")


def scale_matters(intervention: Intervention) -> str:
    """Why a loss scale changes what is done, empty if it does not."""
    if intervention.aggregator is not None:
        return intervention.aggregator.loss_scale_error()
    if intervention.stage not in SCALED:
        return ""
    sized: Transform | Trigger | None = None
    if "homogeneous" not in intervention.operator.properties:
        sized = intervention.operator
    else:
        looking = (part for part in intervention.when.parts if isinstance(part, TensorTrigger))
        sized = next((p for p in looking if p.source == "grad" and not p.homogeneous), None)
    if sized is None:
        return ""
    kind = "transform" if isinstance(sized, Transform) else "trigger"
    return (
        f"{sized!r}: stage '{intervention.stage}' sees gradients times the loss scale, and this "
        f"{kind} depends on their size"
    )


def averages_differ(intervention: Intervention) -> bool:
    """Whether acting on the gradient of each process differs from acting on their average."""
    early = intervention.stage in ("backward", "accumulating", "accumulated")
    linear = "linear" in intervention.operator.properties
    return early and not linear and _of_parameters(intervention.at)


def check_per(intervention: Intervention, model: nn.Module) -> None:
    """Refuse now, not at its first gradient, a `per` that cannot fit a parameter."""
    if not _of_parameters(intervention.at):
        return
    params = params_of(model)
    for link in intervention.links:
        per = getattr(link, "per", None)
        if not isinstance(per, str):
            continue
        for site in intervention.at.find(model):
            try:
                reduced_axes(per, params[site].ndim)
            except ValueError as error:
                raise ValueError(f"{type(link).__name__}.{error}, as '{site}' is") from None


def _of_parameters(at: Selector) -> bool:
    return all(isinstance(kind, Parameters) for kind in at.kinds)
