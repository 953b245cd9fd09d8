"""Combined: unions, intersections and complements of selectors, and how they decide on places."""

from collections.abc import Callable, Iterator, Sequence
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
        staged = {kind.mechanism[0] for kind in self.kinds if kind.stage is not None}
        for kind in self.kinds:
            if kind.stage is None and kind.mechanism[0] in staged:
                name = type(kind).__name__
                raise Contradiction(
                    "of", f"give each of these {name} a stage, or none of them; {kind!r} has none"
                )
        if self.by == "all" and not set.intersection(*map(_mechanisms, self.of)):
            kinds = ", ".join(dict.fromkeys(type(kind).__name__ for kind in self.kinds))
            raise Contradiction("of", f"nothing is at once a site of each of {kinds}")

    def __repr__(self) -> str:
        # Without memory addresses: a saved surgery state is matched by the repr of its selectors.
        test = self.test and getattr(self.test, "__qualname__", type(self.test).__qualname__)
        fields = {
            "of": self.of,
            "by": self.by,
            "limit": self.limit,
            "count": self.count,
            "test": test,
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

    @property
    def changed_tensors(self) -> str:
        return ", ".join(dict.fromkeys(kind.changed_tensors for kind in self.kinds))

    @property
    def name_patterns(self) -> frozenset[str]:
        parts = frozenset[str]().union(*(part.name_patterns for part in self.of))
        return parts if self.by != "none" else parts | {"*"}

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

    def decide(self, place: Place, decisions: Sequence[bool | None]) -> bool | None:
        unknown = None in decisions
        match self.by:
            case "any":
                selected = True in decisions or (None if unknown else False)
            case "all":
                selected = False not in decisions and (None if unknown else True)
            case "none":
                refused = True in decisions or not self.offers(place)
                selected = not refused and (None if unknown else True)
        if not selected or self.test is None:
            return selected
        return bool(self.test(place)) if place.whole else None

    def offers(self, place: Place) -> bool:
        return any(k.offers(place) for k in self.kinds if k.mechanism == place.mechanism)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        for part in self._must_match():
            part.find(model)
        test = test or Selection(self)
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
        for kind in self._hooking():
            try:
                kind.find(attached.model, attached.selects)
            except LookupError:
                continue  # the other kinds have sites, or `find` has raised before
            kind.hook(attached)

    def _must_match(self) -> Iterator[Selector]:
        """Yield the parts that must select something by themselves, as the whole may hide it."""
        for part in self.of if self.by != "none" else ():
            is_union = isinstance(part, Combined) and part.by == "any" and part.test is None
            if isinstance(part, Combined) and (self.by == "all" or is_union):
                yield from part._must_match()
            elif self.by == "any":
                yield part

    def _hooking(self) -> list[Selector]:
        """Return one selector for each mechanism: it hooks the sites of all that share it."""
        return list({kind.mechanism: kind for kind in reversed(self.kinds)}.values())[::-1]


class Selection:
    """Decides which places a selector selects, for one attachment; called with each `Place`.

    It counts up to `limit`. `matched` tells whether a place was selected; `rejected` are the labels
    of places that were not, of which nothing more will be known.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.combined = selector if isinstance(selector, Combined) else None
        self.parts = [Selection(part) for part in self.combined.of] if self.combined else []
        self.matched = False
        self.rejected: dict[str, None] = {}
        self._admitted: set[tuple[object, ...]] = set()

    def __call__(self, place: Place) -> bool | None:
        if self.combined is None:
            selected = self.selector.selects(place)
        else:
            selected = self.combined.decide(place, [part(place) for part in self.parts])
            if self.combined.limit is not None and selected is not False:
                selected = self._within(self.combined.limit, place, selected)
        if selected:
            self.matched = True
        elif selected is False and place.whole and place.mechanism in _mechanisms(self.selector):
            self.rejected[place.label] = None
        return selected

    def unmatched_parts(self) -> Iterator[Selector]:
        """Yield the parts that have rejected all places so far, those of `all` left out."""
        for part in self.parts:
            if self.combined and self.combined.by != "all" and part.rejected and not part.matched:
                yield part.selector
            else:
                yield from part.unmatched_parts()

    def _within(self, limit: int, place: Place, selected: bool | None) -> bool | None:
        full = len(self._admitted) >= limit
        if not place.whole or selected is None:
            # Once the limit is reached, only places inside an admitted one can still be selected.
            inside = place.key[:2] in {key[:2] for key in self._admitted}
            return None if inside or not full else False
        if selected and not full:
            self._admitted.add(place.key)
        return place.key in self._admitted


def _mechanisms(selector: Selector) -> set[tuple[object, ...]]:
    return {kind.mechanism for kind in selector.kinds}
