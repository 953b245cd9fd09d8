"""A network of signs: its forward pass, and the surrogate derivatives at its signs."""

import torch
from gradsurg.experiments.schoenbauer2024.layers import SignLinear, StraightSign
from gradsurg.experiments.schoenbauer2024.model import SignMLP, SignWeightMLP

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


def test_a_layer_of_signs_is_straight_through_to_its_latent_weights() -> None:
    torch.manual_seed(0)
    layer, inputs = SignLinear(4, 3), torch.randn(5, 4)
    assert layer.weight.abs().max() <= 1
    signs = torch.where(layer.weight >= 0, 1.0, -1.0)
    torch.testing.assert_close(layer(inputs), inputs @ signs.T / 2)
    layer(inputs).sum().backward()
    torch.testing.assert_close(layer.weight.grad, (inputs.sum(dim=0) / 2).expand(3, -1))


def test_a_surrogate_at_the_signs_of_weights_multiplies_by_the_window_of_the_weight() -> None:
    torch.manual_seed(0)
    model, images = SignWeightMLP((4,), 2, hidden=[8]), torch.randn(5, 4)
    weight = model.output.weight
    plain = torch.autograd.grad(model(images).sum(), weight)[0]
    surgery = gs.Surgery(
        gs.Intervention(gs.SurrogateGradient("triangle"), at=gs.Inputs("output.sign"))
    )
    with surgery.attach(model):
        windowed = torch.autograd.grad(model(images).sum(), weight)[0]
    torch.testing.assert_close(windowed, plain * (1 - weight.detach().abs()))
