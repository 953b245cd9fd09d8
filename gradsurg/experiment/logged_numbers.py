"""The log of a run: interval rows for its files and loggers, and the summary of its outcome."""

import platform
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradsurg.core.live import Live
from gradsurg.effects.effects import NonFinite
from gradsurg.effects.summary import Row, effects_by_path
from gradsurg.experiment.counterfactual import Counterfactual, means
from gradsurg.experiment.loop import Step, outputs_of
from gradsurg.experiment.ranks import ALONE, Ranks
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import CONFLICTS, EFFECTS, METRICS, RunDirectory
from gradsurg.loggers.base import Logger
from gradsurg.multitask.conflict import numbers
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, Part, Task

NO_METRICS: Mapping[str, float] = MappingProxyType({})

MAX_PENDING_LOSSES = 1000  # losses kept on the device until they are copied to the host
MAX_TIMES = 10_000  # the newest step times, for medians

# A run has learned nothing if its train loss is not below this share of the best constant guess's,
# and no metric has covered more than this share of the way from chance to its best value.
MIN_LOSS_SHARE = 0.99
MAX_METRIC_SHARE = 0.1

CPU_INFO = Path("/proc/cpuinfo")


@dataclass
class RunLog:
    """The log of one run: step times, interval rows, divergence, and the summary."""

    run: Run
    directory: RunDirectory
    loggers: Sequence[Logger]
    loss: float = float("nan")
    done: int = 0
    diverged: bool = field(default=False)
    skipped: int = 0
    trained_s: float = 0.0  # the seconds of all steps
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    counterfactual: Counterfactual | None = None
    nonfinite: NonFinite | None = None  # the transform that made the first NaN or infinity
    bad_step: int | None = None  # the first step with a loss that is not finite
    tested: Callable[[Part], Mapping[str, float]] | None = None  # metrics; None: run the model
    ranks: Ranks = ALONE
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
        *values, last = self.ranks.mean(stacked).tolist()
        if self.bad_step is None:
            steps = zip(losses, values, strict=True)
            self.bad_step = next((done for (done, _), loss in steps if not isfinite(loss)), None)
        return last

    def add_losses(self, done: int, losses: Sequence[float], seconds: float) -> None:
        """Record the losses of the steps up to `done`, and the seconds of all of them."""
        self.trained_s += seconds
        if self.bad_step is None and not isfinite(sum(losses)):
            steps = enumerate(losses, done + 1 - len(losses))
            self.bad_step = next((step for step, loss in steps if not isfinite(loss)), None)

    def interval(
        self, done: int, loss: float, live: Live, tested: Mapping[str, float] = NO_METRICS
    ) -> bool:
        """Log the interval that ends with step `done`; return False if the run ends there.

        It ends early if a loss was not finite or `until` is reached. `tested` are validation or
        test metrics.
        """
        self.done, self.loss = done, loss
        rows = live.effects.fetch()
        if not self.run.shadow:
            self.nonfinite = live.effects.first_nonfinite
        update = self.counterfactual.fetch() if self.counterfactual is not None else {}
        examples = {
            f"examples/{label}/{name}": value
            for label, source in live.examples.items()
            for name, value in source.fetch().items()
        }
        skipped = {f"skipped_steps/{label}": n for label, n in live.skipped_steps.items()}
        values = {"train/loss": loss, **update, **examples, **skipped, **tested}
        self.directory.append(METRICS, [{"step": done, **values}])
        self.directory.append(EFFECTS, [{"step": done, **row} for row in rows])
        conflicts = [conflict.row() for conflict in live.conflicts.fetch()]
        if conflicts:  # of a multi-task run
            self.directory.append(CONFLICTS, conflicts)
        if self.loggers:
            times = {"time/step_ms": 1000 * median([*self.seconds][-100:])}
            conflict_numbers = numbers(conflicts, log=self.run.schedule.log)
            self._log(done, {**values, **conflict_numbers, **times}, rows, live.effects.rows())
        self.diverged = self.bad_step is not None or not isfinite(loss)
        return not self.diverged and not self._until_reached(tested)

    def _until_reached(self, tested: Mapping[str, float]) -> bool:
        until = self.run.schedule.until
        if until is None or not tested:
            return False
        until.check(tested)
        return until.holds(tested)

    def test(self, done: int, loss: float, data: Data, model: nn.Module) -> dict[str, float]:
        """Return the task's metrics if they are due at step `done`, else {}.

        On the validation data; on the test data if there are none.
        """
        schedule = self.run.schedule
        every = schedule.eval_every
        due = every and (done % every == 0 or done == schedule.steps)
        return self._metrics(data.watched, data, model) if due and isfinite(loss) else {}

    def replay(self) -> None:
        """Send the loggers all rows from before an interruption: for them this is a new run."""
        effects: dict[int, list[dict[str, Any]]] = {}
        rows = self.directory.read_rows(EFFECTS)
        for effect in rows:
            effects.setdefault(effect["step"], []).append(effect)
        seen = [*{(row["transform"], row["site"]): row for row in rows}.values()]
        conflicts = self.directory.read_rows(CONFLICTS)
        before = 0
        for row in self.directory.read_rows(METRICS):
            values = {key: value for key, value in row.items() if "/" in key and value is not None}
            recent = [one for one in conflicts if before <= one["step"] < row["step"]]
            values |= numbers(recent, log=self.run.schedule.log)
            before = row["step"]
            self._log(row["step"], values, effects.get(row["step"], []), seen)

    def _log(
        self, done: int, values: dict[str, float], effects: Sequence[Row], seen: Sequence[Row]
    ) -> None:
        values |= effects_by_path(effects, seen, self.run.schedule.log)
        for logger in self.loggers:
            logger.log(done, values)

    def times(self) -> dict[str, float | None]:
        """Return the median step time without, and with, measurement of effects."""
        every = self.run.schedule.effects_every
        first = self.done - len(self.seconds)
        steps = list(enumerate(self.seconds, first))
        plain = [seconds for step, seconds in steps if not every or step % every]
        measured = [seconds for step, seconds in steps if every and step % every == 0]
        return {
            "time/step_ms": _median_ms(plain or measured),
            "time/measured_step_ms": _median_ms(measured),
        }

    def summary(
        self, data: Data, model: nn.Module, examined: Mapping[str, float], notes: list[str]
    ) -> dict[str, object]:
        """Return the outcome, with metrics on all examples of each part."""
        run = self.run
        outcome: dict[str, object] = {
            "state": "diverged" if self.diverged else "finished",
            "arm": run.arm,
            "label": run.label,
            "seed": run.seed,
            "steps": self.done,
            "skipped_steps": self.skipped,
        }
        if data.start is None:  # a point in the plane is tested at no examples
            outcome["test_examples"] = len(data.test_targets)
        parts: dict[Part, None] = dict.fromkeys(("train", data.watched, "test"))
        for part in parts:
            metrics = self._metrics(part, data, model)
            outcome |= metrics
            if not all(map(isfinite, metrics.values())):
                outcome["state"] = "diverged"  # the last step can diverge after the last loss
        outcome |= examined
        if not all(map(isfinite, examined.values())):
            outcome["state"] = "diverged"
        if self.bad_step is not None:
            outcome["diverged_step"] = self.bad_step
        if outcome["state"] == "diverged" and self.nonfinite is not None:
            outcome["nonfinite"] = self.nonfinite._asdict()
        rows = self.directory.read_rows(METRICS)
        outcome |= means(rows)
        if run.schedule.until is not None:
            outcome |= run.schedule.until.outcome(rows)
        if outcome["state"] == "finished":
            outcome["learned_nothing"] = learned_nothing(run.task, data, outcome, rows)
        outcome |= self.times()
        outcome["time/train_s"] = self.trained_s
        outcome["hardware"] = hardware(run.device)
        outcome["effects_every"] = run.schedule.effects_every
        outcome["notes"] = notes
        return outcome

    def _metrics(self, part: Part, data: Data, model: nn.Module) -> dict[str, float]:
        """Return the task's metrics on all examples of a part, in the model's own precision.

        No surgery acts on this evaluation, and training continues as if it had not happened.
        """
        if self.tested is not None:
            return {f"{part}/{name}": value for name, value in self.tested(part).items()}
        inputs, targets = data.part(part)
        device = self.run.device
        with untouched(model):
            outputs = outputs_of(model, inputs.to(device))
            metrics = self.run.task.metrics(outputs, targets.to(device))
        return {f"{part}/{name}": value for name, value in metrics.items()}


