"""Choices of a tuning in sentences, tables and charts."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.charts import Panel, rows_of
from gradsurg.report.tuning import (
    ArmTuning,
    read_tunings,
    tuning_lines,
    tuning_panels,
    tuning_rows,
    tuning_text,
)

AXIS: dict[str, Any] = {"key": "lr", "values": [0.01, 0.1, 1.0], "by_log": True}


def rows(means: list[float | None]) -> list[dict[str, object]]:
    """The scores of an arm with two seeds, one of which diverged where the mean is None."""
    return [
        {
            "place": number,
            "values": {"lr": lr},
            "seed": 1_000_000 + seed,
            "score": None if mean is None and not seed else (mean or 0.9) + 0.01 * seed,
        }
        for number, (lr, mean) in enumerate(zip(AXIS["values"], means, strict=True))
        for seed in range(2)
    ]


def content(means: list[float | None], place: int, **more: object) -> dict[str, object]:
    """The file of an arm that has chosen the value at `place`."""
    chosen = {"lr": AXIS["values"][place]}
    base = {"label": "clip", "role": "treated", "metric": "validation/accuracy", "lower": False}
    return {
        **base,
        "axes": [AXIS],
        "rows": rows(means),
        "chosen": chosen,
        "runs": ["clip-1"],
        **more,
    }


def column(panel: Panel, table: str, name: str) -> list[object]:
    return [row[name] for row in rows_of(panel.data[table])]


def tunings(folder: Path, *contents: dict[str, object]) -> list[ArmTuning]:
    place = folder / "tuning"
    place.mkdir(exist_ok=True)
    for number, one in enumerate(contents):
        (place / f"{number}.json").write_text(json.dumps(one), encoding="utf-8")
    known, faults = read_tunings(folder, [])
    assert not faults
    return known


def test_a_choice_inside_the_grid_needs_no_remark(tmp_path: Path) -> None:
    (one,) = tunings(tmp_path, content([0.5, 0.8, 0.6], 1))
    assert one.sentence == "clip: lr=0.1 (validation accuracy 80.50%; 3 values x 2 seeds)"
    assert tuning_lines([one])[0] == "Chosen on validation data, with seeds that are not compared:"


def test_a_choice_at_the_edge_says_to_widen_the_grid(tmp_path: Path) -> None:
    largest, smallest = tunings(tmp_path, content([0.5, 0.6, 0.8], 2), content([0.9, 0.6, 0.8], 0))
    assert largest.remarks == ["lr=1 is the largest of the grid: widen it"]
    assert smallest.remarks == ["lr=0.01 is the smallest of the grid: widen it"]


def test_ties_and_divergence_are_told(tmp_path: Path) -> None:
    tie, lost = tunings(tmp_path, content([0.8, 0.8, None], 0), content([0.8, None, None], 1))
    assert "as good on validation accuracy: 0.1" in tie.sentence
    assert "1 diverged)" in tie.sentence
    assert "1 of 2 seeds diverged with it" in lost.remarks


def test_a_chart_has_every_seed_and_marks_the_chosen_value(tmp_path: Path) -> None:
    control = content([0.4, None, 0.3], 0, label="none", role="control")
    known = tunings(tmp_path, content([0.5, 0.8, 0.6], 1), control)
    (panel,) = tuning_panels(known)
    assert panel.title == "validation accuracy over lr"
    assert column(panel, "seeds", "arm") == ["clip"] * 6 + ["control"] * 6
    assert column(panel, "seeds", "score")[:2] == [0.5, 0.51]
    assert column(panel, "chosen", "value") == [0.1, 0.01]
    assert column(panel, "lost", "value") == [0.1]
    assert column(panel, "lost", "text") == ["1 of 2 seeds diverged"]
    assert '"type": "log"' in json.dumps(panel.view)
    heads, rows = tuning_rows(known)
    assert [len(row) for row in rows] == [len(heads)] * 2


def test_with_two_keys_a_chart_shows_the_points_beside_the_chosen_one(tmp_path: Path) -> None:
    axes = [AXIS, {"key": "width", "values": [[8], [16]], "by_log": False}]
    scores = [
        {
            "place": 2 * i + j,
            "values": {"lr": lr, "width": width},
            "seed": 7,
            "score": 0.1 * (i + j),
        }
        for i, lr in enumerate(AXIS["values"])
        for j, width in enumerate([[8], [16]])
    ]
    chosen = {"lr": 1.0, "width": [16]}
    panels = tuning_panels(
        tunings(tmp_path, content([0, 0, 0], 0, axes=axes, rows=scores, chosen=chosen))
    )
    assert [column(panel, "means", "value") for panel in panels] == [
        [0.01, 0.1, 1.0],
        ["[8]", "[16]"],
    ]


def test_rings_and_arrows_stay_inside_the_axis(tmp_path: Path) -> None:
    near = content([0.3, 0.2, 1e6], 1, metric="validation/loss", lower=True)
    far = content([50.0, 40.0, 30.0], 2, metric="validation/loss", lower=True, label="noise")
    (panel,) = tuning_panels(tunings(tmp_path, *[near] * 5, far))
    low, high = float(str(panel.limits["low"])), float(str(panel.limits["high"]))
    assert all(low <= float(str(score)) <= high for score in column(panel, "chosen", "score"))
    assert column(panel, "cuts", "value") == [1.0] * 5 + [0.01, 0.1, 1.0]
    assert set(column(panel, "cuts", "score")) == {high}
    assert column(panel, "chosen", "text")[5] == "30.01"


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"rows": 3}', '{"rows": [], "role": "a", "label": "b", "metric": "c"}']
)
def test_a_broken_file_is_told_and_left_out(tmp_path: Path, text: str) -> None:
    tunings(tmp_path, content([0.5, 0.8, 0.6], 1))
    file = tmp_path / "tuning" / "broken.json"
    file.write_text(text, encoding="utf-8")
    known, (fault,) = read_tunings(tmp_path, [])
    assert len(known) == 1
    assert file.name in fault
    assert fault in tuning_text([file])
