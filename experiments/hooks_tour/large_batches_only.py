"""A transform that acts only on large batches.

The condition is on the batch and the action in the backward pass, so the batch size is recorded in
the forward. The condition is evaluated on the host: on a small batch the transform is not called.
"""

import torch
from torch import nn

import gradsurg as gs

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
halved = gs.Intervention(gs.Scale(0.5), at=gs.Parameters("0.weight"), when=gs.Shape(above=100))
with gs.Surgery(halved).attach(model) as live:
    for size in (64, 100, 101, 256):
        inputs = torch.randn(size, 4)
        model.zero_grad()
        model(inputs).mean().backward()
        (entry,) = live.ledger
        print(f"batch of {size:>3}: {entry.calls} gradients seen, {entry.fired} acted on")
