"""The pages of the API have every name of gradsurg and every option of its plug-ins."""

from types import ModuleType

import pytest

import gradsurg as gs
from docs import plugin_pages
from gradsurg.experiment import catalogue

PAGES = plugin_pages.pages()
KINDS = [(kind, stem) for kind in plugin_pages.KINDS for stem in plugin_pages.names(kind)]
ENTRIES = [one for kind in plugin_pages.KINDS for one in catalogue.list(plugin_pages.GROUPS[kind])]


def test_every_class_and_function_of_gradsurg_has_an_entry() -> None:
    text = "\n".join(PAGES.values())
    for name in dir(gs):
        if name != "__version__" and not isinstance(getattr(gs, name), ModuleType):
            assert f"py:class}} gs.{name}(" in text or f":: gradsurg.{name}\n" in text, name


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.group}-{entry.name}")
def test_every_option_is_on_the_page_of_its_class(entry: catalogue.Entry) -> None:
    page = PAGES[entry.preset_of or entry.name]
    heading = f"### {entry.name}\n" if entry.preset_of else f".{entry.target.rpartition('.')[2]}("
    assert heading in page
    assert all(text in page for text in (entry.command, entry.paper, entry.summary))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.group}-{entry.name}")
def test_the_code_of_a_command_makes_a_surgery(entry: catalogue.Entry) -> None:
    if entry.name in ("gpm", "ogd"):
        pytest.skip("reads a file that a user has written before")
    surgery = eval(plugin_pages.surgery_of(entry.command), {"gs": gs})
    assert isinstance(surgery, gs.Surgery)


def test_titles_differ() -> None:
    titles = [text.partition("# ")[2].partition("\n")[0] for text in PAGES.values()]
    assert len({*titles}) == len(titles)


def test_signatures_have_names_and_defaults_alone() -> None:
    assert "gs.Clip(value=0.01)\n" in PAGES["clip"]
    assert "gs.PCGrad(*, order='random_per_task', reduction='sum'," in PAGES["pcgrad"]


def test_the_fields_have_their_types_bounds_defaults_and_meanings() -> None:
    _, rule, z, decay, *_, max_norm, window, _ = plugin_pages.field_rows(
        gs.AdaptiveClip, plugin_pages.entries_of("transforms", "adaptive_clip")[0]
    )
    assert rule[3:] == ["`'zscore'`", "See the table above."]
    assert z[:4] == ["`z`", "float", "> 0", "`2.5`"]
    assert decay[1:4] == ["float", ">= 0, < 1", "`0.97`"]
    assert max_norm[1:4] == ["float or None", "> 0", "`1.0`"]
    assert window[1:4] == ["int", ">= 1", "`1000`"]


def test_an_example_is_a_block_of_code_and_explains_no_field() -> None:
    text = plugin_pages.docstring(gs.ClipGlobalNorm)
    assert text.count("```") == 2
    assert "\n\n```pycon\n>>> layer = nn.Linear(2, 1)\n>>> optimizer" in text
    assert text.endswith("tensor([0.3333]))\n```")
    assert plugin_pages.meaning(gs.Centralize, "weight") == ""
