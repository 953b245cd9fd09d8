"""Wrong words are refused in a line each before anything runs."""

from pathlib import Path

import pytest

from gradsurg.experiment.errors import ConfigError
from gradsurg.script.words import Call, parse


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "my model.py"):
        (tmp_path / name).touch()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            "transform=clip train.py",
            "write python -m gradsurg.script transform=clip -- train.py: the --",
        ),
        ("train.py --x when=steps", "write python -m gradsurg.script when=steps -- train.py --x: "),
        ("--list transform", "--list: python -m gradsurg.run --list"),
        (
            "transform=clip --",
            "write python -m gradsurg.script transform=clip -- SCRIPT.py: SCRIPT.py is",
        ),
        (
            "transform=clip -- tarin.py",
            "tarin.py: did you mean 'train.py'? There is no such",
        ),
        ("transfrom=clip -- train.py", "transfrom: did you mean 'transform'? There is no"),
        ("transform=clop -- train.py", "transform: did you mean 'clip'?"),
        ("transform=clip,sign -- train.py", "transform: one value a command; with the same study="),
        ("-m transform=clip -- train.py", "-m: one value a command"),
        ("seeds=1 -- -m", "write python -m gradsurg.script seeds=1 -- -m MODULE: MODULE is missi"),
        ("aggregator=pcgrad -- train.py", "aggregator: pcgrad cannot act in a script as it is"),
        ("task=digits -- train.py", "task: is the script's own. Give it after --"),
        ("steps=10 -- train.py", "steps: is the script's own. Give it after --"),
        ("hydra/launcher=joblib -- train.py", "hydra/launcher: runs are processes of this machine"),
        ("--list transform -- train.py", "--list: python -m gradsurg.run --list"),
        ("seeds -- train.py", "seeds: write KEY=VALUE"),
        ("seeds=0 -- train.py", "seeds: must be >= 1, found 0"),
        ("seed=3 seeds=4 -- train.py", "seeds: contradicts seed=3"),
        ("margin=x -- train.py", "margin: needs a positive number"),
        ("metric=widgets -- train.py", "metric: whether more widgets is better is not known"),
        ("jobs=0 -- train.py", "jobs: must be a whole number >= 1, found 0"),
        ("tune=lr -- train.py", "tune: lr needs values, such as"),
        (
            "transform=clip tune=transform.clip.valu=[1,2] -- train.py",
            "tune: transform.clip.valu: did you mean 'value'? There is no key",
        ),
    ],
)
def test_a_wrong_word_is_named_with_the_rule(words: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(words.split(" "))
    assert error.value.faults[0].startswith(fault)


def test_a_missing_script_and_a_wrong_word_are_both_told() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["transform=clop", "--", "no.py"])
    assert [fault.partition(":")[0] for fault in error.value.faults] == ["no.py", "transform"]
    with pytest.raises(ConfigError) as error:
        parse(["transfrom=clip", "seeds=0", "--", "no.py"])
    assert [fault.partition(":")[0] for fault in error.value.faults] == ["no.py", "transfrom"]


def test_the_words_of_the_script_stay_as_they_are_and_name_the_study() -> None:
    command = parse(["transform=clip", "seeds=2", "model=G", "--", "my model.py", "--lr", "a=1,2"])
    assert command.call == Call("my model.py", ("--lr", "a=1,2"))
    assert command.settings.study == "my_model"
    assert (command.model, command.settings.seeds) == ("G", 2)
    assert command.surgery["transform"]["clip"]["value"] == 0.01
    assert parse(["--", "-m", "pkg.train", "-x"]).call == Call("pkg.train", ("-x",), True)
    assert parse(["--", "train.py"]).surgery == {}


def test_a_tuned_option_replaces_the_one_of_the_script_or_is_added() -> None:
    words = ["transform=clip", "tune=--lr=[0.1,0.3]; transform.clip.value=[1,2]"]
    command = parse([*words, "--", "train.py", "--lr", "0.5", "--epochs=3"])
    assert command.tune is not None
    *_, last = command.tune.combinations()
    chosen = command.with_values(last)
    assert chosen.call.words == ("--lr", "0.3", "--epochs=3")
    assert chosen.surgery["transform"]["clip"]["value"] == 2
    assert command.surgery["transform"]["clip"]["value"] == 0.01
    call = Call("a.py", ("--lr=1", "--x"))
    assert call.with_option("--lr", 2).words == ("--lr=2", "--x")
    assert call.with_option("width", 2).words == ("--lr=1", "--x", "width=2")
    filled = Call("a.py", ("{out}/w.pt", "{seed}", "{arm}{other}")).filled(seed=3, arm="b", out="c")
    assert filled == ["c/w.pt", "3", "b{other}"]
