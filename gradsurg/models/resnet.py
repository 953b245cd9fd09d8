"""ResNet: the residual network of He et al. 2016 for small images, 6n + 2 layers deep."""

from itertools import pairwise
from typing import Annotated

from einops.layers.torch import Reduce
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from gradsurg.plugins.fields import Contradiction, FieldError, validated

Size = Annotated[int, Field(gt=0)]


@validated
class ResNetOptions:
    """The checked arguments of `ResNet`."""

    input_shape: tuple[Size, Size, Size]
    num_outputs: Size
    depth: Size = 8
    width: Size = 16

    def __post_init__(self) -> None:
        if self.depth < 8 or self.depth % 6 != 2:
            raise Contradiction("depth", f"must be 8, 14, 20 or so on, 6n + 2, found {self.depth}")


class ResNet(nn.Module):
    """A convolution, three stages of n blocks, a mean and a linear readout, for images (C, H, W).

    Stages have `width`, 2 `width` and 4 `width` channels, and the last two halve the image;
    shortcuts have no parameters (arXiv 1512.03385, section 4.2, option A). Its modules are
    `conv`, `norm`, `relu`, `stages.0.0.conv1`, `.norm1`, `.relu1`, `.conv2`, `.norm2`, `.relu2`,
    ..., `mean`, `output`.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, *, depth: int = 8, width: int = 16
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            rule = f"must be (channels, height, width), found {input_shape}"
            raise FieldError("ResNet", [("input_shape", rule)])
        channels, height, across = input_shape
        options = ResNetOptions((channels, height, across), num_outputs, depth, width)
        width = options.width
        self.conv = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        num_blocks = (options.depth - 2) // 6
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    _Block(before, after), *(_Block(after, after) for _ in range(num_blocks - 1))
                )
                for before, after in pairwise([width, width, 2 * width, 4 * width])
            )
        )
        self.mean = Reduce("batch channel height width -> batch channel", "mean")
        self.output = nn.Linear(4 * width, options.num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.relu(self.norm(self.conv(images)))
        return self.output(self.mean(self.stages(maps)))


class _Block(nn.Module):
    """Two convolutions and their shortcut; with more channels after it, it halves the image."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.relu2 = nn.ReLU()
        self.missing = after - before

    def forward(self, maps: Tensor) -> Tensor:
        # A shortcut drops every other pixel, and its new channels are zero.
        shortcut = pad(maps[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))
        inner = self.relu1(self.norm1(self.conv1(maps)))
        return self.relu2(self.norm2(self.conv2(inner)) + shortcut)
