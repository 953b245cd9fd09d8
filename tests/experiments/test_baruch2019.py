"""The attack of A Little Is Enough by hand, and the losses of workers that share a batch."""

import pytest
import torch
from gradsurg.experiments.baruch2019.aggregator import LittleIsEnough
from gradsurg.experiments.baruch2019.task import Workers
from torch.nn import functional

import gradsurg as gs

ROWS = torch.tensor([[9.0, 9.0], [1.0, 0.0], [3.0, 4.0]])  # the honest have the mean (2, 2)


def test_corrupt_rows_become_the_mean_less_z_standard_deviations_of_the_honest() -> None:
    first = LittleIsEnough(gs.FixedWeights([1, 0, 0]), num_corrupt=1, z=2.0)
    torch.testing.assert_close(first(ROWS), torch.tensor([0.0, -2.0]))
    everyone = LittleIsEnough(gs.TrimmedMean(0.0), num_corrupt=1, z=2.0)
    torch.testing.assert_close(everyone(ROWS), torch.tensor([4 / 3, 2 / 3]))


def test_without_corrupt_workers_it_is_the_rule_itself() -> None:
    rule = gs.Krum()
    assert torch.equal(LittleIsEnough(rule, num_corrupt=0)(ROWS), rule(ROWS))


def test_a_single_honest_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="LittleIsEnough needs 4 tasks or more, found 3"):
        LittleIsEnough(gs.TrimmedMean(0.0), num_corrupt=2)(ROWS)


def test_each_worker_has_the_examples_in_its_place() -> None:
    task = Workers(num_workers=3)
    outputs, targets = torch.randn(5, 10), torch.arange(5)
    losses = task.losses(outputs, targets)
    for index, loss in enumerate(losses.values()):
        expected = functional.cross_entropy(outputs[index::3], targets[index::3])
        torch.testing.assert_close(loss, expected)
    assert Workers(num_workers=9).losses(outputs, targets)["worker_8"] == 0
