"""The run directory: the durable record of one run."""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from gradsurg.runs.controls import controls_of, merged_facts

CONFIG, METRICS, EFFECTS = "config.yaml", "metrics.jsonl", "effects.jsonl"
CONFLICTS = "conflicts.jsonl"
LINES = (METRICS, EFFECTS, CONFLICTS)
"""The files that grow by lines."""
SUMMARY, CHECKPOINT, LOCK = "summary.json", "checkpoint.pt", ".lock"
FACTS, ERROR, LANDSCAPE = "run.json", "error.log", "landscape.json"
OWN = (SUMMARY, CHECKPOINT, *LINES, CONFIG, FACTS, ERROR, LANDSCAPE)
NOT_FINITE = "not_finite"
MAX_LABEL = 80

RunState = Literal["planned", "running", "interrupted", "failed", "finished", "diverged"]

_log = logging.getLogger("gradsurg")


def run_hash(config: Mapping[str, object]) -> str:
    """Eight hex digits that stand for `config`: the sha256 of its canonical JSON.

    The order of keys does not matter; a value that JSON cannot say is a TypeError or ValueError.
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def directory_name(label: str, config: Mapping[str, object]) -> str:
    """`<label>-<hash8>`, with what is awkward in a file name as `_`."""
    plain = re.sub(r"[^\w.,+=@-]+", "_", label, flags=re.ASCII)[:MAX_LABEL]
    return f"{plain}-{run_hash(config)}"


class RunDirectory:
    """The files of one run: facts, config, metrics, effects, checkpoint, and last the summary.

    Everything but the JSONL files is replaced as a whole, so that a kill at any moment leaves
    the old or the new one. JSON has no NaN and no infinity: such a number is written as null, and
    the line's `not_finite` says which it was, as "train/loss=nan norms.1=inf"; so nothing is lost.
    The first write makes the directory. A failing write is an OSError that names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its summary is there."""
        return (self.path / SUMMARY).is_file()

    @property
    def resumable(self) -> bool:
        """Whether the run can go on from a checkpoint."""
        return (self.path / CHECKPOINT).is_file()

    @property
    def state(self) -> RunState:
        """How far the run is, as its files say; `running` if a process is at it."""
        state = self.unheld_state
        return "running" if state not in ("finished", "diverged") and self._is_held() else state

    @property
    def unheld_state(self) -> RunState:
        """How far the run is, whoever is at it."""
        if self.finished:
            return "diverged" if self.read_summary().get("state") == "diverged" else "finished"
        if (self.path / ERROR).is_file():
            return "failed"
        if any((self.path / name).is_file() for name in (*LINES, CHECKPOINT)):
            return "interrupted"
        return "planned"

    @contextmanager
    def held(self, wait: bool = True) -> Iterator[bool]:
        """Have this run to oneself in a block, where all its files are written; True if one has.

        Two commands can come to the same control at once. If another process is at it, wait until
        that is done, or go without. A lock dies with its process.
        """
        path = self.path / LOCK
        while True:
            with _naming(path):
                self.path.mkdir(parents=True, exist_ok=True)
                file = path.open("a")
                got = _locked(file.fileno(), path, wait)
            if not got:
                file.close()
                yield False
                return
            if _is_still(path, file.fileno()):
                break
            file.close()  # who had it has taken the file away
        try:
            self._remove_drafts()
            yield True
        finally:
            path.unlink(missing_ok=True)
            file.close()

    def plan(self, facts: Mapping[str, object], config: Mapping[str, object]) -> None:
        """Say that this run is to be: what readers should know of it, and its resolved config.

        The controls that were known stay.
        """
        from omegaconf import OmegaConf

        text = _facts_text(merged_facts(self.known_facts(), facts))
        if not (self.path / CONFIG).is_file():
            config_text = OmegaConf.to_yaml(OmegaConf.create(dict(config)))
            self._replace(CONFIG, config_text.encode())
        path = self.path / FACTS
        if not path.is_file() or path.read_bytes() != text:
            self._replace(FACTS, text)

    def pair(self, facts: Mapping[str, object], alone: bool = False) -> None:
        """Say of a finished run what controls it has too; nothing is touched if that is known.

        Unless one is `alone` with it, another process that is at it is left to it.
        """
        before = self.known_facts()
        if "controls" not in facts or not before:
            return
        after = merged_facts(before, {**before, "controls": facts["controls"]})
        if after["controls"] == controls_of(before):
            return
        if alone:
            self._replace(FACTS, _facts_text(after))
            return
        with self.held(wait=False) as mine:
            if mine:
                self.pair(facts, alone=True)

    def known_facts(self) -> dict[str, Any]:  # Any: what JSON can hold
        """What was said of the run; nothing if it was not, or the file is broken."""
        try:
            found = self.read_facts()
        except ValueError:  # planned again, it is whole again
            return {}
        return found if isinstance(found, dict) else {}

    def read_facts(self) -> dict[str, Any] | None:  # Any: what JSON can hold
        """What was said of the run when it was planned, or None."""
        path = self.path / FACTS
        return json.loads(path.read_bytes()) if path.is_file() else None

    def read_config(self) -> dict[str, Any] | None:  # Any: what YAML can hold
        """The resolved config, or None."""
        import yaml

        path = self.path / CONFIG
        # OmegaConf wrote it, plain; its own reader takes far longer
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return yaml.load(path.read_bytes(), Loader=loader) if path.is_file() else None

    def write_error(self, text: str) -> None:
        """Keep the traceback of what ended the run; its last lines are the reason.

        On a disk that is nearly full only that line is kept; where it has no room that is logged.
        """
        try:
            self._replace(ERROR, text.encode())
        except OSError:
            try:
                self._replace(ERROR, text.strip().rpartition("\n")[2].encode())
            except OSError as error:
                _log.warning("the traceback could not be written: %s", error)

    def forget_error(self) -> None:
        """The run is tried again."""
        (self.path / ERROR).unlink(missing_ok=True)

    @property
    def reason(self) -> str:
        """Why the run has failed: what stands behind the calls of its traceback, on one line."""
        path = self.path / ERROR
        lines = path.read_text().strip().splitlines() if path.is_file() else []
        calls = [number for number, line in enumerate(lines) if line.startswith("  ")]
        return "; ".join(lines[calls[-1] + 1 if calls else 0 :])

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Add one line to `metrics.jsonl`."""
        self._append(METRICS, [row])

    def append_effects(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Add a line for each row to `effects.jsonl`."""
        self._append(EFFECTS, rows)

    def append_conflicts(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Add a line for each row to `conflicts.jsonl`, which only a run of several tasks has."""
        if rows:
            self._append(CONFLICTS, rows)

    def read_rows(self, name: str) -> list[dict[str, Any]]:  # Any: what JSON can hold
        """The lines of one of the files that grow; none if it is not there."""
        return [json.loads(line) for line in whole_lines(self.path / name).splitlines()]

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the outcome: afterwards the run is finished, so this comes last."""
        for name in LINES:
            self._sync(name)
        self._replace(SUMMARY, json.dumps(_finite(summary), indent=2).encode())

    def read_summary(self) -> dict[str, object]:
        """The outcome of a finished run; FileNotFoundError if it is not finished."""
        return json.loads((self.path / SUMMARY).read_bytes())

    def write_landscape(self, told: Mapping[str, object]) -> None:
        """Keep what the task's losses are over the plane, for pictures of the ways through it."""
        self._replace(LANDSCAPE, json.dumps(_finite(told), separators=(",", ":")).encode())

    def read_landscape(self) -> dict[str, Any] | None:  # Any: what JSON can hold
        """What `write_landscape` kept, or None."""
        path = self.path / LANDSCAPE
        return json.loads(path.read_bytes()) if path.is_file() else None

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Keep what resuming needs, with the present lengths of the JSONL files."""
        from io import BytesIO

        import torch

        sizes = {name: self._sync(name) for name in LINES}
        buffer = BytesIO()
        torch.save({"state": dict(state), "sizes": sizes}, buffer)
        self._replace(CHECKPOINT, buffer.getbuffer())

    def load_checkpoint(self) -> dict[str, object] | None:
        """What `save_checkpoint` kept, on the CPU, or None; then the run goes on from there.

        The JSONL files are cut back to their lengths at that checkpoint, half-written last lines
        included; to nothing if there is none. Raises ValueError if they are shorter than that.
        """
        import torch

        path = self.path / CHECKPOINT
        if not path.is_file():
            self._cut(dict.fromkeys(LINES, 0))
            return None
        try:
            kept = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{path} cannot be read ({reason}); force=true starts the run anew"
            ) from error
        self._cut(kept["sizes"])
        return kept["state"]

    def clear(self) -> None:
        """Remove this run's own files, the summary first; other files stay."""
        for name in OWN:
            (self.path / name).unlink(missing_ok=True)
        self._remove_drafts()

    def _remove_drafts(self) -> None:
        """Remove what a process that was killed had begun to write."""
        for name in OWN:
            for draft in self.path.glob(f".{name}.*.tmp"):
                draft.unlink(missing_ok=True)

    def _is_held(self) -> bool:
        path = self.path / LOCK
        if not path.is_file():
            return False
        try:
            with path.open() as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # gone in between
            return False
        return False

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        lines = b"".join(_line(row) for row in rows)
        path = self.path / name
        with _naming(path):
            descriptor = self._opened(path)
            try:
                size = os.fstat(descriptor).st_size
                try:
                    _write_all(descriptor, lines)
                except OSError:
                    # half a line would spoil the lines after it
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)

    def _opened(self, path: Path) -> int:
        """A descriptor to append by; the directory is made where it is not there yet."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o666)

    def _replace(self, name: str, content: bytes | memoryview) -> None:
        path = self.path / name
        draft = self.path / f".{name}.{os.getpid()}.tmp"
        with _naming(path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with draft.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)

    def _sync(self, name: str) -> int:
        """Bring a JSONL file to the disk; its size in bytes."""
        path = self.path / name
        if not path.is_file():
            return 0
        with _naming(path), path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            path = self.path / name
            found = path.stat().st_size if path.is_file() else 0
            if found < size:
                raise ValueError(
                    f"{path} has {found} bytes but had {size} at the checkpoint; "
                    "force=true starts the run anew"
                )
            if found > size:
                with _naming(path):
                    os.truncate(path, size)


def whole_lines(file: Path) -> bytes:
    """What a file holds up to its last line that is whole; nothing if it is not there."""
    content = file.read_bytes() if file.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def _facts_text(facts: Mapping[str, object]) -> bytes:
    return json.dumps(_finite(facts), indent=2).encode()


_row_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _line(row: Mapping[str, object]) -> bytes:
    try:
        return _row_encoder.encode(row).encode() + b"\n"
    except ValueError:
        pass  # JSON has no NaN and no infinity
    told = {**row, NOT_FINITE: " ".join(_not_finite(row))}
    return _row_encoder.encode(_finite(told)).encode() + b"\n"


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Each number that JSON cannot say, where it stands: `norms.1=nan`, with places from 0."""
    match value:
        case float():
            if not isfinite(value):
                yield f"{path}={value}"
        case Mapping():
            for key, item in value.items():
                yield from _not_finite(item, f"{path}.{key}" if path else str(key))
        case Sequence() if not isinstance(value, str):
            for place, item in enumerate(value):
                yield from _not_finite(item, f"{path}.{place}")
        case _:
            pass


def _finite(value: object) -> object:
    match value:
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case Sequence() if not isinstance(value, str):
            return [_finite(item) for item in value]
        case _:
            return value


def _locked(descriptor: int, path: Path, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            return False
        _log.warning("waiting for another process that is at %s", path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give an OSError the file that it is about: a full disk's has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
