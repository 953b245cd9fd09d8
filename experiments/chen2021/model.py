"""Siamese: an encoder of two views, and a predictor of one embedding from the other."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import torch
from einops.layers.torch import Reduce
from pydantic import Field
from torch import Tensor, nn

from gradsurg.plugins.fields import Contradiction, validated

VIEWS = 2
PARTS = 4  # of the outputs: the prediction from each view, and the target of each

Size = Annotated[int, Field(gt=0)]


@validated
class SiameseOptions:
    """The checked arguments of `Siamese`."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    channels: Annotated[Sequence[Size], Field(min_length=1)] = (16, 32, 64)
    width: Size = 128
    bottleneck: Size = 32
    output_norm: bool = False

    def __post_init__(self) -> None:
        if len(self.input_shape) != 4 or self.input_shape[0] != VIEWS:
            rule = f"must be (2, channels, height, width), found {self.input_shape}"
            raise Contradiction("input_shape", rule)
        if self.num_outputs % PARTS:
            rule = f"must be four times the size of an embedding, found {self.num_outputs}"
            raise Contradiction("num_outputs", rule)


class Siamese(nn.Module):
    """SimSiam (Chen and He, CVPR 2021, arXiv 2011.10566), small.

    `encoder` has blocks of a convolution of stride 2, batch norm and ReLU, then the mean over
    places; `projector` has a hidden layer of `width`, `predictor` one of `bottleneck`, both with
    batch norm. With `output_norm` the projector's output has the paper's batch norm too. The
    predictor's targets pass through `target`, an identity: its input is the branch whose gradient
    the paper stops (`Inputs("target")`). The outputs are the predictions from each view, then the
    targets, concatenated, a quarter each.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        channels: Sequence[int] = (16, 32, 64),
        width: int = 128,
        bottleneck: int = 32,
        output_norm: bool = False,
    ) -> None:
        super().__init__()
        options = SiameseOptions(input_shape, num_outputs, channels, width, bottleneck, output_norm)
        size = options.num_outputs // PARTS
        depths = [options.input_shape[1], *options.channels]
        self.encoder = nn.Sequential(
            OrderedDict(
                blocks=nn.Sequential(*(_block(*pair) for pair in pairwise(depths))),
                mean=Reduce("batch channel height width -> batch channel", "mean"),
            )
        )
        self.projector = _hidden_layer(depths[-1], options.width, size)
        if options.output_norm:
            self.projector.add_module("output_norm", nn.BatchNorm1d(size))
        self.predictor = _hidden_layer(size, options.bottleneck, size)
        self.target = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        embeddings = [self.projector(self.encoder(view)) for view in inputs.unbind(dim=1)]
        predictions = [self.predictor(embedding) for embedding in embeddings]
        targets = [self.target(embedding) for embedding in embeddings]
        return torch.cat([*predictions, *targets], dim=1)


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            norm=nn.BatchNorm2d(after),
            relu=nn.ReLU(),
        )
    )


def _hidden_layer(before: int, width: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            hidden=nn.Linear(before, width, bias=False),
            norm=nn.BatchNorm1d(width),
            relu=nn.ReLU(),
            output=nn.Linear(width, after),
        )
    )
