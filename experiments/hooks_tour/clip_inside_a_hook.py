"""Clip by value inside a hook, on a parameter, on an activation, and at one ReLU's node.

A common error: a tensor hook does not run once for every use of the tensor but once for every
backward pass, with the sum. A hook on the consuming operations runs for every use: `gs.Uses`.
"""

import torch
from torch import nn

import gradsurg as gs

x = torch.tensor([1.0], requires_grad=True)
calls = []
x.register_hook(calls.append)
(2 * x + 3 * x + 5 * x).backward()
print("x used three times, its hook was called with:", torch.cat(calls).tolist())

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
inputs = torch.randn(16, 4)
for site in (gs.Parameters("0.weight"), gs.Outputs("0"), gs.Nodes("Relu")):
    model.zero_grad()
    with gs.Surgery(gs.Intervention(gs.Clip(0.05), at=site)).attach(model) as live:
        model(inputs).pow(2).sum().backward()
    (row,) = live.effects.rows()
    largest = model[0].weight.grad.abs().max()
    print(
        f"{row['site']:<22} changed {row['changed']:.0%} of its entries, "
        f"largest |grad| of 0.weight {largest:.3f}"
    )

model.zero_grad()
h = model[0](inputs)
with gs.hook(h, gs.Clip(0.05)):  # one tensor, no model
    model[2](model[1](h)).pow(2).sum().backward()
print(f"by hand, on the tensor: largest |grad| of 0.weight {model[0].weight.grad.abs().max():.3f}")
