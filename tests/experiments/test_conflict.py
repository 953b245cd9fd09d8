"""The tasks of the benchmark: their losses, and the field that makes them conflict."""

from dataclasses import replace

import pytest
import torch
from gradsurg.experiments.conflict.model import WithFeatures
from gradsurg.experiments.conflict.task import (
    ContradictingLabels,
    FriedmanMulti,
    LabelAgainstDomain,
    NoisyQuadratics,
    explained,
)
from torch.nn import functional

from gradsurg.tasks.base import MultiTask

SPLIT = [ContradictingLabels(), FriedmanMulti(), NoisyQuadratics(), LabelAgainstDomain()]


@pytest.mark.parametrize("task", SPLIT, ids=lambda task: type(task).__name__)
def test_another_split_has_other_training_data_and_the_same_one_the_same(task: MultiTask) -> None:
    first, again, other = (replace(task, split_seed=seed).load() for seed in (0, 0, 1))
    assert torch.equal(first.train_targets, again.train_targets)
    assert not torch.equal(first.train_targets, other.train_targets)


def test_the_second_label_is_the_next_digit_for_a_share_of_the_examples() -> None:
    data = ContradictingLabels(rho=0.5).load()
    for targets in (data.train_targets, data.test_targets):
        first, second = targets.unbind(dim=1)
        moved = first != second
        assert moved.double().mean() == pytest.approx(0.5, abs=0.08)
        assert torch.equal(second[moved], (first[moved] + 1) % 10)
    none = ContradictingLabels(rho=0.0).load().train_targets
    assert torch.equal(none[:, 0], none[:, 1])


def test_the_losses_of_friedman_have_their_factors_and_the_metrics_have_not() -> None:
    task = FriedmanMulti(ratio=100.0)
    outputs, targets = torch.zeros(4, 3), torch.full((4, 3), 2.0)
    losses = [loss.item() for loss in task.losses(outputs, targets).values()]
    assert losses == [4.0, 40.0, 400.0]
    metrics = task.metrics(outputs, targets)
    assert [metrics[f"loss_{name}"] for name in task.names] == [4.0, 4.0, 4.0]
    assert metrics["loss"] == 12.0
    data = task.load()
    assert data.train_targets.mean(dim=0).abs().max() < 0.1
    assert data.train_targets.std(dim=0) == pytest.approx(torch.ones(3), abs=0.1)


def test_the_best_point_of_two_quadratics_is_that_of_the_formula() -> None:
    task = NoisyQuadratics(ratio=3.0)
    centres = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
    left, right = task.squares
    for weight in (0.25, 0.5):
        best = (weight * left * centres[0, :2] + (1 - weight) * right * centres[0, 2:]) / (
            weight * left + (1 - weight) * right
        )
        point = best[None].clone().requires_grad_()
        first, second = task.losses(point, centres).values()
        (weight * first + (1 - weight) * second).backward()
        torch.testing.assert_close(point.grad, torch.zeros(1, 2), atol=1e-6, rtol=0)
    assert [loss.item() for loss in task.losses(torch.zeros(1, 2), centres).values()] == [0.5, 6.5]


def test_a_quadratic_is_measured_without_noise_in_what_the_others_best_point_costs() -> None:
    task = NoisyQuadratics(ratio=3.0)
    noisy = 100 * torch.randn(5, 4)
    for point, left, right in (((-1, 0), 0, 1), ((1, 0), 1, 0), ((0, 0), 0.25, 0.25)):
        outputs = torch.tensor([point], dtype=torch.float32).expand(5, -1)
        found = task.metrics(outputs, noisy)
        assert found == {"loss": left + right, "loss_left": left, "loss_right": right}
    assert task.metrics(torch.tensor([[-1.0, 1.0]]), noisy)["loss_left"] == 9 / 2 / 2


@pytest.mark.parametrize("scale", [10.0, 0.01])
def test_the_explained_share_does_not_depend_on_the_scale_of_the_features(scale: float) -> None:
    torch.manual_seed(0)
    features, domain = torch.randn(200, 3), (torch.arange(200) % 2).float()
    features[:, 0] += domain
    assert explained(scale * features, domain) == pytest.approx(explained(features, domain).item())
    assert explained(torch.zeros(200, 3), domain) == 0


def test_the_explained_share_is_that_of_a_regression() -> None:
    torch.manual_seed(0)
    features = torch.randn(200, 3, dtype=torch.float64)
    assert explained(features, features @ torch.ones(3).double()) == pytest.approx(0.99, abs=0.005)
    assert explained(features, torch.randn(200).double()) < 0.05
    domain = (torch.arange(200) % 2).double()
    features[:, 0] = domain
    assert explained(features, domain) > 0.9


def test_a_label_is_told_from_the_outputs_and_a_domain_from_the_features() -> None:
    task = LabelAgainstDomain(rho=1.0)
    data = task.load()
    assert torch.equal(*data.train_targets.unbind(dim=1))  # all domains follow the label
    model = WithFeatures(data.input_shape, data.num_outputs, width=5)
    outputs = model(data.test_inputs[:50])
    assert outputs.shape == (50, 2 + 5)
    losses = task.losses(outputs, data.test_targets[:50])
    expected = functional.cross_entropy(outputs[:, :2], data.test_targets[:50, 0])
    assert torch.equal(losses["label"], expected)
    losses["domain"].backward()
    assert model.head.weight.grad is not None
    assert not model.head.weight.grad.any()  # the head has no part in the domain's loss
