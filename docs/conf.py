"""Settings of the documentation: python -m sphinx -W docs docs/_build

The READMEs of the repository are pages too, and so are the notebooks, with the outputs that are
stored in them. They are copied to docs/pages, with their links pointing at pages; a link to another
file keeps its text only.
"""

import base64
import json
import os
import re
import sys
from pathlib import Path
from shutil import copytree

from sphinx.application import Sphinx

from gradsurg import __version__

sys.path.insert(0, str(Path(__file__).parent))
import plugin_pages

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
PICTURE = re.compile(
    r'<picture>.*?srcset="([^"]+)">.*?src="([^"]+)" alt="([^"]+)">\s*</picture>', re.DOTALL
)
BY_THEME = r"![\3](\2){.only-light}\n![\3](\1){.only-dark}"  # furo's switch, not the system's
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")

project, author, release = "gradsurg", "The gradsurg authors", __version__
project_copyright = f"{author}. Version {release}, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["sphinx_copybutton", "sphinxext.opengraph"]  # the latter writes meta descriptions
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gradsurg {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(ROOT / "docs" / "static" / "scorer.js")
html_show_sphinx = False
viewcode_follow_imported_members = True
copybutton_prompt_text = r">>> |\.\.\. "  # an example is copied without its prompts and output
copybutton_prompt_is_regexp = True
highlight_language = "text"  # of blocks that name none: commands and printed text
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]
ogp_site_url = ""
ogp_social_cards = {"enable": False}
autodoc_member_order = "bysource"
default_role = "literal"  # `x` in a docstring is code


def linked(text: str, folder: Path, page_folder: Path) -> str:
    """Return the text of a file in `folder` with its links pointing at pages."""

    def link(match: re.Match[str]) -> str:
        is_image, label, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        file = (folder / target).resolve()
        file = file / "README.md" if file.is_dir() else file
        if file in READMES:
            file = PAGES / f"{READMES[file]}.md"
        elif not is_image and not file.is_relative_to(ROOT / "docs"):
            return label
        return f"{is_image}[{label}]({os.path.relpath(file, page_folder)}{anchor or ''})"

    return LINK.sub(link, PICTURE.sub(BY_THEME, text))


def rendered(notebook: Path) -> str:
    """Return the cells of a notebook as Markdown; write its pictures to PAGES."""
    parts = []
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(text, notebook.parent, PAGES))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{number}.png"
                (PAGES / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![output of the cell above]({name})")
            elif printed := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(parts)


def tour(folder: Path) -> str:
    """Return each example of hooks in a folder, with its output."""
    parts = []
    for script in sorted(folder.glob("*.py")):
        code, printed = (script.with_suffix(end).read_text("utf-8") for end in (".py", ".txt"))
        title = script.stem.replace("_", " ").capitalize()
        parts.append(f"\n## {title}\n\n```python\n{code}```\n\n```text\n{printed}```\n")
    return "".join(parts)


PAGES.mkdir(exist_ok=True)
for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
    (PAGES / f"{notebook.stem}.md").write_text(rendered(notebook), encoding="utf-8")
for source, name in READMES.items():
    text = linked(source.read_text(encoding="utf-8"), source.parent, PAGES)
    text += tour(source.parent) if name == "hooks_tour" else ""
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
plugin_pages.write(PAGES / "api")


def setup(app: Sphinx) -> None:
    """Rewrite the links of the pages in docs/, and let |g| in a docstring be a norm."""

    def relink(_app: Sphinx, name: str, source: list[str]) -> None:
        if not name.startswith("pages/"):
            folder = (ROOT / "docs" / name).parent
            source[0] = linked(source[0], folder, folder)

    def copy_pictures(app: Sphinx, error: Exception | None) -> None:
        # Those of <img> tags in tables, which Markdown cannot size and Sphinx does not copy.
        if error is None and app.builder.format == "html":
            target = Path(app.outdir) / "gallery"
            copytree(ROOT / "docs" / "gallery", target, dirs_exist_ok=True)

    def escape(_app: Sphinx, *_about: object) -> None:
        lines = _about[-1]
        assert isinstance(lines, list)
        lines[:] = [line.replace("|", r"\|") for line in plugin_pages.restructured(lines)]

    def shorten(_app: Sphinx, *about: object) -> tuple[object, object]:
        signature, result = about[-2:]
        return str(signature or "").replace("<factory>", "...") or None, result

    app.connect("source-read", relink)
    app.connect("build-finished", copy_pictures)
    app.connect("autodoc-process-docstring", escape)
    app.connect("autodoc-process-signature", shorten)
