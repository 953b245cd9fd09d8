"""`compare`: treated and control arm with the same seeds, and their table."""

from typing import Any

import pytest
import torch
from torch import nn

import gradsurg as gs


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def train(model: nn.Module, surgery: gs.Surgery) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 4)
    loss = torch.tensor(0.0)
    with surgery.attach(model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
    return {"loss": loss.item()}


def test_a_surgery_that_does_nothing_makes_no_difference() -> None:
    comparison = gs.compare(make_model, train, gs.Surgery(gs.Intervention(gs.Identity())), seeds=3)
    assert comparison.treated == comparison.control
    assert len({outcome["loss"] for outcome in comparison.treated}) == 3


def test_a_surgery_that_does_something_is_compared_seed_by_seed() -> None:
    comparison = gs.compare(make_model, train, gs.Surgery(gs.Intervention(gs.Zero())), seeds=3)
    assert all(
        a["loss"] != b["loss"] for a, b in zip(comparison.treated, comparison.control, strict=True)
    )
    mean = (
        sum(
            a["loss"] - b["loss"]
            for a, b in zip(comparison.treated, comparison.control, strict=True)
        )
        / 3
    )
    assert f"{mean:+.3g}" in comparison.table()
    assert "higher" in comparison.table() or "no clear difference" in comparison.table()


def test_one_seed_has_no_interval() -> None:
    comparison = gs.compare(make_model, train, gs.Surgery(gs.Intervention(gs.Zero())), seeds=1)
    assert "one seed: no interval" in comparison.table()


def test_a_single_number_is_the_outcome_and_a_diverged_run_is_counted_apart() -> None:
    outcomes = iter([float("nan"), 1.0, 2.0, 1.0, 2.5, 1.0])
    comparison = gs.compare(
        make_model, lambda model, surgery: next(outcomes), gs.Surgery(), seeds=3
    )
    assert "1 of 3 pairs not finite" in comparison.table()
    assert "+1.25" in comparison.table()


def test_compare_restores_the_global_generator() -> None:
    before = torch.get_rng_state()
    gs.compare(make_model, train, gs.Surgery(gs.Intervention(gs.Zero())), seeds=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds: must be >= 1, found 0"):
        gs.compare(make_model, train, gs.Surgery(), seeds=0)


def test_arms_that_return_different_keys_are_refused() -> None:
    outcomes = iter([{"loss": 1.0}, {"accuracy": 1.0}])
    with pytest.raises(ValueError, match=r"returned \['accuracy'\]"):
        gs.compare(make_model, lambda model, surgery: next(outcomes), gs.Surgery(), seeds=1)


def test_a_surgery_that_was_never_attached_is_an_error() -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Zero()))
    with pytest.raises(ValueError, match="did not attach the surgery"):
        gs.compare(make_model, lambda model, given: 1.0, surgery, seeds=1)


def test_the_placebo_of_a_surgery_that_changes_nothing_is_plain_training_bit_for_bit() -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Scale(1.0)))
    comparison = gs.compare(make_model, train, surgery, seeds=2, control="placebo")
    plain = gs.compare(make_model, train, surgery, seeds=2)
    assert comparison.control == plain.control == plain.treated


@pytest.mark.parametrize("control", ["norm_matched", "update_norm_matched", "placebo"])
def test_a_control_that_acts_differs_from_both_other_arms(control: Any) -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Sign(), gs.Parameters(), names=("sign",)))
    acting = gs.compare(make_model, train, surgery, seeds=1, control=control)
    plain = gs.compare(make_model, train, surgery, seeds=1)
    assert acting.treated == plain.treated
    assert acting.control not in (plain.control, plain.treated)


def test_an_unknown_control_and_the_placebo_of_an_aggregator_are_refused() -> None:
    kind: Any = "placebos"
    surgery = gs.Surgery(gs.Intervention(gs.PCGrad(), gs.SharedParameters()))
    kinds = "plain, norm_matched, update_norm_matched, placebo"
    with pytest.raises(ValueError, match=f"^control: must be one of {kinds}, found 'placebos'"):
        gs.compare(make_model, train, surgery, control=kind)
    with pytest.raises(ValueError, match=r"^control: placebo is for transforms, found PCGrad"):
        gs.compare(make_model, train, surgery, control="placebo")
