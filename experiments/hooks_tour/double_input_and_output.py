"""Forward hooks: double the input and the output of a module.

The same transforms act on activations. The gradient follows by autograd: doubling in the forward
doubles it in the backward, unless the gradient is passed straight through.
"""

import torch
from torch import nn

import gradsurg as gs

model = nn.Sequential(nn.Linear(1, 1, bias=False))
nn.init.constant_(model[0].weight, 3.0)
for name, sites in {
    "as it is": (),
    "input doubled": (gs.Activations("0", side="input"),),
    "output doubled": (gs.Activations("0"),),
    "both": (gs.Activations("0", side="input"), gs.Activations("0")),
    "output doubled, gradient straight through": (gs.Activations("0", backward="straight"),),
}.items():
    x = torch.tensor([1.0], requires_grad=True)
    surgery = gs.Surgery(*(gs.Intervention(gs.Scale(2.0), at=at) for at in sites))
    with surgery.attach(model):
        y = model(x)
        y.backward()
    # Read to be printed, after the backward.
    print(f"{name}: f(1) = {y.item():g}, df/dx = {x.grad.item():g}")
