"""The examples of CONTRIBUTING.md work as described."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from gradsurg.testing import check_transform
from gradsurg.transforms.base import Transform, TransformContext
from tests.conftest import Here
from tests.transforms.cases import Row

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """The two Python files of the guide, imported as modules of a user."""
    halve, _, columns = blocks("python")
    names = ("halve", "columns")
    for name, code in zip(names, (halve, columns), strict=True):
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        sys.modules.pop(name, None)


def test_the_transform_of_the_guide_gives_the_result_of_its_row_and_has_its_properties(
    modules: list[ModuleType],
) -> None:
    row = eval(blocks("python")[1], {"Row": Row})
    transform = modules[0].Halve(**row.fields)
    grad = torch.tensor(row.grad)
    assert torch.equal(
        transform.update(grad, {}, TransformContext())[0], torch.tensor(row.expected)
    )
    for times in (0, 1, 2):
        halve: Transform = modules[0].Halve(times=times)
        check_transform(halve)
        assert ("idempotent" in halve.properties) == (times == 0)
    (text,) = blocks("yaml")
    config = yaml.safe_load(text)
    fields = config[row.name]
    assert (list(config), fields.pop("name")) == ([row.name], row.name)
    assert modules[0].Halve(**fields) == modules[0].Halve()
    assert text.startswith(f"# python -m gradsurg.run transform={row.name}\n")


def numbers(seed: int) -> str:
    rows = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(f"{a},{b},{c},{a - b}\n" for a, b, c in rows)


def test_the_task_of_the_guide_is_trained_and_an_edited_file_is_another_run(
    here: Here, folder: Path, modules: list[ModuleType]
) -> None:
    (words,) = re.findall(r"^python -m gradsurg.run (.*columns.*)$", TEXT, re.MULTILINE)
    command = [*shlex.split(words), *SHORT]
    missing = here(*command)
    assert missing.code == 2
    assert missing.err == "task.path: must be a file, found 'numbers.csv'\n"
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
