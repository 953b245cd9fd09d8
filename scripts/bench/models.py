"""Models that the benchmarks train."""

import torch
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, Tensor]:
    """Return an MLP of twenty linear layers, with forty parameters."""
    layers = [layer for _ in range(19) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64)


def convnet() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 16, 16)


class Block(nn.Module):
    """A transformer block: attention and feed-forward, each with layer norm and residual path."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.feed(self.norm2(x))


def transformer(width: int = 256, batch: int = 2) -> tuple[nn.Module, Tensor]:
    """Return 12 blocks: 9.5 million parameters at the default width."""
    return nn.Sequential(*(Block(width) for _ in range(12))), torch.randn(batch, 16, width)
