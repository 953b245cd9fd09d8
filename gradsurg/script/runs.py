"""The runs of a command: each one is a process that runs the script, with its files in a folder."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from math import isfinite
from operator import itemgetter
from pathlib import Path
from socket import socket
from subprocess import DEVNULL, STDOUT, Popen
from time import monotonic
from typing import Any

from gradsurg.effects.summary import AUTO, effects_by_path
from gradsurg.experiment.controls import ArmKind
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.idle import note_fields
from gradsurg.experiment.processes import Team, launched, tell_others
from gradsurg.experiment.run_directory import (
    EFFECTS,
    METRICS,
    TUNING,
    RunDirectory,
    first_control,
)
from gradsurg.experiment.run_identity import directory_name, environment, script_identity
from gradsurg.experiment.run_reader import known
from gradsurg.loggers.base import Logger, RunInfo
from gradsurg.report.wording import OUTCOME
from gradsurg.script.child import ENDED, SPEC
from gradsurg.script.numbers import LOG, Metric, Seen, read_numbers
from gradsurg.script.recorder import NUMBERS
from gradsurg.script.words import Command

FILES = "files"
"""The folder inside a run's folder for which `{out}` stands."""
TAIL = 4  # last lines of the output of a failed run that are shown


@dataclass(frozen=True)
class ScriptRun:
    """One arm with one seed; `kind` is `treated`, `control` (plain), or an `ActingControl`."""

    command: Command
    kind: ArmKind
    seed: int
    values: str = ""  # of a tuning run
    dry_run: bool = False
    controls: Mapping[str, str] = field(default_factory=dict)

    @property
    def arm(self) -> str:
        return "treated" if self.kind == "treated" else "control"

    @property
    def label(self) -> str:
        """The label of the arm, like in a run of a task."""
        names = "+".join(self.command.surgery.get("transform", ()))
        match self.kind:
            case "treated":
                return names
            case "control":
                return "none"
            case kind:
                return f"{kind}-{names}"

    @property
    def name_of_arm(self) -> str:
        """The label, or `control` for the plain control."""
        return "control" if self.label == "none" else self.label

    @property
    def identity(self) -> dict[str, object]:
        command, call = self.command, self.command.call
        script: dict[str, object] = {"name": call.name, "words": [*call.words]}
        surgery = {} if self.kind == "control" else command.surgery
        if command.model and surgery:
            script["model"] = command.model
        if launched() > 1:
            script["ranks"] = launched()
        kind = self.kind if self.kind not in ("treated", "control") else ""
        with _script_on_path(command) as (file, module):
            return script_identity(script, file, module, surgery, kind, self.seed)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return directory_name(f"{self.label}-seed{self.seed}", self.identity)

    @property
    def study(self) -> str:
        study = self.command.settings.study
        if self.dry_run:
            return f"{study}/dry_run"
        return f"{study}/{TUNING}" if self.values else study

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.command.settings.out_folder / self.study / self.name

    @property
    def facts(self) -> dict[str, object]:
        """The content of `run.json`."""
        settings, metric = self.command.settings, self.command.metric
        measured: dict[str, object] = {"effects_every": settings.effects_every}
        if metric is not None:
            measured |= {"metric": metric.key, "better": metric.better}
        if settings.margin is not None:
            measured["margin"] = settings.margin
        return {
            "study": self.study,
            "arm": self.arm,
            "label": self.label,
            "seed": self.seed,
            "tags": self.label.split("+"),
            "control": first_control(self.controls),
            "controls": dict(self.controls),
            "measured": measured,
            "made_with": environment(),
            "command": self.command.typed,
        }


