"""Combined: what several selectors select together."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Annotated, Literal

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites.base import HookRegistry, Place, PlaceTest, Selector, Stage
from gradsurg.transforms.base import Need, Scope


@validated
class Combined(Selector):
    """The sites that `any` of the selectors `of` selects, that `all` do, or that `none` does.

    `limit` keeps so many of them, in the order in which they are met; `count` refuses any other
    number, at once for parameters and after the first forward for what is known only then; `test`
    has the last word on each `Place`. A part of `any` or `none` that selects nothing by itself is
    refused, as it would be alone. In Python: `a | b`, `a & b`, `~a`, `a.first(limit)`,
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
    def provides(self) -> frozenset[Need]:
        match self.by:
            case "any":
                return frozenset.intersection(*(part.provides for part in self.of))
            case "all":
                return frozenset.union(*(part.provides for part in self.of))
            case "none":  # other sites of the same kinds, of which none need be a product
                return frozenset.intersection(*(kind.provides for kind in self.kinds)) - {"product"}

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
        return self.agreed(place, [selector.selects(place) for selector in self.of])

    def offers(self, place: Place) -> bool:
        return any(k.offers(place) for k in self.kinds if k.mechanism == place.mechanism)

    def new_test(self) -> PlaceTest:
        return CombinedTest(self)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        self._check_parts(model)
        test = test or self.new_test()
        found = []
        for kind in self._hooked():
            with suppress(LookupError):  # the others may have something
                found += kind.find(model, test)
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
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        for kind in self._hooked():
            try:
                kind.find(model, registry.selects)
            except LookupError:
                continue  # the others have something, or `find` has told before
            kind.hook(model, optimizer, stage, scope, registry, stack)

    def _check_parts(self, model: nn.Module) -> None:
        """Raises LookupError if a part selects nothing, and the whole would not show it."""
        for part in self.of:
            if isinstance(part, Combined) and (self.by == "all" or part._is_union):
                part._check_parts(model)
            elif self.by != "all":
                part.find(model)

    @property
    def _is_union(self) -> bool:
        """Whether it has all that its parts have, so that to ask them is enough."""
        return self.by == "any" and self.test is None

    def _hooked(self) -> list[Selector]:
        """One selector for each mechanism: it hooks what all of them keep."""
        return list({kind.mechanism: kind for kind in reversed(self.kinds)}.values())[::-1]

    def agreed(self, place: Place, said: Sequence[bool | None]) -> bool | None:
        """What the whole says of a place of which its parts say so much."""
        together = self._together(place, said)
        if not together or self.test is None:
            return together
        return bool(self.test(place)) if place.whole else None

    def _together(self, place: Place, said: Sequence[bool | None]) -> bool | None:
        match self.by:
            case "any":
                return True if True in said else None if None in said else False
            case "all":
                return False if False in said else None if None in said else True
            case "none":
                if True in said or not self.offers(place):
                    return False
                return None if None in said else True


class CombinedTest:
    """What a combination keeps, for the length of one attachment: it counts up to `limit`, and
    knows the parts that have selected none of the sites they were asked about.
    """

    def __init__(self, whole: Combined) -> None:
        self._whole = whole
        self._parts = [selector.new_test() for selector in whole.of]
        self._mechanisms = [{kind.mechanism for kind in part.kinds} for part in whole.of]
        self._asked: set[int] = set()
        self._fitted: set[int] = set()
        self._admitted: set[tuple[object, ...]] = set()

    def __call__(self, place: Place) -> bool | None:
        parts = [test(place) for test in self._parts]
        for at, said in enumerate(parts):
            if said:
                self._fitted.add(at)
            elif place.whole and place.mechanism in self._mechanisms[at]:
                self._asked.add(at)
        said = self._whole.agreed(place, parts)
        if self._whole.limit is None or said is False:
            return said
        full = len(self._admitted) >= self._whole.limit
        if not place.whole:
            # Once it is full, nothing is that is not a part of what was admitted.
            admitted = {key[:2] for key in self._admitted}
            return None if not full or place.key[:2] in admitted else False
        if said and not full:
            self._admitted.add(place.key)
        return place.key in self._admitted

    def unmatched_parts(self) -> list[Selector]:
        """The parts, of those that the whole does not need, that have selected nothing so far."""
        silent: list[Selector] = []
        for at, test in enumerate(self._parts):
            if self._whole.by != "all" and at in self._asked - self._fitted:
                silent.append(self._whole.of[at])
            elif isinstance(test, CombinedTest):
                silent += test.unmatched_parts()
        return silent
