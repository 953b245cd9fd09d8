"""SharedParameters: select the parameters whose gradients an aggregator combines."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from torch import nn

from gradsurg.aggregators.base import Aggregator, LossWeighting
from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites.places import Door, Kind, Named, Stage
from gradsurg.sites.selection import ROOT, Pattern, matches, nothing_matched
from gradsurg.sites.selectors import ParamSelector, params_of

SHARED = "shared"
"""The name of the group of all selected parameters, for granularity `whole`."""

REPRESENTATION = "representation"
"""The name of the group of the gradients at the shared representation, for engine `feature`."""


def _in_order(given: Any) -> Any:  # Any: not validated yet
    """Refuse a set, whose order differs between processes."""
    if not isinstance(given, list | tuple):
        raise PydanticCustomError("tuple_type", "must be a list")
    return given


Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_in_order)]
Granularity = Literal["whole", "layer", "module", "tensor"] | Patterns
Engine = Literal["full", "feature"]
Reduce = Literal["mean", "local"]
OnNonfinite = Literal["propagate", "skip"]


def _watch(door: Door, found: Sequence[Named], shared: object) -> None:
    raise AssertionError("transforms do not act on SharedParameters")


KIND = Kind("SharedParameters", "", params_of, _watch, known_at="watch")


@validated
class SharedParameters(ParamSelector):
    """Select the parameters that several tasks reach, whose gradients an aggregator combines.

    `granularity` says which parameters are aggregated together: all (`whole`), or each `layer`,
    `module` or `tensor` by itself. Or it is a name pattern for each group, such as `("encoder.*",
    "*")`. The first match counts, and a parameter without a match is not selected.
    A layer is a member of the outermost `ModuleList` or `Sequential` of two or more modules of one
    class; parameters outside are grouped by module. To use another aggregator for each group,
    attach several. The other fields of the selection are those of `Parameters`.

    The engine `full` runs one backward pass a task and keeps tasks x parameters numbers between
    steps. `feature` combines the gradients at the representation that the tasks share, the output
    of the module named by `features`, and runs one backward pass from there: the upper bound
    MGDA-UB of Sener and Koltun, NeurIPS 2018, for any aggregator. A complex representation counts
    as two real numbers an entry. It needs one forward pass a step, and so no `aggregate=False`.

    In several processes of DistributedDataParallel `reduce="mean"` averages the gradients and
    losses of each task before the aggregator acts, by one all-reduce of tasks x parameters numbers:
    the update is that of one process with all examples, up to rounding. With `"local"` each process
    aggregates the gradients of its own examples, and the results are averaged, which differs if the
    aggregator is not linear. `feature`, whose gradients have entries for each example of a process,
    needs `"local"`.

    A parameter of one task alone, as found at each `live.backward(losses)`, gets the gradient of
    that task. If the task is a memory of `AGEM` or `GEM`, it is combined with gradients of zero for
    the others. Shared parameters that are not selected, and those that only the optimizer holds,
    get the sum.

    A NaN or infinity in the loss or in a gradient of one task makes the update NaN.
    `on_nonfinite="skip"` leaves such a task out of the step instead, its own parameters too; an
    aggregator with a state or with a fixed number of tasks skips the step. Both are counted, and
    warned about at the end. This option reads every gradient once more, and waits for the device.

    With `full`, transforms before the optimizer step see the gradient of each task. With `feature`
    only those between the losses and the representation do; at the representation and from there to
    the input transforms see the combined gradient. A transform at the representation with the
    trigger `ForTask` sees the gradient of its task.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> surgery = gs.Surgery(gs.Intervention(gs.MGDA(), at=gs.SharedParameters()))
    >>> with surgery.attach(model) as live:
    ...     live.backward([model(torch.tensor(x)).sum() for x in ([1.0, 0.0], [-1.0, 2.0])])
    >>> model.weight.grad
    tensor([[0.5000, 0.5000]])
    """

    granularity: Granularity = "whole"
    engine: Engine = "full"
    features: str = ""
    reduce: Reduce = "mean"
    on_nonfinite: OnNonfinite = "propagate"

    stages: ClassVar[tuple[Stage, ...]] = ()
    for_aggregators: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stage is not None:
            raise Contradiction("stage", f"an aggregator has no stages, found {self.stage!r}")
        if not self.granularity:
            raise Contradiction("granularity", "must have at least one pattern, found none")
        if isinstance(self.granularity, tuple) and len({*self.granularity}) < len(self.granularity):
            text = f"must have each pattern once, found {', '.join(self.granularity)}"
            raise Contradiction("granularity", text)
        if self.features and self.engine != "feature":
            raise Contradiction("features", "needs engine='feature', found engine='full'")
        if self.engine == "feature" and not self.features:
            rule = "name the module whose output the tasks share, such as features='trunk'"
            raise Contradiction("features", f"{rule}: engine='feature' needs it")
        if self.engine == "feature" and self.granularity != "whole":
            raise Contradiction(
                "granularity",
                f"must be 'whole' with engine='feature', found {self.granularity!r}",
            )
        if self.engine == "feature" and self.on_nonfinite == "skip":
            raise Contradiction("on_nonfinite", "'skip' needs engine='full', found 'feature'")
        if self.engine == "feature" and not self.all:
            text = f"leave it out: engine='feature' acts on all parameters below '{self.features}'"
            raise Contradiction("pattern", text)

    def check_aggregator(self, aggregator: Aggregator) -> None:
        if isinstance(aggregator, LossWeighting) and self != SharedParameters(reduce=self.reduce):
            raise ValueError(
                f"{type(aggregator).__name__}: use SharedParameters() without arguments (reduce= "
                "is allowed): it weights the losses, and so the gradients of all parameters"
            )

    def kind_at(self, stage: Stage | None) -> Kind:
        return KIND

    def find(self, model: nn.Module) -> list[str]:
        return list(self.groups(model))

    def groups(self, model: nn.Module) -> dict[str, str]:
        """Return the group of each selected parameter.

        Raises LookupError if a pattern matches no parameter. A pattern whose parameters are all
        frozen has no group.
        """
        names = super().find(model)
        match self.granularity:
            case "whole":
                return dict.fromkeys(names, SHARED)
            case "layer":
                layers = _layers(model)
                if not layers:
                    text = "use 'module': found no ModuleList or Sequential of modules of one class"
                    raise SelectionError(self, "granularity", text)
                return {name: _layer_of(name, layers) for name in names}
            case "module":
                return {name: name.rpartition(".")[0] or ROOT for name in names}
            case "tensor":
                return dict(zip(names, names, strict=True))
            case patterns:
                groups = self._first_patterns(patterns, model)
                return {name: groups[name] for name in names if name in groups}

    def _first_patterns(self, patterns: Patterns, model: nn.Module) -> dict[str, str]:
        """Return the first pattern that each parameter, also a frozen one, matches by a name."""
        matching = {
            named.names[0]: [
                pattern
                for pattern in patterns
                if any(matches(name, pattern) for name in named.names)
            ]
            for named in params_of(model)
            if self.near(named)
        }
        first = {name: found[0] for name, found in matching.items() if found}
        for pattern in patterns:
            if not any(pattern in found for found in matching.values()):
                raise nothing_matched(self, "granularity", pattern, matching)
            if pattern not in first.values():
                text = f"all parameters that match '{pattern}' belong to an earlier group"
                raise SelectionError(self, "granularity", text)
        return first

    @property
    def all(self) -> bool:
        """Whether all parameters are selected."""
        return not self.selection

    @property
    def selection(self) -> str:
        """The fields that restrict the selection, as text; empty if all parameters are selected."""
        fields = ("pattern", "types", "depth", "index", "ndim", "size")
        values = {name: getattr(self, name) for name in fields}
        return ", ".join(
            f"{name}={value!r}" for name, value in values.items() if value not in ("*", None)
        )


def _layers(model: nn.Module) -> set[str]:
    """Return the paths of the members of each list of modules of one class, lists in lists too."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if len({type(member) for member in module}) == 1
        for name, _ in module.named_children()
    }


def _layer_of(param: str, layers: Collection[str]) -> str:
    """Return the outermost layer that has a parameter, otherwise its module."""
    parts = param.split(".")[:-1]
    paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return next((path for path in paths if path in layers), ".".join(parts) or ROOT)
