"""The schema of the config, and dotted paths, are checked without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg.experiment.own_code import check_targets, import_path
from gradsurg.experiment.settings import check_seeds, check_settings_of
from tests.builds import config

FILES = {
    "plain.py": "LIMIT = 1\ndef halve(grad):\n    return grad / 2\nclass _Hidden: pass\n",
    "starred.py": "from plain import *\n",
    "lazy.py": "def __getattr__(name):\n    return abs\n",
    "inner/__init__.py": "",
    "inner/part.py": "if True:\n    from plain import halve as double\n",
}
NO_TORCH = """
import sys
sys.modules["torch"] = None
from gradsurg.experiment.own_code import check_targets
from gradsurg.experiment.settings import check_settings_of
print(*(line for line in check_settings_of({"control": "placeboo"}) if "placeboo" in line))
print(check_targets({"transform": {"hlave": {"_target_": "plain.hlave"}}})[0])
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    ["plain.hlave", "plian.halve", "inner.prt.double", "inner.part.doubl", "inner.none", "halve"],
)
def test_a_wrong_dotted_path_is_told_without_its_import_in_the_words_of_the_import(
    modules: Path, path: str
) -> None:
    (line,) = check_targets({"transform": {"mine": {"_target_": path}}})
    assert not {"plain", "inner"} & set(sys.modules)
    with pytest.raises(ImportError) as error:
        import_path(path)
    assert line == f"transform.mine: {error.value}"
    for name in ("plain", "inner", "inner.part"):
        sys.modules.pop(name, None)


INSIDE = (
    "plain.halve",
    "plain.LIMIT",
    "inner.part",
    "inner.part.double",
    "starred.any",
    "lazy.any",
)


@pytest.mark.parametrize("path", [*INSIDE, "os.path.join", "math.nothing", "torch.sgn"])
def test_a_dotted_path_that_may_exist_is_left_to_its_import(modules: Path, path: str) -> None:
    assert check_targets({"model": {"_target_": path}}) == []


def test_the_checks_need_no_torch(modules: Path) -> None:
    command = [sys.executable, "-c", NO_TORCH]
    done = subprocess.run(command, cwd=modules, capture_output=True, text=True, check=True)
    control, path = done.stdout.splitlines()
    assert control.startswith("control: must be one of 'none', 'plain', 'norm_matched', ")
    assert control.endswith("found 'placeboo'")
    assert path == "transform.hlave: did you mean 'halve'? There is no 'hlave' in plain."


def test_all_faults_of_the_schema_are_told_at_once() -> None:
    wrong = {**config("lr=-1", "steps=many", "optimizer.lr=nan"), "stpes": 3, "site": None}
    assert [line.partition(":")[0] for line in check_settings_of(wrong)] == [
        "stpes",
        "site",
        "steps",
        "lr",
        "optimizer.lr",
    ]
    assert check_settings_of(config()) == []


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["seed=1", "seeds=4"], 1),
        (["-m", "seed=1,2", "+seeds=4"], 1),
        (["seed=1", "seeds=1"], 0),
        (["seed=null", "seeds=4"], 0),
        (["seeds=4"], 0),
    ],
)
def test_a_seed_and_a_number_of_seeds_are_not_given_together(words: list[str], count: int) -> None:
    assert len(check_seeds(words)) == count
