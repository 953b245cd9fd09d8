"""Transformer blocks of the small GPT and the small ViT."""

from collections import OrderedDict

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """Pre-norm attention and two linear layers, each with a residual connection.

    With `normed` the attention is added to its normalized input instead of the input itself. Its
    modules are `attention_norm`, `attention.qkv`, `attention.output`, `mlp_norm`, `mlp.up`,
    `mlp.gelu`, `mlp.down`.
    """

    def __init__(self, width: int, num_heads: int, causal: bool, normed: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                up=nn.Linear(width, 4 * width),
                gelu=nn.GELU(),
                down=nn.Linear(4 * width, width),
            )
        )
        self.normed = normed

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.attention_norm(stream)
        stream = (normed if self.normed else stream) + self.attention(normed)
        return stream + self.mlp(self.mlp_norm(stream))


class Attention(nn.Module):
    """Self-attention of `num_heads` heads; with `causal` a position sees no later ones."""

    def __init__(self, width: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.num_heads = num_heads
        self.causal = causal

    def forward(self, stream: Tensor) -> Tensor:
        pattern = "batch time (kind head width) -> kind batch head time width"
        queries, keys, values = rearrange(
            self.qkv(stream), pattern, kind=3, head=self.num_heads
        ).unbind()
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        return self.output(rearrange(mixed, "batch head time width -> batch time (head width)"))
