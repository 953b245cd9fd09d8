"""Gradients of single examples for each kind of layer, from its inputs and output gradients.

A layer's input x has the shape (n, ...), one entry an example, dy is the gradient of its output. A
rule computes, for a parameter of the layer, the rows (n, *shape), their squared norms (n,), and
their weighted sum. It computes the last two without the rows where that is cheaper ("ghost" norms:
Goodfellow 2015, arXiv 1510.01799; Bu et al., NeurIPS 2022, arXiv 2205.10683).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.aggregators.rows import gramian_of
from gradsurg.torch_internals.autograd import convolution_padding

Module = Any  # Any: the attributes of a layer depend on its kind


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """One call of a layer: its input and the gradient of its output, both with n entries."""

    layer: nn.Module
    inputs: Tensor
    grad: Tensor


class Rule:
    """Base class: the rows of a parameter, and the same results from the rows."""

    def refusal(self, layer: Module) -> str:
        """Return why this layer has no gradients of single examples; empty if it has."""
        return ""

    def is_batched(self, layer: Module, inputs: Tensor) -> bool:
        """Return whether the first axis of the input can have the examples."""
        return inputs.ndim >= 2

    def rows(self, call: LayerCall, name: str) -> Tensor:
        """Return the gradient of each example, (n, *shape of the parameter)."""
        raise NotImplementedError

    def squares(self, call: LayerCall, name: str) -> Tensor:
        """Return the squared norm of each row, (n,)."""
        return flat(self.rows(call, name)).square().sum(1)

    def weighted(self, call: LayerCall, name: str, weights: Tensor) -> Tensor:
        """Return the sum of the rows times `weights` (n,)."""
        rows = self.rows(call, name)
        return (weights @ flat(rows)).view(rows.shape[1:])

    def gramian(self, call: LayerCall, name: str) -> Tensor:
        """Return the products of all pairs of rows, (n, n) in float64 on the CPU."""
        return gramian_of([flat(self.rows(call, name))])


class LinearRule(Rule):
    """y = x Wᵀ + b, with any number of positions t between the batch and the features."""

    def rows(self, call: LayerCall, name: str) -> Tensor:
        x, dy = _positions(call.inputs), _positions(call.grad)
        if name == "bias":
            return dy.sum(1)
        return dy[:, 0, :, None] * x[:, 0, None, :] if x.shape[1] == 1 else dy.mT @ x

    def squares(self, call: LayerCall, name: str) -> Tensor:
        x, dy = call.inputs, call.grad
        if name == "bias":
            return (dy if dy.ndim == 2 else _positions(dy).sum(1)).square().sum(1)
        if x.ndim == 2:
            return x.square().sum(1) * dy.square().sum(1)
        x, dy = _positions(x), _positions(dy)
        return _product_squares(x, dy)

    def weighted(self, call: LayerCall, name: str, weights: Tensor) -> Tensor:
        dy = call.grad
        if name == "bias":
            return weights @ (dy if dy.ndim == 2 else _positions(dy).sum(1))
        dy = dy * weights.view(-1, *[1] * (dy.ndim - 1))
        return dy.flatten(0, -2).T @ call.inputs.flatten(0, -2)

    def gramian(self, call: LayerCall, name: str) -> Tensor:
        if name == "bias":
            return super().gramian(call, name)
        return _product_gramian(_positions(call.inputs), _positions(call.grad))


class ConvolutionRule(Rule):
    """Convolutions in one and two dimensions, by the patches of the input."""

    def is_batched(self, layer: Module, inputs: Tensor) -> bool:
        return inputs.ndim == len(layer.kernel_size) + 2

    def rows(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        dy = call.grad.flatten(2)
        if name == "bias":
            return dy.sum(2)
        if layer.weight.shape[1] > 1 and len(dy) > 1:  # for one channel the patches are cheaper
            return self._convolved(call, call.grad, len(dy)).view(len(dy), *layer.weight.shape)
        parts = [part.unflatten(1, (layer.groups, -1)) for part in (dy, self._patches(call))]
        return (parts[0] @ parts[1].mT).reshape(len(dy), *layer.weight.shape)

    def squares(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        if name == "bias" or layer.groups > 1:
            return super().squares(call, name)
        return _product_squares(self._patches(call).mT, call.grad.flatten(2).mT)

    def gramian(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        if name == "bias" or layer.groups > 1:
            return super().gramian(call, name)
        return _product_gramian(self._patches(call).mT, call.grad.flatten(2).mT)

    def weighted(self, call: LayerCall, name: str, weights: Tensor) -> Tensor:
        if name == "bias":
            return weights @ call.grad.flatten(2).sum(2)
        return self._convolved(call, call.grad * weights.view(-1, *[1] * (call.grad.ndim - 1)))

    def _convolved(self, call: LayerCall, dy: Tensor, count: int = 1) -> Tensor:
        """Return the gradient of the weight, summed over the examples. With `count` > 1 return it
        for each example: the examples become groups of channels of a single one."""
        layer: Module = call.layer
        (x, padding), weight = self._padded(call), layer.weight
        if count > 1:
            x, dy = x.reshape(1, -1, *x.shape[2:]), dy.reshape(1, -1, *dy.shape[2:])
            weight = weight.new_empty(count * weight.shape[0], *weight.shape[1:])  # for its shape
        flags = [False, True, False]
        zeros = [0] * len(layer.stride)
        return torch.ops.aten.convolution_backward(
            dy, x, weight, None, layer.stride, padding, layer.dilation, False, zeros,
            count * layer.groups, flags,
        )[1]  # fmt: skip

    def _padded(self, call: LayerCall) -> tuple[Tensor, list[int]]:
        """Return the input, padded unless zeros are added on both sides, and the padding left."""
        layer: Module = call.layer
        if layer.padding_mode != "zeros" or layer.padding == "same":
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            around = convolution_padding(layer)
            return functional.pad(call.inputs, around, mode=mode), [0] * len(layer.stride)
        padding = layer.padding
        return call.inputs, [0] * len(layer.stride) if padding == "valid" else list(padding)

    def _patches(self, call: LayerCall) -> Tensor:
        """Return the patches of the input, (n, channels times kernel, places of the output)."""
        layer: Module = call.layer
        x, padding = self._padded(call)
        if x.ndim == 3:
            x = x[:, :, None]
            kernel, dilation = (1, *layer.kernel_size), (1, *layer.dilation)
            return functional.unfold(x, kernel, dilation, (0, *padding), (1, *layer.stride))
        return functional.unfold(x, layer.kernel_size, layer.dilation, tuple(padding), layer.stride)


class EmbeddingRule(Rule):
    """Rows of a table, chosen by integers of the shape (n, ...)."""

    def refusal(self, layer: Module) -> str:
        if layer.sparse:
            return "its gradient is sparse"
        return "scale_grad_by_freq counts over the batch" if layer.scale_grad_by_freq else ""

    def is_batched(self, layer: Module, inputs: Tensor) -> bool:
        # The indices 0, 1, ... without another axis are places in a sequence.
        counted = torch.arange(len(inputs), device=inputs.device)
        return inputs.ndim > 1 or not torch.equal(inputs, counted)

    def rows(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        dy, indices = self._by_position(call)
        rows = dy.new_zeros(len(dy), *layer.weight.shape)
        return rows.scatter_add_(1, indices[:, :, None].expand_as(dy), dy)

    def squares(self, call: LayerCall, name: str) -> Tensor:
        dy, indices = self._by_position(call)
        if indices.shape[1] == 1:
            return dy[:, 0].square().sum(1)
        same = indices[:, :, None] == indices[:, None, :]
        return ((dy @ dy.mT) * same).sum((1, 2))

    def gramian(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        dy, indices = self._by_position(call)
        n, t = indices.shape
        if n * t * t > layer.weight.numel():
            return super().gramian(call, name)
        rows, places = dy.flatten(0, 1).double(), indices.flatten()
        products = (rows @ rows.T) * (places[:, None] == places)
        return products.view(n, t, n, t).sum((1, 3)).cpu()

    def weighted(self, call: LayerCall, name: str, weights: Tensor) -> Tensor:
        layer: Module = call.layer
        dy, indices = self._by_position(call)
        dy = dy * weights[:, None, None]
        total = dy.new_zeros(layer.weight.shape)
        return total.index_add_(0, indices.flatten(), dy.flatten(0, 1))

    def _by_position(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Return dy (n, t, width), zero at the padding index, and the indices (n, t)."""
        layer: Module = call.layer
        indices = call.inputs.reshape(len(call.inputs), -1)
        dy = call.grad.reshape(*indices.shape, -1)
        if layer.padding_idx is not None:
            dy = dy * (indices != layer.padding_idx)[:, :, None]
        return dy, indices


