"""Scale a gradient by the sign of its own tensor: all positive, twice; all negative, half.

`of="value"` uses the sign of the tensor, not of its gradient. Nothing is copied to the host.
"""

import torch

import gradsurg as gs

rule = gs.ScaleBySign(positive=2.0, negative=0.5, of="value", per="tensor")
for values in ([1.0, 3.0], [-1.0, -3.0], [1.0, -3.0]):
    x = torch.tensor(values, requires_grad=True)
    with gs.hook(x, rule):
        (7 * x).sum().backward()
    print(f"x = {values}: gradient {x.grad.tolist()}")

print()
for values in ([1.0, 3.0], [-1.0, -3.0]):  # the same for a gradient that agrees with itself
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    with gs.hook(x, gs.ScaleBySign(positive=2.0, negative=0.5, per="tensor")):
        x.backward(torch.tensor(values))
    print(f"gradient {values} becomes {x.grad.tolist()}")
