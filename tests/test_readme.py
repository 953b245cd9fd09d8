"""The README's code runs and prints its output."""

import re
import runpy
import tomllib
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.multitask.conflict import Conflict

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BASES = (ROOT, ROOT / "gradsurg")


def blocks(language: str, file: str = "README.md") -> list[str]:
    """The code blocks of a language in a Markdown file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_python_example_runs_and_prints_an_effect_table(capsys, tmp_path) -> None:
    (code,) = blocks("python")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)],
        "loss_fn": nn.functional.cross_entropy,
    }
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    runpy.run_path(str(script), init_globals=names)
    printed = capsys.readouterr().out
    assert "1#0/ReluBackward[0]" in printed
    assert "0.weight" in printed
    assert "0.bias" not in printed


def test_the_example_of_where_and_when_runs_and_shows_its_three_sites(capsys, tmp_path) -> None:
    _, code = blocks("python", "gradsurg/sites/README.md")
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    head = nn.Sequential(nn.ReLU(), nn.Linear(8, 2))
    model = nn.Sequential(OrderedDict(body=nn.Sequential(*layers), head=head))
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example_input": torch.randn(2, 8),
    }
    script = tmp_path / "example.py"
    script.write_text(
        f"import gradsurg as gs\n{code}\n    model(example_input).sum().backward()",
        encoding="utf-8",
    )
    with pytest.warns(gs.SurgeryWarning, match="clip_norm: its trigger never fired in 3 gradients"):
        runpy.run_path(str(script), init_globals=names)
    assert "3 sites selected" in capsys.readouterr().out


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3) for _ in "ab"])

    def forward(self, inputs: Tensor) -> list[Tensor]:
        shared = self.trunk(inputs).relu()
        return [head(shared) for head in self.heads]


def losses_of(outputs: list[Tensor], targets: Tensor) -> dict[str, Tensor]:
    first, second = (nn.functional.cross_entropy(one, targets) for one in outputs)
    return {"class": first, "height": second}


def test_the_example_of_several_losses_runs_and_prints_how_they_conflict(capsys, tmp_path) -> None:
    (code,) = blocks("python", "gradsurg/multitask/README.md")
    torch.manual_seed(0)
    model = Heads()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)],
        "loss_of_each": losses_of,
    }
    script = tmp_path / "example.py"
    script.write_text(f"import gradsurg as gs\n{code}", encoding="utf-8")
    runpy.run_path(str(script), init_globals=names)
    printed = capsys.readouterr().out
    assert printed.startswith("pcgrad at shared, 3 measured steps: conflict rate ")
    assert re.search(r"^height( +-?[\d.e-]+){5}$", printed, re.MULTILINE)


def test_the_keys_of_shared_are_those_of_the_config_and_each_is_explained() -> None:
    text = (ROOT / "gradsurg" / "multitask" / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `shared\.(\w+)` \|", text, re.MULTILINE)
    assert told == list(
        yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))["shared"]
    )


def test_the_fields_of_a_conflict_are_each_explained() -> None:
    text = (ROOT / "gradsurg" / "multitask" / "README.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+)`", text.partition("conflicts.jsonl")[2]))
    assert {one.name for one in fields(Conflict)} <= told


def test_the_examples_of_choosing_run() -> None:
    code, _ = blocks("python", "gradsurg/sites/README.md")
    found: dict[str, object] = {}
    lines = [line for line in code.splitlines() if line.startswith(("gs.", "(gs."))]
    exec(
        f"import gradsurg as gs\nmade = [{', '.join(line.split('  #')[0] for line in lines)}]",
        found,
    )
    assert isinstance(found["made"], list)
    assert len(found["made"]) == 8


def test_the_two_commands_stand_on_lines_of_their_own() -> None:
    lines = [line for line in README.splitlines() if line.startswith("pip install ")]
    assert lines == [
        "pip install -c constraints.txt -e '.[run]' && python -m gradsurg.run transform=clip "
        "transform.clip.value=0.002",
        "pip install -c constraints.txt -e '.[test]' && python -m pytest -n 2",
    ]


def test_the_readme_fits_one_screen_of_prose() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^(\|| *<).*$", "", prose, flags=re.MULTILINE)  # nor tables and pictures
    assert len(prose.split()) < 400


LINK = r"(?:\]\(|src=\"|srcset=\")(?!http)([^)\"#]+)"
HOW_TO = ("docs/studies.md", "docs/verdicts.md", "docs/sweeps.md", "docs/reproduce.md")


def test_every_file_that_a_page_links_to_is_there() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *HOW_TO):
        folder = (ROOT / page).parent
        links = re.findall(LINK, (ROOT / page).read_text(encoding="utf-8"))
        assert [link for link in links if not (folder / link).exists()] == [], page


def test_every_file_in_the_architecture_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?|\w+\.py)`", text)
    assert len(named) >= 20
    missing = [name for name in named if not any((base / name).exists() for base in BASES)]
    assert missing == []


def test_the_changelog_and_the_citation_have_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == version
