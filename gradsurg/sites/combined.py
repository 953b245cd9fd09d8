"""Combined: what several selectors select together."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Literal

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from gradsurg.fields import Contradiction, validated
from gradsurg.sites.base import Gates, Keeps, Place, Selector, Stage
from gradsurg.transforms.base import Scope


@validated
class Combined(Selector):
    """The sites that `any` of the selectors `of` selects, that `all` do, or that `none` does.

    `limit` keeps so many of them, in the order in which they are met; `count` refuses any other
    number, at once for parameters and after the first forward for what is known only then; `test`
    has the last word on each `Place`. In Python: `a | b`, `a & b`, `~a`, `a.first(limit)`,
    `a.expect(count)`, `a.where(test)`. Raises ValueError if the selectors have no kind of site in
    common where all must agree, or would act at different stages: that takes two interventions.
    """

    of: Annotated[tuple[Selector, ...], Field(min_length=1)]
    by: Literal["any", "all", "none"] = "any"
    limit: Annotated[int, Field(ge=1)] | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    test: Callable[[Place], bool] | None = None
    stage: Stage | None = None

    def __post_init__(self) -> None:
        if self.stage is not None:
            raise Contradiction("stage", "is that of the selectors: give it to each of them")
        if any(selector.expected is not None for selector in self.of):
            raise Contradiction("of", "a number that is expected belongs to the whole: expect last")
        if self.by == "all":
            shared = set.intersection(*({k.mechanism for k in own.kinds} for own in self.of))
            if not shared:
                kinds = ", ".join(dict.fromkeys(type(kind).__name__ for kind in self.kinds))
                raise Contradiction("of", f"nothing is at once a site of each of {kinds}")

    @property
    def has_value(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(kind.has_value for kind in self.kinds)

    @property
    def kinds(self) -> tuple[Selector, ...]:
        return tuple(kind for selector in self.of for kind in selector.kinds)

    @property
    def expected(self) -> int | None:
        return self.count

    def resolve(self, scope: Scope) -> Stage:
        stages: list[Stage] = list({kind.resolve(scope) for kind in self.kinds})
        if len(stages) > 1:
            raise ValueError(
                f"acts at one stage, and these are several: {', '.join(sorted(stages))}; "
                "make an intervention of each"
            )
        return stages[0]

    def selects(self, place: Place) -> bool | None:
        said = self._agreed([selector.selects(place) for selector in self.of])
        return self._tested(place, said)

    def keeper(self) -> Keeps:
        keepers = [selector.keeper() for selector in self.of]
        admitted: set[object] = set()

        def keeps(place: Place) -> bool | None:
            said = self._tested(place, self._agreed([keeper(place) for keeper in keepers]))
            if self.limit is None or not said:
                return said
            if not place.whole:
                return None
            if place.key not in admitted and len(admitted) < self.limit:
                admitted.add(place.key)
            return place.key in admitted

        return keeps

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        keeps = keeps or self.keeper()
        found, errors = [], []
        for kind in self._hooked():
            try:
                found += kind.find(model, keeps)
            except LookupError as error:
                errors.append(str(error))
        if not found:
            raise LookupError(f"nothing is selected by {self!r}. {' '.join(errors)}")
        return found

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        for kind in self._hooked():
            try:
                kind.find(model, self.keeper())
            except LookupError:
                continue  # the others have something, or `find` has told before
            kind.hook(model, optimizer, stage, scope, gates, stack)

    def _hooked(self) -> list[Selector]:
        """One selector for each mechanism: it hooks what all of them keep."""
        return list({kind.mechanism: kind for kind in reversed(self.kinds)}.values())[::-1]

    def _agreed(self, said: list[bool | None]) -> bool | None:
        match self.by:
            case "any":
                return True if True in said else None if None in said else False
            case "all":
                return False if False in said else None if None in said else True
            case "none":
                return False if True in said else None if None in said else True

    def _tested(self, place: Place, said: bool | None) -> bool | None:
        if not said or self.test is None:
            return said
        return bool(self.test(place)) if place.whole else None
