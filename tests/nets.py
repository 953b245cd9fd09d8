"""Small models, the plain training loop and hook counts, shared by the tests."""

from collections import OrderedDict
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from gradsurg.core.intervention import Intervention
from gradsurg.core.live import Live
from gradsurg.core.pitfalls.optimizer_steps import StepHooks
from gradsurg.core.surgery import Surgery
from gradsurg.sites.parameters import Parameters
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Trigger

FEATURES, CLASSES, BATCH = 6, 3, 8

COMPILES_LAYERS = torch.__version__ >= "2.12"
"""Whether torch.compile compiles a single layer of PyTorch; before 2.12 it runs in eager."""


def small(seed: int = 0) -> nn.Sequential:
    """Return Linear, ReLU, Linear; the parameters are `first.weight` to `last.bias`."""
    torch.manual_seed(seed)
    layers = [
        ("first", nn.Linear(FEATURES, 5)),
        ("act", nn.ReLU()),
        ("last", nn.Linear(5, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def noisy(seed: int = 0) -> nn.Sequential:
    """Return a model that uses global state: convolution, batch norm, dropout."""
    torch.manual_seed(seed)
    layers = [
        ("conv", nn.Conv1d(2, 4, 2)),
        ("norm", nn.BatchNorm1d(4)),
        ("act", nn.ReLU()),
        ("flat", nn.Flatten()),
        ("drop", nn.Dropout(0.5)),
        ("last", nn.Linear(8, CLASSES)),
    ]
    return nn.Sequential(OrderedDict(layers))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, from its own generator."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def trainee(lr: float = 0.1) -> tuple[nn.Sequential, torch.optim.SGD]:
    """Return `small()` and its optimizer."""
    model = small()
    return model, sgd(model, lr)


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def backward(model: nn.Module, step: int = 0) -> None:
    """Run one forward and one backward pass."""
    x, y = batch(step)
    if "conv" in dict(model.named_children()):
        x = x.view(BATCH, 2, 3)
    functional.cross_entropy(model(x), y).backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> None:
    """Train by the plain loop."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def attached(
    model: nn.Module,
    transform: Transform,
    at: Selector | None = None,
    optimizer: Optimizer | None = None,
    when: Trigger | None = None,
    *,
    effects_every: int = 1,
    shadow: bool = False,
) -> AbstractContextManager[Live]:
    """Attach a surgery of one intervention."""
    surgery = Surgery(Intervention(transform, at or Parameters(), when or Always()))
    return surgery.attach(model, optimizer, effects_every=effects_every, shadow=shadow)


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients that are not None."""
    named = model.named_parameters()
    return {name: param.grad.clone() for name, param in named if param.grad is not None}


def states_of(surgery: Surgery) -> dict[str, dict[str, Tensor]]:
    """Return the states of a surgery, by label and site."""
    states = surgery.state_dict()["states"]
    assert isinstance(states, dict)
    return states


def num_hooks(model: nn.Module, *optimizers: Optimizer) -> int:
    """Count all hooks on a model's modules and parameters and on optimizers.

    Those that look on in the first steps alone are left out: `num_watching` counts them.
    """
    tables = []
    for module in model.modules():
        tables += [table for name, table in vars(module).items() if name.endswith("_hooks")]
    for param in model.parameters():
        tables += [param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None)]
    for optimizer in optimizers:
        tables += [table for name, table in vars(optimizer).items() if name.endswith("_hooks")]
    return sum(len(table) for table in tables if table) - num_watching(model)


def num_watching(model: nn.Module) -> int:
    """Count the hooks of the first steps on a model's parameters."""
    tables = [getattr(param, "_post_accumulate_grad_hooks", None) for param in model.parameters()]
    hooks = [hook for table in tables if table for hook in table.values()]
    return sum(isinstance(getattr(hook, "__self__", None), StepHooks) for hook in hooks)
