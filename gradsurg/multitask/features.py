"""Where the graphs of several losses part: the representation that they share."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.multitask.losses import leaf_of, nodes_after, walk
from gradsurg.plugins.fields import SelectionError, nearest
from gradsurg.sites.call_tracker import tensors_in
from gradsurg.sites.selection import names_of, owned_params
from gradsurg.torch_internals import compiling

REENTRANT = "CheckpointFunctionBackward"  # the node of a reentrant checkpoint
MARK = "gradsurg.features"  # in the metadata of a node that has made what a named module gives
FIRST = 64  # numbers at an edge that are looked at before all are
MANY = -1  # whose node it is that several tasks reach


@dataclass(frozen=True)
class Cut:
    """The edges at which the graphs of the tasks enter what they share, and what each has alone.

    `nested` says that one edge may lead to another: what flows past the first is not to come to the
    second again, so nothing flows past any. `joined` says that tasks meet above the edges too,
    where they share no leaf.
    """

    edges: list[GradientEdge]
    heads: dict[str, list[Tensor]]  # of each task, the leaves above the edges
    nested: bool
    joined: bool

    @property
    def nodes(self) -> frozenset[Node]:
        """Those that the edges enter."""
        return frozenset(edge.node for edge in self.edges)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nothing flows past the edges in the block."""
        with ExitStack() as stack:
            for node in self.nodes if self.nested else ():
                stack.callback(node.register_prehook(lambda grads: (None,) * len(grads)).remove)
            yield

    def pass_down(
        self, loss: Tensor, name: str, retain: bool
    ) -> tuple[Sequence[Tensor | None], dict[Tensor, Tensor]]:
        """The gradients of the loss of a task at the edges and at the leaves that it has alone."""
        own = self.heads[name]
        ends = [*self.edges, *map(get_gradient_edge, own)]
        grads = torch.autograd.grad(loss, ends, retain_graph=retain, allow_unused=True)
        at, above = grads[: len(self.edges)], grads[len(self.edges) :]
        return at, {leaf: grad for leaf, grad in zip(own, above, strict=True) if grad is not None}

    def check_dense(self, parts: Sequence[Sequence[Tensor | None]], model: nn.Module) -> None:
        """Refuse a gradient at the edges that no row can hold."""
        for edge, grad in ((e, g) for own in parts for e, g in zip(self.edges, own, strict=True)):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"{_called(edge.node, model)}: an aggregator takes dense gradients, found "
                    f"{grad.dtype} with layout {grad.layout}"
                )


def cut(losses: Mapping[str, Tensor], at: "Watch | None" = None) -> Cut:
    """Find it by the graph, or `at` the representation that was named.

    Raises ValueError if the losses share nothing, or a leaf above the edges, RuntimeError if they
    were not made of what was named.
    """
    roots = [get_gradient_edge(loss) for loss in losses.values()]
    below: Container[Node]
    if at is not None:
        below = at
    elif len(roots) == 1:
        below = {roots[0].node}  # one task parts from nothing
    else:
        below = {node for node, owner in _owners(roots).items() if owner == MANY}
    edges: dict[tuple[Node, int], GradientEdge] = {}
    heads: dict[str, list[Tensor]] = {}
    above: Counter[Node] = Counter()
    for name, root in zip(losses, roots, strict=True):
        alone, entered = _above(root, below)
        if any(node.name() == REENTRANT for node in alone):
            raise RuntimeError(
                f"the head of task '{name}' holds a reentrant checkpoint, which hides its "
                "parameters from autograd.grad: use checkpoint(use_reentrant=False)"
            )
        heads[name] = [leaf for node in alone if (leaf := leaf_of(node)) is not None]
        edges |= {(edge.node, edge.output_nr): edge for edge in entered}
        above.update(alone)
    if not edges and at is not None:
        raise RuntimeError(
            f"features: '{at.name}' has given no tensor that needs a gradient and that the losses "
            f"{', '.join(losses)} were made of: was the model called in the block?"
        )
    if not edges:
        raise ValueError(
            f"the losses {', '.join(losses)} share no graph: no tensor that needs a gradient is "
            "part of two of them"
        )
    if any(count > 1 and node.name() == compiling.COMPILED for node, count in above.items()):
        raise RuntimeError(
            f"features: the losses {', '.join(losses)} part inside of what was compiled as one, "
            "which does not show where: compile the trunk and the heads apart, or use engine='full'"
        )
    entered_nodes = {edge.node for edge in edges.values()}
    beneath = walk(chain.from_iterable(map(nodes_after, entered_nodes)), nodes_after)
    _check_apart(heads, beneath)
    nested = not beneath.isdisjoint(entered_nodes)
    joined = any(count > 1 for count in above.values())
    return Cut(list(edges.values()), heads, nested, joined)


def _owners(roots: Iterable[GradientEdge]) -> dict[Node, int]:
    """The one task that reaches each node, or MANY. A node is met twice at most."""
    owners: dict[Node, int] = {}
    for task, root in enumerate(roots):
        waiting = [root.node]
        while waiting:
            node = waiting.pop()
            owner = owners.get(node)
            if owner in (task, MANY):
                continue
            owners[node] = task if owner is None else MANY
            waiting += nodes_after(node)
    return owners


