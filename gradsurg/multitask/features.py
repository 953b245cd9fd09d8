"""The representation that several tasks share, the output of a named module: cut graphs there."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.multitask.graph import leaf_of, reachable, with_nodes_below
from gradsurg.plugins.fields import SelectionError
from gradsurg.plugins.messages import shortened, unknown
from gradsurg.sites.selection import names_of
from gradsurg.sites.tensors import tensors_in
from gradsurg.torch_internals import compiling

REENTRANT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint
METADATA_KEY = "gradsurg.features"  # marks the nodes that produced the output of a named module
PREFIX = 64  # entries that are compared first


@dataclass(frozen=True)
class GraphCut:
    """The edges at which the graphs of the tasks reach the representation, and the heads above.

    Attributes:
        edges: The edges into the nodes that made the representation.
        heads: For each task, the leaves above the edges.
        nested: Whether one edge leads to another. Then gradients are stopped at each edge, so that
            the second edge does not receive the gradients of the first.
        joined: Whether tasks also share nodes above the edges (never leaves).
    """

    edges: list[GradientEdge]
    heads: dict[str, list[Tensor]]
    nested: bool
    joined: bool

    @property
    def nodes(self) -> frozenset[Node]:
        """The nodes that the edges enter."""
        return frozenset(edge.node for edge in self.edges)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop gradients at nested edges."""
        with ExitStack() as stack:
            # `torch.autograd.grad` reads the gradient at an edge before the prehooks of its node.
            for node in self.nodes if self.nested else ():
                stack.callback(node.register_prehook(lambda grads: (None,) * len(grads)).remove)
            yield

    def backward(
        self, loss: Tensor, name: str, retain_graph: bool
    ) -> tuple[Sequence[Tensor | None], dict[Tensor, Tensor]]:
        """Return the gradients of the loss of a task at the edges, and of its head."""
        head = self.heads[name]
        ends = [*self.edges, *map(get_gradient_edge, head)]
        grads = torch.autograd.grad(loss, ends, retain_graph=retain_graph, allow_unused=True)
        at_edges, of_head = grads[: len(self.edges)], grads[len(self.edges) :]
        pairs = zip(head, of_head, strict=True)
        return at_edges, {leaf: grad for leaf, grad in pairs if grad is not None}


def find_cut(losses: Mapping[str, Tensor], marker: "OutputMarker") -> GraphCut:
    """Find the cut at the marked outputs of a module.

    Raises ValueError if the losses share a leaf above them, RuntimeError if they do not depend on
    them.
    """
    edges: dict[tuple[Node, int], GradientEdge] = {}
    heads: dict[str, list[Tensor]] = {}
    counts: Counter[Node] = Counter()  # of the tasks that reach a node above the edges
    for name, loss in losses.items():
        above, entered = _above(get_gradient_edge(loss), marker)
        if any(node.name() == REENTRANT for node in above):
            raise RuntimeError(
                f"losses['{name}']: use checkpoint(.., use_reentrant=False): the head has a "
                "reentrant checkpoint, which hides its parameters from autograd.grad"
            )
        heads[name] = [leaf for node in above if (leaf := leaf_of(node)) is not None]
        edges |= {(edge.node, edge.output_nr): edge for edge in entered}
        counts.update(above)
    if not edges:
        raise RuntimeError(
            f"features: call the model in the block: the losses {shortened(losses)} do not depend "
            f"on an output of '{marker.name}' that requires a gradient"
        )
    if any(count > 1 and node.name() == compiling.COMPILED for node, count in counts.items()):
        raise RuntimeError(
            "features: compile the trunk and the heads separately, or use engine='full': inside "
            f"one compiled graph it cannot be seen where the losses {shortened(losses)} separate"
        )
    entered_nodes = {edge.node for edge in edges.values()}
    next_edges = chain.from_iterable(node.next_functions for node in entered_nodes)
    beneath = with_nodes_below(node for node, _ in next_edges if node is not None)
    _check_heads(heads, beneath, marker)
    nested = not beneath.isdisjoint(entered_nodes)
    joined = any(count > 1 for count in counts.values())
    return GraphCut(list(edges.values()), heads, nested, joined)


