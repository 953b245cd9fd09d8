"""SharedParameters: where the gradients of several tasks meet."""

from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from torch import nn
from torch.optim import Optimizer

from gradsurg.aggregators.base import Aggregator, LossWeighting
from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites.base import HookRegistry, PlaceTest, Stage
from gradsurg.sites.selection import (
    ROOT,
    ParamSelector,
    Pattern,
    matches,
    nothing_matched,
    selected_params,
)
from gradsurg.transforms.base import Scope

SHARED = "shared"
"""The group of all that is selected, where an aggregator acts on the whole."""


def _in_order(given: Any) -> Any:  # Any: pydantic has not looked yet
    """Refuse a set, whose order is another one in each process."""
    if not isinstance(given, list | tuple):
        raise PydanticCustomError("tuple_type", "must be a list")
    return given


Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_in_order)]
Granularity = Literal["whole", "module", "tensor"] | Patterns
Engine = Literal["full", "feature"]


@validated
class SharedParameters(ParamSelector):
    """The parameters whose gradients an aggregator makes one of: those that several tasks reach.

    Which these are the graph says, at each `live.backward(losses)`; a parameter that one task alone
    reaches gets the gradient of that task. Of those that several reach, the ones that are not
    selected, and those that only the optimizer has, get the sum. They are selected as `Parameters`
    are.

    `granularity` says what is aggregated together: the `whole`, the parameters of each `module`,
    each `tensor`, or groups of your own, a pattern on names each, as `("encoder.*", "*")`: a
    parameter is of the first that it fits, and one that fits none is not selected. For another
    aggregator in each group give each a selection.

    The engine `full` makes one backward pass a task and keeps tasks x parameters numbers, also from
    one step to the next. `feature` looks at the gradients where the tasks part, and makes one
    backward pass through all that is below: its conflicts are those at that representation (the
    upper bound of Sener & Koltun, NeurIPS 2018, eq. MGDA-UB). It finds the place by the graph;
    `features` names the module whose output it is to be instead. A complex representation is two
    numbers an entry. What it sends down depends on all that a step has, and a graph is gone back
    through once: it takes one forward a step, no `aggregate=False`. Where the tasks part, and
    below, transforms meet what was made of the tasks, above it each of them; one with a `ForTask`
    meets each of them where they part, too.
    """

    granularity: Granularity = "whole"
    engine: Engine = "full"
    features: str = ""

    stages: ClassVar[tuple[Stage, ...]] = ()
    for_aggregators: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stage is not None:
            raise Contradiction("stage", f"an aggregator has no stages, found {self.stage!r}")
        if not self.granularity:
            raise Contradiction("granularity", "must have a pattern for each group, found none")
        if isinstance(self.granularity, tuple) and len({*self.granularity}) < len(self.granularity):
            text = f"must have each pattern once, found {', '.join(self.granularity)}"
            raise Contradiction("granularity", text)
        if self.features and self.engine != "feature":
            raise Contradiction("features", "needs engine='feature', found engine='full'")
        if self.engine == "feature" and self.granularity != "whole":
            raise Contradiction(
                "granularity",
                f"engine 'feature' has no gradients apart, found {self.granularity!r}",
            )
        if self.engine == "feature" and not self.all:
            raise Contradiction(
                "pattern", "engine 'feature' acts on all that is below it, and selects none"
            )

    def check_aggregator(self, aggregator: Aggregator) -> None:
        if isinstance(aggregator, LossWeighting) and self != SharedParameters():
            raise ValueError(
                f"{type(aggregator).__name__}: weighs the losses, and so the gradients of all "
                "parameters: all of them are one whole, by the engine 'full'"
            )

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        return list(self.groups(model, test))

    def groups(self, model: nn.Module, test: PlaceTest | None = None) -> dict[str, str]:
        """The group of each parameter that is selected. Raises LookupError if a pattern has none;
        one whose parameters are all frozen is the group of nothing for now.
        """
        names = super().find(model, test)
        match self.granularity:
            case "whole":
                return dict.fromkeys(names, SHARED)
            case "module":
                return {name: name.rpartition(".")[0] or ROOT for name in names}
            case "tensor":
                return dict(zip(names, names, strict=True))
            case patterns:
                fits = self._fitting(patterns, model, test or self.selects)
                return {name: fits[name] for name in names if name in fits}

    def _fitting(self, patterns: Patterns, model: nn.Module, test: PlaceTest) -> dict[str, str]:
        """The first pattern that each parameter fits by one of its names, frozen ones too."""
        fits = {
            own[0]: [one for one in patterns if any(matches(name, one) for name in own)]
            for _, own in selected_params(self, model, test)
        }
        found = {name: own[0] for name, own in fits.items() if own}
        for one in patterns:
            if not any(one in own for own in fits.values()):
                raise nothing_matched(self, "granularity", one, fits)
            if one not in found.values():
                text = f"all that fits '{one}' is of a group before it"
                raise SelectionError(self, "granularity", text)
        return found

    @property
    def all(self) -> bool:
        """Whether no field selects, but for the groups of a granularity, and so all are meant."""
        return not self.selection

    @property
    def selection(self) -> str:
        """What these fields select, in words; empty if all are meant."""
        fields = ("pattern", "types", "depth", "index", "ndim", "size")
        asked = {name: getattr(self, name) for name in fields}
        return ", ".join(
            f"{name}={value!r}" for name, value in asked.items() if value not in ("*", None)
        )

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        raise AssertionError("no transform acts here")
