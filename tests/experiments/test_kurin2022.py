"""Two overlaid digits with a factor on the second loss: in training, not in the metrics."""

import pytest
import torch
from gradsurg.experiments.kurin2022.task import ScaledMNISTOverlay, ScaledOverlay

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks.overlay import Overlay


@pytest.mark.parametrize("scaled", [ScaledOverlay, ScaledMNISTOverlay])
def test_the_factor_acts_on_the_second_loss_and_not_on_the_metrics(
    scaled: type[ScaledOverlay] | type[ScaledMNISTOverlay],
) -> None:
    outputs, targets = torch.randn(5, 20), torch.arange(10).reshape(5, 2)
    plain = Overlay()
    first, second = plain.losses(outputs, targets).values()
    task = scaled(factor=10.0)
    assert task.losses(outputs, targets) == {"first": first, "second": 10 * second}
    assert task.loss(outputs, targets) == first + 10 * second
    assert task.metrics(outputs, targets) == plain.metrics(outputs, targets)
    assert scaled().losses(outputs, targets) == {"first": first, "second": second}


def test_a_factor_that_is_not_above_zero_is_refused() -> None:
    with pytest.raises(FieldError, match="factor"):
        ScaledOverlay(factor=0.0)
