"""One call of a model for many sets of parameters: `torch.func` without its checks at each call.

`functional_call` under `vmap` gives the same tensors, and takes longer than a small model itself.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_functorch = import_module("torch._C._functorch")
_SingleLevelFunction: Any = import_module("torch.autograd.function")._SingleLevelFunction
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


def batch_linear_layers(model: nn.Module) -> None:
    """Let the linear layers of a model under `batched` multiply in the order of a single model.

    The rule of `vmap` multiplies the transposed factors in the backward pass, and rounds otherwise.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module)["forward"] = partial(_linear, module)


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Return the outputs of a layer, whose parameters are batched."""
    level: int = _functorch.maybe_get_level(module.weight)
    weight, bias = (
        None if param is None else _functorch.get_unwrapped(param)
        for param in (module.weight, module.bias)
    )
    assert weight is not None
    stacked = _functorch._remove_batch_dim(inputs, level, len(weight), 0)
    rows = stacked.flatten(1, -2) if stacked.ndim > 2 else stacked[:, None]
    # Its tensors are plain ones: vmap has no part in it.
    allowed: bool = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        outputs = _Linear.apply(rows, weight, bias)
    finally:
        _functorch.set_single_level_autograd_function_allowed(allowed)
    return _functorch._add_batch_dim(outputs.view(*stacked.shape[:-1], -1), 0, level)


class _Linear(_SingleLevelFunction):
    """k products (n, in) x (in, out), each with the bits of one by itself."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if bias is None:
            return torch.bmm(rows, weight.mT)
        return torch.baddbmm(bias[:, None], rows, weight.mT)

    @staticmethod
    def backward(
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # Any: as torch types it
        (grad,), (rows, weight) = grads, ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if needs_rows else None,
            torch.bmm(grad.mT, rows) if needs_weight else None,
            grad.sum(1) if needs_bias else None,
        )


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
