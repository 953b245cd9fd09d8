"""Errors of a command line: one line each, all at once, before any training."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gradsurg as gs
from gradsurg.experiment import compose
from gradsurg.experiment.command import Command
from gradsurg.experiment.compose import PRESETS
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.sweep import jobs_of_study
from tests.builds import faults

ROOT = Path(__file__).parents[2]
MINE = "mine:\n  _target_: gradsurg.Clip\n  value: 0.02\n"


def composed(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    return compose.compose_config(*words)


@dataclass(frozen=True)
class Wrong:
    """A command line, and for each sentence it must get, how that begins and how it ends."""

    line: str
    begins: str
    ends: str = ""


WRONG = (
    # options
    Wrong(
        "transform=clop",
        "transform: did you mean 'clip'? There is no 'clop'.",
        " All of them: python -m gradsurg.run --list transform",
    ),
    Wrong(
        "transform=",
        "transform: there is no ''. There are: adagc,",
        " more: python -m gradsurg.run --list transform",
    ),
    Wrong("task=digit", "task: did you mean 'digits'? There is no 'digit'. ", "--list task"),
    Wrong("model=mpl", "model: did you mean 'mlp'? There is no 'mpl'. ", "--list model"),
    Wrong("site=node", "site: did you mean 'nodes'? There is no 'node'. ", "--list site"),
    Wrong("hydra/launcher=nope", "hydra/launcher: there is no 'nope'. There are: basic"),
    Wrong("transform=null", "transform: must name an option, found null; 'transform=none' is a"),
    Wrong(
        "transform=[clip,clip]",
        "transform: 'clip' is listed twice",
        "{_target_: gradsurg.Clip, value: 0.01}'",
    ),
    Wrong(
        "transform=[tests.theirs.Twice,tests.theirs.Twice]",
        "transform: 'tests.theirs.Twice' is listed twice",
        "'+transform.twice_2={_target_: tests.theirs.Twice}'",
    ),
    Wrong(
        "transform=[tests.theirs.Clip,clip]",
        "transform: 'tests.theirs.Clip' and 'clip' have the same key 'clip'",
        "'+transform.clip_2={_target_: gradsurg.Clip, value: 0.01}'",
    ),
    # keys
    Wrong("step=20", "step: did you mean 'steps'? There is no key 'step'.", " gradsurg.run --help"),
    Wrong(
        "++step=20", "step: did you mean 'steps'? There is no key 'step'.", " gradsurg.run --help"
    ),
    Wrong(
        "transform=clip transform.clip.valu=1",
        "transform.clip.valu: did you mean 'value'? There is no key 'valu'.",
    ),
    Wrong("seed.x=1", "seed.x: there is no key 'x': seed has no keys below"),
    Wrong(
        "model=tests.theirs.linear model.bias=true", "model.bias: ", "'+model.bias=...' adds it."
    ),
    Wrong(
        "transform=scheduled 'transform.scheduled.of={_target_: tests.theirs.halve}'",
        "transform.scheduled.of.factor: there is no field 'factor'.",
    ),
    Wrong(
        "site=combined site.of.0.types=[Linear]",
        "site.of.0.types: there is no key 'types'. There are: pattern.",
        "'+site.of.0.types=...' adds it.",
    ),
    Wrong("~transform", "transform: write 'transform=[]' to empty it; it cannot be taken out"),
    Wrong("steps=5 steps=6", "steps: is given twice, steps=5 and steps=6"),
    Wrong("site=[parameters,outputs]", "site: takes one option, found [parameters, outputs]"),
    # values of fields
    Wrong(
        "transform=clip transform.clip.value=-1", "transform.clip.value: must be > 0", "found -1"
    ),
    Wrong(
        "transform=scheduled transform.scheduled.of._target_=gradsurg.Scael",
        "transform.scheduled.of: did you mean 'gradsurg.Scale'? There is no 'gradsurg.Scael'.",
    ),
    Wrong(
        "transform=chain transform.chain.links.0.value=-1",
        "transform.chain.links.0.value: must be > 0",
    ),
    Wrong(
        "optimizer.lr=-1",
        "optimizer: SGD(lr=-1, momentum=0.0, weight_decay=0.0) is refused: Invalid learning rate",
    ),
    Wrong(
        "optimizer.momentum=x",
        "optimizer: SGD(lr=0.4, momentum=x, weight_decay=0.0) is refused: "
        "momentum: must be a number, found 'x'",
    ),
    Wrong(
        "site=output.weight",
        "site: there is no module 'output' on the path, or in this folder; "
        "for names in the model write site=parameters site.pattern=output.weight",
    ),
    Wrong("site=combined site.of=parameters", "site.of: must be a list, found 'parameters'"),
    Wrong(
        "site=combined 'site.of=[{_target_:gradsurg.Outputs,dept:1}]'",
        "site.of.0.dept: did you mean 'depth'? There is no field 'dept'. There are: ",
    ),
    Wrong("site=combined +site.of.0.size=big", "site.of.0.size: must be a number >= 0", "'big'"),
    Wrong("site=combined site.count=5", "site.count: 5 sites were expected, found 6: "),
    Wrong("out=\"'~/runs'\"", "out: must not begin with ~, ", "found '~/runs'"),
    # the short keys
    Wrong("lr=-1", "lr: must be > 0", "found -1"),
    Wrong(
        "seeds=[1,2]",
        "seeds: must be a number, such as seeds=2; for these seeds write -m seed=1,2, found",
    ),
    Wrong("batch_size=100000", "batch_size: must be <= 1347 examples, found 100000"),
    Wrong(
        "control=plane",
        "control: must be one of 'none', 'plain', 'norm_matched', 'update_norm_matched' "
        "or 'placebo', found",
    ),
    Wrong("trigger=steps", "trigger: did you mean 'when'? There is no key 'trigger'."),
    Wrong("device=gpu", "device: there is no 'gpu' here; auto takes what there is"),
    Wrong("study=..", "study: must be a folder's name of at most 200 letters", "found '..'"),
    Wrong("out=''", "out: must not be empty"),
    Wrong("out=file.txt/runs", "out: must be a folder, and ", "'file.txt/runs'"),
    Wrong("steps='${nope}'", "steps: Interpolation key 'nope' not found"),
    # places
    Wrong(
        "site.pattern=hiden.*", "site.pattern: did you mean 'hidden.*'? Nothing matches 'hiden.*'."
    ),
    Wrong(
        "site=nodes site.module=hiden",
        "site.module: did you mean 'hidden'? Nothing matches 'hiden'.",
    ),
    Wrong("site=nodes site.pattern=Rlu", "site.pattern: did you mean 'Relu'? No node"),
    Wrong("site.stage=foo", "site.stage: must be one of 'use', 'backward', ", "found 'foo'"),
    Wrong(
        "transform=[clip,clip_global_norm] site=outputs",
        "transform.clip_global_norm: use Parameters(stage='step') or 'backward_end': ",
        "it needs several tensors at once, and Outputs has one at a time",
    ),
    Wrong(
        "transform=agc site=nodes",
        "transform.agc: use it at Parameters, Outputs or Inputs: it needs the value",
    ),
    Wrong(
        "site=nodes site.pattern=Addmm site.side=leave site.edge=7",
        "site: Nodes: site 'hidden.0.linear#0/AddmmBackward[0]': edge= names an input that takes ",
        "Edges that take one: 0, 2.",
    ),
    # which a step alone tells
    Wrong(
        "transform=direct_feedback site=outputs site.pattern=positions model=gpt task=char_lm"
        " batch_size=3",
        "transform.direct_feedback: needs the same number of examples (axis 0) in the model's ",
        "found 3 and 64",
    ),
    Wrong("site=outputs site.stage=step", "site.stage: Outputs cannot have stage 'step'; "),
    Wrong(
        "transform=clip site=combined site.of.0.pattern=hiden.* site.by=all",
        "site.of.0.pattern: did you mean 'hidden.*'?",
        "Nothing matches 'hiden.*'.",
    ),
    Wrong(
        "transform=sign transform.clip.value=1",
        "transform.clip.value: add 'transform=[sign,clip]': 'clip' is not chosen beside 'sign'",
    ),
    # what would never act
    Wrong(
        "transform=clip site=outputs site.call=7",
        "site.call: nothing in the first forward is selected by Outputs(",
    ),
    Wrong(
        "transform=clip site=captured",
        "site: no gradient passes at hidden.0.linear.weight, ",
        "(not an input of autograd.grad, needs no gradient)",
    ),
    Wrong(
        "transform=clip when.start=500",
        "when.start: must be <= 499, the last step of the run, found 500",
    ),
    Wrong(
        "transform=clip when=shape when.source=grad when.dim=5",
        "when.dim: the source has shape",
        "and no dimension 5",
    ),
    Wrong(
        "transform=clip when=threshold when.source=output:hiden",
        "when.source: did you mean 'hidden'? There is no module 'hiden'.",
    ),
    Wrong(
        "transform=clip when=threshold when.source=value site=nodes",
        "when.source: use 'grad' or 'batch': 'value' is the tensor whose gradient passes, and No",
    ),
    # words
    Wrong("transform=dropout", "transform: did you mean 'random_mask'? There is no 'dropout'."),
    Wrong("transform=[clip,topk]", "transform: did you mean 'dgc' or 'mask'? There is no 'topk'."),
    Wrong("transform=[clip", "transform=[clip: a '[' is not closed"),
    Wrong(
        "site.pattern=*.weight,",
        "site.pattern=*.weight,: cannot be read: ",
        """need quotes inside quotes: "site.pattern='...'\"""",
    ),
    Wrong(
        "'site.pattern=re:('",
        "site.pattern: is not a regular expression (missing ), unterminated subpattern at ",
        "found 're:('",
    ),
    Wrong("out=~/runs", "out=~/runs: cannot be read, because the shell does not", "Write $HOME"),
    Wrong("transform=./clip.py", "transform: did you mean 'clip'? There is no './clip.py'."),
    Wrong("-m lr=interval(0,1)", "lr=interval(0,1): cannot be swept: "),
    # a user's own
    Wrong("transform=.halve", "transform.halve: '.halve' is not a dotted path"),
    Wrong("transform=tests.their.halve", "transform.halve: there is no module 'tests.their' on"),
    Wrong(
        "transform=tests.theirs.Stubborn",
        "transform.stubborn: must be a Transform, found the class Stubborn",
    ),
    Wrong(
        "transform=tests.theirs.scaled +transform.scaled.facto=2",
        "transform.scaled.facto: did you mean 'factor'? There is no field 'facto'.",
        " There are: grad, factor.",
    ),
    Wrong(
        "transform=tests.theirs.ready +transform.ready.factor=2",
        "transform.ready: is made already and takes no fields, found factor",
    ),
    Wrong("model=tests.theirs.no_module", "model: must make a torch.nn.Module, found 10"),
    Wrong(
        "model=tests.theirs.misfit transform=clip control=norm_matched",
        "model: inputs [2, 1, 8, 8] do not pass through it and",
    ),
    Wrong("task=tests.theirs.ready", "task: must be a class or a function, found Scale"),
    Wrong(
        "task=tests.theirs.Lost",
        "task: tests.theirs.Lost.load raised FileNotFoundError: points.csv (",
    ),
    Wrong(
        "'+transform.b={value: 1}'",
        "transform.b: needs a _target_, which is gradsurg.Clip or",
    ),
    Wrong("~task", "task, optimizer: both are required"),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.line for wrong in WRONG])
