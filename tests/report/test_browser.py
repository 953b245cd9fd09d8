"""The page in a real browser, from disk, without a network."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gradsurg.report.export import write_report
from gradsurg.report.study import read_study
from tests.report import studies
from tests.report.browser import browser, missing, prefer, resized, screenshot

KEPT = Path(__file__).parents[2] / "report"  # what CI keeps
AXE = "axe_core_python"
RUN_AXE = """
const done = arguments[0];
axe.run().then((found) => done(found.violations.map((one) =>
  [one.impact, one.id, one.nodes.length, one.nodes[0].html.slice(0, 300)])));
"""
ENTER, RIGHT, DOWN, SPACE = "\ue007", "\ue014", "\ue015", " "
NONE = "\u2013"  # for a missing number
SCHEMES = ("light", "dark")
Driver = Any  # selenium is imported where it is

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


def written(study: Path) -> Path:
    return write_report(read_study(study), study / "report", figures=False)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = studies.mixed(tmp_path_factory.mktemp("runs") / "first")
    for value in (0.001, 0.1):
        controls = [path.name for path in sorted(study.glob("none-seed*"))]
        for seed, control in enumerate(controls):
            studies.whole(study, "clip", seed, 0.7 + value, control, value=value)
    return written(study)


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
    assert messages(window) == []


def messages(driver: Driver) -> list[str]:
    """The messages in the console since it was last asked."""
    return [entry["message"] for entry in driver.get_log("browser")]


def all_of(driver: Driver, css: str) -> list[Any]:
    return driver.find_elements("css selector", css)


def one(driver: Driver, css: str) -> Any:
    (found,) = all_of(driver, css)
    return found


def texts(driver: Driver, css: str) -> list[str]:
    return [found.text for found in all_of(driver, css)]


def drawn(driver: Driver) -> None:
    """Wait until all charts are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    state = "return document.documentElement.dataset.drawn"
    WebDriverWait(driver, 60).until(lambda one: one.execute_script(state) == "all")


def opened_study(driver: Driver, study: Path) -> None:
    driver.get(written(study).as_uri())
    drawn(driver)


def marks(driver: Driver, section: str, mark: str) -> list[Any]:
    """The drawn items of one kind of mark in the charts of a section."""
    drawn(driver)
    return all_of(driver, f"#{section} svg .mark-{mark}.role-mark path")


def input_of(driver: Driver, section: str, name: str) -> Any:
    return all_of(driver, f"#{section} .inputs select[name={name}]")[0]


def option_of(driver: Driver, select: str, name: str) -> Any:
    (option,) = (one for one in all_of(driver, f"{select} option") if one.text == name)
    return option


@pytest.mark.full
def test_the_network_is_off(window: Driver) -> None:
    from selenium.common.exceptions import WebDriverException

    with pytest.raises(WebDriverException, match="ERR_"):
        window.get("http://127.0.0.1:9/")
    window.get_log("browser")  # the refusal is in it


