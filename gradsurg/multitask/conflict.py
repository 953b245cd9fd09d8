"""How much the gradients of several tasks disagree, in numbers, all from their Gramian."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import inf, isfinite, nan
from typing import Any

import numpy as np

from gradsurg.effects.tables import aligned
from gradsurg.multitask.others import Made, Other, others_of, ratio
from gradsurg.torch_internals.autograd import undisturbed

KEPT = 1000  # conflicts that wait to be fetched
AT_ONCE = 50  # whose numbers are made together, where no fetch asks for them before
TALLIES = 20  # sets of tasks whose means are kept apart
SAID = {
    "conflict_rate": "conflict rate",
    "norm_spread": "norm spread",
    "cosine_to_mean": "cosine to mean",
    "norm_to_mean": "norm to mean",
}


@dataclass(frozen=True)
class Conflict:
    """The gradients g_i of one group at one step, and the update d that was made of them.

    `norms` are |g_i|; `cosines` those of each pair, a matrix; `conflict_rate` the share of pairs
    with a cosine below zero; `norm_spread` the largest norm over the smallest that is not zero;
    `condition` the condition number of the matrix of cosines; `weights` the w of d = sum w_i g_i
    where there is one; `decrease` g_i . d, by how much the loss of each falls, to first order, for
    a step of 1; `cosine_to_mean` and `norm_to_mean` compare d with the mean of the gradients;
    `weight_entropy` is that of the weights' sizes, from 0 for one task alone to 1 for all alike.
    A number that does not exist is NaN.
    """

    step: int
    aggregator: str
    group: str
    tasks: list[str]
    norms: list[float]
    cosines: list[list[float]]
    conflict_rate: float
    norm_spread: float
    condition: float
    weights: list[float]
    decrease: list[float]
    cosine_to_mean: float
    norm_to_mean: float
    weight_entropy: float
    others: dict[str, Other] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """All of it, for a file."""
        return {
            **vars(self),
            "others": {name: dict(vars(one)) for name, one in self.others.items()},
        }


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row of a `Conflict` says, by paths, for a log; what does not exist is left out.

    Any: what JSON can hold.
    """
    tasks = row["tasks"]
    found = {name: row[name] for name in (*SAID, "condition", "weight_entropy")}
    for name in ("norms", "decrease", "weights"):
        path = name.rstrip("s")
        found |= {f"{path}/{task}": own for task, own in zip(tasks, row[name], strict=False)}
    for first, name in enumerate(tasks):
        for second in range(first):
            found[f"cosine/{tasks[second]}~{name}"] = row["cosines"][first][second]
    found |= {f"cosine_to/{other}": said["cosine"] for other, said in row["others"].items()}
    of = f"{row['aggregator']}/{row['group']}"
    paths = {f"conflict/{of}/{name}": number for name, number in found.items()}
    for other, said in row["others"].items():
        for task, weight in zip(tasks, said["weights"], strict=True):
            paths[f"others/{of}/{other}/weight/{task}"] = weight
    return {
        path: number
        for path, number in paths.items()
        if isinstance(number, int | float) and isfinite(number)
    }


def conflict_of(made: Made) -> Conflict:
    """The numbers of what was made."""
    g, weights, products = made.gramian.numpy(), made.weights, made.products
    norms = np.sqrt(np.diagonal(g))
    with np.errstate(all="ignore"):
        cosines = _cosines(g, norms)
    pairs = cosines[_below(len(g))]
    real = norms[norms != 0]
    mean = float(np.sqrt(max(g.mean(), 0.0)))
    return Conflict(
        step=made.context.step,
        aggregator=made.label,
        group=made.context.group,
        tasks=list(made.context.tasks),
        norms=norms.tolist(),
        cosines=cosines.tolist(),
        conflict_rate=_rate(pairs),
        norm_spread=ratio(float(real.max()), float(real.min())) if len(real) else nan,
        condition=_condition(cosines),
        weights=[] if weights is None else weights.tolist(),
        decrease=products.tolist(),
        cosine_to_mean=ratio(float(products.mean()), made.norm * mean),
        norm_to_mean=ratio(made.norm, mean),
        weight_entropy=nan if weights is None else _entropy(weights.numpy()),
    )


@cache
def _below(count: int) -> np.ndarray:
    """Where each pair of tasks stands once in a matrix."""
    return np.tri(count, k=-1, dtype=bool)