def learned_nothing(
    task: Task, data: Data, outcome: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return the evidence that a finished run is no better than chance; empty if it has learned.

    `outcome` has its metrics at the end, `rows` its logged metrics. If the task defines no chance
    level, the evidence is that no logged loss is below the first one.
    """
    train, test = task.chance(data.train_targets), task.chance(data.test_targets)
    if train is None or test is None:
        return _never_below_first(outcome, rows)
    loss = _number(outcome, "train/loss")
    if loss is None or loss < MIN_LOSS_SHARE * train.loss:
        return {}
    for part, chance in (("train", train), ("test", test)):
        value = _number(outcome, f"{part}/{chance.metric}")
        limit = chance.value + MAX_METRIC_SHARE * (chance.best - chance.value)
        if value is None or value > limit:
            return {}
    return {"metric": f"test/{test.metric}", "beside": test.value, "what": test.description}


def _never_below_first(
    outcome: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    values = [_number(row, "train/loss") for row in [*rows, outcome]]
    losses = [loss for loss in values if loss is not None]
    if len(losses) < 3 or len(losses) < len(values) or min(losses[1:]) < losses[0]:
        return {}
    what = f"the first one that was logged, at step {rows[0]['step']}, was"
    return {"metric": "train/loss", "beside": losses[0], "what": what}


def _number(row: Mapping[str, object], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def hardware(device: torch.device) -> str:
    """Return machine type, processor or GPU, CPU threads and PyTorch's version; no host name."""
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return f"{platform.machine()}, {_processor(device)}, {threads}, torch {torch.__version__}"


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return _cpu_model(CPU_INFO)


@lru_cache(maxsize=4)
def _cpu_model(info: Path) -> str:
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None
