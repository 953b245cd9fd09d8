"""Convnet: convolutions, each with a ReLU and a pooling, then a linear readout."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from einops.layers.torch import Reduce
from pydantic import Field
from torch import Tensor, nn

from gradsurg.fields import Contradiction, FieldError, validated

Size = Annotated[int, Field(gt=0)]


@validated
class ConvnetOptions:
    """What a `Convnet` is made of."""

    input_shape: tuple[Size, Size, Size]
    num_outputs: Size
    channels: Sequence[Size] = (16, 32)

    def __post_init__(self) -> None:
        if not self.channels:
            raise Contradiction("channels", "must have at least one entry, found none")
        side = min(self.input_shape[1:])
        if side >> len(self.channels) == 0:
            raise Contradiction(
                "channels",
                f"must have at most {side.bit_length() - 1} entries, because each halves an image "
                f"of {self.input_shape[1]} x {self.input_shape[2]}, found {len(self.channels)}",
            )


class Convnet(nn.Module):
    """One 3x3 convolution, ReLU and 2x2 max-pooling for each of `channels`, for images (C, H, W).

    The readout sees each channel's mean, so its size does not depend on the image's. Its modules
    are `blocks.0.conv`, `blocks.0.relu`, `blocks.0.pool`, ..., `mean`, `output`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        channels: Sequence[int] = (16, 32),
    ) -> None:
        super().__init__()
        options = ConvnetOptions(_image(input_shape), num_outputs, channels)
        depths = [options.input_shape[0], *options.channels]
        self.blocks = nn.Sequential(*(_block(before, after) for before, after in pairwise(depths)))
        self.mean = Reduce("batch channel height width -> batch channel", "mean")
        self.output = nn.Linear(depths[-1], options.num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.mean(self.blocks(images)))


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        rule = f"must be (channels, height, width), found {shape}"
        raise FieldError("Convnet", [("input_shape", rule)])
    return shape[0], shape[1], shape[2]


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(before, after, kernel_size=3, padding=1),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
        )
    )
