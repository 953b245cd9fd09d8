"""The pages in docs/how/ run as they stand and print the text that they show."""

import re
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.page_setups import CHECKS, SETUPS, plain, train
from tests.test_readme import ROOT

FOLDER = ROOT / "docs/how"
OTHERS = ("attnlrp", "trl", "fsdp2", "huggingface")  # see tests/test_how_to_models.py
OTHERS += ("hydra_app", "script")  # see tests/test_how_to_hydra.py, tests/script/test_page.py
PAGES = sorted({path.stem for path in FOLDER.glob("*.md")} - {*OTHERS, "index"})
LOOP = re.compile(r"^( +)\.\.\. +# your training loop, unchanged$", re.MULTILINE)
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
    text = text.rstrip().replace("\n    ", " ")  # a page continues a long line below it
    return [line.rstrip() for line in text.splitlines()]


def outcomes(stem: str) -> Iterator[str | None]:
    """Run the blocks of a page in one namespace, and yield after each the text that it shows."""
    names = {"train": train} | SETUPS.get(stem, plain)()
    pairs = blocks(stem)
    assert pairs
    for number, (code, shown) in enumerate(pairs):
        code = LOOP.sub(r"\1train(model, optimizer, loader, loss_fn)", code)
        exec(compile(code, f"{stem}.md, block {number}", "exec"), names)
        if check := CHECKS.get((stem, number)):
            check(names)
        yield shown


@pytest.mark.parametrize("stem", PAGES)
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_the_blocks_of_a_page_print_what_it_shows(
    stem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor would call a C++ compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for shown in outcomes(stem):
        printed = capsys.readouterr().out
        assert shown is None or stripped(printed) == stripped(shown)


def test_each_setup_and_each_check_is_of_a_block_that_is_there() -> None:
    counts = {stem: len(blocks(stem)) for stem in {*PAGES, *OTHERS}}
    assert {*SETUPS} <= {*counts}
    assert [key for key in CHECKS if key[1] >= counts[key[0]]] == []
