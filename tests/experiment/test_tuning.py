"""The grammar of `tune`, the arms' choices and budgets, and what cannot be tuned."""

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.grid import Grid
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.tuning import FIRST_SEED, Tuning
from tests.builds import built

PLAIN = "control plain"


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
        ("momentum", "must be lr, or KEY=log(from,to,number), KEY=lin("),
        ("lr; optimizer.lr", "has lr twice"),
        ("lr optimizer.lr=null", "lr: the optimizer's config has no rate to try others around"),
        ("lr=log(1,0.1,3)", "log(1,0.1,3): needs (from,to,number) with 0 < from < to and 2 values"),
        ("lr=lin(0,1,x)", "lin(0,1,x): needs (from,to,number) with from < to"),
        ("lr=[0.1]", "lr: needs two values or more, each once"),
        ("lr=[0.1,1];lr=[1,2]", "has lr twice"),
        ("lrr=[0.1,1]", "did you mean 'lr'? There is no key 'lrr'."),
        (
            "optimizer.lrr=[1,2]",
            "optimizer.lrr: did you mean 'lr'? There is no key 'lrr'. There are: lr, ",
        ),
        ("seeds=[1,2]", "seeds cannot be tuned; needs a field of a group"),
        ("lr=[-1,1]", "lr=-1: lr: must be > 0, found -1"),
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
    tune, *others = re.split(r"(?<!;) ", word)
    with pytest.raises(ConfigError) as caught:
        built("transform=clip", f'tune="{tune}"', *others)
    (line,) = caught.value.faults
    assert line.startswith(("tune: ", "validation: "))
    assert fault in line


def tuned(folder: Path, tune: str, *words: str) -> Tuning:
    if not any(word.startswith("transform=") for word in words):
        words = ("transform=clip", *words)
    experiment = built(f"out={folder}", f'tune="{tune}"', "tune_seeds=2", *words)
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
    assert choices(tuning, tmp_path) == {"treated": chosen[0], PLAIN: chosen[1]}


def test_less_is_better_for_a_loss(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "lr=[0.1,1]", "metric=test/loss")
    assert (tuning.metric, tuning.lower) == ("validation/loss", True)
    scores = {(label, lr): (0.5, lr) for label in ("clip", "none") for lr in (0.1, 1)}
    end(tuning, tmp_path, scores)
    assert choices(tuning, tmp_path) == {"treated": 0.1, PLAIN: 0.1}


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


def rates_of(tuning: Tuning, role: str) -> list[float]:
    """The learning rates that an arm tries, each once."""
    runs = [each.pair(FIRST_SEED).roles[role] for each in tuning.arms[role].candidates]
    found = [run.identity["optimizer"]["lr"] for run in runs]  # type: ignore[index]
    return sorted({*found})


@pytest.mark.parametrize(
    ("words", "centre"),
    [
        (("lr", "optimizer.lr=0.3"), 0.3),
        (("optimizer.lr", "optimizer.lr=0.3"), 0.3),
        (("lr", "optimizer.lr=0.3", "lr=0.8"), 0.8),
        (("lr", "optimizer=adam", "optimizer.lr=0.002"), 0.002),
    ],
)
def test_lr_alone_is_five_rates_around_that_of_the_config(
    words: tuple[str, ...], centre: float, tmp_path: Path
) -> None:
    tuning = tuned(tmp_path, *words)
    around = [centre / 4, centre / 2, centre, 2 * centre, 4 * centre]
    for role in ("treated", PLAIN):
        assert rates_of(tuning, role) == pytest.approx(around)
        assert [axis.key for axis in tuning.arms[role].grid.axes] == ["lr"]


def test_lr_alone_takes_part_in_a_grid_and_the_control_tries_as_many_rates(
    tmp_path: Path,
) -> None:
    tuning = tuned(tmp_path, "lr; transform.clip.value=[0.1,1,2]", "lr=0.8")
    assert rates_of(tuning, "treated") == [0.2, 0.4, 0.8, 1.6, 3.2]
    finer = rates_of(tuning, PLAIN)
    assert (finer[0], finer[-1], len(finer)) == (0.2, 3.2, 15)
    ratios = [high / low for low, high in pairwise(finer)]
    assert ratios == pytest.approx([16 ** (1 / 14)] * 14, rel=1e-3)
    assert len(tuning.runs) == 2 * (15 + 15)
    assert tuning.budget(range(8)) == (
        "15 configurations x 2 seeds x 2 arms = 60 runs (seeds 1000000 to 1000001), then 16 with "
        "the chosen values (seeds 0 to 7); the control tries 15 rates from 0.2 to 3.2, to have as "
        "many configurations as the others"
    )


