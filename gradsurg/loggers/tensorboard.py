"""TensorBoard: scalars, config and outcome of each run as an event file in its folder."""

# pyright: reportMissingImports=false

import json
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING

from gradsurg.loggers.base import Cell, RunEnd, RunInfo, StudyInfo, StudyLogger
from gradsurg.plugins.extras import need
from gradsurg.plugins.fields import validated
from gradsurg.plugins.messages import printable

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

FOLDER = "tensorboard"  # in the folders of a run and of a study's report
FLUSH_S = 10  # an interrupted run logs all its rows again
PNG_SIZE = slice(16, 24)  # width and height, big-endian


@dataclass
class _Session:
    """The state of a `TensorBoard`, which has no fields."""

    writer: "FileWriter | None" = None
    config: dict[str, bool | str | float | int] = field(default_factory=dict)
    step: int = 0
    studies: dict[Path, None] = field(default_factory=dict)


@validated
class TensorBoard(StudyLogger):
    """Writes scalars to `<run>/tensorboard`, the config as text, and both to the HParams tab.

    A resumed or repeated run replaces the event file of the earlier one: all its rows are logged
    again, and no point is doubled. Needs the extra `gradsurg[tensorboard]`; ImportError without it.
    """

    def __post_init__(self) -> None:
        need("tensorboard", "tensorboard")

    @cached_property
    def _session(self) -> _Session:
        return _Session()

    def start(self, run: RunInfo) -> None:
        session = self._session
        session.writer, session.step = _new_writer(run.directory), 0
        session.config = {"arm": run.arm, "seed": run.seed, **dict(_flat(run.config))}
        session.studies[run.directory.parent] = None
        text = json.dumps(run.config, indent=2, default=str)
        _add_text(session.writer, "config", f"```\n{text}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._session.step = step
        self._write(values)

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        from torch.utils.tensorboard.summary import hparams

        session, writer = self._session, self._writer()
        outcome = {f"outcome/{name}": float(value) for name, value in summary.items()}
        self._write(outcome)
        for part in hparams({**session.config, "state": state}, outcome):
            writer.add_summary(part)
        writer.close()
        session.writer = None

    def study(self, study: StudyInfo) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        writer = _new_writer(study.directory)
        _add_text(writer, "study", _markdown(study.rows))
        for title, path in study.figures:
            png = path.read_bytes()
            width, height = struct.unpack(">II", png[PNG_SIZE])
            image = Summary.Image(
                encoded_image_string=png,
                width=width,
                height=height,
                colorspace=4,  # RGBA
            )
            values = [Summary.Value(tag=f"figures/{title}", image=image)]
            writer.add_summary(Summary(value=values), 0)
        writer.close()
        self._session.studies[study.directory.parent] = None

    def abandon(self) -> None:
        writer, self._session.writer = self._session.writer, None
        if writer is not None:
            writer.close()

    def notes(self) -> list[str]:
        folders = [shlex.quote(relpath(folder)) for folder in self._session.studies]
        return [printable(f"TensorBoard: tensorboard --logdir {folder}") for folder in folders]

    def _write(self, values: Mapping[str, float]) -> None:
        """Write all numbers of a step as one event."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer().add_summary(Summary(value=scalars), self._session.step)

    def _writer(self) -> "FileWriter":
        if self._session.writer is None:
            raise RuntimeError("start() was not called")
        return self._session.writer


def _new_writer(directory: Path) -> "FileWriter":
    """Return a writer that replaces the event files in `directory`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
    from torch.utils.tensorboard import FileWriter

    folder = directory / FOLDER
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()
    writer = FileWriter(str(folder), flush_secs=FLUSH_S)
    # A TensorBoard that has read the earlier file drops its points.
    writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step=0)
    return writer


def _add_text(writer: "FileWriter", tag: str, markdown: str) -> None:
    from torch.utils.tensorboard.summary import text

    writer.add_summary(text(tag, markdown), 0)


def _flat(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str | float]]:
    """Yield the entries of a nested config with dotted keys; lists and None as text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | int | float) else str(value)


def _markdown(rows: Sequence[Mapping[str, Cell]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[str(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
