"""Log the norm of every gradient, without changing anything.

A hand-written logger reads `p.grad.norm()` after `backward()`: for an activation there is no
`.grad` to read. A common text registers a hook on `x = torch.randn(2, 2, requires_grad=True) * 10`
and prints `x.grad` to see it work. It cannot: x is not a leaf, its `.grad` stays None.
"""

import warnings

import torch
from torch import nn

import gradsurg as gs

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 4), torch.randint(2, (16,))

measured = gs.Surgery(
    gs.Intervention(gs.Identity(), at=gs.Parameters("*.weight"), names=("weights",)),
    gs.Intervention(gs.Identity(), at=gs.Outputs(), names=("activations",)),
)
with measured.attach(model, optimizer) as live:
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
for row in live.effects.rows():
    print(f"{row['transform']:<11} {row['site']:<8} mean norm {row['norm_before']:.3f}")

print()
z = torch.ones(2, requires_grad=True) * 10
z.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
z.sum().backward()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PyTorch's warning says what is shown here
    print("z.grad of a tensor that is no leaf:", z.grad)
z = torch.ones(2, requires_grad=True) * 10
z.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
z.retain_grad()
z.sum().backward()
print("with retain_grad(), after the hook:", z.grad.tolist())