class NormalizationRule(Rule):
    """y = w * normalized(x) + b, entry by entry; `normalize` is the layer without w and b."""

    def __init__(self, normalize: Callable[[Module, Tensor], Tensor], channels: bool) -> None:
        self.normalize = normalize
        self.channels = channels  # whether the parameters lie along the axis after the batch

    def refusal(self, layer: Module) -> str:
        if self is _batch and (layer.training or layer.running_mean is None):
            return "its statistics come from the batch, so that no example has a loss of its own"
        return ""

    def rows(self, call: LayerCall, name: str) -> Tensor:
        layer: Module = call.layer
        dy = call.grad
        products = dy if name == "bias" else dy * self.normalize(layer, call.inputs)
        if self.channels:
            return products.flatten(2).sum(2) if products.ndim > 2 else products
        kept = getattr(layer, name).ndim
        return products.reshape(len(dy), -1, *products.shape[products.ndim - kept :]).sum(1)


def _layer_norm(layer: Module, x: Tensor) -> Tensor:
    return functional.layer_norm(x, layer.normalized_shape, None, None, layer.eps)


def _rms_norm(layer: Module, x: Tensor) -> Tensor:
    return functional.rms_norm(x, layer.normalized_shape, None, layer.eps)


def _group_norm(layer: Module, x: Tensor) -> Tensor:
    return functional.group_norm(x, layer.num_groups, None, None, layer.eps)


