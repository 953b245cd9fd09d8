"""attribute=true: the arms that it adds, whose runs they are, and what it refuses."""

import json
from pathlib import Path

import pytest

from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.run_identity import run_hash
from gradsurg.report.arms import Arm
from gradsurg.report.load import LoadedRun
from gradsurg.report.measures import left_out
from gradsurg.report.study import Study
from tests.builds import built

pytestmark = pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")

CHAIN = "transform=[clip,noise,sign]"
SHORT = ("steps=20", "seeds=2", "logger=none", "report=false")


def test_each_link_is_left_out_once_a_seed() -> None:
    for pair in built(CHAIN, "attribute=true", "seeds=2").pairs:
        assert pair.treated
        assert pair.control
        labels = {link: run.label for link, run in pair.without.items()}
        assert labels == {"clip": "noise+sign", "noise": "clip+sign", "sign": "clip+noise"}
        assert {run.seed for run in pair.runs} == {pair.seed}
        assert [run.arm for run in pair.runs] == ["control", *["treated"] * 4]
        assert {name for run in pair.runs[1:] for name in run.controls.values()} == {
            pair.control.name
        }


@pytest.mark.parametrize("control", ["plain", "none"])
def test_a_chain_without_a_link_is_the_run_of_the_shorter_chain(control: str) -> None:
    word = f"control={control}"
    (pair,) = built(CHAIN, "attribute=true", word, "transform.clip.value=0.5").pairs
    (shorter,) = built("transform=[clip,sign]", word, "transform.clip.value=0.5").pairs
    own = pair.without["noise"]
    assert shorter.treated
    assert own.identity == shorter.treated.identity
    assert (own.name, own.facts) == (shorter.treated.name, shorter.treated.facts)
    assert repr(own.surgery) == repr(shorter.treated.surgery)
    assert own.surgery.labels == shorter.treated.surgery.labels


def test_a_control_that_the_shorter_chains_would_lack_is_refused() -> None:
    with pytest.raises(ConfigError, match="^attribute: .*found control=norm_matched$"):
        built(CHAIN, "attribute=true", "control=norm_matched")
    assert built(CHAIN, "control=norm_matched").pairs


def test_being_asked_changes_no_identity() -> None:
    (asked,), (plain,) = built(CHAIN, "attribute=true").pairs, built(CHAIN).pairs
    assert asked.treated
    assert plain.treated
    assert run_hash(asked.treated.identity) == run_hash(plain.treated.identity)
    assert asked.treated.facts == plain.treated.facts


def test_the_configs_tell_who_is_without_what() -> None:
    (pair,) = built(CHAIN, "attribute=true").pairs
    assert pair.treated
    runs = [
        LoadedRun(Path(run.name), "planned", arm=run.arm, config=dict(run.identity))
        for run in pair.runs
    ]
    found = left_out(Study(Path(), [Arm("all", tuple(runs), {})]))
    whole = pair.treated.name
    assert found == {(whole, link): run.name for link, run in pair.without.items()}


def test_a_chain_inside_one_transform_is_one_link() -> None:
    inner = (
        "transform.chain.links=[{_target_: gradsurg.Clip, value: 0.1},{_target_: gradsurg.Sign}]"
    )
    (pair,) = built("transform=[chain,noise]", inner, "attribute=true").pairs
    assert {link: run.label for link, run in pair.without.items()} == {
        "chain": "noise",
        "noise": "chain",
    }


@pytest.mark.parametrize(
    ("word", "found"), [("transform=clip", "clip"), ("transform=none", "none")]
)
def test_less_than_two_links_are_refused_in_one_line(word: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        built(word, "attribute=true")
    assert error.value.faults == [
        f"attribute: needs a chain of two transforms or more to leave one out of, found {found}"
    ]


def test_a_command_trains_all_arms_tells_shares_and_shares_runs_with_a_sweep(
    command, tmp_path: Path
) -> None:
    command("transform=clip", *SHORT)
    out, _ = command("transform=[clip,sign]", "attribute=true", *SHORT)
    directories = list((tmp_path / "runs" / "digits-mlp").glob("*-seed*"))
    labels = sorted(path.name.rpartition("-seed")[0] for path in directories)
    assert labels == sorted(["none", "clip", "sign", "clip+sign"] * 2)
    assert "4 of them had been finished before" in out
    assert "Each link's share in test accuracy" in out
    accuracy = {
        path.name[:-9]: json.loads((path / "summary.json").read_text(encoding="utf-8"))[
            "test/accuracy"
        ]
        for path in directories
    }
    for link, rest in (("clip", "sign"), ("sign", "clip")):
        (row,) = [line for line in out.splitlines() if line.startswith(link) and " 2 of 2" in line]
        gains = [accuracy[f"clip+sign-seed{s}"] - accuracy[f"{rest}-seed{s}"] for s in (0, 1)]
        assert row.split()[1] == f"{100 * sum(gains) / 2:+.2f}"
