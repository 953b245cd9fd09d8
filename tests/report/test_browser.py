"""The page in a real browser, from disk, without a network."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.__main__ import main
from gradsurg.training.run_directory import FACTS
from tests.report import studies
from tests.report.browser import browser, missing, prefer, resized, screenshot

KEPT = Path(__file__).parents[2] / "report"  # what CI keeps
AXE = "axe_core_python"
RUN_AXE = """
const done = arguments[0];
axe.run().then((found) => done(found.violations.map((one) =>
  [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 300)])));
"""
SCROLL_TO_THE_END = """
if (document.documentElement.dataset.drawn !== "all") return 0;
scrollTo({top: document.body.scrollHeight, behavior: "instant"});
return scrollY;
"""

LACKING = missing() or "".join(
    f"there is no {name} (pip install -e '.[test]')"
    for name in ("selenium", AXE)
    if find_spec(name) is None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=LACKING or "all there"),
    # selenium leaves sockets of its own to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

NONE = "\u2013"  # for a missing number
SCHEMES = ("light", "dark")
Driver = Any  # selenium is imported where it is


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = studies.mixed(tmp_path_factory.mktemp("runs") / "first")
    for value in (0.001, 0.1):
        controls = [path.name for path in sorted(study.glob("none-seed*"))]
        for seed, control in enumerate(controls):
            studies.whole(study, "clip", seed, 0.7 + value, control, value=value)
    assert main([str(study)]) == 0
    return study / "report" / "index.html"


@pytest.fixture(scope="module")
def window() -> Iterator[Driver]:
    with browser(1280, 900) as driver:
        yield driver


@pytest.fixture
def opened(window: Driver, page: Path) -> Iterator[Driver]:
    """The page, fresh; at the end nothing may have gone wrong in it."""
    resized(window, 1280)
    prefer(window, "light")
    window.get(page.as_uri())
    window.execute_script("sessionStorage.clear()")
    window.get(page.as_uri())
    drawn(window)
    yield window
    window.execute_script("sessionStorage.clear()")
    assert [entry["message"] for entry in window.get_log("browser")] == []


def all_of(driver: Driver, css: str) -> list[Any]:
    return driver.find_elements("css selector", css)


def texts(driver: Driver, css: str) -> list[str]:
    return [found.text for found in all_of(driver, css)]


def shown(driver: Driver, css: str) -> list[str]:
    return [found.text for found in all_of(driver, css) if found.is_displayed()]


def one(driver: Driver, css: str) -> Any:
    (found,) = all_of(driver, css)
    return found


@pytest.mark.full
def test_the_network_is_off(window: Driver) -> None:
    from selenium.common.exceptions import WebDriverException

    with pytest.raises(WebDriverException, match="ERR_"):
        window.get("http://127.0.0.1:9/")
    window.get_log("browser")  # the refusal is in it


@pytest.mark.full
def test_a_script_that_fails_would_be_seen(window: Driver, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "index.html"
    broken.write_text(
        page.read_text(encoding="utf-8").replace("\nwatch();\n", "\nwatch();\nnowhere();\n"),
        encoding="utf-8",
    )
    window.get(broken.as_uri())
    assert "nowhere is not defined" in str(window.get_log("browser"))


def drawn(driver: Driver) -> None:
    """Wait until all charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    state = "return document.documentElement.dataset.drawn"
    WebDriverWait(driver, 60).until(lambda one: one.execute_script(state) == "all")


def marks(driver: Driver, chart: str, mark: str) -> list[Any]:
    """The drawn items of one kind of mark in a chart, given by the start of its key."""
    drawn(driver)
    return all_of(driver, f'[data-chart^="{chart}"] svg .mark-{mark}.role-mark path')


def numbers_of(driver: Driver, figure: str) -> list[str]:
    """The rows of the table of a chart, which is opened by the keyboard."""
    from selenium.webdriver.support.ui import WebDriverWait

    drawn(driver)
    summary = one(driver, f"{figure} summary")
    if summary.find_element("xpath", "..").get_attribute("open") is None:
        summary.send_keys("\ue007")  # enter
    rows = f"{figure} details tbody tr"
    WebDriverWait(driver, 60).until(lambda one: all_of(one, rows))  # the event comes later
    return texts(driver, rows)