def test_each_error_is_one_line_under_its_config_key(
    wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    (said,) = faults(wrong.line)
    assert said.startswith(wrong.begins)
    assert said.endswith(wrong.ends)
    assert "\n" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"file.txt"}


RIGHT = (
    "transform=clip when=flag when.on=true",
    "transform=clip when.start=499",
    "transform=clip when=shape when.above=63",
    "transform=clip when=probability when.p=1e-9 when.per=site",
    "transform=clip when=threshold when.above=1e9",
    "transform=clip when=depth when.low=3 when.high=3",
    "transform=clip when=unless when.of.stop=499",
    "when.start=9999",
    "transform=[clip,noise] transform.clip.value=0.5",
    "transform=clip '+transform.again={_target_: gradsurg.Clip, value: 1}'",
    "transform=scheduled transform.scheduled.of._target_=gradsurg.Zero "
    "~transform.scheduled.of.factor",
    "transform=clip study=2024 out=7",
    "transform=tests.theirs.Twice +transform.twice.factor=3",
    "transform=tests.theirs.ready",
    "-m transform=none,clip,[clip,noise],tests.theirs.halve seed='range(1,2)'",
    "transform=clip log_every='${steps}'",
    "-m transform=clip,sign log_every='${steps}'",
    "-m transform='glob(sc*)'",
    "-m ++lr=0.1,0.2",
    "-m transform=clip,[clip,sign] transform.clip.value=0.1 model.hidden=[8,8]",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("line", RIGHT)
def test_a_valid_command_line_has_no_error(line: str) -> None:
    assert faults(line) == []


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (
            "lr=-1 steps=-1 study=a/b transform.clip.value=nan",  # without torch
            ["steps", "lr", "study", "transform.clip.value"],
        ),
        (
            "transform.clip.value=-2 site.depth=no when.stop=-1 model.hidden=x",
            ["transform.clip.value", "site.depth", "when.stop", "model.hidden"],
        ),
    ],
)
def test_all_errors_of_a_composed_config_are_reported_at_once(line: str, keys: list[str]) -> None:
    told = faults(f"transform=[clip,noise] {line}")
    assert sorted(text.partition(":")[0] for text in told) == sorted(keys)


