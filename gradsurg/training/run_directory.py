"""The run directory: the durable record of one run."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from gradsurg.training import lock
from gradsurg.training.controls import controls_of, merged_facts
from gradsurg.training.durable import append, cut, remove_drafts, replace, sync, whole_lines
from gradsurg.training.json_rows import as_line, finite

CONFIG, METRICS, EFFECTS = "config.yaml", "metrics.jsonl", "effects.jsonl"
CONFLICTS = "conflicts.jsonl"
LINES = (METRICS, EFFECTS, CONFLICTS)
"""The files that grow by lines."""
SUMMARY, CHECKPOINT, LOCK = "summary.json", "checkpoint.pt", ".lock"
FACTS, ERROR, LANDSCAPE = "run.json", "error.log", "landscape.json"
EXAMINED, EXAMINED_EFFECTS = "examined.json", "examined_effects.jsonl"
BESIDE = (LANDSCAPE, EXAMINED, EXAMINED_EFFECTS)
OWN = (SUMMARY, CHECKPOINT, *LINES, CONFIG, FACTS, ERROR, *BESIDE)

RunState = Literal["planned", "running", "interrupted", "failed", "finished", "diverged"]

_log = logging.getLogger("gradsurg")


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
        ended = state in ("finished", "diverged")
        return state if ended or not lock.is_held(self.path / LOCK) else "running"

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
        with lock.held(self.path / LOCK, wait) as mine:
            if mine:
                remove_drafts(self.path, OWN)
            yield mine

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
            sync(self.path / name)
        self._replace(SUMMARY, json.dumps(finite(summary), indent=2).encode())

    def read_summary(self) -> dict[str, object]:
        """The outcome of a finished run; FileNotFoundError if it is not finished."""
        return json.loads((self.path / SUMMARY).read_bytes())

    def write_landscape(self, told: Mapping[str, object]) -> None:
        """Keep what the task's losses are over the plane, for pictures of the ways through it."""
        self._replace(LANDSCAPE, json.dumps(finite(told), separators=(",", ":")).encode())

    def read_landscape(self) -> dict[str, Any] | None:  # Any: what JSON can hold
        """What `write_landscape` kept, or None."""
        path = self.path / LANDSCAPE
        return json.loads(path.read_bytes()) if path.is_file() else None

    def write_examined(self, told: Mapping[str, object]) -> None:
        """Keep what the task's examination of the trained model has to keep, as pictures."""
        self._replace(EXAMINED, json.dumps(finite(told), separators=(",", ":")).encode())

    def read_examined(self) -> dict[str, Any] | None:  # Any: what JSON can hold
        """What `write_examined` kept, or None."""
        path = self.path / EXAMINED
        return json.loads(path.read_bytes()) if path.is_file() else None

    def write_examined_effects(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Keep what the surgery did in that examination, a line for each row as in the effects."""
        self._replace(EXAMINED_EFFECTS, b"".join(map(as_line, rows)))

    def save_checkpoint(self, state: Mapping[str, object]) -> None:
        """Keep what resuming needs, with the present lengths of the JSONL files."""
        from io import BytesIO

        import torch

        sizes = {name: sync(self.path / name) for name in LINES}
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
        remove_drafts(self.path, OWN)

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        append(self.path / name, b"".join(as_line(row) for row in rows))

    def _replace(self, name: str, content: bytes | memoryview) -> None:
        replace(self.path / name, content)

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            cut(self.path / name, size)


def _facts_text(facts: Mapping[str, object]) -> bytes:
    return json.dumps(finite(facts), indent=2).encode()
