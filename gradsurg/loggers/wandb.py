"""Wandb: each run as a Weights & Biases run, offline unless the user is logged in."""

import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import chain
from os.path import commonpath, relpath
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator

from gradsurg.loggers.base import RunEnd, RunInfo, StudyInfo, StudyLogger
from gradsurg.plugins.fields import validated

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]
INIT_TIMEOUT = 30.0
MAX_PENDING_ROWS = 10  # rows are sent together, at most so many ..
MAX_PENDING_S = 1.0  # .. and with the first row after so many seconds
RUN_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")  # wandb's names: the id at the end
STEP = "global_step"
SENT_TABLE = "study.sha256"  # in the folder of a study's W&B run: the digest of its content
INVALID_IN_PROJECT = "/\\#?%:"
PROJECT = "gradsurg"
RUN_ID_IGNORED = "WANDB_RUN_ID is ignored: each run has an id of its own"
PANELS = {
    "effect": ("norm_ratio", "cosine", "changed"),
    "conflict": ("conflict_rate", "cosine_to_mean", "norm_to_mean"),
    "others": (),
}
"""Last parts of the names that get a panel, by first part; with another first part all do."""

_log = logging.getLogger("gradsurg")


def _check_project(project: str) -> str:
    if not 1 <= len(project) <= 128 or set(project) & set(INVALID_IN_PROJECT):
        raise ValueError(f"must have 1 to 128 characters, none of {INVALID_IN_PROJECT}")
    return project


Project = Annotated[str, AfterValidator(_check_project)]


@dataclass
class _Session:
    """The state of a `Wandb`, whose fields are its configuration only."""

    run: "wandb.Run | None" = None
    last_step: int = -1
    pending: list[dict[str, float]] = field(default_factory=list)
    sent_at: float = 0.0
    started: bool = False
    offline: list[Path] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    project: str = ""
    unreachable: bool = False
    told_id: bool = False
    remarks: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # the names logged in this run
    better: Mapping[str, str] = field(default_factory=dict)
    effects: dict[tuple[str, str], dict[str, object]] = field(default_factory=dict)