def test_every_section_has_its_chart_and_its_table(opened: Driver) -> None:
    assert one(opened, "h1").text == "first"
    drawn(opened)
    assert len(all_of(opened, "#outcome [data-is='test/accuracy'] tbody tr")) == 5
    assert len(marks(opened, "outcome|", "symbol")) == 4
    assert len(all_of(opened, "#curves figure")) == 1 + 5
    assert len(marks(opened, "curve|", "line")) >= 2 * 5
    assert len(marks(opened, "dose|", "symbol")) == 3
    assert len(marks(opened, "effect|", "rect")) == 2 * 4
    assert len(marks(opened, "norms|", "line")) == 1
    assert len(all_of(opened, "#cost tbody tr")) == 4
    assert len(marks(opened, "cost", "symbol")) == 4
    assert len(all_of(opened, "#runs tbody tr")) == 19
    assert "of 3 seeds; median" in one(opened, ".answer:not(.failed)").text.replace("\u00a0", " ")
    for chart in all_of(opened, "[data-chart]"):
        assert len(chart.get_attribute("aria-label")) > 20


def test_a_chart_shows_its_numbers_to_the_pointer_and_to_the_keyboard(opened: Driver) -> None:
    from selenium.webdriver import ActionChains

    drawn(opened)
    point = marks(opened, "outcome|", "symbol")[0]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    ActionChains(opened).move_to_element(point).perform()
    assert "-19.90 pp" in one(opened, "#vg-tooltip-element").text
    rows = numbers_of(opened, "#curves figure:first-child")
    assert [row.split()[0] for row in rows] == ["10", "20", "30", "40"]
    assert rows[0].split()[1:] == ["0.1", "0.1", "0.1", "3"]


@pytest.mark.full
def test_metric_scales_and_map_are_chosen_by_the_keyboard(opened: Driver) -> None:
    before, chart = shown(opened, "#outcome tbody tr"), one(opened, "#outcome .chart").text
    one(opened, '#outcome input[value="test/accuracy"]').send_keys("\ue014")  # arrow right
    drawn(opened)
    after = shown(opened, "#outcome tbody tr")
    assert one(opened, "#outcome .chart").text != chart
    assert before[0] != after[0]
    assert "0.5 0.5" in after[0]

    def labels() -> str:
        drawn(opened)
        return all_of(opened, '[data-chart^="curve|"]')[0].text

    linear = labels()
    one(opened, "#scale").send_keys(" ")
    by_log = labels()
    assert linear != by_log
    opened.refresh()
    assert one(opened, "#scale").is_selected()  # a choice outlives a reload
    assert labels() == by_log
    one(opened, "#limits").send_keys(" ")
    assert one(opened, "#limits").is_selected()
    slider, seen = one(opened, "#map"), []
    norms = one(opened, '[data-chart^="norms|"]').get_attribute("aria-label")
    for _ in range(3):
        name = one(opened, "#map-name").text
        assert slider.get_attribute("aria-valuetext") == name
        seen.append(name)
        slider.send_keys("\ue014")  # arrow right
    assert len(set(seen)) == 3
    drawn(opened)
    assert one(opened, '[data-chart^="norms|"]').get_attribute("aria-label") != norms
    assert all("n = " in name for name in seen)


def opened_study(driver: Driver, study: Path) -> None:
    assert main([str(study)]) == 0
    driver.get((study / "report" / "index.html").as_uri())
    drawn(driver)


@pytest.mark.full
def test_links_and_updates_have_their_tables(window: Driver, tmp_path: Path) -> None:
    opened_study(window, studies.chain(tmp_path / "chain"))
    assert shown(window, "#shares h3") == ["clip+noise: test accuracy"]
    clip, noise = shown(window, "#shares tbody tr")
    assert clip.startswith("clip ")
    assert "1 of 2 80.00% 80.00%" in clip
    assert noise.startswith("noise -12.00 pp")
    assert "2 of 2 75.00% 87.00%" in noise
    assert "-12.00 pp" in noise
    one(window, '#outcome input[value="train/loss"]').click()
    assert shown(window, "#shares h3") == ["clip+noise: train loss"]
    first = " ".join(texts(window, "#updates tbody tr")[0].split())
    assert first.startswith("clip 8 steps of 2 runs 0.625 2 ")
    assert "sampled" not in one(window, "main").text
    assert window.get_log("browser") == []


