"""The call of a module, for transforms of the gradient of its input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradsurg.torch_internals import module_hooks
from gradsurg.torch_internals.hook_tables import call_tables, foreign_hooks


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call of a module that takes one tensor and returns one, for the gradient of its input.

    `input` and `output` are detached copies, `entering` is the gradient of the output. Calling it
    runs the module's forward again, without its hooks. If `is_affine`, the output comes from
    PyTorch's own linear or convolutional forward, and `pulled_back` needs no second forward.
    """

    module: nn.Module
    input: Tensor
    output: Tensor | None = None
    entering: Tensor | None = None
    is_affine: bool = False

    def __call__(
        self, value: Tensor, change: Callable[[str, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the output for another input, and parameters changed by `change(name, param)`."""
        forward = _Forward(self.module)
        params = {name: param.detach() for name, param in forward.named_parameters()}
        if change is not None:
            params = {name: change(name, param) for name, param in params.items()}
        return functional_call(forward, params, (value,))

    def watch(self, output: Tensor) -> None:
        """Copy the output, and note its gradient when it comes."""
        self.output = output.detach().clone()
        self.is_affine = _is_affine(self.module, self.input, self.output)
        if output.requires_grad:
            output.register_hook(self._enter)

    def pulled_back(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input for a gradient of the output, if `is_affine`."""
        layer: Any = self.module  # Any: a linear layer or a convolution
        weight = layer.weight.detach()
        if type(layer) is nn.Linear:
            return grad @ weight
        # Of the input it reads the shape alone.
        sizes = layer.stride, layer.padding, layer.dilation, False, [0], layer.groups
        return torch.ops.aten.convolution_backward(
            grad, self.input, weight, None, *sizes, [True, False, False]
        )[0]

    def _enter(self, grad: Tensor) -> None:
        self.entering = grad


_CONVOLUTIONS = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}
"""The number of axes of a batch of their inputs."""


def _is_affine(module: Any, value: Tensor, output: Tensor) -> bool:  # Any: a layer's attributes
    """Whether a module is a linear layer or a convolution whose output nothing has changed.

    Subclasses, as those with a parametrization, may compute something else, and so may hooks.
    """
    if type(module) is not nn.Linear and (
        _CONVOLUTIONS.get(type(module)) != value.ndim
        or module.padding_mode != "zeros"
        or isinstance(module.padding, str)
    ):
        return False
    tensors = value, module.weight, output
    is_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    tables = *call_tables(module), *module_hooks.global_hooks()
    return (
        is_plain
        and len({tensor.dtype for tensor in tensors}) == 1  # not under autocast
        and "forward" not in vars(module)
        and not foreign_hooks(*tables)
    )


class _Forward(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, value: Tensor) -> Tensor:
        return self.of.forward(value)
