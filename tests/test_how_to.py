"""The pages in docs/how/ run as they stand and print the text that they show."""

import re

import pytest

from tests.test_readme import ROOT

FOLDER = ROOT / "docs/how"
OTHERS = ("attnlrp", "trl", "fsdp2", "huggingface")  # see tests/test_how_to_models.py
OTHERS += ("hydra_app", "script")  # see tests/test_how_to_hydra.py, tests/script/test_page.py
PAGES = sorted({path.stem for path in FOLDER.glob("*.md")} - {*OTHERS, "index"})
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$\n*", re.DOTALL | re.MULTILINE)


def blocks(stem: str) -> list[tuple[str, str | None]]:
    """The python blocks of a page, each with the text block that directly follows it, or None."""
    text = (FOLDER / f"{stem}.md").read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    after = {one.start(): one for one in found if one[1] == "text"}
    return [
        (one[2], after[one.end()][2] if one.end() in after else None)
        for one in found
        if one[1] == "python"
    ]


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@pytest.mark.parametrize("stem", PAGES)
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_the_blocks_of_a_page_print_what_it_shows(
    stem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    pairs = blocks(stem)
    assert pairs
    for number, (code, shown) in enumerate(pairs):
        exec(compile(code, f"{stem}.md, block {number}", "exec"), names)
        printed = stripped(capsys.readouterr().out)
        assert printed == stripped(shown or ""), f"block {number} of {stem}.md"
