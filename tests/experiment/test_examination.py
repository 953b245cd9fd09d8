"""An examination after the training: its effects, its numbers, and an unchanged training."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.run import Run, Until
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_reader import read
from gradsurg.report.terminal import Runs, report
from gradsurg.tasks.base import Classification, Data, Examination, Examined
from gradsurg.tasks.digits import Digits
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform
from gradsurg.triggers.base import Trigger
from tests import papers
from tests.builds import built
from tests.runs import (
    SHORT,
    Torn,
    a_run,
    assert_same,
    flat,
    kept_in,
    lines,
    notes,
    raising,
    untimed,
)

pytestmark = pytest.mark.usefixtures("one_thread")

AFTER = gs.Steps(start=SHORT.steps)
RELUS = gs.Nodes("Relu", side="leave")


@dataclass(frozen=True)
class Looked(Classification, Examined):
    """Digits, then the norm of the gradient of all scores with respect to the test images."""

    nan: bool = False

    def load(self) -> Data:
        return Digits().load()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets) * (float("nan") if self.nan else 1)

    def examine(self, model: nn.Module, data: Data) -> Examination:
        assert not model.training
        images = data.test_inputs.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(images).sum(), images)
        numbers = {"norm": grad.norm().item(), "drawn": torch.rand(()).item()}
        return Examination(numbers, {"first": grad[0, 0].tolist()})


def examined(transform: Transform | None = None, seed: int = 0, nan: bool = False) -> Run:
    return a_run(transform, RELUS, AFTER, seed=seed, task=Looked(nan))


def state(record: Record) -> object:
    """All that training has changed; the surgery's own is beside it."""
    return flat({name: kept_in(record.directory)[name] for name in STATES})


STATES = ("model", "optimizer", "generators")
CUT = gs.Clamp(0.0, None)


def saved(record: Record) -> object:
    return read(record.directory / "examined.json")


def test_a_surgery_after_the_last_step_changes_the_examination_only(tmp_path: Path) -> None:
    treated, looked, plain = (
        execute(replace(run, study=study), tmp_path, [])
        for study, run in (("treated", examined(CUT)), ("looked", examined()), ("plain", a_run()))
    )
    assert state(treated) == state(looked) == state(plain)
    assert lines(treated, "metrics.jsonl") == lines(looked, "metrics.jsonl")
    differ = {key for key in looked.summary if looked.summary[key] != treated.summary[key]}
    assert {key for key in differ if not key.startswith("time/")} == {
        "examined/norm",
        "arm",
        "label",
    }
    assert saved(treated) != saved(looked)
    assert notes(looked) == notes(treated) == []
    numbers = {"examined/norm", "examined/drawn"}
    assert looked.summary.keys() - plain.summary.keys() == numbers
    trained = {key: value for key, value in untimed(looked.summary).items() if key not in numbers}
    assert untimed(plain.summary) == trained
    assert saved(plain) is None


def test_the_random_numbers_of_an_examination_depend_on_the_seed_alone(tmp_path: Path) -> None:
    shorter = a_run(task=Looked(), schedule=replace(SHORT, steps=10))
    runs = [examined(), examined(CUT), replace(shorter, study="shorter"), examined(seed=1)]
    *same, other = (execute(run, tmp_path, []).summary["examined/drawn"] for run in runs)
    with random_state.preserved():
        random_state.seed(0)
        assert len({*same, other, torch.rand(()).item()}) == 3
    assert same[0] == same[1] == same[2]


@pytest.mark.parametrize("broken", ["write_examined_effects", "write_summary"])
def test_a_run_interrupted_in_its_examination_ends_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    expected = execute(examined(CUT), tmp_path / "whole", [])
    with monkeypatch.context() as patch, pytest.raises(Torn):
        patch.setattr(RunDirectory, broken, raising)
        execute(examined(CUT), tmp_path / "torn", [])
    resumed = execute(examined(CUT), tmp_path / "torn", [])
    assert_same(resumed, expected)
    assert saved(resumed) == saved(expected)


