"""A network with rounded inputs, and the attack on it by both of its gradients."""

import pytest
import torch
from gradsurg.experiments.athalye2018.model import DiscretizedMLP
from gradsurg.experiments.athalye2018.task import AttackedDigits

import gradsurg as gs
from gradsurg.plugins.fields import FieldError


def test_inputs_are_rounded_to_multiples_of_the_step_and_the_gradient_passes() -> None:
    model = DiscretizedMLP((3,), 2, hidden=[4], step=0.5)
    inputs = torch.tensor([[0.2, 0.3, -1.1]], requires_grad=True)
    rounded = model.discretize(inputs)
    torch.testing.assert_close(rounded, torch.tensor([[0.0, 0.5, -1.0]]))
    rounded.sum().backward()
    assert torch.equal(inputs.grad, torch.ones(1, 3))
    assert DiscretizedMLP((3,), 2, step=0.0).discretize(inputs) is inputs


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(FieldError, match="step"):
        DiscretizedMLP((3,), 2, step=-1.0)


def test_the_attack_moves_by_the_gradient_and_stays_at_its_start_if_that_is_zero() -> None:
    torch.manual_seed(0)
    task = AttackedDigits(num_steps=5)
    data, model = task.load(), DiscretizedMLP((1, 8, 8), 10, hidden=[16])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        task.loss(model(data.train_inputs), data.train_targets).backward()
        optimizer.step()
    straight = task.examine(model, data).numbers
    with gs.Surgery(gs.Intervention(gs.Zero(), at=gs.Inputs("discretize"))).attach(model):
        hidden = task.examine(model, data).numbers
    assert hidden["attacked"] == hidden["noise"] > 0.6
    assert straight["attacked"] < 0.2
    assert straight["clean"] == hidden["clean"]
