"""Files in the user's folder that several runs wrote."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradsurg.plugins.messages import shortened

MAX_FILES = 20_000  # in a folder with more, further ones are not looked at
SKIPPED = {"__pycache__", "wandb", "node_modules", "lightning_logs"}


@dataclass
class WrittenFiles:
    """Notices files below the current folder that more than one run has written.

    `out` is the folder of the studies, which is left out.
    """

    out: Path
    _times: dict[str, int] = field(default_factory=dict)
    _runs: dict[str, set[str]] = field(default_factory=dict)

    def look(self, run: str = "") -> None:
        """Note the files that have changed since the last look, as written by a run.

        The output of this command may go to one of them.
        """
        own = {os.fstat(stream).st_ino for stream in (1, 2)}
        for path, status in _files(Path.cwd(), self.out):
            time = status.st_mtime_ns
            if status.st_ino in own:
                continue
            if self._times.get(path, 0 if run else time) != time and run:
                self._runs.setdefault(path, set()).add(run)
            self._times[path] = time

    def warning(self) -> str:
        """Return a warning of files that several runs wrote; empty if there are none."""
        several = sorted(path for path, runs in self._runs.items() if len(runs) > 1)
        if not several:
            return ""
        count = max(len(self._runs[path]) for path in several)
        hydra = any(".hydra" in Path(path).parts for path in several)
        example = "hydra.run.dir={out}/hydra" if hydra else "--save {out}/model.pt"
        return (
            f"warning: {shortened(map(os.path.relpath, several))} in this folder: written by "
            f"{count} runs, each over the one before; {{out}} in the script's words is a folder of "
            f"the run: {example}"
        )


def _files(folder: Path, out: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder with their status."""
    number = 0
    for place, folders, names in os.walk(folder):
        inside = Path(place)
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED
            and (not name.startswith(".") or name == ".hydra")
            and inside / name != out
        ]
        for name in names:
            path = os.path.join(place, name)
            try:
                yield path, os.stat(path)
            except OSError:  # it is gone
                continue
            number += 1
            if number == MAX_FILES:
                return
