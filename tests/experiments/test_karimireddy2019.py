"""The counter-examples of signSGD: their values and slopes by hand, and the box of a point."""

import numpy as np
import pytest
import torch
from gradsurg.experiments.karimireddy2019.model import BoxedPoint
from gradsurg.experiments.karimireddy2019.task import AbsoluteToy, RareSlope, Wilson, _wilson
from torch import Tensor

from gradsurg.plugins.fields import FieldError


def slope(task: AbsoluteToy | RareSlope, at: list[float], target: float = 1.0) -> list[float]:
    """The gradient of the loss of one example there."""
    point = torch.tensor([at], requires_grad=True)
    task.loss(point, torch.full_like(point, target)).backward()
    assert point.grad is not None
    return point.grad[0].tolist()


@pytest.mark.parametrize("num_quarter", [1, 1024])
def test_one_example_in_four_has_the_slope_4_and_the_others_1_down(num_quarter: int) -> None:
    data = RareSlope(num_quarter=num_quarter).load()
    for targets in (data.train_targets, data.test_targets):
        values, counts = targets.unique(return_counts=True)
        assert values.tolist() == [-1, 4]
        assert counts.tolist() == [3 * num_quarter, num_quarter]
        assert targets.mean().item() == 0.25


def test_a_rare_slope_is_that_of_its_example_and_f_is_a_quarter_of_x() -> None:
    task = RareSlope()
    assert slope(task, [0.3], 4.0) == [4.0]
    assert slope(task, [0.3], -1.0) == [-1.0]
    targets = task.load().test_targets
    outputs = torch.full_like(targets, -0.6)
    assert task.metrics(outputs, targets) == pytest.approx({"loss": -0.15, "x": -0.6})
    assert task.loss(outputs, targets).item() == pytest.approx(-0.15)


def test_the_examples_of_wilson_are_those_of_a_slow_second_version() -> None:
    data = Wilson(num_examples=11, data_seed=3).load()
    inputs = torch.cat([data.train_inputs, data.test_inputs]).tolist()
    labels = torch.cat([data.train_targets, data.test_targets]).flatten().tolist()
    assert set(labels) == {-1.0, 1.0}
    assert data.input_shape == (3 + 5 * 11,)
    assert (len(data.train_inputs), len(data.test_inputs)) == (5, 6)
    for place, (row, label) in enumerate(zip(inputs, labels, strict=True)):
        own = [1.0, 0.0, 0.0, 0.0, 0.0] if label == 1 else [1.0] * 5
        before, after = [0.0] * (5 * place), [0.0] * (5 * (10 - place))
        assert row == [label, 1.0, 1.0, *before, *own, *after]


def test_wilson_depends_on_its_seed_alone_and_labels_are_equally_likely() -> None:
    def labels(seed: int) -> Tensor:
        _wilson.cache_clear()
        data = Wilson(num_examples=1000, data_seed=seed).load()
        return torch.cat([data.train_targets, data.test_targets])

    first = labels(0)
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(first, labels(0))
    assert not torch.equal(first, labels(1))
    assert abs(first.mean().item()) < 0.1


def test_wilson_counts_signs_that_are_right_and_an_output_of_zero_is_not() -> None:
    targets = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    outputs = torch.tensor([[0.5], [0.0], [-3.0], [1.0]])
    expected = {"loss": (0.25 + 1 + 4 + 4) / 4, "accuracy": 0.5}
    assert Wilson().metrics(outputs, targets) == pytest.approx(expected)
    assert Wilson().loss(outputs, targets).item() == pytest.approx(expected["loss"])


@pytest.mark.parametrize("epsilon", [0.5, 0.1])
def test_the_absolute_toy_matches_its_formula(epsilon: float) -> None:
    task = AbsoluteToy(epsilon=epsilon)
    points = 2 * torch.rand(50, 2, generator=torch.Generator().manual_seed(0)) - 1
    x1, x2 = points.numpy().T
    expected = epsilon * np.abs(x1 + x2) + np.abs(x1 - x2)
    np.testing.assert_allclose(task.values(points).numpy(), expected, rtol=1e-6)
    assert task.loss(points, points).item() == pytest.approx(expected.mean())
    told = task.metrics(points, points)
    assert told == pytest.approx({"loss": expected.mean(), "x1": x1.mean(), "x2": x2.mean()})
    assert task.values(torch.zeros(1, 2)).tolist() == [0.0]
    for x1, x2 in points.tolist():
        up, across = np.sign(x1 + x2), np.sign(x1 - x2)
        found = slope(task, [x1, x2])
        assert found == pytest.approx([epsilon * up + across, epsilon * up - across])
        assert found[0] * found[1] < 0


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ([1.0, 1.0], [1.5, -0.5]),  # x1 = x2
        ([-1.0, -1.0], [0.5, -1.5]),
        ([1.0, -1.0], [1.5, -0.5]),  # x1 = -x2
        ([-1.0, 1.0], [-0.5, 1.5]),
        ([0.0, 0.0], [1.5, -0.5]),
    ],
)
def test_at_a_tie_the_slope_of_the_absolute_toy_is_1_up(at, expected) -> None:
    assert slope(AbsoluteToy(), at) == expected


def test_the_outputs_of_a_boxed_point_are_its_coordinates_for_every_input() -> None:
    model = BoxedPoint((3,), 2, start=(0.5, -0.25))
    outputs = model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert outputs.tolist() == [[0.5, -0.25]] * 4
    outputs.sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["point"]
    assert grad_of(model) == [4.0, 4.0]


def grad_of(model: BoxedPoint) -> list[float]:
    assert model.point.grad is not None
    return model.point.grad.tolist()


@pytest.mark.parametrize("reach", [1.0, 0.5])
def test_a_forward_puts_a_point_back_to_the_nearest_place_in_its_box(reach: float) -> None:
    model = BoxedPoint((1,), 3, start=(3.0, -2.0, 0.25), reach=reach)
    point = model.point
    assert model(torch.ones(1, 1)).tolist() == [[reach, -reach, 0.25]]
    assert model.point is point
    assert point.tolist() == [reach, -reach, 0.25]
    model(torch.ones(1, 1)).sum().backward()
    assert grad_of(model) == [1.0, 1.0, 1.0]  # at the edge too


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (lambda: RareSlope(num_quarter=0), [("num_quarter", "must be >= 1, found 0")]),
        (lambda: Wilson(num_examples=3), [("num_examples", "must be >= 4, found 3")]),
        (lambda: AbsoluteToy(epsilon=1.0), [("epsilon", "must be < 1, found 1.0")]),
        (lambda: AbsoluteToy(epsilon=0.0), [("epsilon", "must be > 0, such as 0.5, found 0.0")]),
        (
            lambda: BoxedPoint((1,), 1, start=(0.0,), reach=0.0),
            [("reach", "must be > 0, such as 1.0, found 0.0")],
        ),
        (
            lambda: BoxedPoint((1,), 2, start=(0.0,)),
            [("start", "must have 2 coordinates, found 1")],
        ),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(make, faults) -> None:
    with pytest.raises(FieldError) as caught:
        make()
    assert caught.value.faults == faults
