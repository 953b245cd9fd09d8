"""Combined: what several selectors select together."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Annotated, Literal

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from gradsurg.fields import Contradiction, validated
from gradsurg.sites.base import Gates, Keeps, Place, Selector, Stage
from gradsurg.transforms.base import Need, Scope


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
        for kind in self.kinds:
            if kind.stage is None and any(
                type(other) is type(kind) and other.stage is not None for other in self.kinds
            ):
                name = type(kind).__name__
                raise Contradiction(
                    "of", f"give each of these {name} a stage, or none of them; {kind!r} has none"
                )
        if self.by == "all":
            shared = set.intersection(*({k.mechanism for k in own.kinds} for own in self.of))
            if not shared:
                kinds = ", ".join(dict.fromkeys(type(kind).__name__ for kind in self.kinds))
                raise Contradiction("of", f"nothing is at once a site of each of {kinds}")

    def __repr__(self) -> str:
        # Never an address: the state of a surgery is recognised by its selectors' names.
        name = getattr(self.test, "__qualname__", type(self.test).__qualname__)
        shown = {
            "of": self.of,
            "by": self.by,
            "limit": self.limit,
            "count": self.count,
            "test": None if self.test is None else name,
        }
        given = (f"{key}={value}" for key, value in shown.items() if value is not None)
        return f"Combined({', '.join(given)})"

    @property
    def gives(self) -> frozenset[Need]:
        match self.by:
            case "any":
                return frozenset.intersection(*(part.gives for part in self.of))
            case "all":
                return frozenset.union(*(part.gives for part in self.of))
            case "none":  # other sites of the same kinds, of which none need be a product
                return frozenset.intersection(*(kind.gives for kind in self.kinds)) - {"product"}

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
        said = self._agreed(place, [selector.selects(place) for selector in self.of])
        return self._tested(place, said)

    def offers(self, place: Place) -> bool:
        return any(k.offers(place) for k in self.kinds if k.mechanism == place.mechanism)

    def keeper(self) -> Keeps:
        keepers = [selector.keeper() for selector in self.of]
        admitted: set[tuple[object, ...]] = set()

        def keeps(place: Place) -> bool | None:
            said = self._tested(place, self._agreed(place, [keeper(place) for keeper in keepers]))
            if self.limit is None or said is False:
                return said
            full = len(admitted) >= self.limit
            if not place.whole:
                # Once it is full, nothing is that is not a part of what was admitted.
                return None if not full or place.key[:2] in {key[:2] for key in admitted} else False
            if said and not full:
                admitted.add(place.key)
            return place.key in admitted

        return keeps

    def find(self, model: nn.Module, keeps: Keeps | None = None) -> list[str]:
        keeps = keeps or self.keeper()
        found = []
        for kind in self._hooked():
            with suppress(LookupError):  # the others may have something
                found += kind.find(model, keeps)
        if not found:
            own = "; ".join(", ".join(part.find(model)) for part in self.of)
            raise LookupError(f"nothing is selected by {self!r}. Its parts by themselves: {own}")
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
                kind.find(model, gates.keeps)
            except LookupError:
                continue  # the others have something, or `find` has told before
            kind.hook(model, optimizer, stage, scope, gates, stack)

    def _hooked(self) -> list[Selector]:
        """One selector for each mechanism: it hooks what all of them keep."""
        return list({kind.mechanism: kind for kind in reversed(self.kinds)}.values())[::-1]

    def _agreed(self, place: Place, said: list[bool | None]) -> bool | None:
        match self.by:
            case "any":
                return True if True in said else None if None in said else False
            case "all":
                return False if False in said else None if None in said else True
            case "none":
                if True in said or not self.offers(place):
                    return False
                return None if None in said else True

    def _tested(self, place: Place, said: bool | None) -> bool | None:
        if not said or self.test is None:
            return said
        return bool(self.test(place)) if place.whole else None
