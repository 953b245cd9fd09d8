"""Walk the autograd graphs of losses, through graphs made by `torch.compile` too."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, KeysView
from itertools import chain
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg.torch_internals import compiling

Item = TypeVar("Item", bound=Hashable)

MAX_PROBES = 5

# For each output of a compiled graph: the indices of the next nodes that were seen to receive a
# gradient, and the number of probes. There are several, because a relu may block a gradient in one
# batch and pass it in the next. Each compiled graph has a class of nodes to itself, the key here.
_PROBED: WeakKeyDictionary[type, dict[int, tuple[set[int], int]]] = WeakKeyDictionary()


def reachable(
    start: Iterable[Item], successors: Callable[[Item], Iterable[Item]]
) -> KeysView[Item]:
    """Return all items reachable from `start`.

    `successors` is called once for each item and its result is consumed, so it may have side
    effects.
    """
    visited = dict.fromkeys(start)
    pending = list(visited)
    while pending:
        for item in successors(pending.pop()):
            if item not in visited:
                visited[item] = None
                pending.append(item)
    return visited.keys()


def nodes_of(losses: Iterable[Tensor]) -> KeysView[Node]:
    """Return all autograd nodes of the graphs of the losses."""
    return with_nodes_below(loss.grad_fn or get_gradient_edge(loss).node for loss in losses)


def with_nodes_below(start: Iterable[Node]) -> KeysView[Node]:
    """Return these nodes, and all that receive a gradient from them."""
    nodes = dict.fromkeys(start)
    pending = list(nodes)
    while pending:  # as `reachable`, without a call for each node
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in nodes:
                nodes[node] = None
                pending.append(node)
    return nodes.keys()


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf tensor of an AccumulateGrad node, None for other nodes."""
    return getattr(node, "variable", None)


def has_single_use_graph(
    losses: Iterable[Tensor], shared: bool = False, below: Iterable[Node] = ()
) -> bool:
    """Return whether a graph of the losses was compiled for one backward pass only.

    With `shared`, only graphs that two losses reach count. Nodes reachable from `below` do not.
    """
    if not compiling.has_compiled():
        return False
    counts = Counter(chain.from_iterable(nodes_of([loss]) for loss in losses))
    ignored = with_nodes_below(below)
    return any(
        node.name() == compiling.COMPILED and not compiling.can_run_again(node)
        for node, count in counts.items()
        if count > shared and node not in ignored
    )


def leaf_ids(loss: Tensor) -> set[int]:
    """Return the ids of the leaves that receive a gradient of the loss."""
    root = get_gradient_edge(loss)
    edges = reachable([(root.node, root.output_nr)], _next_edges)
    return {id(leaf_of(node)) for node, _ in edges}


def _next_edges(edge: tuple[Node, int]) -> list[tuple[Node, int]]:
    """Return the edges that receive a gradient from `edge`.

    Those of a compiled graph are found by probing; a graph that supports one backward pass only is
    not probed and returns none. The output index is 0 except for compiled graphs.
    """
    node, output = edge
    edges = [
        (following, index) for following, index in node.next_functions if following is not None
    ]
    if node.name() != compiling.COMPILED:
        return [
            (following, index if following.name() == compiling.COMPILED else 0)
            for following, index in edges
        ]
    if not compiling.can_run_again(node):  # a probe would use up its one backward pass
        return []
    probed = _PROBED.setdefault(type(node), {})
    receiving, probes = probed.get(output, (set(), 0))
    if probes < MAX_PROBES and len(receiving) < len(edges):
        receiving = receiving | set(compiling.dependent_inputs(node, output))
        probed[output] = receiving, probes + 1
    return [edges[index] for index in sorted(receiving)]