def _instance_norm(layer: Module, x: Tensor) -> Tensor:
    uses_input = layer.training or not layer.track_running_stats
    return functional.instance_norm(
        x, layer.running_mean, layer.running_var, None, None, uses_input, 0.0, layer.eps
    )


def _batch_norm(layer: Module, x: Tensor) -> Tensor:
    return functional.batch_norm(
        x, layer.running_mean, layer.running_var, None, None, False, 0.0, layer.eps
    )


_batch = NormalizationRule(_batch_norm, channels=True)
RULES: dict[object, Rule] = {
    nn.Linear.forward: LinearRule(),
    nn.Conv1d.forward: ConvolutionRule(),
    nn.Conv2d.forward: ConvolutionRule(),
    nn.Embedding.forward: EmbeddingRule(),
    nn.LayerNorm.forward: NormalizationRule(_layer_norm, channels=False),
    nn.RMSNorm.forward: NormalizationRule(_rms_norm, channels=False),
    nn.GroupNorm.forward: NormalizationRule(_group_norm, channels=True),
    nn.InstanceNorm1d.forward: NormalizationRule(_instance_norm, channels=True),
    nn.BatchNorm1d.forward: _batch,  # BatchNorm2d inherits the same one
    nn.SyncBatchNorm.forward: _batch,
}
"""Rules by the `forward` that they are made for, so that subclasses with another one have none."""


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of a module, None if it has none."""
    return RULES.get(type(module).forward)


def flat(rows: Tensor) -> Tensor:
    """Return the rows as a matrix, (n, entries); a parameter without axes has one column."""
    return rows[:, None].flatten(1)


def _positions(tensor: Tensor) -> Tensor:
    """Return the tensor with one axis of positions, (n, t, features)."""
    if tensor.ndim == 2:
        return tensor[:, None]
    return tensor if tensor.ndim == 3 else tensor.flatten(1, -2)


def _product_squares(x: Tensor, dy: Tensor) -> Tensor:
    """Return |dyᵢᵀ xᵢ|² of each example, for x (n, t, p) and dy (n, t, q)."""
    t, p, q = x.shape[1], x.shape[2], dy.shape[2]
    if t * (p + q) < p * q:
        return ((x @ x.mT) * (dy @ dy.mT)).sum((1, 2))
    return (dy.mT @ x).flatten(1).square().sum(1)


def _product_gramian(x: Tensor, dy: Tensor) -> Tensor:
    """Return the products of the matrices dyᵢᵀ xᵢ, (n, n), for x (n, t, p) and dy (n, t, q).

    They are (X Xᵀ) o (Y Yᵀ) summed over the positions of each pair of examples, for all positions
    of all examples as the rows of X and Y. With many positions the matrices themselves are cheaper.
    """
    (n, t, p), q = x.shape, dy.shape[2]
    if n * t * t * (p + q) > p * q * (t + n):
        return gramian_of([flat(dy.mT @ x)])
    products = [rows @ rows.T for rows in (x.flatten(0, 1).double(), dy.flatten(0, 1).double())]
    return (products[0] * products[1]).view(n, t, n, t).sum((1, 3)).cpu()
