"""The grammar of `tune`, the arms' choices, and what cannot be tuned."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.tuning import FIRST_SEED, Tuning
from tests.builds import built


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=log(1e-3, 1, 4)", [0.001, 0.01, 0.1, 1.0]),
        ("lr=log(0.1,1,3)", [0.1, 0.3162, 1.0]),
        ("a.b=lin(0,1,5)", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("batch_size=lin(16,64,4)", [16, 32, 48, 64]),
        ("model.hidden=[[8], [8, 8]]", [[8], [8, 8]]),
        ("lr=[1e-3, 0.1]", [0.001, 0.1]),
    ],
)
def test_the_values_of_a_key(text: str, values: list[object]) -> None:
    (axis,) = Grid.of(text).axes
    assert list(axis.values) == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]


def test_several_keys_are_a_product() -> None:
    grid = Grid.of("lr=[0.1,1]; optimizer.momentum=[0,0.5,0.9]")
    assert len(grid) == 6
    assert [*grid.combinations()][:2] == [
        {"lr": 0.1, "optimizer.momentum": 0},
        {"lr": 0.1, "optimizer.momentum": 0.5},
    ]
    assert [axis.by_log for axis in grid.axes] == [True, False]


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("lr", "must be as optimizer.lr=log(1e-3,1,7): a key, and log("),
        ("lr=log(1,0.1,3)", "log(1,0.1,3): needs (from,to,number) with 0 < from < to and 2 values"),
        ("lr=lin(0,1,x)", "lin(0,1,x): needs (from,to,number) with from < to"),
        ("lr=[0.1]", "lr: needs two values or more, each once"),
        ("lr=[0.1,1];lr=[1,2]", "has lr twice"),
        ("lrr=[0.1,1]", "there is no key 'lrr'. Did you mean 'lr'? There are: transform, "),
        (
            "optimizer.lrr=[1,2]",
            "optimizer.lrr: 'lrr' is not a key there. Did you mean 'lr'? There are: lr, ",
        ),
        ("seeds=[1,2]", "seeds cannot be tuned; needs a field of a group"),
        ("lr=[-1,1]", "lr=-1: lr: must be > 0.0, found -1"),
        ("transform.clip.value=[1,-2]", "transform.clip.value=-2: transform.clip.value: must be"),
        ("lr=[0.1,1] metric=train/loss", "needs metric=test/.., found metric=train/loss"),
        ("lr=[0.1,1] metric=test/f1", "the task has no metric=test/f1, it has test/loss, "),
        ("lr=[0.1,1] validation=0", "must be above 0: tune chooses on it, found 0"),
        ("optimizer.lr=[0.1,1] lr=1", "optimizer.lr is replaced by lr=1; tune lr instead"),
        (f"lr=[0.1,1] seed={FIRST_SEED}", f"{FIRST_SEED} is one of the tuning seeds"),
        ("lr=log(1e-3,1,4000)", "24,002 runs need yes=true"),
    ],
)
def test_a_wrong_tuning_is_one_line(word: str, fault: str) -> None:
    tune, *others = word.split(" ")
    with pytest.raises(ConfigError) as caught:
        built("transform=clip", f'tune="{tune}"', *others)
    (line,) = caught.value.faults
    assert line.startswith(("tune: ", "validation: "))
    assert fault in line


def tuned(folder: Path, tune: str, *words: str) -> Tuning:
    experiment = built("transform=clip", f"out={folder}", f'tune="{tune}"', "tune_seeds=2", *words)
    assert experiment.tuning is not None
    assert experiment.compared is None
    return experiment.tuning


def end(tuning: Tuning, folder: Path, scores: Mapping[tuple[str, float], object]) -> None:
    """Write the summaries of all tuning runs; the scores are by label and learning rate."""
    for run in tuning.runs:
        lr = run.identity["optimizer"]["lr"]  # type: ignore[index]
        score = scores[run.label, lr]
        accuracy, loss = score if isinstance(score, tuple) else (score, 1.0)
        summary = {"arm": run.arm, "label": run.label, "seed": run.seed, "steps": 1}
        summary |= {"validation/accuracy": accuracy, "validation/loss": loss}
        diverged = accuracy is None and run.seed == FIRST_SEED
        summary["validation/accuracy"] = None if diverged else accuracy or 0.99
        summary["state"] = "diverged" if diverged else "finished"
        directory = RunDirectory(run.directory(folder))
        directory.plan(run.facts, run.identity)
        directory.write_summary(summary)


def choices(tuning: Tuning, folder: Path) -> dict[str, object]:
    """Return the learning rate that each arm has chosen."""
    return {role: each.candidate.values["lr"] for role, each in tuning.choices(folder).items()}


@pytest.mark.parametrize(
    ("clip", "none", "chosen"),
    [
        ([0.5, 0.8, 0.7], [0.5, None, 0.4], (1, 0.1)),  # a diverged seed is worst
        ([(0.5, 2.0)] * 3, [(0.5, 2.0), (0.5, 1.0), (0.5, 1.0)], (0.1, 1)),  # loss, then order
    ],
)
def test_each_arm_chooses_its_best_value(
    tmp_path: Path, clip: list[object], none: list[object], chosen: tuple[float, float]
) -> None:
    tuning, rates = tuned(tmp_path, "lr=[0.1,1,10]"), (0.1, 1, 10)
    scores = {("clip", lr): score for lr, score in zip(rates, clip, strict=True)}
    scores |= {("none", lr): score for lr, score in zip(rates, none, strict=True)}
    end(tuning, tmp_path, scores)
    assert choices(tuning, tmp_path) == {"treated": chosen[0], "control": chosen[1]}


def test_less_is_better_for_a_loss(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "lr=[0.1,1]", "metric=test/loss")
    assert (tuning.metric, tuning.lower) == ("validation/loss", True)
    scores = {(label, lr): (0.5, lr) for label in ("clip", "none") for lr in (0.1, 1)}
    end(tuning, tmp_path, scores)
    assert choices(tuning, tmp_path) == {"treated": 0.1, "control": 0.1}


def test_the_arms_are_compared_at_their_values_with_other_seeds(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "lr=[0.1,1]")
    scores = {("clip", 0.1): 0.5, ("clip", 1): 0.8, ("none", 0.1): 0.6, ("none", 1): 0.2}
    end(tuning, tmp_path, scores)
    again = built("transform=clip", f"out={tmp_path}", 'tune="lr=[0.1,1]"', "tune_seeds=2")
    assert again.compared is not None
    (pair,) = again.compared
    assert pair.treated is not None
    assert pair.control is not None
    assert pair.treated.identity["optimizer"]["lr"] == 1  # type: ignore[index]
    assert pair.control.identity["optimizer"]["lr"] == 0.1  # type: ignore[index]
    assert pair.treated.controls == {"plain": pair.control.name}
    assert pair.treated.study == "digits-mlp"
    assert {run.study for run in tuning.runs} == {"digits-mlp/tuning"}
    assert {run.seed for run in tuning.runs} == {FIRST_SEED, FIRST_SEED + 1}
    assert all(run.schedule.validation == 0.2 for run in [*tuning.runs, *pair.runs])
    assert all(run.schedule.effects_every == 0 for run in tuning.runs)


def test_a_key_of_the_transform_alone_leaves_the_control_as_it_is(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "lr=[0.1,1]; transform.clip.value=[0.1,1,2]")
    assert len(tuning.runs) == 2 * (2 + 6)
    text = tuning.budget(range(8))
    assert text.startswith("6 values x 2 seeds x 2 arms, each once: 16 runs (seeds 1000000 to ")
    assert text.endswith("then 16 with the chosen values (seeds 0 to 7)")
    end(tuning, tmp_path, {(label, lr): 0.5 for label in ("clip", "none") for lr in (0.1, 1)})
    experiment = built(
        "transform=clip",
        f"out={tmp_path}",
        'tune="lr=[0.1,1]; transform.clip.value=[0.1,1,2]"',
        "tune_seeds=2",
    )
    files = tuning.write(experiment.settings)
    contents = {
        one["label"]: one
        for one in (json.loads(file.read_text(encoding="utf-8")) for file in files)
    }
    assert [axis["key"] for axis in contents["none"]["axes"]] == ["lr"]
    assert (len(contents["none"]["rows"]), len(contents["clip"]["rows"])) == (4, 12)
    assert contents["clip"]["chosen"] == {"lr": 0.1, "transform.clip.value": 0.1}


def test_a_wider_grid_replaces_the_choice_of_an_arm(tmp_path: Path) -> None:
    for tune in ("lr=[0.1,1]", "lr=[0.1,1,2]"):
        tuning = tuned(tmp_path, tune)
        scores = {(label, lr): lr / 4 for label in ("clip", "none") for lr in (0.1, 1, 2)}
        end(tuning, tmp_path, scores)
        settings = built("transform=clip", f"out={tmp_path}", "validation=0.2").settings
        tuning.write(settings)
    files = [*(tmp_path / "digits-mlp" / "tuning").glob("*.json")]
    assert len(files) == 2
    assert {json.loads(file.read_text(encoding="utf-8"))["chosen"]["lr"] for file in files} == {2}
