"""The graphs that torch.compile has made: what each task reaches in them, and how often."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from gradsurg import engine
from gradsurg.multitask.losses import nodes_of

COMPILED = "CompiledFunctionBackward"  # the node of all that has become one graph

ERRORS = Exception  # what a compiled backward asks of its gradients is its own matter

# What each output of a graph lets through, as numbers of next nodes: found once a graph.
_KNOWN: WeakKeyDictionary[type, dict[int, list[int]]] = WeakKeyDictionary()


def all_run_again(losses: Iterable[Tensor]) -> bool:
    """Whether the losses may be sent back through more than once, as far as compiled graphs go."""
    return all(engine.runs_again(node) for node in nodes_of(losses) if node.name() == COMPILED)


def leaves_of(loss: Tensor) -> set[int]:
    """The ids of the leaves that a loss was made of."""
    root = get_gradient_edge(loss)
    waiting = [(root.node, root.output_nr)]
    met = set(waiting)
    leaves: set[int] = set()
    while waiting:
        node, number = waiting.pop()
        leaves.add(id(getattr(node, "variable", None)))
        for edge in _after(node, number):
            if edge not in met:
                met.add(edge)
                waiting.append(edge)
    return leaves


def _after(node: Node, number: int) -> list[tuple[Node, int]]:
    """The edges that a gradient at output `number` flows on to. Of a node that is no compiled graph
    all outputs are one, and of one that cannot be asked there are none.
    """
    edges = [(own, at) for own, at in node.next_functions if own is not None]
    if node.name() != COMPILED:
        return [(own, at if own.name() == COMPILED else 0) for own, at in edges]
    known = _KNOWN.setdefault(type(node), {})
    if number not in known:
        try:
            known[number] = engine.lets_through(node, number)
        except ERRORS:
            known[number] = []
    return [edges[index] for index in known[number]]
