"""Benchmark `live.backward` with two losses beside a plain backward pass, by hand and TorchJD.

python -m scripts.bench backward [--rounds 300]

The model has 25,000 parameters, a trunk and two heads, and all ways use UPGrad. By hand are two
calls of `torch.autograd.grad`, one matrix and the same aggregator. The times are CPU times of
the process, of the backward pass alone. TorchJD 0.18 is left out if it is not installed.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from scripts.bench.turns import cpu_seconds, in_turns

WIDTH, BATCHES = 128, (32, 256)
Back = Callable[[Tensor, Sequence[Tensor]], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        features = self.trunk(x)
        return features, [(head(features) - i).square().mean() for i, head in enumerate(self.heads)]


def by_hand(net: Net, features: Tensor, losses: Sequence[Tensor]) -> None:
    shared, rows = [*net.trunk.parameters()], []
    for head, loss in zip(net.heads, losses, strict=True):
        own = [*head.parameters()]
        grads = torch.autograd.grad(loss, [*shared, *own], retain_graph=True)
        rows.append(torch.cat([grad.reshape(-1) for grad in grads[: len(shared)]]))
        for param, grad in zip(own, grads[len(shared) :], strict=True):
            param.grad = grad
    update = gs.UPGrad()(torch.stack(rows)).split([param.numel() for param in shared])
    for param, grad in zip(shared, update, strict=True):
        param.grad = grad.view_as(param)


def torchjd(net: Net, features: Tensor, losses: Sequence[Tensor]) -> None:
    autojac, aggregation = import_module("torchjd.autojac"), import_module("torchjd.aggregation")
    autojac.mtl_backward(losses, features=features)
    autojac.jac_to_grad(net.trunk.parameters(), aggregation.UPGrad())


def ways(stack: ExitStack) -> dict[str, tuple[Net, Back]]:
    """Return a model for each way, and its backward pass."""
    made: dict[str, tuple[Net, Back]] = {
        "plain": (Net(), lambda _, losses: (losses[0] + losses[1]).backward())
    }
    made["by hand"] = (net := Net()), partial(by_hand, net)
    surgery = gs.Surgery(gs.Intervention(gs.UPGrad(), at=gs.SharedParameters()))
    optimizer = torch.optim.SGD((net := Net()).parameters(), lr=0.0)
    live = stack.enter_context(surgery.attach(net, optimizer, effects_every=0))
    made["live.backward"] = net, lambda _, losses: live.backward(losses)
    for _ in range(2):  # after which the first steps are no longer watched
        live.backward(net(torch.randn(8, 64))[1])
        optimizer.step()
    if all(map(find_spec, ("torchjd", "quadprog", "qpsolvers"))):
        made["TorchJD"] = (net := Net()), partial(torchjd, net)
    return made


def table(rounds: int) -> str:
    """Return one line for each way and batch size."""
    torch.set_num_threads(1)
    lines = [["batch", "way", "us", "(least)", "of plain", "(least)"]]
    for batch in BATCHES:
        with ExitStack() as stack:
            made = ways(stack)
            taken = in_turns({n: partial(_seconds, *way, batch) for n, way in made.items()}, rounds)
        of_plain = taken["plain"]
        for name, seconds in taken.items():
            ratio, least = (how(seconds) / how(of_plain) for how in (median, min))
            line = [str(batch), name, f"{1e6 * median(seconds):.0f}", f"({1e6 * min(seconds):.0f})"]
            lines.append([*line, f"{ratio:.2f}", f"({least:.2f})"])
    return aligned(lines, left=2)


def _seconds(net: Net, back: Back, batch: int) -> float:
    net.zero_grad()
    features, losses = net(torch.randn(batch, 64))
    return cpu_seconds(lambda: back(features, losses))()
