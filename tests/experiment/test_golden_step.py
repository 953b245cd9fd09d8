"""One training step, number by number."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs

HOW_TO_MEND = (
    "One training step gives other numbers than it used to. If you did not mean to change what a "
    "transform, a site, the order of interventions or the noise does, you have found a bug. If you "
    "did: say so in CHANGELOG.md (results of earlier versions cannot be repeated), and put what is "
    "printed below as 'found' into GOLDEN, in the same commit."
)

GOLDEN = {
    "0.weight": [
        -0.27030337821052747,
        -0.14887980513100071,
        -0.046428273081256244,
        0.05771108970069762,
        0.46228891029930236,
        0.3777110897006976,
    ],
    "0.bias": [-0.3, 0.3106329077274867],
    "2.weight": [-0.2510002071417101, 0.0357895200190108, 0.14773233030630162, 0.45277403434963126],
    "2.bias": [-0.028738377085747724, 0.2287383770857478],
}


SURGERY = gs.Surgery(
    gs.Intervention(gs.ScaleBySign(1.0, 0.5), at=gs.Nodes("Relu")),
    gs.Intervention(gs.Scale(3.0), at=gs.Outputs("2")),
    gs.Intervention(gs.Chain(gs.AddNoise(sigma=0.1), gs.Clip(0.3)), at=gs.Parameters("*.weight")),
    gs.Intervention(gs.ClipGlobalNorm(0.5)),
    seed=7,
)


def _step(surgery: gs.Surgery) -> dict[str, Tensor]:
    """The parameters after one step; the first weights are written out, so that no initializer has
    a say.
    """
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    for param in model.parameters():
        with torch.no_grad():
            param.copy_(torch.linspace(-0.3, 0.5, param.numel(), dtype=param.dtype).view_as(param))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.8, -1.0]], dtype=torch.float64)
    with surgery.attach(model, optimizer):
        nn.functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()
        optimizer.step()
    return {name: param.detach().flatten() for name, param in model.named_parameters()}


def test_one_training_step_has_the_golden_numbers() -> None:
    weights = {name: param.tolist() for name, param in _step(SURGERY).items()}
    expected = {name: pytest.approx(numbers, abs=1e-9) for name, numbers in GOLDEN.items()}
    assert weights == expected, f"{HOW_TO_MEND}\nfound: {weights}"
    for name, plain in _step(gs.Surgery()).items():
        assert not torch.allclose(plain, torch.tensor(GOLDEN[name], dtype=torch.float64))
