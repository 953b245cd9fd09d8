"""Conflicts on the page, in a real browser."""

from pathlib import Path

import pytest

from gradsurg.training.run_directory import RunDirectory
from tests.report import studies
from tests.report.browser import browser, prefer, screenshot
from tests.report.test_browser import (
    KEPT,
    RUN_AXE,
    Driver,
    all_of,
    drawn,
    marks,
    numbers_of,
    one,
    opened_study,
    pytestmark,  # noqa: F401 - pytest reads it here: slow, and skipped without a browser
    shown,
    texts,
)


def slide(driver: Driver, place: int) -> None:
    driver.execute_script(
        "const s = document.getElementById('conflict'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        place,
    )


def test_conflicts_have_their_table_map_lines_and_others(tmp_path: Path) -> None:
    study = studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda"))
    with browser(1280, 900) as driver:
        opened_study(driver, study)
        assert all_of(driver, "#effects") == []
        rows = texts(driver, "#conflicts [aria-label='Conflict of each arm'] tbody tr")
        assert [row.split()[0] for row in rows] == ["mgda", "pcgrad", "control"]
        assert rows[2].endswith("task0 25.0%")
        assert rows[1].endswith("none")
        assert one(driver, "#conflict-name").text == "mgda, n = 2 runs, 4 measured steps each"
        assert len(marks(driver, "conflict|", "rect")) == 3 * 4
        assert len(marks(driver, "weight|", "line")) == len(marks(driver, "decrease|", "line")) == 3
        others = "#conflicts [aria-label='Updates of the other aggregators'] tbody tr"
        assert texts(driver, others) == ["mean 1 0.25 0.25 0.25", "mgda 0.75 0.25 0.25 0.25"]
        one(driver, "#conflict").send_keys("\ue014\ue014")  # arrow right, twice
        assert one(driver, "#conflict-name").text.startswith("control, n = 2")
        assert shown(driver, others) == []  # the control's sum of losses asks no aggregator
        rows = numbers_of(driver, "#conflicts .panels figure:last-child")
        assert rows[3].startswith("task0 30 \u22120.25")
        tasks = texts(driver, "#conflicts [aria-label='Tasks'] tbody tr")
        assert [row.split()[0] for row in tasks] == ["task0", "task1", "task2"]
        assert tasks[0].endswith("25.00%")
        assert driver.get_log("browser") == []


def test_effects_are_left_out_where_nothing_but_an_aggregator_acted(tmp_path: Path) -> None:
    study = studies.clashing(tmp_path / "first")
    for folder in study.glob("none-*"):
        RunDirectory(folder).append_effects([studies.effect("none", "trunk", 10)])
    with browser(1280, 900) as driver:
        opened_study(driver, study)
        assert one(driver, "#conflicts").is_displayed()
        assert all_of(driver, "#effects") == []


def test_a_page_without_several_tasks_has_no_such_section(tmp_path: Path) -> None:
    with browser(1280, 900) as driver:
        opened_study(driver, studies.chain(tmp_path / "chain"))
        assert all_of(driver, "#conflicts") == []
        assert one(driver, "#effects").is_displayed()
        assert "Conflict" not in one(driver, "#contents").text


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_conflicts_have_no_serious_fault_of_access(tmp_path: Path, width: int, scheme: str) -> None:
    import axe_core_python

    script = Path(axe_core_python.__path__[0]) / "axe.min.js"
    with browser(width, 900) as driver:
        prefer(driver, scheme)
        opened_study(driver, studies.clashing(tmp_path / "first", 8))
        screenshot(driver, KEPT / f"conflicts-{width}-{scheme}.png")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert len(marks(driver, "conflict|", "rect")) == 28 * 4
        driver.execute_script(script.read_text())
        for place in range(2):
            slide(driver, place)
            drawn(driver)
            found = driver.execute_async_script(RUN_AXE)
            assert [fault for fault in found if fault[0] in ("serious", "critical")] == []
