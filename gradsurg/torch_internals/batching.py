"""One call of a model for many sets of parameters: `torch.func` without its checks at each call.

`functional_call` under `vmap` gives the same tensors, and takes longer than a small model itself.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn

_functorch = import_module("torch._C._functorch")
_load_decompositions: Callable[[], None]
_load_decompositions = import_module("torch._functorch.vmap").lazy_load_decompositions


def batched(
    function: Callable[[Sequence[Tensor]], Iterable[Tensor]],
    tensors: Iterable[Tensor],
    count: int,
) -> list[Tensor]:
    """Return `vmap(function)(tensors)` for tensors with a leading axis of `count`.

    Raises RuntimeError if the function draws a random number.
    """
    _load_decompositions()
    level = _functorch._vmap_increment_nesting(count, "error")
    try:
        results = function([_functorch._add_batch_dim(tensor, 0, level) for tensor in tensors])
        return [_functorch._remove_batch_dim(result, level, count, 0) for result in results]
    finally:
        _functorch._vmap_decrement_nesting()


class Slots:
    """The places of a model's parameters and buffers, which other tensors can take.

    A tensor with several names has several places.
    """

    def __init__(self, model: nn.Module) -> None:
        self._own: dict[str, Tensor | None] = {}
        # Any: parameters or buffers, which another tensor replaces
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        names: dict[int, str] = {}
        for prefix, module in model.named_modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                    self._own[name] = tensor
                    self._places.setdefault(name, []).append((table, key))

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put tensors in the places of the parameters and buffers with these names."""
        for name, tensor in tensors:
            for table, key in self._places[name]:
                table[key] = tensor

    def restore(self) -> None:
        """Put the model's own tensors back."""
        for name, tensor in self._own.items():
            for table, key in self._places[name]:
                table[key] = tensor
