"""A study is read as it lies there, whatever state its runs are in, and grouped into arms."""

import os
from pathlib import Path

import polars as pl
import pytest

from gradsurg.report.arms import group
from gradsurg.report.export import write_report
from gradsurg.report.load import LoadedRun, NotAStudy, read_runs
from gradsurg.report.study import Study, read_study
from tests.report import studies


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, LoadedRun]:
    found = read_runs(studies.mixed(tmp_path / "first"))
    return {f"{run.label}{run.seed}": run for run in found}


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("clip0", "finished", ""),
        ("zero2", "diverged", "train/loss was nan at step 20 of 40"),
        ("noise0", "failed", "ValueError: <b>no</b> room (logged up to step 0 of 40)"),
        ("noise1", "interrupted", "step 20 of 40"),
        ("noise2", "planned", "not started"),
    ],
)
def test_each_run_has_its_state_and_reason(mixed, name: str, state: str, reason: str) -> None:
    assert (mixed[name].state, mixed[name].reason) == (state, reason)


def test_a_control_that_is_named_but_not_there_is_a_missing_run(tmp_path: Path) -> None:
    runs = read_runs(studies.mixed(tmp_path / "first"))
    (missing,) = [run for run in runs if run.state == "missing"]
    assert missing.name == "none-seed9-00000000"
    assert missing.reason.startswith("noise-seed2-")


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0)
    with place.lock():
        (run,) = read_runs(tmp_path)
        assert run.state == "running"
    assert read_runs(tmp_path)[0].state == "planned"


@pytest.mark.parametrize("there", ["nothing", "empty", "file", "studies", "clone"])
def test_what_is_no_study_is_said_in_one_sentence(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "runs"
    match there:
        case "empty":
            folder.mkdir()
        case "file":
            folder.write_text("", encoding="utf-8")
        case "studies":
            studies.whole(folder / "first", "none", 0, 0.9)
        case "clone":
            (folder / "conf").mkdir(parents=True)
            (folder / "conf" / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    with pytest.raises(NotAStudy) as caught:
        read_study(folder)
    assert str(folder) in str(caught.value)
    assert ("studies in it: first" in str(caught.value)) == (there == "studies")


def test_only_the_runs_asked_for_and_their_controls_are_read(tmp_path: Path) -> None:
    studies.paired(tmp_path, "clip", [0.1, 0.2])
    name = next(path.name for path in tmp_path.glob("clip-seed1-*"))
    assert sorted(run.seed for run in read_study(tmp_path, [name]).all_runs) == [1, 1]
    with pytest.raises(NotAStudy, match="has no run other"):
        read_study(tmp_path, ["other"])


DEEP = "[" * 100_000
DAMAGES = {
    "summary.json": [
        *("", "null", "{half", DEEP, '{"state": {}}', '{"test/loss": {}}', '{"notes": null}'),
        *('{"test/loss": 1e308}', '{"test/loss": NaN}', '{"test/loss": 1e999}', '{"steps": 1.5}'),
        f'{{"test/loss": {10**400}}}',
    ],
    "run.json": ["null", DEEP, '{"seed": []}', '{"control": {}}', '{"made_with": null}'],
    "config.yaml": ["a: [", "3", "a: !!x 3", DEEP, "transform: null", "seed: -1"],
    "metrics.jsonl": ["null\n", '{"step": "x"}\n', '{"step": 1, "train/loss": {"a": 1}}\n'],
    "effects.jsonl": ["3\n", '{"step": 1, "site": "a", "transform": "b", "cosine": "x"}\n'],
    "conflicts.jsonl": ['{"step": [1]}\n', '{"step": 5}\n'],
}


def told(study: Study) -> list[str]:
    """The warnings about files that cannot be read, once all are read."""
    assert study.metrics is not study.effects is not study.conflicts
    return [run.reason for run in study.all_runs if run.state == "unreadable"] + study.faults


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in DAMAGES.items() for text in texts]
)
def test_a_broken_file_is_one_line_and_the_others_are_read(
    tmp_path: Path, name: str, content: str
) -> None:
    studies.paired(tmp_path, "clip", [0.1, 0.2])
    (path,) = tmp_path.glob("clip-seed0-*")
    (path / name).write_text(content, encoding="utf-8")
    study = read_study(tmp_path)
    assert [name in line for line in told(study)] == [True]
    assert "\n" not in told(study)[0]
    other = next(run.name for run in study.all_runs if run.label == "clip" and run.seed == 1)
    assert len(study.metrics.filter(pl.col("run") == other)) == 4
    assert len(study.effects.filter(pl.col("run") == other)) == 8


