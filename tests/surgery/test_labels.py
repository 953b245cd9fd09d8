"""Labels of the examples: from `live.set_example_labels`, in a run the task; read by `Route`."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.testing.transforms import context_with
from tests.nets import attached

GROUPS = ((0,), (1,))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _routed(
    model: nn.Module, axis: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> AbstractContextManager[gs.Live]:
    return attached(model, gs.Route(GROUPS, axis=axis), gs.Outputs("0"), optimizer)


def test_each_example_trains_the_units_of_its_label_as_with_a_mask_of_the_activations() -> None:
    labels, inputs = torch.tensor([0, 1, 1, 7, 0]), torch.randn(5, 3)
    mask = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    model, expected = _model(), _model()
    hidden = expected[0](inputs)
    routed = mask * hidden + (1 - mask) * hidden.detach()
    expected[2](expected[1](routed)).square().sum().backward()
    with _routed(model) as live:
        live.set_example_labels(labels)
        model(inputs).square().sum().backward()
    for param, oracle in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad, oracle.grad)


@pytest.mark.parametrize(("axis", "expected"), [(1, [0.0, 0, 8, 8]), (-1, [4.0, 4, 4, 4])])
def test_units_are_those_of_the_given_axis(axis: int, expected: list[float]) -> None:
    conv = nn.Conv2d(1, 4, 1)
    model = nn.Sequential(conv, nn.Flatten(2))
    with _routed(model, axis) as live:
        live.set_example_labels(torch.tensor([1, 1]))
        model(torch.ones(2, 1, 2, 2)).sum().backward()
    assert conv.bias is not None
    torch.testing.assert_close(conv.bias.grad, torch.tensor(expected))


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([], ValueError, r"Route needs the labels .* call live.set_example_labels\(labels\)"),
        ([[0, 1]], TypeError, "tensor of integers, found"),
        ([torch.ones(2)], TypeError, r"shape \[n\], found torch.float32"),
        ([torch.zeros(3, dtype=torch.long)], ValueError, "found 3 labels"),
    ],
)
def test_wrong_labels_are_refused(labels: list[Any], kind: type[Exception], message: str) -> None:
    model = _model()
    with pytest.raises(kind, match=message), _routed(model) as live:
        for each in labels:
            live.set_example_labels(each)
        model(torch.ones(2, 3)).sum().backward()


def test_labels_are_forgotten_at_the_end_of_a_step() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _routed(model, optimizer=optimizer) as live:
        live.set_example_labels(torch.tensor([0, 1]))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="call live.set_example_labels"):
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((3,), {}, r"needs a gradient with axes of examples and, axis 1, of units, found .*\[3\]"),
        ((3, 4), {"axis": 2}, r"axis 2, of units, found the shape \[3, 4\] at the site 'a.weight'"),
        ((3, 1), {}, r"Route.groups: needs at least 2 units on axis 1, .* shape \[3, 1\]"),
    ],
)
def test_gradients_without_units_are_refused(
    shape: tuple[int, ...], fields: dict[str, int], message: str
) -> None:
    grad: Tensor = torch.ones(shape)
    with pytest.raises(ValueError, match=message):
        gs.Route(**fields).apply(grad, context_with(grad))
