"""Compare training with and without a surgery, seed by seed, in a user's own training function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.controls import ActingControl, control_interventions
from gradsurg.loggers.base import RunInfo
from gradsurg.loggers.console import Console
from gradsurg.plugins.extras import need
from gradsurg.stats import Margin, parse_margin
from gradsurg.torch_internals import random_state

if TYPE_CHECKING:
    import polars

Numbers = float | Mapping[str, float]
TrainFn = Callable[[nn.Module, Surgery], Numbers]
COLUMNS = ("metric", "treated", "control", "difference", "95 % interval", "p", "higher")
COLUMNS += ("verdict", "margin", "median", "effect size", "diverged")


@dataclass(frozen=True)
class Comparison:
    """The outcomes of the treated and the control arm, one mapping of numbers per seed.

    The verdict is about the first number. Numbers with "accuracy" in their name are fractions of 1.
    `margin` is the largest difference without practical importance, such as "0.5pp", 0.02 or "2%"
    of the control. `against` is the name of the control arm. A seed in which any number is not
    finite in either arm counts as diverged, and is in no mean.
    """

    seeds: tuple[int, ...]
    treated: tuple[Mapping[str, float], ...]
    control: tuple[Mapping[str, float], ...]
    margin: str | float | None = None
    against: str = "control"

    def frame(self) -> "polars.DataFrame":
        """Return a row for each number, with the columns that the report of a study has."""
        from gradsurg.report.compare import Pair, compare_values, with_q

        same = all(len({tuple(one.values()) for one in arm}) == 1 for arm in self._arms)
        states = [
            ["finished" if all(map(isfinite, one.values())) else "diverged" for one in arm]
            for arm in self._arms
        ]
        pairs = {
            key: [
                Pair(
                    seed,
                    treated=a[key] if "diverged" not in (state, beside) else None,
                    control=b[key],
                    state=state,
                    beside=beside,
                    same=same,
                )
                for seed, a, b, state, beside in zip(self.seeds, *self._arms, *states, strict=True)
            ]
            for key in self.treated[0]
        }
        about = {"arm": "the surgery", "against": self.against, "vacuous": ""}
        return with_q(compare_values(pairs, about, margin=self._margin))

    def verdict(self) -> str:
        """Return the verdict on the first number in one sentence."""
        from gradsurg.report.verdict import sentence

        text = sentence(self.frame(), margin=self._margin)
        return text[:1].upper() + text[1:]

    def table(self) -> str:
        """Return the means of both arms and their paired differences as text, one row a number.

        The interval inverts the sign-flip test; with fewer than 6 seeds the range is shown instead.
        """
        from gradsurg.report.tables import fitted, outcome_table

        rows = self.frame().to_dicts()
        return fitted(outcome_table(rows, columns=COLUMNS), ({"effect size"}, {"median"}))

    @property
    def _arms(self) -> tuple[tuple[Mapping[str, float], ...], ...]:
        return self.treated, self.control

    @property
    def _margin(self) -> Margin | None:
        return None if self.margin is None else parse_margin(self.margin)


def compare(
    make_model: Callable[[], nn.Module],
    train: TrainFn,
    surgery: Surgery,
    seeds: int = 8,
    control: Literal["plain"] | ActingControl = "plain",
    margin: str | float | None = None,
) -> Comparison:
    """Train with `surgery` and without it, seed by seed, and restore the random generators.

    Args:
        make_model: Returns a new model.
        train: `train(model, surgery)` attaches the surgery it is given, trains, and returns a
            number or a dict of numbers. The verdict is about the first number.
        seeds: The number of seeds. With fewer than 6 no exact test can be significant.
        control: `plain` trains with an empty surgery. `norm_matched` scales the plain gradient to
            the norm of the treated one, `update_norm_matched` the optimizer's plain update to the
            norm of the treated update. `placebo` has the norm of the treated gradient and its
            cosine to the plain one, in a random direction.
        margin: Tests for equivalence within this difference, as in `Comparison`.

    Needs the extra `run`; ImportError without it. Raises ValueError if `seeds` < 1, if the control
    is unknown or not for this surgery, if the margin is not a number, if the surgery was never
    attached, or if the arms return different keys.

    >>> def train(model, surgery):
    ...     with surgery.attach(model):
    ...         model.weight.square().sum().backward()
    ...     return {"gradient": model.weight.grad.norm().item()}
    >>> clip = gs.Surgery(gs.Intervention(gs.ClipNorm(0.1), at=gs.Parameters("weight")))
    >>> gs.compare(lambda: nn.Linear(2, 1), train, clip).frame()["verdict"][0]
    'lower'
    """
    _check(make_model, train, surgery, seeds)
    need("run")
    if seeds < 1:
        raise ValueError(f"seeds: must be >= 1, found {seeds}")
    if margin is not None:
        parse_margin(margin)
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
    against = "control" if control == "plain" else control.replace("_", "-")
    return Comparison(tuple(range(seeds)), tuple(arms[0]), tuple(arms[1]), margin, against)


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
