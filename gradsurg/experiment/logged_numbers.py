"""The log of a run: interval rows for its files and loggers, and the summary of its outcome."""

import platform
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from math import inf, isfinite, nan
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.core.live import Live
from gradsurg.effects.effects import NonFinite
from gradsurg.effects.summary import Row, effects_by_path
from gradsurg.experiment import processes
from gradsurg.experiment.idle import note_fields
from gradsurg.experiment.loop import Step, outputs_of
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import CONFLICTS, EFFECTS, METRICS, RunDirectory
from gradsurg.loggers.base import Logger
from gradsurg.multitask.conflict import numbers
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, Part, Task

MAX_PENDING_LOSSES = 1000  # losses kept on the device until they are copied to the host
MAX_TIMES = 10_000  # the newest step times, for medians

# A run has learned nothing if its train loss is not below this share of the best constant guess's,
# and no metric has covered more than this share of the way from chance to its best value.
MIN_LOSS_SHARE = 0.99
MAX_METRIC_SHARE = 0.1

CPU_INFO = Path("/proc/cpuinfo")


@dataclass
class RunLog:
    """The log of one run: step times, interval rows, divergence, and the summary.

    `trained_s` is the time of all steps, `bad_step` the first step with a loss that is not finite,
    `nonfinite` the transform that made the first NaN or infinity.
    """

    run: Run
    directory: RunDirectory
    loggers: Sequence[Logger]
    done: int = 0
    skipped: int = 0
    trained_s: float = 0.0
    diverged: bool = False
    bad_step: int | None = None
    nonfinite: NonFinite | None = None
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    _losses: list[tuple[int, Tensor]] = field(default_factory=list)  # since the last check

    def add_step(self, step: Step) -> None:
        """Record the time and the loss of a step."""
        self.seconds.append(step.seconds)
        self.trained_s += step.seconds
        if step.skipped:  # its loss left nothing in the weights
            self.skipped += 1
            return
        self._losses.append((step.done, step.loss))
        if len(self._losses) >= MAX_PENDING_LOSSES:
            self.fetch_loss(step)

    def fetch_loss(self, step: Step) -> float:
        """Return the loss of a step, and find the first one since the last call that is not finite.

        One copy from the device, at logs only.
        """
        losses, self._losses = self._losses, []
        stacked = torch.stack([*(loss for _, loss in losses), step.loss]).flatten()
        *values, last = processes.mean(stacked).tolist()
        if self.bad_step is None and not isfinite(sum(values)):
            pairs = zip(losses, values, strict=True)
            self.bad_step = next((done for (done, _), value in pairs if not isfinite(value)), None)
        return last

    def interval(self, done: int, loss: float, live: Live, data: Data, model: nn.Module) -> bool:
        """Log the interval that ends with step `done`, with the task's metrics if they are due;
        return False if the run ends there.

        Metrics are computed on the validation data, or on the test data if there is none. The run
        ends early if a loss was not finite or `until` is reached.
        """
        schedule, every, self.done = self.run.schedule, self.run.schedule.eval_every, done
        due = every and (done % every == 0 or done == schedule.steps) and isfinite(loss)
        tested = self._metrics(data.watched, data, model) if due else {}
        rows = live.effects.fetch()
        if not self.run.shadow:
            self.nonfinite = live.effects.first_nonfinite
        examples = {
            f"examples/{label}/{name}": value
            for label, source in live.examples.items()
            for name, value in source.fetch().items()
        }
        skipped = {f"skipped_steps/{label}": n for label, n in live.skipped_steps.items()}
        values = {"train/loss": loss, **examples, **skipped, **tested}
        self.directory.append(METRICS, [{"step": done, **values}])
        self.directory.append(EFFECTS, [{"step": done, **row} for row in rows])
        conflicts = [conflict.row() for conflict in live.conflicts.fetch()]
        if conflicts:  # of a multi-task run
            self.directory.append(CONFLICTS, conflicts)
        if self.loggers:
            times = {"time/step_ms": 1000 * median(islice(reversed(self.seconds), 100))}
            conflict_numbers = numbers(conflicts, log=schedule.log)
            self._log(done, {**values, **conflict_numbers, **times}, rows, live.effects.rows())
        self.diverged = self.bad_step is not None or not isfinite(loss)
        return not self.diverged and not (schedule.until and schedule.until.holds(tested))

    def replay(self) -> None:
        """Send the loggers all rows from before an interruption: for them this is a new run."""
        rows, conflicts = map(self.directory.read_rows, (EFFECTS, CONFLICTS))
        effects = {step: [*own] for step, own in groupby(rows, itemgetter("step"))}
        seen = [*{(row["transform"], row["site"]): row for row in rows}.values()]
        before = 0
        for row in self.directory.read_rows(METRICS):
            values = {key: value for key, value in row.items() if "/" in key and value is not None}
            recent = [one for one in conflicts if before <= one["step"] < row["step"]]
            values |= numbers(recent, log=self.run.schedule.log)
            before = row["step"]
            self._log(before, values, effects.get(before, []), seen)

    def _log(
        self, done: int, values: dict[str, float], effects: Sequence[Row], seen: Sequence[Row]
    ) -> None:
        values |= effects_by_path(effects, seen, self.run.schedule.log)
        for logger in self.loggers:
            logger.log(done, values)

    def summary(
        self,
        data: Data,
        model: nn.Module,
        examined: Mapping[str, float],
        notes: Mapping[str, str],
    ) -> dict[str, object]:
        """Return the outcome, with metrics on all examples of each part.

        A run has diverged too if one of its last numbers is not finite. `notes` are given with
        their details.
        """
        run, schedule = self.run, self.run.schedule
        metrics: dict[str, float] = {}
        for part in dict.fromkeys(("train", data.watched, "test")):
            metrics |= self._metrics(part, data, model)
        metrics |= examined
        diverged = self.diverged or not all(map(isfinite, metrics.values()))
        outcome: dict[str, object] = {
            "state": "diverged" if diverged else "finished",
            "arm": run.arm,
            "label": run.label,
            "seed": run.seed,
            "steps": self.done,
            "skipped_steps": self.skipped,
        }
        if data.start is None:  # a point in the plane is tested at no examples
            for part in dict.fromkeys((data.watched, "test")):
                outcome[f"{part}_examples"] = len(data.part(part)[1])
        outcome |= metrics
        if self.bad_step is not None:
            outcome["diverged_step"] = self.bad_step
        if diverged and self.nonfinite is not None:
            outcome["nonfinite"] = self.nonfinite._asdict()
        rows = self.directory.read_rows(METRICS)
        if schedule.until is not None:
            outcome |= schedule.until.outcome(rows)
        if not diverged:
            outcome["learned_nothing"] = learned_nothing(run.task, data, metrics, rows)
            if chance := run.task.chance(data.train_targets):
                outcome["chance_loss"] = chance.loss
        every = schedule.effects_every
        return outcome | {
            **self._times(every),
            "time/train_s": self.trained_s,
            "hardware": hardware(run.device),
            "effects_every": every,
            **note_fields(notes),
        }

    def _times(self, every: int) -> dict[str, float | None]:
        """Return the median step time without, and with, measurement of effects."""
        steps = [*enumerate(self.seconds, self.done - len(self.seconds))]
        plain = [seconds for step, seconds in steps if not every or step % every]
        measured = [seconds for step, seconds in steps if every and step % every == 0]
        times = {"time/step_ms": plain or measured, "time/measured_step_ms": measured}
        return {name: 1000 * median(own) if own else None for name, own in times.items()}

    def _metrics(self, part: Part, data: Data, model: nn.Module) -> dict[str, float]:
        """Return the task's metrics on all examples of a part, in the model's own precision.

        No surgery acts on this evaluation, and training continues as if it had not happened.
        """
        inputs, targets = (tensor.to(self.run.device) for tensor in data.part(part))
        with untouched(model):
            metrics = self.run.task.metrics(outputs_of(model, inputs), targets)
        return {f"{part}/{name}": value for name, value in metrics.items()}