def _above(root: GradientEdge, marker: "OutputMarker") -> tuple[list[Node], list[GradientEdge]]:
    """Return the nodes from a root down to the marked ones, and the edges that enter these."""
    if root.node in marker:
        return [], [root]
    entered: list[GradientEdge] = []

    def successors(node: Node) -> Iterator[Node]:
        for following, output in node.next_functions:
            if following is not None and following in marker:
                entered.append(GradientEdge(following, output))
            elif following is not None:
                yield following

    return list(reachable([root.node], successors)), entered


def _check_heads(
    heads: Mapping[str, Sequence[Tensor]], beneath: Collection[Node], marker: "OutputMarker"
) -> None:
    """Raise ValueError if a leaf is in two heads, or in a head and below the cut."""
    owners: dict[int, str] = {}
    for name, leaves in heads.items():
        for leaf in leaves:
            other = owners.setdefault(id(leaf), name)
            if other != name:
                raise ValueError(
                    "features: name a later module, use engine='full', or compute each loss from "
                    f"its own head: those of '{other}' and '{name}' both depend on "
                    f"{marker.name_of(leaf)} above '{marker.name}'"
                )
            if get_gradient_edge(leaf).node in beneath:
                raise ValueError(
                    f"features: name an earlier module, or use engine='full': the loss of '{name}' "
                    f"depends on {marker.name_of(leaf)} through '{marker.name}' and past it"
                )


def check_dense(task_grads: Sequence[Sequence[Tensor | None]], name: str) -> None:
    """Raise TypeError if a gradient at the output of a module is not dense."""
    for grad in chain.from_iterable(task_grads):
        if grad is not None and grad.layout != torch.strided:
            raise TypeError(
                f"features: an aggregator takes dense gradients, found at '{name}' "
                f"{grad.dtype} with layout {grad.layout}"
            )


def are_disjoint(task_grads: Sequence[Sequence[Tensor | None]]) -> bool:
    """Return whether several tasks have nonzero gradients, and no entry is nonzero for two of them.

    Such tasks cannot conflict.
    """
    columns = [
        [grad for grad in column if grad is not None] for column in zip(*task_grads, strict=True)
    ]
    # The first entries nearly always decide, at little cost.
    if any(_overlap(column, PREFIX) or _overlap(column) for column in columns):
        return False
    alive = [any(grad is not None and bool(grad.any()) for grad in grads) for grads in task_grads]
    return sum(alive) > 1


def _overlap(grads: Sequence[Tensor], first: int | None = None) -> bool:
    """Return whether two gradients share an entry of the first ones; waits for the device."""
    masks = [grad.reshape(-1)[:first] != 0 for grad in grads]
    return len(masks) > 1 and bool((torch.stack(masks).sum(dim=0) > 1).any())


def module_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module with this name. Raises SelectionError if there is none."""
    modules = {alias: module for module, names in names_of(model).items() for alias in names}
    if name not in modules:
        text = unknown(f"there is no module '{name}'", name, list(modules))
        raise SelectionError("SharedParameters", "features", text)
    return modules[name]


class OutputMarker:
    """Mark the autograd nodes of the outputs of a module, by a forward hook.

    The mark is an entry in the metadata of the node, so it lives as long as the graph and keeps
    nothing else alive. Supports `node in marker`.
    """

    def __init__(self, model: nn.Module, name: str, stack: ExitStack) -> None:
        self.name, self._model = name, proxy(model)
        self._leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()  # outputs without a node
        self._mark = object()  # not self, which the graph would keep alive
        module = module_of(model, name)
        stack.callback(module.register_forward_hook(self._hook()).remove)

    def name_of(self, leaf: Tensor) -> str:
        """Return the name of a parameter, or the shape of another tensor."""
        names = (name for name, param in self._model.named_parameters() if param is leaf)
        return next(names, f"a tensor of shape {list(leaf.shape)}")

    def __contains__(self, node: Node) -> bool:
        leaf = leaf_of(node)
        if leaf is not None and leaf in self._leaves:
            return True
        return _metadata(node).get(METADATA_KEY) is self._mark

    def _hook(self) -> Callable[..., None]:
        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            for _, tensor in tensors_in(output, every=True):
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[METADATA_KEY] = self._mark
                elif tensor.requires_grad:
                    self._leaves[tensor] = None

        return hook


def _metadata(node: Node) -> dict[str, object]:
    metadata: Any = node.metadata  # Any: PyTorch's stubs declare it as a method
    return metadata
