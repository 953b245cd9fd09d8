"""A run that ends when a test has reached what is asked for."""

from dataclasses import replace

import pytest

import gradsurg as gs
from gradsurg.config.settings import Settings
from gradsurg.report import text
from gradsurg.report.study import study_report
from gradsurg.report.text import Runs
from gradsurg.tasks.digits import Digits
from gradsurg.training.run import Until
from gradsurg.training.study import execute
from tests.conftest import Here
from tests.test_study import SHORT, Torn, Wrapped, a_run, lines

pytestmark = pytest.mark.usefixtures("one_thread")


def short_until(condition: str):
    return replace(SHORT, eval_every=5, until=Until.of(condition))


@pytest.mark.parametrize(
    ("said", "values", "holds"),
    [
        ("test/accuracy >= 0.95", {"test/accuracy": 0.95}, True),
        ("test/accuracy>=0.95", {"test/accuracy": 0.949}, False),
        ("test/loss <= 1e-3", {"test/loss": 0.001}, True),
        ("test/loss <= 1e-3", {"test/loss": float("nan")}, False),
        ("test/loss <= 1e-3", {"test/loss": None}, False),
    ],
)
def test_a_condition_is_a_metric_and_its_bound(said, values, holds) -> None:
    assert Until.of(said).holds(values) is holds


@pytest.mark.parametrize(
    "said",
    [
        "accuracy >= 0.9",
        "test/accuracy > 0.9",
        "test/loss <= low",
        "test/loss",
        "",
        "test/loss <= nan",
        "test/loss >= inf",
    ],
)
def test_another_text_is_no_condition(said: str) -> None:
    with pytest.raises(ValueError, match='must be as "test/accuracy >= 0.95": a test metric, '):
        Until.of(said)


def test_a_run_ends_at_the_first_test_that_reaches_it(tmp_path) -> None:
    whole = execute(a_run(schedule=replace(SHORT, eval_every=5)), tmp_path / "whole", [])
    rows = lines(whole, "metrics.jsonl")
    aim = rows[2]["test/loss"]
    assert aim < min(row["test/loss"] for row in rows[:2])
    ended = execute(a_run(schedule=short_until(f"test/loss <= {aim!r}")), tmp_path / "ended", [])
    assert ended.summary["state"] == "finished"
    assert ended.summary["steps"] == ended.summary["until/step"] == 15
    assert ended.summary["until/reached"] == 1
    assert ended.summary["test/loss"] == aim
    assert lines(ended, "metrics.jsonl") == rows[:3]


def test_a_run_that_does_not_reach_it_makes_all_its_steps(tmp_path) -> None:
    record = execute(a_run(schedule=short_until("test/accuracy >= 1")), tmp_path, [])
    assert (record.summary["steps"], record.summary["until/reached"]) == (30, 0)
    assert "until/step" not in record.summary


def test_a_metric_that_the_task_has_not_got_is_told(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"the task has no test/acc, it has test/loss, "):
        execute(a_run(schedule=short_until("test/acc >= 1")), tmp_path, [])


def test_an_interrupted_run_ends_where_a_whole_one_does(tmp_path) -> None:
    schedule = short_until("test/loss <= 1.6")
    whole = execute(a_run(schedule=schedule), tmp_path / "whole", [])
    assert whole.summary["steps"] in (15, 20, 25)
    run = a_run(task=Wrapped(12, "raise"), schedule=schedule)
    with pytest.raises(Torn):
        execute(run, tmp_path / "torn", [])
    again = execute(replace(run, task=Digits()), tmp_path / "torn", [])
    assert again.action == "retried"
    for name in ("until/step", "steps", "test/loss"):
        assert again.summary[name] == whole.summary[name]
    files = [(record.directory / "metrics.jsonl").read_bytes() for record in (whole, again)]
    assert files[0] == files[1]


def test_it_needs_tests_to_look_at() -> None:
    fields = {"steps": 9, "batch_size": 4, "seeds": 1, "checkpoint_every": 9, "effects_every": 1}
    fields |= {"study": "s", "out": ".", "control": "plain", "device": "cpu", "log_every": 5}
    with pytest.raises(ValueError, match="until: is looked at where tests are due"):
        Settings(**fields, until="test/loss <= 1")
    for other in (0.9, {"metric": "test/loss", "bound": 1.0}):
        with pytest.raises(ValueError, match='until: must be as "test/accuracy >= 0.95"'):
            Settings(**fields, eval_every=5, until=other)


def test_conditions_that_differ_in_the_last_digit_are_two() -> None:
    words = [str(Until.of(f"test/loss <= {bound}")) for bound in ("0.7000001", "0.7000002")]
    assert words == ["test/loss <= 0.7000001", "test/loss <= 0.7000002"]


def test_a_metric_that_is_not_there_is_refused_before_anything_is_trained(here: Here) -> None:
    words = ("transform=clip", "log_every=5", "eval_every=5", "logger=none")
    ended = here(*words, "until='test/acc >= 1'")
    assert ended.code == 2
    assert ended.err == "until: the task has no test/acc, it has test/loss, test/accuracy\n"


def test_the_report_says_who_reached_it_and_when(tmp_path) -> None:
    schedule = short_until("test/loss <= 2.2")
    for seed in range(2):
        for transform in (None, gs.Zero()):
            execute(a_run(transform, seed=seed, schedule=schedule), tmp_path, [])
    said = study_report(tmp_path / "study").answer
    folders = {name: sorted((tmp_path / "study").glob(f"{name}-*")) for name in ("zero", "none")}
    pairs = [Runs(*pair) for pair in zip(folders["zero"], folders["none"], strict=True)]
    printed = text.report(pairs)
    assert "zero: 0 of 2 seeds reached test/loss <= 2.2." in printed
    assert "control: 2 of 2 seeds reached test/loss <= 2.2, at steps 5, 5." in printed
    assert "zero · label=zero: 0 of 2 seeds reached test/loss <= 2.2." in said
    assert "control · label=none: 2 of 2 seeds reached test/loss <= 2.2, at steps 5, 5. " in said
    assert "Outcomes are of the step at which each run has ended." in said
