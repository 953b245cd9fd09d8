"""A job is built once in its process, with one trial step."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from gradsurg.core.surgery import Surgery
from gradsurg.experiment import build as build_module
from gradsurg.experiment import command
from gradsurg.experiment.errors import ConfigError
from gradsurg.triggers.flag import Flag
from tests.builds import built, config
from tests.conftest import Here

SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> list[str]:
    """Replace functions of `owner` by ones that append their name to the returned list."""
    calls: list[str] = []

    def count(name: str) -> Callable[..., object]:
        function = getattr(owner, name)

        def called(*args: object, **fields: object) -> object:
            calls.append(name)
            return function(*args, **fields)

        return called

    for name in names:
        monkeypatch.setattr(owner, name, count(name))
    return calls


@pytest.mark.parametrize(
    ("words", "builds", "trials"),
    [
        (("transform=clip", "dry_run=true"), 1, 1),
        (("-m", "transform=clip,none", "dry_run=true"), 2, 2),
    ],
)
def test_each_job_of_a_command_is_tried_once(
    here: Here, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], builds: int, trials: int
) -> None:
    built_by = [counted(monkeypatch, owner, "build") for owner in (command, build_module)]
    steps = counted(monkeypatch, build_module, "try_step")
    assert here(*words, *SHORT).code == 0
    assert sum(map(len, built_by)) == builds
    assert len(steps) == trials


def test_a_command_computes_the_gradients_of_its_model_once_before_training(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("dry_run=true", "transform=clip", "site=relu_nodes", "when=depth", "when.high=3")

    def create(*args: Any) -> nn.Module:
        model = create_model(*args)
        next(model.parameters()).register_hook(lambda _: gradients.append(1))
        return model

    gradients: list[int] = []
    create_model = build_module.create_model
    monkeypatch.setattr(build_module, "create_model", create)  # that of runs is another name
    assert here(*words, *SHORT).code == 0
    assert len(gradients) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("transform=clip", "when=depth", "when.high=3"),
        ("transform=direct_feedback", "site=outputs", "site.pattern=hidden.1"),
        ("aggregator=pcgrad", "transform=clip", "task=overlay", "model=multi_head"),
        ("transform=none",),
    ],
)
def test_a_trial_attaches_one_surgery(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    attached = counted(monkeypatch, Surgery, "attach")
    built(*words, "steps=10")
    assert attached == ["attach"]


def test_a_build_without_a_trial_makes_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = counted(monkeypatch, Surgery, "attach")
    build_module.build(config("transform=clip", "site.pattern=nope"), trial=False)
    assert attached == []


@pytest.mark.slow
def test_a_transform_that_differentiates_in_the_step_of_the_optimizer_is_tried() -> None:
    line = "from tests.builds import built; built('transform=per_sample_clip', 'control=none')"
    subprocess.run([sys.executable, "-c", line], check=True)  # where nothing has imported Dynamo


@pytest.mark.usefixtures("folder")
def test_a_transform_that_acts_at_a_later_step_alone_is_tried_before() -> None:
    with pytest.raises(ConfigError, match=r"^transform.refuses: RuntimeError: not this one"):
        built("transform=their_module.refuses", "when=steps", "when.start=5", "steps=10")


def test_an_error_of_a_trigger_is_told_under_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("mine")

    monkeypatch.setattr(Flag, "fires", broken)
    with pytest.raises(ConfigError, match=r"^when: .*mine"):
        built("transform=clip", "when=flag", "steps=10")


@pytest.mark.parametrize("source", ["grad", "batch"])
def test_a_trigger_that_waits_for_a_tensor_is_evaluated_with_it(source: str) -> None:
    words = ("transform=clip", "when=shape", f"when.source={source}", "when.dim=9", "steps=10")
    with pytest.raises(ConfigError, match=r"^when\.dim: the source has shape .* no dimension 9"):
        built(*words)


def test_a_pattern_of_logged_sites_that_matches_none_is_told_before_training() -> None:
    with pytest.raises(ConfigError, match=r"^log: must be 'auto', 'sites' or a pattern"):
        built("transform=clip", "log=none", "steps=10")
    assert built("transform=clip", "log=*.weight", "steps=10").settings.log == "*.weight"
