"""Act at one layer only, and only while a flag is up.

A common error: `list(model.layers).index(module)` finds only the first position of a module that
occurs twice. Here both positions have sites of their own.
"""

import torch
from torch import nn

import gradsurg as gs

torch.manual_seed(0)
shared = nn.Linear(4, 4)
model = nn.Sequential(shared, nn.Tanh(), shared)
print("index of the third layer, as the text finds it:", list(model).index(model[2]))
print("sites:", ", ".join(gs.Outputs(types="Linear").find(model)))

inputs = torch.randn(8, 4)
frozen = gs.Intervention(gs.Zero(), at=gs.Outputs("0"), when=gs.Flag("freeze"))
with gs.Surgery(frozen).attach(model) as live:
    for on in (False, True, False):
        live.switch("freeze", on=on)
        model.zero_grad()
        model(inputs).pow(2).mean().backward()
        # The sum over both places. Zeroed at the first, it falls only a little: the second place
        # still adds its own part, which is most of it here.
        norm = shared.weight.grad.norm()
        print(f"freeze {'on ' if on else 'off'}: |grad| of the shared weight {norm:.4f}")
print(live.ledger.table())
