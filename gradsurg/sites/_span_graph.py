"""The graph of one outermost call, its nodes told apart by their sequence numbers."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter

from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradsurg.sites._marks import Reading, Track
from gradsurg.sites._modules import ROOT
from gradsurg.sites._nested import tensors_in
from gradsurg.sites._node_names import plain
from gradsurg.sites._resolver import Call, Edge, Returned, Spot, Use

LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad node
WRAPPER = "BackwardHookFunctionBackward"  # around a module with full-backward hooks


class SpanGraph:
    """What one outermost call has made."""

    def __init__(
        self,
        track: Track,
        reading: Reading,
        forward: bool,
        output: object,
        since: frozenset[nn.Module],
    ) -> None:
        self._numbers, self._reading = track.numbers, reading
        self._before, self._since = track.before, since
        self._blanks = {track.numbers[mark] for mark in track.blank}
        self._roots = {t.grad_fn for _, t in tensors_in(output) if t.grad_fn is not None}
        self.whole = forward and reading.begun[0].name == ROOT
        self.returned = [
            Returned(reading.ended[mark], path, edge) for mark, path, edge in track.returned
        ]

    @property
    def empty(self) -> bool:
        return not self._roots

    def nodes(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[Node, Spot]]:
        found = self._reached()
        first, latest = self._numbers[0], self._reading.latest
        # Most forwards make the same nodes after the same calls as the last one did.
        pattern = (
            [number - first for number in self._numbers],
            [(number - first, node.name()) for number, node in found],
        )
        if wanted not in latest or latest[wanted][0] != pattern:
            latest[wanted] = pattern, self._spots(found, wanted)
        for place, spot in latest[wanted][1]:
            yield found[place][1], spot

    def _spots(
        self, reached: Sequence[tuple[int, Node]], wanted: Callable[[str], bool] | None
    ) -> list[tuple[int, Spot]]:
        """Where the wanted nodes were made, in that order, each with its place among all."""
        found = [(number, node.name(), place) for place, (number, node) in enumerate(reached)]
        if wanted is not None:
            # All overloads of a name count as its occurrences, so if one is wanted, all are told.
            kinds = {plain(name) for name in {name for _, name, _ in found} if wanted(name)}
            found = [made for made in found if plain(made[1]) in kinds]
        counts: Counter[tuple[Call, str]] = Counter()
        spots: list[tuple[int, Spot]] = []
        for number, name, place in sorted(found, key=itemgetter(0)):
            call = self._reading.owners[bisect_right(self._numbers, number) - 1]
            spots.append((place, Spot(name, call, counts[call, plain(name)])))
            counts[call, plain(name)] += 1
        return spots

    def uses(self, edges: Collection[Edge]) -> Sequence[Use]:
        return [use for _, use in self._uses(edges)]

    def _uses(self, edges: Collection[Edge]) -> list[tuple[int, Use]]:
        found = [
            (number, Use(edge, node, index))
            for number, node in self._reached()
            for index, edge in enumerate(node.next_functions)
            if edge in edges
        ]
        # Full-backward hooks put a node around what a module takes and returns: look behind it.
        inside: dict[Edge, Edge] = {
            (use.node, use.input): use.edge for _, use in found if use.node.name() == WRAPPER
        }
        if inside:
            found = [(number, use) for number, use in found if use.node.name() != WRAPPER]
            for number, use in self._uses(inside):
                found.append((number, use._replace(edge=inside[use.edge])))
        found.sort(key=lambda item: (item[0], item[1].input))
        return found

    def hides(self) -> bool:
        return bool(self._blanks) and any(
            isinstance(node, BackwardCFunction) and number + 1 in self._blanks
            # A checkpoint's own node is made before what it calls.
            for number, node in self._reached(self._numbers[0])
        )

    def _reached(self, begin: int | None = None) -> list[tuple[int, Node]]:
        """The nodes made in the call, from `begin` or the first call of interest on, that its
        outputs depend on, each with its number.
        """
        begin, end = self._first() if begin is None else begin, self._numbers[-1]
        waiting = list(self._roots.difference(self._before))
        seen, found = self._before.union(waiting), []
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number >= begin and number != LEAF:
                # An output that is a view may get its node when it is looked at, after the end.
                if number < end:
                    found.append((number, node))
                for source, _ in node.next_functions:
                    if source is not None and source not in seen:
                        seen.add(source)
                        waiting.append(source)
        return found

    def _first(self) -> int:
        """The number at which the first call of interest began."""
        if not self._since:
            return self._numbers[0]
        calls = zip(self._numbers, self._reading.owners, strict=False)
        return next((n for n, call in calls if call.module in self._since), self._numbers[-1])
