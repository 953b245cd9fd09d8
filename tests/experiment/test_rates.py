"""The default learning rate of a task and an optimizer, and all that replaces it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradsurg.experiment.compose import compose_config, files_of, search_path
from gradsurg.experiment.sweep import jobs_of_study
from tests.conftest import Here

ROOT = Path(__file__).parents[2]
OWN, DIGITS = 0.1, 0.4  # of SGD: in conf/optimizer/sgd.yaml and conf/rate/digits_sgd.yaml
STUDIES = {
    "names_a_rate": "defaults:\n  - override /task: digits\noptimizer: {lr: 0.7}\n",
    "names_none": "defaults:\n  - override /optimizer: adam\n  - override /task: diabetes\n",
}


def content(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


RATES = {stem: content(path)["lr"] for stem, path in files_of("rate").items()}


@pytest.fixture
def folder_of_studies(tmp_path: Path) -> str:
    """The override that adds studies, and the task `mine` with a rate of its own."""
    for group in ("experiment", "task", "rate"):
        (tmp_path / group).mkdir()
    for name, text in STUDIES.items():
        (tmp_path / f"experiment/{name}.yaml").write_text(
            f"# @package _global_\n{text}", encoding="utf-8"
        )
    (tmp_path / "task/mine.yaml").write_text(
        "_target_: gradsurg.tasks.digits.Digits\n", encoding="utf-8"
    )
    (tmp_path / "rate/mine_sgd.yaml").write_text("lr: 0.6\n", encoding="utf-8")
    return search_path(tmp_path)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("", DIGITS),
        ("optimizer=adam", 0.001),
        ("optimizer.lr=0.05", 0.05),
        ("task=mine.Task", OWN),
        ("task=mine.Task optimizer=adam", 0.001),
        ("optimizer=mine.Optimizer", None),
        ("task=mine", 0.6),
        ("experiment=names_a_rate", 0.7),
        ("experiment=names_a_rate optimizer.lr=0.05", 0.05),
        ("experiment=names_none", RATES["diabetes_adam"]),
        ("experiment=names_none task=digits optimizer=sgd", DIGITS),
        ("+surgery=clip", DIGITS),
    ],
)
def test_the_rate_is_that_of_the_task_and_the_optimizer_unless_one_is_named(
    folder_of_studies: str, words: str, rate: float | None
) -> None:
    config = compose_config(folder_of_studies, *words.split())
    assert config["optimizer"].get("lr") == rate
    assert config["lr"] is None
    assert "rate" not in config


def test_a_dotted_optimizer_has_its_own_fields_alone() -> None:
    assert compose_config("optimizer=mine.Optimizer")["optimizer"] == {"_target_": "mine.Optimizer"}


def test_each_job_of_a_sweep_has_its_own_rate() -> None:
    words = ["hydra.mode=MULTIRUN", "task=digits,diabetes,tests.theirs.Lines", "optimizer=sgd,adam"]
    jobs = jobs_of_study(words)
    found = [config["optimizer"]["lr"] for _, config in jobs]
    assert found == [DIGITS, 0.001, RATES["diabetes_sgd"], RATES["diabetes_adam"], OWN, 0.001]


def test_each_file_is_of_a_task_and_an_optimizer_and_differs_from_the_optimizers_own() -> None:
    own = {stem: content(path)["lr"] for stem, path in files_of("optimizer").items()}
    pairs = {f"{task}_{optimizer}": optimizer for task in files_of("task") for optimizer in own}
    assert {stem for stem, rate in RATES.items() if rate != own[pairs[stem]]} == {*RATES}
    for stem, path in files_of("rate").items():
        words = path.read_text(encoding="utf-8").splitlines()[0].split()
        assert words[:4] == ["#", "python", "-m", "gradsurg.run"]
        chosen = dict(word.split("=") for word in words[4:])
        assert f"{chosen['task']}_{chosen['optimizer']}" == stem


def test_the_table_of_the_docs_has_the_rates_of_the_files() -> None:
    text = (ROOT / "docs/rates.md").read_text(encoding="utf-8")
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    defaults = {}
    for optimizer, own, *cells in rows[2:]:
        for task, cell in zip(rows[0][2:], cells, strict=True):
            rate = cell.partition(":")[0] or own
            if rate != own:
                defaults[f"{task.partition(',')[0]}_{optimizer}"] = float(rate)
    assert defaults == RATES


def test_help_and_the_list_do_not_show_the_group(here: Here) -> None:
    assert "digits_sgd" not in here("--help").out
    assert "--list rate" not in here("--list").out
