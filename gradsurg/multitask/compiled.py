"""The graphs that torch.compile has made: what each task reaches in them, and how often."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.multitask.losses import leaf_of, nodes_after, nodes_of, walk
from gradsurg.torch_internals import compiling

PROBES = 5

# What each output of a graph has let through so far, as numbers of next nodes, in so many probes.
# More than one, for what a relu holds back today it may let through tomorrow.
_SEEN: WeakKeyDictionary[type, dict[int, tuple[set[int], int]]] = WeakKeyDictionary()


def runs_once(losses: Iterable[Tensor], shared: bool = False, below: Iterable[Node] = ()) -> bool:
    """Whether a compiled graph that the losses were made by may be sent back through once alone.
    If `shared`, of those that two losses reach; what is `below` these nodes does not count.
    """
    if not compiling.has_compiled():
        return False
    met = Counter(chain.from_iterable(nodes_of([loss]) for loss in losses))
    left_out = walk(below, nodes_after)
    return any(
        node.name() == compiling.COMPILED and not compiling.runs_again(node)
        for node, number in met.items()
        if number > shared and node not in left_out
    )


def leaves_of(loss: Tensor) -> set[int]:
    """The ids of the leaves that a loss was made of."""
    root = get_gradient_edge(loss)
    edges = walk([(root.node, root.output_nr)], _edges_after)
    return {id(leaf_of(node)) for node, _ in edges}


def _edges_after(edge: tuple[Node, int]) -> list[tuple[Node, int]]:
    """The edges that a gradient flows on to from one, as far as it was seen: none of a graph that
    has one backward alone. Of a node that is no compiled graph all outputs are one.
    """
    node, number = edge
    edges = [(own, at) for own, at in node.next_functions if own is not None]
    if node.name() != compiling.COMPILED:
        return [(own, at if own.name() == compiling.COMPILED else 0) for own, at in edges]
    if not compiling.runs_again(node):  # asking takes the one backward that it has
        return []
    seen = _SEEN.setdefault(type(node), {})
    through, probes = seen.get(number, (set(), 0))
    if probes < PROBES and len(through) < len(edges):
        through = through | set(compiling.lets_through(node, number))
        seen[number] = through, probes + 1
    return [edges[index] for index in sorted(through)]
