"""The guard around loggers: a failing one is reported and does not end the training."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gradsurg.loggers.base import GuardedLogger, Logger, StudyInfo, StudyLogger
from gradsurg.plugins import registry
from tests.loggers.offline import go, info
from tests.runs import ROOT


class Fragile(Logger):
    """A logger that raises in the named calls, and records all calls."""

    def __init__(self, *broken):
        self.broken = set(broken)
        self.asked = []

    def _ask(self, name):
        self.asked.append(name)
        if name in self.broken:
            raise ConnectionError(f"{name}\nbroke")

    def start(self, run):
        self._ask("start")

    def log(self, step, values):
        self._ask("log")

    def finish(self, state, summary):
        self._ask("finish")

    def abandon(self):
        self._ask("abandon")

    def notes(self):
        self._ask("notes")
        return ["a note"]


def content_of(path) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    return content


def test_every_logger_has_a_yaml_with_its_defaults_under_its_own_key():
    conf = ROOT / "conf" / "logger"
    assert sorted(path.stem for path in conf.glob("*.yaml")) == sorted(
        [*registry.names("loggers"), "none"]
    )
    assert OmegaConf.load(conf / "none.yaml") == {}
    for name in registry.names("loggers"):
        content = content_of(conf / f"{name}.yaml")
        assert list(content) == [name]
        fields = content[name]
        assert registry.name_of(fields) == name
        del fields["_target_"]
        if name == "tensorboard" and find_spec("tensorboard") is None:
            continue  # an extra
        made = registry.find("loggers", name)
        assert made(**fields) == made()


def test_a_guard_passes_all_calls_to_a_working_logger():
    logger = Fragile()
    guarded = GuardedLogger(logger)
    go(guarded)
    assert logger.asked == ["start", "log", "log", "finish"]
    assert guarded.failure is None
    assert guarded.notes() == ["a note"]


@pytest.mark.parametrize(
    ("broken", "asked"),
    [
        ("start", ["start", "abandon"]),
        ("log", ["start", "log", "abandon"]),
        ("finish", ["start", "log", "log", "finish", "abandon"]),
    ],
)
def test_an_exception_of_a_logger_is_reported_once_and_ends_its_use_for_the_run(
    caplog, broken, asked
):
    logger = Fragile(broken)
    guarded = GuardedLogger(logger)
    with caplog.at_level(logging.WARNING):
        go(guarded)
    assert logger.asked == asked
    reason = f"In {broken}: ConnectionError: {broken} broke"
    assert guarded.failure == reason
    assert [record.getMessage() for record in caplog.records] == [
        f"fragile stopped logging; training goes on. {reason}"
    ]
    assert guarded.notes() == ["a note", f"fragile: stopped in 1 of 1 runs. {reason}"]


def test_the_next_run_tries_a_failed_logger_again(caplog):
    logger = Fragile("log")
    guarded = GuardedLogger(logger)
    go(guarded)
    go(guarded)
    assert len(caplog.records) == 1
    logger.broken.clear()
    logger.asked.clear()
    go(guarded)
    assert logger.asked == ["start", "log", "log", "finish"]
    assert guarded.notes()[1].startswith("fragile: stopped in 2 of 3 runs. In log: ")


def test_a_logger_may_raise_in_abandon_and_notes(caplog):
    guarded = GuardedLogger(Fragile("log", "abandon", "notes"))
    go(guarded)
    assert len(caplog.records) == 2
    notes = guarded.notes()
    assert [note.split(" In ")[1].split(":")[0] for note in notes[:2]] == ["log", "abandon"]
    assert notes[2] == "fragile: In notes: ConnectionError: notes broke"


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Fragile):
        def log(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(GuardedLogger(Interrupted()))


def test_an_active_logger_is_abandoned_once():
    logger = Fragile()
    guarded = GuardedLogger(logger)
    guarded.start(info("."))
    guarded.abandon()
    guarded.abandon()
    guarded.log(1, {})
    assert logger.asked == ["start", "abandon"]


class FragileStudy(Fragile, StudyLogger):
    def study(self, study):
        self._ask("study")


def test_a_study_is_logged_by_study_loggers_and_may_raise(caplog):
    study = StudyInfo("study", Path("report"), [{"arm": "clip", "n": 3}])
    plain, taker, broken = Fragile(), FragileStudy(), FragileStudy("study")
    guarded = [GuardedLogger(logger) for logger in (plain, taker, broken)]
    for logger in guarded:
        logger.study(study)
    assert (plain.asked, taker.asked) == ([], ["study"])
    assert broken.asked == ["study", "abandon"]
    assert [logger.failure for logger in guarded] == [
        None,
        None,
        "In study: ConnectionError: study broke",
    ]
    assert len(caplog.records) == 1
