"""Convnet: convolutions, each with a ReLU and pooling, then linear layers."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from einops.layers.torch import Rearrange, Reduce
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import Contradiction, FieldError, validated

Size = Annotated[int, Field(gt=0)]


@validated
class ConvnetOptions:
    """The checked arguments of `Convnet`."""

    input_shape: tuple[Size, Size, Size]
    num_outputs: Size
    channels: Sequence[Size] = (16, 32)
    kernel_size: Size = 3
    hidden: Sequence[Size] = ()

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
        if self.kernel_size % 2 == 0:
            raise Contradiction("kernel_size", f"must be odd, found {self.kernel_size}")


class Convnet(nn.Module):
    """A convolution, ReLU and 2x2 max-pooling for each of `channels`, for images (C, H, W).

    The readout gets each channel's mean, so its size does not depend on the image's. With `hidden`,
    all pixels go through linear layers of those widths, each with a ReLU, to the readout. Its
    modules are `blocks.0.conv`, `blocks.0.relu`, `blocks.0.pool`, ..., `mean` (or `flatten`,
    `hidden.0.fc`, `hidden.0.relu`, ...), `output`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        channels: Sequence[int] = (16, 32),
        kernel_size: int = 3,
        hidden: Sequence[int] = (),
    ) -> None:
        super().__init__()
        image = _image(input_shape)
        options = ConvnetOptions(image, num_outputs, channels, kernel_size, hidden)
        depths, size = [image[0], *options.channels], options.kernel_size
        self.blocks = nn.Sequential(*(_block(a, b, size) for a, b in pairwise(depths)))
        widths = [depths[-1]]
        if options.hidden:
            self.flatten = Rearrange("batch channel height width -> batch (channel height width)")
            places = (image[1] >> len(options.channels)) * (image[2] >> len(options.channels))
            widths = [places * depths[-1], *options.hidden]
            self.hidden = nn.Sequential(*(_layer(a, b) for a, b in pairwise(widths)))
        else:
            self.mean = Reduce("batch channel height width -> batch channel", "mean")
        self.output = nn.Linear(widths[-1], options.num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        for part in self.children():
            images = part(images)
        return images


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        rule = f"must be (channels, height, width), found {shape}"
        raise FieldError("Convnet", [("input_shape", rule)])
    return shape[0], shape[1], shape[2]


def _block(before: int, after: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(before, after, kernel_size=size, padding=size // 2),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
        )
    )


def _layer(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(fc=nn.Linear(before, after), relu=nn.ReLU()))
