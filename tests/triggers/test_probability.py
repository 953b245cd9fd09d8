"""Probability: a random trigger, reproducible from its seeds."""

import pytest

import gradsurg as gs
from gradsurg.triggers.base import Clock, TriggerContext
from tests.nets import sgd, small, train


def _steps(trigger: gs.Trigger, seed: int = 0, site: str = "a", steps: int = 400) -> list[bool]:
    return [
        trigger.fires(TriggerContext(Clock(step), seed, site=site)) is True for step in range(steps)
    ]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_firing_rate_is_the_probability(p: float) -> None:
    for per in ("step", "site"):
        share = sum(_steps(gs.Probability(p, per))) / 400
        # Four standard deviations of the mean of 400 draws.
        assert abs(share - p) <= 4 * (p * (1 - p) / 400) ** 0.5


def test_draws_depend_on_the_seeds_and_the_step_alone() -> None:
    once = _steps(gs.Probability(0.5))
    assert _steps(gs.Probability(0.5)) == once
    assert _steps(gs.Probability(0.5), seed=1) != once
    assert _steps(gs.Probability(0.5, seed=1)) != once
    assert _steps(gs.Probability(0.5), site="b") == once
    assert _steps(gs.Probability(0.5, "site"), site="b") != _steps(gs.Probability(0.5, "site"))


def test_a_trigger_fires_whenever_one_of_smaller_probability_does() -> None:
    pairs = zip(_steps(gs.Probability(0.2)), _steps(gs.Probability(0.6)), strict=True)
    assert all(larger or not smaller for smaller, larger in pairs)


def test_per_site_is_unknown_without_a_site() -> None:
    assert gs.Probability(0.5, "site").fires(TriggerContext(Clock())) is None
    assert gs.Probability(0.5).fires(TriggerContext(Clock())) in (True, False)


def _fired(per, label: str, steps: int = 20) -> list[list[bool]]:
    """Return the sites where the trigger fired, for each step."""
    model = small()
    optimizer = sgd(model)
    when = gs.Probability(0.5, per)
    surgery = gs.Surgery(gs.Intervention(gs.Scale(1.0), when=when, names=(label,)), seed=3)
    rows, before = [], [0] * 4
    with surgery.attach(model, optimizer) as live:
        for step in range(steps):
            train(model, optimizer, 1, step)
            now = [entry.all_fired for entry in live.ledger]
            rows.append([new > old for new, old in zip(now, before, strict=True)])
            before = now
    return rows


def test_per_step_all_sites_fire_together_and_per_site_each_by_itself() -> None:
    together, apart = _fired("step", "a"), _fired("site", "a")
    assert {len(set(row)) for row in together} == {1}
    assert {any(row) for row in together} == {True, False}
    assert {len(set(row)) for row in apart} == {1, 2}


@pytest.mark.parametrize("per", ["step", "site"])
def test_an_arm_and_its_control_have_the_same_draws(per) -> None:
    assert _fired(per, "clip") == _fired(per, "norm_matched")
