"""The runner that `runner=auto` has chosen for the runs of a study, kept in the study's folder."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal

from gradsurg.training.files import replace_file
from gradsurg.training.run import Run
from gradsurg.training.run_directory import SUMMARY, RunDirectory
from gradsurg.training.run_reader import BrokenFile

Runner = Literal["stacked", "sequential"]

TREATMENT = (
    "seed",
    "label",
    "transform",
    "site",
    "when",
    "order",
    "control",
    "sources",
    "aggregator",
    "shared",
)
"""Keys of an identity in which the replicas of one stack may differ."""


def shared_key(identity: Mapping[str, object]) -> str:
    """Return a text that is equal for runs that share model, task and optimizer."""
    shared = {key: value for key, value in identity.items() if key not in TREATMENT}
    return json.dumps(shared, sort_keys=True, default=repr)


class Choices:
    """The choices of the studies under a folder, one for the runs with the same `shared_key`.

    A choice is written before its runs are trained, so that a study which is interrupted, or gets
    more seeds or arms, goes on as it began. A study without the file, as one that was trained by
    another runner, goes on as its first finished run.
    """

    def __init__(self, out: Path, runs: Iterable[Run]) -> None:
        self._out = out
        self._known: dict[Path, Runner] = {}
        for run in runs:
            path = self._path(run)
            if path not in self._known and (choice := self._read(path, run)) is not None:
                self._known[path] = choice

    def get(self, run: Run) -> Runner | None:
        """Return the choice for a run; None if there is none."""
        return self._known.get(self._path(run))

    def record(self, run: Run, runner: Runner) -> None:
        """Write a choice unless there is one."""
        path = self._path(run)
        if path not in self._known:
            self._known[path] = runner
            replace_file(path, json.dumps({"runner": runner}).encode() + b"\n")

    def _path(self, run: Run) -> Path:
        digest = sha256(shared_key(run.identity).encode()).hexdigest()[:8]
        return self._out / run.study / f"runner-{digest}.json"

    def _read(self, path: Path, run: Run) -> Runner | None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one
            match json.loads(path.read_text(encoding="utf-8"))["runner"]:
                case "stacked" | "sequential" as runner:
                    return runner
        for summary in sorted(path.parent.glob(f"*/{SUMMARY}")):
            with suppress(BrokenFile):
                directory = RunDirectory(summary.parent)
                config = directory.read_config() if directory.finished else None
                if config is not None and shared_key(config) == shared_key(run.identity):
                    return "stacked" if "runner" in directory.read_summary() else "sequential"
        return None