def learned_nothing(
    task: Task, data: Data, last: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> dict[str, object]:
    """Return the evidence that a finished run is no better than chance; empty if it has learned.

    `last` are its metrics at the end, `rows` its logged ones. If the task defines no chance level,
    the evidence is that no logged loss is below the first one. Any: any JSON value.
    """
    train, test = task.chance(data.train_targets), task.chance(data.test_targets)
    if train is None or test is None:
        losses: list[Any] = [row.get("train/loss") for row in (*rows, last)]
        if len(losses) < 3 or None in losses or min(losses[1:]) < losses[0]:
            return {}
        what = f"the first one that was logged, at step {rows[0]['step']}, was"
        return {"metric": "train/loss", "beside": losses[0], "what": what}
    dead = last.get("train/loss", nan) >= MIN_LOSS_SHARE * train.loss and all(
        last.get(f"{part}/{chance.metric}", inf)
        <= chance.value + MAX_METRIC_SHARE * (chance.best - chance.value)
        for part, chance in (("train", train), ("test", test))
    )
    evidence = {"metric": f"test/{test.metric}", "beside": test.value, "what": test.description}
    return evidence if dead else {}


def hardware(device: torch.device) -> str:
    """Return machine type, processor or GPU, CPU threads and PyTorch's version; no host name."""
    count, name = torch.get_num_threads(), device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(device)
    elif name == "cpu":
        lines = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.exists() else ""
        model = re.search(r"^model name\s*:(.*)", lines, re.MULTILINE)
        name = model[1].strip() if model else platform.processor() or "unknown processor"
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return f"{platform.machine()}, {name}, {threads}, torch {torch.__version__}"
