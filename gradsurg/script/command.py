"""Train a script with all seeds of each arm, and report: the life of one command."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from signal import SIGTERM, signal
from time import monotonic, sleep
from typing import Any, NoReturn, cast

from gradsurg.experiment.command import print_notes, report_study
from gradsurg.experiment.controls import ArmKind
from gradsurg.experiment.errors import FAILED, ConfigError, ErrorCollector
from gradsurg.experiment.from_config import from_config
from gradsurg.experiment.making import make
from gradsurg.experiment.processes import run_in_all
from gradsurg.experiment.run_directory import (
    ENDED as END_STATES,
)
from gradsurg.experiment.run_directory import (
    RunDirectory,
    first_control,
    remove_leftovers,
)
from gradsurg.loggers.base import GuardedLogger, Logger
from gradsurg.plugins.messages import printable, tell
from gradsurg.report.terminal import Runs, failures, report
from gradsurg.report.tuning import read_tunings, tuning_text
from gradsurg.report.wording import count, duration, value
from gradsurg.script.numbers import (
    Metric,
    about_taken,
    chosen_metric,
    listing,
    unknown_metric,
)
from gradsurg.script.runs import Ended, Process, ScriptRun, follow
from gradsurg.script.tuning import Tuning
from gradsurg.script.words import Command
from gradsurg.script.written import WrittenFiles

POLL = 0.05  # seconds between two looks at the processes
SEED_HINT = "give the script {seed}, such as --seed {seed}, or let it read GRADSURG_SEED"


def run(command: Command) -> int:
    """Tune, train and report; return the exit code. Raises ConfigError."""
    if command.surgery:
        from_config(command.surgery, own_code=True)  # its faults
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return _Study(command).run()
    if command.jobs > 1:
        raise ConfigError([f"jobs: must be 1 under torchrun, found {command.jobs}"])
    codes: list[int] = []
    run_in_all(lambda: codes.append(_Study(command).run()), follow)
    return codes[0]


@dataclass
class _Study:
    """The runs of a command that have ended so far."""

    command: Command
    ended: dict[str, Ended] = field(default_factory=dict)
    failed: dict[str, Ended] = field(default_factory=dict)
    metric: Metric | None = None
    stopped: str = ""  # why no more seeds are trained

    def __post_init__(self) -> None:
        self.metric = self.command.metric
        self.settings = self.command.settings
        self.written = WrittenFiles(self.settings.out_folder)
        self.began, self.trained, self.expected = monotonic(), 0, 0
        self.has_told_model = False
        self.loggers = self._loggers()

    def run(self) -> int:
        """Tune, train and report; return the exit code."""
        if self.settings.dry_run:
            return self._dry_run()
        remove_leftovers(self.settings.study_folder)
        self.written.look()
        arms, tuning = self._arms(), None
        if self.command.tune is not None:
            tuning = Tuning(self.command, [*arms])
            self._train(tuning.runs, "tuning: ")
            if self.metric is None or any(run.name in self.failed for run in tuning.runs):
                tell("tuning runs failed: nothing is chosen")
                return FAILED
            arms = tuning.choose(self.ended, self.metric)
        runs = [run for seed in self.settings.all_seeds for run in _runs(arms, seed)]
        self._train(runs)
        if tuning is not None:
            files = tuning.write(runs)
            print("\n".join(tuning_text(*read_tunings(files))), end="\n\n")
        self._report(runs)
        return FAILED if self.failed else 0

    def _arms(self) -> dict[ArmKind, Command]:
        """The arms in the order of training, each with its command."""
        kinds: list[ArmKind] = []
        if self.settings.control != "none":
            given: Any = self.settings.control  # one kind, or a list of them
            for kind in [given] if isinstance(given, str) else given:
                kinds.append("control" if kind == "plain" else cast(ArmKind, kind))
        if not self.command.surgery:
            return {"control": self.command}
        kinds.append("treated")
        return dict.fromkeys(kinds, self.command)

    # Training.

    def _train(self, runs: Sequence[ScriptRun], what: str = "") -> None:
        """Train the unfinished runs, the first alone; ConfigError if it cannot have the surgery."""
        runs = [*{run.name: run for run in runs}.values()]
        waiting = [run for run in runs if not self._is_finished(run)]
        self.expected, self.trained, self.began = len(waiting), 0, monotonic()
        skipped = len(runs) - len(waiting)
        words = " ".join([self.command.call.name, *self.command.call.words])
        before = f"; {skipped} finished before" if skipped else ""
        at_once = f", {self.command.jobs} at once" if self.command.jobs > 1 else ""
        tell(f"{what}{count(len(runs), 'run')} of {printable(words)}{at_once}{before}")
        running: list[tuple[Process, ExitStack]] = []
        with _terminating(running):
            while waiting or running:
                limit = self.command.jobs if self.has_told_model or not waiting else 1
                while waiting and len(running) < limit and not self.stopped:
                    self._start(waiting.pop(0), running)
                if self.stopped:
                    waiting.clear()
                for process, held in [each for each in running if each[0].popen.poll() is not None]:
                    running.remove((process, held))
                    with held:
                        self._end(process)
                sleep(POLL)

    def _start(self, run: ScriptRun, running: list[tuple[Process, ExitStack]]) -> None:
        held = ExitStack()
        if not held.enter_context(RunDirectory(run.path).lock(wait=False)):
            tell(f"{_title(run)}: another process trains it")
            return
        running.append((Process.start(run), held))

    def _is_finished(self, run: ScriptRun) -> bool:
        """Whether an earlier command has finished the run; its outcome is that of this metric."""
        directory = RunDirectory(run.path)
        if self.settings.force or directory.recorded_state not in END_STATES:
            return False
        ended = Ended.earlier(run)
        self._choose(ended)
        self._write(ended)
        self._compare_with_others(ended)
        return True

    def _end(self, process: Process) -> None:
        """Note a run that has ended, and print a line on it."""
        ended, run = process.end(), process.run
        self.trained += 1
        self.written.look(run.name)
        if ended.refused:
            raise ConfigError([ended.refused])
        if ended.error:
            self.failed[run.name] = ended
            self._tell(run, f"FAILED, {RunDirectory(run.path).reason}")
            if len(self.failed) == 1:  # of others the report names the file
                for line in ended.error.rstrip().splitlines():
                    tell(f"    {printable(line)}")
            if not self.ended and self.expected > 1:
                self.stopped = "the first run failed: the others are not started"
                tell(self.stopped)
            return
        if not self.has_told_model:
            self.has_told_model = True
            for note in ended.content["found"]:
                tell(note)
        self._choose(ended)
        try:
            self._write(ended)
        except ConfigError as error:
            if not self.ended:
                raise
            process.directory.write_error(str(error))
            self.failed[run.name] = ended
            self._tell(run, f"FAILED, {error}")
            return
        if not run.values:
            self.ended[run.name].log(self.loggers)
        assert self.metric is not None
        number = value(self.metric.key, self.metric.value(ended.seen))
        steps = count(ended.content["steps"], "step")
        self._tell(run, f"{self.metric.name} {number}, {steps}, {duration(ended.seconds)}")
        self._compare_with_others(ended)

    def _choose(self, ended: Ended) -> None:
        """Take the metric of the first run, and say so, unless it was given."""
        if self.metric is None:
            self.metric = chosen_metric(ended.seen)
            lines = listing(ended.seen, self.metric)
            tell("\n".join(["numbers that the script reported:", *lines]))
            if self.metric is None:
                names = [*ended.seen] or ["NAME"]
                example = f"metric=higher:{names[-1]} or metric=lower:{names[-1]}"
                none = "it reported none. Print 'name: number', or call gradsurg.outcome(..)"
                unknown = f"of none the better direction is known: write {example}"
                raise ConfigError([f"metric: {unknown if ended.seen else none}"])
            tell(about_taken(self.metric))
            self.command = replace(self.command, metric=self.metric)

    def _write(self, ended: Ended) -> None:
        """Write the outcome of a run. Raises ConfigError if it has not reported the metric."""
        assert self.metric is not None
        if self.metric.name not in ended.seen:
            raise ConfigError([unknown_metric(self.metric.name, ended.seen)])
        run = replace(ended.run, command=replace(ended.run.command, metric=self.metric))
        self.ended[run.name] = replace(ended, run=run)
        self.ended[run.name].write(self.metric)

    def _compare_with_others(self, ended: Ended) -> None:
        """Notice that a script seeds itself, and that two arms differ before the first step."""
        weights, begin = ended.content["weights"], ended.content["begin"]
        for other in self.ended.values():
            is_same_call = other.run.command.call == ended.run.command.call
            if not is_same_call or other.run.name == ended.run.name or not weights:
                continue
            same_arm = other.run.kind == ended.run.kind and other.run.seed != ended.run.seed
            if same_arm and other.content["weights"] == weights and not self.stopped:
                by = f" ({ended.content['seeded']})" if ended.content["seeded"] else ""
                self.stopped = (
                    f"seeds {other.run.seed} and {ended.run.seed} are the same training, to the "
                    f"last weight: the script seeds itself{by}, so further seeds tell nothing; "
                    f"{SEED_HINT}"
                )
                tell(self.stopped)
            if other.run.seed == ended.run.seed and other.content["begin"] != begin:
                tell(
                    f"warning: seed {ended.run.seed}: {other.run.label} and {ended.run.label} "
                    "differ in weights or the first batch before the first step: the script draws "
                    "random numbers that no seed sets"
                )

    def _tell(self, run: ScriptRun, text: str) -> None:
        left = self.expected - self.trained
        seconds = (monotonic() - self.began) / self.trained * left
        time = f"; {duration(seconds)} left" if left and not self.stopped else ""
        width = len(str(self.expected))
        tell(f"{self.trained:{width}}/{self.expected} {_title(run)}: {printable(text)}{time}")

    # Reports.

    def _report(self, runs: Sequence[ScriptRun]) -> None:
        """Print the outcome of the runs, and write the report of their study."""
        done = {name: ended.run.path for name, ended in self.ended.items()}
        told = [*{run.name: run for run in runs}.values()]
        if text := failures(
            [run.path for run in told if run.name in self.failed or run.name in done]
        ):
            print(f"{text}\n")
        if text := self.written.warning():
            tell(text)
        pairs = [
            Runs(done.get(run.name), done.get(first_control(run.controls) or ""))
            for run in told
            if run.kind == "treated"
        ] or [Runs(None, done.get(run.name)) for run in told]
        if any(pair.paths for pair in pairs):
            print(report([pair for pair in pairs if pair.paths]))
            if self.settings.report is not False:
                is_whole = self.settings.report is True
                report_study(self.settings.study_folder, self.loggers, is_whole)
            print_notes(self.loggers)

    def _loggers(self) -> list[GuardedLogger]:
        errors, loggers = ErrorCollector(), []
        for key, fields in self.command.loggers.items():
            with errors.at(f"logger.{key}"):
                loggers.append(GuardedLogger(make(fields, Logger)))
        errors.raise_if_any()
        return loggers

    def _dry_run(self) -> int:
        """Train to the end of the first step; print the sites and what was found."""
        kind: ArmKind = "treated" if self.command.surgery else "control"
        run = ScriptRun(self.command, kind, self.settings.all_seeds[0], dry_run=True)
        running: list[tuple[Process, ExitStack]] = []
        try:
            with _terminating(running):
                self._start(run, running)
                ((process, held),) = running
                with held:
                    process.popen.wait()
                    ended = process.end()
                running.clear()
            if ended.refused:
                raise ConfigError([ended.refused])
            if ended.error:
                tell(ended.error)
                return FAILED
            print(ended.content["plan"] or "no transform")
            print("\n".join(ended.content["found"]))
            if ended.seen:
                print(
                    "\n".join(["numbers before the first step ended:", *listing(ended.seen, None)])
                )
            return 0
        finally:
            shutil.rmtree(run.path, ignore_errors=True)


def _runs(arms: Mapping[ArmKind, Command], seed: int) -> list[ScriptRun]:
    """Return the runs of a seed, the controls first."""
    controls: dict[str, str] = {}
    runs = []
    for kind, command in arms.items():
        run = ScriptRun(command, kind, seed)
        if kind == "treated":
            run = replace(run, controls=controls)
        else:
            controls["plain" if kind == "control" else kind] = run.name
        runs.append(run)
    return runs


@contextmanager
def _terminating(running: list[tuple[Process, ExitStack]]) -> Iterator[None]:
    """End all processes, and release their locks, if the block is left by an exception."""

    def leave(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal(SIGTERM, leave)
    try:
        yield
    except BaseException:
        for process, held in running:
            process.popen.terminate()
            process.popen.wait()
            held.close()
        raise
    finally:
        signal(SIGTERM, before)


def _title(run: ScriptRun) -> str:
    return f"{run.name_of_arm}{f' at {run.values}' if run.values else ''}, seed {run.seed}"
