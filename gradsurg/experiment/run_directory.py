"""The directory of one run, `runs/<study>/<label>-seed<seed>-<hash8>/`, and the files in it.

| file | content | written |
|---|---|---|
| `run.json` | facts for readers: arm, seed, controls, intervals of measurement | first |
| `config.yaml` | the config that identifies the run | first |
| `again.yaml` | the config that trains the run again, `--config-name again` | first |
| `metrics.jsonl`, `effects.jsonl`, `conflicts.jsonl` | a row a line | at each log |
| `checkpoint.pt`, and the one before | the state to resume from, with a digest | now and then |
| `examined.json`, `examined_effects.jsonl` | for some tasks | once |
| `error.log` | the traceback of a failed run | when it fails |
| `summary.json` | the outcome; the run is then finished or diverged | last |

JSONL files grow by whole lines and are cut back to their sizes at the checkpoint when a run
resumes. Every other file is replaced atomically: a kill leaves the old or the new one.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from gradsurg.experiment.files import append_bytes, drafts, finite, locked, replace_file, sync
from gradsurg.experiment.run_reader import (
    BrokenFile,
    ForeignLink,
    Values,
    inside,
    known,
    read,
    read_bytes,
    read_rows,
)
from gradsurg.plugins.messages import printable

METRICS, EFFECTS, CONFLICTS = JSONL_FILES = "metrics.jsonl", "effects.jsonl", "conflicts.jsonl"
CONFIG, SUMMARY, FACTS, LOCK = "config.yaml", "summary.json", "run.json", ".lock"
CHECKPOINT, PREVIOUS = "checkpoint.pt", "checkpoint_previous.pt"
TUNING = "tuning"  # the folder of a study with its tuning runs and the choices of its arms
REPORT, REPORT_LOCK = "report", ".report.lock"
NAME = re.compile(f"-[0-9a-f]{{8}}$|^{TUNING}$")  # of the folder of a run, and of tuning
ERROR, EXAMINED, EXAMINED_EFFECTS = "error.log", "examined.json", "examined_effects.jsonl"

NOT_FINITE = "not_finite"
"""Key of a JSON row that lists its NaN and infinite numbers, which JSON writes as null."""

UNTIL, UNTIL_REACHED, UNTIL_STEP = "until", "until/reached", "until/step"
"""Keys of a summary: the condition that ends a run early, 1 or 0, and the step that reached it."""

FORMAT = 2  # of checkpoints: one of another format is not loaded

RunState = Literal["planned", "running", "interrupted", "failed", "finished", "diverged"]
ENDED = ("finished", "diverged")
Named = TypeVar("Named")  # a run, or the name of one

_log = logging.getLogger("gradsurg")
_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class RunDirectory:
    """Reads and writes the files of one run; the first write creates the directory.

    JSON has no NaN: in a row such a number is null and listed under `not_finite`, as
    "train/loss=nan norms.1=inf". An OSError names the file, and so does a BrokenFile.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its summary exists and can be read."""
        return self.recorded_state in ENDED

    @property
    def state(self) -> RunState:
        """The state of the run by its files; `running` if a process has its lock."""
        state = self.recorded_state
        if state not in ENDED and (self.path / LOCK).is_file():
            with (
                suppress(OSError, ForeignLink),
                locked(inside(self.path / LOCK), wait=False) as obtained,
            ):
                return state if obtained else "running"
        return state

    @property
    def recorded_state(self) -> RunState:
        """The state of the run by its files, regardless of the lock; `failed` if one is broken."""
        try:
            self.check_links()
            summary = read(self.path / SUMMARY)
        except BrokenFile:
            return "failed"
        if summary:
            return "diverged" if summary.get("state") == "diverged" else "finished"
        if (self.path / ERROR).is_file():
            return "failed"
        begun = any((self.path / name).is_file() for name in (*JSONL_FILES, CHECKPOINT))
        return "interrupted" if begun else "planned"

    @property
    def is_foreign(self) -> bool:
        """Whether the folder, or a file in it, is a link out of the study's folder."""
        try:
            self.check_links()
        except ForeignLink:
            return True
        return False

    def check_links(self) -> None:
        """Raise ForeignLink if the folder, or a file in it, is a link out of the study's folder."""
        inside(self.path / LOCK)
        with suppress(FileNotFoundError), os.scandir(self.path) as files:
            for file in files:
                if file.is_symlink():
                    inside(self.path / file.name)

    @contextmanager
    def lock(self, wait: bool = True) -> Iterator[bool]:
        """Hold the run's lock in a block, as every writer must; yield whether it was obtained.

        If another process has it, for example to train a shared control, wait, or without `wait`
        yield False. The lock of a killed process is free. Raises ForeignLink for a link out of the
        study's folder, before anything is written.
        """
        self.check_links()
        with locked(self.path / LOCK, wait) as obtained:
            yield obtained

    def plan(self, facts: Values, config: Mapping[str, object]) -> None:
        """Write the run's facts and its resolved config; controls named by earlier facts stay."""
        before = known(self.path / FACTS)
        after = merged_facts(before, facts)
        if not (self.path / CONFIG).is_file():
            replace_file(self.path / CONFIG, config_text(config).encode())
        if after != before:
            self.write_json(FACTS, after)

    def add_facts(self, facts: Values) -> None:
        """Add the controls and the margin in `facts` to the facts of a finished run.

        If the margin is new or has changed, `margin_after` says that it came after the outcome.
        """
        before = known(self.path / FACTS)
        after = merged_facts(before, {**before, "controls": facts.get("controls") or {}})
        measured, margin = before.get("measured") or {}, (facts.get("measured") or {}).get("margin")
        if margin not in (None, measured.get("margin")):
            after |= {"measured": {**measured, "margin": margin}, "margin_after": True}
        if before and after != before:
            self.write_json(FACTS, after)

    def write_error(self, text: str) -> None:
        """Write the traceback that ended the run, unless the disk is full."""
        with suppress(OSError):
            replace_file(self.path / ERROR, text.encode())

    @property
    def reason(self) -> str:
        """Why the run failed, on one line: the error without its stack, or the broken summary."""
        try:
            self.check_links()
            read(self.path / SUMMARY)
            content = read_bytes(self.path / ERROR)
        except BrokenFile as error:
            return str(error)
        if content is None:
            return ""
        text = re.split(r"(?m)^  .*$", content.decode(errors="replace"))[-1]
        return "; ".join(map(printable, text.strip().splitlines()))

    def append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Append a line for each row to a JSONL file."""
        append_bytes(self.path / name, b"".join(map(_json_line, rows)))

    def read_rows(self, name: str) -> list[Values]:
        """Return the whole lines of a JSONL file; [] if it does not exist."""
        return read_rows(self.path / name)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the outcome, which marks the run as finished: call this last."""
        for name in JSONL_FILES:
            sync(self.path / name)
        self.write_json(SUMMARY, summary)
        (self.path / PREVIOUS).unlink(missing_ok=True)

    def read_summary(self) -> Values:
        """Return the outcome of a finished run, {} if it is not finished."""
        return read(self.path / SUMMARY) or {}

    def write_json(self, name: str, content: Mapping[str, object], indent: int | None = 2) -> None:
        """Write a JSON file, with null for numbers that are not finite."""
        replace_file(self.path / name, json.dumps(finite(content), indent=indent).encode())

    def write_examined_effects(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write the effects of the surgery during the examination, in the format of the effects."""
        replace_file(self.path / EXAMINED_EFFECTS, b"".join(map(_json_line, rows)))

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Write a checkpoint, with the present sizes of the JSONL files; keep the one before.

        The last bytes of the file are the SHA-256 digest of the others.
        """
        import torch

        sizes = {name: sync(self.path / name) for name in JSONL_FILES}
        buffer = BytesIO()
        torch.save({"state": dict(state), "sizes": sizes, "format": FORMAT}, buffer)
        digest = sha256(buffer.getbuffer()).digest()
        buffer.seek(0, os.SEEK_END)
        buffer.write(digest)
        replace_file(self.path / CHECKPOINT, buffer.getbuffer(), self.path / PREVIOUS)

    def load_checkpoint(self) -> Values | None:
        """Return the last checkpoint's state on the CPU, or None, and rewind the JSONL files to it.

        One that is damaged or of another format is removed with a warning, and the one before it
        returned. Raises ValueError if the JSONL files are shorter than at the checkpoint.
        """
        found = (self._checkpoint(name) for name in (CHECKPOINT, PREVIOUS))
        checkpoint = next(filter(None, found), {"state": None, "sizes": {}})
        for name in JSONL_FILES:
            path, size = self.path / name, checkpoint["sizes"].get(name, 0)
            length = path.stat().st_size if path.is_file() else 0
            if length < size:
                raise ValueError(
                    f"{path} has {length} bytes but had {size} at the checkpoint; "
                    "force=true starts the run from step 0"
                )
            if length > size:
                os.truncate(path, size)
        return checkpoint["state"]

    def clear(self) -> None:
        """Remove the files of this run except `run.json`; files of others, such as W&B, stay."""
        own = (SUMMARY, CHECKPOINT, PREVIOUS, *JSONL_FILES, CONFIG, ERROR)
        for name in (*own, EXAMINED, EXAMINED_EFFECTS):  # SUMMARY first: it marks a finished run
            (self.path / name).unlink(missing_ok=True)

    def _checkpoint(self, name: str) -> Values | None:
        """Return the content of a checkpoint, or None if it is missing or cannot be used."""
        path = self.path / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        if content[-32:] == sha256(memoryview(content)[:-32]).digest():
            import torch

            checkpoint = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
            if checkpoint.get("format") == FORMAT:
                return checkpoint
        before = name == CHECKPOINT and (self.path / PREVIOUS).is_file()
        then = f"trying {PREVIOUS}" if before else "the run starts from step 0"
        _log.warning("%s is damaged or of an earlier version: %s", path, then)
        path.unlink()  # else it would be kept as the checkpoint before the next one
        return None


def remove_leftovers(study: Path) -> None:
    """Remove what killed processes left in a study: locks, drafts, and old checkpoints.

    The files of a run or of a report stay while another process holds its lock, and so do those
    that cannot be removed.
    """
    places = [study]
    with suppress(ForeignLink):
        places.append(inside(study / TUNING / LOCK).parent)
    runs = [path for place in places for path in place.glob("*-*") if path.is_dir()]
    locks = [path / LOCK for path in (*runs, *places[1:]) if NAME.search(path.name)]
    for lock in (*locks, study / REPORT / REPORT_LOCK):
        folder = lock.parent
        is_old = (folder / PREVIOUS).exists() and RunDirectory(folder).finished
        if not (is_old or lock.exists() or drafts(folder)):
            continue
        with suppress(OSError, ForeignLink), locked(inside(lock), wait=False) as obtained:
            if obtained and is_old:
                inside(folder / PREVIOUS).unlink(missing_ok=True)


def config_text(config: Mapping[str, object]) -> str:
    """Return the content of `config.yaml`, or of a part of it."""
    plain = json.loads(json.dumps(config))  # tuples become lists; no YAML anchors
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def merged_facts(before: Values, now: Values) -> Values:
    """Return `now` with the controls of `before` added: a later command keeps earlier pairings.

    The command line of `before` stays where `now` has none. So do `looked`, the number of finished
    runs of the arm when the run was planned, `search`, the metric that chose a trial of a search,
    and `margin_after` (see `add_facts`).
    """
    kept = ("command", "looked", "margin_after", "search")
    now = {key: before[key] for key in kept if key in before} | {**now}
    if "controls" not in now:
        return now
    controls = {**(before.get("controls") or {}), **now["controls"]}
    return {**now, "control": first_control(controls), "controls": controls}


def first_control(controls: Mapping[str, Named]) -> Named | None:
    """Return the control to compare with if there are several: the plain one."""
    return next((controls[kind] for kind in sorted(controls, key=lambda k: k != "plain")), None)


def _json_line(row: Mapping[str, object]) -> bytes:
    try:
        return _encoder.encode(row).encode() + b"\n"
    except ValueError:  # JSON has no NaN and no infinity
        listed = {**row, NOT_FINITE: " ".join(_not_finite(row))}
        return _encoder.encode(finite(listed)).encode() + b"\n"


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Yield each number that is not finite with its path, for example `norms.1=nan`."""
    if isinstance(value, float) and not isfinite(value):
        yield f"{path}={value}"
    parts = value.items() if isinstance(value, Mapping) else ()
    for key, part in enumerate(value) if isinstance(value, list | tuple) else parts:
        yield from _not_finite(part, f"{path}.{key}" if path else str(key))
