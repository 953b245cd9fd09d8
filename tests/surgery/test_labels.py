"""The batch of a step and its labels: from `live.set_batch`, in a run the task; `Route`."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs
from tests.nets import attached
from tests.sites.points import Noted

GROUPS = ((0,), (1,))
TOKENS = [[0, 1, -100], [1, 1, 0]]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _routed(model: nn.Module, axis: int = 1) -> AbstractContextManager[gs.Live]:
    return attached(model, gs.Route(GROUPS, axis=axis), gs.Outputs("0"))


@pytest.mark.parametrize(
    ("labels", "axis", "is_flat"),
    [([0, 1, 1, 7, 0], 1, False), (TOKENS, -1, False), (TOKENS, -1, True)],
    ids=["examples", "tokens", "flattened tokens"],
)
def test_each_label_trains_its_units_as_with_a_mask_of_the_activations(
    labels: list[Any], axis: int, is_flat: bool
) -> None:
    known = torch.tensor(labels)
    inputs, model, expected = torch.randn(*known.shape, 3), _model(), _model()
    hidden = expected[0](inputs)
    mask = torch.stack([known != 1, known != 1, known != 0, known != 0], dim=-1)
    expected[2](expected[1](torch.where(mask, hidden, hidden.detach()))).square().sum().backward()
    with _routed(model, axis=axis) as live:
        live.set_batch(labels=known)
        model(inputs.flatten(0, 1) if is_flat else inputs).square().sum().backward()
    for param, oracle in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad, oracle.grad)


def test_a_transform_reads_the_batch_which_is_released_at_the_end_of_the_step() -> None:
    model, noted = _model(), Noted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 3, requires_grad=True)
    with attached(model, noted, gs.Parameters("0.weight"), optimizer) as live:
        with pytest.raises(TypeError, match="mask: must be a tensor, found 3"):
            live.set_batch(mask=3)  # type: ignore[arg-type]  # wrong on purpose
        live.set_batch(inputs=inputs)
        live.set_example_labels(torch.tensor([0, 1]))
        model(inputs).sum().backward()
        optimizer.step()
        assert not live.clock.batch
        model(inputs).sum().backward()
    seen, later = noted.batches
    assert torch.equal(seen["inputs"], inputs)
    assert not seen["inputs"].requires_grad
    assert seen["labels"].tolist() == [0, 1]
    assert not later


@pytest.mark.parametrize(("axis", "expected"), [(1, [0.0, 0, 8, 8]), (-1, [4.0, 4, 4, 4])])
def test_units_are_those_of_the_given_axis(axis: int, expected: list[float]) -> None:
    conv = nn.Conv2d(1, 4, 1)
    model = nn.Sequential(conv, nn.Flatten(2))
    with _routed(model, axis) as live:
        live.set_example_labels(torch.tensor([1, 1]))
        model(torch.ones(2, 1, 2, 2)).sum().backward()
    assert conv.bias is not None
    torch.testing.assert_close(conv.bias.grad, torch.tensor(expected))
