"""Compare training with and without a surgery, seed by seed, in a user's own training function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import nn

from gradsurg.effects.tables import aligned, number
from gradsurg.hooks.intervention import Intervention
from gradsurg.loggers.base import RunInfo
from gradsurg.loggers.console import Console
from gradsurg.stats import (
    Difference,
    benjamini_hochberg,
    paired_difference,
    sign_test_p_value,
    verdict,
)
from gradsurg.surgery.surgery import Surgery
from gradsurg.torch_internals import random_state
from gradsurg.training.controls import ActingControl, control_interventions

Numbers = float | Mapping[str, float]
TrainFn = Callable[[nn.Module, Surgery], Numbers]


@dataclass(frozen=True)
class Comparison:
    """The outcomes of the treated and the control arm, one mapping of numbers per seed.

    The first number carries the verdict; the p-values of all others are corrected together (q).
    """

    seeds: tuple[int, ...]
    treated: tuple[Mapping[str, float], ...]
    control: tuple[Mapping[str, float], ...]

    def table(self) -> str:
        """Return the outcomes of both arms, their paired differences and the verdicts as text.

        First the seeds that are not finite in each arm, with McNemar's exact p. Then, over the
        seeds that are finite in both: means, the seeds with a higher outcome, median and mean of
        the difference with their 95 % intervals, the sign-flip p, and q of all numbers but the
        first.
        """
        pairs = {key: self._finite(key) for key in self.treated[0]}
        differences = {
            key: paired_difference([a for a, _ in finite], [b for _, b in finite])
            if finite
            else None
            for key, finite in pairs.items()
        }
        p_values = [one and one.p_value for one in differences.values()]
        q_values = [None, *benjamini_hochberg(p_values[1:])]
        rows = [
            _row(key, pairs[key], one, q_value)
            for (key, one), q_value in zip(differences.items(), q_values, strict=True)
        ]
        shown = [k for k in range(len(_HEADS)) if k == 0 or any(row[k] for row in rows)]
        table = aligned([[row[k] for k in shown] for row in [list(_HEADS), *rows]])
        return "\n\n".join(text for text in (self._diverged(), table) if text)

    def _finite(self, key: str) -> list[tuple[float, float]]:
        """Return a number of both arms for each seed in which it is finite in both."""
        pairs = [(a[key], b[key]) for a, b in zip(self.treated, self.control, strict=True)]
        return [(a, b) for a, b in pairs if isfinite(a) and isfinite(b)]

    def _diverged(self) -> str:
        """Return how many seeds have a number that is not finite; empty if none."""
        lost = [
            tuple(not all(map(isfinite, arm.values())) for arm in pair)
            for pair in zip(self.treated, self.control, strict=True)
        ]
        if not any(map(any, lost)):
            return ""
        p_value = sign_test_p_value(lost.count((True, False)), lost.count((False, True)))
        treated, control = map(sum, zip(*lost, strict=True))
        return (
            f"{treated} of {len(lost)} seeds not finite in the treated arm, {control} of "
            f"{len(lost)} in the control arm (exact McNemar p {p_value:.3g}).\n"
            "The table is over the seeds that are finite in both."
        )


_HEADS = (
    "",
    "treated",
    "control",
    "higher",
    "median",
    "its 95 % interval",
    "mean",
    "its 95 % interval",
    "p",
    "q",
    "verdict",
)


def compare(
    make_model: Callable[[], nn.Module],
    train: TrainFn,
    surgery: Surgery,
    seeds: int = 8,
    control: Literal["plain"] | ActingControl = "plain",
) -> Comparison:
    """Train with `surgery` and without it, seed by seed, and restore the random generators.

    `train(model, surgery)` attaches the surgery it is given, trains, and returns a number or a dict
    of numbers, of which the first carries the verdict. With fewer than 6 seeds no exact test can be
    significant.

    The `plain` control gets an empty surgery, `norm_matched` the direction of the plain gradient
    with the norm of the treated one, `update_norm_matched` the same of the optimizer's update,
    `placebo` the norm of the treated gradient and its cosine to the plain one in a random
    direction. On a terminal and in a notebook the progress is shown.

    Raises TypeError for an argument of another kind, and ValueError if `seeds` < 1; if the control
    is unknown or not for this surgery; if the surgery was never attached; or if the arms return
    different keys.
    """
    _check(make_model, train, surgery, seeds)
    if seeds < 1:
        raise ValueError(f"seeds: must be >= 1, found {seeds}")
    controls = () if control == "plain" else control_interventions(surgery.interventions, control)
    arms: tuple[list[Mapping[str, float]], ...] = ([], [])
    console = Console()
    console.expect(2 * seeds)
    is_shown = console.is_updated
    try:
        for seed in range(seeds):
            for arm, interventions in zip(arms, (surgery.interventions, controls), strict=True):
                if is_shown:
                    name = "treated" if arm is arms[0] else "control"
                    label = f"seed {seed}"
                    console.start(RunInfo("", name, label, seed, Path(), {}, (), total_steps=0))
                arm.append(_outcome(make_model, train, interventions, seed))
                if arm[-1].keys() != arms[0][0].keys():
                    raise ValueError(
                        f"train returned {list(arm[-1])}, before it {list(arms[0][0])}"
                    )
                if is_shown:
                    console.finish("finished", arm[-1])
    finally:
        console.abandon()
    return Comparison(tuple(range(seeds)), tuple(arms[0]), tuple(arms[1]))


def _outcome(
    make_model: Callable[[], nn.Module],
    train: TrainFn,
    interventions: Sequence[Intervention],
    seed: int,
) -> Mapping[str, float]:
    """Train one run from its seed; return its numbers."""
    with random_state.preserved(), torch.random.fork_rng():  # the latter: every CUDA device
        random_state.seed(seed)
        given = Surgery(*interventions, seed=seed)
        returned = train(make_model(), given)
    if interventions and not given.was_attached:
        raise ValueError(
            "train did not attach the surgery that it was given: both arms are the same; "
            "`with surgery.attach(model, optimizer):` goes around its loop"
        )
    numbers = returned if isinstance(returned, Mapping) else {"outcome": returned}
    for key, outcome in numbers.items():
        try:
            float(outcome)
        except (TypeError, ValueError) as error:
            raise TypeError(f"train: returned {key}={outcome!r}, not a number") from error
    return returned if isinstance(returned, Mapping) else {"outcome": float(returned)}


def _check(make_model: object, train: object, surgery: object, seeds: object) -> None:
    """Raise TypeError for an argument of the wrong kind, before anything is trained."""
    if isinstance(make_model, nn.Module) or not callable(make_model):
        kind = type(make_model).__name__
        raise TypeError(f"make_model: must be a function that returns a new model, found a {kind}")
    if not _takes(make_model, 0):
        name = getattr(make_model, "__name__", repr(make_model))
        raise TypeError(f"make_model: is called without arguments, found {name}")
    if not callable(train) or not _takes(train, 2):
        name = getattr(train, "__name__", repr(train))
        raise TypeError(f"train: is called as train(model, surgery), found {name}")
    if not isinstance(surgery, Surgery):
        raise TypeError(f"surgery: must be a Surgery, found {surgery!r}")
    if not isinstance(seeds, int):
        raise TypeError(f"seeds: must be a whole number, found {seeds!r}")


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _row(
    key: str,
    pairs: Sequence[tuple[float, float]],
    difference: Difference | None,
    q_value: float | None,
) -> list[str]:
    if difference is None:
        return [key, *[""] * (len(_HEADS) - 2), "nothing to compare"]
    means = [number(fmean(values)) for values in zip(*pairs, strict=True)]
    p_values = [f"{p:.3g}" if p is not None else "" for p in (difference.p_value, q_value)]
    return [
        key,
        *means,
        f"{difference.higher}/{difference.n}",
        f"{difference.median:+.3g}",
        _interval(difference.median_interval),
        f"{difference.mean:+.3g}",
        _interval((difference.low, difference.high)),
        *p_values,
        verdict(difference, q_value),
    ]


def _interval(ends: tuple[float | None, float | None] | None) -> str:
    if ends is None or ends[0] is None or ends[1] is None:
        return ""
    return f"{ends[0]:+.3g} to {ends[1]:+.3g}"
