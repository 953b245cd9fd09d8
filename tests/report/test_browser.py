"""The page in a real browser, from disk, without a network."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.__main__ import main
from gradsurg.training.run_directory import FACTS
from tests.report import studies
from tests.report.browser import browser, missing, prefer, screenshot

KEPT = Path(__file__).parents[2] / "report"  # what CI keeps
AXE = "axe_core_python"
RUN_AXE = """
const done = arguments[0];
axe.run().then((found) => done(found.violations.map((one) =>
  [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 300)])));
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

NONE = "\u2013"  # what stands where there is no number
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
    prefer(window, "light")
    window.get(page.as_uri())
    window.execute_script("sessionStorage.clear()")
    window.get(page.as_uri())
    yield window
    assert [entry["message"] for entry in window.get_log("browser")] == []


def all_of(driver: Driver, css: str) -> list[Any]:
    return driver.find_elements("css selector", css)


def texts(driver: Driver, css: str) -> list[str]:
    return [found.text for found in all_of(driver, css)]


def one(driver: Driver, css: str) -> Any:
    (found,) = all_of(driver, css)
    return found


def test_the_network_is_off(window: Driver) -> None:
    from selenium.common.exceptions import WebDriverException

    with pytest.raises(WebDriverException, match="ERR_"):
        window.get("http://127.0.0.1:9/")
    window.get_log("browser")  # the refusal is in it


