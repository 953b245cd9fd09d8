"""The page of a study as text: what is in it, that nothing in it is markup, and its size."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from gradsurg.report import page as module
from gradsurg.report.compare import compare
from gradsurg.report.page import Section, Table, forest, frame_table, page
from gradsurg.report.study import read_study
from tests.report import studies
from tests.report.test_compare import ended

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


class Parsed(HTMLParser):
    """The elements of a page, and the text of those with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last = self.tags[-1][0] if self.tags else ""
        (self.scripts if last == "script" else self.texts).append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def page_of(folder: Path, **more: Any) -> str:
    study = read_study(folder)
    return page(study, compare(study), more.pop("verdict", ["So it is."]), **more)


def sections_of(text: str) -> list[str]:
    return re.findall(r'<section aria-labelledby="h-\w+" id="(\w+)"', text)


def test_the_verdict_comes_first_then_each_arm_cautions_and_sections(tmp_path: Path) -> None:
    text = page_of(
        studies.mixed(tmp_path / "first"),
        verdict=["clip lowers it.", "It only shortened the step."],
        swept=["It falls with the dose."],
        cautions=["One split alone."],
        experiment=[("task", "digits"), ("command", "python -m gradsurg.run")],
        more=[Section("extra", "Something else", notes=["said"])],
        effort=["Trained for 2 s."],
    )
    sections = ["outcome", "experiment", "curves", "effects", "extra", "cost", "runs"]
    assert sections_of(text) == sections
    order = [
        "noise failed:",
        "clip lowers it.",
        "It only shortened the step.",
        "<h3>Difference in test accuracy</h3>",
        '<th scope="row">clip</th>',
        '<th scope="row">noise</th>',
        "It falls with the dose.",
        "<li>One split",
        'id="outcome"',
        "p and q know nothing of the number of metrics",
        "<h3>Difference in train loss AUC</h3>",
        "<dt>task</dt>",
        ">python -m",
        'id="curves"',
        "Trained for 2 s.",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    for link in ("outcome", "extra", "runs"):
        assert f'href="#{link}"' in text
    for state in ("diverged", "failed", "interrupted", "planned", "missing", "finished"):
        assert f'class="{state}"' in text


def test_links_and_arms_without_a_control_have_their_sections(tmp_path: Path) -> None:
    assert "shares" in sections_of(page_of(studies.chain(tmp_path / "chain")))
    studies.whole(tmp_path / "alone", "clip", 0, 0.8)
    text = page_of(tmp_path / "alone")
    assert sections_of(text) == ["alone", "curves", "effects", "cost", "runs"]


def test_an_arm_without_a_control_is_in_its_own_section_alone(tmp_path: Path) -> None:
    studies.paired(tmp_path, "clip", [0.1, 0.2])
    studies.whole(tmp_path, "sign", 0, 0.8)
    answer, _, rest = page_of(tmp_path).partition("<nav")
    assert '<th scope="row">clip</th>' in answer
    assert '<th scope="row">sign</th>' not in answer
    assert '<th scope="row">sign</th>' in rest


def test_steps_to_a_target_are_compared_in_a_table(tmp_path: Path) -> None:
    for seed, (treated, control) in enumerate([(10, 20), (30, None), (40, 20)]):
        ended(tmp_path, "clip", seed, treated, ended(tmp_path, "none", seed, control, None))
    text = page_of(tmp_path).split('id="reached"')[1].split("</section>")[0]
    assert '<td class="num" data-head="sooner">2</td>' in text
    assert '<td class="num" data-head="median">5.000</td>' in text
    assert 'data-head="q"' not in text  # a single arm has none


def test_swept_values_have_doses_and_best_arms(tmp_path: Path) -> None:
    for value in (0.1, 0.2, 0.4):
        for seed in range(2):
            more = {"optimizer": {"name": "SGD", "lr": value}}
            control = studies.whole(tmp_path, "none", seed, 0.5 + value + seed / 9, **more)
            studies.whole(tmp_path, "clip", seed, 0.9 - value, control, **more)
    text = page_of(tmp_path)
    assert sections_of(text)[:3] == ["outcome", "best", "doses"]
    assert "optimizer.lr" in text


def test_a_planned_study_has_a_page(tmp_path: Path) -> None:
    studies.plan(tmp_path, "clip", 0)
    text = page_of(tmp_path)
    assert "Nothing has been logged yet." in text
    assert Parsed(text).data["runs"]["columns"][0] == [path.name for path in tmp_path.iterdir()]


def test_names_and_reasons_from_files_are_no_markup(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0, optimizer={"name": HOSTILE})
    place.write_error(f"Traceback\nValueError: {HOSTILE}\n")
    studies.whole(tmp_path, "clip", 1, 0.5, optimizer={"name": "SGD"})
    hostile = {"verdict": [HOSTILE], "cautions": [HOSTILE], "experiment": [(HOSTILE, HOSTILE)]}
    table = Table(HOSTILE, [HOSTILE], [[HOSTILE]], is_open=True)
    more = [Section("extra", HOSTILE, HOSTILE, tables=[table], notes=[HOSTILE])]
    text = page_of(tmp_path, more=more, effort=[HOSTILE], **hostile)
    parsed = Parsed(text)
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert [tag for tag, _ in parsed.tags].count("script") == 3
    assert "".join(parsed.texts).count(HOSTILE) >= 9
    assert any(HOSTILE in name for name in parsed.data["arms"])
    assert any(HOSTILE in text for text in parsed.data["runs"]["notes"]["texts"])


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    text = page_of(studies.paired(tmp_path, "clip", [0.1, 0.2]))
    parsed = Parsed(text)
    policy = next(attrs["content"] for _, attrs in parsed.tags if "http-equiv" in attrs)
    assert str(policy).startswith("default-src 'none';")
    assert "unsafe-eval" not in str(policy)
    sources = [value for _, attrs in parsed.tags for key, value in attrs.items() if key == "src"]
    assert sources == []
    links = [str(attrs["href"]) for _, attrs in parsed.tags if "href" in attrs]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_each_chart_has_a_text_and_a_table_beside_it(tmp_path: Path) -> None:
    text = page_of(studies.mixed(tmp_path / "first"))
    parsed = Parsed(text)
    drawn = [attrs for _, attrs in parsed.tags if "data-chart" in attrs]
    assert [attrs["data-chart"] for attrs in drawn] == [str(k) for k in range(len(drawn))]
    assert len(parsed.data["charts"]) == len(drawn) == 2
    assert all(len(str(attrs["aria-label"])) > 20 for attrs in drawn)
    for section in text.split("<section")[3:]:
        assert ("data-chart" not in section) or ("<table" in section)


def test_no_verdict_is_in_a_fold(tmp_path: Path) -> None:
    text = page_of(studies.mixed(tmp_path / "first"))
    folded = re.findall(r"<details.*?</details>", text, re.DOTALL)
    assert len(folded) > 3
    assert text.count('data-head="verdict"') > 3
    assert not any('data-head="verdict"' in part for part in folded)


def compared(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    one = {"differences": [], "verdict": "unclear", "interval": "95 %", "low": None, "high": None}
    return [{**one, **row} for row in rows]


def test_a_forest_has_one_axis_with_0_and_a_mark_for_each_row() -> None:
    clear = {"difference": 0.02, "low": 0.01, "high": 0.04, "verdict": "higher"}
    rows = compared(
        {**clear, "differences": [0.01, 0.05]},
        {"difference": -0.05, "interval": "range"},
        {"difference": None, "differences": None},
    )
    drawn = forest(rows, "difference", 100)
    assert drawn is not None
    first, second, none = drawn.marks
    assert none is None
    assert first is not None
    assert second is not None
    # the width is 0.1 and 4 % of it at both sides
    assert drawn.zero == 50
    assert [second.middle, *first.seeds] == pytest.approx([50 - 50 / 1.08, 59.26, 96.3], abs=0.01)
    assert first.ends == pytest.approx((59.26, 87.04), abs=0.01)
    assert second.ends is None
    assert (first.look.strip(), second.look.strip()) == ("clear", "range")
    assert [text for _, text in drawn.ticks] == ["-5", "0"]  # +5 would touch the next column
    assert [at for at, _ in drawn.ticks] == pytest.approx([3.7, 50], abs=0.01)


def test_a_number_that_is_not_finite_has_no_mark() -> None:
    infinite = float("inf")
    rows = compared(
        {"difference": infinite, "low": infinite, "high": infinite, "differences": [infinite]},
        {"difference": 1.0, "low": 0.5, "high": infinite},
    )
    drawn = forest(rows, "difference", 1)
    assert drawn is not None
    assert drawn.marks[0] is None
    assert drawn.marks[1] is not None
    assert drawn.marks[1].ends is None
    assert forest(rows[:1], "difference", 1) is None
    assert forest(compared({"difference": 0.0, "low": 0.0, "high": 0.0}), "d", 1) is None


def test_a_table_aligns_numbers_and_leaves_no_row_without_a_word() -> None:
    table = Table(
        "t", ["arm", "p", "verdict", "none"], [["a", "< 0.1", "x", ""], ["1", "-", "", ""]]
    )
    assert table.columns == [("arm", ""), ("p", "num"), ("verdict", ""), ("none", "")]
    assert Table("t", ["arm", "n"], [["a", "8 of 8"]]).columns[1] == ("n", "num more")
    assert Table("t", ["a"], []).columns == [("a", "")]
    frame = pl.DataFrame({"a": [1.23456789, None], "b": ["x", "y"], "not_c": [1, 2]})
    found = frame_table("t", frame.with_columns(d=pl.lit(""), e=None))
    assert found.heads == ["a", "b", "not c"]
    assert found.rows == [["1.235", "x", "1"], ["", "y", "2"]]


def test_a_long_table_says_how_many_rows_it_has(tmp_path: Path) -> None:
    table = Table("many", ["row"], [[f"row {k}"] for k in range(module.MAX_ROWS + 1)])
    text = page_of(
        studies.paired(tmp_path, "clip", [0.1]), more=[Section("x", "x", tables=[table])]
    )
    assert "row 99<" in text
    assert "row 100<" not in text
    assert "The first 100 of 101 rows." in text


def test_of_very_many_arms_the_first_are_drawn_and_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in range(3):
        for seed in range(2):
            studies.whole(tmp_path, "clip", seed, 0.5, None, value=value)
    control = studies.whole(tmp_path, "none", 0, 0.5)
    studies.whole(tmp_path, "clip", 0, 0.6, control, value=9)
    monkeypatch.setattr(module, "MAX_CURVES", 2)
    text = page_of(tmp_path)
    assert text.count("The first 2 of 5 arms are drawn; the Parquet files have all.") == 1
    drawn = Parsed(text).data["charts"]
    (curves,) = (one for one in drawn if one["description"].startswith("train loss of all"))
    assert [row["arm"] for row in curves["data"]["values"]] == ["clip 0", "clip 1"]


def test_a_config_is_written_once_for_each_arm(tmp_path: Path) -> None:
    for value in (1, 2):
        for seed in range(3):
            missing = "none-seed9-00000000" if seed == 2 else None
            studies.whole(tmp_path, "clip", seed, 0.5, missing, value=value)
    data = Parsed(page_of(tmp_path)).data
    assert data["common"]["model.name"] == "mlp"
    assert "seed" not in data["common"]
    assert data["configs"] == [{"transform.clip.value": "1"}, {"transform.clip.value": "2"}, None]
    assert data["runs"]["columns"][1] == [0, 0, 0, 1, 1, 1, 2]
    assert data["runs"]["columns"][2][:6] == [0, 1, 2] * 2


def test_the_data_of_a_run_is_short(tmp_path: Path) -> None:
    study = read_study(studies.paired(tmp_path, "clip", [0.1] * 20))
    text = json.dumps(module._runs(study, list(study.metrics_of)), separators=(",", ":"))
    assert len(text) / 40 < 100  # bytes for each run: 10,000 runs stay below a megabyte


def test_a_reason_is_written_once(tmp_path: Path) -> None:
    for seed in range(5):
        studies.plan(tmp_path, "clip", seed).write_error("Traceback\nValueError: no room\n")
    text = page_of(tmp_path)
    notes = Parsed(text).data["runs"]["notes"]
    assert len(notes["texts"]) == 1
    assert notes["at"] == [0] * 5
    assert "5 of 5 runs of clip failed: Traceback; ValueError: no room" in text
