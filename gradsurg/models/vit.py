"""ViT: a small vision transformer over the patches of an image."""

from typing import Annotated, Literal

import torch
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor, nn

from gradsurg.models._transformer import Block
from gradsurg.plugins.fields import Contradiction, FieldError, validated

Readout = Literal["token", "mean"]
Size = Annotated[int, Field(gt=0)]


@validated
class ViTOptions:
    """The checked arguments of `ViT`."""

    input_shape: tuple[Size, Size, Size]
    num_outputs: Size
    patch: Size = 4
    width: Size = 64
    num_layers: Size = 2
    num_heads: Size = 4
    readout: Readout = "token"

    def __post_init__(self) -> None:
        _, height, across = self.input_shape
        if height % self.patch or across % self.patch:
            rule = f"must divide an image of {height} x {across}, found {self.patch}"
            raise Contradiction("patch", rule)
        if self.width % self.num_heads:
            rule = f"must divide a width of {self.width}, found {self.num_heads}"
            raise Contradiction("num_heads", rule)


class ViT(nn.Module):
    """Patches with positions, blocks, a norm, and a linear readout, for images (C, H, W).

    The readout gets a class token, put before the patches, or their mean (arXiv 2010.11929).
    Its modules are `patches`, `blocks.0` (see `Block`), ..., `norm`, `output`, and its own
    parameters `positions` and `token`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        patch: int = 4,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        readout: Readout = "token",
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            rule = f"must be (channels, height, width), found {input_shape}"
            raise FieldError("ViT", [("input_shape", rule)])
        channels, height, across = input_shape
        options = ViTOptions(
            (channels, height, across), num_outputs, patch, width, num_layers, num_heads, readout
        )
        patch, width = options.patch, options.width
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(width)) if options.readout == "token" else None
        length = (height // patch) * (across // patch) + (options.readout == "token")
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(Block(width, options.num_heads, causal=False) for _ in range(options.num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, options.num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        stream = rearrange(self.patches(images), "batch width y x -> batch (y x) width")
        if self.token is not None:
            token = repeat(self.token, "width -> batch 1 width", batch=len(stream))
            stream = torch.cat([token, stream], dim=1)
        stream = self.norm(self.blocks(stream + self.positions))
        return self.output(stream[:, 0] if self.token is not None else stream.mean(dim=1))
