"""Print the source of a module next to the sites in it.

Inside a forward, the autograd nodes made by each line can be hooked.
"""

import inspect

import torch
from torch import Tensor, nn

import gradsurg as gs


class Attention(nn.Module):
    """One head, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / 8**0.5
        return x + self.out(scores.softmax(-1) @ v)


torch.manual_seed(0)
model = Attention()
print(inspect.getsource(Attention.forward))
print(gs.sites.tree(model, torch.randn(2, 5, 8), at=gs.Nodes("Softmax")))
