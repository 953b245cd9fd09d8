"""Costs of the gradients of single examples, for `python -m scripts.bench examples`."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.models.gpt import GPT
from scripts.bench.turns import Arm, cpu_seconds, in_turns, of_pairs

BATCH, BOUND = 64, 1.0
TARGETS = torch.arange(BATCH) % 10
PRIVATE: dict[str, Any] = {
    "noise_multiplier": 0.0,
    "max_grad_norm": BOUND,
    "expected_batch_size": BATCH,
}
Step = Callable[[], object]


class Transformer(nn.Module):
    """The blocks of a GPT with a linear layer in place of the embeddings: no table of positions."""

    def __init__(self) -> None:
        super().__init__()
        gpt = GPT((32,), 10, num_tokens=10, width=64, num_layers=2)
        self.inputs, self.blocks = nn.Embedding(65, 64), gpt.blocks
        self.norm, self.output = gpt.norm, gpt.output

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(self.inputs(tokens))).mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.randn(BATCH, 64)


def cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(32 * 16, 10)]
    return nn.Sequential(*layers), torch.randn(BATCH, 1, 16, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP 64-256-256-10": mlp,
    "CNN 16-32 at 16 x 16": cnn,
    "transformer 2 x 64, 32 tokens": lambda: (Transformer(), torch.randint(0, 65, (BATCH, 32))),
}


class Classified(Arm):
    def loss(self) -> Tensor:
        return cross_entropy(self.call(self.inputs), TARGETS)


def arms(make: Callable[[], tuple[nn.Module, Tensor]], stack: ExitStack) -> dict[str, Step]:
    """Return a training step of each way to clip the gradients of examples."""
    names = ("plain", "gradsurg ghost", "gradsurg rows", "vmap", "opacus", "opacus ghost")
    made = {name: Classified(make, stack) for name in names}
    made["gradsurg ghost"].attach(gs.PerSample(gs.ClipGlobalNorm(BOUND)))
    made["gradsurg rows"].attach(gs.PerSample(gs.Chain(gs.ClipGlobalNorm(BOUND))))
    steps: dict[str, Step] = {name: made[name].step for name in names[:3]}
    steps["vmap"] = _vmapped(made["vmap"])
    if find_spec("opacus"):
        steps["opacus"] = _opacus(made["opacus"])
        steps["opacus ghost"] = _opacus_ghost(made["opacus ghost"])
    return steps


def _vmapped(arm: Arm) -> Step:
    params = dict(arm.model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(arm.model, values, (x[None],)), y[None])

    rows_of = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        values = {name: param.detach() for name, param in params.items()}
        rows = rows_of(values, arm.inputs, TARGETS)
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        weights = (BOUND / (norms + 1e-6)).clamp(max=1) / BATCH
        for name, param in params.items():
            param.grad = (weights @ rows[name].flatten(1)).view(param.shape)
        arm.optimizer.step()

    return step


def _opacus(arm: Arm) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    arm.call = GradSampleModule(arm.model, loss_reduction="mean")
    arm.optimizer = DPOptimizer(arm.optimizer, **PRIVATE)
    return arm.step


def _opacus_ghost(arm: Arm) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as GhostModule
    from opacus.optimizers import optimizer_fast_gradient_clipping as optimizers
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping as GhostLoss

    wrapped = GhostModule(
        arm.model, loss_reduction="mean", max_grad_norm=BOUND, use_ghost_clipping=True
    )
    clipping = optimizers.DPOptimizerFastGradientClipping(arm.optimizer, **PRIVATE)
    loss = GhostLoss(wrapped, clipping, nn.CrossEntropyLoss(reduction="mean"), "mean")

    def step() -> None:
        clipping.zero_grad()
        loss(wrapped(arm.inputs), TARGETS).backward()
        clipping.step()

    return step


def table(rounds: int) -> str:
    """Return the CPU time of a step of each arm, as multiples of a plain one; one thread."""
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    with catch_warnings():
        simplefilter("ignore")
        for name, make in MODELS.items():
            with ExitStack() as stack:
                steps = arms(make, stack)
                ways = {arm: cpu_seconds(step) for arm, step in steps.items()}
                times = in_turns(ways, rounds)
            ratios = [of_pairs(times[arm], times["plain"]) for arm in steps]
            if not lines:
                lines.append(["model, batch 64", "plain, ms", *list(steps)[1:]])
            plain = f"{1000 * median(times['plain']):.2f}"
            lines.append([name, plain, *(f"{ratio:.2f}" for ratio in ratios[1:])])
    note = f"CPU time of a step that clips each example, over a plain step; {rounds} rounds"
    return f"{note}\n{aligned(lines)}"
