"""Folders of papers: their classes have configs, can be pickled, and their source can be hashed."""

import pickle
import subprocess
import sys
from importlib import import_module
from inspect import getmembers, getsource, isclass
from pathlib import Path

import pytest
from torch import nn

from gradsurg.experiment.compose import files_of
from gradsurg.tasks.base import Task
from tests import papers
from tests.builds import faults

FOLDERS = sorted(path.parent for path in papers.ROOT.glob("experiments/*/expected.yaml"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize(("group", "base"), [("task", Task), ("model", nn.Module)])
def test_every_class_of_a_paper_has_a_config(folder: Path, group: str, base: type) -> None:
    if not (folder / f"{group}.py").is_file():
        return
    module = import_module(f"gradsurg.experiments.{folder.name}.{group}")
    defined = {
        cls
        for _, cls in getmembers(module, isclass)
        if issubclass(cls, base) and cls.__module__ == module.__name__
    }
    stems = [path.stem for path in (folder / "conf" / group).glob("*.yaml")]
    assert {papers.find(group, stem) for stem in stems} == defined != set()


def test_an_option_has_one_file_whether_of_gradsurg_or_of_a_paper() -> None:
    files = [
        path.relative_to(folder)
        for folder in (papers.ROOT / "conf", *papers.ROOT.glob("experiments/*/conf"))
        for path in folder.glob("*/*.yaml")
    ]
    assert len(files) == len({*files}) > 100


def test_options_of_papers_are_found_where_they_are_asked_for_alone() -> None:
    conf = papers.ROOT / "experiments/chen2021/conf"
    assert {"chen2021_half", "simple_transforms"} <= {*files_of("experiment", [conf])}
    assert "chen2021_half" not in files_of("experiment")
    (fault,) = faults("task=two_views model=siamese transform=zero")
    assert fault.startswith("task: there is no 'two_views'. There are: ")
    words = "task=two_views model=siamese transform=zero site=inputs site.pattern=target"
    assert faults(words, conf) == []


@pytest.mark.slow
def test_a_task_of_a_paper_is_unpickled_in_a_new_process(tmp_path: Path) -> None:
    task = papers.find("task", "two_views")(size=32)
    (tmp_path / "task.pkl").write_bytes(pickle.dumps(task))
    code = "import pickle; print(pickle.load(open('task.pkl', 'rb')).size)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("32\n", "")


def test_the_source_of_a_task_of_a_paper_can_be_hashed() -> None:
    kind = papers.find("task", "wilson")
    assert kind.__module__ == "gradsurg.experiments.karimireddy2019.task"
    assert getsource(kind) in (papers.ROOT / "experiments/karimireddy2019/task.py").read_text(
        encoding="utf-8"
    )
