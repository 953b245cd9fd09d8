"""The commands of docs/how/script.md print what the page shows."""

import re
import shlex
from pathlib import Path

import pytest

from gradsurg.script.words import KNOWN
from tests.script.running import python
from tests.test_readme import ROOT, blocks

PAGE = "docs/how/script.md"


@pytest.mark.full
def test_the_page_shows_what_its_commands_print(tmp_path: Path) -> None:
    (script,) = blocks("python", PAGE)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    seeds, dry = (shlex.split(text)[2:] for text in blocks("console", PAGE))
    tree, shown = blocks("text", PAGE)
    assert python(tmp_path, *dry).out == tree
    ended = python(tmp_path, *seeds)
    assert ended.code == 0, ended.err
    printed = {*map(str.rstrip, ended.out.splitlines())}
    assert [line for line in shown.splitlines() if line.rstrip() not in printed] == []
    assert len(shown.splitlines()) > 10


def test_each_word_of_the_table_of_the_page_is_known() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    words = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    keys = {word.partition("=")[0] for cell in words for word in re.findall(r"[\w.]+=", cell)}
    others = {"node", "lr", "transform.clip.value"}  # torchrun's and the script's
    assert keys <= {*KNOWN, *others}
    assert {"seeds", "model", "tune", "jobs"} <= keys