def test_other_keys_that_change_the_control_stay_in_its_finer_grid(tmp_path: Path) -> None:
    grid = "lr=[0.1,1]; optimizer.momentum=[0,0.9]; transform.clip.value=[0.1,1,2]"
    tuning = tuned(tmp_path, grid)
    axes = {axis.key: axis.values for axis in tuning.arms[PLAIN].grid.axes}
    assert {key: len(values) for key, values in axes.items()} == {"lr": 6, "optimizer.momentum": 2}
    sizes = {role: len(arm.candidates) for role, arm in tuning.arms.items()}
    assert sizes == {PLAIN: 12, "treated": 12}


def test_without_a_rate_the_budgets_are_unequal_and_announced_as_such(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "transform.clip.value=[0.1,1,2]; batch_size=[32,64]")
    assert len(tuning.runs) == 2 * (6 + 2)
    assert tuning.budget(range(8)).startswith(
        "unequal budgets, as no rate is tuned: 2 seeds x (2 of the control, 6 of clip) = 16 runs ("
    )


def test_every_kind_of_control_is_tuned_and_named_at_its_value(tmp_path: Path) -> None:
    words = ("lr=[0.1,1]; transform.clip.value=[0.1,1]", "control=[plain,norm_matched]")
    tuning = tuned(tmp_path, *words)
    other = "control norm_matched"
    sizes = {role: (len(arm.candidates), arm.is_finer) for role, arm in tuning.arms.items()}
    assert sizes == {PLAIN: (4, True), other: (4, False), "treated": (4, False)}
    best = {"none": 0.2154, "norm_matched-clip": 1, "clip": 0.1}
    scores = {
        (run.label, lr): 0.9 if lr == best[run.label] else 0.1
        for run in tuning.runs
        for lr in (run.identity["optimizer"]["lr"],)  # type: ignore[index]
    }
    end(tuning, tmp_path, scores)
    tune = f'tune="{words[0]}"'
    again = built("transform=clip", f"out={tmp_path}", tune, "tune_seeds=2", words[1])
    assert again.compared is not None
    (pair,) = again.compared
    assert pair.treated is not None
    chosen = {run.label: run.identity["optimizer"]["lr"] for run in pair.runs}  # type: ignore[index]
    assert chosen == best
    assert pair.treated.controls == {kind: run.name for kind, run in pair.controls.items()}
    assert [*pair.controls] == ["plain", "norm_matched"]


def test_the_chain_without_a_link_is_compared_with_the_control_that_was_chosen(
    tmp_path: Path,
) -> None:
    words = ("transform=[clip,sign]", "attribute=true")
    tuning = tuned(tmp_path, "lr=[0.1,1]", *words)
    scores = {(run.label, lr): 0.5 for run in tuning.runs for lr in (0.1, 1)}
    end(tuning, tmp_path, scores | {("none", 1): 0.9})
    again = built(f"out={tmp_path}", 'tune="lr=[0.1,1]"', "tune_seeds=2", *words)
    assert again.compared is not None
    (pair,) = again.compared
    assert pair.control is not None
    treated = [run for role, run in pair.roles.items() if not role.startswith("control")]
    assert [run.controls for run in treated] == [{"plain": pair.control.name}] * 3


def written(tuning: Tuning, folder: Path, *words: str) -> dict[str, Mapping[str, Any]]:
    """Write the choices; return the content of each file by its arm's label."""
    settings = built(*(words or ("transform=clip",)), f"out={folder}", "validation=0.2").settings
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in tuning.write(settings)]
    return {one["label"]: one for one in contents}


def test_a_file_has_the_configurations_that_the_arm_tried(tmp_path: Path) -> None:
    tuning = tuned(tmp_path, "lr=[0.1,1]; transform.clip.value=[0.1,1,2]")
    rates = [0.1, 0.1585, 0.2512, 0.3981, 0.631, 1]
    end(tuning, tmp_path, {(label, lr): 0.5 for label in ("clip", "none") for lr in rates})
    contents = written(tuning, tmp_path)
    (axis,) = contents["none"]["axes"]
    assert (axis["key"], axis["values"]) == ("lr", rates)
    for one in contents.values():
        assert {row["place"] for row in one["rows"]} == {*range(6)}
        assert len(one["rows"]) == 12
    assert contents["clip"]["chosen"] == {"lr": 0.1, "transform.clip.value": 0.1}


def test_a_finer_choice_of_the_control_leaves_that_of_other_arms(tmp_path: Path) -> None:
    finer = tuned(tmp_path, "lr=[0.1,1]; transform.clip.value=[0.1,1]")
    rates = (0.1, 0.2154, 0.4642, 1)
    end(finer, tmp_path, {(run.label, lr): 0.5 for run in finer.runs for lr in rates})
    written(finer, tmp_path)
    shared = tuned(tmp_path, "lr=[0.1,1]", "transform=sign")
    end(shared, tmp_path, {(run.label, lr): 0.5 for run in shared.runs for lr in (0.1, 1)})
    written(shared, tmp_path, "transform=sign")
    files = [file.name for file in (tmp_path / "digits-mlp" / "tuning").glob("none-*.json")]
    assert len(files) == 2


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