@contextmanager
def _script_on_path(command: Command) -> Iterator[tuple[Path, str]]:
    """Search for modules as the script does, in a block; yield its file and its module's name."""
    call, before, spec = command.call, [*sys.path], None
    file = Path(call.name)
    folder = os.getcwd() if call.is_module else str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        if not call.is_module:
            yield file, "__main__"
            return
        with suppress(ModuleNotFoundError):  # of a package around it
            if (spec := find_spec(call.name)) and spec.submodule_search_locations is not None:
                spec = find_spec(f"{call.name}.__main__")
        if spec is None or spec.origin is None or not spec.has_location:
            raise ConfigError([f"-m {call.name}: there is no such module"])
        yield Path(spec.origin), spec.name
    finally:
        sys.path[:] = before


@dataclass
class Process:
    """A run in progress."""

    run: ScriptRun
    directory: RunDirectory
    popen: Popen[bytes]
    began: float

    @classmethod
    def start(cls, run: ScriptRun) -> "Process":
        """Start the script in a process; the lock of the run is held."""
        command, directory = run.command, RunDirectory(run.path)
        folder = directory.path
        directory.clear()
        for name in (NUMBERS, ENDED, LOG):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FILES, ignore_errors=True)  # else a script may resume from them
        (folder / FILES).mkdir(parents=True)
        directory.plan(run.facts, run.identity)
        kind = run.kind
        spec: dict[str, Any] = {  # Any: JSON
            "script": command.call.name,
            "module": command.call.is_module,
            "words": command.call.filled(seed=run.seed, arm=run.name_of_arm, out=folder / FILES),
            "seed": run.seed,
            "surgery": None if kind == "control" else command.surgery,
            "control": None if kind in ("treated", "control") else kind,
            "model": command.model,
            "effects_every": command.settings.effects_every,
            "dry_run": run.dry_run,
            "ranks": launched(),
        }
        directory.write_json(SPEC, spec)
        variables = _environment(run)
        if launched() > 1:
            variables |= _own_store()
            tell_others((str(folder), variables))
        return cls(run, directory, _started(folder, folder / LOG, variables), monotonic())

    def end(self) -> "Ended":
        """Read the result of a process that has ended; write the error of a failed run."""
        folder, seconds = self.directory.path, monotonic() - self.began
        content = known(folder / ENDED)
        seen = read_numbers(folder, content.get("steps", 0))
        ended = Ended(self.run, self.popen.returncode, seconds, content, seen)
        if ended.error:
            self.directory.write_error(ended.error)
        return ended


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code, what its process wrote last, the numbers it reported."""

    run: ScriptRun
    code: int
    seconds: float
    content: Mapping[str, Any]  # Any: JSON; empty if the process was killed
    seen: Seen

    @classmethod
    def earlier(cls, run: ScriptRun) -> "Ended":
        """Read a run that an earlier command has finished."""
        content = known(run.path / ENDED)
        return cls(run, 0, 0.0, content, read_numbers(run.path, content.get("steps", 0)))

    @property
    def refused(self) -> str:
        """Why the surgery cannot be used with this script; empty if it can."""
        if self.content.get("refused"):
            return str(self.content["refused"])
        return str(self.content.get("unattached") or "") if self.content and not self.code else ""

    @property
    def error(self) -> str:
        """The traceback of a failed run, or its last lines and its exit code; empty otherwise."""
        if (self.code == 0 and self.content) or self.refused:
            return ""
        if self.content.get("error"):
            return str(self.content["error"])
        log = self.run.path / LOG
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            if log.is_file()
            else []
        )
        how = f"exit code {self.code}" if self.code > 0 else f"ended by signal {-self.code}"
        how = "it ended without a result" if self.code == 0 else how
        return "\n".join([*(f"  {line}" for line in lines), how])

    def write(self, metric: Metric) -> None:
        """Write the logged numbers, and the outcome by this metric."""
        run, content = self.run, self.content
        directory = RunDirectory(run.path)
        value = metric.value(self.seen)
        if value is None:
            return
        others = {
            f"{OUTCOME}{name}": series.last
            for name, series in self.seen.items()
            if series.source == "outcome" and name != metric.name
        }
        if not (run.path / METRICS).is_file():
            directory.append(METRICS, self._rows())
        directory.plan(run.facts, run.identity)
        directory.write_summary(
            {
                "state": "finished" if isfinite(value) else "diverged",
                "arm": run.arm,
                "label": run.label,
                "seed": run.seed,
                "steps": content["steps"],
                metric.key: value,
                **others,
                "time/step_ms": content["step_ms"],
                "time/train_s": content["train_s"],
                "hardware": content["hardware"],
                "effects_every": run.command.settings.effects_every,
                **note_fields(content["notes"]),
                **({"idle": True} if content["idle"] else {}),
                **({"nonfinite": content["nonfinite"]} if content["nonfinite"] else {}),
            }
        )

    def log(self, loggers: Sequence[Logger]) -> None:
        """Send the logged numbers, the effects and the outcome to loggers."""
        run, directory = self.run, RunDirectory(self.run.path.absolute())
        summary = directory.read_summary()
        info = RunInfo(
            run.study,
            run.arm,
            f"{run.label}-seed{run.seed}",
            run.seed,
            directory.path,
            run.identity,
            tuple(run.label.split("+")),
            summary["steps"],
        )
        metrics = {row["step"]: row for row in directory.read_rows(METRICS)}
        rows = directory.read_rows(EFFECTS)
        effects = {step: [*own] for step, own in groupby(rows, itemgetter("step"))}
        seen = [*{(row["transform"], row["site"]): row for row in rows}.values()]
        numbers = {key: one for key, one in summary.items() if isinstance(one, int | float)}
        for logger in loggers:
            logger.start(info)
            for step in sorted({*metrics, *effects}):
                row = metrics.get(step, {})
                values = {key: one for key, one in row.items() if "/" in key and one is not None}
                logger.log(step, values | effects_by_path(effects.get(step, []), seen, AUTO))
            logger.finish(summary["state"], numbers)

    def _rows(self) -> list[dict[str, float]]:
        """The rows of `metrics.jsonl`: all numbers of a step together."""
        rows: dict[int, dict[str, float]] = {}
        for name, series in self.seen.items():
            for step, value in series.values:
                rows.setdefault(step, {})[f"{OUTCOME}{name}"] = value
        return [{"step": step, **rows[step]} for step in sorted(rows)]


def follow(team: Team) -> None:
    """In a rank of torchrun other than 0: run the script of each run with rank 0."""
    while order := team.broadcast(None):
        folder, variables = order
        rank = {key: os.environ[key] for key in os.environ if key.endswith("RANK")}
        log = Path(folder) / f"rank{team.rank}.txt"
        _started(Path(folder), log, variables | rank).wait()


def _started(folder: Path, log: Path, variables: Mapping[str, str]) -> Popen[bytes]:
    words = [sys.executable, "-m", "gradsurg.script.child", str(folder)]
    with log.open("wb") as output:
        return Popen(words, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=dict(variables))


def _own_store() -> dict[str, str]:
    """Return variables that give the processes of one run a store of their own: torchrun's store
    would still have the entries of an earlier run.
    """
    with socket() as found:
        found.bind(("", 0))
        return {"MASTER_PORT": str(found.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _environment(run: ScriptRun) -> dict[str, str]:
    """Return the variables of a run's process: those of this one, with the seed and W&B's group."""
    names = {
        "WANDB_RUN_GROUP": run.study,
        "WANDB_JOB_TYPE": run.arm,
        "WANDB_NAME": f"{run.label}-seed{run.seed}",
        "PYTHONHASHSEED": "0",  # else the order of sets differs between two arms
    }
    if run.command.jobs > 1:
        names["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // run.command.jobs))
    return {
        **names,
        **os.environ,
        "GRADSURG_SEED": str(run.seed),
        "PYTHONUNBUFFERED": "1",
    }
