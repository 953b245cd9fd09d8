"""The catalogue: every option of a group with its purpose, properties, stages and paper."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradsurg as gs
from gradsurg.experiment import catalogue
from tests.conftest import Here

CONF = Path(__file__).parents[2] / "conf"


def entry(name: str, group: str = "transform") -> catalogue.Entry:
    return next(entry for entry in gs.list(group) if entry.name == name)


def test_the_file_is_up_to_date() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == catalogue.measured().json(), (
        "python scripts/stub.py writes it"
    )


@pytest.mark.parametrize("group", catalogue.LISTED)
def test_every_option_of_a_group_has_one_line(group: str) -> None:
    options = {path.stem for path in (CONF / group).glob("*.yaml")} - {"none"}
    entries = gs.list(group)
    assert {entry.name for entry in entries} == options
    for entry in entries:
        assert entry.group == group
        assert entry.summary
        assert "\n" not in entry.summary
        assert entry.command.startswith("python -m gradsurg.run ")


def test_an_entry_has_properties_stages_needs_and_paper() -> None:
    clip = entry("clip_global_norm")
    assert clip.target == "gradsurg.transforms.clip_global_norm.ClipGlobalNorm"
    assert set(clip.properties) == gs.ClipGlobalNorm(1.0).properties
    assert clip.stages == ("backward_end", "step", "forward")
    assert clip.paper == "Pascanu, Mikolov, Bengio, ICML 2013"
    assert clip.url == "https://arxiv.org/abs/1211.5063"
    assert entry("deconvolve").needs == ("entering",)
    assert entry("deconvolve").stages == ("backward",)
    assert set(entry("mgda", "aggregator").properties) == gs.MGDA().properties
    assert entry("parameters", "site").stages[0] == "backward"


def test_a_preset_has_a_line_and_a_paper_of_its_own_and_names_its_class() -> None:
    autoclip, zclip = entry("autoclip"), entry("zclip")
    assert autoclip.preset_of == zclip.preset_of == "adaptive_clip"
    assert autoclip.target == entry("adaptive_clip").target
    assert autoclip.summary == "Clip the joint norm to a quantile of past norms"
    assert autoclip.url == "https://arxiv.org/abs/2007.14469"
    assert entry("adaptive_clip").preset_of == ""
    assert entry("tanh").paper == ""  # not that of its class


def test_a_preset_without_a_description_lists_its_fields(tmp_path: Path) -> None:
    folder = tmp_path / "transform"
    folder.mkdir()
    (folder / "clip.yaml").write_text("# c\nclip:\n  name: clip\n  value: 1.0\n", encoding="utf-8")
    (folder / "mild.yaml").write_text("# c\nmild:\n  name: clip\n  value: 9.0\n", encoding="utf-8")
    made = catalogue._entry("transform", folder / "mild.yaml")
    assert made.summary == "With value=9.0"


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize("group", ["transform", "aggregator", "site", "schedule"])
def test_a_table_fits_its_width_and_has_every_name(group: str, width: int) -> None:
    lines = gs.list(group).table(width).splitlines()
    assert max(map(len, lines)) <= width
    first = [line.split(" ")[0] for line in lines]
    assert {entry.name for entry in gs.list(group)} <= set(first)


def test_the_command_prints_a_table_or_json(here: Here) -> None:
    assert "Bound the magnitude of every" in here("--list", "transform").out
    rows = json.loads(here("--list", "aggregator", "--json").out)
    assert rows == json.loads(gs.list("aggregator").json())
    assert "mgda" in {row["name"] for row in rows}
    assert here("--list=trigger").out == here("--list", "when").out
    assert "--list transform" in here("--list").out


def test_an_unknown_group_is_refused_with_the_groups(here: Here) -> None:
    ended = here("--list", "transforms")
    assert ended.code == 2
    assert ended.err == (
        "--list: there is no group 'transforms' to list. There are: transform, site, when, "
        "aggregator, model, task, logger, optimizer, schedule, experiment. "
        "Did you mean 'transform'?\n"
    )
    with pytest.raises(LookupError, match="no group 'foo'"):
        gs.list("foo")


def test_listing_imports_no_torch() -> None:
    code = "import sys, gradsurg; gradsurg.list('transform'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