@pytest.mark.full
def test_a_script_that_fails_would_be_seen(window: Driver, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "index.html"
    text = page.read_text(encoding="utf-8").replace("\nruns();\n", "\nruns();\nnowhere();\n")
    broken.write_text(text, encoding="utf-8")
    window.get(broken.as_uri())
    assert "nowhere is not defined" in str(messages(window))


def test_every_section_has_its_chart_and_its_table(opened: Driver) -> None:
    assert one(opened, "h1").text == "first"
    arms = all_of(opened, "[aria-labelledby=h-answer] tbody tr")
    assert len(arms) == 5
    assert [len(arm.find_elements("css selector", "circle")) for arm in arms] == [1, 1, 1, 0, 1]
    assert len(marks(opened, "curves", "line")) >= 5
    assert len(marks(opened, "doses", "symbol")) == 3
    assert len(marks(opened, "effects", "rect")) == 2 * 4
    assert len(all_of(opened, "#cost tbody circle")) == 4
    assert len(all_of(opened, "#runs tbody tr")) == 19


def test_a_chart_shows_its_numbers_to_the_pointer_and_to_the_keyboard(opened: Driver) -> None:
    from selenium.webdriver import ActionChains

    point = marks(opened, "doses", "symbol")[0]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    ActionChains(opened).move_to_element(point).perform()
    assert "-19.9" in one(opened, "#vg-tooltip-element").text.replace("\u2212", "-")
    one(opened, "#curves details:last-of-type summary").send_keys(ENTER)
    first = texts(opened, "#curves details[open] tr")[1]
    assert first == "clip 0.001 train loss 0.1000 0.05000 0.03333 0.02500 3"


@pytest.mark.full
def test_metric_scale_and_arm_are_chosen_by_the_keyboard_and_outlive_a_reload(
    opened: Driver,
) -> None:
    def labels(section: str) -> str:
        drawn(opened)
        return all_of(opened, f"#{section} .chart")[0].text

    before = labels("doses")
    assert "test accuracy (pp)" in before
    input_of(opened, "doses", "metric").send_keys(DOWN)
    assert labels("doses") != before
    lines = len(marks(opened, "curves", "line"))
    input_of(opened, "curves", "arm").send_keys(DOWN)
    input_of(opened, "curves", "scale").send_keys(DOWN)
    assert "train loss (log scale)" in labels("curves")
    assert len(marks(opened, "curves", "line")) == lines + 3
    for name, value in (("arm", "clip 0.001"), ("scale", "log")):
        assert input_of(opened, "curves", name).get_attribute("value") == value
    measure = labels("effects")
    input_of(opened, "effects", "measure").send_keys(DOWN)
    assert labels("effects") != measure
    opened.refresh()
    assert "train loss (log scale)" in labels("curves")
    assert input_of(opened, "effects", "measure").get_attribute("value") == "norm ratio"


@pytest.mark.full
def test_runs_are_sorted_both_ways_and_what_has_no_number_stays_last(opened: Driver) -> None:
    button = one(opened, "#runs th:nth-child(6) button")
    for order in ("ascending", "descending"):
        button.send_keys(ENTER)
        assert one(opened, "#runs th:nth-child(6)").get_attribute("aria-sort") == order
        shown = texts(opened, "#runs tbody td:nth-child(6)")
        numbers = [float(text.rstrip("%")) for text in shown if text != NONE]
        assert numbers == sorted(numbers, reverse=order == "descending")
        assert len(set(numbers)) > 3
        assert shown[len(numbers) :] == [NONE] * 5
    opened.refresh()
    drawn(opened)
    assert texts(opened, "#runs tbody td:nth-child(6)") == shown


def test_runs_are_filtered_by_text_by_state_and_by_arm(opened: Driver) -> None:
    find = one(opened, "#find")
    find.send_keys("noise room")
    (line,) = texts(opened, "#runs tbody tr")
    assert one(opened, "#shown").text == "1 of 19 runs"
    assert "<b>no</b> room" in line
    find.clear()
    find.send_keys(" ")
    option_of(opened, "#by-state", "diverged").click()
    (line,) = texts(opened, "#runs tbody tr")
    assert "train/loss was nan at step 20 of 40" in line
    option_of(opened, "#by-state", "all states").click()
    option_of(opened, "#by-arm", "zero").click()
    assert [text.split()[1] for text in texts(opened, "#runs tbody tr")] == ["zero"] * 3


@pytest.mark.full
def test_of_very_many_runs_500_are_shown_at_a_time(window: Driver, page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("const MOST = 500", "const MOST = 10")
    file = page.with_name("few.html")
    file.write_text(text, encoding="utf-8")
    window.get(file.as_uri())
    drawn(window)
    window.execute_script("sessionStorage.clear()")
    assert one(window, "#shown").text == "19 of 19 runs; the first 10 are shown"
    assert len(all_of(window, "#runs tbody tr")) == 10
    one(window, "#next").send_keys(ENTER)
    assert len(all_of(window, "#runs tbody tr")) == 19
    assert not one(window, "#next").is_displayed()


def test_a_config_is_linked_and_shown_in_a_dialog(opened: Driver, page: Path) -> None:
    first = all_of(opened, "#runs tbody tr")[0]
    link = first.find_element("css selector", "a").get_attribute("href")
    file = Path(link.removeprefix("file://"))
    assert file.is_file()
    assert file.parent.parent == page.parents[1]
    first.find_element("css selector", "button").click()
    lines = one(opened, "dialog[open] pre").text.splitlines()
    assert {"model.name: mlp", "transform.clip.value: 0.001"} <= set(lines)
    one(opened, "#config-close").click()
    assert all_of(opened, "dialog[open]") == []


@pytest.mark.full
def test_the_theme_follows_the_system_and_the_button(opened: Driver) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    def background() -> str:
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    def line() -> str:
        return marks(opened, "curves", "line")[0].value_of_css_property("stroke")

    light, treated = background(), line()
    prefer(opened, "dark")
    assert light != background()
    redrawn = WebDriverWait(opened, 60, ignored_exceptions=[StaleElementReferenceException])
    redrawn.until(lambda _: line() != treated)  # the event comes later
    one(opened, "#theme").click()
    assert background() == light
    opened.refresh()
    assert background() == light  # what was chosen is kept
    assert line() == treated


def clashing(folder: Path) -> Path:
    """Eight tasks in conflict."""
    return studies.clashing(folder, 8)


def swept(folder: Path) -> Path:
    """A dose, a rate of both arms, and a long name."""
    for rate in (0.1, 1.0, 10.0):
        more = {"optimizer": {"name": "SGD_with_a_name_that_is_long", "lr": rate}}
        for seed in range(6):
            control = studies.whole(folder, "none", seed, 0.5 + seed / 90 + rate / 30, **more)
            for dose in (0.01, 0.1, 1.0):
                accuracy = 0.5 + dose / 3 - rate / 30 + seed**2 / 300
                studies.whole(folder, "clip", seed, accuracy, control, value=dose, **more)
    return folder


def scarce(folder: Path) -> Path:
    """An arm without a control whose runs logged one step, and one that has not begun."""
    for seed in range(2):
        place = studies.plan(folder, "clip", seed)
        studies.log(place, "clip", steps=10)
        studies.end(place, "clip", 0.5)
        studies.plan(folder, "sign", seed)
    return folder


def equal(folder: Path) -> Path:
    """An arm that is its control."""
    return studies.paired(folder, "clip", [0.0] * 6)


CUT = """
document.querySelectorAll('details').forEach((one) => { one.open = true; });
const width = document.documentElement.clientWidth, about = (one) =>
  `${one.tagName} ${one.getAttribute('class')} ${one.textContent.trim().slice(0, 40)}`;
const seen = [...document.querySelectorAll('body *')].filter((one) => one.getClientRects().length);
const wide = seen.filter((one) => one.getBoundingClientRect().right > width + 1);
const cut = seen.filter((one) => one.matches('.scroll') && one.scrollWidth > one.clientWidth + 1);
return [...wide, ...cut].map(about);
"""
STUDIES = (studies.mixed, studies.chain, clashing, swept, scarce, equal)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.__name__)
def test_no_element_is_cut_and_no_message_is_in_the_console(
    window: Driver, tmp_path: Path, study: Callable[[Path], Path]
) -> None:
    page = written(study(tmp_path / "study"))
    for width in (1400, 390):
        resized(window, width)
        window.get(page.as_uri())
        drawn(window)
        assert messages(window) == []
        assert window.execute_script(CUT) == []
        # the check sees what is cut
        window.execute_script("document.querySelector('h1').style.minWidth = '2000px'")
        assert len(window.execute_script(CUT)) > 0


def test_the_answer_is_on_the_first_screen_of_a_phone(opened: Driver) -> None:
    resized(opened, 390, 844)
    top = "return arguments[0].getBoundingClientRect().bottom"
    answer, *_ = all_of(opened, ".answer:not(.failed)")
    first, *_ = all_of(opened, "[aria-labelledby=h-answer] tbody tr")
    assert opened.execute_script(top, answer) < opened.execute_script(top, first) < 844
    assert one(opened, "#h-experiment").location["y"] > one(opened, "#h-outcome").location["y"]


IN_THE_GATE = (studies.mixed, 390, "light")


@pytest.mark.parametrize(
    ("study", "width", "scheme"),
    [
        pytest.param(
            study, width, scheme, marks=[pytest.mark.full] * ((study, width, scheme) != IN_THE_GATE)
        )
        for study, width, scheme in (
            *((studies.mixed, width, scheme) for width in (1280, 390) for scheme in SCHEMES),
            *((study, 390, "light") for study in (studies.chain, clashing)),
            *((study, 1280, "dark") for study in (studies.chain, clashing)),
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
    window.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    script = Path(axe_core_python.__path__[0]) / "axe.min.js"
    window.execute_script(script.read_text(encoding="utf-8"))
    found = window.execute_async_script(RUN_AXE)
    assert [fault for fault in found if fault[0] in ("serious", "critical")] == []
    assert messages(window) == []
    # the check sees a fault where there is one
    pale = "document.querySelectorAll('p').forEach((p) => { p.style.color = '#8887'; })"
    window.execute_script(pale)
    assert "color-contrast" in str(window.execute_async_script(RUN_AXE))
