"""`compare`: treated and control arm with the same seeds, and their table."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
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


def test_a_single_number_is_the_outcome_and_a_diverged_run_is_counted_apart() -> None:
    outcomes = iter([float("nan"), 1.0, 2.0, 1.0, 2.5, 1.0])
    comparison = gs.compare(
        make_model, lambda model, surgery: next(outcomes), gs.Surgery(), seeds=3
    )
    (row,) = comparison.frame().to_dicts()
    assert [row[key] for key in ("diverged", "diverged_control", "ended", "n")] == [1, 0, 3, 2]
    assert (row["difference"], row["low"], row["high"], row["higher"]) == (1.25, 1.0, 1.5, 2)
    assert (row["interval"], row["verdict"]) == ("range", "too few seeds")
    assert comparison.verdict().startswith("1 of 3 seeds diverged with the surgery")
    head, _, line = comparison.table().splitlines()
    assert head.split()[-1] == "diverged"
    assert line.endswith("1 and 0 of 3")
    assert "+1.25" in line
    assert "2/2" in line


def test_a_number_that_is_not_finite_takes_its_seed_out_of_all_metrics() -> None:
    losses = iter([1.0, 1.0, float("nan"), 1.0, 2.0, 1.0, 3.0, 1.0])
    comparison = gs.compare(
        make_model,
        lambda model, surgery: {"accuracy": 0.5, "loss": next(losses)},
        gs.Surgery(),
        seeds=4,
    )
    accuracy, loss = comparison.frame().to_dicts()
    assert (accuracy["seeds"], accuracy["diverged"]) == ([0, 2, 3], 1)
    assert (loss["seeds"], loss["differences"]) == ([0, 2, 3], [0.0, 1.0, 2.0])
    verdict = comparison.verdict()
    for words in ("1 of 4 seeds diverged with the surgery and 0 with control", "McNemar p 1)"):
        assert words in verdict


def test_the_verdict_names_a_control_that_acts() -> None:
    surgery = gs.Surgery(gs.Intervention(gs.Sign(), gs.Parameters(), names=("sign",)))
    numbers = iter(arm for seed in range(6) for arm in (0.9 + seed / 100, 0.5))

    def result(model: nn.Module, given: gs.Surgery) -> float:
        train(model, given)
        return next(numbers)

    comparison = gs.compare(make_model, result, surgery, seeds=6, control="norm_matched")
    assert "raises outcome by 0.425 against norm-matched (" in comparison.verdict()
    assert comparison.frame()["against"].to_list() == ["norm-matched"]


def test_eight_seeds_are_the_default_of_which_the_first_number_carries_the_verdict() -> None:
    outcomes = iter(
        arm for seed in range(8) for arm in (-1e6 if seed == 3 else -1.0 - seed / 100, 0.0)
    )

    def result(model: nn.Module, surgery: gs.Surgery) -> dict[str, float]:
        value = next(outcomes)
        return {"loss": value, "other": value, "third": 0.0}

    comparison = gs.compare(make_model, result, gs.Surgery())
    head, _, loss, other, third = comparison.table().splitlines()
    assert head.split()[:4] == ["metric", "treated", "control", "difference"]
    for words in ("-1.25e+05", "0.00781", "0/8", "lower"):
        assert words in loss
        assert words in other
    assert "identical" in third
    verdict = comparison.verdict()
    for words in ("The surgery lowers loss by 1.25e+05 (", "1.02 to 5e+05", "p 0.00781", "8 of 8"):
        assert words in verdict
    frame = comparison.frame()
    # nothing is known of rate, steps and data
    for name in ("lr", "steps", "tuned", "splits", "test_examples", "cosine"):
        assert frame[name].null_count() == 3
    assert frame["metric"].to_list() == ["loss", "other", "third"]
    assert frame["q"].null_count() == 3


def test_a_margin_asks_whether_the_arms_are_equivalent() -> None:
    outcomes = iter(arm for seed in range(6) for arm in (1.0 + 0.001 * (seed - 2), 1.0))
    comparison = gs.compare(
        make_model, lambda model, surgery: {"loss": next(outcomes)}, gs.Surgery(), 6, margin="2%"
    )
    assert comparison.frame()["margin"].to_list() == ["equivalent"]
    assert "within 0.02: +0.0005 (" in comparison.verdict()
    assert "equivalent" in comparison.table()
    with pytest.raises(ValueError, match="^margin needs a positive number"):
        gs.compare(make_model, lambda model, surgery: 1.0, gs.Surgery(), margin="much")


def test_compare_restores_the_global_generator() -> None:
    before = torch.get_rng_state()
    gs.compare(make_model, train, gs.Surgery(gs.Intervention(gs.Zero())), seeds=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"make_model": make_model()}, "make_model: must be a function that returns a new model"),
        ({"make_model": train}, "make_model: is called without arguments, found train"),
        ({"train": make_model}, r"train: is called as train\(model, surgery\), found make_model"),
        ({"surgery": gs.Clip(1.0)}, "surgery: must be a Surgery, found Clip"),
        ({"seeds": "3"}, "seeds: must be a whole number, found '3'"),
        ({"train": lambda model, surgery: {"loss": "x"}}, "train: returned loss='x', not a number"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"make_model": make_model, "train": train, "surgery": gs.Surgery()}
    with pytest.raises(TypeError, match=text):
        gs.compare(**{**given, **changed})


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


@pytest.mark.slow
def test_on_a_terminal_the_progress_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gradsurg as gs, torch\n"
        "def train(model, surgery):\n"
        "    with surgery.attach(model):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "    return 0.5\n"
        "surgery = gs.Surgery(gs.Intervention(gs.Zero()))\n"
        "gs.compare(lambda: torch.nn.Linear(2, 1), train, surgery, seeds=2)\n",
        encoding="utf-8",
    )
    reader, writer = pty.openpty()
    shown = b""
    # Read while it runs: a terminal that nobody reads is full after a few kilobytes.
    with subprocess.Popen([sys.executable, script], stderr=writer) as process:
        os.close(writer)
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(reader, 65536):
                shown += part
    assert process.returncode == 0
    os.close(reader)
    assert re.search(rb"run \d of 4", shown)
    assert b"4/4 control seed 1: finished, outcome 0.5" in shown
    silent = subprocess.run([sys.executable, script], capture_output=True, check=True)
    assert silent.stderr == b""
