"""Benchmark training with and without surgery: ratios of step times, measured alternately.

python -m scripts.bench training [--rounds 60] [--threads 1 2]
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.transforms.base import Transform
from scripts.bench.turns import in_turns

BOUND = 0.001
STEPS = 10  # steps timed together: one of them is sampled in arm e


def mlp() -> tuple[nn.Module, Tensor]:
    """Return an MLP of twenty linear layers, with forty parameters."""
    layers = [layer for _ in range(19) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64)


def convnet() -> tuple[nn.Module, Tensor]:
    convolutions = [
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    head = [nn.Flatten(), nn.Linear(64 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*convolutions, *head), torch.randn(32, 3, 16, 16)


class Arm:
    """One way of training, attached while the arms take turns."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make()
        self.targets = torch.randint(10, (len(self.inputs),))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.stack = stack
        self.before_step: Callable[[], object] = lambda: None

    def hand_written(self) -> None:
        for param in self.model.parameters():
            param.register_hook(lambda grad: grad.clamp(-BOUND, BOUND))

    def surgery(self, transform: Transform, every: int) -> None:
        surgery = gs.Surgery(gs.Intervention(transform))
        attached = surgery.attach(self.model, self.optimizer, effects_every=every)
        self.stack.enter_context(attached)

    def torch_clip(self) -> None:
        params = list(self.model.parameters())
        self.before_step = lambda: nn.utils.clip_grad_norm_(params, 1.0)

    def seconds(self) -> float:
        began = perf_counter()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.inputs), self.targets).backward()
            self.before_step()
            self.optimizer.step()
        return (perf_counter() - began) / STEPS


ARMS: dict[str, Callable[[Arm], None]] = {
    "a plain": lambda arm: None,
    "b hand-written clamp": Arm.hand_written,
    "c clamp, no effects": partial(Arm.surgery, transform=gs.Clip(BOUND), every=0),
    "d clamp, effects every step": partial(Arm.surgery, transform=gs.Clip(BOUND), every=1),
    "e clamp, effects every 10": partial(Arm.surgery, transform=gs.Clip(BOUND), every=10),
    "f torch clip_grad_norm_": Arm.torch_clip,
    "g ClipGlobalNorm": partial(Arm.surgery, transform=gs.ClipGlobalNorm(1.0), every=0),
}
RATIOS = {"c/b": 1.05, "d/c": 1.15, "e/c": 1.10, "g/f": 1.0}


def measure(make: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds a step of each arm, one number a round."""
    with ExitStack() as stack:
        arms = {name: Arm(make, stack) for name in ARMS}
        for name, arm in arms.items():
            ARMS[name](arm)
        return in_turns({name[0]: arm.seconds for name, arm in arms.items()}, rounds)


def table(rounds: int, threads: list[int]) -> str:
    """Return one line for each model and number of threads."""
    head = ["model", "threads", "a plain, ms", "b/a", *[f"{k} <= {v:g}" for k, v in RATIOS.items()]]
    lines = []
    for make in (mlp, convnet):
        for count in threads:
            torch.set_num_threads(count)
            times = measure(make, rounds)
            row = [make.__name__, str(count), f"{1000 * median(times['a']):.2f}"]
            for ratio in ("b/a", *RATIOS):
                over, under = (times[key] for key in ratio.split("/"))
                row.append(f"{median(over) / median(under):.3f} ({min(over) / min(under):.3f})")
            lines.append(row)
    arms = "; ".join(ARMS)
    note = f"ratios of medians (of minima in brackets), from {rounds} alternating rounds"
    return f"{arms}\n{note}\n{aligned([head, *lines])}"
