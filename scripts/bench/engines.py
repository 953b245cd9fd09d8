"""Benchmark a training step of eight tasks and nine million parameters: time and memory by engine.

python -m scripts.bench engines [--rounds 3]

Each way of training runs in its own process, in turns, on one thread. Its memory is the peak of the
process minus its memory before the first step. TorchJD 0.18 (the `bench` extra) is skipped if it is
not installed. `measured` records telemetry at every step, the others at none.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from scripts.bench.turns import cpu_seconds, in_turns

TASKS, BATCH, STEPS = 8, 64, 6


class Net(nn.Module):
    """A trunk of 8.9e6 parameters with a small head for each task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [512, 2048, 2048, 1792]
        layers = [
            layer for ins, outs in pairwise(sizes) for layer in (nn.Linear(ins, outs), nn.ReLU())
        ]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(sizes[-1], 1) for _ in range(TASKS))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        features = self.trunk(x)
        outputs = [head(features).squeeze(1) for head in self.heads]
        return features, [(own - index).square().mean() for index, own in enumerate(outputs)]


Back = Callable[[Net, Tensor, Sequence[Tensor]], object]


def plain(net: Net, features: Tensor, losses: Sequence[Tensor]) -> None:
    torch.stack(list(losses)).sum().backward()


def torchjd(chunk: int | None, gramian_first: bool) -> Back:
    """Train as in TorchJD's documentation of tasks with shared features."""
    autojac = import_module("torchjd.autojac")
    aggregator = import_module("torchjd.aggregation").UPGrad()

    def back(net: Net, features: Tensor, losses: Sequence[Tensor]) -> None:
        autojac.mtl_backward(losses, features=features, parallel_chunk_size=chunk)
        params = net.trunk.parameters()
        autojac.jac_to_grad(params, aggregator, optimize_gramian_computation=gramian_first)

    return back


OURS = {
    "mean": (gs.Mean(), {}, 0),
    "full": (gs.UPGrad(), {}, 0),
    "full, measured": (gs.UPGrad(), {}, 1),
    "feature": (gs.UPGrad(), {"engine": "feature", "features": "trunk"}, 0),
    "feature, measured": (gs.UPGrad(), {"engine": "feature", "features": "trunk"}, 1),
}
THEIRS = {
    "torchjd": (None, False),
    "torchjd, leanest": (1, True),
}


def measure(name: str) -> dict[str, float]:
    """Return the minimum and the median step in milliseconds, and the memory in megabytes."""
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    x = torch.randn(BATCH, 512)
    back = torchjd(*THEIRS[name]) if name in THEIRS else plain
    attached = nullcontext()
    if name in OURS:
        aggregator, fields, every = OURS[name]
        surgery = gs.Surgery(gs.Intervention(aggregator, at=gs.SharedParameters(**fields)))
        attached = surgery.attach(net, optimizer, effects_every=every)
    net(x)  # what the first forward alone allocates is no part of it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with attached as live:

        def step() -> None:
            optimizer.zero_grad()
            features, losses = net(x)
            live.backward(losses) if live else back(net, features, losses)
            optimizer.step()

        seconds = cpu_seconds(step)
        times = [seconds() for _ in range(STEPS)]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    steady = times[1:]
    return {"least": 1e3 * min(steady), "median": 1e3 * median(steady), "memory": most / 1024}


def table(rounds: int) -> str:
    """Return one line for each way of training."""
    names = ["plain", *OURS, *(THEIRS if find_spec("torchjd") and find_spec("quadprog") else ())]
    found = in_turns({name: partial(_measured, name) for name in names}, rounds, warm=0)
    base = {key: min(run[key] for run in found["plain"]) for key in ("least", "memory")}
    lines = [["a step", "least, ms", "median, ms", "least / plain", "memory, MB", "/ plain"]]
    for name, runs in found.items():
        least, memory = (min(run[key] for run in runs) for key in base)
        middle = median(run["median"] for run in runs)
        row = [name, f"{least:.0f}", f"{middle:.0f}", f"{least / base['least']:.2f}"]
        lines.append([*row, f"{memory:.0f}", f"{memory / base['memory']:.1f}"])
    size = sum(own.numel() for own in Net().parameters())
    return f"{TASKS} tasks, {size:,} parameters, 1 thread, {rounds} rounds\n{aligned(lines)}"


def _measured(name: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "scripts.bench.engines", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
