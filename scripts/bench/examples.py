"""Costs of the gradients of single examples, for `python -m scripts.bench examples`."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.models.gpt import GPT
from gradsurg.transforms.base import Transform
from scripts.bench.turns import cpu_seconds, in_turns

BATCH, BOUND = 64, 1.0
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


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the models with a batch of 64 examples each."""
    mlp = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    return {
        "MLP 64-256-256-10": (mlp, torch.randn(BATCH, 64)),
        "CNN 16-32 at 16 x 16": (cnn, torch.randn(BATCH, 1, 16, 16)),
        "transformer 2 x 64, 32 tokens": (Transformer(), torch.randint(0, 65, (BATCH, 32))),
    }


def arms(make: Callable[[], tuple[nn.Module, Tensor]], stack: ExitStack) -> dict[str, Step]:
    """Return a training step of each way to clip the gradients of examples."""
    targets = torch.arange(BATCH) % 10
    steps: dict[str, Step] = {}

    def begin() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, inputs = make()
        return model, inputs, torch.optim.SGD(model.parameters(), lr=1e-4)

    def training(model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step

    steps["plain"] = training(*begin())
    bounds = {"ghost": gs.ClipGlobalNorm(BOUND), "rows": gs.Chain(gs.ClipGlobalNorm(BOUND))}
    for name, of in bounds.items():
        surgery: Transform = gs.PerSample(of)
        model, inputs, optimizer = begin()
        attached = gs.Surgery(gs.Intervention(surgery)).attach(model, optimizer, effects_every=0)
        stack.enter_context(attached)
        steps[f"gradsurg {name}"] = training(model, inputs, optimizer)
    steps["vmap"] = _vmapped(*begin(), targets)
    if find_spec("opacus"):
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        model, inputs, optimizer = begin()
        wrapped = GradSampleModule(model, loss_reduction="mean")
        clipping = DPOptimizer(
            optimizer, noise_multiplier=0.0, max_grad_norm=BOUND, expected_batch_size=BATCH
        )
        steps["opacus"] = training(wrapped, inputs, clipping)
        steps["opacus ghost"] = _opacus_ghost(*begin(), targets)
    return steps


def _vmapped(
    model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer, targets: Tensor
) -> Step:
    params = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, values, (x[None],)), y[None])

    rows_of = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        values = {name: param.detach() for name, param in params.items()}
        rows = rows_of(values, inputs, targets)
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        weights = (BOUND / (norms + 1e-6)).clamp(max=1) / BATCH
        for name, param in params.items():
            param.grad = (weights @ rows[name].flatten(1)).view(param.shape)
        optimizer.step()

    return step


def _opacus_ghost(
    model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer, targets: Tensor
) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import (
        DPOptimizerFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="mean", max_grad_norm=BOUND, use_ghost_clipping=True
    )
    clipping = DPOptimizerFastGradientClipping(
        optimizer, noise_multiplier=0.0, max_grad_norm=BOUND, expected_batch_size=BATCH
    )
    loss = DPLossFastGradientClipping(
        wrapped, clipping, nn.CrossEntropyLoss(reduction="mean"), "mean"
    )

    def step() -> None:
        clipping.zero_grad()
        loss(wrapped(inputs), targets).backward()
        clipping.step()

    return step


def table(rounds: int) -> str:
    """Return the CPU time of a step of each arm, as multiples of a plain one; one thread."""
    torch.set_num_threads(1)
    lines: list[list[str]] = []
    with catch_warnings():
        simplefilter("ignore")
        for index, name in enumerate(models()):
            with ExitStack() as stack:
                steps = arms(lambda index=index: [*models().values()][index], stack)
                ways = {arm: cpu_seconds(step) for arm, step in steps.items()}
                times = in_turns(ways, rounds)
            ratios = [
                median(a / b for a, b in zip(times[arm], times["plain"], strict=True))
                for arm in steps
            ]
            if not lines:
                lines.append(["model, batch 64", "plain, ms", *list(steps)[1:]])
            plain = f"{1000 * median(times['plain']):.2f}"
            lines.append([name, plain, *(f"{ratio:.2f}" for ratio in ratios[1:])])
    note = f"CPU time of a step that clips each example, over a plain step; {rounds} rounds"
    return f"{note}\n{aligned(lines)}"
