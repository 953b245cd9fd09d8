"""Errors of an aggregator are reported under their config key before training."""

import pytest

import gradsurg as gs
from gradsurg.aggregators.base import NormMatchedSum
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment.errors import ConfigError
from tests.builds import built

ONE_FORWARD = (
    "shared.engine: feature makes its update of one forward and needs accumulate=1, found "
)
SEVERAL = ("task=overlay", "model=multi_head", "steps=10")


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        (
            ["shared.granularity=[nope,'*']"],
            ["shared.granularity: nothing matches 'nope'. There are: trunk."],
        ),
        (["shared.granularity=modul"], ["shared.granularity: must be one of 'whole', 'layer', 'm"]),
        (["shared.granularity=[]"], ["shared.granularity: must have at least one pattern"]),
        (["shared.pattern=nope"], ["shared.pattern: nothing matches 'nope'. There are: trunk."]),
        (
            ["shared.engine=feature", "shared.features=nope"],
            ["shared.features: there is no module 'nope'. There are: root, trunk,"],
        ),
        (
            ["shared.engine=feature"],
            ["shared.features: name the module whose output the tasks share, such as "],
        ),
        (
            ["shared.engine=foo", "shared.granularity=bar"],
            ["shared.engine: must be one of", "shared.granularity: must be one of"],
        ),
        (
            ["aggregator=fixed_weights", "aggregator.weights=[1,2,3]"],
            ["aggregator.weights: must be one for each task, found 3 weights for 2 tasks"],
        ),
        (
            ["aggregator=fixed_weights", "aggregator.weights={first: 1}"],
            ["aggregator.weights: task 'second' has none, found first"],
        ),
        (
            ["aggregator=fixed_weights", "aggregator.weights={frist: 1, second: 0.5}"],
            [
                "aggregator.weights: did you mean 'first'? There is no task 'frist'. "
                "There are: first, second."
            ],
        ),
        (
            ["aggregator=agem", "aggregator.memory=frist"],
            [
                "aggregator.memory: did you mean 'first'? There is no loss 'frist'. "
                "There are: first, second."
            ],
        ),
        (["aggregator=krum"], ["aggregator: Krum(num_byzantine=0, num_selected=1) needs 3 tasks"]),
        (
            ["when.start=100"],
            ["when.start: must be <= 9, the last step of the run, found 100"],
        ),
        (
            ["when=threshold"],
            ["when: use Steps, Epochs, Phase, Flag or Probability: this "],
        ),
        *[
            (
                [f"transform={words}"],
                [
                    "transform.grokfast_ema: act after the aggregator, by Parameters(stage='step'"
                    "), or on one task, by the trigger ForTask('<task>'): GrokfastEMA(decay=0.98, "
                    "strength=2.0) has one state for each site, which 2 tasks would share"
                ],
            )
            for words in ("grokfast_ema", "[clip,grokfast_ema]")
        ],
        *[
            (
                [f"aggregator={name}", "control=norm_matched"],
                [f"control: {name} weighs the losses, and so the gradients of the heads too"],
            )
            for name in ("fixed_weights", "famo", "mean")
        ],
        *[
            (
                [f"control={kind}"],
                [f"control: {kind} is for transforms, and pcgrad is an aggregator"],
            )
            for kind in ("placebo", "update_norm_matched")
        ],
        (["task=digits", "model=mlp"], ["aggregator: choose task=mnist_overlay or overlay or q"]),
        (["shared.engine=feature", "shared.features=relu", "accumulate=3"], [ONE_FORWARD]),
        (["shared.engine=feature", "shared.features=nope", "steps=0"], ["shared.features: there "]),
        (
            ["shared.engine=feature", "shared.features=relu", "compile=true"],
            ["shared.engine: feature goes on from a representation, which a model that is "],
        ),
    ],
)
def test_an_error_of_an_aggregator_is_one_line_under_its_key(
    words: list[str], faults: list[str]
) -> None:
    start = () if words[0].startswith("aggregator=") else ("aggregator=pcgrad",)
    with pytest.raises(ConfigError) as found:
        built(*start, *SEVERAL, *words)
    said = found.value.faults
    assert [line[: len(start)] for line, start in zip(said, faults, strict=True)] == faults


def test_the_norm_matched_control_of_an_aggregator_is_a_sum_of_the_same_norm() -> None:
    (pair, *_) = built("aggregator=mgda", *SEVERAL, "control=norm_matched").pairs
    assert pair.control is not None
    (control,) = pair.control.surgery.interventions
    assert control.names == ("norm_matched_sum",)
    assert control.aggregator == NormMatchedSum(gs.MGDA())


@pytest.mark.parametrize("way", [["site.stage=step"], ["when=for_task", "when.task=first"]])
def test_a_stateful_transform_can_act_where_its_error_suggests(way: list[str]) -> None:
    experiment = built("aggregator=pcgrad", "transform=grokfast_ema", *SEVERAL, *way)
    assert experiment.surgery.labels == (("grokfast_ema",), ("pcgrad",))


def test_a_trigger_belongs_to_the_transform_if_there_is_one() -> None:
    surgery = built("aggregator=pcgrad", "transform=clip", *SEVERAL, "when=threshold").surgery
    transform, aggregator = surgery.interventions
    assert isinstance(transform.when, gs.Threshold)
    assert isinstance(aggregator.when, gs.triggers.always.Always)


@pytest.mark.parametrize(
    "words",
    [
        ["aggregator=pcgrad", "accumulate=3"],
        ["aggregator=pcgrad", "shared.engine=feature", "shared.features=relu"],
    ],
)
def test_several_batches_or_the_feature_engine_are_accepted(words: list[str]) -> None:
    (pair, *_) = built(*SEVERAL, *words).pairs
    assert pair.treated is not None
    assert pair.treated.label == "pcgrad"


@pytest.mark.parametrize("words", [["transform=clip"], ["transform=none"]])
def test_keys_of_shared_without_an_aggregator_are_warned_of(words: list[str]) -> None:
    plain = built("aggregator=none", *SEVERAL, *words, "accumulate=3")
    assert all(item.aggregator is None for item in plain.surgery.interventions)
    with pytest.warns(SurgeryWarning, match="^shared: has no effect without an aggregator"):
        built("aggregator=none", *SEVERAL, *words, "shared.granularity=module", "accumulate=3")


def test_an_aggregator_that_is_not_homogeneous_is_refused_with_a_loss_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gs.TrimmedMean, "properties", frozenset({"deterministic"}))
    with pytest.raises(ConfigError) as found:
        built("aggregator=trimmed_mean", *SEVERAL, "precision=float16")
    assert found.value.faults[1:] == [
        "aggregator: TrimmedMean(beta=0.1) depends on the size of the gradients, which the loss "
        "scale changes, as 'homogeneous' is not one of its properties. Use a precision that needs "
        "no loss scale, such as bfloat16."
    ]
