"""Benchmark gradients of a class score for its image: guided backpropagation and LRP.

python -m scripts.bench attribution [--rounds 60]

Each row is the time of a forward and a backward pass to the image as a ratio of plain passes;
`by hand` are hooks on the same layers.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from scripts.bench.turns import Arm, cpu_seconds, in_turns, ratio

EPSILON = 1e-6
AFFINE = (nn.Conv2d, nn.Linear)


def convnet() -> tuple[nn.Module, Tensor]:
    """Return a network of six convolutions."""
    widths = (3, 16, 16, 32, 32, 64, 64)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(widths[i], widths[i + 1], 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (i % 2)
    layers += [nn.Flatten(), nn.Linear(64 * 4 * 4, 10)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32, requires_grad=True)


def guided_by_hand(model: nn.Module) -> None:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda grad: grad.clamp(min=0))

    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(hook)


def lrp_by_hand(model: nn.Module) -> None:
    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        z = output.detach()
        output.register_hook(lambda grad: grad * (z / (z + EPSILON * z.sign())))

    for module in model.modules():
        if isinstance(module, AFFINE):
            module.register_forward_hook(hook)


def guided(arm: Arm) -> None:
    arm.attach(gs.ScaleBySign(1, 0), gs.Outputs(types="ReLU"))


def lrp(arm: Arm) -> None:
    rule = gs.LRP("epsilon", epsilon=EPSILON)
    items = [gs.Intervention(rule, at=gs.Inputs(types=kind)) for kind in AFFINE]
    arm.stack.enter_context(gs.Surgery(*items).attach(arm.model, effects_every=0))


ARMS: dict[str, Callable[[Arm], object]] = {
    "plain": lambda arm: None,
    "guided backpropagation": guided,
    "guided by hand": lambda arm: guided_by_hand(arm.model),
    "LRP epsilon": lrp,
    "LRP by hand": lambda arm: lrp_by_hand(arm.model),
}


def explain(arm: Arm) -> None:
    """Compute the gradient of the scores of the first class for the next images."""
    arm.next_batch()
    torch.autograd.grad(arm.call(arm.inputs)[:, 0].sum(), arm.inputs)


def table(rounds: int) -> str:
    """Return one line for each method."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        arms = {name: Arm(convnet, stack) for name in ARMS}
        for name, change in ARMS.items():
            change(arms[name])
        ways = {name: cpu_seconds(lambda arm=arm: explain(arm)) for name, arm in arms.items()}
        times = in_turns(ways, rounds)
    rows = [[name, ratio(own, times["plain"])] for name, own in times.items()]
    return aligned([["method", "of plain"], *rows])
