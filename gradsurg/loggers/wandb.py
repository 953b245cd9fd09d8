"""Wandb: each run as a Weights & Biases run, offline unless the user is logged in."""

import logging
import re
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from os.path import commonpath
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from gradsurg.loggers.base import RunInfo, State, StudyInfo, StudyLogger
from gradsurg.plugins.fields import validated

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]
INIT_TIMEOUT = 30.0
BURST = 10  # logged rows that wait to be sent together ..
PATIENCE_S = 1.0  # .. and the seconds after which they are sent with the next one
FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")  # wandb's own names, the id at the end
STEP = "global_step"
REFUSED = "/\\#?%:"

_log = logging.getLogger("gradsurg")


def _check(project: str) -> str:
    if not 1 <= len(project) <= 128 or set(project) & set(REFUSED):
        raise ValueError(f"must have 1 to 128 characters, none of {REFUSED}")
    return project


Project = Annotated[str, AfterValidator(_check)]


@dataclass
class _Session:
    """What changes while runs come and go; a logger's fields are its configuration only."""

    run: "wandb.Run | None" = None
    last_step: int = -1
    waiting: list[dict[str, float]] = field(default_factory=list)
    sent: float = 0.0  # when
    offline: list[Path] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    project: str = ""
    unreachable: bool = False
    remarks: list[str] = field(default_factory=list)


