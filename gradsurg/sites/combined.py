"""Combined: unions, intersections and complements of selectors."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from gradsurg.plugins.fields import Contradiction, SelectionError, in_short, validated
from gradsurg.plugins.messages import shortened
from gradsurg.sites.places import (
    ELSEWHERE,
    Kind,
    Leaf,
    Memory,
    Near,
    Place,
    Selector,
    Stage,
    Things,
)
from gradsurg.sites.selection import ROOT
from gradsurg.transforms.base import Need, Scope


@validated
class Combined(Selector):
    """Combine selectors: the places that any, all or none (field `by`) of the selectors `of` pick.

    `limit` keeps the places of that many calls or nodes, in the order in which they are reached.
    `count` is the required number. `test` is called with each picked `Place` and may reject it. In
    Python write `a | b`, `a & b`, `~a`, `a.first(limit)`, `a.expect(count)` or `a.where(test)`.

    The number of places is checked when attaching for parameters, otherwise after the first
    forward. Each part of `any` must match something by itself. Raises ValueError if the parts of
    `all` have no kind of site in common.

    >>> weights = gs.Parameters() & ~gs.Parameters("*bias")
    >>> weights.find(nn.Linear(2, 1))
    ['weight']
    """

    of: Annotated[tuple[Selector, ...], Field(min_length=1)]
    by: Literal["any", "all", "none"] = "any"
    limit: Annotated[int, Field(ge=1)] | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    test: Callable[[Place], bool] | None = None

    stage: Stage | None = None

    def __post_init__(self) -> None:
        if self.stage is not None:
            raise Contradiction("stage", "give it to each of the selectors, not to the whole")
        if any(query.count is not None for query in self.of):
            raise Contradiction("of", "call expect last: (a | b).expect(3), not a.expect(3) | b")
        staged = {leaf.kind_at(None).name for leaf in self.leaves if leaf.stage is not None}
        for leaf in self.leaves:
            if leaf.stage is None and leaf.kind_at(None).name in staged:
                name = type(leaf).__name__
                text = f"give all or none of these {name} a stage: {in_short(leaf)} has none"
                raise Contradiction("of", text)
        kinds = [{leaf.kind_at(None) for leaf in part.leaves} for part in self.of]
        if self.by == "all" and not set.intersection(*kinds):
            parts = ", ".join(map(in_short, self.of))
            raise Contradiction("of", f"use | in place of &: no site is in all of {parts}")

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
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for part in self.of for leaf in part.leaves)

    @property
    def provides(self) -> frozenset[Need]:
        match self.by:
            case "any":
                return frozenset.intersection(*(part.provides for part in self.of))
            case "all":
                return frozenset.union(*(part.provides for part in self.of))
            case "none":  # other sites of the same kinds, which need not be at a matrix product
                shared = frozenset.intersection(*(leaf.provides for leaf in self.leaves))
                return shared - {"product"}

    def resolve(self, scope: Scope) -> Stage:
        stages: list[Stage] = list({leaf.resolve(scope) for leaf in self.leaves})
        if len(stages) > 1:
            raise ValueError(
                "make one intervention for each stage: an intervention has one, and the combined "
                f"selectors have {', '.join(sorted(stages))}"
            )
        return stages[0]

    def search(self, things: Things, memory: Memory) -> Near:
        found = [part.search(things, memory) for part in self.of]
        parts = [memory.near[part] for part in self.of]
        match self.by:
            case "any":
                near = frozenset[tuple[Kind, str]]().union(*parts)
            case "all":
                near = frozenset.intersection(*parts)
            case "none":
                near = frozenset(
                    (kind, name)
                    for leaf in self.leaves
                    for kind in (leaf.kind_at(memory.stage),)
                    for named in things[kind]
                    for name in leaf.offers(named)
                )
                whole = (p for p in self.of if isinstance(p, Leaf) and p.picks_all)
                near = near.difference(*(memory.near[part] for part in whole))
        memory.near[self] = near
        # A limit inside counts the places that other parts reject, too.
        has_limit = any(isinstance(part, Combined) and part.counts_places for part in self.of)
        return near.union(*found) if has_limit else near

    @property
    def counts_places(self) -> bool:
        """Whether it or one of its parts has a limit."""
        parts = (part for part in self.of if isinstance(part, Combined))
        return self.limit is not None or any(part.counts_places for part in parts)

    def check(self, things: Things, memory: Memory) -> None:
        for part in self._must_match():
            part.check(things, memory)
        if memory.near[self]:
            return
        for part in self.of:
            part.check(things, memory)  # a part that matches nothing says so itself
        alone = "; ".join(shortened(sorted(name for _, name in memory.near[p])) for p in self.of)
        parts = ", ".join(map(in_short, self.of))
        text = f"no site is in {self.by} of {parts}. Each selects: {alone}"
        raise SelectionError(self, "by", text)

    def fits(self, place: Place, memory: Memory) -> bool:
        # All parts are asked: those with a limit count the places that they let in.
        picked = [part.fits(place, memory) for part in self.of]
        for part, fits in zip(self.of, picked, strict=True):
            if fits:
                memory.picking.add(part)
            elif any(leaf.kind_at(memory.stage) == place.kind for leaf in part.leaves):
                memory.refusing.add(part)
        match self.by:
            case "any":
                fits = any(picked)
            case "all":
                fits = all(picked)
            case "none":
                fits = self._is_near(place, memory.near[self]) and not any(picked)
        fits = fits and (self.test is None or bool(self.test(place)))
        return self._is_within(place, memory) if fits and self.limit is not None else fits

    def unmatched(self, memory: Memory) -> Iterator[Selector]:
        for part in self.of:
            is_near = isinstance(part, Leaf) and part.picks_all and bool(memory.near[part])
            if self.by != "all" and part in memory.refusing - memory.picking and not is_near:
                yield part
            else:
                yield from part.unmatched(memory)

    def _is_near(self, place: Place, near: Near) -> bool:
        # All names of the model are near, except the name of a model that is not offered itself.
        has_others = (place.kind, ELSEWHERE) in near
        return (place.kind, place.name) in near or (has_others and place.name != ROOT)

    def _is_within(self, place: Place, memory: Memory) -> bool:
        """Whether a place is one of the first ones; several tensors of one call count once,
        unless a leaf tells them apart.
        """
        site = place.site if any(leaf.picks_items for leaf in self.leaves) else place.whole
        admitted = memory.admitted.setdefault(self, {})
        if self.limit is not None and len(admitted) < self.limit:
            admitted[site] = None
        return site in admitted

    def _must_match(self) -> Iterator[Selector]:
        """Yield the parts that must match something by themselves, as the whole may hide it."""
        for part in self.of if self.by != "none" else ():
            is_union = isinstance(part, Combined) and part.by == "any" and part.test is None
            if isinstance(part, Combined) and (self.by == "all" or is_union):
                yield from part._must_match()
            elif self.by == "any":
                yield part
