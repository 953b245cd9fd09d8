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
from gradsurg.stats import paired_difference, verdict
from gradsurg.surgery.surgery import Surgery
from gradsurg.torch_internals import random_state
from gradsurg.training.controls import ActingControl, control_interventions

Numbers = float | Mapping[str, float]
TrainFn = Callable[[nn.Module, Surgery], Numbers]


@dataclass(frozen=True)
class Comparison:
    """The outcomes of the treated and the control arm, one mapping of numbers per seed."""

    seeds: tuple[int, ...]
    treated: tuple[Mapping[str, float], ...]
    control: tuple[Mapping[str, float], ...]

    def table(self) -> str:
        """Return the mean outcomes, paired differences, 95 % intervals and verdicts as text."""
        rows = [["", "treated", "control", "difference", "95 % interval", "verdict"]]
        for key in self.treated[0]:
            pairs = [(a[key], b[key]) for a, b in zip(self.treated, self.control, strict=True)]
            rows.append(_row(key, [(a, b) for a, b in pairs if isfinite(a) and isfinite(b)]))
            lost = sum(not (isfinite(a) and isfinite(b)) for a, b in pairs)
            if lost:
                rows[-1][-1] += f", {lost} of {len(pairs)} pairs not finite"
        return aligned(rows)


def compare(
    make_model: Callable[[], nn.Module],
    train: TrainFn,
    surgery: Surgery,
    seeds: int = 5,
    control: Literal["plain"] | ActingControl = "plain",
) -> Comparison:
    """Train with `surgery` and without it, seed by seed, and restore the random generators.

    `train(model, surgery)` attaches the surgery it is given, trains, and returns a number or a dict
    of numbers. The `plain` control gets an empty surgery, `norm_matched` the direction of the plain
    gradient with the norm of the treated one, `update_norm_matched` the same of the optimizer's
    update, `placebo` the norm of the treated gradient and its cosine to the plain one in a random
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


def _row(key: str, pairs: list[tuple[float, float]]) -> list[str]:
    if not pairs:
        return [key, "-", "-", "-", "-", "nothing to compare"]
    treated, control = [a for a, _ in pairs], [b for _, b in pairs]
    difference = paired_difference(treated, control)
    interval = "-"
    if difference.low is not None and difference.high is not None:
        interval = f"{difference.low:+.3g} to {difference.high:+.3g}"
    means = number(fmean(treated)), number(fmean(control))
    return [key, *means, f"{difference.mean:+.3g}", interval, verdict(difference)]
