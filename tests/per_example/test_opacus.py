"""Clipped gradients equal those of Opacus."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradsurg as gs
from tests.per_example import models

pytest.importorskip("opacus", reason="the extra `oracles` has Opacus")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mlp", "sequences", "convolutions"])
def test_clipped_gradients_are_those_of_opacus(name: str) -> None:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, inputs = models.make(name, 5)
    for part in model.children():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    if name == "convolutions":  # without the layers that Opacus refuses
        kept = [part for part in model.children() if not isinstance(part, nn.BatchNorm2d)]
        kept = [part for part in kept if getattr(part, "padding_mode", "zeros") == "zeros"]
        kept = [
            nn.InstanceNorm2d(4, affine=True) if isinstance(part, nn.InstanceNorm2d) else part
            for part in kept
        ]
        kept = [part for part in kept if not isinstance(part, nn.ConvTranspose2d | nn.Linear)]
        model = nn.Sequential(*kept, nn.Linear(64, 7))
    targets, bound = torch.arange(5), 0.5
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    with gs.Surgery(gs.Intervention(gs.PerSample(gs.ClipGlobalNorm(bound)))).attach(model, sgd):
        functional.cross_entropy(model(inputs), targets).backward()
        sgd.step()
    results = [torch.clone(param.grad) for param in model.parameters()]
    sgd.zero_grad()
    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=5)
    functional.cross_entropy(wrapped(inputs), targets).backward()
    optimizer.pre_step()
    expected = [param.grad for param in model.parameters()]
    size = max(float(torch.abs(grad).max()) for grad in expected)
    deviation = max(
        float(torch.sub(a, b).abs().max()) for a, b in zip(results, expected, strict=True)
    )
    assert deviation <= 1e-6 * size