@pytest.mark.parametrize(
    "name", [*DAMAGES, "error.log", "checkpoint.pt", "checkpoint_previous.pt", ".lock"]
)
def test_a_file_that_is_a_link_out_of_the_study_is_one_line_and_not_read(
    tmp_path: Path, name: str
) -> None:
    folder, secret = tmp_path / "first", tmp_path / "secret"
    studies.paired(folder, "clip", [0.1, 0.2])
    (path,) = folder.glob("clip-seed0-*")
    (path / "summary.json").unlink()
    (path / name).unlink(missing_ok=True)
    secret.write_text("{secret", encoding="utf-8")
    (path / name).symlink_to(secret)
    study = read_study(folder)
    assert told(study) == [
        f"{name} is a link out of the folder of the study, which is not followed"
    ]
    assert [run.seed for run in study.all_runs if run.state == "finished"] == [1, 0, 1]
    page = write_report(study, tmp_path / "out", figures=False).read_text(encoding="utf-8")
    assert "{secret" not in page
    assert secret.read_text(encoding="utf-8") == "{secret"


def test_a_run_that_is_a_link_out_of_the_study_is_not_read_and_a_linked_study_is(
    tmp_path: Path,
) -> None:
    studies.paired(tmp_path / "first", "clip", [0.1, 0.2])
    studies.paired(tmp_path / "other", "sign", [0.1])
    (foreign,) = (tmp_path / "other").glob("sign-*")
    (tmp_path / "first" / foreign.name).symlink_to(foreign)
    (tmp_path / "runs").symlink_to(tmp_path / "first")
    study = read_study(tmp_path / "runs")
    (line,) = told(study)
    assert line.startswith(f"{foreign.name} is a link out of the folder of the study")
    assert sorted(run.state for run in study.all_runs) == ["finished"] * 4 + ["unreadable"]


