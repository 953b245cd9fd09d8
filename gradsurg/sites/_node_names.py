"""What autograd nodes are called, and what patterns on their names stand for."""

import re
from functools import cache

from gradsurg.sites._patterns import matches

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
    "rnn": ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn", "LstmMps", "ThnnFused*Cell"),
    "softmax": ("Softmax", "LogSoftmax", "SafeSoftmax", "MaskedSoftmax", "Sparse*Softmax"),
}
"""Names vary with shape, dtype and device. Dropout has none: on a CPU it is a product."""


@cache
def plain(name: str) -> str:
    """A node's name without its overload: `MulBackward` for `MulBackward1`."""
    name = name.rpartition("::")[2]
    return re.sub(r"(?<=Backward)(Autograd[A-Za-z]+)?\d+(_copy)?$", "", name)


def fits(name: str, pattern: str) -> bool:
    kinds = FAMILIES.get(pattern, (pattern,))
    spelled = {name.rpartition("::")[2], plain(name)}
    # A pattern that spells `Backward` out does not mean the node of a backward's backward.
    if not re.search(r"Backward\d*$", pattern):
        spelled.add(plain(name).removesuffix("Backward"))
    return any(matches(own, kind) for kind in kinds for own in spelled)
