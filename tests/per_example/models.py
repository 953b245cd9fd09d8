"""Small models with every kind of layer, for batches of examples."""

import torch
from torch import Tensor, nn


class Tokens(nn.Module):
    """Embeddings, positions in two forms, attention, a norm and a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(5, 8))
        self.tokens = nn.Embedding(7, 8, padding_idx=0)
        self.places = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.root_norm = nn.RMSNorm(8)
        self.prelu = nn.PReLU()
        self.output = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tokens(tokens) + self.place + self.places(torch.arange(5))
        stream = stream + self.attention(stream, stream, stream)[0]
        return self.output(self.prelu(self.root_norm(self.norm(stream))).mean(1))


class Tied(nn.Module):
    """A readout by the weights of the embedding, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 8)
        self.twice = nn.Linear(8, 8)
        self.output = nn.Linear(8, 7, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.twice(self.twice(self.tokens(tokens)).tanh()).mean(1))


class Scaled(nn.Module):
    """A layer times a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.output = nn.Linear(6, 8), nn.Linear(8, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.first(inputs).tanh() * self.scale)


def make(name: str, count: int) -> tuple[nn.Module, Tensor]:
    """Return a model of seven outputs, and `count` examples."""
    torch.manual_seed(0)
    match name:
        case "mlp":
            return nn.Sequential(
                nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7)
            ), torch.randn(count, 6)
        case "convolutions":
            return nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, stride=2),
                nn.GroupNorm(2, 4),
                nn.ReLU(),
                nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="circular"),
                nn.InstanceNorm2d(6, affine=True),
                nn.BatchNorm2d(6).eval(),
                nn.ReLU(),
                nn.ConvTranspose2d(6, 3, 2),
                nn.Flatten(),
                nn.Linear(75, 7),
            ), torch.randn(count, 2, 8, 8)
        case "sequences":
            return nn.Sequential(
                nn.Conv1d(2, 4, 3, dilation=2),
                nn.ReLU(),
                nn.Conv1d(4, 4, 3, padding="same"),
                nn.Flatten(),
                nn.Linear(32, 7),
            ), torch.randn(count, 2, 12)
        case "tokens":
            return Tokens(), torch.randint(0, 7, (count, 5))
        case "tied":
            return Tied(), torch.randint(0, 7, (count, 4))
        case "scaled":
            return Scaled(), torch.randn(count, 6)
    raise AssertionError(name)


NAMES = ("mlp", "convolutions", "sequences", "tokens", "tied", "scaled")