def test_the_errors_of_all_jobs_of_a_sweep_are_reported_once_each() -> None:
    told = faults("-m transform=clip,clop,nose lr=-1,-2")
    assert sorted(text.partition("? There")[0] for text in told) == [
        "lr: must be > 0, found -1",
        "lr: must be > 0, found -2",
        "transform: did you mean 'clip'",
        "transform: did you mean 'noise'",
    ]


def config_dir(path: Path, **files: str) -> str:
    folder = path / "mother's own, (config)" / "transform"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return str(folder.parent)


def test_a_users_yaml_is_found_in_a_folder_with_an_awkward_name(tmp_path: Path) -> None:
    folder = config_dir(tmp_path, mine=MINE)
    assert faults("transform=[mine,noise] transform.mine.value=0.5", folder) == []
    assert faults("transform=mine transform.mine.value=-1", folder) == [
        "transform.mine.value: must be > 0, such as 0.01, found -1"
    ]


def test_a_users_yaml_stands_among_the_choices(tmp_path: Path) -> None:
    (said,) = faults("transform=min", config_dir(tmp_path, mine=MINE))
    assert "did you mean 'mine'?" in said


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("mine:\n  value: 3\n", "transform.mine: needs a _target_, "),
        ("mine:\n  _target_: gradsurg.Clip\n  value: ???\n", "transform.mine.value: is required"),
        (
            "mine:\n  name: clip\n",
            "transform.mine: needs a _target_, which is gradsurg.Clip or ",
        ),
        ("mine: [1\n", "hydra: ParserError: while parsing a flow sequence in "),
        ("_target_: gradsurg.Clip\nvalue: x\n", "transform.clip.value: must be a number, found"),
        (
            "_target_: gradsurg.Clip\nsign: {_target_: gradsurg.Sign}\n",
            "transform._target_: must be a mapping with a _target_, ",
        ),
    ],
)
def test_a_users_broken_yaml_is_a_sentence(tmp_path: Path, text: str, begins: str) -> None:
    said = faults("transform=mine", config_dir(tmp_path, mine=text))
    assert said[0].startswith(begins)
    assert not any("\n" in line for line in said)