def test_a_script_that_fails_would_be_seen(window: Driver, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "index.html"
    broken.write_text(page.read_text().replace("watch();\n", "watch();\nnowhere();\n"))
    window.get(broken.as_uri())
    assert "nowhere is not defined" in str(window.get_log("browser"))


def test_every_section_has_its_chart_or_table(opened: Driver) -> None:
    assert one(opened, "h1").text == "first"
    assert len(all_of(opened, "#outcome tbody tr")) == 5
    assert len(all_of(opened, "#outcome td.plot circle")) == 4
    assert len(all_of(opened, "#curves .panel path.mean")) == 2 * 5
    assert len(all_of(opened, "#doses circle")) == 3
    assert len(all_of(opened, "#effects rect[data-at]")) == 2 * 4
    assert len(all_of(opened, "#effects .bars.before")) == 1
    assert len(all_of(opened, "#cost tbody tr")) == 4
    assert len(all_of(opened, "#runs tbody tr")) == 19
    assert "n = 3" in one(opened, ".answer").text


def opened_study(driver: Driver, study: Path) -> None:
    assert main([str(study)]) == 0
    driver.get((study / "report" / "index.html").as_uri())


def test_links_and_updates_have_their_tables(window: Driver, tmp_path: Path) -> None:
    opened_study(window, studies.chain(tmp_path / "chain"))
    assert texts(window, "#shares h3") == ["clip+noise: test accuracy"]
    clip, noise = texts(window, "#shares tbody tr")
    assert clip.startswith("clip 1 of 2 80.00% 80.00%")
    assert noise.startswith("noise 2 75.00% 87.00%")
    assert "-12.00%" in noise
    one(window, '#outcome input[value="train/loss"]').click()
    assert texts(window, "#shares h3") == ["clip+noise: train loss"]
    first = " ".join(texts(window, "#updates tbody tr")[0].split())
    assert first.startswith("clip 8 steps of 2 runs 0.625 -0.9633 to 2.213 2 2 to 2 ")
    assert "sampled" not in one(window, "main").text
    assert window.get_log("browser") == []


def test_tasks_have_their_trade_off_and_points_their_ways(window: Driver, tmp_path: Path) -> None:
    opened_study(window, studies.toy(tmp_path / "toy"))
    assert len(all_of(window, "#fronts .dot")) == len(all_of(window, "#fronts tbody tr")) == 4
    assert len(all_of(window, "#fronts .beaten .dot")) == 2
    assert len(all_of(window, "#fronts .run")) == 4
    numbers = texts(window, "#fronts text.number")
    assert sorted(", ".join(numbers).split(", ")) == ["1", "2", "3", "4"]
    assert len(numbers) == 2
    assert "none" in texts(window, "#fronts tbody tr")[0]
    picture = one(window, "#ways img")
    assert picture.is_displayed()
    assert int(picture.get_property("naturalWidth")) > 1000
    assert window.get_log("browser") == []


def test_an_interval_beyond_a_logarithmic_axis_is_cut_at_its_edge(
    window: Driver, tmp_path: Path
) -> None:
    arms = {"clip": [(0.1, 1.0), (5.0, 2.0)], "none": [(0.2, 3.0), (0.2, 4.0)]}
    opened_study(window, studies.tasks(tmp_path / "pair", **arms))
    panel = one(window, "#fronts svg")
    assert "loss first (log scale)" in panel.text
    assert "loss second (log scale)" not in panel.text
    for whisker in all_of(window, "#fronts .whisker"):
        for end, least, most in (("x1", 62, 392), ("x2", 62, 392), ("y1", 8, 262), ("y2", 8, 262)):
            assert least - 0.01 <= float(whisker.get_attribute(end)) <= most + 0.01
    assert window.get_log("browser") == []


def test_one_logged_point_is_a_dot_and_a_huge_interval_is_cut(
    window: Driver, tmp_path: Path
) -> None:
    study, control = tmp_path / "first", {}
    # Those of sign differ, or its seeds would count as one.
    arms = {"none": (0.5, 0.5), "clip": (0.5, 0.7), "sign": (0.6, 0.6 + 1e-9)}
    for label, accuracies in arms.items():
        for seed, accuracy in enumerate(accuracies):
            place = studies.plan(study, label, seed, control.get(seed))
            studies.log(place, label, steps=10)
            studies.end(place, label, accuracy)
            control.setdefault(seed, place.path.name)
    opened_study(window, study)
    one(window, '#outcome input[value="test/accuracy"]').click()
    assert len(all_of(window, "#curves circle.lone")) == 2 * 2
    assert len(all_of(window, "#outcome .cut")) == 2  # of clip: -117% to 137%
    clip, _ = all_of(window, "#outcome .whisker")
    assert -115 < float(clip.get_attribute("x1")) < float(clip.get_attribute("x2")) < 230
    assert window.get_log("browser") == []


@pytest.mark.parametrize("width", [1200, 1280])
def test_tables_of_arms_with_long_names_fit_the_window(tmp_path: Path, width: int) -> None:
    study = tmp_path / "first"
    for model in ("mlp", "convnet"):
        more = {"model": {"name": model}}
        controls = [studies.whole(study, "none", seed, 0.9, **more) for seed in range(2)]
        for label in ("clip", "norm_rescale"):
            for seed, control in enumerate(controls):
                studies.whole(study, label, seed, 0.8 + seed / 10, control, **more)
    with browser(width, 900) as driver:
        opened_study(driver, study)
        wide = "return [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth)"
        assert max(driver.execute_script(wide)) <= width - 40


def test_a_study_without_controls_shows_what_stands_alone(window: Driver, tmp_path: Path) -> None:
    for label in ("clip+noise", "noise"):
        studies.whole(tmp_path / "alone", label, 0, 0.8)
    opened_study(window, tmp_path / "alone")
    assert texts(window, "#alone tbody tr") == ["clip+noise 1 80.00% 0.5", "noise 1 80.00% 0.5"]
    assert not one(window, "#outcome").is_displayed()
    assert "control" not in one(window, "#curves .key").text
    one(window, '#shares input[value="train/loss"]').find_element("xpath", "..").click()
    assert texts(window, "#shares h3") == ["clip+noise: train loss"]
    assert window.get_log("browser") == []


def test_the_metric_of_the_forest_plot_is_chosen(opened: Driver) -> None:
    before = texts(opened, "#outcome tbody tr")
    one(opened, '#outcome input[value="train/loss"]').click()
    after = texts(opened, "#outcome tbody tr")
    assert before[0] != after[0]
    assert "0.5 0.5" in after[0]
    assert len(before) == len(after)


def test_runs_are_sorted_both_ways_and_what_has_no_number_stays_last(opened: Driver) -> None:
    button = one(opened, '#runs th[data-key="m0"] button')
    for order in ("ascending", "descending"):
        button.click()
        assert one(opened, '#runs th[data-key="m0"]').get_attribute("aria-sort") == order
        shown = texts(opened, "#runs tbody td:nth-child(6)")
        numbers = [float(text.rstrip("%")) for text in shown if text != NONE]
        assert numbers == sorted(numbers, reverse=order == "descending")
        assert len(set(numbers)) > 3
        assert shown[len(numbers) :] == [NONE] * 5


def test_runs_are_filtered_by_text_and_by_state(opened: Driver) -> None:
    find = one(opened, "#find")
    find.send_keys("noise room")
    assert len(all_of(opened, "#runs tbody tr")) == 1
    assert one(opened, "#shown").text == "1 of 19 runs"
    assert "<b>no</b> room" in one(opened, "#runs tbody tr").text
    find.clear()
    find.send_keys(" ")
    one(opened, '#by-state option[value="diverged"]').click()
    assert "train/loss was nan at step 20 of 40" in one(opened, "#runs tbody tr").text


def test_a_config_is_linked_and_shown_in_a_dialog(opened: Driver, page: Path) -> None:
    first = all_of(opened, "#runs tbody tr")[0]
    link = first.find_element("css selector", "a").get_attribute("href")
    file = Path(link.removeprefix("file://"))
    assert file.parent.parent == page.parents[1]
    first.find_element("css selector", "button").click()
    assert one(opened, "dialog[open] pre").text == file.read_text().strip()
    one(opened, "#config-close").click()
    assert all_of(opened, "dialog[open]") == []


def test_the_slider_moves_by_keys_and_changes_map_and_histogram(opened: Driver) -> None:
    slider, seen = one(opened, "#map"), []
    for _ in range(3):
        name = one(opened, "#map-name").text
        assert slider.get_attribute("aria-valuetext") == name
        seen.append(name)
        slider.send_keys("\ue014")  # arrow right
    assert len(set(seen)) == 3
    assert all("n = " in name for name in seen)


def test_a_panel_reads_its_numbers_to_the_keyboard(opened: Driver) -> None:
    panel = all_of(opened, "#curves .panel")[0]
    panel.send_keys("\ue010")  # end
    said = one(opened, "#tip").text
    assert "step 40" in said
    assert "n = 3" in said
    panel.send_keys("\ue012")  # arrow left
    assert "step 30" in one(opened, "#tip").text


def test_the_theme_follows_the_system_and_the_button(opened: Driver) -> None:
    def background() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = background()
    prefer(opened, "dark")
    dark = background()
    assert light != dark
    one(opened, "#theme").click()
    assert background() == light
    opened.refresh()
    assert background() == light  # what was chosen is kept


@pytest.mark.parametrize("study", [studies.chain, studies.toy], ids=["chain", "toy"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_what_some_studies_have_has_no_serious_fault_of_access(
    tmp_path: Path, study: Callable[[Path], Path], width: int, scheme: str
) -> None:
    import axe_core_python

    script = Path(axe_core_python.__path__[0]) / "axe.min.js"
    with browser(width, 900) as driver:
        prefer(driver, scheme)
        opened_study(driver, study(tmp_path / "study"))
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        driver.execute_script(script.read_text())
        found = driver.execute_async_script(RUN_AXE)
        assert [fault for fault in found if fault[0] in ("serious", "critical")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_there_is_no_serious_fault_of_access(page: Path, width: int, scheme: str) -> None:
    import axe_core_python

    script = Path(axe_core_python.__path__[0]) / "axe.min.js"
    with browser(width, 900) as driver:
        prefer(driver, scheme)
        driver.get(page.as_uri())
        screenshot(driver, KEPT / f"page-{width}-{scheme}.png")
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        driver.execute_script(script.read_text())
        found = driver.execute_async_script(RUN_AXE)
        assert [fault for fault in found if fault[0] in ("serious", "critical")] == []
        # the check sees a fault where there is one
        driver.execute_script("document.querySelector('.how').style.color = '#8887'")
        assert "color-contrast" in str(driver.execute_async_script(RUN_AXE))


def test_a_watched_page_loads_itself_anew_and_keeps_its_place(
    window: Driver, tmp_path: Path
) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    from gradsurg.report.html import page as html
    from gradsurg.report.study import study_report

    study = studies.mixed(tmp_path / "first")
    assert all((path / FACTS).is_file() for path in study.iterdir())
    file = tmp_path / "index.html"
    file.write_text(html(study_report(study), refresh=0.3))
    window.get(file.as_uri())
    window.execute_script("scrollTo({top: 400, behavior: 'instant'})")
    file.write_text(html(study_report(study), refresh=0.3).replace("<h1>first", "<h1>second"))
    # one script each: between two the page may be gone
    seen = "return [document.querySelector('h1').textContent, scrollY]"
    wait = WebDriverWait(window, 20)
    wait.until(lambda driver: driver.execute_script(seen) == ["second", 400])
    window.execute_script("document.getElementById('pause').click(); window.here = true")
    file.write_text(html(study_report(study)))
    window.execute_async_script("setTimeout(arguments[0], 1000)")
    assert window.execute_script("return window.here") is True
