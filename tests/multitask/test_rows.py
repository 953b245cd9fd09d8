"""The rows in which the gradients of several tasks stand side by side."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.multitask.nets import (
    TARGETS,
    WIDTH,
    Net,
    Uneven,
    at_shared,
    close,
    grads_of,
    inputs,
    oracle,
    still,
)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """What nobody has written shows: PyTorch fills it, in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("reaching", ["ab", "ac", "bc"])
def test_a_parameter_that_came_to_be_shared_is_zero_where_a_task_does_not_reach_it(
    reaching: str,
) -> None:
    assert bool(torch.empty(3).isnan().all())
    model = Net()
    extra = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    model.register_parameter("extra", extra)

    def losses(tasks: str) -> dict[str, Tensor]:
        features = model.trunk(inputs()).tanh()
        return {
            task: (head(features * extra if task in tasks else features) - TARGETS[task])
            .square()
            .mean()
            for task, head in model.heads.items()
        }

    names = [name for name, _ in model.named_parameters() if not name.startswith("heads.")]
    expected = oracle(model, losses(reaching), [(Uneven(), names)])
    with gs.Surgery(at_shared(Uneven())).attach(model, still(model)) as live:
        live.backward(losses(""))
        model.zero_grad()
        live.backward(losses(reaching))
    close(grads_of(model), expected)