@validated
class Wandb(StudyLogger):
    """Logs to W&B with a study as the group, an arm as the job type and `global_step` as the axis.

    `auto` follows wandb's own setting (`WANDB_MODE`, `wandb offline`). Without one, it is online if
    wandb finds a key, and offline otherwise. It never prompts: without a key or a connection an
    online run becomes offline, with a warning. A resumed run continues the same W&B run online;
    offline all rows are logged again and the earlier W&B run is removed. A repeated run is a new
    W&B run. The agent of a W&B sweep has one run for each command: it gets the first run; others
    and the study are not logged, and RuntimeError says so.

    Variables of W&B act where no field has a value: WANDB_PROJECT (otherwise "gradsurg"),
    WANDB_ENTITY, and, since no field sets these, WANDB_NAME, WANDB_RUN_GROUP, WANDB_JOB_TYPE,
    WANDB_TAGS and WANDB_DIR. Each run has an id of its own: WANDB_RUN_ID is ignored, with a
    warning.

    The summary has the last value of a metric as `test/loss`, and its best logged value as
    `test/loss.min` or `test/accuracy.max`. The study's own run has the verdict in its
    notes and its summary, and one artifact: page, comparison, surgery and environment.

    W&B makes a panel for each logged name. With `panels="few"` only the names of `PANELS` get one.
    The others are hidden metrics, which can still be plotted. All numbers of the last measured step
    are in one table, `effects`, with a row for each transform and site. `norm_ratio` is norm_after
    / norm_before.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: Project | None = None
    entity: str | None = None
    panels: Literal["few", "all"] = "few"

    @cached_property
    def _session(self) -> _Session:
        return _Session()

    def start(self, run: RunInfo) -> None:
        if self._session.started and _is_in_sweep():
            raise RuntimeError(
                "the agent of a W&B sweep has one run for each command, and this command trains "
                "several: add seed=0 control=none, or sweep over seed"
            )
        self._session.started = True
        about = _About(run.study, run.arm, run.label, run.tags, run.config, run.directory)
        self._begin(about, run.resumed)
        self._session.better = run.better

    def log(self, step: int, values: Mapping[str, float]) -> None:
        session = self._session
        if step > session.last_step:
            values = {**values, **_norm_ratios(values)}
            self._define(values)
            if self.panels == "few":
                self._tabulate(step, values)
            session.pending.append({**values, STEP: step})
        if (
            len(session.pending) >= MAX_PENDING_ROWS
            or monotonic() - session.sent_at > MAX_PENDING_S
        ):
            self._send()

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        self._send()
        run = self._run()
        if self._session.effects:
            run.log({"effects": _table(list(self._session.effects.values()))})
        # For `summary="max"` W&B stores {"max": ..} under the name, where the final value goes.
        kinds = {name: _best(self._session.better, name) for name in summary}
        nested = {name: run.summary.get(name) for name, kind in kinds.items() if kind}
        best = {
            f"{name}.{kinds[name]}": values.get(kinds[name])
            for name, values in nested.items()
            if hasattr(values, "get")
        }
        run.summary.update({**summary, **best, "state": state})
        run.finish(exit_code=0 if state == "finished" else 1)
        self._session.run = None

    def study(self, study: StudyInfo) -> None:
        if _is_in_sweep():
            return
        # Different loggers write separate W&B runs into this folder.
        own = f"{_digest(repr(self))[:8]}-"
        digest = _digest(repr([study.rows, [title for title, _ in study.figures], study.verdict]))
        folder, id_prefix = _folder(study.directory, own)
        sent = folder.glob(f"wandb/*run-*-{id_prefix}*/{SENT_TABLE}")
        if all(path.read_text(encoding="utf-8") != digest for path in sent):
            self._send_study(study, own, digest)
        if self._session.offline:
            # Jobs may have run in other processes: include their runs, beside the study's.
            places = map(_folder, study.directory.parent.iterdir())
            runs = (root.glob(f"wandb/offline-run-*-{prefix}*") for root, prefix in places)
            self._session.offline = sorted({*self._session.offline, *chain.from_iterable(runs)})

    def _send_study(self, study: StudyInfo, own: str, digest: str) -> None:
        import wandb

        config = {"study": study.study, **study.config}
        about = _About(
            study.study, "report", study.study, (), config, study.directory, own, study.verdict
        )
        self._begin(about, resumed=False)
        table = _table(study.rows)
        figures = {f"figures/{title}": wandb.Image(str(path)) for title, path in study.figures}
        run = self._run()
        run.log({"study": table, **figures})
        run.summary.update({"verdict": study.verdict})
        folder = Path(run.settings.sync_dir)
        is_kept = folder.is_dir()  # in mode disabled there is none
        if is_kept:
            run.log_artifact(_artifact(study, folder / "artifact"))
        run.finish(exit_code=0)
        self._session.run = None
        if is_kept:
            (folder / SENT_TABLE).write_text(digest, encoding="utf-8")

    def abandon(self) -> None:
        import wandb

        self._session.run, self._session.pending = None, []
        # After wandb-core has died every `init` raises, until the session is torn down.
        with suppress(ConnectionError):
            wandb.teardown(exit_code=1)

    def notes(self) -> list[str]:
        session = self._session
        notes = []
        if len(session.urls) == 1:
            notes.append(f"W&B: {session.urls[0]}")
        if len(session.urls) > 1:
            notes.append(f"W&B: {len(session.urls)} runs in {session.project}")
        if paths := [Path(relpath(path)) for path in session.offline]:
            notes.append(f"W&B (offline): {_location(paths)}")
            notes.append(f"  to upload: wandb sync {_glob_argument(paths)}")
        return notes + session.remarks

    def _define(self, names: Iterable[str]) -> None:
        """Tell W&B which of the new names have no panel, and the direction of metrics."""
        session = self._session
        for name in names:
            if name not in session.named:
                session.named.add(name)
                hidden = self.panels == "few" and not _has_panel(name)
                best = _best(session.better, name)
                if hidden or best:
                    run = self._run()
                    run.define_metric(name, step_metric=STEP, hidden=hidden, summary=best)

    def _tabulate(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of each site for the table; the last measured step's remain."""
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for name, value in values.items():
            if name.startswith("effect/"):
                transform, _, rest = name.removeprefix("effect/").partition("/")
                site, _, number = rest.rpartition("/")
                rows.setdefault((transform, site), {})[number] = value
        for (transform, site), numbers in rows.items():
            row: dict[str, object] = {"transform": transform, "site": site, STEP: step, **numbers}
            self._session.effects[transform, site] = row

    def _send(self) -> None:
        """Send the pending rows: together a row takes wandb a quarter of the time."""
        session, run = self._session, self._run()
        rows, session.pending, session.sent_at = session.pending, [], monotonic()
        for row in rows:
            run.log(row)

    def _run(self) -> "wandb.Run":
        if self._session.run is None:
            raise RuntimeError("start() was not called")
        return self._session.run

    def _begin(self, about: "_About", resumed: bool) -> None:
        import wandb

        folder, id_prefix = _folder(about.directory, about.own)
        # Without the directory wandb silently uses the system's temporary directory.
        folder.mkdir(parents=True, exist_ok=True)
        mode = self._resolved_mode()
        known_id = None if mode == "disabled" else _remove_offline_runs(folder, id_prefix)
        try:
            run = self._init(about, mode, known_id if resumed and mode == "online" else None)
        except wandb.Error as error:
            if mode != "online":
                raise
            mode = self._turn_offline(f"wandb cannot go online ({str(error).splitlines()[0]})")
            run = self._init(about, mode, None)
        self._session.run, self._session.pending, self._session.named = run, [], set()
        self._session.effects = {}
        self._session.sent_at = monotonic()
        run.define_metric("*", step_metric=STEP)
        # Rows that W&B has of a resumed run are not logged twice; -1 is before the first step.
        self._session.last_step = run.summary.get(STEP, -1) if run.resumed else -1
        match mode:
            case "online":
                self._session.urls.append(run.url or "")
                self._session.project = run.project_url or ""
            case "offline":
                self._session.offline.append(Path(run.settings.sync_dir))
            case "disabled":
                pass

    def _init(self, about: "_About", mode: Mode, resume_id: str | None) -> "wandb.Run":
        import wandb

        # None leaves a setting to W&B, which has read its variables.
        given = _settings().model_fields_set
        folder, id_prefix = _folder(about.directory, about.own)
        in_sweep = _is_in_sweep()  # its agent names the run
        new_id = None if in_sweep else f"{id_prefix}{token_hex(4)}"
        if "run_id" in given and not in_sweep and not self._session.told_id:
            self._session.told_id = True
            _log.warning(RUN_ID_IGNORED)
        return wandb.init(
            mode=mode,
            project=self.project or (None if "project" in given else PROJECT),
            entity=self.entity,
            dir=folder,
            group=None if "run_group" in given else about.study,
            job_type=None if "run_job_type" in given else about.job_type,
            name=None if "run_name" in given else about.name,
            tags=None if "run_tags" in given else about.tags,
            notes=about.notes or None,
            config=about.config,
            id=resume_id or new_id,
            resume="allow" if resume_id is not None else None if in_sweep else "never",
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                x_save_requirements=False,  # else it lists all installed packages at every run
                init_timeout=INIT_TIMEOUT,
            ),
        )

    def _resolved_mode(self) -> Mode:
        import wandb

        settings = _settings()
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
        """Switch to offline for all later runs: each attempt to connect takes its timeout."""
        remark = f"{reason}: runs stay offline"
        self._session.unreachable = True
        self._session.remarks.append(remark)
        _log.warning(remark)
        return "offline"


