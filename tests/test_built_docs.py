"""The built documentation: each picture and each page that it links to is there."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

from tests.report.browser import browser, missing

DOCS = Path(__file__).parents[1] / "docs"


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "all there")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of selenium's sockets


class Links(HTMLParser):
    """The targets of the links and pictures of a page, and the places in it that have an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.pictures = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.pictures += tag == "img"
        self.targets += [value for key in ("src", "href") if (value := values.get(key))]
        self.ids |= {value for key in ("id", "name") if (value := values.get(key))}


def dead(site: Path, pages: dict[Path, Links]) -> list[str]:
    """Return the local targets that are not in the site, written `page: target`."""
    found = []
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(url.fragment)
            is_page = anchor and file in pages
            if not file.is_file() or (is_page and anchor not in pages[file].ids):
                found.append(f"{page.relative_to(site)}: {target}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    site = tmp_path_factory.mktemp("docs").resolve() / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(DOCS), str(site)]
    subprocess.run(command, check=True, timeout=600)
    return site


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    files = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    return {page: Links(page.read_text(encoding="utf-8")) for page in files}


@pytest.mark.slow
def test_the_built_site_has_each_picture_and_each_page_that_it_links_to(
    site: Path, pages: dict[Path, Links]
) -> None:
    assert dead(site, pages) == []
    assert pages[site / "gallery.html"].pictures >= len([*DOCS.glob("gallery/*.png")]) > 0


@pytest.mark.slow
def test_each_page_has_a_title_and_a_description_of_its_own(pages: dict[Path, Links]) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    titles = [re.findall(r"<title>(.*?)</title>", text)[0] for text in texts.values()]
    assert sorted(titles) == sorted({*titles})
    written = [page for page in texts if page.stem not in ("genindex", "search", "py-modindex")]
    own = [page for page in written if "_modules" not in page.parts]
    assert [page for page in own if 'name="description"' not in texts[page]] == []


BROKEN = (
    "return [...document.images].filter(i => !i.naturalWidth && i.offsetParent).map(i => i.src)"
)


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_each_picture_and_says_nothing(
    site: Path, pages: dict[Path, Links]
) -> None:
    with browser(1400, 900) as driver:
        faults = []
        for page in pages:
            driver.get(page.as_uri())
            said = [entry["message"] for entry in driver.get_log("browser")]
            faults += [f"{page.name}: {x}" for x in (*driver.execute_script(BROKEN), *said)]
        assert faults == []


FINISHED = "return typeof Search !== 'undefined' && Search.title?.innerText === 'Search Results'"
FOUND = (
    "return [...document.querySelectorAll('#search-results ul.search > li > a')].map(a => a.href)"
)
SEARCHES = {
    "register_full_backward_hook": "how/backward_hook",
    "pcgrad plain sum seeds": "how/pcgrad",
    "GradScaler": "how/clip",
    "Muon": "how/clip",
    "embedding rows": "how/embedding_rows",
    "unfreeze": "how/freeze",
    "clip_grad_norm_": "how/one_norm",
    "NaN gradients": "how/nan",
    "torch.compile": "how/compile",
    "Hugging Face outputs": "how/huggingface",
    "gradient routing": "how/routing",
    "unlearning": "how/unlearning",
    "AttnLRP": "how/attnlrp",
    "GRPO": "how/trl",
    "FSDP2": "how/fsdp2",
    "hundreds of tensors": "how/logs",
    "modify a gradient in a backward hook": "how/backward_hook",
    "register_hook on a parameter": "how/backward_hook",
    "clip gradients per layer": "how/one_norm",
    "clip gradient norm with accumulation": "how/clip",
    "gradient clipping with GradScaler": "how/clip",
    "which layer has exploding gradients": "how/exploding",
    "vanishing gradients": "how/exploding",
    "where does the NaN come from": "how/nan",
    "skip a step with infinite gradients": "skip_update",
    "freeze some rows of an embedding": "how/embedding_rows",
    "train only part of a tensor": "how/embedding_rows",
    "reverse gradient domain adaptation": "gradient_reversal",
    "straight-through estimator": "straight_through",
    "surrogate gradient spiking network": "surrogate",
    "guided backpropagation": "guided_backprop",
    "layer-wise relevance propagation": "lrp",
    "attention LRP llama": "how/attnlrp",
    "two losses conflict": "how/pcgrad",
    "PCGrad in my training loop": "how/pcgrad",
    "loss weighting uncertainty": "uncertainty_weighting",
    "Nash-MTL": "nash_mtl",
    "per-sample gradients": "per_example",
    "clip each example": "per_example",
    "differential privacy noise": "per_example",
    "gradient noise": "faq",
    "sign SGD": "sign",
    "AdamW and Muon one norm": "how/clip",
    "Grokfast": "grokfast",
    "gradient checkpointing hooks": "faq",
    "torch.compile and hooks": "how/compile",
    "DistributedDataParallel hooks": "distributed",
    "FSDP2 clip": "how/fsdp2",
    "Hugging Face Trainer gradient clipping per parameter": "trainers",
    "TRL DPO gradient": "how/trl",
    "Lightning callback gradients": "trainers",
    "own Hydra app": "how/hydra_app",
    "own script unchanged": "how/script",
    "W&B too many charts": "studies",
    "resume a sweep": "sweeps",
    "optuna": "sweeps",
    "choose the learning rate for both arms": "studies",
    "LaTeX table": "paper_figures",
    "unlearning retain gradient": "how/unlearning",
    "add my own transform": "own_code",
    "remove all hooks": "faq",
}


@pytest.mark.slow
@needs_browser
def test_a_search_finds_the_page_that_answers(site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    ranks = {}
    with browser(1400, 900) as driver:
        for words, wanted in SEARCHES.items():
            driver.get(f"{(site / 'search.html').as_uri()}?q={quote(words)}")
            WebDriverWait(driver, 20).until(lambda driver: driver.execute_script(FINISHED))
            found = [urlsplit(link).path for link in driver.execute_script(FOUND)]
            ranks[words] = next((i for i, x in enumerate(found, 1) if wanted in x), None)
    assert {words: rank for words, rank in ranks.items() if not rank or rank > 3} == {}
