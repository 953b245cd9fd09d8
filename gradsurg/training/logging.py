"""What a run writes down as it goes, and its outcome."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.loggers.base import Logger
from gradsurg.multitask.conflict import numbers
from gradsurg.sites.state_guard import untouched
from gradsurg.surgery.live import Live
from gradsurg.tasks.base import Data
from gradsurg.training.arms import Run
from gradsurg.training.counterfactual import Counterfactual, means
from gradsurg.training.hardware import hardware
from gradsurg.training.learned import learned_nothing
from gradsurg.training.loop import Step, outputs_of
from gradsurg.training.run_directory import CONFLICTS, EFFECTS, METRICS, RunDirectory

NOTHING: Mapping[str, float] = MappingProxyType({})

MOST_LOSSES = 1000  # that are kept to be looked at: each is a tensor on the device


@dataclass
class RunLog:
    """What a run writes down as it goes."""

    run: Run
    place: RunDirectory
    loggers: Sequence[Logger]
    seconds: list[float]
    loss: float = float("nan")
    done: int = 0
    diverged: bool = field(default=False)
    skipped: int = 0
    earlier_seconds: float = 0.0  # those before an interruption
    without: Counterfactual | None = None
    bad_step: int | None = None  # the first one whose loss was not finite
    _losses: list[tuple[int, Tensor]] = field(default_factory=list)  # since the last look

    @property
    def trained_s(self) -> float:
        """The seconds of all steps."""
        return self.earlier_seconds + sum(self.seconds)

    def took(self, step: Step) -> None:
        """Count a step."""
        self.seconds.append(step.seconds)
        if step.skipped:  # of which nothing is left
            self.skipped += 1
            return
        self._losses.append((step.done, step.loss))
        if len(self._losses) >= MOST_LOSSES:
            self._look()

    def _look(self) -> None:
        """Find the first loss that is not finite: a wait for the device, at logs only."""
        losses, self._losses = self._losses, []
        if self.bad_step is None and losses:
            well = torch.stack([loss for _, loss in losses]).isfinite().tolist()
            if not all(well):
                self.bad_step = losses[well.index(False)][0]

    def interval(
        self, done: int, loss: float, live: Live, others: Mapping[str, float] = NOTHING
    ) -> bool:
        """Log the interval that ends with step `done`; False if the run ends there: a loss was not
        finite, or what it is trained until is reached.

        `others` are what else is known there, by name.
        """
        self.done, self.loss = done, loss
        rows = live.effects.fetch()
        update = self.without.fetch() if self.without is not None else {}
        values = {"train/loss": loss, **update, **others}
        self.place.append_metrics({"step": done, **values})
        self.place.append_effects([{"step": done, **row} for row in rows])
        conflicts = [conflict.row() for conflict in live.conflicts.fetch()]
        self.place.append_conflicts(conflicts)
        times = {"time/step_ms": 1000 * median(self.seconds[-100:])}
        self._tell(done, {**values, **_newest(conflicts), **times}, rows)
        self._look()
        self.diverged = self.bad_step is not None or not isfinite(loss)
        return not self.diverged and not self.ended(others)

    def ended(self, tested: Mapping[str, float]) -> bool:
        """Whether a test has reached what the run is trained until."""
        until = self.run.schedule.until
        if until is None or not tested:
            return False
        until.check(tested)
        return until.holds(tested)

    def tested(self, done: int, loss: float, data: Data, model: nn.Module) -> dict[str, float]:
        """The task's metrics on the test data, at steps where they are due."""
        schedule = self.run.schedule
        every = schedule.eval_every
        due = every and (done % every == 0 or done == schedule.steps)
        return self._metrics("test", data, model) if due and isfinite(loss) else {}

    def again(self) -> None:
        """Tell the loggers what was logged before an interruption: to them this is a new run."""
        effects: dict[int, list[dict[str, Any]]] = {}
        for effect in self.place.read_rows(EFFECTS):
            effects.setdefault(effect["step"], []).append(effect)
        conflicts = self.place.read_rows(CONFLICTS)
        before = 0
        for row in self.place.read_rows(METRICS):
            values = {key: value for key, value in row.items() if "/" in key and value is not None}
            values |= _newest(own for own in conflicts if before <= own["step"] < row["step"])
            before = row["step"]
            self._tell(row["step"], values, effects.get(row["step"], []))

    def _tell(
        self, done: int, values: dict[str, float], rows: Sequence[Mapping[str, object]]
    ) -> None:
        for row in rows:
            prefix = f"effect/{row['transform']}/{row['site']}"
            for name in ("seen", "calls", *EFFECT_NAMES):
                value = row[name]
                if isinstance(value, int | float):
                    values[f"{prefix}/{name}"] = value
        for logger in self.loggers:
            logger.log(done, values)

    def times(self) -> dict[str, float | None]:
        """Median step times, apart for the steps whose effect was measured."""
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
        """The outcome, on all training and all test examples, and what was `examined`."""
        run = self.run
        outcome: dict[str, object] = {
            "state": "diverged" if self.diverged else "finished",
            "arm": run.arm,
            "label": run.label,
            "seed": run.seed,
            "steps": self.done,
            "skipped_steps": self.skipped,
        }
        for part in ("train", "test"):
            metrics = self._metrics(part, data, model)
            outcome |= metrics
            if not all(map(isfinite, metrics.values())):
                outcome["state"] = "diverged"  # the last step can break what no loss has seen
        outcome |= examined
        if not all(map(isfinite, examined.values())):
            outcome["state"] = "diverged"
        if self.bad_step is not None:
            outcome["diverged_step"] = self.bad_step
        rows = self.place.read_rows(METRICS)
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

    def _metrics(
        self, part: Literal["train", "test"], data: Data, model: nn.Module
    ) -> dict[str, float]:
        """The task's metrics on all examples of a part, in the model's own precision.

        No surgery sees this, and training goes on as if it had not been.
        """
        inputs, targets = data.test_inputs, data.test_targets
        if part == "train":
            inputs, targets = data.train_inputs, data.train_targets
        device = self.run.device
        with untouched(model):
            outputs = outputs_of(model, inputs.to(device))
            metrics = self.run.task.metrics(outputs, targets.to(device))
        return {f"{part}/{name}": value for name, value in metrics.items()}


def _newest(conflicts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of the last conflict of each group."""
    return {key: value for row in conflicts for key, value in numbers(row).items()}


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None