@dataclass(frozen=True)
class _About:
    """The name, group and directory of a W&B run.

    `own` begins the ids of one of several W&B runs in a directory.
    """

    study: str
    job_type: str
    name: str
    tags: tuple[str, ...]
    config: dict[str, object]
    directory: Path
    own: str = ""
    notes: str = ""


def _has_panel(name: str) -> bool:
    """Return whether a logged name gets a panel with `panels="few"`."""
    first, _, rest = name.partition("/")
    return first not in PANELS or rest.rpartition("/")[2] in PANELS[first]


def _table(rows: Sequence[Mapping[str, object]]) -> "wandb.Table":
    """Return rows as a table of W&B. Missing cells are None; a column may mix numbers and text."""
    import wandb

    columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
    data: list[Any] = [[row.get(str(column)) for column in columns] for row in rows]  # Any: W&B's
    return wandb.Table(columns=columns, data=data, allow_mixed_types=True)


def _norm_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Return `effect/<transform>/<site>/norm_ratio` of each site; a summary has its own already."""
    before = {
        name.removesuffix("/norm_before"): norm
        for name, norm in values.items()
        if name.startswith("effect/") and name.endswith("/norm_before")
    }
    return {
        f"{place}/norm_ratio": values[f"{place}/norm_after"] / norm
        for place, norm in before.items()
        if norm and f"{place}/norm_after" in values and f"{place}/norm_ratio" not in values
    }


def _best(better: Mapping[str, str], name: str) -> Literal["min", "max"] | None:
    """Return the summary of a metric that is the best of its values; None if it is not known."""
    first, _, rest = name.partition("/")
    if first in PANELS:
        return None
    # `loss_digits` is the loss of a task
    match better.get(rest.rpartition("/")[2].partition("_")[0]):
        case "higher":
            return "max"
        case "lower":
            return "min"
        case _:
            return None


def _artifact(study: StudyInfo, folder: Path) -> "wandb.Artifact":
    """Return the files of a study as one artifact; they are copied to `folder`."""
    import wandb

    folder.mkdir()
    for file in study.files:
        shutil.copyfile(file, folder / file.name)
    for name in ("surgery", "environment"):
        text = json.dumps(getattr(study, name), indent=2, default=str)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", study.study, flags=re.ASCII)[:128], "study")
    # Immutable files are not copied a second time, into a folder that nobody empties; `wandb sync`
    # finds them by their absolute path.
    artifact.add_dir(str(folder.absolute()), policy="immutable")
    return artifact


def _settings() -> "wandb.Settings":
    """Return the settings that wandb takes from its variables and files."""
    import wandb

    # Without `silent`, wandb prints a line about the login at every run.
    return wandb.setup(wandb.Settings(silent=True)).settings


def _is_in_sweep() -> bool:
    """Return whether the agent of a W&B sweep has started this process, which names the run."""
    return bool(_settings().sweep_id)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _folder(directory: Path, own: str = "") -> tuple[Path, str]:
    """Return the folder for the W&B runs of a directory, and the prefix of their ids.

    `own` is the end of this prefix. In WANDB_DIR the W&B runs of all directories lie side by side.
    """
    settings = _settings()
    if "root_dir" not in settings.model_fields_set:
        return directory, own
    return Path(settings.root_dir), f"{_digest(str(directory.absolute()))[:8]}-{own}"


def _remove_offline_runs(folder: Path, id_prefix: str = "") -> str | None:
    """Remove the offline W&B runs in a folder; return the id of the latest W&B run, if any.

    The new run logs all rows again, and W&B would append them to a run with the same id. Runs whose
    id does not start with `id_prefix` are ignored.
    """
    folders = [(path, RUN_FOLDER.fullmatch(path.name)) for path in folder.glob("wandb/*run-*")]
    runs = sorted(
        (path.name.removeprefix("offline-"), path, match.group(1))
        for path, match in folders
        if match and match.group(1).startswith(id_prefix)
    )
    for name, path, _ in runs:
        if path.name != name:
            shutil.rmtree(path)
    return runs[-1][2] if runs else None


def _location(paths: list[Path]) -> str:
    if len(paths) == 1:
        return str(paths[0])
    report = ", one for the report," * any((path / SENT_TABLE).is_file() for path in paths)
    return f"{len(paths)} runs{report} under {commonpath(paths)}"


def _glob_argument(paths: list[Path]) -> str:
    """Return a shell argument that matches all `paths`, such as `<run directory>/wandb/<run>`."""
    if len(paths) == 1:
        return shlex.quote(str(paths[0]))
    root = Path(commonpath(paths))
    depth = len(paths[0].relative_to(root).parts)
    names = ["*"] * (depth - 2) + ["wandb"] * (depth > 1) + ["offline-run-*"]
    return "/".join([shlex.quote(str(root)), *names])
