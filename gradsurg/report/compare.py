"""Comparison of arms with their control: differences by seed, tests, shares, doses, cost."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import inf
from statistics import median
from typing import Any

from gradsurg.effects.tables import aligned
from gradsurg.report.load import UNSAID, Arm, LoadedRun, canonical
from gradsurg.report.series import NUMBERS, Summary, asked, known
from gradsurg.report.wording import (
    HEADLINE,
    amount,
    amounts,
    interval,
    listed,
    p_text,
    title,
    titles,
)
from gradsurg.stats import (
    MAX_EXACT_SEEDS,
    MAX_P,
    MIN_BCA_SEEDS,
    MIN_FOR_P,
    NUM_SIGN_DRAWS,
    Difference,
    adjusted_p_values,
    bca_interval,
    paired_difference,
    sign_flip_is_exact,
    sign_test_p_value,
    trend_p_value,
    verdict,
)
from gradsurg.training.frames import effect_table
from gradsurg.training.run_directory import UNTIL_REACHED, UNTIL_STEP
from gradsurg.training.run_reader import BrokenFile

Pair = tuple[LoadedRun, LoadedRun]
Beside = Callable[[LoadedRun], LoadedRun | None]  # the run that a run is compared with


@dataclass(frozen=True)
class Outcome:
    """One metric of one arm: treated minus control over the `difference.n` pairs of finished runs.
    `difference` is None if there is no such pair; `planned` counts all seeds of the arm and
    `states` counts the seeds that cannot be compared, by the state of the run that prevents it. The
    share of a link is also an Outcome: the arm is the whole chain, the control the chain without
    `link`. If training uses no random numbers, all seeds give the same runs: only the first pair is
    used, and `repeats` is the number of pairs.
    """

    arm: Arm
    metric: str
    planned: int
    states: Mapping[str, int]
    seeds: tuple[int, ...] = ()
    treated: tuple[float, ...] = ()
    control: tuple[float, ...] = ()
    plain: str = "control"
    control_kind: str = ""
    difference: Difference | None = None
    q_value: float | None = None
    link: str = ""
    repeats: int = 0
    vacuous_control: str = ""  # the control's name if it is the treatment itself; no difference

    @cached_property
    def bootstrap(self) -> tuple[float, float] | None:
        return bootstrap(self.differences)

    @property
    def p_value(self) -> float | None:
        return self.difference.p_value if self.difference else None

    @property
    def reading(self) -> str:
        """The verdict on the difference; empty without one."""
        return verdict(self.difference, self.q_value) if self.difference else ""

    @property
    def is_known(self) -> bool:
        """Whether there is a difference or a state to show: the task of finished runs may lack the
        metric."""
        return self.difference is not None or bool(self.states)

    @property
    def differences(self) -> tuple[float, ...]:
        return self.difference.differences if self.difference else ()


@dataclass(frozen=True)
class Cost:
    """The step time of an arm divided by its control's, pair by pair."""

    arm: Arm
    ratios: tuple[float, ...]
    treated_ms: float
    control_ms: float
    measured_ms: float | None


@dataclass(frozen=True)
class UpdateEffect:
    """The update effect of an arm: each number as a mean over the runs that measured it."""

    arm: Arm
    summaries: Sequence[Summary]
    means: Mapping[str, Difference]


def metrics_of(arms: Sequence[Arm]) -> dict[str, str]:
    """The outcomes that finished runs have, with their titles.

    First the metric of the verdict: the one that the first run was planned with, else accuracy,
    else a loss.
    """
    metrics: dict[str, str] = {}
    for arm in arms:
        for run in arm.whole:
            for key, name in titles(run.summary or {}).items():
                if isinstance((run.summary or {})[key], int | float):
                    metrics.setdefault(key, name)
    first = [key for key in (*chosen_metrics(arms)[:1], *HEADLINE) if key in metrics]
    return {key: metrics[key] for key in [*first, *metrics]}


def chosen_metrics(arms: Sequence[Arm]) -> list[str]:
    """Return the metrics that runs were planned to be judged by, each once."""
    return list(dict.fromkeys(run.metric for arm in arms for run in arm.runs if run.metric))


