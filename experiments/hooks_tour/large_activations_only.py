"""A transform that acts only while activations are large.

The value decides, on the device: `torch.where`, no `.item()`, so nothing waits for a GPU, and the
same code runs under vmap and torch.compile. A common text writes `if grad.norm().item() > c` in the
hook: that copies to the host at every call, and raises under vmap.
"""

import torch
from torch import nn

import gradsurg as gs

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
large = gs.Threshold(above=0.8, measure="mean_abs", source="output:0")
damped = gs.Intervention(gs.Scale(0.1), at=gs.Outputs("0"), when=large)
with gs.Surgery(damped).attach(model) as live:
    for scale in (0.5, 1.0, 4.0):
        inputs = scale * torch.randn(64, 4)
        activation = model[0](inputs).abs().mean()
        model.zero_grad()
        model(inputs).mean().backward()
        fired = sum(entry.all_fired for entry in live.ledger)
        print(f"mean |h| = {activation:.2f}: fired {fired} times so far")

print()
# Hysteresis: on above 0.8, off again only below 0.5.
sticky = gs.Threshold(above=0.8, release=0.5)
x = torch.tensor([1.0], requires_grad=True)
model = nn.Sequential(nn.Linear(1, 1, bias=False))
with gs.Surgery(gs.Intervention(gs.Zero(), when=sticky)).attach(model):
    for size in (0.6, 0.9, 0.6, 0.4, 0.6):
        model.zero_grad()
        model(torch.tensor([size])).backward()
        # Read to be printed, after the backward.
        print(f"gradient {size}: becomes {model[0].weight.grad.item():.1f}")
