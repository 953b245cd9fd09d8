"""Sweeps: what is planned, what is done again, and what is told when jobs fail."""

import json
from pathlib import Path

import pytest

from gradsurg.sinks.base import Guarded, StudyInfo
from gradsurg.store import RunDirectory
from tests.conftest import Here

SHORT = ("steps=20", "seeds=1", "sink=none")
TWO = ("-m", "transform=their_module.total,clip", *SHORT)


def states(folder: Path, study: str = "default") -> dict[str, str]:
    paths = sorted((folder / "runs" / study).glob("*-seed*"))
    return {path.name.rpartition("-")[0]: RunDirectory(path).state for path in paths}


def table(out: str) -> list[str]:
    """The lines of the table of jobs."""
    lines = out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("job "))
    return [" ".join(line.split()) for line in lines[head + 2 : lines.index("", head)]]


def test_a_sweep_ends_with_a_table_of_its_jobs_and_code_1_if_one_failed(
    here: Here, folder: Path
) -> None:
    ended = here(*TWO, "seed=0")
    assert ended.code == 1
    assert states(folder) == {
        "none-seed0": "finished",
        "clip-seed0": "finished",
        "total-seed0": "failed",
    }
    failed, finished = table(ended.out)
    (log,) = folder.glob("runs/default/total-*/error.log")
    assert failed.startswith("transform=their_module.total 1 of 2 runs failed TypeError: ")
    assert failed.endswith(f"({log.relative_to(folder)})")
    assert finished == "transform=clip finished"


def test_every_run_is_written_down_before_the_first_is_trained(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsurg.run.execute", interrupted)
    ended = here("-m", "transform=clip,sign", "seeds=2", "steps=20", "sink=none")
    assert ended.code == 130
    assert set(states(folder).values()) == {"planned"}
    facts = {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("run.json")}
    assert len(facts) == 6
    for name, told in facts.items():
        assert name.startswith(f"{told['label']}-seed{told['seed']}-")
        if told["arm"] == "treated":
            assert facts[told["control"]]["seed"] == told["seed"]
            assert facts[told["control"]]["arm"] == "control"


def test_a_sweep_given_again_skips_retries_and_says_so(here: Here, folder: Path) -> None:
    assert here(*TWO, "seed=0").code == 1
    again = here(*TWO, "seed=0")
    assert again.code == 1
    assert "2 jobs, 3 runs: " in again.err
    for told in ("2 finished before, skipped", "1 failed before, tried again"):
        assert told in again.err
    assert "clip, seed 0: finished before, skipped" in again.err.splitlines()
    assert "total, seed 0: TypeError: " in again.err


def test_failed_runs_can_be_kept_failed(here: Here, folder: Path) -> None:
    here(*TWO, "seed=0")
    (log,) = folder.glob("runs/default/total-*/error.log")
    before = log.read_text(), log.stat().st_mtime_ns
    again = here(*TWO, "seed=0", "retry_failed=false")
    assert again.code == 1
    assert "total, seed 0: had failed and is kept so; TypeError: " in again.err
    assert (log.read_text(), log.stat().st_mtime_ns) == before
    assert "1 of 2 runs failed TypeError" in table(again.out)[0]


def test_force_repeats_each_run_of_a_sweep_once(here: Here, folder: Path) -> None:
    words = ("-m", "transform=their_module.halve,clip", "seed=0", *SHORT)
    here(*words)
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    forced = here(*words, "force=true")
    assert forced.code == 0
    assert "finished before" not in forced.err
    assert len(old) == 3
    assert all(path.stat().st_mtime_ns > time for path, time in old.items())


def test_a_run_that_diverged_is_told_and_does_not_stop_the_others(here: Here, folder: Path) -> None:
    ended = here("-m", "transform=scale", "transform.scale.factor=1e38,2", "seed=0", *SHORT)
    assert ended.code == 1
    first, second = table(ended.out)
    assert first.startswith("transform.scale.factor=1e+38 1 of 2 runs diverged runs/default/scale")
    assert second == "transform.scale.factor=2 finished"


def test_a_sweep_ends_with_the_report_of_its_study(here: Here, folder: Path) -> None:
    words = ("-m", "transform=clip,sign", "steps=20", "seeds=2", "sink=none", "study=first")
    ended = here(*words)
    assert ended.code == 0
    assert ended.out.count("Gradients at each site") == 0  # no job has a block of its own
    assert "study first:\n" in ended.out
    assert "6 runs: 6 finished" in ended.out
    page = folder / "runs" / "first" / "report" / "index.html"
    assert ended.out.endswith(f"report: {page.relative_to(folder)}\n")
    assert page.is_file()
    assert {path.name for path in (folder / "runs").iterdir()} == {"first"}


def test_sinks_are_told_of_the_study_that_a_sweep_belongs_to(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[StudyInfo] = []
    monkeypatch.setattr(Guarded, "study", lambda self, study: told.append(study))
    here("-m", "transform=clip,sign", "steps=20", "seeds=2", "sink=console", "study=first")
    (study,) = told
    assert study.study == "first"
    accuracy = [row for row in study.rows if row["metric"] == "test/accuracy"]
    assert sorted(str(row["arm"]) for row in accuracy) == ["clip", "sign"]
    assert {row["seeds"] for row in accuracy} == {2}
    assert all(path.is_file() for _, path in study.figures)
    assert "outcome" in [title for title, _ in study.figures]


def test_nothing_is_trained_or_written_if_one_job_of_a_sweep_is_wrong(
    here: Here, folder: Path
) -> None:
    ended = here("-m", "transform=clip", "transform.clip.value=0.1,-1", "lr=0.1,-2", *SHORT)
    assert ended.code == 2
    lines = ended.err.splitlines()
    assert len(lines) == 2
    assert {line.partition(":")[0] for line in lines} == {"lr", "transform.clip.value"}
    assert not (folder / "runs").exists()


STUDY = """# @package _global_
study: mine
steps: 20
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      transform: clip,sign
      seed: range(0,2)
"""


def test_a_study_file_is_the_sweep_that_it_states(here: Here, folder: Path) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(STUDY)
    words = (f"--config-dir={folder / 'conf'}", "experiment=mine", "sink=none")
    ended = here(*words)
    assert ended.code == 0
    names = [f"{label}-seed{seed}" for label in ("clip", "none", "sign") for seed in (0, 1)]
    assert sorted(states(folder, "mine")) == names
    assert len(table(ended.out)) == 4
    typed = here(
        "-m", "transform=clip,sign", "seed=range(0,2)", "steps=20", "study=mine", *SHORT[2:]
    )
    assert "6 finished before, skipped" in typed.err


def test_what_is_typed_replaces_what_a_study_file_says(here: Here, folder: Path) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(STUDY)
    words = (f"--config-dir={folder / 'conf'}", "experiment=mine", "sink=none")
    ended = here(*words, "transform=zero", "seed=3", "steps=5")
    assert ended.code == 0
    assert sorted(states(folder, "mine")) == ["none-seed3", "zero-seed3"]


def test_a_fault_in_a_study_file_is_told_like_one_that_is_typed(here: Here, folder: Path) -> None:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(STUDY.replace("sign", "sing"))
    ended = here(f"--config-dir={folder / 'conf'}", "experiment=mine", "sink=none")
    assert ended.code == 2
    assert "transform: there is no 'sing'." in ended.err
    assert not (folder / "runs").exists()