def compare(arms: Sequence[Arm]) -> list[Outcome]:
    """Compare each treated arm with its control, metric by metric.

    The q of the first metric, which the verdict is about, is among its arms; that of all other
    metrics is among these metrics and arms together. An arm whose control is the treatment itself
    has no difference, and is not counted.
    """
    runs = {run.name: run for arm in arms for run in arm.runs}
    treated = [arm for arm in arms if not arm.is_control]
    vacuous = {arm.name: name for arm in treated if (name := _vacuous_control(arm, runs))}
    first, *others = (
        [
            _outcome(arm, metric, _its_control(runs), "control")
            if arm.name not in vacuous
            else Outcome(
                arm,
                metric,
                len(arm.runs),
                {VACUOUS: len(arm.runs)},
                vacuous_control=vacuous[arm.name],
            )
            for arm in treated
        ]
        for metric in metrics_of(arms) or {"": ""}
    )
    return [*_among_many(first), *_among_many([one for metric in others for one in metric])]


def compare_pairs(arms: Sequence[Arm], names: Sequence[str]) -> list[Outcome]:
    """Compare each two of these arms seed by seed: the first minus the second.

    Tests and q are those of `compare`, among these pairs. Raises LookupError for a name that no arm
    has, or fewer than two names.
    """
    chosen = arms_named(arms, names)
    if len(chosen) < 2:
        raise LookupError(f"name at least two arms to compare; {_names_of(arms)}")
    by_metric = []
    for metric in metrics_of(chosen) or {"": ""}:
        outcomes = []
        for first, second in combinations(chosen, 2):
            seeds = {run.seed: run for run in second.runs}
            outcome = _outcome(
                first, metric, lambda run, at=seeds: at.get(run.seed), "run of that seed"
            )
            pair = replace(first, name=f"{first.name} - {second.name}")
            outcomes.append(replace(outcome, arm=pair, plain=second.name, control_kind=""))
        by_metric.append(outcomes)
    first, *others = by_metric
    return [*_among_many(first), *_among_many([one for metric in others for one in metric])]


