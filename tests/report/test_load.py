"""A study is read as it lies there, whatever state its runs are in."""

from pathlib import Path

import pytest

from gradsurg.report.load import LoadedRun, NotAStudy, group, read_study, stamp
from gradsurg.training.run_directory import LOCK
from tests.report import studies


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, LoadedRun]:
    found = read_study(studies.mixed(tmp_path / "first"))
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
    (missing,) = [
        run for run in read_study(studies.mixed(tmp_path / "first")) if run.state == "missing"
    ]
    assert missing.name == "none-seed9-00000000"
    assert missing.reason.startswith("noise-seed2-")


def test_a_run_that_a_process_holds_is_running(tmp_path: Path) -> None:
    place = studies.plan(tmp_path, "clip", 0)
    (place.path / LOCK).touch()  # held or let go, the file is the same
    before = stamp(tmp_path)
    with place.lock():
        (run,) = read_study(tmp_path)
        assert run.state == "running"
        assert stamp(tmp_path) != before
    assert read_study(tmp_path)[0].state == "planned"


@pytest.mark.parametrize("there", ["nothing", "empty", "file", "studies"])
def test_what_is_no_study_is_said_in_one_sentence(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "runs"
    match there:
        case "empty":
            folder.mkdir()
        case "file":
            folder.write_text("", encoding="utf-8")
        case "studies":
            studies.whole(folder / "first", "none", 0, 0.9)
    with pytest.raises(NotAStudy) as caught:
        read_study(folder)
    assert str(folder) in str(caught.value)
    assert ("studies in it: first" in str(caught.value)) == (there == "studies")


def test_an_arm_of_a_list_is_named_as_it_was_typed(tmp_path: Path) -> None:
    for own in ("whole", ["trunk.*", "*"]):
        studies.whole(tmp_path, "upgrad", 0, 0.9, shared={"granularity": own})
    names = [arm.name for arm in group(read_study(tmp_path))]
    assert sorted(names) == ["upgrad, granularity=[trunk.*,*]", "upgrad, granularity=whole"]


def test_arms_are_told_apart_by_the_keys_in_which_they_differ(tmp_path: Path) -> None:
    for model in ("mlp", "convnet"):
        for seed in range(2):
            control = studies.whole(tmp_path, "none", seed, 0.9, model={"name": model})
            more = {"model": {"name": model}}
            studies.whole(tmp_path, "zero", seed, 0.1, control, **more)
            for value in (0.1, 0.01):
                studies.whole(tmp_path, "clip", seed, 0.8, control, value=value, **more)
    arms = group(read_study(tmp_path))
    assert [(arm.name, len(arm.runs)) for arm in arms] == [
        ("clip 0.01, convnet", 2),
        ("clip 0.01, mlp", 2),
        ("clip 0.1, convnet", 2),
        ("clip 0.1, mlp", 2),
        ("zero, convnet", 2),
        ("zero, mlp", 2),
        ("control, convnet", 2),
        ("control, mlp", 2),
    ]


def test_what_follows_from_a_name_is_not_told(tmp_path: Path) -> None:
    for name, lr in (("SGD", 0.1), ("Adam", 0.001)):
        for value in (0.01, 0.1):
            studies.whole(tmp_path, "clip", 0, 0.8, value=value, optimizer={"name": name, "lr": lr})
    names = [arm.name for arm in group(read_study(tmp_path))]
    assert sorted(names) == ["clip 0.01, Adam", "clip 0.01, SGD", "clip 0.1, Adam", "clip 0.1, SGD"]
    studies.whole(tmp_path, "clip", 0, 0.8, value=0.1, optimizer={"name": "Adam", "lr": 0.01})
    names = [arm.name for arm in group(read_study(tmp_path))]
    assert "clip 0.1, Adam, lr=0.01" in names


def test_a_class_given_by_its_path_is_named_without_the_key(tmp_path: Path) -> None:
    for model in ({"name": "mlp"}, {"_target_": "mine.Net"}):
        studies.whole(tmp_path, "clip", 0, 0.8, model=model)
    assert {arm.name for arm in group(read_study(tmp_path))} == {"clip, mlp", "clip, mine.Net"}