def test_a_link_inside_the_study_is_followed(tmp_path: Path) -> None:
    studies.paired(tmp_path, "clip", [0.1])
    (path,) = tmp_path.glob("clip-*")
    (path / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
    (path / "metrics.jsonl").symlink_to("../moved.jsonl")
    study = read_study(tmp_path)
    assert told(study) == []
    assert len(study.metrics.filter(pl.col("run") == path.name)) == 4


def test_a_run_with_a_broken_summary_stays_in_its_arm(tmp_path: Path) -> None:
    studies.paired(tmp_path, "clip", [0.1, 0.2])
    next(tmp_path.glob("clip-seed0-*/summary.json")).write_text("{half", encoding="utf-8")
    assert [(arm.name, len(arm.runs)) for arm in read_study(tmp_path).arms] == [
        ("clip", 2),
        ("control", 2),
    ]


def test_a_study_is_four_data_frames_that_share_run_arm_and_seed(tmp_path: Path) -> None:
    study = read_study(studies.paired(tmp_path, "clip", [-0.25]))
    clip = pl.col("arm") == "clip"
    assert study.runs.filter(clip)["test/accuracy"].to_list() == [0.25]
    assert study.runs.filter(clip)["config.transform.clip.value"].to_list() == [0.01]
    assert study.metrics.filter(clip)["step"].to_list() == [10, 20, 30, 40]
    assert set(study.effects.filter(clip)["site"]) == set(studies.SITES)
    assert study.conflicts.is_empty()
    assert repr(study).startswith("Study of 2 runs in 2 arms (clip, control), with ")
    frames = (study.runs, study.metrics, study.effects, study.conflicts)
    assert all({"run", "arm", "seed"} <= {*rows.columns} for rows in frames)


def test_a_key_that_is_a_number_in_one_run_and_a_word_in_another_is_text(tmp_path: Path) -> None:
    for value in (1, "auto", None):
        studies.whole(tmp_path, "clip", 0, 0.8, mode=value)
    found = read_study(tmp_path).runs["config.mode"]
    assert (found.dtype, sorted(found.drop_nulls())) == (pl.String, ["1", "auto"])


def test_the_area_under_a_curve_is_its_mean_height(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0)
    for step, loss in ((10, 4.0), (20, 2.0), (40, 1.0)):
        place.append("metrics.jsonl", [{"step": step, "train/loss": loss, "test/x1": 1.0}])
    studies.end(place, "clip", 0.5)
    one_point = studies.plan(tmp_path, "clip", 1)
    one_point.append("metrics.jsonl", [{"step": 10, "train/loss": 4.0}])
    studies.end(one_point, "clip", 0.5)
    study = read_study(tmp_path)
    assert study.areas["value"].to_list() == [(10 * 3.0 + 20 * 1.5) / 30]
    runs = {run.seed: run for run in study.all_runs}
    assert study.outcome(runs[0], "area/train/loss") == 2.0
    assert study.outcome(runs[1], "area/train/loss") is None
    assert [*study.metrics_of] == ["test/accuracy", "train/loss", "area/train/loss"]


def test_an_arm_of_a_list_is_named_as_it_was_typed(tmp_path: Path) -> None:
    for own in ("whole", ["trunk.*", "*"]):
        studies.whole(tmp_path, "upgrad", 0, 0.9, shared={"granularity": own})
    names = [arm.name for arm in group(read_runs(tmp_path))]
    assert sorted(names) == ["upgrad, granularity=[trunk.*,*]", "upgrad, granularity=whole"]


def test_arms_are_told_apart_by_the_keys_in_which_they_differ(tmp_path: Path) -> None:
    for lr in (0.2, 0.1):
        optimizer = {"name": "SGD", "lr": lr}
        for seed in range(2):
            control = studies.whole(tmp_path, "none", seed, 0.9, optimizer=optimizer)
            studies.whole(tmp_path, "zero", seed, 0.1, control, optimizer=optimizer)
            for value in (0.1, 0.01):
                more = {"value": value, "optimizer": optimizer}
                studies.whole(tmp_path, "clip", seed, 0.8, control, **more)
    assert [(arm.name, len(arm.runs)) for arm in read_study(tmp_path).arms] == [
        ("clip 0.01, lr=0.1", 2),
        ("clip 0.1, lr=0.1", 2),
        ("clip 0.01, lr=0.2", 2),
        ("clip 0.1, lr=0.2", 2),
        ("zero, lr=0.1", 2),
        ("zero, lr=0.2", 2),
        ("control, lr=0.1", 2),
        ("control, lr=0.2", 2),
    ]


def test_what_follows_from_a_name_is_not_told(tmp_path: Path) -> None:
    for name, lr in (("SGD", 0.1), ("Adam", 0.001)):
        for value in (0.01, 0.1):
            studies.whole(tmp_path, "clip", 0, 0.8, value=value, optimizer={"name": name, "lr": lr})
    names = [arm.name for arm in group(read_runs(tmp_path))]
    assert sorted(names) == ["clip 0.01, Adam", "clip 0.01, SGD", "clip 0.1, Adam", "clip 0.1, SGD"]
    studies.whole(tmp_path, "clip", 0, 0.8, value=0.1, optimizer={"name": "Adam", "lr": 0.01})
    names = [arm.name for arm in group(read_runs(tmp_path))]
    assert "clip 0.1, Adam, lr=0.01" in names


def test_arms_that_differ_in_a_users_code_alone_are_numbered_in_the_order_of_time(
    tmp_path: Path,
) -> None:
    for source, time in (("b", 1), ("a", 2), ("c", 3)):
        name = studies.whole(tmp_path, "halve", 0, 0.8, sources={"mine": source})
        os.utime(tmp_path / name / "config.yaml", (time, time))
    arms = group(read_runs(tmp_path))
    assert {arm.name: arm.config["sources.mine"] for arm in arms} == {
        "halve": "b",
        "halve #2": "a",
        "halve #3": "c",
    }


def test_splits_are_blocks_and_each_model_has_an_arm(tmp_path: Path) -> None:
    for model in ("mlp", "convnet"):
        for split in (0, 1):
            more = {"model": {"name": model}, "task": {"name": "digits", "split_seed": split}}
            studies.whole(tmp_path, "clip", 0, 0.8, **more)
    study = read_study(tmp_path)
    assert {arm.name: len(arm.runs) for arm in study.arms} == {"clip, mlp": 2, "clip, convnet": 2}
    assert sorted(study.block_of.values()) == ["split 0", "split 0", "split 1", "split 1"]


def test_models_of_several_sizes_are_arms(tmp_path: Path) -> None:
    for name, width in (("mlp", 8), ("mlp", 16), ("convnet", 8)):
        studies.whole(tmp_path, "clip", 0, 0.8, model={"name": name, "width": width})
    study = read_study(tmp_path)
    assert set(study.block_of.values()) == {""}
    assert len(study.arms) == 3


def test_a_task_without_splits_beside_one_split_is_one_block(tmp_path: Path) -> None:
    for task in ({"name": "digits", "split_seed": 0}, {"name": "quadratics_toy"}):
        studies.whole(tmp_path, "clip", 0, 0.8, task=task)
    assert set(read_study(tmp_path).block_of.values()) == {""}


def test_own_models_are_named_beside_each_other_and_beside_built_in_ones(tmp_path: Path) -> None:
    for name in ("mine.Net", "mine.FNet"):
        own = {"model": {"_target_": name}, "sources": {name: f"code of {name}"}}
        studies.whole(tmp_path / "own", "clip", 0, 0.8, **own)
        studies.whole(tmp_path / "both", "clip", 0, 0.8, **own)
    studies.whole(tmp_path / "both", "clip", 0, 0.8)
    own = {"clip, mine.Net", "clip, mine.FNet"}
    assert {arm.name for arm in read_study(tmp_path / "own").arms} == own
    assert {arm.name for arm in read_study(tmp_path / "both").arms} == {*own, "clip, mlp"}
