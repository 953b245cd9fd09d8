"""Combined: unions, intersections and complements of selectors."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from gradsurg.plugins.fields import Contradiction, SelectionError, validated
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, Stage
from gradsurg.transforms.base import Need, Scope


@validated
class Combined(Selector):
    """The sites that any, all or none (field `by`) of the selectors `of` select.

    `limit` keeps that many, in the order in which they are reached. `count` is the required number,
    checked when attaching for parameters, else after the first forward. `test` is called with each
    selected `Place` and may reject it. Each part of `any` must select something by itself; a part
    of `none` that selects nothing is told on detach. In Python: `a | b`, `a & b`, `~a`,
    `a.first(limit)`, `a.expect(count)`, `a.where(test)`.

    Raises ValueError if the parts of `all` have no kind of site in common, or if the parts act at
    different stages: that takes two interventions.
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
        if any(selector.count is not None for selector in self.of):
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
            shared = set.intersection(*({k.mechanism for k in part.kinds} for part in self.of))
            if not shared:
                kinds = ", ".join(dict.fromkeys(type(kind).__name__ for kind in self.kinds))
                raise Contradiction("of", f"nothing is at once a site of each of {kinds}")

    def __repr__(self) -> str:
        # Without memory addresses: a saved surgery state is matched by the repr of its selectors.
        name = getattr(self.test, "__qualname__", type(self.test).__qualname__)
        fields = {
            "of": self.of,
            "by": self.by,
            "limit": self.limit,
            "count": self.count,
            "test": None if self.test is None else name,
        }
        given = (f"{key}={value}" for key, value in fields.items() if value is not None)
        return f"Combined({', '.join(given)})"

    @property
    def provides(self) -> frozenset[Need]:
        match self.by:
            case "any":
                return frozenset.intersection(*(part.provides for part in self.of))
            case "all":
                return frozenset.union(*(part.provides for part in self.of))
            case "none":  # other sites of the same kinds, of which none need be a product
                shared = frozenset.intersection(*(kind.provides for kind in self.kinds))
                return shared - {"product"}

    @property
    def kinds(self) -> tuple[Selector, ...]:
        return tuple(kind for selector in self.of for kind in selector.kinds)

    def resolve(self, scope: Scope) -> Stage:
        stages: list[Stage] = list({kind.resolve(scope) for kind in self.kinds})
        if len(stages) > 1:
            raise ValueError(
                f"acts at one stage, and these are several: {', '.join(sorted(stages))}; "
                "make an intervention of each"
            )
        return stages[0]

    def selects(self, place: Place) -> bool | None:
        return self.decide(place, [selector.selects(place) for selector in self.of])

    def offers(self, place: Place) -> bool:
        return any(k.offers(place) for k in self.kinds if k.mechanism == place.mechanism)

    def new_test(self) -> PlaceTest:
        return CombinedTest(self)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        self._check_parts(model)
        test = test or self.new_test()
        names = []
        for kind in self._hooking():
            with suppress(LookupError):  # the other kinds may have sites
                names += kind.find(model, test)
        if not names:
            alone = "; ".join(", ".join(part.find(model)) for part in self.of)
            text = f"nothing is selected by {self!r}. Its parts by themselves: {alone}"
            raise SelectionError(self, "by", text)
        return names

    def hook(self, attached: Attached) -> None:
        model = attached.model
        for kind in self._hooking():
            try:
                kind.find(model, attached.selects)
            except LookupError:
                continue  # the other kinds have sites, or `find` has raised before
            kind.hook(attached)

    def decide(self, place: Place, decisions: Sequence[bool | None]) -> bool | None:
        """Return whether the place is selected, given the decisions of the parts."""
        match self.by:
            case "any":
                selected = True if True in decisions else None if None in decisions else False
            case "all":
                selected = False if False in decisions else None if None in decisions else True
            case "none":
                if True in decisions or not self.offers(place):
                    selected = False
                else:
                    selected = None if None in decisions else True
        if not selected or self.test is None:
            return selected
        return bool(self.test(place)) if place.whole else None

    def _check_parts(self, model: nn.Module) -> None:
        """Raise LookupError if a part selects nothing and the combination would hide it.

        A complement of nothing is told on detach.
        """
        if self.by == "none":
            return
        for part in self.of:
            if isinstance(part, Combined) and (self.by == "all" or part._is_union):
                part._check_parts(model)
            elif self.by == "any":
                part.find(model)

    @property
    def _is_union(self) -> bool:
        """Whether it selects all that its parts select, so that checking the parts is enough."""
        return self.by == "any" and self.test is None

    def _hooking(self) -> list[Selector]:
        """Return one selector for each mechanism: it hooks the sites of all that share it."""
        return list({kind.mechanism: kind for kind in reversed(self.kinds)}.values())[::-1]


class CombinedTest:
    """The place test of a combination for one attachment.

    It counts up to `limit`, and records the parts that have selected no place so far.
    """

    def __init__(self, combined: Combined) -> None:
        self._combined = combined
        self._tests = [selector.new_test() for selector in combined.of]
        self._mechanisms = [{kind.mechanism for kind in part.kinds} for part in combined.of]
        self._asked: set[int] = set()  # parts by index
        self._matched: set[int] = set()
        self._admitted: set[tuple[object, ...]] = set()

    def __call__(self, place: Place) -> bool | None:
        decisions = [test(place) for test in self._tests]
        for index, decision in enumerate(decisions):
            if decision:
                self._matched.add(index)
            elif place.whole and place.mechanism in self._mechanisms[index]:
                self._asked.add(index)
        selected = self._combined.decide(place, decisions)
        if self._combined.limit is None or selected is False:
            return selected
        full = len(self._admitted) >= self._combined.limit
        if not place.whole:
            # Once the limit is reached, only places inside an admitted one can still be selected.
            admitted = {key[:2] for key in self._admitted}
            return None if not full or place.key[:2] in admitted else False
        if selected and not full:
            self._admitted.add(place.key)
        return place.key in self._admitted

    def unmatched_parts(self) -> list[Selector]:
        """Return the parts that have selected nothing so far, those of `all` left out."""
        unmatched: list[Selector] = []
        for index, test in enumerate(self._tests):
            if self._combined.by != "all" and index in self._asked - self._matched:
                unmatched.append(self._combined.of[index])
            elif isinstance(test, CombinedTest):
                unmatched += test.unmatched_parts()
        return unmatched
