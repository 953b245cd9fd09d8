"""Benchmark training with and without surgery: ratios of step times, measured alternately.

python -m scripts.bench training [--rounds 60] [--threads 1 2]
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from scripts.bench.turns import Arm, in_turns, ratio

BOUND = 0.001
STEPS = 10  # steps timed together: one of them is sampled in arm e


def mlp() -> tuple[nn.Module, Tensor]:
    """Return an MLP of twenty linear layers, with forty parameters."""
    layers = [layer for _ in range(19) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64)


def convnet() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(32, 3, 16, 16)


class Classified(Arm):
    """Trains by cross entropy with random labels."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], stack: ExitStack) -> None:
        super().__init__(make, stack)
        self.targets = torch.randint(10, (len(self.inputs),))

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.call(self.inputs), self.targets)

    def hand_written(self) -> None:
        for param in self.model.parameters():
            param.register_hook(lambda grad: grad.clamp(-BOUND, BOUND))

    def torch_clip(self) -> None:
        params = list(self.model.parameters())
        self.before_step = lambda: nn.utils.clip_grad_norm_(params, 1.0)

    def seconds(self) -> float:
        began = process_time()
        for _ in range(STEPS):
            self.step()
        return (process_time() - began) / STEPS


ARMS: dict[str, Callable[[Classified], object]] = {
    "a plain": lambda arm: None,
    "b hand-written clamp": Classified.hand_written,
    "c clamp, no effects": partial(Classified.attach, transform=gs.Clip(BOUND)),
    "d clamp, effects every step": partial(Classified.attach, transform=gs.Clip(BOUND), every=1),
    "e clamp, effects every 10": partial(Classified.attach, transform=gs.Clip(BOUND), every=10),
    "f torch clip_grad_norm_": Classified.torch_clip,
    "g ClipGlobalNorm": partial(Classified.attach, transform=gs.ClipGlobalNorm(1.0)),
}
RATIOS = {"c/b": 1.05, "d/c": 1.15, "e/c": 1.10, "g/f": 1.0}


def measure(make: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds a step of each arm, one number a round."""
    with ExitStack() as stack:
        arms = {name: Classified(make, stack) for name in ARMS}
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
            row += [ratio(*(times[key] for key in name.split("/"))) for name in ("b/a", *RATIOS)]
            lines.append(row)
    arms = "; ".join(ARMS)
    note = f"ratios of medians (of minima in brackets), from {rounds} alternating rounds"
    return f"{arms}\n{note}\n{aligned([head, *lines])}"
