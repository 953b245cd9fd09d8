"""The directory of one run: its files, how they are written safely, and its lock."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from os import SEEK_END
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from gradsurg.experiment import run_reader
from gradsurg.experiment.files import (
    append_bytes,
    finite,
    is_locked,
    json_line,
    locked,
    replace_file,
    shorten,
    sync,
)
from gradsurg.experiment.run_reader import BrokenFile

CONFIG, METRICS, EFFECTS = "config.yaml", "metrics.jsonl", "effects.jsonl"
CONFLICTS = "conflicts.jsonl"
JSONL_FILES = (METRICS, EFFECTS, CONFLICTS)
SUMMARY, LOCK = "summary.json", ".lock"
CHECKPOINT, PREVIOUS = "checkpoint.pt", "checkpoint_previous.pt"
FACTS, ERROR, LANDSCAPE = "run.json", "error.log", "landscape.json"
EXAMINED, EXAMINED_EFFECTS = "examined.json", "examined_effects.jsonl"
FILES = (
    SUMMARY,
    CHECKPOINT,
    PREVIOUS,
    *JSONL_FILES,
    CONFIG,
    FACTS,
    ERROR,
    LANDSCAPE,
    EXAMINED,
    EXAMINED_EFFECTS,
)
"""The files of a run in the order of removal: without its summary a run is unfinished."""

NOT_FINITE = "not_finite"
"""Key of a JSON row that lists its NaN and infinite numbers, which JSON writes as null."""

UNTIL, UNTIL_REACHED, UNTIL_STEP = "until", "until/reached", "until/step"
"""Keys of a summary: the condition that ends a run early, 1 or 0, and the step that reached it."""

KEPT_FACTS = ("command", "looked", "margin_after")

DIGEST_BYTES = sha256().digest_size

RunState = Literal["planned", "running", "interrupted", "failed", "finished", "diverged"]

_log = logging.getLogger("gradsurg")


class RunDirectory:
    """The files of one run: facts, config, metrics, effects, checkpoint, and last the summary.

    JSONL files grow by whole lines; every other file is replaced atomically, so that a kill at any
    moment leaves the old or the new one. JSON has no NaN and no infinity: such a number is written
    as null and listed under `not_finite`, as "train/loss=nan norms.1=inf". The first write creates
    the directory. A failing write raises an OSError that names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its summary exists and can be read."""
        try:
            return run_reader.read_summary(self.path / SUMMARY) is not None
        except BrokenFile:
            return False

    @property
    def state(self) -> RunState:
        """The state of the run by its files; `running` if a process has its lock."""
        state = self.recorded_state
        if state in ("finished", "diverged"):
            return state
        return "running" if is_locked(self.path / LOCK) else state

    @property
    def recorded_state(self) -> RunState:
        """The state of the run by its files, regardless of the lock; `failed` if one is broken."""
        if self.finished:
            return "diverged" if self.read_summary().get("state") == "diverged" else "finished"
        if (self.path / ERROR).is_file() or self.broken_summary:
            return "failed"
        if any((self.path / name).is_file() for name in (*JSONL_FILES, CHECKPOINT)):
            return "interrupted"
        return "planned"

    @contextmanager
    def lock(self, wait: bool = True) -> Iterator[bool]:
        """Hold the run's lock in a block, as every writer must; yield whether it was obtained.

        Two commands can need the same control run. If another process has the lock, wait for it, or
        without `wait` yield False. The lock of a killed process is free. Raises BrokenFile for a
        directory with a link out of the study, through which files elsewhere would be changed.
        """
        run_reader.check_directory(self.path)
        with locked(self.path / LOCK, wait) as obtained:
            if obtained:
                self._remove_drafts()
            yield obtained

    def plan(self, facts: Mapping[str, object], config: Mapping[str, object]) -> None:
        """Write the run's facts and its resolved config; controls named by earlier facts stay."""
        text = _facts_text(merged_facts(self.known_facts(), facts))
        if not (self.path / CONFIG).is_file():
            import yaml

            plain = json.loads(json.dumps(config))  # tuples are lists, and none is shared
            config_text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
            self._replace(CONFIG, config_text.encode())
        path = self.path / FACTS
        if not path.is_file() or path.read_bytes() != text:
            self._replace(FACTS, text)

    def add_facts(self, facts: Mapping[str, object], locked: bool = False) -> None:
        """Add the controls and the margin in `facts` to the facts of a finished run.

        `margin_after` then marks a margin that is younger than the outcome. Writes nothing if both
        are known already. The lock is taken unless the caller has it
        (`locked`); if another process has it, nothing is written.
        """
        before = self.known_facts()
        if "controls" not in facts or not before:
            return
        after = merged_facts(before, {**before, "controls": facts["controls"]})
        margin = _margin_of(facts)
        if margin not in (None, _margin_of(before)):
            measured = {**(before.get("measured") or {}), "margin": margin}
            after |= {"measured": measured, "margin_after": True}
        elif after["controls"] == _controls_of(before):
            return
        if locked:
            self._replace(FACTS, _facts_text(after))
            return
        with self.lock(wait=False) as obtained:
            if obtained:
                self.add_facts(facts, locked=True)

    def known_facts(self) -> dict[str, Any]:  # Any: any JSON value
        """Return the facts of the run, or {} if the file is missing or broken."""
        try:
            facts = self.read_facts()
        except BrokenFile:  # `plan` rewrites it
            return {}
        return facts or {}

    def read_facts(self) -> dict[str, Any] | None:  # Any: any JSON value
        """Return the facts written when the run was planned, or None."""
        return run_reader.read_facts(self.path / FACTS)

    def read_config(self) -> dict[str, Any] | None:  # Any: any YAML value
        """Return the resolved config, or None."""
        return run_reader.read_config(self.path / CONFIG)

    def write_error(self, text: str) -> None:
        """Write the traceback that ended the run; its last lines are the reason.

        If that fails, as on a full disk, the failure is logged.
        """
        try:
            self._replace(ERROR, text.encode())
        except OSError as error:
            _log.warning("the traceback could not be written: %s", error)

    def clear_error(self) -> None:
        """Remove the traceback of an earlier attempt."""
        (self.path / ERROR).unlink(missing_ok=True)

    @property
    def reason(self) -> str:
        """The error message of a failed run, on one line, without the stack."""
        lines = run_reader.read_text(self.path / ERROR).strip().splitlines()
        calls = [number for number, line in enumerate(lines) if line.startswith("  ")]
        return "; ".join(lines[calls[-1] + 1 if calls else 0 :]) or self.broken_summary

    @property
    def broken_summary(self) -> str:
        """The fault of a summary that cannot be used; empty if there is none."""
        try:
            run_reader.read_summary(self.path / SUMMARY)
        except BrokenFile as error:
            return str(error)
        return ""

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Append one line to `metrics.jsonl`."""
        self._append(METRICS, [row])

    def append_effects(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append a line for each row to `effects.jsonl`."""
        self._append(EFFECTS, rows)

    def append_conflicts(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Append a line for each row to `conflicts.jsonl`, a file of multi-task runs only."""
        if rows:
            self._append(CONFLICTS, rows)

    def read_rows(self, name: str) -> list[dict[str, Any]]:  # Any: any JSON value
        """Return the whole lines of a JSONL file; [] if it does not exist."""
        return run_reader.read_rows(self.path / name)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the outcome, which marks the run as finished: call this last."""
        for name in JSONL_FILES:
            sync(self.path / name)
        self._replace(SUMMARY, json.dumps(finite(summary), indent=2).encode())
        (self.path / PREVIOUS).unlink(missing_ok=True)

    def read_summary(self) -> dict[str, object]:
        """Return the outcome of a finished run. Raises FileNotFoundError if it is not finished."""
        summary = run_reader.read_summary(self.path / SUMMARY)
        if summary is None:
            raise FileNotFoundError(f"there is no {self.path / SUMMARY}")
        return summary

    def write_landscape(self, landscape: Mapping[str, object]) -> None:
        """Write the task's losses on a grid over the plane, for the report's contours."""
        self._write_json(LANDSCAPE, landscape)

    def copy_landscape(self, other: "RunDirectory") -> None:
        """Write the landscape of a run of the same task, if it has one."""
        if (other.path / LANDSCAPE).is_file():
            self._replace(LANDSCAPE, (other.path / LANDSCAPE).read_bytes())

    def write_examined(self, examined: Mapping[str, object]) -> None:
        """Write the arrays of the task's examination of the trained model, such as pictures."""
        self._write_json(EXAMINED, examined)

    def read_examined(self) -> dict[str, Any] | None:  # Any: any JSON value
        """Return the content of `examined.json`, or None."""
        return run_reader.read_json(self.path / EXAMINED)

    def write_examined_effects(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write the effects of the surgery during the examination, in the format of the effects."""
        self._replace(EXAMINED_EFFECTS, _json_lines(rows))

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Write a checkpoint, with the present lengths of the JSONL files; keep the one before.

        The last bytes of the file are the SHA-256 digest of the others.
        """
        from io import BytesIO

        import torch

        sizes = {name: sync(self.path / name) for name in JSONL_FILES}
        buffer = BytesIO()
        torch.save({"state": dict(state), "sizes": sizes}, buffer)
        buffer.seek(0, SEEK_END)
        buffer.write(sha256(buffer.getbuffer()).digest())
        replace_file(self.path / CHECKPOINT, buffer.getbuffer(), self.path / PREVIOUS)

    def load_checkpoint(self) -> dict[str, Any] | None:  # Any: the values of a checkpoint
        """Return the last checkpoint's state on the CPU, or None, and rewind the JSONL files to it.

        A damaged checkpoint is removed with a warning, and the one before it is returned. The JSONL
        files are truncated to their lengths at the checkpoint, or emptied if there is none. Raises
        ValueError if they are shorter than that.
        """
        for name in (CHECKPOINT, PREVIOUS):
            content = self._checkpoint_content(name)
            if content is not None:
                state, sizes = _parsed_checkpoint(self.path / name, content)
                self._truncate(sizes)
                return state
        self._truncate({})
        return None

    def clear(self) -> None:
        """Remove the files of this run, the summary first; other files stay."""
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        self._remove_drafts()

    def _write_json(self, name: str, content: Mapping[str, object]) -> None:
        self._replace(name, json.dumps(finite(content), separators=(",", ":")).encode())

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        append_bytes(self.path / name, _json_lines(rows))

    def _replace(self, name: str, content: bytes | memoryview) -> None:
        replace_file(self.path / name, content)

    def _remove_drafts(self) -> None:
        """Remove the temporary files of killed processes."""
        for name in FILES:
            for draft in self.path.glob(f".{name}.*.tmp"):
                draft.unlink(missing_ok=True)

    def _checkpoint_content(self, name: str) -> bytes | None:
        """Return a checkpoint without its digest, or None if it is missing or damaged."""
        path = self.path / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        size = len(content) - DIGEST_BYTES
        if sha256(memoryview(content)[:size]).digest() == content[size:]:
            return content[:size]
        has_previous = name == CHECKPOINT and (self.path / PREVIOUS).is_file()
        _log.warning(
            "%s is damaged or was written by an earlier version (its SHA-256 digest is wrong): %s",
            path,
            f"trying {PREVIOUS}" if has_previous else "the run starts from step 0",
        )
        path.unlink()  # else it would be kept as the checkpoint before the next one
        return None

    def _truncate(self, sizes: Mapping[str, int]) -> None:
        """Cut each JSONL file to its size in `sizes`, or to none; check all of them before."""
        longer = []
        for name in JSONL_FILES:
            path, size = self.path / name, sizes.get(name, 0)
            length = path.stat().st_size if path.is_file() else 0
            if length < size:
                raise ValueError(
                    f"{path} has {length} bytes but had {size} at the checkpoint; "
                    "force=true starts the run from step 0"
                )
            if length > size:
                longer.append((path, size))
        for path, size in longer:
            shorten(path, size)


def _parsed_checkpoint(path: Path, content: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the state in a checkpoint and the sizes of the JSONL files. Any: as above."""
    from io import BytesIO

    import torch

    try:
        checkpoint = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{path} cannot be read ({reason}); force=true starts the run from step 0"
        ) from error
    return checkpoint["state"], checkpoint["sizes"]


def merged_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return `now` with the controls of `before` added: a later command keeps earlier pairings.

    The command line of `before` stays where `now` has none, and so do `looked`, the number of
    finished runs of the arm when the run was planned, and `margin_after` (see `add_facts`).

    Any: any JSON value.
    """
    now = {key: before[key] for key in KEPT_FACTS if key in before} | {**now}
    if "controls" not in now:
        return dict(now)
    controls = {**_controls_of(before), **now["controls"]}
    return {**now, "control": first_control(controls), "controls": controls}


def first_control(controls: Mapping[str, str]) -> str | None:
    """Return the control to compare with if there are several: the plain one."""
    return next((controls[kind] for kind in sorted(controls, key=lambda k: k != "plain")), None)


def _controls_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the directory names of the controls in a run's facts, by kind."""
    controls, control = facts.get("controls"), facts.get("control")
    if isinstance(controls, Mapping):
        return dict(controls)
    kind = str(control).partition("-")[0]
    kind = kind if kind in ("norm_matched", "update_norm_matched", "placebo") else "plain"
    return {kind: control} if isinstance(control, str) else {}


def _margin_of(facts: Mapping[str, Any]) -> str | None:
    return (facts.get("measured") or {}).get("margin")


def _facts_text(facts: Mapping[str, object]) -> bytes:
    return json.dumps(finite(facts), indent=2).encode()


def _json_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    return b"".join(json_line(row, NOT_FINITE) for row in rows)
