"""W&B with a local server: online runs, runs uploaded by `wandb sync`, and resumed runs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from zlib import compress, crc32

import pytest

from tests.loggers.offline import BIN, SCRIPT, alone, inspect, rows
from tests.loggers.stub import KEY, Kept, Server, server

START = """
import sys
from dataclasses import replace
from gradsurg.loggers.base import StudyInfo

def again(seed, steps, resumed, state, mode):
    logger = Wandb(mode=mode, project="clipping")
    logger.start(replace(run(seed), resumed=resumed))
    for step in steps:
        logger.log(step, {"train/loss": 1 / step})
    if state is None:
        os.kill(os.getpid(), signal.SIGKILL)
    logger.finish(state, {"test/accuracy": 0.5})
"""

WHOLE = """
logger = Wandb(mode={mode!r}, project="clipping", entity="somebody")
for seed, state in ((0, "finished"), (1, "diverged")):
    logger.start(run(seed))
    logger.log(10, {{"train/loss": 1.5, "effect/clip/output.weight/changed": 0.125}})
    logger.log(20, {{"train/loss": 0.75}})
    logger.finish(state, {{"test/accuracy": 0.875}})
logger.study(StudyInfo(
    "study", Path("runs/report"),
    [{{"arm": "clip", "difference": -0.5, "n": 3}}, {{"arm": "sign", "n": 2}}],
    [("outcome", Path("one.png")), ("learning curves", Path("two.png"))],
))
print(json.dumps(logger.notes()))
"""


def png(width: int) -> bytes:
    """A black picture, one pixel high."""
    parts = (
        (b"IHDR", pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", compress(bytes(width + 1))),
        (b"IEND", b""),
    )
    chunks = (
        pack(">I", len(data)) + kind + data + pack(">I", crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture
def there() -> Iterator[Server]:
    with server() as made:
        yield made


Do = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def do(tmp_path: Path, there: Server) -> Do:
    """Runs a command in `tmp_path` with an account at the server."""

    def call(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=alone(tmp_path) | {"WANDB_BASE_URL": there.url, "WANDB_API_KEY": KEY},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        return done

    return call


def python(do: Do, code: str, ends: int = 0) -> subprocess.CompletedProcess[str]:
    return do(sys.executable, "-c", SCRIPT + START + code, code=ends)


def offline_runs(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("runs/*/wandb/offline-run-*"))


def only(there: Server) -> Kept:
    (run,) = there.runs.values()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_server_gets_complete_runs_and_the_study_online_or_by_sync(
    tmp_path: Path, there: Server, do: Do, mode: str
) -> None:
    figures = {"outcome": png(3), "learning curves": png(5)}
    for name, content in zip(("one.png", "two.png"), figures.values(), strict=True):
        (tmp_path / name).write_bytes(content)
    done = python(do, WHOLE.format(mode=mode))
    assert done.stderr == ""
    if mode == "offline":
        assert there.runs == {}
        _, pattern = json.loads(done.stdout)
        paths = offline_runs(tmp_path)
        assert len(paths) == 3
        assert sorted(tmp_path.glob(pattern.rpartition(" ")[2])) == paths
        do(BIN / "wandb", "sync", *paths)
    assert there.unknown == []

    shown = there.shown()
    assert sorted(shown) == ["clip 0", "clip 1", "study"]
    for seed, state in ((0, "finished"), (1, "diverged")):
        run = shown[f"clip {seed}"]
        facts = [run.facts[key] for key in ("project", "entity", "groupName", "jobType", "tags")]
        assert facts == ["clipping", "somebody", "study", "clip", ["clip", "mlp"]]
        assert run.config == {"lr": 0.1, "model": {"hidden": [64, 64]}}
        *history, last = run.history
        table = json.loads(run.files[last["effects"]["path"]])
        (effects,) = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert (effects["site"], effects["changed"]) == ("output.weight", 0.125)
        assert history == [
            {"global_step": 10, "train/loss": 1.5, "effect/clip/output.weight/changed": 0.125},
            {"global_step": 20, "train/loss": 0.75},
        ]
        assert (run.summary["state"], run.summary["test/accuracy"]) == (state, 0.875)
        assert run.exit_code == seed

    report = shown["study"]
    assert [report.facts[key] for key in ("groupName", "jobType")] == ["study", "report"]
    (row,) = report.history
    assert json.loads(report.files[row["study"]["path"]]) == {
        "columns": ["arm", "difference", "n"],
        "data": [["clip", -0.5, 3], ["sign", None, 2]],
    }
    for title, content in figures.items():
        assert report.files[row[f"figures/{title}"]["path"]] == content
    assert "study.table.json" in there.stored


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_wandb_run_with_each_row_once(
    there: Server, do: Do
) -> None:
    python(do, "again(0, (10, 20, 30), False, 'failed', 'online')")
    assert only(there).exit_code == 1
    # From a checkpoint at step 20: what was logged up to there is told again, 30 is done again.
    python(do, "again(0, (10, 20, 30, 40), True, 'finished', 'online')")
    run = only(there)
    assert [row["global_step"] for row in run.history] == [10, 20, 30, 40]
    assert (run.summary["state"], run.exit_code) == ("finished", 0)
    assert there.unknown == []


@pytest.mark.slow
def test_a_repeated_run_is_a_new_wandb_run(there: Server, do: Do) -> None:
    python(do, "again(0, (10, 20), False, 'finished', 'online')")
    python(do, "again(0, (5, 15), False, 'finished', 'online')")
    steps = [[row["global_step"] for row in run.history] for run in there.runs.values()]
    assert steps == [[10, 20], [5, 15]]


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [True, False])
def test_the_offline_run_of_a_killed_process_is_replaced(
    tmp_path: Path, there: Server, do: Do, resumed: bool
) -> None:
    python(do, "again(0, (10, 20), False, None, 'offline')", ends=-9)
    (torn,) = offline_runs(tmp_path)
    python(do, f"again(0, (10, 20, 30), {resumed}, 'finished', 'offline')")
    (whole,) = offline_runs(tmp_path)
    records = inspect(tmp_path, whole)
    assert [row["global_step"] for row in rows(records)] == [10, 20, 30]
    assert not torn.exists()
    do(BIN / "wandb", "sync", whole)
    assert [row["global_step"] for row in only(there).history] == [10, 20, 30]


@pytest.mark.slow
def test_a_run_started_without_a_connection_is_complete_after_reconnecting(
    tmp_path: Path, there: Server, do: Do
) -> None:
    python(do, "again(0, (10, 20), False, 'failed', 'offline')")
    python(do, "again(0, (10, 20, 30), True, 'finished', 'online')")
    assert offline_runs(tmp_path) == []
    assert [row["global_step"] for row in only(there).history] == [10, 20, 30]