def _cosines(g: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Those of each pair, 0 where a gradient is zero, NaN where one is not finite."""
    safe = np.where(norms == 0, 1.0, norms)
    found = np.clip(g / np.outer(safe, safe), -1.0, 1.0)
    np.fill_diagonal(found, np.where(norms == 0, 0.0, np.where(np.isfinite(norms), 1.0, nan)))
    return found


def _rate(pairs: np.ndarray) -> float:
    """The share of the cosines that are below zero, of those that exist."""
    known = np.count_nonzero(np.isfinite(pairs))
    if not known:
        return nan if len(pairs) else 0.0
    return float(np.count_nonzero(pairs < 0) / known)


def _condition(cosines: np.ndarray) -> float:
    if not np.isfinite(cosines).all():
        return nan
    values = np.linalg.eigvalsh(cosines)
    least = values[0]
    return float(values[-1] / least) if least > 1e-15 * len(values) else inf


def _entropy(weights: np.ndarray) -> float:
    total = np.abs(weights).sum()
    if len(weights) < 2 or not np.isfinite(total) or total == 0:
        return nan
    shares = np.abs(weights) / total
    shares = shares[shares > 0]
    return abs(float((shares * np.log(shares)).sum() / np.log(len(weights))))


class Conflicts:
    """The conflicts of the measured steps: the newest until they are fetched, the means of all.

    Inside a step nothing is in the caches that all this needs: the numbers wait until some of them
    are made at once, and what other aggregators would have done waits for the fetch.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Made, bool]] = []
        self._fresh: deque[tuple[Conflict, Made | None]] = deque(maxlen=KEPT)
        self._tallies: dict[tuple[str, str, tuple[str, ...]], _Tally] = {}
        self._further = 0  # that were of still other tasks

    def add(self, made: Made, ask: bool = True) -> None:
        """One more was measured; the others are to be asked about it, or not."""
        self._waiting.append((made, ask))
        if len(self._waiting) == AT_ONCE:
            self._settle()

    def fetch(self) -> list[Conflict]:
        """Those since the last fetch, the newest thousand."""
        self._settle()
        with undisturbed(()):
            asked = iter(others_of([made for _, made in self._fresh if made is not None]))
        fresh = [
            conflict if made is None else replace(conflict, others=next(asked))
            for conflict, made in self._fresh
        ]
        self._fresh.clear()
        return fresh

    def table(self) -> str:
        """Means over the measured steps: how far tasks conflict, and what was made of each."""
        self._settle()
        parts = [tally.table(*key) for key, tally in self._tallies.items()]
        if self._further:
            parts.append(f"{self._further} more conflicts, of other sets of tasks, are in no mean")
        return "\n\n".join(parts) or "no conflict was measured"

    def _settle(self) -> None:
        """The numbers of all that wait."""
        waiting, self._waiting = self._waiting, []
        for made, ask in waiting:
            conflict = conflict_of(made)
            self._fresh.append((conflict, made if ask else None))
            key = conflict.aggregator, conflict.group, tuple(conflict.tasks)
            if key not in self._tallies and len(self._tallies) == TALLIES:
                self._further += 1
            else:
                self._tallies.setdefault(key, _Tally()).add(conflict)


class _Tally:
    """Sums over the measured steps of one group."""

    def __init__(self) -> None:
        self.count = 0
        self.spoiled = 0  # steps at which a gradient was not finite
        self.weighted = False
        self.sums: Any = 0.0  # Any: arrays from the first conflict on
        self.finite: Any = 0  # at how many of the steps each number existed

    def add(self, conflict: Conflict) -> None:
        self.count += 1
        self.spoiled += not all(map(isfinite, conflict.norms))
        self.weighted |= bool(conflict.weights)
        weights = conflict.weights or [nan] * len(conflict.tasks)
        columns = (conflict.norms, weights, conflict.decrease, *conflict.cosines)
        numbers = np.array([*(getattr(conflict, name) for name in SAID), *chain(*columns)])
        real = np.isfinite(numbers)
        self.sums = self.sums + np.where(real, numbers, 0.0)
        self.finite = self.finite + real

    def table(self, aggregator: str, group: str, tasks: Sequence[str]) -> str:
        with np.errstate(invalid="ignore"):
            means = self.sums / self.finite
        alone, each = means[: len(SAID)], means[len(SAID) :].reshape(-1, len(tasks))
        said = ", ".join(
            f"{text} {mean:.3g}" for text, mean in zip(SAID.values(), alone, strict=True)
        )
        cells = [["task", "norm", "weight", "decrease", *(f"cos {task}" for task in tasks)]]
        for task, numbers in zip(tasks, each.T, strict=True):
            cells.append([task, *(f"{number:.3g}" for number in numbers)])
        if not self.weighted:
            cells = [[*row[:2], *row[3:]] for row in cells]
        steps = "1 measured step" if self.count == 1 else f"{self.count} measured steps"
        if self.spoiled:
            steps += f", {self.spoiled} of them with a gradient that is not finite"
        return f"{aggregator} at {group}, {steps}: {said}\n{aligned(cells)}"
