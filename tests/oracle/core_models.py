"""Small models of many shapes. No name of a module is a word that a warning could contain."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH = 7


class Layers(nn.Module):
    """The layers of most models."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.lin_a = nn.Linear(5, 8)
        self.act_a = nn.ReLU(inplace)
        self.lin_b = nn.Linear(8, 8)
        self.act_b = nn.ReLU(inplace)
        self.lin_c = nn.Linear(8, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.act_b(self.lin_b(self.act_a(self.lin_a(x))))


class Mlp(Layers):
    """Three layers; the other models change one part of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_c(self.features(x))


class Twice(Mlp):
    """One layer is called twice, and one is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_again = self.lin_a

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_a(self.lin_a(x))
        h = self.lin_b(self.act_b(self.lin_b(h)))
        return self.lin_c(h + self.lin_again(x))


class Tied(Mlp):
    """Two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_tied = nn.Linear(8, 8)
        self.lin_tied.weight = self.lin_b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_c(self.act_a(self.lin_tied(self.features(x))))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin_d = nn.Linear(8, 8)
        self.same_a = nn.Identity()

    def forward(self, h: Tensor, *, mask: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        return {"out": self.lin_d(h) * mask, "more": (self.same_a(h), h.sum(1))}


class Nested(Mlp):
    """Modules in modules, which return dicts and tuples, take keywords and pass tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.pair_a = _Pair()
        self.seq_a = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        found = self.pair_a(h, mask=h.sigmoid())
        kept, total = found["more"]
        return self.lin_c(self.seq_a(found["out"]) + kept) * total.mean().sigmoid()


class Conv(nn.Module):
    """A convolution, a batch norm, a dropout, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_a = nn.Conv1d(1, 4, 3)
        self.norm_a = nn.BatchNorm1d(4)
        self.act_a = nn.ReLU()
        self.drop_a = nn.Dropout(0.2)
        self.rate_a = nn.Parameter(torch.tensor(0.5))
        self.lin_c = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_a(self.norm_a(self.conv_a(x[:, None])))
        return self.lin_c(self.drop_a(h).flatten(1) * self.rate_a)


class Attention(nn.Module):
    """A layer of a transformer, whose parts are not all called as modules, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_a = nn.Linear(1, 4)
        self.layer_a = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.lstm_a = nn.LSTM(4, 4, batch_first=True)
        self.act_a = nn.ReLU()
        self.lin_c = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm_a(self.layer_a(self.lin_a(x[..., None])))
        return self.lin_c(self.act_a(h[:, -1]))


class Tokens(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table_a = nn.Embedding(4, 8, sparse=True)
        self.act_a = nn.ReLU()
        self.lin_c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin_c(self.act_a(self.table_a((x > 0).sum(1) % 4)))


class Checkpointed(Mlp):
    """The layers run in a checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.features, x, use_reentrant=self.reentrant)
        assert isinstance(h, Tensor)
        return self.lin_c(h)


class Reentrant(Checkpointed):
    """The layers run in a reentrant checkpoint."""

    reentrant = True


class Heads(Layers):
    """Two tasks with a common trunk and a layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_d = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.features(x)
        return {"task_c": self.lin_c(h), "task_d": self.lin_d(h)}


def _frozen() -> nn.Module:
    model = Mlp()
    model.lin_b.weight.requires_grad_(False)
    model.lin_a.requires_grad_(False)
    return model


def _unused() -> nn.Module:
    model = Mlp()
    model.lin_extra = nn.Linear(3, 3)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "twice": Twice,
    "tied": Tied,
    "nested": Nested,
    "conv": Conv,
    "attention": Attention,
    "tokens": Tokens,
    "frozen": _frozen,
    "unused": _unused,
    "inplace": lambda: Mlp(inplace=True),
    "double": lambda: Mlp().double(),
    "bfloat16": lambda: Mlp().bfloat16(),
    "checkpoint": Checkpointed,
    "reentrant": Reentrant,
    "heads": Heads,
}


def batches(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels without end, the same in each run."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    while True:
        x = torch.randn(BATCH, 5, generator=generator).to(dtype)
        yield (
            x.requires_grad_(dtype.is_floating_point),
            torch.randint(0, 2, (BATCH,), generator=generator),
        )