def arms_named(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """Return the arms of these names, in their order; LookupError for a name that no arm has."""
    by_name = {arm.name: arm for arm in arms}
    for name in names:
        if name not in by_name:
            raise LookupError(f"no arm is named {name!r}; {_names_of(arms)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _names_of(arms: Sequence[Arm]) -> str:
    return f"the arms are: {'; '.join(repr(arm.name) for arm in arms)}"


VACUOUS = "with a vacuous control"
"""State of seeds whose control is the treatment itself."""

PARALLEL = 1 - 1e-6
"""Smallest mean cosine of a transform that turns no gradient, up to rounding."""


def _vacuous_control(arm: Arm, runs: Mapping[str, LoadedRun]) -> str:
    """Return the name of a control that is the treatment itself; empty for any other.

    A control that keeps the transform's norm, or its norm and cosine, is the treatment if the
    transform has turned no gradient.
    """
    controls = [control for run in arm.whole if (control := runs.get(run.control or ""))]
    kinds = {_control_kind(control) for control in controls}
    if not kinds & {"norm_matched", "placebo"} or any(run.has_aggregator for run in arm.whole):
        return ""
    try:
        rows = effect_table([run.path for run in arm.whole])
    except BrokenFile:
        return ""  # a line of the report tells it
    cosines = [cosine for row in rows if isinstance(cosine := row["cosine"], float)]
    if min(cosines, default=0) < PARALLEL:
        return ""
    return plain_name(controls[0])


def shares(arms: Sequence[Arm]) -> list[Outcome]:
    """Return the share of each link of a chain: the whole chain minus the chain without it."""
    runs = {run.name: run for arm in arms if not arm.is_control for run in arm.runs}
    shorter: dict[tuple[str, str], LoadedRun] = {}
    for one in left_out({name: run.config for name, run in runs.items() if run.config}):
        shorter[one.whole, one.link] = runs[one.without]
    outcomes = []
    for metric in metrics_of(arms):
        for arm in arms:
            here = [link for run in arm.runs for name, link in shorter if name == run.name]
            runs_without = []
            for link in dict.fromkeys(here):
                beside = {run.name: shorter.get((run.name, link)) for run in arm.runs}
                outcome = _outcome(arm, metric, lambda run, at=beside: at[run.name], SHORTER)
                runs_without.append(replace(outcome, link=link))
            outcomes += _among_many(runs_without)
    return outcomes


def costs(arms: Sequence[Arm]) -> list[Cost]:
    """Compare step times with those of the plain control, where both are known.

    Other controls run a surgery themselves, and so give no cost.
    """
    runs = {run.name: run for arm in arms for run in arm.runs}
    arm_costs = []
    for arm in arms:
        pairs = [] if arm.is_control else _pairs(arm, _its_plain_control(runs), "control")
        times = [(_number(a, "time/step_ms"), _number(b, "time/step_ms")) for a, b in pairs]
        both = [(a, b) for a, b in times if a and b]
        if both:
            measured = [_number(a, "time/measured_step_ms") for a, _ in pairs]
            known = [ms for ms in measured if ms]
            arm_costs.append(
                Cost(
                    arm,
                    tuple(a / b for a, b in both),
                    median(a for a, _ in both),
                    median(b for _, b in both),
                    median(known) if known else None,
                )
            )
    return arm_costs


def update_effects(arms: Sequence[Arm]) -> list[UpdateEffect]:
    """Return the update effect of each arm that measured it."""
    effects = []
    for arm in arms:
        sampled = asked([run.summary or {} for run in arm.whole])
        values = {key: known(sampled, key) for key in NUMBERS}
        means = {key: paired_difference(v, [0.0] * len(v)) for key, v in values.items() if v}
        if sampled:
            effects.append(UpdateEffect(arm, sampled, means))
    return effects


@dataclass(frozen=True)
class Divergence:
    """How many seeds diverged in an arm and in its control, of the `n` that ended in both.

    `p_value` is that of McNemar's exact test, on the seeds in which one of the two diverged.
    """

    arm: Arm
    plain: str
    n: int
    treated: int
    control: int
    p_value: float


def divergences(arms: Sequence[Arm]) -> list[Divergence]:
    """Return the divergence of each treated arm in which, or in whose control, a seed diverged."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    counted = []
    for arm in arms:
        if arm.is_control:
            continue
        beside = _its_control(runs)
        pairs = [(run, other) for run in arm.runs if (other := beside(run))]
        pairs = [pair for pair in pairs if all(run.state in ENDED for run in pair)]
        diverged = [tuple(run.state == DIVERGED for run in pair) for pair in pairs]
        if any(map(any, diverged)):
            p_value = sign_test_p_value(
                diverged.count((True, False)), diverged.count((False, True))
            )
            treated, control = map(sum, zip(*diverged, strict=True))
            plain = plain_name(pairs[0][1])
            counted.append(Divergence(arm, plain, len(pairs), treated, control, p_value))
    return counted


@dataclass(frozen=True)
class TimeToTarget:
    """The steps at which an arm and its control reached the stopping condition, seed by seed.

    A seed that did not reach it, or diverged before, has None, and counts as later than all that
    did. `p_value` is that of the exact sign test.
    """

    arm: Arm
    plain: str
    steps: tuple[tuple[float | None, float | None], ...]
    states: Mapping[str, int]
    q_value: float | None = None

    @property
    def sooner(self) -> int:
        return sum(treated < control for treated, control in self._with_never)

    @property
    def later(self) -> int:
        return sum(treated > control for treated, control in self._with_never)

    @property
    def both(self) -> list[float]:
        """The differences in steps of the seeds that reached it in both arms."""
        return [a - b for a, b in self.steps if a is not None and b is not None]

    @property
    def p_value(self) -> float:
        return sign_test_p_value(self.sooner, self.later)

    @property
    def _with_never(self) -> list[tuple[float, float]]:
        return [(inf if a is None else a, inf if b is None else b) for a, b in self.steps]


def times_to_target(arms: Sequence[Arm]) -> list[TimeToTarget]:
    """Return one for each treated arm with a stopping condition and a control with one."""
    runs = {run.name: run for arm in arms for run in arm.runs}
    beside, times = _its_control(runs), []
    for arm in arms:
        states: Counter[str] = Counter()
        steps, plain = [], "control"
        for run in [] if arm.is_control else arm.runs:
            other = beside(run)
            open_state = _in_the_way(run, other, "control", ENDED)
            if open_state or other is None:
                states[open_state or "without a control"] += 1
            elif _has_target(run) and _has_target(other):
                plain = plain_name(other)
                steps.append((step_reached(run), step_reached(other)))
        if steps:
            times.append(TimeToTarget(arm, plain, tuple(steps), dict(states)))
    if len(times) < 2:
        return times
    q_values = adjusted_p_values({place: one.p_value for place, one in enumerate(times)})
    return [replace(one, q_value=q_values[place]) for place, one in enumerate(times)]


def step_reached(run: LoadedRun) -> float | None:
    """Return the step at which a run reached its stopping condition; None if it did not."""
    summary = run.summary or {}
    return float(summary[UNTIL_STEP]) if summary.get(UNTIL_REACHED) else None


def _has_target(run: LoadedRun) -> bool:
    return UNTIL_REACHED in (run.summary or {})


def plain_name(run: LoadedRun) -> str:
    """Return the name of a control run's arm in a sentence: `control`, `placebo`, `norm-matched`.

    A run that is no control, as one of a shorter chain, has its label.
    """
    kind = _control_kind(run)
    if kind == "plain" or run.label == "none":
        return PLAIN
    return (kind or run.label).replace("_", "-")


PLAIN = "control"
"""The name of a control arm without surgery."""


def _control_kind(run: LoadedRun) -> str:
    """Return the kind of a control run, as the key `control` has it; empty for a shorter chain."""
    if run.arm != "control":
        return ""
    return "plain" if run.label == "none" else run.label.partition("-")[0]


FINISHED, DIVERGED = "finished", "diverged"
ENDED = (FINISHED, DIVERGED)
SHORTER = "shorter chain"


def _its_control(runs: Mapping[str, LoadedRun]) -> Beside:
    return lambda run: runs.get(run.control or "")


def _its_plain_control(runs: Mapping[str, LoadedRun]) -> Beside:
    def beside(run: LoadedRun) -> LoadedRun | None:
        control = runs.get(run.controls.get("plain") or run.control or "")
        return control if control and control.label == "none" else None

    return beside


def _outcome(arm: Arm, metric: str, beside: Beside, kind: str) -> Outcome:
    """Compare an arm's metric with that of the runs that `beside` returns; states call them
    `kind`."""
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
    treated, control = tuple(x for *_, x, _ in both), tuple(y for *_, y in both)
    return replace(
        outcome,
        seeds=tuple(run.seed for run, *_ in both),
        treated=treated,
        control=control,
        plain=plain_name(both[0][1]),
        control_kind=_control_kind(both[0][1]),
        difference=paired_difference(treated, control),
        repeats=repeats,
    )


def _pairs(arm: Arm, beside: Beside, kind: str) -> list[Pair]:
    pairs = [(run, beside(run)) for run in arm.runs]
    return [(run, other) for run, other in pairs if other and not _in_the_way(run, other, kind)]


def _are_repeats(pairs: Sequence[Pair]) -> bool:
    """Whether all seeds came to the same numbers, in all that was tested."""
    return len(pairs) > 1 and all(
        len({tuple(_number(run, key) for key in titles(run.summary or {})) for run in numbers}) == 1
        for numbers in zip(*pairs, strict=True)
    )


def repeats_line(outcomes: Iterable[Outcome]) -> str:
    """Return a note on arms whose seeds all gave the same numbers; empty if there are none."""
    repeats = {one.arm.name: one.repeats for one in outcomes if one.repeats}
    if not repeats:
        return ""
    arms = listed([f"the {n} seeds of {name}" for name, n in repeats.items()])
    return (
        f"The same numbers from {arms}: nothing in these runs is drawn at random, so they count as "
        "one, without an interval or a p."
    )


def _in_the_way(
    run: LoadedRun, other: LoadedRun | None, kind: str, wanted: Collection[str] = (FINISHED,)
) -> str | None:
    """Return why a run cannot be compared: its own state, or that of its control."""
    if run.state not in wanted:
        return run.state
    if other is None:
        return f"without a {kind}"
    return None if other.state in wanted else f"{kind} {other.state}"


def _number(run: LoadedRun, key: str) -> float | None:
    number = (run.summary or {}).get(key)
    return float(number) if isinstance(number, int | float) else None


def _among_many(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Add to each outcome its q, which controls the false discovery rate among them; a single p has
    none."""
    p_values = {place: outcome.p_value for place, outcome in enumerate(outcomes)}
    if sum(p_value is not None for p_value in p_values.values()) < 2:
        return list(outcomes)
    q_values = adjusted_p_values(p_values)
    return [replace(outcome, q_value=q_values[place]) for place, outcome in enumerate(outcomes)]


ABOUT_Q = (
    "q is the sign-flip p after Benjamini and Hochberg's control of false discoveries: among all "
    "arms in the first metric, among all arms and all other metrics together, or among all links "
    "of one chain"
)


def about_p(n: int) -> str:
    """Return the note that this p needs; empty if none."""
    if 1 < n < MIN_FOR_P:
        return f"with {n} seeds the exact sign-flip p is at least {2 / 2**n:.3g}: 6 can reach 0.05"
    if not sign_flip_is_exact(n):
        return f"sign-flip p of {NUM_SIGN_DRAWS:,} signings drawn at random, not of all"
    return ""


def about_tests(seeds: Collection[int]) -> str:
    """Explain p and reading of a table with these numbers of seeds."""
    exact = "p is that of the exact sign-flip test"
    if not all(sign_flip_is_exact(n) for n in seeds):
        drawn = f"more than {MAX_EXACT_SEEDS} seeds: of {NUM_SIGN_DRAWS:,} signings drawn at random"
        exact = f"p is that of the sign-flip test, exact or, with {drawn}"
    return (
        f"{exact}. A reading is higher or lower if p, and q where there is one, is at most "
        f"{MAX_P}, which takes {MIN_FOR_P} seeds, and a hint if only the 95 % paired t interval of "
        "the mean leaves out 0. The column higher counts the seeds with a positive difference."
    )


def bootstrap(differences: Sequence[float]) -> tuple[float, float] | None:
    """The BCa interval, where there are seeds enough for it."""
    return bca_interval(differences) if len(differences) >= MIN_BCA_SEEDS else None


def bootstrap_line(differences: Mapping[str, Sequence[float]]) -> str:
    """The BCa intervals of outcomes, by key; nothing if there are too few seeds."""
    parts = []
    for key, by_seed in differences.items():
        ends = bootstrap(by_seed)
        if ends:
            parts.append(f"{key.replace('/', ' ')} {amounts(key, *ends)}")
    return f"95 % BCa bootstrap intervals: {'; '.join(parts)}" if parts else ""


Config = Mapping[str, Any]  # Any: what YAML can hold
Outcomes = Sequence[float | None]

ABOUT_SHARES = "the chain minus the chain without it"


@dataclass(frozen=True)
class LeftOut:
    """Names of two runs: of a chain, and of the same chain without a link."""

    whole: str
    link: str
    without: str


def left_out(configs: Mapping[str, Config]) -> list[LeftOut]:
    """Among runs by name, with their resolved configs, all that differ in one link of a chain.

    Found by comparing configs, since a run of a shorter chain may belong to several longer chains
    and to a sweep. A link is a key of `transform`: a `chain` or a `scheduled` transform is one link
    with all that is inside.
    """
    names = {_canonical(config): name for name, config in configs.items()}
    parts = []
    for whole, config in configs.items():
        order = config.get("order") or []
        for link in order if len(order) > 1 else []:
            shorter = names.get(_canonical(_without(config, link)))
            # A dotted path has one source in both, or it was edited in between.
            if shorter and _sources(configs[shorter]) <= _sources(config):
                parts.append(LeftOut(whole, link, shorter))
    return parts


def share(whole: Outcomes, without: Outcomes) -> Difference | None:
    """Return a link's share in a metric: the whole chain minus the chain without it, by seed.

    Shares need not sum to the effect of the chain: two links with the same effect can both have
    share 0. A seed where either is missing is left out; None if no seed is left.
    """
    both = _both(whole, without)
    return paired_difference([a for a, _ in both], [b for _, b in both]) if both else None


def shares_text(key: str, links: Mapping[str, tuple[Outcomes, Outcomes]]) -> str:
    """A table of each link's share in a metric, of its values with and without the link."""
    rows = [["link", "share", "95 % interval", "sign-flip p", "seeds"]]
    for link, (whole, without) in links.items():
        link_share = share(whole, without)
        if link_share is None:
            rows.append([link, "-", "no seed has both", "", "0"])
            continue
        p_value = p_text(link_share.p_value)
        rows.append(
            [
                link,
                amount(key, link_share.mean),
                interval(key, link_share),
                p_value,
                str(link_share.n),
            ]
        )
    return f"Each link's share in {title(key)}, {ABOUT_SHARES}:\n\n{aligned(rows)}"


def _both(whole: Outcomes, without: Outcomes) -> list[tuple[float, float]]:
    pairs = zip(whole, without, strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _without(config: Config, link: str) -> Config:
    rest = {key: fields for key, fields in config["transform"].items() if key != link}
    return {**config, "transform": rest, "order": [key for key in config["order"] if key != link]}


def _canonical(config: Config) -> str:
    kept = {key: item for key, item in config.items() if key != "sources"}
    return json.dumps(kept, sort_keys=True, default=str)


def _sources(config: Config) -> set[tuple[str, str]]:
    return set((config.get("sources") or {}).items())


MIN_DOSES = 3  # two points are a comparison, not a curve


@dataclass(frozen=True)
class Trend:
    """Spearman's correlation of outcome and dose, the mean over `n` seeds, and its p-value."""

    correlation: float
    p_value: float
    n: int


@dataclass(frozen=True)
class Doses:
    """The arms that differ in one number of the config only, by its value."""

    key: str
    name: str
    doses: list[float]
    arms: list[Arm]

    def trend(self, outcomes: Iterable[Outcome]) -> Trend | None:
        """Return the trend of a metric's difference to the control, from its `outcomes`.

        Of the seeds with a difference in all arms; None if there are none.
        """
        by_name = {
            one.arm.name: dict(zip(one.seeds, one.differences, strict=True)) for one in outcomes
        }
        by_arm = [by_name.get(arm.name, {}) for arm in self.arms]
        seeds = [seed for seed in by_arm[0] if all(seed in arm for arm in by_arm)]
        if not seeds:
            return None
        by_seed = [[arm[seed] for arm in by_arm] for seed in seeds]
        return Trend(*trend_p_value(self.doses, by_seed), len(seeds))


def doses(arms: Sequence[Arm]) -> list[Doses]:
    """Every set of at least three treated arms of one label with that many values of one number."""
    treated = [arm for arm in arms if not arm.is_control and arm.config]
    groups = []
    for key in dict.fromkeys(key for arm in treated for key in arm.config):
        if key.partition(".")[0] in UNSAID:
            continue
        sets: dict[str, dict[float, Arm]] = {}
        for arm in treated:
            dose = arm.config.get(key)
            if isinstance(dose, int | float) and not isinstance(dose, bool):
                rest = {other: item for other, item in arm.config.items() if other != key}
                sets.setdefault(canonical([arm.runs[0].label, rest]), {})[float(dose)] = arm
        for members in sets.values():
            if len(members) >= MIN_DOSES:
                ordered = sorted(members.items())
                name = _shared_name([arm for _, arm in ordered], key)
                groups.append(Doses(key, name, [x for x, _ in ordered], [a for _, a in ordered]))
    return groups


def _shared_name(arms: Sequence[Arm], key: str) -> str:
    """The label of the arms, and the other parts of their names that all have in common."""
    parts = [arm.name.split(", ")[1:] for arm in arms]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    return ", ".join([arms[0].runs[0].label or key, *shared])
