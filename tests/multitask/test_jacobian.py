"""The gradients of several tasks, collected by one backward pass a task."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators import rows
from gradsurg.aggregators.base import Aggregator, NormMatchedSum
from gradsurg.multitask import jacobian
from tests.multitask.nets import (
    TARGETS,
    WIDTH,
    Net,
    Uneven,
    at_shared,
    close,
    grads_of,
    inputs,
    losses_of,
    oracle,
    same,
    scaled,
    still,
)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Unwritten entries show: PyTorch fills them, in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("reaching", ["ab", "ac", "bc"])
def test_a_newly_shared_parameter_has_zeros_for_tasks_that_do_not_reach_it(
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


TRUNK = gs.Parameters("trunk.0.weight")


@pytest.mark.parametrize("others", ["ac", "ba", "abc"])
def test_in_shadow_only_the_last_of_batches_with_other_tasks_is_measured(
    others: str,
) -> None:
    model = Net()
    first, second = losses_of(model, 1), losses_of(model, 2)
    with gs.Surgery(at_shared(Uneven())).attach(model, shadow=True) as live:
        live.backward({task: first[task] for task in "ab"}, aggregate=False, retain_graph=True)
        live.backward({task: second[task] for task in others}, retain_graph=True)
        (found,) = live.conflicts.fetch()
        live.backward({task: second[task] for task in others})
        (alone,) = live.conflicts.fetch()
    assert found.tasks == alone.tasks == list(others)
    assert found.norms == pytest.approx(alone.norms)
    for row, expected in zip(found.cosines, alone.cosines, strict=True):
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("task", ["a", "b", "c"])
def test_a_transform_of_one_task_does_not_act_in_the_shadow_backward(task: str) -> None:
    model = Net()
    surgery = gs.Surgery(scaled(3.0, TRUNK, task), at_shared(Uneven()))
    with surgery.attach(model, still(model), shadow=True) as live:
        live.backward(losses_of(model))
    (entry,) = [entry for entry in live.ledger if entry.intervention == "scale"]
    assert entry.all_fired == 1


AT = {
    "a parameter": TRUNK,
    "an activation": gs.Outputs("trunk.0"),
    "a use": gs.Uses("trunk.0.weight"),
}


@pytest.mark.parametrize("place", AT)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("task", ["a", "c"])
def test_a_transform_of_one_task_does_not_act_in_a_plain_backward(
    place: str, fails: bool, task: str
) -> None:
    model = Net()
    losses_of(model, 2)["a"].backward()
    expected = grads_of(model)
    surgery = gs.Surgery(scaled(3.0, AT[place], task), at_shared(Uneven()))
    with surgery.attach(model, still(model)) as live:
        losses = losses_of(model)
        if fails:
            losses[task].register_hook(_fail)
        with pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
            live.backward(losses)
        model.zero_grad()
        losses_of(model, 2)["a"].backward()
        assert same(grads_of(model), expected)
        live.backward(losses_of(model))


def _fail(grad: Tensor) -> None:
    raise RuntimeError("in the middle")


@pytest.mark.parametrize(
    ("aggregator", "granularity"),
    [
        (gs.UPGrad(), "whole"),
        (gs.AlignedMTL(), "tensor"),
        (gs.TrimmedMean(0.3), "whole"),
        (gs.GradDrop(), "tensor"),  # draws a number for each column of a group
        (gs.ExcessMTL(), "whole"),
        (NormMatchedSum(of=gs.PCGrad()), "whole"),
    ],
)
def test_gradients_of_large_parameters_are_combined_without_a_copy_of_all(
    aggregator: Aggregator, granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> dict[str, Tensor]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        at = gs.SharedParameters(granularity=granularity)
        with gs.Surgery(gs.Intervention(aggregator, at=at)).attach(model, optimizer) as live:
            for _ in range(2):
                losses = losses_of(model)
                optimizer.zero_grad()
                live.backward({name: losses.pop(name) for name in ("a", "b")}, aggregate=False)
                live.backward(losses_of(model))
                assert live.attachment.has_multi_task
                collected = live.attachment.multi_task._builder._jacobian
                assert collected is not None
                assert not any(collected._grads)
                optimizer.step()
        return {name: param.detach() for name, param in model.named_parameters()}

    expected = trained()
    monkeypatch.setattr(jacobian, "MATRIX", 0)
    monkeypatch.setattr(jacobian, "LARGE", WIDTH)
    monkeypatch.setattr(rows, "PIECE", 7)
    for name, param in trained().items():
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-6)
