"""What the README shows is what happens."""

import re
import runpy
import tomllib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsurg as gs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_python_example_runs_and_prints_an_effect_table(capsys, tmp_path) -> None:
    code, _ = blocks("python")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)],
        "loss_fn": nn.functional.cross_entropy,
    }
    script = tmp_path / "example.py"
    script.write_text(code)
    runpy.run_path(str(script), init_globals=names)
    printed = capsys.readouterr().out
    assert "1#0/ReluBackward[0]" in printed
    assert "0.weight" in printed
    assert "0.bias" not in printed


def test_the_example_of_where_and_when_runs_and_shows_its_three_sites(capsys, tmp_path) -> None:
    _, code = blocks("python")
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    head = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))
    model = nn.Sequential(OrderedDict(body=nn.Sequential(*layers), head=head))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example_input": torch.randn(2, 8),
    }
    script = tmp_path / "example.py"
    script.write_text(f"import gradsurg as gs\n{code}\n    model(example_input).sum().backward()")
    with pytest.warns(gs.SurgeryWarning, match="clip_norm: its trigger never fired in 3 gradients"):
        runpy.run_path(str(script), init_globals=names)
    assert "3 sites selected" in capsys.readouterr().out


def test_the_examples_of_choosing_run() -> None:
    text = (ROOT / "gradsurg" / "sites" / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found: dict[str, object] = {}
    lines = [line for line in code.splitlines() if line.startswith(("gs.", "(gs."))]
    exec(
        f"import gradsurg as gs\nmade = [{', '.join(line.split('  #')[0] for line in lines)}]",
        found,
    )
    assert isinstance(found["made"], list)
    assert len(found["made"]) == 7


def test_the_two_commands_stand_on_lines_of_their_own() -> None:
    lines = [line for line in README.splitlines() if line.startswith("pip install -e ")]
    assert lines == [
        "pip install -e . && python -m gradsurg.run transform=clip",
        "pip install -e '.[test]' && python -m pytest",
    ]


def test_the_readme_fits_one_screen_of_prose() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 900


def test_every_folder_in_the_map_is_there() -> None:
    named = re.findall(r"`((?:gradsurg|conf|tests|scripts)/[\w/]*)`", README)
    assert len(named) >= 5
    missing = [name for name in named if name.endswith("/") and not (ROOT / name).is_dir()]
    assert not missing


def test_the_changelog_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