def test_a_config_dir_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert faults("transform=clip", str(tmp_path / "no")) == [
        f"--config-dir: there is no folder '{tmp_path / 'no'}'"
    ]


def test_a_users_yaml_with_the_name_of_an_own_config_is_refused(tmp_path: Path) -> None:
    (said,) = faults("transform=clip", config_dir(tmp_path, clip=MINE))
    assert said.endswith(
        "clip.yaml has the name of one of gradsurg's own and would not be read; give it another"
    )


def test_a_second_transform_of_a_class_can_be_added_as_the_error_suggests() -> None:
    (said,) = faults("transform=[noise,noise]")
    advice = shlex.split(said)[-1]
    assert faults(f"transform=noise '{advice}'") == []
    assert list(composed("transform=noise", advice)["transform"]) == ["noise", "noise_2"]


def test_a_dotted_path_stands_under_its_last_name_in_snake_case() -> None:
    config = composed("transform=[clip,my_package.ops.SignMix]", "model=my_package.make_net")
    assert list(config["transform"]) == ["clip", "sign_mix"]
    assert config["transform"]["sign_mix"] == {"_target_": "my_package.ops.SignMix"}
    assert config["model"] == {"_target_": "my_package.make_net"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for name in ("", "experiments/*/")
        for path in ROOT.glob(f"{name}conf/*/*.yaml")
        if path.parent.name != PRESETS  # whose commands are those of another app
    ),
    ids=lambda path: path.stem,
)
def test_the_command_in_the_first_line_of_a_yaml_file_is_right(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n").splitlines()[0]
    if first.startswith("# gs.load("):  # a recipe of several interventions
        assert gs.load(path.stem).interventions
        return
    command = first.removeprefix("# python -m gradsurg.run ")
    assert command != first
    if path.stem == "captured":  # a user's own task or model may call autograd.grad, ours do not
        (told,) = faults(command)
        assert told.endswith("(not an input of autograd.grad)")
        return
    # Data that the user has to get, a basis to compute, and the package of an extra may be missing.
    missing = re.compile(
        r"task\.root: (must be the folder with |(Fashion-)?MNIST is not in )"
        r"|.* pip install 'gradsurg\[|transform\.\w+\.path: cannot be read, found \w+\.pt: No such"
    )
    told = faults_of_study(command) if path.parent.name == "experiment" else faults(command)
    assert [fault for fault in told if not missing.match(fault)] == []
    assert told or "task.root=" not in command


def faults_of_study(line: str) -> Sequence[str]:
    """The errors of a study file: all jobs are composed, the first and the last are built too."""
    try:
        jobs = jobs_of_study(shlex.split(line))
        for job in jobs[:: max(1, len(jobs) - 1)]:
            Command().add(*job)
    except ConfigError as error:
        return error.faults
    return []
