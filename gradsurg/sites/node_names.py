"""Names of autograd nodes and their families, and the edge into a residual branch."""

import re
from itertools import count

from torch import nn
from torch.autograd.graph import Node

from gradsurg.sites.selection import matches

PRODUCTS = (("Addmm", 1), ("Mm", 0))  # node and the edge of the gradient with respect to the input
FAMILIES = {
    "activation": (
        *("Relu", "LeakyRelu", "RreluWithNoise", "PreluKernel", "Threshold", "Elu", "Celu"),
        *("Gelu", "Silu", "Mish", "Glu", "Sigmoid", "LogSigmoid", "Tanh", "Softplus"),
        *("Hardtanh", "Hardsigmoid", "Hardswish", "Hardshrink", "Softshrink"),
    ),
    "attention": ("ScaledDotProduct*", "FlashAttention", "EfficientAttention", "CudnnAttention"),
    "conv": ("*Convolution", "*ConvolutionTranspose", "ConvDepthwise?D", "ConvTbc", "SlowConv*D"),
    "loss": (
        *("NllLoss", "NllLoss2D", "LogSoftmax", "MseLoss", "HuberLoss", "SmoothL1Loss"),
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss"),
        *("MultiMarginLoss", "MultilabelMarginLoss", "*CtcLoss"),
    ),
    "matmul": (
        *("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Dot", "GroupedMm"),
        *("Linear", "Matmul", "MkldnnLinear", "SparseAddmm"),
    ),
    "norm": (
        *("NativeBatchNorm", "NativeBatchNormLegit*", "BatchNormWithUpdate", "BatchNormNoUpdate"),
        *("CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm", "NativeGroupNorm"),
        "FusedRmsNorm",
    ),
    "rectifier": ("Relu", "Hardtanh"),  # ReLU6 is a Hardtanh from 0 to 6
    "rnn": ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "LstmMps", "ThnnFused*Cell"),
    "softmax": ("Softmax", "LogSoftmax", "SafeSoftmax", "MaskedSoftmax", "Sparse*Softmax"),
}
"""Node names without `Backward`, which vary with shape, dtype and device. Dropout has no family:
on a CPU it is a multiplication."""


def plain(name: str) -> str:
    """Return a node's name without its overload: `MulBackward` for `MulBackward1`."""
    name = name.rpartition("::")[2]
    return re.sub(r"(?<=Backward)(Autograd[A-Za-z]+)?\d+(_copy)?$", "", name)


def edges_of(node: Node) -> tuple[int, ...]:
    """Return the indices of the edges of a node that lead to another."""
    return tuple([i for i, (source, _) in enumerate(node.next_functions) if source is not None])


def residual_edges(node: Node) -> tuple[int, ...]:
    """Return the edge of an addition that leads through its residual branch, none without one.

    Both operands come from one tensor, and the branch is the one that is further from it; the other
    is the skip connection, perhaps with a projection. The branch has a matrix product or a
    convolution: the sums in a rotary embedding or a gelu are not residual connections.
    """
    operands = [source for source, _ in node.next_functions if source is not None]
    if len(operands) != 2 or any(map(_is_parameter, operands)):
        return ()
    distances: list[dict[Node, int]] = [{operand: 0} for operand in operands]
    ends, common = [[operand] for operand in operands], set[Node]()
    for distance in count(1):
        common = {*distances[0]} & {*distances[1]}
        if common or not any(ends):
            break
        for known, end in zip(distances, ends, strict=True):
            following = {
                each for last in end for each, _ in last.next_functions if each is not None
            }
            end[:] = [each for each in following - known.keys() if not _is_parameter(each)]
            known.update(dict.fromkeys(end, distance))
    if not common:
        return ()
    nearest = min(common, key=lambda each: distances[0][each] + distances[1][each])
    lengths = [known[nearest] for known in distances]
    branch = int(lengths[1] > lengths[0])
    inside = [each for each, far in distances[branch].items() if far < lengths[branch]]
    if lengths[0] == lengths[1] or not any(map(_is_product, inside)):
        return ()
    return (edges_of(node)[branch],)


def _is_parameter(node: Node) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _is_product(node: Node) -> bool:
    return fits_node(node.name(), "matmul") or fits_node(node.name(), "conv")


def fits_node(name: str, pattern: str) -> bool:
    """Return whether the name of a node fits a pattern or belongs to a family."""
    patterns = FAMILIES.get(pattern, (pattern,))
    spellings = {name.rpartition("::")[2], plain(name)}
    # A pattern that ends in `Backward` does not mean a node of a double backward.
    if not re.search(r"Backward\d*$", pattern):
        spellings.add(plain(name).removesuffix("Backward"))
    return any(matches(spelling, each) for each in patterns for spelling in spellings)
