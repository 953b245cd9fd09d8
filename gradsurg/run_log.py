"""What a run writes down as it goes, and its outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from torch import nn

from gradsurg.arms import Run
from gradsurg.counterfactual import NUMBERS as UPDATE_NUMBERS
from gradsurg.counterfactual import SAMPLED, Counterfactual, means
from gradsurg.effects import NUMBERS
from gradsurg.live import Live
from gradsurg.sinks.base import Sink
from gradsurg.store import EFFECTS, METRICS, RunDirectory
from gradsurg.tasks.base import Data
from gradsurg.train import outputs_of

UPDATE = (SAMPLED, *UPDATE_NUMBERS)


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
    without: Counterfactual | None = None

    def interval(self, done: int, loss: float, live: Live) -> bool:
        """Log the interval that ends with step `done`; False if the loss is no longer finite."""
        self.done, self.loss = done, loss
        rows = live.effects.fetch()
        update = self.without.fetch() if self.without is not None else {}
        self.place.append_metrics({"step": done, "train/loss": loss, **update})
        self.place.append_effects([{"step": done, **row} for row in rows])
        self._tell(done, loss, rows, update | {"time/step_ms": 1000 * median(self.seconds[-100:])})
        self.diverged = not isfinite(loss)
        return not self.diverged

    def again(self) -> None:
        """Tell the sinks what was logged before an interruption: to them this is a new run."""
        effects: dict[int, list[dict[str, Any]]] = {}
        for effect in self.place.read_rows(EFFECTS):
            effects.setdefault(effect["step"], []).append(effect)
        for row in self.place.read_rows(METRICS):
            update = {key: row[key] for key in UPDATE if row.get(key) is not None}
            self._tell(row["step"], row["train/loss"], effects.get(row["step"], []), update)

    def _tell(
        self, done: int, loss: float, rows: Sequence[Mapping[str, object]], more: dict[str, float]
    ) -> None:
        values = {"train/loss": loss, **more}
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
        outcome |= means(self.place.read_rows(METRICS))
        outcome |= self.times()
        outcome["effects_every"] = run.schedule.effects_every
        outcome["notes"] = notes
        return outcome


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None
