"""GPT: a small decoder-only transformer on tokens."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from gradsurg.models._transformer import Block
from gradsurg.plugins.fields import Contradiction, validated

Size = Annotated[int, Field(gt=0)]


@validated
class GPTOptions:
    """The checked arguments of `GPT`."""

    input_shape: tuple[Size, ...]
    num_outputs: Size
    num_tokens: Size
    every_step: bool = False
    width: Size = 64
    num_layers: Size = 2
    num_heads: Size = 4
    tied: bool = False
    embedding_std: Annotated[float, Field(gt=0)] | None = None
    normed_stream: bool = False

    def __post_init__(self) -> None:
        if len(self.input_shape) != 1:
            raise Contradiction("input_shape", f"must be (time,), found {self.input_shape}")
        if self.width % self.num_heads:
            rule = f"must divide a width of {self.width}, found {self.num_heads}"
            raise Contradiction("num_heads", rule)
        if self.tied and self.num_outputs != self.num_tokens:
            raise Contradiction(
                "tied",
                f"needs an output for each of the {self.num_tokens} tokens, "
                f"and the task has {self.num_outputs}",
            )


class GPT(nn.Module):
    """Embeddings of tokens and positions, causal blocks, a norm and a linear readout.

    The readout gets the last position, or with `every_step` every one; with `tied` its weights are
    the embedding's. Embeddings start with deviation `embedding_std`, or width ** -0.5. With
    `normed_stream` a block adds its attention to the normed stream, as the code of Lee et al. 2024
    does. Its modules are `tokens`, `positions`, `blocks.0` (see `Block`), ..., `norm`, `output`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        num_tokens: int,
        every_step: bool = False,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        tied: bool = False,
        embedding_std: float | None = None,
        normed_stream: bool = False,
    ) -> None:
        super().__init__()
        options = GPTOptions(
            input_shape,
            num_outputs,
            num_tokens,
            every_step,
            width,
            num_layers,
            num_heads,
            tied,
            embedding_std,
            normed_stream,
        )
        width = options.width
        self.tokens = nn.Embedding(options.num_tokens, width)
        self.positions = nn.Embedding(options.input_shape[0], width)
        self.blocks = nn.Sequential(
            *(
                Block(width, options.num_heads, True, options.normed_stream)
                for _ in range(options.num_layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, options.num_outputs, bias=False)
        # By default the logits that tied weights give for a normed stream have deviation one.
        std = options.embedding_std or width**-0.5
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=std)
        if options.tied:
            self.output.weight = self.tokens.weight
        self.every_step = options.every_step

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return self.output(stream if self.every_step else stream[:, -1])
