"""The runs of a command: counted, written down once, and looked up with few reads."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsurg.experiment import planning
from gradsurg.experiment.build import build
from gradsurg.experiment.compose import compose_config
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.planning import Job, announce, outcome_table, plan_runs
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.runs import Experiment

SHORT = ("steps=20", "seeds=2", "logger=none")


@pytest.fixture
def experiments(folder: Path) -> list[Experiment]:
    """Two jobs with two treated runs each, which share two controls."""
    return [built(f"transform={name}") for name in ("clip", "sign")]


def built(*words: str) -> Experiment:
    return build(compose_config(*SHORT, *words), trial=False)


def jobs_of(experiments: Sequence[Experiment]) -> list[Job]:
    return [Job([f"job={at}"], each.runs, Path("runs")) for at, each in enumerate(experiments)]


def finish(job: Job, state: str = "finished") -> None:
    for path in job.paths:
        RunDirectory(path).write_summary({"state": state})


def test_runs_that_jobs_share_are_announced_once_and_finished_ones_not_at_all(
    experiments: list[Experiment],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "step_seconds", lambda run: 60.0)
    announce(experiments)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(planning, "ANNOUNCED_RUNS", 1)
    announce(experiments)
    assert "2 jobs, 6 runs of 20 steps: at least 2 hours on cpu" in capsys.readouterr().err
    finish(jobs_of(experiments)[0])
    announce(experiments)
    assert "2 jobs, 2 runs of 20 steps: at least 40 minutes on cpu" in capsys.readouterr().err
    monkeypatch.setattr(planning, "MAX_RUNS", 6)
    announce(experiments)
    monkeypatch.setattr(planning, "MAX_RUNS", 5)
    with pytest.raises(ConfigError, match="sweep: 6 runs need yes=true"):
        announce(experiments)


def test_few_runs_are_announced_if_they_take_long(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    announce([built("transform=clip", "steps=1000000000000")])
    assert "4 runs of 1,000,000,000,000 steps: at least " in capsys.readouterr().err


def test_each_run_is_written_down_once_with_the_controls_of_all_jobs(folder: Path) -> None:
    jobs = jobs_of([built("transform=clip", *word) for word in ((), ("control=placebo",))])
    assert plan_runs(jobs, force=False) == {"planned": 6}
    facts = json.loads((jobs[0].paths[1] / "run.json").read_bytes())
    plain, placebo = (job.paths[0].name for job in jobs)
    assert (facts["control"], facts["controls"]) == (plain, {"plain": plain, "placebo": placebo})


def test_with_force_each_run_is_planned_anew(experiments: list[Experiment]) -> None:
    jobs = jobs_of(experiments)
    finish(jobs[0])
    assert plan_runs(jobs, force=True) == {"planned": 6}
    assert plan_runs(jobs, force=False) == {"planned": 6}


def test_finished_runs_are_decided_on_by_one_read_of_each_file(
    experiments: list[Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(experiments)
    plan_runs(jobs, force=False)
    for job in jobs:
        finish(job)
    reads: Counter[Path] = Counter()
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        reads[path] += 1
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    assert plan_runs(jobs, force=False) == {"finished": 6}
    assert {path.name for path in reads} == {"run.json", "summary.json"}
    assert set(reads.values()) == {1}


def test_the_table_has_the_worst_state_of_each_job_and_its_reason(
    experiments: list[Experiment],
) -> None:
    jobs = jobs_of(experiments)
    finish(jobs[0])
    directory = RunDirectory(jobs[1].paths[1])
    directory.write_error("Traceback\n  line\nValueError: no room\n")
    table, all_finished = outcome_table(jobs)
    assert not all_finished
    lines = [line.split(maxsplit=1) for line in table.splitlines()[-2:]]
    assert lines[0] == ["job=0", "finished"]
    assert lines[1][1].startswith("1 of 4 runs failed  ValueError: no room (runs/")
    finish(jobs[1], "diverged")
    assert "diverged" in outcome_table(jobs)[0]