@pytest.mark.full
def test_tasks_have_their_trade_off_and_trajectories(window: Driver, tmp_path: Path) -> None:
    opened_study(window, studies.toy(tmp_path / "toy"))
    assert len(all_of(window, "#fronts table tbody tr")) == 4
    # four runs, four arms, and the two arms that none dominates once more, filled
    assert len(marks(window, "front|", "symbol")) == 4 + 4 + 2
    numbers = texts(window, '[data-chart^="front|"] .mark-text.role-mark text')
    assert sorted(", ".join(numbers).split(", ")) == ["1", "2", "3", "4"]
    assert len(numbers) == 2
    assert "none" in texts(window, "#fronts table tbody tr")[0]
    picture = one(window, "#trajectories img")
    assert picture.is_displayed()
    assert int(picture.get_property("naturalWidth")) > 1000
    assert window.get_log("browser") == []


@pytest.mark.full
def test_runs_are_sorted_both_ways_and_what_has_no_number_stays_last(opened: Driver) -> None:
    button = one(opened, "#runs th:nth-child(6) button")
    for order in ("ascending", "descending"):
        button.send_keys("\ue007")  # enter
        assert one(opened, "#runs th:nth-child(6)").get_attribute("aria-sort") == order
        shown = texts(opened, "#runs tbody td:nth-child(6)")
        numbers = [float(text.rstrip("%")) for text in shown if text != NONE]
        assert numbers == sorted(numbers, reverse=order == "descending")
        assert len(set(numbers)) > 3
        assert shown[len(numbers) :] == [NONE] * 5


def test_runs_are_filtered_by_text_and_by_state(opened: Driver) -> None:
    find = one(opened, "#find")
    find.send_keys("noise room")
    (line,) = shown(opened, "#runs tbody tr")
    assert one(opened, "#shown").text == "1 of 19 runs"
    assert "<b>no</b> room" in line
    find.clear()
    find.send_keys(" ")
    one(opened, '#by-state option[value="diverged"]').click()
    (line,) = shown(opened, "#runs tbody tr")
    assert "train/loss was nan at step 20 of 40" in line


def test_a_config_is_linked_and_shown_in_a_dialog(opened: Driver, page: Path) -> None:
    first = all_of(opened, "#runs tbody tr")[0]
    link = first.find_element("css selector", "a").get_attribute("href")
    file = Path(link.removeprefix("file://"))
    assert file.parent.parent == page.parents[1]
    first.find_element("css selector", "button").click()
    assert one(opened, "dialog[open] pre").text == file.read_text(encoding="utf-8").strip()
    one(opened, "#config-close").click()
    assert all_of(opened, "dialog[open]") == []


@pytest.mark.full
def test_the_theme_follows_the_system_and_the_button(opened: Driver) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    def background() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    def line(chart: str = "curve|") -> str:
        drawn(opened)
        return marks(opened, chart, "line")[-1].value_of_css_property("stroke")

    light, treated, last_arm = background(), line(), line("curves|")
    prefer(opened, "dark")
    dark = background()
    assert light != dark
    redrawn = WebDriverWait(opened, 60, ignored_exceptions=[StaleElementReferenceException])
    redrawn.until(lambda _: line() != treated)  # the event comes later
    assert line("curves|") != last_arm
    one(opened, "#theme").click()
    assert background() == light
    opened.refresh()
    assert background() == light  # what was chosen is kept


IN_THE_GATE = (studies.mixed, 390, "light")


def clashing(folder: Path) -> Path:
    """Eight tasks in conflict."""
    return studies.clashing(folder, 8)