@validated
class Wandb(StudyLogger):
    """Logs to W&B with a study as the group, an arm as the job type and `global_step` as the axis.

    `auto` is what the user told wandb itself (`WANDB_MODE`, `wandb offline`), else online if wandb
    finds a key, else offline. It never asks: what should be online and has no key or no connection
    becomes offline, and says so. A run that goes on is the same W&B run online; offline, where all
    is told again, it takes the place of what was left. One that is repeated is a new W&B run.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: Project = "gradsurg"
    entity: str | None = None

    @cached_property
    def _session(self) -> _Session:
        return _Session()

    def start(self, run: RunInfo) -> None:
        about = _About(run.study, run.arm, run.label, run.tags, run.config, run.directory)
        self._begin(about, run.resumed)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        session = self._session
        if step > session.last_step:
            session.waiting.append({**values, STEP: step})
        if len(session.waiting) >= BURST or monotonic() - session.sent > PATIENCE_S:
            self._send()

    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        self._send()
        run = self._run()
        run.summary.update({**summary, "state": state})
        run.finish(exit_code=0 if state == "finished" else 1)
        self._session.run = None

    def study(self, study: StudyInfo) -> None:
        import wandb

        # Loggers that differ have reports of their own in this one folder.
        mark = f"{sha256(repr(self).encode()).hexdigest()[:8]}-"
        about = _About(study.study, "report", study.study, (), {}, study.directory, mark)
        self._begin(about, resumed=False)
        columns: list[str | int] = list(dict.fromkeys(key for row in study.rows for key in row))
        # A row that lacks a number says so; a column may hold numbers and words.
        table = wandb.Table(
            columns=columns,
            data=[[row.get(str(column)) for column in columns] for row in study.rows],
            allow_mixed_types=True,
        )
        figures = {f"figures/{title}": wandb.Image(str(path)) for title, path in study.figures}
        run = self._run()
        run.log({"study": table, **figures})
        run.finish(exit_code=0)
        self._session.run = None
        if self._session.offline:
            # Jobs may have run in processes of their own: their runs lie beside the study's.
            runs = study.directory.parent.glob("*/wandb/offline-run-*")
            self._session.offline = sorted({*self._session.offline, *runs})

    def abandon(self) -> None:
        import wandb

        self._session.run, self._session.waiting = None, []
        # a dead wandb-core makes every later init raise, until the session is torn down
        with suppress(ConnectionError):
            wandb.teardown(exit_code=1)

    def notes(self) -> list[str]:
        session = self._session
        notes = []
        if len(session.urls) == 1:
            notes.append(f"W&B: {session.urls[0]}")
        if len(session.urls) > 1:
            notes.append(f"W&B: {len(session.urls)} runs in {session.project}")
        if session.offline:
            notes.append(f"W&B (offline): {_place(session.offline)}")
            notes.append(f"  to upload: wandb sync {_pattern(session.offline)}")
        return notes + session.remarks

    def _send(self) -> None:
        """Log what waits: a row by itself takes wandb four times as long as one among others."""
        session, run = self._session, self._run()
        rows, session.waiting, session.sent = session.waiting, [], monotonic()
        for row in rows:
            run.log(row)

    def _run(self) -> "wandb.Run":
        if self._session.run is None:
            raise RuntimeError("start() was not called")
        return self._session.run

    def _begin(self, about: "_About", resumed: bool) -> None:
        import wandb

        # wandb would turn to the system's temporary directory, in silence
        about.directory.mkdir(parents=True, exist_ok=True)
        mode = self._resolved_mode()
        known = None if mode == "disabled" else _take_place(about.directory, about.mark)
        try:
            live = self._init(about, mode, known if resumed and mode == "online" else None)
        except wandb.Error as error:
            if mode != "online":
                raise
            mode = self._turn_offline(f"wandb cannot go online ({str(error).splitlines()[0]})")
            live = self._init(about, mode, None)
        self._session.run, self._session.waiting = live, []
        self._session.sent = monotonic()
        live.define_metric("*", step_metric=STEP)
        # What W&B has of a run that goes on is not logged twice; -1 is before the first step.
        self._session.last_step = live.summary.get(STEP, -1) if live.resumed else -1
        match mode:
            case "online":
                self._session.urls.append(live.url or "")
                self._session.project = live.project_url or ""
            case "offline":
                self._session.offline.append(Path(live.settings.sync_dir))
            case "disabled":
                pass

    def _init(self, about: "_About", mode: Mode, known: str | None) -> "wandb.Run":
        import wandb

        marked = f"{about.mark}{token_hex(4)}" if about.mark else None
        return wandb.init(
            mode=mode,
            project=self.project,
            entity=self.entity,
            dir=about.directory,
            group=about.study,
            job_type=about.job_type,
            name=about.name,
            tags=about.tags,
            config=about.config,
            id=known or marked,
            resume="allow" if known is not None else None,
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                x_save_requirements=False,  # a walk over all that is installed, at every run
                init_timeout=INIT_TIMEOUT,
            ),
        )

    def _resolved_mode(self) -> Mode:
        import wandb

        # else a login by a key that is there already is told at every run
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        chosen = self.mode != "auto" or "mode" in settings.model_fields_set
        match settings.mode if self.mode == "auto" else self.mode:
            case "disabled":
                return "disabled"
            case "offline" | "dryrun":
                return "offline"
            case _ if self._session.unreachable:
                return "offline"
            case _ if wandb.login(prompt=False, verify=False):
                return "online"
            case _ if chosen:
                return self._turn_offline("wandb is not logged in (`wandb login`)")
            case _:
                return "offline"

    def _turn_offline(self, reason: str) -> Mode:
        """Stay offline from now on: each further attempt would cost a run its timeout."""
        remark = f"{reason}: runs stay offline"
        self._session.unreachable = True
        self._session.remarks.append(remark)
        _log.warning(remark)
        return "offline"


@dataclass(frozen=True)
class _About:
    """What a W&B run is called, and where its files go."""

    study: str
    job_type: str
    name: str
    tags: tuple[str, ...]
    config: dict[str, object]
    directory: Path
    mark: str = ""  # what the ids of its W&B runs begin with


def _take_place(directory: Path, mark: str = "") -> str | None:
    """The id of the latest W&B run in a run directory, if any; what is there offline is removed.

    What begins now is told all of it again, and W&B would append that to a run with the same id.
    Only those count whose id begins with `mark`.
    """
    found = [(path, FOLDER.fullmatch(path.name)) for path in directory.glob("wandb/*run-*")]
    named = sorted(
        (path.name.removeprefix("offline-"), path, match.group(1))
        for path, match in found
        if match and match.group(1).startswith(mark)
    )
    for name, path, _ in named:
        if path.name != name:
            shutil.rmtree(path)
    return named[-1][2] if named else None


def _place(paths: list[Path]) -> str:
    if len(paths) == 1:
        return str(paths[0])
    return f"{len(paths)} runs under {commonpath(paths)}"


def _pattern(paths: list[Path]) -> str:
    """One argument that names all of `paths`, which are `<run directory>/wandb/<run>`."""
    if len(paths) == 1:
        return shlex.quote(str(paths[0]))
    root = Path(commonpath(paths))
    depth = len(paths[0].relative_to(root).parts)
    names = ["*"] * (depth - 2) + ["wandb"] * (depth > 1) + ["offline-run-*"]
    return "/".join([shlex.quote(str(root)), *names])
