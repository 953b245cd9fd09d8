"""What a selector is: it finds sites in a model and hooks them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.fields import nearest
from gradsurg.transforms.base import Scope

Stage = Literal["backward", "accumulated", "step"]
GradFn = Callable[[Tensor | None], Tensor | None]
"""What a hook calls: it gets a gradient and gives the new one, or None to leave it."""


class Gates(Protocol):
    """How a selector reaches the surgery: it asks for the gate of a site and hooks that."""

    needs_value: bool

    def expect(self, site: str, aliases: Sequence[str] = (), skipped: str = "") -> None:
        """Put a site into the ledger before a gradient passes; `skipped` says why none will."""
        ...

    def forget(self, site: str) -> None:
        """An expected site turned out to be others: take it out of the ledger."""
        ...

    def gate(self, site: str, value: Callable[[], Tensor | None] | None = None) -> "SiteGate":
        """The gate of a site, one for all time; `value` gives the tensor whose gradient passes."""
        ...

    def group(
        self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]
    ) -> "GroupFn":
        """The gate of all sites together."""
        ...


GroupFn = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""All gradients of a group in, the new ones out (None: leave it), in the same order."""


class SiteGate(Protocol):
    """A `GradFn` that may be told the value anew at each call, as an activation is."""

    def __call__(self, grad: Tensor | None, value: Tensor | None = None) -> Tensor | None: ...


class Selector(ABC):
    """Names places in a model; `stage` is the moment of the backward pass (None: the default)."""

    stages: ClassVar[tuple[Stage, ...]]
    group_stages: ClassVar[tuple[Stage, ...]] = ()
    has_value: ClassVar[bool]

    pattern: str
    stage: Stage | None

    def resolve(self, scope: Scope) -> Stage:
        """The stage for a transform of this scope. ValueError if it cannot have the one given."""
        allowed = self.stages if scope == "tensor" else self.group_stages
        if not allowed:
            kind = type(self).__name__
            raise ValueError(
                f"needs all gradients of a group at once, {kind} meets them one at a time; "
                "it can act at Parameters with stage=step"
            )
        stage = self.stage or allowed[0]
        if stage not in allowed:
            why = (
                f"{type(self).__name__} cannot have stage '{stage}'"
                if stage not in self.stages
                else f"needs all gradients of a group at once, stage '{stage}' has one at a time"
            )
            raise ValueError(f"{why}; stages it can have: {', '.join(allowed)}")
        return stage

    @abstractmethod
    def find(self, model: nn.Module) -> list[str]:
        """The ids of what is selected, as far as they are known before the model is called.

        Raises LookupError, with what there is, if nothing is selected.
        """

    @abstractmethod
    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        """Hook every selected site at `stage`; each handle goes on `stack` as it is made."""


def matches(name: str, pattern: str) -> bool:
    """Whether `name` fits a glob (`layer1.*`, `*` crosses dots) or, whole, a regex (`re:...`)."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def check_pattern(pattern: str) -> str:
    """Refuse an empty pattern and a regex that does not compile."""
    if not pattern:
        raise ValueError("must not be empty")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"is not a regular expression ({error})") from None
    return pattern


def through(gates: Sequence[GradFn], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Pass the gradients of a node through one gate each."""
    results = [gate(grad) for gate, grad in zip(gates, grads, strict=True)]
    return tuple(
        grad if result is None else result for result, grad in zip(results, grads, strict=True)
    )


def nothing_matched(kind: str, pattern: str, names: Iterable[str]) -> LookupError:
    """The error for a selector that selects nothing: it lists what there was."""
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
    return LookupError(f"{kind}: nothing matches '{pattern}'. {listed}")
