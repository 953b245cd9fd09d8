"""Wandb: each run as a Weights & Biases run, offline unless the user is logged in."""

import logging
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator

from gradsurg.fields import validated
from gradsurg.sinks.base import RunInfo, Sink, State

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]
INIT_TIMEOUT = 30.0
REFUSED = "/\\#?%:"

_log = logging.getLogger("gradsurg")


def _check(project: str) -> str:
    if not 1 <= len(project) <= 128 or set(project) & set(REFUSED):
        raise ValueError(f"must have 1 to 128 characters, none of {REFUSED}")
    return project


Project = Annotated[str, AfterValidator(_check)]


@dataclass
class _Session:
    """What changes while runs come and go; a sink's fields are its configuration only."""

    run: "wandb.Run | None" = None
    offline: list[Path] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    project: str = ""
    unreachable: bool = False
    remarks: list[str] = field(default_factory=list)


@validated
class Wandb(Sink):
    """Logs to W&B with a study as the group, an arm as the job type and `global_step` as the axis.

    `auto` is what the user told wandb itself (`WANDB_MODE`, `wandb offline`), else online if wandb
    finds a key, else offline. It never asks: what should be online and has no key or no connection
    becomes offline, and says so.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: Project = "gradsurg"
    entity: str | None = None

    @cached_property
    def _session(self) -> _Session:
        return _Session()

    def start(self, run: RunInfo) -> None:
        import wandb

        # wandb would turn to the system's temporary directory, in silence
        run.directory.mkdir(parents=True, exist_ok=True)
        mode = self._resolved_mode()
        try:
            live = self._init(run, mode)
        except wandb.Error as error:
            if mode != "online":
                raise
            mode = self._turn_offline(f"wandb cannot go online ({str(error).splitlines()[0]})")
            live = self._init(run, mode)
        self._session.run = live
        live.define_metric("*", step_metric="global_step")
        match mode:
            case "online":
                self._session.urls.append(live.url or "")
                self._session.project = live.project_url or ""
            case "offline":
                self._session.offline.append(Path(live.settings.sync_dir))
            case "disabled":
                pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run().log({**values, "global_step": step})

    def finish(self, state: State, summary: Mapping[str, float]) -> None:
        run = self._run()
        run.summary.update({**summary, "state": state})
        run.finish(exit_code=0 if state == "finished" else 1)
        self._session.run = None

    def abandon(self) -> None:
        import wandb

        self._session.run = None
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

    def _run(self) -> "wandb.Run":
        if self._session.run is None:
            raise RuntimeError("start() was not called")
        return self._session.run

    def _init(self, run: RunInfo, mode: Mode) -> "wandb.Run":
        import wandb

        return wandb.init(
            mode=mode,
            project=self.project,
            entity=self.entity,
            dir=run.directory,
            group=run.study,
            job_type=run.arm,
            name=run.label,
            tags=run.tags,
            config=run.config,
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, init_timeout=INIT_TIMEOUT
            ),
        )

    def _resolved_mode(self) -> Mode:
        import wandb

        settings = wandb.setup().settings
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
