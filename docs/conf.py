"""Settings of the documentation: python -m sphinx -W docs docs/_build

The READMEs of the repository are pages too. They are copied to docs/pages, with their links
pointing at pages; a link to another file keeps its text only.
"""

import os
import re
from pathlib import Path

from gradsurg import __version__

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"
READMES = {
    **{ROOT / f"gradsurg/{name}/README.md": name for name in ("sites", "triggers", "transforms")},
    ROOT / "gradsurg/aggregators/README.md": "aggregators",
    ROOT / "gradsurg/multitask/README.md": "several_losses",
    ROOT / "experiments/README.md": "claims",
    ROOT / "ARCHITECTURE.md": "architecture",
    ROOT / "CONTRIBUTING.md": "contributing",
    ROOT / "CHANGELOG.md": "changelog",
    ROOT / "README.md": "start",
    **{path: path.parent.name for path in sorted(ROOT.glob("experiments/*/README.md"))},
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")

project, author, release = "gradsurg", "The gradsurg authors", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gradsurg {release}"
html_show_sphinx = False
myst_heading_anchors = 3
autodoc_member_order = "bysource"


def page(path: Path) -> str:
    """Return the text of a README with its links pointing at pages."""

    def link(match: re.Match[str]) -> str:
        is_image, text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        file = (path.parent / target).resolve()
        file = file / "README.md" if file.is_dir() else file
        if file in READMES:
            return f"[{text}]({READMES[file]}.md{anchor or ''})"
        if is_image or file.is_relative_to(ROOT / "docs"):
            return f"{is_image}[{text}]({os.path.relpath(file, PAGES)}{anchor or ''})"
        return text

    return LINK.sub(link, path.read_text(encoding="utf-8"))


PAGES.mkdir(exist_ok=True)
for source, name in READMES.items():
    (PAGES / f"{name}.md").write_text(page(source), encoding="utf-8")


def setup(app: object) -> None:
    """Let |g| in a docstring be a norm: in reStructuredText bars are markup."""

    def escape(
        _app: object, _what: str, _name: str, _thing: object, _: object, lines: list[str]
    ) -> None:
        lines[:] = [line.replace("|", r"\|") for line in lines]

    app.connect("autodoc-process-docstring", escape)  # type: ignore[attr-defined]