def test_a_run_that_ends_early_is_examined_as_after_its_last_step(tmp_path: Path) -> None:
    early = replace(SHORT, eval_every=5, until=Until.of("test/loss <= 100"))
    runs = [replace(examined(t), schedule=early) for t in (None, CUT)]
    plain, treated = (execute(run, tmp_path, []) for run in runs)
    assert plain.summary["steps"] == treated.summary["steps"] == 5
    assert plain.summary["train/loss"] == treated.summary["train/loss"]
    assert plain.summary["examined/norm"] != treated.summary["examined/norm"]


def test_a_run_diverges_in_its_examination_too_and_is_not_examined_after(tmp_path: Path) -> None:
    late, early = (
        execute(run, tmp_path, []).summary for run in (examined(gs.Scale(1e38)), examined(nan=True))
    )
    assert late["state"] == early["state"] == "diverged"
    assert math.isfinite(float(str(late["test/loss"])))
    assert late["examined/norm"] == math.inf
    assert not [key for key in early if key.startswith("examined/")]


def told_at_sites(tmp_path: Path, when: Trigger, every: int) -> str:
    """Return the terminal report of a treated run and its control, from the effects on."""
    schedule = replace(SHORT, effects_every=every)
    runs = [a_run(t, RELUS, when, task=Looked(), schedule=schedule) for t in (gs.Scale(2.0), None)]
    treated, control = (execute(run, tmp_path, []).directory for run in runs)
    text = report([Runs(treated, control)])
    return " ".join(text[text.index("Gradients at") : text.index("2 runs in")].split())


HEAD = "Gradients at each site in the examination after the training, means over 1 run"
ALWAYS = f"Gradients at each site, means over 1 run at one step in 5: .* {SHORT.steps} {HEAD}: .* 1"


@pytest.mark.parametrize(
    ("when", "every", "pattern"),
    [
        (AFTER, 5, f"{HEAD} .the surgery acted on no gradient in the training.: .*% 1"),
        (gs.Steps(), 5, ALWAYS),
        (AFTER, 0, ".*.the surgery was not measured in the training.*- 1"),
        (gs.Steps(), 0, ".*.the surgery was not measured in the training.*- 1"),
    ],
)
def test_the_effects_of_an_examination_have_a_table_of_their_own(
    tmp_path: Path, when: Trigger, every: int, pattern: str
) -> None:
    text = told_at_sites(tmp_path, when, every)
    assert re.fullmatch(pattern, text)
    assert (every > 0 and when is AFTER) <= ("fired" not in text)


def test_the_effects_of_an_examination_do_not_count_for_the_training(tmp_path: Path) -> None:
    looked, plain = (
        execute(replace(a_run(gs.Scale(2.0), RELUS, task=task), study=study), tmp_path, [])
        for task, study in ((Looked(), "looked"), (Digits(), "plain"))
    )
    assert lines(looked, "effects.jsonl") == lines(plain, "effects.jsonl")
    (row,) = lines(looked, "examined_effects.jsonl")
    assert (row["step"], row["calls"], row["seen"]) == (SHORT.steps, 1, 1)
    assert not (plain.directory / "examined_effects.jsonl").exists()
    RunDirectory(looked.directory).clear()
    assert not (looked.directory / "examined_effects.jsonl").exists()


SALIENCY = (papers.searched("adebayo2018"), "task=saliency")


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        built(*words)
    return caught.value.faults


def test_a_trigger_after_the_last_step_is_refused_without_an_examination() -> None:
    words = ["transform=clip", "site=relu_nodes", "steps=7", "when.start=7", "model=convnet"]
    built(*words, *SALIENCY)
    (fault,) = refused(*words)
    assert fault == "when.start: must be <= 6, the last step of the run, found 7"
    words[3] = "when.start=8"
    (fault,) = refused(*words, *SALIENCY)
    assert fault == "when.start: must be <= 7, the last step of the run, found 8"


def test_a_model_that_cannot_be_examined_is_refused_before_it_is_trained() -> None:
    rule = "every layer must have reset_parameters to be drawn anew"
    assert refused(*SALIENCY, "model=vit") == [f"task: {rule}, found the model itself (ViT)"]
