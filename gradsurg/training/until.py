"""The condition that ends a run before its last step."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

FORM = re.compile(r"\s*(test/[\w./-]+)\s*(>=|<=)\s*(\S+)\s*")
UNTIL, REACHED, STEP = "until", "until/reached", "until/step"


@dataclass(frozen=True)
class Until:
    """A test metric and the bound to reach: from below, or with `at_most` from above."""

    metric: str
    bound: float
    at_most: bool = False

    @classmethod
    def of(cls, text: str) -> "Until":
        """`test/accuracy >= 0.95` as a condition; a ValueError says what is wrong with it."""
        found = FORM.fullmatch(text)
        rule = 'must be as "test/accuracy >= 0.95": a test metric, >= or <=, a finite number'
        if found is None:
            raise ValueError(rule)
        metric, sign, bound = found.groups()
        try:
            number = float(bound)
        except ValueError:
            number = nan
        if not isfinite(number):
            raise ValueError(rule)
        return cls(metric, number, sign == "<=")

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.bound!r}"

    def check(self, metrics: Collection[str]) -> None:
        """Raise ValueError if a task with these test metrics can never reach it."""
        if self.metric not in metrics:
            raise ValueError(f"the task has no {self.metric}, it has {', '.join(metrics)}")

    def holds(self, values: Mapping[str, Any]) -> bool:  # Any: what JSON can hold
        """Whether these numbers have reached it; without the metric, or with NaN, they have not."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value <= self.bound if self.at_most else value >= self.bound

    def outcome(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, object]:
        """Whether a row of the metrics has reached it, 1 or 0, and the step of the first one."""
        steps = [row["step"] for row in rows if self.holds(row)]
        found: dict[str, object] = {UNTIL: str(self), REACHED: int(bool(steps))}
        return found | {STEP: steps[0]} if steps else found
