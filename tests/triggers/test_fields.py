"""Validation, equality, repr and configs of triggers."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.registry import HYDRAS, find, names

KINDS = [find("triggers", stem) for stem in names("triggers")]
CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "when").glob("*.yaml"))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (gs.Steps, {"start": -1}, "Steps.start: must be >= 0, found -1"),
        (gs.Steps, {"stop": 0}, "Steps.stop: must be >= 1, found 0"),
        (gs.Steps, {"every": 0}, "Steps.every: must be >= 1, found 0"),
        (gs.Steps, {"start": 5, "stop": 5}, "Steps.stop: must be > start (5), found 5"),
        (gs.Steps, {"start": 1.5}, "Steps.start: must be a whole number, found 1.5"),
        (gs.Steps, {"strat": 5}, "did you mean 'start'?"),
        (gs.Every, {}, "Every.count: is required"),
        (gs.Every, {"count": 0}, "Every.count: must be >= 1, found 0"),
        (gs.Every, {"count": 2, "offset": -1}, "Every.offset: must be >= 0, found -1"),
        (gs.Epochs, {"start": -1}, "Epochs.start: must be >= 0, found -1"),
        (gs.Epochs, {"start": 3, "stop": 2}, "Epochs.stop: must be > start (3), found 2"),
        (gs.Epochs, {"every": 0}, "Epochs.every: must be >= 1, found 0"),
        (gs.Epochs, {"length": 0}, "Epochs.length: must be >= 1, found 0"),
        (gs.Phase, {"phase": "late"}, "Phase.phase: must be one of 'warm_up', 'train' or"),
        (gs.Phase, {"phase": "warm_up"}, "Phase.warm_up: must be > 0 steps for this phase"),
        (gs.Phase, {"phase": "fine_tune"}, "Phase.fine_tune: must be the step at which"),
        (
            gs.Phase,
            {"phase": "train", "warm_up": 5, "fine_tune": 4},
            "Phase.fine_tune: must be >= warm_up (5), found 4",
        ),
        (gs.Probability, {"p": 1.5}, "Probability.p: must be <= 1, found 1.5"),
        (gs.Probability, {"p": float("nan")}, "Probability.p: must be finite, found nan"),
        (gs.Probability, {"p": 0.5, "per": "day"}, "Probability.per: must be one of 'step' or"),
        (gs.Probability, {"p": 0.5, "seed": -1}, "Probability.seed: must be >= 0, found -1"),
        (gs.Flag, {"flag": ""}, "Flag.flag: "),
        (gs.Flag, {"flag": "a", "on": "perhaps"}, "Flag.on: must be true or false"),
        (gs.Shape, {}, "Shape.above: or below is required"),
        (gs.Shape, {"above": -1}, "Shape.above: must be >= 0, found -1"),
        (gs.Shape, {"above": 3, "below": 4}, "Shape.below: must be > above + 1 (4), found 4"),
        (gs.Shape, {"above": 3, "source": "inputs"}, "Shape.source: must be grad, value, batch"),
        (gs.Threshold, {"above": -1.0}, "Threshold.above: must be >= 0, found -1.0"),
        (
            gs.Threshold,
            {"above": 1, "release": 2},
            "Threshold.release: must be <= above (1.0), found 2.0",
        ),
        (gs.Threshold, {"above": 1, "release": -1}, "Threshold.release: must be >= 0, found -1"),
        (
            gs.Threshold,
            {"above": 1, "measure": "mean"},
            "Threshold.measure: must be one of 'mean_abs'",
        ),
        (
            gs.Threshold,
            {"above": 1, "measure": "nan"},
            "Threshold.above: must be < 1 with measure=nan",
        ),
        (gs.Threshold, {"above": 1, "q": 1.5}, "Threshold.q: must be <= 1, found 1.5"),
        (
            gs.Threshold,
            {"above": 1, "source": "input:"},
            "Threshold.source: must be grad, value, batch",
        ),
        (gs.AllSameSign, {"source": "output"}, "AllSameSign.source: must be grad, value"),
        (gs.Depth, {"low": -1}, "Depth.low: must be >= 0, found -1"),
        (gs.Depth, {"low": 2, "high": 1}, "Depth.high: must be >= low (2), found 1"),
        (gs.Index, {"start": 2, "stop": 2}, "Index.stop: must be > start (2), found 2"),
        (gs.ForTask, {"task": ""}, "ForTask.task: must not be empty"),
        (gs.AllOf, {"of": ()}, "AllOf.of: "),
        (gs.AllOf, {"of": (3,)}, "AllOf.of.0: must be a Trigger, found 3"),
        (gs.AnyOf, {"of": (gs.Always(), None)}, "AnyOf.of.1: must be a Trigger, found None"),
        (gs.Unless, {"of": "steps"}, "Unless.of: must be a Trigger, found 'steps'"),
    ],
)
def test_an_invalid_field_is_refused(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=re.escape(message)):
        kind(**given)


@pytest.mark.parametrize("combine", [lambda a, b: a & b, lambda a, b: a | b])
@pytest.mark.parametrize("other", [3, None, gs.Steps, gs.Parameters()])
def test_triggers_combine_with_triggers_only(combine: Any, other: Any) -> None:
    with pytest.raises(TypeError, match="a trigger combines with triggers, found"):
        combine(gs.Always(), other)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_a_config_builds_its_trigger_a_value_and_lists_every_field(path: Path) -> None:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    trigger, same = instantiate(config), instantiate(config)
    assert isinstance(trigger, gs.Trigger)
    assert {*config} - {*HYDRAS} == {field.name for field in fields(trigger)}  # pyright: ignore[reportArgumentType]
    assert (trigger, hash(trigger)) == (same, hash(same))
    assert eval(repr(trigger), {kind.__name__: kind for kind in KINDS}) == trigger
