"""Clusters with a long tail: frequencies, and the losses of the common and of the rare half."""

import pytest
import torch
from gradsurg.experiments.kunstner2024.task import LongTail
from torch.nn import functional


def test_class_k_is_as_frequent_as_the_tail_says() -> None:
    labels = LongTail(num_classes=3, num_examples=60_000).load().train_targets
    shares = torch.bincount(labels).double() / len(labels)
    torch.testing.assert_close(shares, torch.tensor([6, 3, 2]).double() / 11, atol=0.01, rtol=0)
    even = LongTail(num_classes=3, num_examples=60_000, tail=0).load().train_targets
    assert torch.bincount(even).min() > 19_000


def test_the_rare_half_are_the_examples_of_the_less_frequent_classes() -> None:
    targets = torch.tensor([1, 0, 0, 0, 1, 2, 0, 0])  # rare: 2, both 1, and one of the 0
    outputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    metrics = LongTail(num_classes=3).metrics(outputs, targets)
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    assert metrics["loss_rare"] == pytest.approx(losses[[5, 0, 4, 1]].mean().item())
    assert metrics["loss_common"] == pytest.approx(losses[[2, 3, 6, 7]].mean().item())


def test_points_follow_from_their_seed_and_lie_at_their_centres_without_spread() -> None:
    first, second = LongTail(spread=0).load(), LongTail(spread=0, data_seed=1).load()
    assert not torch.equal(first.train_inputs, second.train_inputs)
    same = first.train_inputs[first.train_targets == 0]
    assert len(same) > 10
    assert torch.equal(same, same[:1].expand_as(same))
