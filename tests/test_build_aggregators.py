"""What is wrong with an aggregator is said of the key that it is due to, before anything trains."""

import pytest

import gradsurg as gs
from gradsurg.aggregators.base import NormMatchedSum
from gradsurg.config.errors import ConfigError
from gradsurg.effects.ledger import SurgeryWarning
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
        (["shared.granularity=modul"], ["shared.granularity: must be one of 'whole', 'module' or"]),
        (["shared.granularity=[]"], ["shared.granularity: must have at least one pattern"]),
        (["shared.pattern=nope"], ["shared.pattern: nothing matches 'nope'. There are: trunk."]),
        (
            ["shared.engine=feature", "shared.features=nope"],
            ["shared.features: there is no module 'nope'. There are: root, trunk,"],
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
                "aggregator.weights: there is no task 'frist'. There are: first, second. "
                "Did you mean 'first'?"
            ],
        ),
        (
            ["aggregator=fixed_weights", "aggregator.weights={first: much, second: 0.5}"],
            ["aggregator.weights.first: must be a number, found 'much'"],
        ),
        (
            ["aggregator=fixed_weights", "aggregator.weights={first: 1, second: 0.5, third: 2}"],
            ["aggregator.weights: there is no task 'third'. There are: first, second."],
        ),
        (
            ["aggregator=grad_drop", "aggregator.leak=2"],
            ["aggregator.leak: must be <= 1.0, found 2"],
        ),
        (["aggregator=krum"], ["aggregator: Krum(num_byzantine=0, num_selected=1) needs 3 tasks"]),
        (
            ["when.start=100"],
            ["when.start: Steps(start=100, stop=None, every=1) never fires in 10 steps"],
        ),
        (["when=threshold"], ["when: looks at one gradient, and an aggregator has several"]),
        (
            ["when=for_task", "when.task=nope"],
            ["when: looks at one gradient, and an aggregator has several"],
        ),
        (
            ["when=flag", "when.flag=late"],
            ["when.flag: Flag(flag='late', on=False) never fires in 10"],
        ),
        *[
            (
                [f"transform={words}"],
                [
                    "transform.grokfast_ema: GrokfastEMA(decay=0.98, strength=2.0) has a state for each site, which the gradients of 2 tasks "
                    "would share: act after the aggregator, at Parameters with stage 'step', or on one "
                    "task, by a ForTask trigger"
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
        (["task=digits", "model=mlp"], ["aggregator: pcgrad makes one gradient of those of sev"]),
        (["aggregator.order=nope"], ["aggregator.order: must be one of"]),
        (["shared.engine=feature", "accumulate=3"], [ONE_FORWARD]),
        (["shared.engine=feature", "accumulate=3", "steps=0"], [ONE_FORWARD]),
        (
            ["shared.engine=feature", "compile=true"],
            ["shared.engine: feature goes on from a representation, which a model that is "],
        ),
    ],
)
def test_a_wrong_aggregator_is_a_line_of_its_key(words: list[str], faults: list[str]) -> None:
    start = () if words[0].startswith("aggregator=") else ("aggregator=pcgrad",)
    with pytest.raises(ConfigError) as found:
        built(*start, *SEVERAL, *words)
    said = found.value.faults
    assert [line[: len(start)] for line, start in zip(said, faults, strict=True)] == faults


def test_the_sum_as_long_as_an_update_is_its_control() -> None:
    (pair, *_) = built("aggregator=mgda", *SEVERAL, "control=norm_matched").pairs
    assert pair.control is not None
    (control,) = pair.control.surgery.interventions
    assert control.names == ("norm_matched_sum",)
    assert control.aggregator == NormMatchedSum(gs.MGDA())


@pytest.mark.parametrize("way", [["site.stage=step"], ["when=for_task", "when.task=first"]])
def test_what_remembers_can_act_where_it_is_told_to(way: list[str]) -> None:
    built("aggregator=pcgrad", "transform=grokfast_ema", *SEVERAL, *way)


def test_without_a_step_to_make_the_places_are_looked_for_all_the_same() -> None:
    with pytest.raises(ConfigError, match=r"^shared.pattern: nothing matches 'nope'"):
        built("aggregator=pcgrad", *SEVERAL, "steps=0", "shared.pattern=nope")
    words = ("shared.engine=feature", "shared.features=nope", "steps=0")
    with pytest.raises(ConfigError, match=r"^shared.features: there is no module 'nope'"):
        built("aggregator=pcgrad", *SEVERAL, *words)


def test_when_is_the_transforms_where_there_is_one() -> None:
    built("aggregator=pcgrad", "transform=clip", *SEVERAL, "when=threshold")


@pytest.mark.parametrize(
    "words",
    [
        ["aggregator=pcgrad", "accumulate=3"],
        ["aggregator=pcgrad", "shared.engine=feature"],
    ],
)
def test_batches_of_a_step_may_wait_where_no_engine_needs_one_forward(words: list[str]) -> None:
    built(*SEVERAL, *words)


@pytest.mark.parametrize("words", [["transform=clip"], ["transform=none"]])
def test_where_an_aggregator_acts_is_said_in_vain_where_there_is_none(words: list[str]) -> None:
    built("aggregator=none", *SEVERAL, *words, "accumulate=3")
    with pytest.warns(SurgeryWarning, match="^shared: has no effect without an aggregator"):
        built("aggregator=none", *SEVERAL, *words, "shared.engine=feature", "accumulate=3")


def test_one_that_depends_on_the_size_of_its_rows_is_refused_where_the_loss_is_scaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gs.TrimmedMean, "properties", frozenset({"deterministic"}))
    with pytest.raises(ConfigError) as found:
        built("aggregator=trimmed_mean", *SEVERAL, "precision=float16")
    assert found.value.faults[1:] == [
        "aggregator: TrimmedMean(beta=0.1): sees gradients times the loss scale, and this "
        "aggregator depends on their size: 'homogeneous' is not one of its properties. Use a "
        "precision that needs no loss scale, as bfloat16."
    ]
