"""A file in the user's folder that several runs wrote is named."""

import os
from pathlib import Path

import pytest

from gradsurg.script.written import WrittenFiles


def test_files_that_two_runs_wrote_are_named_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "wandb", ".git", "checkpoints", "outputs/.hydra"):
        (tmp_path / folder).mkdir(parents=True)

    def write(name: str, time: int) -> None:
        (tmp_path / name).touch()
        os.utime(name, (time, time))

    write("data.csv", 1)
    write("old.pt", 1)
    files = WrittenFiles(tmp_path / "runs")
    files.look()
    for time, run in ((2, "clip-seed0"), (3, "none-seed0")):
        for name in ("checkpoints/last.pt", "old.pt", "runs/a.json", "wandb/b", ".git/c"):
            write(name, time)
        write(f"model-{run}.pt", time)
        files.look(run)
    text = files.warning()
    assert text.startswith("warning: checkpoints/last.pt, old.pt in this folder: written by 2 runs")
    assert text.endswith("--save {out}/model.pt")
    for run in ("a", "b"):
        write("outputs/.hydra/config.yaml", ord(run))
        files.look(run)
    assert files.warning().endswith("hydra.run.dir={out}/hydra")


def test_nothing_is_said_of_files_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = WrittenFiles(tmp_path / "runs")
    files.look()
    (tmp_path / "only.pt").touch()
    files.look("a")
    files.look("b")
    assert files.warning() == ""
