"""Clipping the gradient of each of a few examples: the sum of the results."""

import torch
from gradsurg.experiments.chen2020.task import ClippingToy

import gradsurg as gs
from gradsurg.models.point import Point


def gradient_at(x: float, *interventions: gs.Intervention) -> float:
    task = ClippingToy(centres=(-3.0, -3.0, 9.0), start=x)
    data = task.load()
    model = Point((1,), 1, start=data.start)
    with gs.Surgery(*interventions).attach(model):
        task.loss(model(data.train_inputs), data.train_targets).backward()
    assert model.point.grad is not None
    return model.point.grad.item()


def test_at_the_outputs_the_gradient_of_each_example_is_clipped() -> None:
    each = gs.Intervention(gs.ClipNorm(1.0, per="unit"), at=gs.Outputs())
    assert gradient_at(0.0) == -3
    assert gradient_at(0.0, each) == 1 + 1 - 1
    assert gradient_at(-2.5, each) == 0.5 + 0.5 - 1


def test_the_metrics_have_the_gradient_that_is_not_clipped() -> None:
    task = ClippingToy()
    metrics = task.metrics(torch.full((2, 1), 1.5), task.load().test_targets)
    assert metrics == {"loss": (4.5**2 + 1.5**2) / 2, "x": 1.5, "gradient": 3.0}
