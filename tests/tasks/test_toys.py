"""Toy problems: their losses against a slow second version, their minima against a search."""

from collections.abc import Callable, Sequence
from math import log, tanh

import numpy as np
import pytest
import torch
from gradsurg.experiments.liu2021.task import CAGradToy
from gradsurg.experiments.yu2020.task import PCGradToy
from torch import Tensor

from gradsurg.tasks.quadratics_toy import NUM_EXAMPLES, QuadraticsToy, Toy

Slow = Callable[[float, float], Sequence[float]]


def slow_cagrad(x1: float, x2: float) -> Sequence[float]:
    up, down = max(tanh(x2 / 2), 0), max(tanh(-x2 / 2), 0)
    f1 = log(max(abs(0.5 * (-x1 - 7) + tanh(x2)), 0.000005)) + 6
    f2 = log(max(abs(0.5 * (-x1 + 3) - tanh(x2) + 2), 0.000005)) + 6
    q1 = ((7 - x1) ** 2 + 0.1 * (-x2 - 8) ** 2) / 10 - 20
    q2 = ((-x1 - 7) ** 2 + 0.1 * (-x2 - 8) ** 2) / 10 - 20
    return f1 * up + q1 * down, f2 * up + q2 * down


def slow_pcgrad(a: float, b: float) -> Sequence[float]:
    return (
        20 * log(max(abs(0.5 * a + tanh(b)), 0.000005)),
        25 * log(max(abs(0.5 * a - tanh(b) + 2), 0.000005)),
    )


def slow_quadratics(x1: float, x2: float) -> Sequence[float]:
    return (
        (x1 + 4) ** 2 + 4 * (x2 + 3) ** 2,
        10 * (4 * (x1 - 4) ** 2 + (x2 + 3) ** 2),
        100 * (x1**2 + (x2 - 4) ** 2),
    )


TOYS = [(CAGradToy(), slow_cagrad), (PCGradToy(), slow_pcgrad), (QuadraticsToy(), slow_quadratics)]
toys = pytest.mark.parametrize(("toy", "slow"), TOYS, ids=[type(toy).__name__ for toy, _ in TOYS])


def points(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 20 * torch.rand(count, 2, generator=generator, dtype=torch.float64) - 10


def grads(toy: Toy, point: Tensor) -> list[list[float]]:
    """The gradient of each loss at a point."""
    point = point.clone().requires_grad_()
    values = toy.values(point[None])
    return [torch.autograd.grad(v.sum(), point, retain_graph=True)[0].tolist() for v in values]


@toys
def test_values_and_gradients_are_those_of_a_slow_second_version(toy: Toy, slow: Slow):
    for point in points(200):
        x1, x2 = point.tolist()
        values = [value.item() for value in toy.values(point[None])]
        assert values == pytest.approx(slow(x1, x2), rel=1e-12)
        h = 1e-6
        along1 = np.subtract(slow(x1 + h, x2), slow(x1 - h, x2)) / (2 * h)
        along2 = np.subtract(slow(x1, x2 + h), slow(x1, x2 - h)) / (2 * h)
        expected = np.stack([along1, along2], axis=1)
        np.testing.assert_allclose(grads(toy, point), expected, rtol=1e-4, atol=1e-5)


@toys
def test_losses_are_means_over_points_and_metrics_have_the_point(toy: Toy, slow: Slow):
    here = torch.tensor([[1.0, -2.0], [2.0, -3.0]], dtype=torch.float64)
    expected = np.mean([slow(*place) for place in here.tolist()], axis=0)
    losses = [loss.item() for loss in toy.losses(here, here).values()]
    assert losses == pytest.approx(list(expected))
    assert toy.loss(here, here).item() == pytest.approx(sum(expected))
    named = {f"loss_{1 + place}": value for place, value in enumerate(expected)}
    assert toy.metrics(here, here) == pytest.approx(
        {"loss": sum(expected), **named, "x1": 1.5, "x2": -2.5}
    )


@toys
def test_the_data_of_a_toy_are_its_start_and_ones(toy: Toy, slow: Slow):
    data = toy.load()
    assert data.start == toy.start
    assert data.train_inputs.unique().tolist() == [1.0]
    assert len(data.train_inputs) == NUM_EXAMPLES
    assert type(toy)(start=(1.0, 2.0)).load().start == (1.0, 2.0)


def test_at_zero_both_maxima_of_cagrads_toy_pass_the_gradient():
    x1 = 3.0
    (_, first), (_, second) = grads(CAGradToy(), torch.tensor([x1, 0.0], dtype=torch.float64))
    f1, f2 = log(0.5 * (x1 + 7)) + 6, log(abs(0.5 * (3 - x1) + 2)) + 6
    q1, q2 = ((7 - x1) ** 2 + 6.4) / 10 - 20, ((x1 + 7) ** 2 + 6.4) / 10 - 20
    assert (first, second) == (pytest.approx((f1 - q1) / 2), pytest.approx((f2 - q2) / 2))


def test_the_mean_of_cagrads_toy_is_least_where_it_is_published_to_be():
    toy = CAGradToy()
    point = torch.tensor([1.0, -7.0], dtype=torch.float64, requires_grad=True)
    finder = torch.optim.LBFGS([point], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        finder.zero_grad()
        loss = toy.loss(point[None], point[None])
        loss.backward()
        return loss

    finder.step(closure)
    assert point.tolist() == pytest.approx([0, -8.3551], abs=1e-4)
    everywhere = torch.stack(list(toy.values(points(100_000)))).sum(dim=0)
    assert closure().item() < everywhere.min().item()


def test_pcgrads_toy_has_both_losses_at_their_floors_above_6_5():
    toy = PCGradToy()
    values = toy.values(torch.tensor([[-2.0, 6.5], [-2.0, 10.0]], dtype=torch.float64))
    assert values[0].tolist() == pytest.approx([20 * log(5e-6)] * 2)
    assert values[1].tolist() == pytest.approx([25 * log(5e-6)] * 2)
    below = toy.values(torch.tensor([[-2.0, 5.5]], dtype=torch.float64))
    assert below[0].item() > 20 * log(5e-6)
