"""Pairs of hooks that keep a tensor for a backward and give it back through a gate."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradsurg.sites.base import SiteHook
from gradsurg.torch_internals import autograd

Site = tuple[SiteHook, str]


def pair(site_of: Callable[[Tensor], Site | None], outer: autograd.Pair | None) -> autograd.Pair:
    """Hooks that keep a tensor as `outer` does, and let it through its gate when it is read."""
    give_back = outer[1] if outer is not None else None

    def pack(tensor: Tensor) -> object:
        site = site_of(tensor)
        if outer is not None:
            return site, outer[0](tensor), 0
        return site, tensor.detach(), tensor._version  # the tensor itself would never be freed

    def unpack(packed: tuple[Site | None, Any, int]) -> Tensor:
        site, kept, version = packed
        if give_back is not None:
            tensor = give_back(kept)
        else:
            tensor = kept
            if tensor._version != version:
                raise _changed_since(site, tensor, version)
        # Somebody may look at it outside a backward, and sees what was saved.
        if site is None or not autograd.in_backward():
            return tensor
        gate, name = site
        result = gate(tensor)
        if result is None:
            return tensor
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"SavedTensors: site '{name}' is read back under create_graph, and PyTorch cannot "
                "differentiate what is done to a saved tensor: use Activations, or no create_graph"
            )
        return result

    return pack, unpack


def _changed_since(site: Site | None, tensor: Tensor, version: int) -> RuntimeError:
    where = "" if site is None else f" at site '{site[1]}'"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {list(tensor.shape)} {tensor.dtype}{where} is at version {tensor._version}; "
        f"expected version {version} instead"
    )


def saved_by(node: Node) -> Iterator[tuple[str, Any, Callable[[], Tensor]]]:
    """What a node has saved: its name, itself (Any: PyTorch names no type) and how to read it."""
    for key in dir(node):
        if key.startswith("_raw_saved_"):
            name = key.removeprefix("_raw_saved_")
            read = "saved_tensors" if name == "tensors" else f"_saved_{name}"
            raw = getattr(node, key)
            if isinstance(raw, tuple):
                for index, saved in enumerate(raw):
                    yield f"{name}.{index}", saved, _reader(node, read, index)
            else:
                yield name, raw, _reader(node, read, None)


def _reader(node: Node, name: str, index: int | None) -> Callable[[], Tensor]:
    return lambda: getattr(node, name) if index is None else getattr(node, name)[index]
