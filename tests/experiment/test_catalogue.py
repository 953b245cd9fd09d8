"""The catalogue: every option of a group with its purpose, properties, stages and paper."""

import json
import subprocess
import sys

import pytest

import gradsurg as gs
from gradsurg.experiment import catalogue
from tests.conftest import Here


def entry(name: str, group: str = "transform") -> catalogue.Entry:
    return next(entry for entry in gs.list(group) if entry.name == name)


def test_the_file_is_up_to_date() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == catalogue.measured().json(), (
        "python scripts/stub.py writes it"
    )


def test_every_file_begins_with_its_command_and_purpose() -> None:
    for one in gs.list():
        assert one.command.startswith(("python -m gradsurg.run ", "gs.load(")), one
        assert not one.summary[0].islower() or one.summary == one.target, one
        assert one.summary.partition(":")[0] not in ("Paper", "package"), one


def test_an_entry_has_the_facts_of_its_class_and_of_the_head_of_its_file() -> None:
    clip = entry("clip_global_norm")
    assert clip.target == "gradsurg.transforms.clip_global_norm.ClipGlobalNorm"
    assert {*clip.properties} == gs.ClipGlobalNorm(1.0).properties
    assert clip.stages == ["backward_end", "step", "forward"]
    assert (clip.paper, clip.url) == (
        "Pascanu, Mikolov, Bengio, ICML 2013",
        "https://arxiv.org/abs/1211.5063",
    )
    assert clip.fields["max_norm"] == 1.0
    assert entry("deconvolve").needs == ["entering"]
    assert entry("deconvolve").stages == ["backward"]
    assert {*entry("mgda", "aggregator").properties} == gs.MGDA().properties
    assert entry("parameters", "site").stages[0] == "backward"
    assert entry("adam", "optimizer").target == "torch.optim.Adam"
    preset = entry("autoclip")
    assert preset.preset_of == "adaptive_clip"
    assert preset.target == entry("adaptive_clip").target
    assert preset.summary == "Clip the joint norm to a quantile of past norms"
    assert preset.url == "https://arxiv.org/abs/2007.14469"
    assert entry("tanh").paper == entry("adaptive_clip").preset_of == ""


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("group", ["transform", "aggregator", "site", "schedule"])
def test_a_table_fits_its_width_and_has_every_name(group: str, width: int) -> None:
    lines = gs.list(group).table(width).splitlines()
    assert max(map(len, lines)) <= width
    assert {one.name for one in gs.list(group)} <= {line.split(" ")[0] for line in lines}


def test_a_pipe_gets_a_line_an_option_and_columns_where_it_is_set(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = here("--list", "transform").out.splitlines()
    assert len(lines) == 2 + len(gs.list("transform")) + 4
    (line,) = (line for line in lines if line.startswith("clip "))
    assert line.endswith("every entry. Graves 2013, arXiv 1308.0850")
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, here("--list=recipe").out.splitlines())) <= 80
    assert json.loads(here("--list", "trigger", "--json").out) == json.loads(gs.list("when").json())
    assert "--list transform " in here("--list").out


def test_an_unknown_group_is_refused_with_the_groups(here: Here) -> None:
    ended = here("--list", "transforms")
    assert ended.code == 2
    assert ended.err == (
        "--list: there is no group 'transforms' to list. There are: transform, site, when, "
        "aggregator, model, task, logger, optimizer, schedule, experiment. "
        "Did you mean 'transform'?\n"
    )


def test_listing_imports_no_torch() -> None:
    code = "import sys, gradsurg; gradsurg.list('transform'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
