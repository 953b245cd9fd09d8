"""What each arm came to beside its control: differences seed by seed, links' shares, the cost."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gradsurg import stats
from gradsurg.report.grouping import Arm
from gradsurg.report.reading import Found
from gradsurg.report.wording import HEADLINE, titles
from gradsurg.stats import MAX_EXACT, Difference, paired_difference, sign_flip_p

MIN_BOOTSTRAP = 20  # with fewer seeds a bootstrap interval covers too little

Pair = tuple[Found, Found]


@dataclass(frozen=True)
class Outcome:
    """One metric of one arm: treated minus control over the `difference.n` pairs that are whole.

    `difference` is None if there is no such pair; `planned` counts all seeds of the arm and
    `states` those that cannot be compared, by the state that is in the way.
    """

    arm: Arm
    metric: str
    planned: int
    states: Mapping[str, int]
    seeds: tuple[int, ...] = ()
    treated: tuple[float, ...] = ()
    control: tuple[float, ...] = ()
    plain: str = "control"
    difference: Difference | None = None
    p_value: float | None = None
    q_value: float | None = None
    bootstrap: tuple[float, float] | None = None

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.treated, self.control, strict=True)]


@dataclass(frozen=True)
class Cost:
    """How much longer a step of an arm takes than one of its control, pair by pair."""

    arm: Arm
    ratios: tuple[float, ...]
    treated_ms: float
    control_ms: float
    measured_ms: float | None


@dataclass(frozen=True)
class UpdateEffect:
    """The mean over an arm's runs of one number on its updates, with its interval."""

    arm: Arm
    metric: str
    mean: Difference


def metrics_of(arms: Sequence[Arm]) -> dict[str, str]:
    """The outcomes that a whole run has, with their titles; the headline first."""
    found: dict[str, str] = {}
    for arm in arms:
        for run in arm.whole:
            for key, title in titles(run.summary or {}).items():
                if isinstance((run.summary or {})[key], int | float):
                    found.setdefault(key, title)
    first = [key for key in HEADLINE if key in found]
    return {key: found[key] for key in [*first, *found]}


def compare(arms: Sequence[Arm]) -> list[Outcome]:
    """Each treated arm beside its control, metric by metric."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    treated = [arm for arm in arms if not arm.is_control]
    found: list[Outcome] = []
    for metric in metrics_of(arms) or {"": ""}:
        own = [_outcome(arm, metric, runs, _its_control) for arm in treated]
        found += _among_many(own)
    return found


def shares(arms: Sequence[Arm]) -> list[Outcome]:
    """What each link of a chain adds: the whole chain minus the chain without it."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    parts = [arm for arm in arms if arm.left_out]
    found = []
    for metric in metrics_of(arms):
        own = [_outcome(arm, metric, runs, _its_whole, turned=True) for arm in parts]
        found += _among_many(own)
    return found


def costs(arms: Sequence[Arm]) -> list[Cost]:
    """Step times beside the control's, where both are known."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    found = []
    for arm in arms:
        pairs = [] if arm.is_control else _pairs(arm, runs, _its_control)
        times = [(_number(a, "time/step_ms"), _number(b, "time/step_ms")) for a, b in pairs]
        both = [(a, b) for a, b in times if a and b]
        if both:
            measured = [_number(a, "time/measured_step_ms") for a, _ in pairs]
            known = [ms for ms in measured if ms]
            found.append(
                Cost(
                    arm,
                    tuple(a / b for a, b in both),
                    median(a for a, _ in both),
                    median(b for _, b in both),
                    median(known) if known else None,
                )
            )
    return found


def update_effects(
    arms: Sequence[Arm], means: Mapping[str, Mapping[str, float]]
) -> list[UpdateEffect]:
    """Of each arm, from each run's means of `update/...` by the run's name."""
    rows = []
    for arm in arms:
        own = [means[run.name] for run in arm.whole if run.name in means]
        for key in dict.fromkeys(key for run in own for key in run):
            values = [run[key] for run in own if key in run]
            rows.append(UpdateEffect(arm, key, paired_difference(values, [0.0] * len(values))))
    return rows


def _its_control(run: Found) -> str | None:
    return run.control


def _its_whole(run: Found) -> str | None:
    return run.whole


def _outcome(
    arm: Arm,
    metric: str,
    runs: Mapping[str, Found],
    beside: Callable[[Found], str | None],
    turned: bool = False,
) -> Outcome:
    """The metric of an arm beside that of other runs; `turned` takes the others as the treated."""
    states = Counter(state for run in arm.runs if (state := _in_the_way(run, runs, beside)))
    outcome = Outcome(arm, metric, len(arm.runs), dict(states))
    both = [
        (a, x, y)
        for a, b in _pairs(arm, runs, beside)
        if (x := _number(a, metric)) is not None and (y := _number(b, metric)) is not None
    ]
    if not both:
        return outcome
    one, other = [x for _, x, _ in both], [y for _, _, y in both]
    treated, control = (other, one) if turned else (one, other)
    plain = runs[str(beside(both[0][0]))].label
    differences = [x - y for x, y in zip(treated, control, strict=True)]
    difference = paired_difference(treated, control)
    exact = 1 < len(both) <= MAX_EXACT
    return replace(
        outcome,
        seeds=tuple(run.seed for run, _, _ in both),
        treated=tuple(treated),
        control=tuple(control),
        plain="control" if plain == "none" else plain.replace("_", "-"),
        difference=difference,
        p_value=sign_flip_p(differences) if exact else difference.p_value,
        bootstrap=_bootstrap(differences),
    )


def _pairs(
    arm: Arm, runs: Mapping[str, Found], beside: Callable[[Found], str | None]
) -> list[Pair]:
    return [(run, runs[str(beside(run))]) for run in arm.runs if not _in_the_way(run, runs, beside)]


def _in_the_way(
    run: Found, runs: Mapping[str, Found], beside: Callable[[Found], str | None]
) -> str | None:
    """Why a run cannot be compared: its own state, or that of the run beside it."""
    if run.state != "finished":
        return run.state
    other = runs.get(beside(run) or "")
    if other is None:
        return "without a control"
    return None if other.state == "finished" else f"control {other.state}"


def _number(run: Found, key: str) -> float | None:
    found = (run.summary or {}).get(key)
    return float(found) if isinstance(found, int | float) else None


def _bootstrap(differences: Sequence[float]) -> tuple[float, float] | None:
    """The BCa bootstrap interval, where there are seeds enough for it."""
    interval = getattr(stats, "bca_interval", None)
    if interval is None or len(differences) < MIN_BOOTSTRAP or len(set(differences)) == 1:
        return None
    return interval(differences)


def _among_many(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """With each p its q value, the false discoveries among a metric's arms being controlled."""
    adjust = getattr(stats, "benjamini_hochberg", None)
    tested = [outcome.p_value for outcome in outcomes if outcome.p_value is not None]
    if adjust is None or len(tested) < 2:
        return list(outcomes)
    values = iter(adjust(tested))
    return [
        outcome if outcome.p_value is None else replace(outcome, q_value=next(values))
        for outcome in outcomes
    ]
