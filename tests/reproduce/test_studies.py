"""Planned studies: the numbers that runs will have, and faults of bands about others."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gradsurg.experiment.execution import execute
from gradsurg.experiment.run_directory import EFFECTS, METRICS, RunDirectory
from gradsurg.reproduce.expected import Band, Claim, Drawing, Expected, papers, read_expected
from gradsurg.reproduce.studies import (
    PlannedRun,
    WrongExperiment,
    missing_measurements,
    plan_runs,
    plan_study,
    words_of,
)
from tests.builds import built
from tests.papers import searched

SHORT = ("steps=10", "log_every=5", "eval_every=10", "effects_every=5", "batch_size=8")
ROOT = Path(__file__).parents[2]
BESIDE = {"seed", "effects_every", "test_examples", "chance_loss"}  # no outcomes

SPEED = "effect/clip/output.weight/cosine"
OUTCOMES = {"test/loss": 10, "test/accuracy": 0, "examined/rank/a": 0, "train/loss": 5}
EFFECTS_OF_CLIP = {
    f"effect/clip/output.{name}/{number}": 5
    for name in ("weight", "bias")
    for number in ("cosine", "norm_ratio")
}
RUN = PlannedRun({"label": "clip", "seed": 0, "model.width": 8}, 20, OUTCOMES | EFFECTS_OF_CLIP)
PLAIN = PlannedRun({"label": "none", "seed": 0, "model.width": 8}, 20, OUTCOMES)


def faults(figure: Drawing | None = None, **band: object) -> Sequence[str]:
    told = {"name": "low", "says": "It is low.", "metric": "test/loss", "high": 1, "study": "mini"}
    own = Band(**{**told, **band})
    said = {"claims": {"main": Claim("x")}, "source": "x", "published": "x"}
    expected = Expected(**said, quick=("mini", "other"), bands=(own,), figure=figure)
    plans = {"mini": {"clip-0": RUN, "none-0": PLAIN}, "other": {"none-0": PLAIN}}
    return missing_measurements(expected, plans)


@pytest.mark.parametrize(
    "words",
    [
        ("transform=clip", "until='test/accuracy >= 2'"),
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ("transform=clip", "task=diabetes", "site=relu_nodes"),
                (
                    searched("adebayo2018"),
                    "task=saliency",
                    "model=convnet",
                    "when.start=${steps}",
                    "transform=clip",
                ),
                ("aggregator=pcgrad", "task=overlay", "model=multi_head", "control=none"),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_planned_numbers_match_those_of_the_finished_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    experiment = built(*SHORT, *words)
    foreseen = plan_runs(experiment)
    for run in experiment.pairs[0].runs:
        place = RunDirectory(execute(run, tmp_path, []).directory)
        summary, expected = place.read_summary(), foreseen[run.name]
        numbers = {key for key, value in summary.items() if isinstance(value, int | float)}
        # only of a run that gets there; and its state
        reached = {"until/step", "diverged"}
        outcomes = {key for key in expected.numbers if not key.startswith("effect/")}
        assert numbers - BESIDE - {"time/measured_step_ms"} == outcomes - reached
        rows = place.read_rows(METRICS)
        logged = {key: row["step"] for row in reversed(rows) for key in row if "/" in key}
        assert logged == {key: expected.numbers[key] for key in outcomes if expected.numbers[key]}
        effects = place.read_rows(EFFECTS)
        measured = {
            f"effect/{row['transform']}/{row['site']}/{name}": 5 for row in effects for name in row
        }
        foretold = {key: every for key, every in expected.numbers.items() if key not in outcomes}
        assert foretold.items() <= measured.items()
        assert {key.rpartition("/")[0] for key in measured} == {
            key.rpartition("/")[0] for key in foretold
        }


def test_bands_and_figures_with_planned_numbers_have_no_faults() -> None:
    assert not faults()
    assert not faults(metric="test/loss - examined/rank/a", runs={"label": "clip"})
    assert not faults(at=10, minus={"label": "none"}, runs={"label": "clip"})
    assert not faults(metric=SPEED, runs={"label": "clip"}, at=15)
    assert not faults(runs={"label": "clip"}, minus_study="other")
    assert not faults(Drawing("own", "whatever the paper's figure.py makes of it"))


@pytest.mark.parametrize(
    ("band", "fault"),
    [
        (
            {"metric": "test/acuracy"},
            "did you mean 'test/accuracy'? There will be no test/acuracy.",
        ),
        (
            {"metric": "test/accuracy", "at": "most"},
            "there will be no test/accuracy except at the end. There are: test/loss, train/loss.",
        ),
        ({"at": 15}, "there will be test/loss at every 10 steps up to 20, not at 15"),
        (
            {"runs": {"label": "clp"}},
            "did you mean 'clip'? No run has label: clp. There are: clip, none.",
        ),
        (
            {"runs": {"model.wdth": 8}},
            "did you mean 'model.width'? The runs have no key 'model.wdth'. "
            "There are: label, seed, model.width.",
        ),
        ({"runs": {"label": "clip", "seed": 1}}, "no run has label: clip, seed: 1. There are: 0."),
        (
            {"metric": "effect/clp/output.weight/cosine", "runs": {"label": "clip"}},
            "did you mean 'effect/clip/output.weight/cosine'?",
        ),
        (
            {"metric": "effect/clip/output.wight/cosine", "runs": {"label": "clip"}},
            "output.weight/cosine'? There will be no effect/clip/output.wight/cosine.",
        ),
        (
            {"metric": "effect/clip", "runs": {"label": "clip"}},
            "there will be no effect/clip. There are: ",
        ),
        ({"metric": SPEED, "runs": {"label": "clip"}, "at": 3}, "at every 5 steps up to 20, not"),
        (
            {"minus_study": "other", "minus": {"label": "clip"}},
            "no run has label: clip. There are: none.",
        ),
        (
            {"minus_study": "other", "metric": SPEED, "runs": {"label": "clip"}},
            "there will be no effect/clip/output.weight/cosine. There are: none.",
        ),
    ],
)
def test_a_band_about_a_number_that_no_run_will_have_is_a_fault_with_the_nearest_name(
    band: dict[str, object], fault: str
) -> None:
    (said,) = faults(**band)
    assert said.startswith("low: other: " if "minus_study" in band else "low: mini: ")
    assert fault in said


@pytest.mark.parametrize(
    ("kind", "metric", "wrong"),
    [
        ("curves", "train/loss", "test/accuracy"),
        ("outcomes", "test/accuracy", "test/precision"),
    ],
)
def test_a_figure_of_a_number_that_no_run_will_have_is_a_fault(
    kind: str, metric: str, wrong: str
) -> None:
    assert not faults(Drawing(kind, metric))
    (said,) = faults(Drawing(kind, wrong))
    assert said.startswith(f"figure: there will be no {wrong} to draw. ")
    assert " There are: " in said


IN_THE_GATE = ("baruch2019", "chen2021", "karimireddy2019", "liu2021", "schoenbauer2024")


# An attack asks for gradients of its own, which the trial step has not.
@pytest.mark.filterwarnings("ignore:no gradient passes at discretize:gradsurg.SurgeryWarning")
@pytest.mark.parametrize(
    "paper",
    [
        pytest.param(paper, marks=pytest.mark.slow if paper in IN_THE_GATE else pytest.mark.full)
        for paper in papers(ROOT)
    ],
)
def test_every_shipped_band_is_about_numbers_that_runs_will_have(paper: str) -> None:
    expected, folder = read_expected(ROOT, paper), ROOT / "experiments" / paper
    try:
        planned = {name: plan_study(words_of(folder, name, [])).runs for name in expected.quick}
    except WrongExperiment as error:
        if "gradsurg.tasks.fetch" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
    assert missing_measurements(expected, planned) == []