@pytest.mark.parametrize(
    ("study", "width", "scheme"),
    [
        pytest.param(
            study, width, scheme, marks=[pytest.mark.full] * ((study, width, scheme) != IN_THE_GATE)
        )
        for study, width, scheme in (
            *((studies.mixed, width, scheme) for width in (1280, 390) for scheme in SCHEMES),
            *((study, 390, "light") for study in (studies.chain, studies.toy, clashing)),
            *((study, 1280, "dark") for study in (studies.chain, studies.toy, clashing)),
        )
    ],
)
def test_there_is_no_serious_fault_of_access(
    window: Driver, tmp_path: Path, study: Callable[[Path], Path], width: int, scheme: str
) -> None:
    import axe_core_python

    resized(window, width)
    prefer(window, scheme)
    opened_study(window, study(tmp_path / "study"))
    screenshot(window, KEPT / f"{study.__name__}-{width}-{scheme}.png")
    assert window.execute_script("return document.documentElement.scrollWidth") <= width
    script = Path(axe_core_python.__path__[0]) / "axe.min.js"
    window.execute_script(script.read_text(encoding="utf-8"))
    found = window.execute_async_script(RUN_AXE)
    assert [fault for fault in found if fault[0] in ("serious", "critical")] == []
    # the check sees a fault where there is one
    pale = "document.querySelectorAll('p').forEach((p) => { p.style.color = '#8887'; })"
    window.execute_script(pale)
    assert "color-contrast" in str(window.execute_async_script(RUN_AXE))


@pytest.mark.full
def test_a_watched_page_loads_itself_anew_and_keeps_its_place(
    window: Driver, tmp_path: Path
) -> None:
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    from gradsurg.report.html import page as html
    from gradsurg.report.study import study_report

    study = studies.mixed(tmp_path / "first")
    assert all((path / FACTS).is_file() for path in study.iterdir())
    file = tmp_path / "index.html"
    file.write_text(html(study_report(study), refresh=0.3), encoding="utf-8")
    window.get(file.as_uri())
    # one script each: between two, and during one, the page may be gone
    wait = WebDriverWait(window, 60, ignored_exceptions=[WebDriverException])
    bottom = wait.until(lambda driver: driver.execute_script(SCROLL_TO_THE_END))
    file.write_text(
        html(study_report(study), refresh=0.3).replace("<h1>first", "<h1>second"), encoding="utf-8"
    )
    seen = "return [document.querySelector('h1').textContent, scrollY]"
    wait.until(lambda driver: driver.execute_script(seen) == ["second", bottom])
    window.execute_script("document.getElementById('pause').click(); window.here = true")
    file.write_text(html(study_report(study)), encoding="utf-8")
    window.execute_async_script("setTimeout(arguments[0], 1000)")
    assert window.execute_script("return window.here") is True


@pytest.mark.full
def test_conflicts_have_their_table_map_lines_and_others(window: Driver, tmp_path: Path) -> None:
    study = studies.clashing(tmp_path / "first", 3, ("pcgrad", "mgda"))
    opened_study(window, study)
    assert all_of(window, "#effects") == []
    rows = texts(window, "#conflicts [aria-label='Conflict of each arm'] tbody tr")
    assert [row.split()[0] for row in rows] == ["mgda", "pcgrad", "control"]
    assert rows[2].endswith("task0 25.0%")
    assert rows[1].endswith("none")
    assert one(window, "#conflict-name").text == "mgda, n = 2 runs, 4 measured steps each"
    assert len(marks(window, "conflict|", "rect")) == 3 * 4
    assert len(marks(window, "weight|", "line")) == len(marks(window, "decrease|", "line")) == 3
    others = "#conflicts [aria-label='Updates of the other aggregators'] tbody tr"
    assert texts(window, others) == ["mean 1 0.25 0.25 0.25", "mgda 0.75 0.25 0.25 0.25"]
    one(window, "#conflict").send_keys("\ue014\ue014")  # arrow right, twice
    assert one(window, "#conflict-name").text.startswith("control, n = 2")
    assert shown(window, others) == []  # the control's sum of losses asks no aggregator
    rows = numbers_of(window, "#conflicts .panels figure:last-child")
    assert rows[3].startswith("task0 30 \u22120.25")
    tasks = texts(window, "#conflicts [aria-label='Tasks'] tbody tr")
    assert [row.split()[0] for row in tasks] == ["task0", "task1", "task2"]
    assert tasks[0].endswith("25.00%")
    assert window.get_log("browser") == []
