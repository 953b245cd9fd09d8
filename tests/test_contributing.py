"""The files and names in CONTRIBUTING.md exist, and the task that its table points to works."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts import new
from tests.conftest import Here

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")


PAGE = (ROOT / "docs/own_code.md").read_text(encoding="utf-8")


@pytest.fixture
def task(folder: Path) -> Iterator[None]:
    """The Python file of the page, imported like a module of a user."""
    (code,) = re.findall(r"`columns\.py`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "columns.py").write_text(code, encoding="utf-8")
    yield
    sys.modules.pop("columns", None)


@pytest.mark.parametrize(("page", "least"), [("CONTRIBUTING.md", 2), ("ARCHITECTURE.md", 20)])
def test_the_files_that_a_guide_names_exist_and_have_the_names_in_them(
    page: str, least: int
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`([\w.]+/(?:\w+/)*(?:\w+\.\w+)?)`", text):
        assert file(path).exists() or "soft_clip" in path, path
    found = re.findall(r"((?:`\w+`(?:, | and )?)+)\s+in\s+`([\w/]+\.py)`", text)
    assert len(found) >= least
    for names, path in found:
        for name in re.findall(r"\w+(?=`)", names):
            assert re.search(rf"\b{name}\b", file(path).read_text(encoding="utf-8")), name


def file(path: str) -> Path:
    """A path on a page, from the repository or from `gradsurg/`."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "gradsurg" / path


@pytest.mark.parametrize("kind", new.KINDS.values(), ids=list(new.KINDS))
def test_the_plug_ins_that_the_guide_proposes_to_copy_are_there(kind: new.Kind) -> None:
    section = TEXT.partition(f"## Add a{'n' * (kind is new.AGGREGATOR)} ")[2].partition("\n## ")[0]
    proposed = set(re.findall(r"`--like (\w+)`", section))
    assert len(proposed) > 3
    for name in proposed:
        assert all((ROOT / path).exists() for path in kind.files(name))


def test_the_guide_fits_a_window() -> None:
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("|")]
    assert max(map(len, lines)) <= 110
    assert len(TEXT.splitlines()) <= 150


def numbers(seed: int) -> str:
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(f"{a},{b},{c},{a - b}\n" for a, b, c in rows)


def test_the_task_of_the_page_is_trained_and_an_edited_file_is_another_run(
    here: Here, folder: Path, task: None
) -> None:
    (words,) = re.findall(r"^python -m gradsurg.run (.*columns.*)$", PAGE, re.MULTILINE)
    command = [*shlex.split(words), *SHORT]
    missing = here(*command)
    assert missing.code == 2
    assert "columns.Columns.load raised FileNotFoundError: numbers.csv not found" in missing.err
    file = folder / "numbers.csv"
    file.write_text(numbers(0), encoding="utf-8")
    ended = here(*command)
    assert ended.code == 0, ended.err
    (summary,) = folder.glob("runs/*/none-seed0-*/summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["test/r2"] > 0.5
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    assert "2 of them had been finished before" in here(*command).out
    file.write_text(numbers(1), encoding="utf-8")
    assert "finished before" not in here(*command).out
    assert len(list(folder.glob("runs/*/clip-seed0-*"))) == 2
