"""The losses that are given: named, and refused where they cannot be differentiated."""

from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

Losses = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""By the names of their tasks, or in an order, as a list or as a tensor of one axis."""

Place = TypeVar("Place", bound=Hashable)


def named(losses: Losses) -> dict[str, Tensor]:
    """The losses by name: those in an order are called 0, 1 and so on.

    Raises TypeError or ValueError, with the name, for what is no loss.
    """
    match losses:
        case Tensor():
            if losses.ndim > 1:
                raise ValueError(f"losses: must have one axis, found shape {list(losses.shape)}")
            given = dict(enumerate(losses.reshape(-1).unbind()))
        case Mapping():
            given = dict(losses)
        case Iterable() if not isinstance(losses, str):  # also what a mapping gives as its values
            given = dict(enumerate(losses))
        case _:
            raise TypeError(f"losses: must be a mapping or a sequence of tensors, found {losses!r}")
    if not given:
        raise ValueError("losses: needs one at least, found none")
    for name, loss in given.items():
        _check(name, loss)
    found = {str(name): loss for name, loss in given.items()}
    if len(found) < len(given):
        twice = next(name for name in found if sum(name == str(own) for own in given) > 1)
        raise ValueError(f"losses: two are called '{twice}'")
    return found


def _check(name: object, loss: object) -> None:
    if not isinstance(name, str | int) or name == "" or "/" in str(name):
        raise ValueError(f"losses: a name must be a text without a '/', found {name!r}")
    if not isinstance(loss, Tensor):
        raise TypeError(f"losses['{name}']: must be a tensor, found {loss!r}")
    if loss.ndim:
        raise ValueError(
            f"losses['{name}']: must have no axes, found shape {list(loss.shape)}: take its mean"
        )
    if not loss.is_floating_point():
        raise TypeError(f"losses['{name}']: must be a real number, found {loss.dtype}")
    if not loss.requires_grad:
        raise ValueError(
            f"losses['{name}']: needs no gradient: nothing it was made of does, or it was made "
            "under no_grad"
        )


def values(losses: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """The numbers, without the loss scale; waits for the device, as the solvers do: once, or for
    each loss where they are on several.
    """
    wide = [loss.detach().double() for loss in losses.values()]
    one = {loss.device for loss in wide}
    found = torch.stack(wide).tolist() if len(one) == 1 else [loss.item() for loss in wide]
    return {name: number / scale for name, number in zip(losses, found, strict=True)}


def nodes_of(losses: Iterable[Tensor]) -> KeysView[Node]:
    """The autograd nodes that the losses were made by."""
    return walk([get_gradient_edge(loss).node for loss in losses], nodes_after)


def walk(start: Iterable[Place], after: Callable[[Place], Iterable[Place]]) -> KeysView[Place]:
    """All places that are come to from these by going on to what is `after` each.

    `after` is asked once for each place, and all that it gives is taken: it may note what it meets.
    """
    met = dict.fromkeys(start)
    waiting = list(met)
    while waiting:
        for place in after(waiting.pop()):
            if place not in met:
                met[place] = None
                waiting.append(place)
    return met.keys()


def nodes_after(node: Node) -> list[Node]:
    """Those that a gradient flows on to from a node."""
    return [after for after, _ in node.next_functions if after is not None]


def leaf_of(node: Node) -> Tensor | None:
    """The leaf whose gradient a node adds up, if it is such a node."""
    return getattr(node, "variable", None)
