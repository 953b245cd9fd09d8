"""Small models of the pitfall tests."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0,), requires_grad=True)


class Reused(nn.Module):
    """One activation that is used three times: 2 h + 3 h + 5 h."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.part.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)
        return 2 * h + 3 * h + 5 * h


class Saved(nn.Module):
    """A block under a checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return y.sum()
