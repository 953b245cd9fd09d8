"""Tasks of several losses: targets and metrics by hand, and a trunk with heads that learns them."""

from re import escape

import pytest
import torch

from gradsurg.models.multi_head import MultiHead
from gradsurg.tasks.base import MultiTask
from gradsurg.tasks.overlay import Overlay
from tests import papers

SEVERAL = [
    name
    for name in papers.names("task")
    if issubclass(papers.find("task", name), MultiTask) and name not in papers.FROM_FILES
]
SHARED = ("contradicting_labels", "label_against_domain", "noisy_quadratics")  # outputs
SPLIT = [name for name in SEVERAL if name not in SHARED and not name.endswith("_toy")]


@pytest.mark.parametrize("name", [name for name in SEVERAL if name not in papers.OWN_METRICS])
def test_metrics_of_each_task_are_called_after_it_and_the_loss_is_their_sum(name):
    task = papers.find("task", name)()
    data = task.load()
    outputs = torch.randn(16, data.num_outputs, generator=torch.Generator().manual_seed(0))
    targets = data.train_targets[:16]
    losses, metrics = task.losses(outputs, targets), task.metrics(outputs, targets)
    assert tuple(losses) == task.names
    assert len({*task.names}) == len(task.names) > 1
    for label, loss in losses.items():
        assert metrics[f"loss_{label}"] == pytest.approx(loss.item())
    assert task.loss(outputs, targets).item() == pytest.approx(sum(losses.values()).item())
    assert metrics["loss"] == pytest.approx(sum(losses.values()).item())


@pytest.mark.parametrize("name", SPLIT)
def test_each_loss_reaches_the_trunk_and_its_own_head_alone(name):
    torch.manual_seed(0)
    task = papers.find("task", name)()
    data = task.load()
    assert data.heads is not None
    assert sum(data.heads) == data.num_outputs
    model = MultiHead(data.input_shape, data.num_outputs, **data.model_options(MultiHead, {}))
    losses = task.losses(model(data.train_inputs[:8]), data.train_targets[:8])
    named = dict(model.named_parameters())
    for place, loss in enumerate(losses.values()):
        grads = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        reached = {path for path, grad in zip(named, grads, strict=True) if grad is not None}
        own = {path for path in named if path.startswith(("trunk.", f"heads.{place}."))}
        assert reached == own


def test_outputs_in_parts_or_beside_one_another_have_the_same_losses():
    task = Overlay(num_train=8, num_test=8)
    data = task.load()
    parts = [torch.randn(8, size) for size in data.heads or ()]
    apart = task.losses(tuple(parts), data.train_targets[:8])
    beside = task.losses(torch.cat(parts, dim=1), data.train_targets[:8])
    assert apart == beside


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.zeros(2, 1), "outputs must have the shape [2, 20], found [2, 1]"),
        (torch.zeros(1, 20), "outputs must have the shape [2, 20], found [1, 20]"),
        (
            (torch.zeros(2, 1), torch.zeros(2, 2)),
            "outputs must be a tensor of the shape [2, 20], or for each task its part of it, "
            "[10, 10] columns, found shapes [[2, 1], [2, 2]]",
        ),
    ],
)
def test_outputs_that_torch_would_broadcast_are_refused(outputs, message):
    with pytest.raises(ValueError, match=f"^{escape(message)}$"):
        Overlay().losses(outputs, torch.zeros(2, 2))
