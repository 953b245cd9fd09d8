"""A network of signs: its forward pass, and the surrogate derivatives at its signs."""

import torch
from gradsurg.experiments.schoenbauer2024.layers import StraightSign
from gradsurg.experiments.schoenbauer2024.model import SignMLP

import gradsurg as gs


def test_a_sign_is_minus_1_or_1_and_its_gradient_that_of_the_identity() -> None:
    inputs = torch.tensor([-2.0, -0.1, 0.0, 3.0], requires_grad=True)
    outputs = StraightSign()(inputs)
    torch.testing.assert_close(outputs, torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    (outputs * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert torch.equal(inputs.grad, torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_a_surrogate_at_the_signs_multiplies_their_gradient_by_its_window() -> None:
    torch.manual_seed(0)
    model, images = SignMLP((4,), 2, hidden=[8]), torch.randn(5, 4)
    weight = model.hidden[0].linear.weight
    plain = torch.autograd.grad(model(images).sum(), weight)[0]
    inside = (model.hidden[0].linear(images).abs() <= 0.5).float()
    assert 0 < inside.mean() < 1
    expected = (model.output.weight.sum(dim=0) * inside).T @ images
    surgery = gs.Surgery(
        gs.Intervention(gs.SurrogateGradient("rectangle", slope=2.0), at=gs.Inputs("*.sign"))
    )
    with surgery.attach(model):
        windowed = torch.autograd.grad(model(images).sum(), weight)[0]
    torch.testing.assert_close(windowed, expected)
    assert not torch.allclose(windowed, plain)
