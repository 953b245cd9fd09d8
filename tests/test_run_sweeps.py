"""Sweeps: planned jobs, repeated jobs, and the output when jobs fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.loggers.base import GuardedLogger, StudyInfo
from gradsurg.report import summary
from tests.conftest import Here

SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")
TWO = ("-m", "transform=their_module.total,clip", *SHORT)


def states(folder: Path, study: str = "digits-mlp") -> dict[str, str]:
    paths = sorted((folder / "runs" / study).glob("*-seed*"))
    return {path.name.rpartition("-")[0]: RunDirectory(path).state for path in paths}


def table(out: str) -> list[str]:
    """The lines of the table of jobs."""
    lines = out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("job "))
    return [" ".join(line.split()) for line in lines[head + 2 : lines.index("", head)]]


def test_a_sweep_tables_its_jobs_and_when_repeated_trains_failed_ones_alone_or_none(
    here: Here, folder: Path
) -> None:
    ended = here(*TWO, "seed=0")
    assert ended.code == 1
    assert states(folder) == {
        "none-seed0": "finished",
        "clip-seed0": "finished",
        "total-seed0": "failed",
    }
    assert "Traceback" not in ended.err
    assert "1 of 2 runs failed" in ended.err.splitlines()
    failed, finished = table(ended.out)
    (log,) = folder.glob("runs/digits-mlp/total-*/error.log")
    assert failed.startswith("transform=their_module.total 1 of 2 runs failed TypeError: ")
    assert failed.endswith(f"({log.relative_to(folder)})")
    assert finished == "transform=clip finished"

    again = here(*TWO, "seed=0")
    assert again.code == 1
    assert "2 jobs, 3 runs: " in again.err
    for told in ("2 finished before, skipped", "1 failed before, tried again"):
        assert told in again.err
    assert "total, seed 0: TypeError: " in again.err
    jobs = [line for line in again.err.splitlines() if line.startswith(("job ", "clip"))]
    assert [job.partition(":")[0] for job in jobs] == ["job 1"]  # the one that has run anew
    assert len(table(again.out)) == 2

    before = log.read_text(encoding="utf-8"), log.stat().st_mtime_ns
    kept = here(*TWO, "seed=0", "retry_failed=false")
    assert kept.code == 1
    assert "total, seed 0: failed before; not retried (retry_failed=false); TypeError: " in kept.err
    assert (log.read_text(encoding="utf-8"), log.stat().st_mtime_ns) == before
    assert "1 of 2 runs failed TypeError" in table(kept.out)[0]


def test_every_run_is_written_down_before_the_first_is_trained(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsurg.experiment.job.execute", interrupted)
    ended = here("-m", "transform=clip,sign", "seeds=2", "steps=20", "logger=none")
    assert ended.code == 130
    assert set(states(folder).values()) == {"planned"}
    facts = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in folder.rglob("run.json")
    }
    assert len(facts) == 6
    for name, told in facts.items():
        assert name.startswith(f"{told['label']}-seed{told['seed']}-")
        if told["arm"] == "treated":
            assert facts[told["control"]]["seed"] == told["seed"]
            assert facts[told["control"]]["arm"] == "control"


def test_a_finished_sweep_prints_one_line_and_force_repeats_its_runs(
    here: Here, folder: Path
) -> None:
    words = ("-m", "transform=clip,sign", "seed=0", *SHORT)
    first, again = here(*words), here(*words)
    assert again.err == "2 jobs, 3 runs: 3 finished before, skipped\n"
    _, _, study = first.out.partition("\nstudy digits-mlp:")
    assert study
    assert again.out == f"\nstudy digits-mlp:{study}"
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    forced = here(*words, "force=true")
    assert forced.code == 0
    assert "finished before" not in forced.err
    assert len(old) == 3
    assert all(path.stat().st_mtime_ns > time for path, time in old.items())


def test_a_diverged_run_is_reported_and_does_not_stop_the_others(here: Here, folder: Path) -> None:
    ended = here("-m", "transform=scale", "transform.scale.factor=1e38,2", "seed=0", *SHORT)
    assert ended.code == 1
    first, second = table(ended.out)
    assert first.startswith(
        "transform.scale.factor=1e+38 1 of 2 runs diverged runs/digits-mlp/scale"
    )
    assert second == "transform.scale.factor=2 finished"


def test_a_sweep_ends_with_the_report_of_its_study(here: Here, folder: Path) -> None:
    words = ("-m", "transform=clip,sign", "steps=20", "seeds=2", "logger=none", "study=first")
    ended = here(*words)
    assert ended.code == 0
    assert ended.out.count("Gradients at each site") == 0  # no job has a block of its own
    assert "study first:\n" in ended.out
    assert "6 runs: 6 finished" in ended.out
    page = folder / "runs" / "first" / "report" / "index.html"
    assert ended.out.endswith(f"report: {page.relative_to(folder)}\n")
    assert page.is_file()
    assert {path.name for path in (folder / "runs").iterdir()} == {"first"}


FIGURES = {"outcome.png", "curves.svg"}


@pytest.mark.parametrize(
    "word", ["report=auto", pytest.param("report=true", marks=pytest.mark.slow), "report=false"]
)
def test_the_report_of_a_single_job_has_the_files_asked_for(
    here: Here, folder: Path, word: str
) -> None:
    ended = here("transform=clip", "steps=20", "seeds=2", "logger=none", word)
    report = folder / "runs" / "digits-mlp" / "report"
    asked = word.partition("=")[2]
    assert ("report: runs/digits-mlp/report/index.html\n" in ended.out) == (asked != "false")
    assert (report / "index.html").is_file() == (asked != "false")
    drawn = {path.name for path in report.glob("*.*g")}
    assert FIGURES & drawn == (FIGURES if asked == "true" else set())


@pytest.mark.slow
def test_figures_that_a_study_has_are_drawn_anew_by_a_single_job(here: Here, folder: Path) -> None:
    words = ("steps=20", "seeds=2", "logger=none")
    here("-m", "transform=sign", *words)
    (figure,) = folder.glob("runs/digits-mlp/report/outcome.svg")
    assert ">clip</text>" not in figure.read_text(encoding="utf-8")
    here("transform=clip", *words)
    assert ">clip</text>" in figure.read_text(encoding="utf-8")


def test_loggers_get_the_study_of_a_single_job_also_if_no_run_is_new(
    here: Here, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[StudyInfo] = []
    monkeypatch.setattr(GuardedLogger, "study", lambda self, study: told.append(study))
    words = ("transform=clip", "steps=20", "logger=console")
    here(*words, "seeds=2")
    (study,) = told
    assert {row["seeds"] for row in study.rows} == {2}
    assert study.figures == []
    here(*words, "seeds=2")
    assert told[1] == study  # the first command may have been killed before
    here(*words, "seeds=3")
    assert {row["seeds"] for row in told[-1].rows} == {3}


def test_a_report_that_cannot_be_written_is_a_line_and_the_answer_stands(
    here: Here, folder: Path
) -> None:
    (folder / "runs" / "digits-mlp").mkdir(parents=True)
    (folder / "runs" / "digits-mlp" / "report").write_text("in the way", encoding="utf-8")
    ended = here("transform=clip", *SHORT[:-1])
    assert ended.code == 0
    assert ended.out.startswith("Test accuracy of clip minus control at lr ")
    assert ended.err.splitlines()[-1].startswith("the report cannot be written: ")


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


def study_words(folder: Path, text: str = STUDY) -> tuple[str, ...]:
    """Write a study file, and return the words that start it."""
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    return (f"--config-dir={folder / 'conf'}", "experiment=mine", *SHORT[2:])


def test_a_study_file_is_the_sweep_that_it_states(here: Here, folder: Path) -> None:
    ended = here(*study_words(folder))
    assert ended.code == 0
    names = [f"{label}-seed{seed}" for label in ("clip", "none", "sign") for seed in (0, 1)]
    assert sorted(states(folder, "mine")) == names
    assert len(table(ended.out)) == 4
    typed = here(
        "-m", "transform=clip,sign", "seed=range(0,2)", "steps=20", "study=mine", *SHORT[2:]
    )
    assert "6 finished before, skipped" in typed.err


def test_the_command_line_overrides_a_study_file(here: Here, folder: Path) -> None:
    ended = here(*study_words(folder), "transform=zero", "seed=3", "steps=5")
    assert ended.code == 0
    assert sorted(states(folder, "mine")) == ["none-seed3", "zero-seed3"]


def test_an_error_in_a_study_file_is_reported_like_one_on_the_command_line(
    here: Here, folder: Path
) -> None:
    ended = here(*study_words(folder, STUDY.replace("sign", "sing")))
    assert ended.code == 2
    assert "transform: did you mean 'sign'? There is no 'sing'." in ended.err
    assert not (folder / "runs").exists()


def controls(folder: Path, label: str = "clip") -> dict[str, str]:
    """The controls of the only run with that label, by their kind, without the hashes."""
    (path,) = folder.glob(f"runs/digits-mlp/{label}-seed0-*/run.json")
    facts = json.loads(path.read_text(encoding="utf-8"))
    known = facts["controls"]
    assert facts["control"] == known.get("plain", next(iter(known.values()), None))
    assert all((path.parents[1] / name).is_dir() for name in known.values())
    return {kind: name.rpartition("-")[0] for kind, name in known.items()}


BOTH = {"plain": "none-seed0", "norm_matched": "norm_matched-clip-seed0"}


def test_a_later_control_is_added_to_a_finished_run(here: Here, folder: Path) -> None:
    words = ("transform=clip", "seed=0", *SHORT)
    assert here(*words, "control=none").code == 0
    assert controls(folder) == {}
    assert here(*words, "control=norm_matched").code == 0
    assert controls(folder) == {"norm_matched": BOTH["norm_matched"]}
    assert here(*words, "control=plain").code == 0
    assert controls(folder) == BOTH
    (path,) = folder.glob("runs/digits-mlp/clip-*/run.json")
    before = path.read_bytes(), path.stat().st_mtime_ns
    for word in ("control=none", "control=plain"):
        assert here(*words, word).code == 0
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    told = summary(folder / "runs" / "digits-mlp")
    assert "Nothing can be compared" not in told
    assert "total " in told  # direction and size, by both controls
    assert "Direction is clip minus norm-matched" in " ".join(told.split())
    assert here(*words, "control=none", "force=true").code == 0
    assert controls(folder) == BOTH


def test_a_list_of_controls_trains_those_that_are_not_finished(here: Here, folder: Path) -> None:
    words = ("transform=clip", "seed=0", *SHORT)
    assert here(*words).code == 0
    (plain,) = folder.glob("runs/digits-mlp/none-*/summary.json")
    before = plain.stat().st_mtime_ns
    assert here(*words, "control=[norm_matched,plain]").code == 0
    assert controls(folder) == BOTH
    assert set(states(folder).values()) == {"finished"}
    assert plain.stat().st_mtime_ns == before


def test_a_resumed_run_keeps_its_control_and_a_broken_run_json_is_written_anew(
    here: Here, folder: Path
) -> None:
    words = ("transform=their_module.interrupts", "seed=0", "steps=100", *SHORT[2:])
    words = (*words, "log_every=1")
    here(*words)
    (path,) = folder.glob("runs/digits-mlp/interrupts-*")
    assert RunDirectory(path).state == "interrupted"
    here(*words, "control=none")
    assert controls(folder, "interrupts") == {"plain": "none-seed0"}
    (path / "run.json").write_text("{", encoding="utf-8")
    here(*words)
    assert controls(folder, "interrupts") == {"plain": "none-seed0"}


def test_a_finished_run_with_other_measurements_is_reported(here: Here) -> None:
    words = ("transform=clip", "seed=0", *SHORT)
    assert here(*words, "effects_every=10", "eval_every=0").code == 0
    assert "measured" not in here(*words, "effects_every=10", "eval_every=0").err
    assert "measured" not in here(*words, "effects_every=0").err
    told = here(*words, "effects_every=5", "eval_every=50").err.splitlines()
    both = "effects_every=10, eval_every=0"
    anew = "the same command with force=true trains them again"
    assert f"2 finished runs were measured with {both}: {anew}" in told
    assert here(*words, "effects_every=5", "force=true").code == 0
    assert "measured" not in here(*words, "effects_every=5").err


def test_another_text_in_the_file_is_another_run_and_another_control(
    here: Here, folder: Path
) -> None:
    file = folder / "words.txt"
    words = ("transform=clip", "task=char_lm", f"task.path={file}", "model=gpt", "seed=0")
    words = (*words, "task.length=8", "batch_size=2", "steps=2", *SHORT[2:])
    for text, count in (("abcd" * 100, 1), ("abcd" * 100, 1), ("abdc" * 100, 2)):
        file.write_text(text, encoding="utf-8")
        ended = here(*words)
        assert ended.code == 0, ended.err
        for label in ("none", "clip"):
            assert len([*folder.glob(f"runs/char_lm-gpt/{label}-seed0-*")]) == count


def facts(folder: Path, stem: str) -> dict[str, Any]:  # Any: any JSON value
    (path,) = folder.glob(f"runs/digits-mlp/{stem}-*/run.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_runs_that_are_added_to_finished_ones_of_their_arm_say_so(here: Here, folder: Path) -> None:
    words = ("transform=clip", *SHORT[:1], *SHORT[2:])
    here(*words, "seeds=2")
    here(*words, "seeds=3")
    for arm in ("clip", "none"):
        assert [facts(folder, f"{arm}-seed{n}").get("looked") for n in range(3)] == [None, None, 2]
    here(*words, "seeds=3", "force=true")
    assert [facts(folder, f"clip-seed{n}").get("looked") for n in range(3)] == [None, None, 2]
    here("transform=sign", *words[1:], "seeds=1")
    assert "looked" not in facts(folder, "sign-seed0")
    tuned = ("transform=zero", *words[1:], "tune='lr=[0.1,0.2]'", "tune_seeds=3")
    here(*tuned, "seeds=1")
    here(*tuned, "seeds=2")
    assert facts(folder, "zero-seed1")["looked"] == 1  # and no tuning run


def test_a_margin_can_be_given_later_and_is_marked(here: Here, folder: Path) -> None:
    words = ("transform=clip", "seeds=1", *SHORT[:1], *SHORT[2:])
    here(*words)
    assert "margin" not in facts(folder, "clip-seed0")["measured"]
    assert "force=true trains" not in here(*words, "margin=0.5pp").err
    for stem in ("clip-seed0", "none-seed0"):
        assert facts(folder, stem)["measured"]["margin"] == "0.5pp"
        assert facts(folder, stem)["margin_after"]
    here(*words)
    assert facts(folder, "clip-seed0")["measured"]["margin"] == "0.5pp"
    here("transform=sign", *words[1:], "margin=0.01")
    given = facts(folder, "sign-seed0")
    assert given["measured"]["margin"] == "0.01"
    assert "margin_after" not in given
