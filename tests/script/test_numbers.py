"""Numbers are read from logs and lines; the outcome is the one that a reader would take."""

import json
from math import isnan, nan
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import gradsurg as gs
from gradsurg.experiment.errors import ConfigError
from gradsurg.script.numbers import (
    LOG,
    Metric,
    Seen,
    Series,
    chosen_metric,
    direction,
    in_line,
    listing,
    read_numbers,
)
from gradsurg.script.recorder import NUMBERS, Recorder


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("Epoch 0: train loss = 1.94, test_acc=0.7489", {"train loss": 1.94, "test_acc": 0.7489}),
        ("epoch 3 test accuracy: 92.5%", {"test accuracy": 0.925}),
        ("[2026-01-01 10:20:30,125][__main__][INFO] - val/mse=1e-3", {"val/mse": 0.001}),
        ("{'loss': '2.5', 'epoch': 1.0}", {"loss": 2.5, "epoch": 1.0}),
        ('{"loss": 2, "ok": true, "name": "a"}', {"loss": 2.0}),
        (" 50%|#####     | 5/10 [00:01<00:01,  4.9it/s, loss=-0.5]", {"loss": -0.5}),
        ("0.93", {}),
        ("ValueError: found shape=3", {}),
        ("saved to https://x.org:8080", {}),
    ],
)
def test_a_line_is_read_as_json_or_as_name_and_number(line: str, numbers: dict[str, float]) -> None:
    assert in_line(line)[1] == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("val/acc", "higher"),
        ("top1", "higher"),
        ("meanReturn", "higher"),
        ("test f1", "higher"),
        ("accuracy_error", "lower"),
        ("reward_loss", "lower"),
        ("eval_ppl", "lower"),
        ("widgets", None),
        ("epoch", None),
    ],
)
def test_the_good_direction_follows_from_the_last_known_word(name: str, better: object) -> None:
    assert direction(name) == better


def test_an_unknown_direction_must_be_given() -> None:
    with pytest.raises(ConfigError, match="metric=higher:widgets or metric=lower:widgets"):
        Metric.of("widgets")
    assert Metric.of("lower:widgets") == Metric("widgets", "lower")
    assert Metric.of("max:widgets") == Metric("widgets", "higher", "max")


def seen(**series: tuple[str, list[float], int]) -> Seen:
    return {
        name.replace("__", "/"): Series(source, [(0, one) for one in values], place)
        for name, (source, values, place) in series.items()
    }


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        (seen(loss=("printed", [1.0], 9), val_acc=("printed", [0.5], 3)), "val_acc"),
        (seen(val_acc=("printed", [0.5], 3), val_loss=("printed", [1.0], 3)), "val_loss"),
        (seen(val_acc=("printed", [0.5], 9), loss=("W&B", [1.0], 3)), "loss"),
        (seen(train_loss=("W&B", [1.0], 9), loss=("W&B", [1.0], 3)), "loss"),
        (seen(train_loss=("W&B", [1.0], 9), epoch=("W&B", [1.0], 9)), "train_loss"),
        (seen(score=("outcome", [1.0], 3), loss=("outcome", [1.0], 3)), "score"),
        (seen(epoch=("printed", [1.0], 3)), None),
        (seen(widgets=("outcome", [1.0], 3), loss=("printed", [1.0], 9)), None),
    ],
)
def test_the_metric_is_that_of_the_best_source_and_of_held_out_data(
    numbers: Seen, name: str | None
) -> None:
    taken = chosen_metric(numbers)
    assert (taken and taken.name) == name
    marked = [line for line in listing(numbers, taken) if line.startswith("*")]
    assert [line.split()[1] for line in marked] == ([name] if name else [])


def test_a_metric_is_the_last_value_or_the_best_and_an_accuracy_in_per_cent_is_a_share() -> None:
    numbers = seen(val__acc=("printed", [0.5, 0.75, 0.625], 1), accuracy=("printed", [50, 75], 1))
    numbers |= seen(val__loss=("printed", [2.0, nan], 1))
    assert Metric.of("val/acc").value(numbers) == 0.625
    assert Metric.of("max:val/acc").value(numbers) == 0.75
    assert Metric.of("accuracy").value(numbers) == 0.75
    assert Metric.of("min:val/loss").value(numbers) == 2.0
    assert isnan(Metric.of("val/loss").value(numbers) or 0.0)
    assert Metric.of("nothing_acc").value(numbers) is None
    assert Metric.of("max:val/acc").key == "outcome/max val/acc"


def test_numbers_of_a_run_have_their_steps_and_the_best_of_several_sources(tmp_path: Path) -> None:
    rows = [
        {"source": "W&B", "step": 1, "numbers": {"loss": 2.0}},
        {"output": 10, "step": 1},
        {"source": "TensorBoard", "step": 2, "numbers": {"loss": 7.0}},
        {"output": 20, "step": 2},
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / NUMBERS).write_text(f'{lines}{{"source": "W&', encoding="utf-8")
    (tmp_path / LOG).write_bytes(b"acc=0.125\nloss=9.00\racc=0.2500\nacc=0.5\n")
    found = read_numbers(tmp_path, 5)
    assert found["loss"] == Series("W&B", [(1, 2.0)], 1)
    assert found["acc"].values == [(1, 0.125), (5, 0.25), (5, 0.5)]


def test_outcome_does_nothing_without_the_command_and_reports_numbers_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gs.outcome(accuracy=0.5)
    monkeypatch.setattr("gradsurg.script.recorder._recorder", None)
    recorder = Recorder(tmp_path)
    recorder.end_step(3)
    given: dict[str, Any] = {"accuracy": torch.tensor(0.5), "vector": torch.zeros(2)}
    gs.outcome(**given, name=cast(Any, "a"), ok=True)
    recorder._file.close()
    found = read_numbers(tmp_path, 3)
    assert found == {"accuracy": Series("outcome", [(3, 0.5)], found["accuracy"].place)}