def _above(root: GradientEdge, below: Container[Node]) -> tuple[list[Node], list[GradientEdge]]:
    """The nodes from a root down to those below, and the edges that lead into those."""
    if root.node in below:
        return [], [root]
    entered: list[GradientEdge] = []

    def after(node: Node) -> Iterator[Node]:
        for own, number in node.next_functions:
            if own is not None and own in below:
                entered.append(GradientEdge(own, number))
            elif own is not None:
                yield own

    return list(walk([root.node], after)), entered


def _called(node: Node, model: nn.Module) -> str:
    """What a user knows a node by."""
    leaf = leaf_of(node)
    if leaf is None:
        return f"the representation that {node.name()} has made"
    names = (own[0][0] for param, own in owned_params(model).items() if param is leaf)
    return f"parameter '{next(names, 'that is not of the model')}'"


def _check_apart(heads: Mapping[str, Sequence[Tensor]], beneath: Collection[Node]) -> None:
    """Refuse a leaf that has not one place: the head of one task, or what all share."""
    owner: dict[int, str] = {}
    hint = "name one above which they share nothing, or leave features out"
    for name, leaves in heads.items():
        for leaf in leaves:
            other = owner.setdefault(id(leaf), name)
            if other != name:
                raise ValueError(
                    f"features: tasks '{other}' and '{name}' share a parameter of shape "
                    f"{list(leaf.shape)} above the representation: {hint}"
                )
            if get_gradient_edge(leaf).node in beneath:
                raise ValueError(
                    f"features: task '{name}' reaches a parameter of shape {list(leaf.shape)} both "
                    f"below the representation and past it: {hint}"
                )


@dataclass
class Piece:
    """The gradients at some edges, of one dtype and device: the rows (T, p) of the tasks.

    A complex gradient is two numbers an entry, as the loss depends on its real and imaginary part.
    """

    likes: dict[int, Tensor]  # by the number of the edge, one of the gradients there
    rows: Tensor


def side_by_side(parts: Sequence[Sequence[Tensor | None]]) -> list[Piece]:
    """What each task has at each edge, as few matrices as dtypes and devices allow; an edge that
    no task reaches is left out.
    """
    kinds: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for index, column in enumerate(zip(*parts, strict=True)):
        like = next((grad for grad in column if grad is not None), None)
        if like is not None:
            kinds.setdefault((like.dtype.to_real(), like.device), {})[index] = like
    pieces = []
    for likes in kinds.values():
        rows = [torch.cat([_flat(own[index], likes[index]) for index in likes]) for own in parts]
        pieces.append(Piece(likes, torch.stack(rows)))
    return pieces


def is_apart(pieces: Sequence[Piece]) -> bool:
    """Whether several tasks have a gradient there, and no number two of them, so that none can
    conflict. A gradient of zero tells of neither.
    """
    # The first numbers nearly always tell, at little cost.
    if any(_meet(piece.rows[:, :FIRST] != 0) for piece in pieces):
        return False
    used = [piece.rows != 0 for piece in pieces]
    if any(map(_meet, used)):
        return False
    there = torch.stack([own.any(dim=1).cpu() for own in used]).any(dim=0)
    return int(there.sum()) > 1


def _meet(used: Tensor) -> bool:
    """Whether any number is used by two tasks; waits for the device."""
    return bool((used.sum(dim=0) > 1).any())


def _flat(grad: Tensor | None, like: Tensor) -> Tensor:
    full = torch.zeros_like(like) if grad is None else grad
    return (torch.view_as_real(full.resolve_conj()) if like.is_complex() else full).reshape(-1)


def split(pieces: Sequence[Piece], grads: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradient at each edge, of those of the pieces."""
    found: dict[int, Tensor] = {}
    for piece, grad in zip(pieces, grads, strict=True):
        likes = piece.likes.values()
        sizes = [like.numel() * (2 if like.is_complex() else 1) for like in likes]
        parts = map(_shaped, grad.split(sizes), likes)
        found |= dict(zip(piece.likes, parts, strict=True))
    return found


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    if not like.is_complex():
        return flat.view(like.shape)
    return torch.complex(*flat.view(*like.shape, 2).unbind(-1))


def module_of(model: nn.Module, name: str) -> nn.Module:
    """The module that `features` names. Raises LookupError if there is none."""
    modules = {own: module for module, names in names_of(model).items() for own in names}
    if name not in modules:
        text = f"there is no module '{name}'. {nearest(name, list(modules))}"
        raise SelectionError("SharedParameters", "features", text)
    return modules[name]


class Watch:
    """The nodes at which what a module has given enters a graph.

    They carry a mark and are not kept: a graph that nothing is gone back through goes with its
    tensors.
    """

    def __init__(self, model: nn.Module, name: str, stack: ExitStack) -> None:
        self.name = name
        self._leaves: WeakIdKeyDictionary = WeakIdKeyDictionary()  # which have no node of their own
        self._mark = object()  # not the watch: what a graph holds is to hold no more
        module = module_of(model, name)
        stack.callback(module.register_forward_hook(self._hook()).remove)

    def __contains__(self, node: Node) -> bool:
        leaf = leaf_of(node)
        known = leaf is not None and leaf in self._leaves
        return known or _notes(node).get(MARK) is self._mark

    def _hook(self) -> Callable[..., None]:
        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            for _, tensor in tensors_in(output, every=True):
                if tensor.grad_fn is not None:
                    _notes(tensor.grad_fn)[MARK] = self._mark
                elif tensor.requires_grad:
                    self._leaves[tensor] = None

        return hook


def _notes(node: Node) -> dict[str, object]:
    notes: Any = node.metadata  # Any: PyTorch's type calls it a method
    return notes
