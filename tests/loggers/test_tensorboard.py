"""The TensorBoard logger: event files read back have each point once, also after a resume."""

# pyright: reportMissingImports=false

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import gradsurg as gs
from gradsurg.experiment.build import build
from gradsurg.experiment.compose import compose_config
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.execution import execute
from gradsurg.loggers.base import StudyInfo
from gradsurg.loggers.tensorboard import TensorBoard
from tests.loggers.offline import info
from tests.runs import Listening, Wrapped, a_run

INSTALLED = importlib.util.find_spec("tensorboard") is not None
needs_tensorboard = pytest.mark.skipif(not INSTALLED, reason="tensorboard is not installed")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def points(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


@needs_tensorboard
@pytest.mark.parametrize("interrupted_at", [0, 21])
def test_event_files_have_each_logged_row_once(tmp_path: Path, interrupted_at: int) -> None:
    expected = Listening()
    execute(a_run(gs.Clip(0.05)), tmp_path / "whole", [expected])
    logger = TensorBoard()
    if interrupted_at:
        with pytest.raises(KeyboardInterrupt):
            torn = a_run(gs.Clip(0.05), task=Wrapped(interrupted_at, "interrupt"))
            execute(torn, tmp_path, [TensorBoard()])
    record = execute(a_run(gs.Clip(0.05)), tmp_path, [logger])
    assert record.action == ("resumed" if interrupted_at else "trained")
    events = read(record.directory)
    for tag in ("train/loss", "effect/clip/hidden.0.linear.weight/cosine"):
        rows = [(step, values[tag]) for step, values in expected.logged if tag in values]
        assert len(rows) > 3
        assert points(events, tag) == [(step, pytest.approx(value)) for step, value in rows]
    assert points(events, "outcome/test/accuracy") == [
        (30, pytest.approx(record.summary["test/accuracy"]))
    ]


@needs_tensorboard
def test_config_state_and_outcome_are_in_the_hparams_tab(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoard()
    logger.start(info(tmp_path / "study" / "run", seed=3))
    logger.log(10, {"train/loss": 1.5})
    logger.finish("diverged", {"test/accuracy": 0.5})
    events = read(tmp_path / "study" / "run")
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    started = HParamsPluginData.FromString(content).session_start_info
    hparams = {
        key: getattr(value, value.WhichOneof("kind")) for key, value in started.hparams.items()
    }
    assert hparams == {
        "arm": "clip",
        "seed": 3,
        "lr": 0.1,
        "model.hidden": "[64, 64]",
        "state": "diverged",
    }
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode().strip("`\n")
    assert json.loads(shown) == {"lr": 0.1, "model": {"hidden": [64, 64]}}
    assert logger.notes()[0].startswith("TensorBoard: tensorboard --logdir ")


@needs_tensorboard
def test_a_study_logged_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    figure = tmp_path / "figure.png"
    size = (3).to_bytes(4, "big") + (2).to_bytes(4, "big")
    figure.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + size)
    for number in (1, 2):
        rows = [{"arm": "clip", "n": number}, {"arm": "none"}]
        logger = TensorBoard()
        logger.study(StudyInfo("study", tmp_path / "report", rows, [("outcome", figure)]))
    events = read(tmp_path / "report")
    (text,) = events.Tensors("study/text_summary")
    assert text.tensor_proto.string_val[0].decode().splitlines() == [
        "| arm | n |",
        "| --- | --- |",
        "| clip | 2 |",
        "| none |  |",
    ]
    (image,) = events.Images("figures/outcome")
    assert (image.width, image.height) == (3, 2)


def test_without_the_package_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError) as caught:
        build(compose_config("transform=clip", "logger=[console,tensorboard]"))
    assert caught.value.faults == [
        "logger.tensorboard: tensorboard is not installed: pip install 'gradsurg[tensorboard]'"
    ]
