"""Several splits of the data in one study, each with seeds of its own: `seeds=8 splits=5`."""

import json
from pathlib import Path

import pytest
import yaml

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.run import Run
from tests.builds import built
from tests.conftest import Here

CLIP = "transform=clip"
SHORT = ("steps=4", "logger=none", "report=false")

ONE_SPLIT = """
from gradsurg.tasks.digits import Digits


class Same(Digits):
    def load(self):
        return Digits(split_seed=0).load()
"""


def split_of(run: Run | None) -> object:
    assert run is not None
    task = run.identity["task"]
    assert isinstance(task, dict)
    return task["split_seed"]


def test_each_seed_is_trained_on_each_split_with_a_control_on_the_same() -> None:
    experiment = built(CLIP, "seeds=2", "splits=3", "task.split_seed=7")
    trained = [(split_of(pair.treated), pair.seed) for pair in experiment.pairs]
    assert trained == [(7, 0), (7, 1), (8, 1000), (8, 1001), (9, 2000), (9, 2001)]
    tested = []
    for pair in experiment.pairs:
        assert pair.treated is not None
        assert pair.control is not None
        assert pair.treated.controls == {"plain": pair.control.name}
        assert split_of(pair.control) == split_of(pair.treated)
        parts = [run.load_data().test_inputs for run in pair.runs]
        assert parts[0].equal(parts[1])
        tested.append(parts[0].sum().item())
    assert len(set(tested)) == 3
    titles = [pair.treated.title for pair in experiment.pairs if pair.treated]
    assert titles[1:3] == ["clip-seed1-split7", "clip-seed1000-split8"]


def test_the_one_seed_that_is_given_is_another_in_each_split() -> None:
    pairs = built(CLIP, "seed=5", "seeds=1", "splits=3").pairs
    assert [pair.seed for pair in pairs] == [5, 1005, 2005]


@pytest.mark.parametrize(("word", "key"), [("seeds=1001", "seeds"), ("seed=1000", "seed")])
def test_seeds_that_two_splits_would_share_are_refused(word: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(CLIP, "splits=2", word)
    (line,) = error.value.faults
    assert line.startswith(f"{key}: ")
    assert "below 1000" in line


def test_the_runs_of_one_split_are_those_of_a_study_of_it() -> None:
    several, first, second = (
        [run.name for run in built(CLIP, *words).runs]
        for words in (
            ("seed=3", "splits=2"),
            ("seed=3", "task.split_seed=0"),
            ("seed=1003", "task.split_seed=1"),
        )
    )
    assert several == [*first, *second]
    assert built(CLIP).pairs[0].runs[0].title == "none-seed0"


def test_titles_name_task_and_model_unless_the_study_is_named_after_them() -> None:
    titles = {
        run.title
        for model in ("mlp", "convnet")
        for pair in built(CLIP, f"model={model}", "study=first", "seeds=1").pairs
        for run in pair.runs
    }
    assert titles == {
        f"{label}-seed0-digits-{model}"
        for label in ("none", "clip")
        for model in ("mlp", "convnet")
    }


@pytest.mark.parametrize("words", ["control=norm_matched", "attribute=true"])
def test_other_arms_have_the_split_of_their_treated_runs(words: str) -> None:
    pairs = built("transform=[clip,sign]", "splits=2", words).pairs
    assert [{split_of(run) for run in pair.runs} for pair in pairs] == [{0}, {1}]
    assert len(pairs[0].runs) == (4 if words == "attribute=true" else 2)


def test_a_task_of_ones_own_begins_with_its_default(here: Here, folder: Path) -> None:
    (folder / "own_digits.py").write_text(
        "from gradsurg.tasks.digits import Digits\n\n\n"
        "def make(split_seed=5):\n    return Digits(split_seed=split_seed)\n",
        encoding="utf-8",
    )
    assert here(CLIP, "task=own_digits.make", "seeds=1", "splits=2", *SHORT).code == 0
    configs = [yaml.safe_load(file.read_text("utf-8")) for file in folder.rglob("config.yaml")]
    assert sorted(config["task"]["split_seed"] for config in configs) == [5, 5, 6, 6]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ["task=temporal_order", "model=rnn"],
            "splits: must be 1 for a task without split_seed, found 2; tasks with ",
        ),
        (
            ["tune='lr=[0.1,1]'"],
            "splits: must be 1 with tune, which would choose on examples that ",
        ),
        (["task=once.Same"], "splits: must be 1 where task.split_seed changes no training data, "),
    ],
)
def test_what_has_one_split_alone_is_refused(
    words: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once.py").write_text(ONE_SPLIT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        built(CLIP, "splits=2", *words)
    (line,) = error.value.faults
    assert line.startswith(fault)


def test_the_command_trains_all_splits_and_says_so_before(here: Here, folder: Path) -> None:
    words = (CLIP, "seeds=2", "splits=2", *SHORT)
    ended = here(*words)
    assert ended.code == 0
    told = ended.err.splitlines()
    assert told[0].startswith(
        "8 runs of 4 steps (2 splits x 2 seeds of its own x 2 arms): at least "
    )
    assert told[1].endswith("(p <= 0.05); that needs at least splits=6")
    splits = {}
    for file in folder.rglob("summary.json"):
        config = yaml.safe_load((file.parent / "config.yaml").read_text("utf-8"))
        splits[file.parent.name] = config["task"]["split_seed"]
    assert sorted(splits.values()) == [0] * 4 + [1] * 4
    for name, split in splits.items():
        (file,) = folder.rglob(f"{name}/run.json")
        control = json.loads(file.read_text("utf-8"))["control"]
        assert control is None or splits[control] == split
    again = here(*words)
    assert "8 of them had been finished before" in again.out
    assert "runs of" not in again.err
