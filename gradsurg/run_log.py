"""What a run writes down as it goes, and its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from torch import nn

from gradsurg.arms import Run
from gradsurg.effects import NUMBERS
from gradsurg.live import Live
from gradsurg.sinks.base import Sink
from gradsurg.store import EFFECTS, METRICS, RunDirectory
from gradsurg.tasks.base import Data
from gradsurg.train import outputs_of


@dataclass
class RunLog:
    """What a run writes down as it goes."""

    run: Run
    place: RunDirectory
    sinks: Sequence[Sink]
    seconds: list[float]
    loss: float = float("nan")
    done: int = 0
    diverged: bool = field(default=False)

    def interval(self, done: int, loss: float, live: Live) -> bool:
        """Log the interval that ends with step `done`; False if the loss is no longer finite."""
        self.done, self.loss = done, loss
        rows = live.effects.fetch()
        self.place.append_metrics({"step": done, "train/loss": loss})
        self.place.append_effects([{"step": done, **row} for row in rows])
        self._tell(done, loss, rows, {"time/step_ms": 1000 * median(self.seconds[-100:])})
        self.diverged = not isfinite(loss)
        return not self.diverged

    def again(self) -> None:
        """Tell the sinks what was logged before an interruption: to them this is a new run."""
        effects: dict[int, list[dict[str, Any]]] = {}
        for effect in self.place.read_rows(EFFECTS):
            effects.setdefault(effect["step"], []).append(effect)
        for row in self.place.read_rows(METRICS):
            self._tell(row["step"], row["train/loss"], effects.get(row["step"], []), {})

    def _tell(
        self, done: int, loss: float, rows: Sequence[Mapping[str, object]], times: dict[str, float]
    ) -> None:
        values = {"train/loss": loss, **times}
        for row in rows:
            prefix = f"effect/{row['transform']}/{row['site']}"
            for name in ("seen", "calls", *NUMBERS):
                value = row[name]
                if isinstance(value, int | float):
                    values[f"{prefix}/{name}"] = value
        for sink in self.sinks:
            sink.log(done, values)

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

    def summary(self, data: Data, model: nn.Module, notes: list[str]) -> dict[str, object]:
        """The outcome, on all training and all test examples."""
        run = self.run
        outcome: dict[str, object] = {
            "state": "diverged" if self.diverged else "finished",
            "arm": run.arm,
            "label": run.label,
            "seed": run.seed,
            "steps": self.done,
        }
        parts = {
            "train": (data.train_inputs, data.train_targets),
            "test": (data.test_inputs, data.test_targets),
        }
        for part, (inputs, targets) in parts.items():
            outputs = outputs_of(model, inputs.to(run.device))
            for name, value in run.task.metrics(outputs, targets.to(run.device)).items():
                outcome[f"{part}/{name}"] = value
                if not isfinite(value):  # the last step can break what no loss has seen
                    outcome["state"] = "diverged"
        outcome |= self.times()
        outcome["effects_every"] = run.schedule.effects_every
        outcome["notes"] = notes
        return outcome


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None
