"""Edit parameters from a hook, and why the optimizer must know.

A common text writes `module.weight = nn.Parameter(module.weight * 2)` in a forward hook. The module
computes with the new parameter; the optimizer goes on updating the old one, hooks stay on the old
one, and nothing says so. `gs.Weights` edits the parameter in place, after each optimizer step.
"""

import torch
from torch import nn

import gradsurg as gs


def double(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
    module.weight = nn.Parameter(module.weight * 2)


model = nn.Linear(1, 1, bias=False)
nn.init.constant_(model.weight, 3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
known = model.weight  # the one that the optimizer has
with model.register_forward_hook(double):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1)).backward()
        optimizer.step()
        # Read to be printed, between steps.
        print(
            f"replaced: the model has {model.weight.item():.1f}, the optimizer {known.item():.1f}"
        )

model = nn.Linear(1, 1, bias=False)
nn.init.constant_(model.weight, 3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inside = gs.Intervention(gs.Clip(2.85), at=gs.Weights())  # a projection after each step
with gs.Surgery(inside).attach(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1)).backward()
        optimizer.step()
        # Read to be printed, between steps.
        print(f"edited in place: {model.weight.item():.2f}")
