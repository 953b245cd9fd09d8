"""What each arm came to beside its control: differences seed by seed, links' shares, the cost."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from gradsurg.report import certainty
from gradsurg.report.attribution import left_out
from gradsurg.report.grouping import Arm
from gradsurg.report.reading import Found
from gradsurg.report.update_line import NUMBERS, Summary, asked, known
from gradsurg.report.wording import HEADLINE, listed, titles
from gradsurg.stats import Difference, family, paired_difference

Pair = tuple[Found, Found]
Beside = Callable[[Found], Found | None]  # the run that a run is compared with


@dataclass(frozen=True)
class Outcome:
    """One metric of one arm: treated minus control over the `difference.n` pairs that are whole.

    `difference` is None if there is no such pair; `planned` counts all seeds of the arm and
    `states` those that cannot be compared, by the state that is in the way. A link's share is one
    too: its arm is the whole chain, its control the chain without `link`. Where nothing is drawn at
    random all seeds give the same runs: then the pair of the first is the only one, and `repeats`
    says how many there were.
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
    link: str = ""
    repeats: int = 0

    @cached_property
    def bootstrap(self) -> tuple[float, float] | None:
        return certainty.bootstrap(self.differences)

    @property
    def reading(self) -> str:
        """What may be said of it: a verdict, `higher (hint)` or `lower (hint)`, or nothing."""
        return certainty.reading(self.difference, self.q_value) if self.difference else ""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to tell: runs that are whole can be of a task without it."""
        return self.difference is not None or bool(self.states)

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
    """What an arm's runs say of their updates: the mean over runs of each number, if any has it."""

    arm: Arm
    summaries: Sequence[Summary]
    means: Mapping[str, Difference]


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
    return [one for metric in metrics_of(arms) or {"": ""} for one in beside_control(arms, metric)]


def beside_control(arms: Sequence[Arm], metric: str) -> list[Outcome]:
    """One number of each treated arm beside its control, of the seeds that have it in both."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    treated = [arm for arm in arms if not arm.is_control]
    return _among_many([_outcome(arm, metric, _its_control(runs), "control") for arm in treated])


def shares(arms: Sequence[Arm]) -> list[Outcome]:
    """What each link of a chain adds: the whole chain minus the chain without it."""
    runs = {run.name: run for arm in arms if not arm.is_control for run in arm.runs}
    shorter: dict[tuple[str, str], Found] = {}
    for one in left_out({name: run.config for name, run in runs.items() if run.config}):
        shorter[one.whole, one.link] = runs[one.without]
    found = []
    for metric in metrics_of(arms):
        for arm in arms:
            here = [link for run in arm.runs for name, link in shorter if name == run.name]
            own = []
            for link in dict.fromkeys(here):
                beside = {run.name: shorter.get((run.name, link)) for run in arm.runs}
                outcome = _outcome(arm, metric, lambda run, at=beside: at[run.name], SHORTER)
                own.append(replace(outcome, link=link))
            found += _among_many(own)
    return found


def costs(arms: Sequence[Arm]) -> list[Cost]:
    """Step times beside the control's, where both are known."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    found = []
    for arm in arms:
        pairs = [] if arm.is_control else _pairs(arm, _its_control(runs), "control")
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


def update_effects(arms: Sequence[Arm]) -> list[UpdateEffect]:
    """Of each arm whose runs looked at their updates."""
    found = []
    for arm in arms:
        own = asked([run.summary or {} for run in arm.whole])
        values = {key: known(own, key) for key in NUMBERS}
        means = {key: paired_difference(v, [0.0] * len(v)) for key, v in values.items() if v}
        if own:
            found.append(UpdateEffect(arm, own, means))
    return found


SHORTER = "shorter chain"


def _its_control(runs: Mapping[str, Found]) -> Beside:
    return lambda run: runs.get(run.control or "")


def _outcome(arm: Arm, metric: str, beside: Beside, kind: str) -> Outcome:
    """The metric of an arm beside that of other runs, which are of that kind."""
    states = Counter(state for run in arm.runs if (state := _in_the_way(run, beside(run), kind)))
    outcome = Outcome(arm, metric, len(arm.runs), dict(states))
    pairs = _pairs(arm, beside, kind)
    repeats = len(pairs) if _are_repeats(pairs) else 0
    both = [
        (a, b, x, y)
        for a, b in (pairs[:1] if repeats else pairs)
        if (x := _number(a, metric)) is not None and (y := _number(b, metric)) is not None
    ]
    if not both:
        return outcome
    plain = both[0][1].label
    treated, control = tuple(x for *_, x, _ in both), tuple(y for *_, y in both)
    outcome = replace(
        outcome,
        seeds=tuple(run.seed for run, *_ in both),
        treated=treated,
        control=control,
        plain="control" if plain == "none" else plain.replace("_", "-"),
        difference=paired_difference(treated, control),
        repeats=repeats,
    )
    return replace(outcome, p_value=certainty.p_of(outcome.differences))


def _pairs(arm: Arm, beside: Beside, kind: str) -> list[Pair]:
    pairs = [(run, beside(run)) for run in arm.runs]
    return [(run, other) for run, other in pairs if other and not _in_the_way(run, other, kind)]


def _are_repeats(pairs: Sequence[Pair]) -> bool:
    """Whether all seeds came to the same numbers, in all that was tested."""
    return len(pairs) > 1 and all(
        len({tuple(_number(run, key) for key in titles(run.summary or {})) for run in own}) == 1
        for own in zip(*pairs, strict=True)
    )


def repeats_line(outcomes: Iterable[Outcome]) -> str:
    """That seeds are no sample where nothing is drawn, if that is so in some arms."""
    found = {one.arm.name: one.repeats for one in outcomes if one.repeats}
    if not found:
        return ""
    arms = listed([f"the {n} seeds of {name}" for name, n in found.items()])
    return (
        f"The same numbers from {arms}: nothing in these runs is drawn at random, so they count as "
        "one, without an interval or a p."
    )


def _in_the_way(run: Found, other: Found | None, kind: str) -> str | None:
    """Why a run cannot be compared: its own state, or that of the run beside it."""
    if run.state != "finished":
        return run.state
    if other is None:
        return f"without a {kind}"
    return None if other.state == "finished" else f"{kind} {other.state}"


def _number(run: Found, key: str) -> float | None:
    found = (run.summary or {}).get(key)
    return float(found) if isinstance(found, int | float) else None


def _among_many(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """With each p its q, the false discoveries among these being controlled; one alone has none."""
    p_values = {place: outcome.p_value for place, outcome in enumerate(outcomes)}
    if sum(p_value is not None for p_value in p_values.values()) < 2:
        return list(outcomes)
    q_values = family(p_values)
    return [replace(outcome, q_value=q_values[place]) for place, outcome in enumerate(outcomes)]
