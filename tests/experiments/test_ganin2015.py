"""Ganin and Lempitsky 2015: two moons whose target domain is rotated, and gradient reversal."""

from math import log

import pytest
import torch
from gradsurg.experiments.ganin2015.task import TwoMoonsShift

import gradsurg as gs
from gradsurg.models.multi_head import MultiHead


def test_labels_of_the_target_domain_are_in_no_loss_and_in_the_accuracy():
    task = TwoMoonsShift()
    sure = torch.tensor([[50.0, 0, 0, 0], [0, 0, 50.0, 0], [0, 50.0, 0, 0], [0, 50.0, 0, 50.0]])
    targets = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]])
    # The domain: undecided, right, undecided (argmax says 0), right.
    expected = {
        "loss": log(2) / 2 + 2 * log(2) / 4,
        "loss_source": log(2) / 2,
        "loss_domain": 2 * log(2) / 4,
        "accuracy": 0.5,
        "accuracy_source": 0.5,
        "accuracy_domain": 0.75,
    }
    assert task.metrics(sure, targets) == pytest.approx(expected)
    other = targets.clone()
    other[2:, 0] = 1 - other[2:, 0]
    assert torch.equal(task.loss(sure, targets), task.loss(sure, other))


def test_a_batch_without_the_source_has_a_loss_of_the_domain_alone():
    outputs = torch.zeros(3, 4, requires_grad=True)
    losses = TwoMoonsShift().losses(outputs, torch.tensor([[0, 1, 1]] * 3))
    grad = torch.autograd.grad(losses["source"], outputs, retain_graph=True)[0]
    assert (losses["source"].item(), grad.abs().sum().item()) == (0, 0)
    assert losses["domain"].item() == pytest.approx(log(2))


def test_the_target_moons_are_those_of_the_source_turned():
    data = TwoMoonsShift(noise=0, angle=90, num_train=7).load()
    source, target = data.train_inputs.split(7)
    torch.testing.assert_close(target, torch.stack([-source[:, 1], source[:, 0]], dim=1))
    # The ends of the first moon, from (1, 0) to (-1, 0) around (0.5, 0.25), and of the second.
    ends = [[1, -0.5], [-3, -0.5], [-1, 0.5], [3, 0.5]]
    torch.testing.assert_close(source[[0, 2, 3, 6]], torch.tensor(ends))
    assert data.train_targets[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1] * 2
    assert data.train_targets[:, 1:].tolist() == [[0, 0]] * 7 + [[1, 1]] * 7


def test_shuffled_domains_say_nothing_and_leave_the_points_alone():
    data, plain = TwoMoonsShift(shuffled_domains=True).load(), TwoMoonsShift().load()
    assert torch.equal(data.train_inputs, plain.train_inputs)
    labels, said, true = data.train_targets.unbind(dim=1)
    assert said.sum() == true.sum() == 150
    assert 0.4 < (said == true).double().mean() < 0.6
    assert torch.equal(torch.stack([labels, true]), plain.train_targets[:, [0, 2]].T)


def test_at_its_branch_alone_a_reversal_spares_the_gradient_of_the_labels():
    torch.manual_seed(0)
    task = TwoMoonsShift()
    data = task.load()
    model = MultiHead((2,), 4, heads=(2, 2), width=15, hidden=(), activation="sigmoid")
    weight = model.trunk.output.weight

    def gradient(at):
        surgery = gs.Surgery(gs.Intervention(gs.GradientReversal(6.0), at=at))
        weight.grad = None
        with surgery.attach(model):
            task.loss(model(data.train_inputs), data.train_targets).backward()
        return weight.grad

    losses = task.losses(model(data.train_inputs), data.train_targets)
    source, domain = (
        torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses.values()
    )
    torch.testing.assert_close(gradient(gs.Inputs("heads.1")), source - 6 * domain)
    torch.testing.assert_close(gradient(gs.Outputs("sigmoid")), -6 * (source + domain))
