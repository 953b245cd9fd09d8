"""The built documentation: each picture and each page that it links to is there."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

DOCS = Path(__file__).parents[1] / "docs"


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
    """Return the local targets that are not in the site, as `page: target`."""
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


@pytest.mark.slow
def test_the_built_site_has_each_picture_and_each_page_that_it_links_to(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    site = tmp_path.resolve() / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(DOCS), str(site)]
    subprocess.run(command, check=True, timeout=600)
    pages = {
        page: Links(page.read_text(encoding="utf-8"))
        for page in site.rglob("*.html")
        if "_static" not in page.parts
    }
    assert dead(site, pages) == []
    assert pages[site / "gallery.html"].pictures >= len([*DOCS.glob("gallery/*.png")]) > 0
