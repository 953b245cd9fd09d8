"""Figures and tables for a paper."""

import re
from pathlib import Path

import pytest

from gradsurg.report.compare import compare
from gradsurg.report.paper import figures, write_paper
from gradsurg.report.study import read_study
from tests.report import studies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clipping at three values with two optimizers, two seeds each, and a control for each."""
    place = tmp_path_factory.mktemp("runs") / "paper"
    for name in ("SGD", "Adam"):
        more = {"optimizer": {"name": name}}
        controls = [studies.whole(place, "none", seed, 0.9, **more) for seed in range(2)]
        for dose in (0.01, 0.1, 1.0):
            for seed, control in enumerate(controls):
                accuracy = 0.8 + dose / 10 + seed / 100
                run = studies.whole(place, "clip", seed, accuracy, control, value=dose, **more)
                studies.RunDirectory(place / run).append(
                    "metrics.jsonl", [{"step": 41, "test/accuracy": 1}]
                )
    return place


@pytest.mark.slow
def test_figures_have_the_widths_of_a_column_and_of_a_page_and_their_fonts(
    folder: Path, tmp_path: Path
) -> None:
    files = write_paper(read_study(folder), tmp_path, arms=["clip 0.1, SGD"], style="serif")
    assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()}
    assert "table-train-loss.tex" in {path.name for path in files}
    narrow = (tmp_path / "outcome-3.3in.svg").read_text(encoding="utf-8")
    assert "clip 0.1, SGD" in narrow
    assert "Times New Roman" in narrow
    assert "clip 0.01" not in narrow + (tmp_path / "table.tex").read_text(encoding="utf-8")
    for width in (3.3, 6.8):
        stem = tmp_path / f"curves-{width}in"
        header = Path(f"{stem}.png").read_bytes()[:24]
        assert int.from_bytes(header[16:20]) == pytest.approx(300 * width, abs=1)
        assert f'width="{width}in"' in Path(f"{stem}.svg").read_text(encoding="utf-8")[:300]
        content = Path(f"{stem}.pdf").read_bytes()
        box = re.search(rb"/MediaBox \[0 0 ([0-9.]+) ", content)
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * width, abs=1)
        assert b"/FontFile" in content


def test_each_arm_has_its_map_of_effects_and_each_swept_number_its_doses(folder: Path) -> None:
    study = read_study(folder)
    drawn = figures(study, compare(study), "train/loss")
    effects = ["effects", *(f"effects-{place}" for place in range(2, 7))]
    assert list(drawn) == ["outcome", "curves", "doses", *effects]
    assert drawn["effects"].to_dict()["title"] == "clip 0.01, Adam: cosine of before and after"
    (metric,) = [one for one in drawn["curves"].to_dict()["params"] if one["name"] == "metric"]
    assert metric["value"] == "train loss"
    assert drawn["outcome"].to_dict()["description"].startswith("difference in train loss of")


@pytest.mark.parametrize(
    ("metric", "arms", "fault"),
    [
        ("los", [], "no metric is named 'los'; the metrics are: test/accuracy"),
        ("", ["clip"], "no arm is named 'clip'"),
    ],
)
def test_a_wrong_name_is_answered_with_those_that_exist(
    folder: Path, tmp_path: Path, metric: str, arms: list[str], fault: str
) -> None:
    with pytest.raises(LookupError, match=fault):
        write_paper(read_study(folder), tmp_path, metric, arms)
