"""A dotted path as an option of a group, by a plug-in that Hydra finds in every app."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg.experiment.compose import compose_config
from gradsurg.plugins.registry import snake
from hydra_plugins.gradsurg_dotted.dotted_source import key_of

ROOT = Path(__file__).parents[2]
APP = """
import sys
import hydra

@hydra.main(config_path=None, version_base="1.3")
def main(config):
    print("hydra_plugins.gradsurg_dotted.dotted_source" in sys.modules)
    print(sorted({"gradsurg", "torch"} & {*sys.modules}))

main()
"""


def test_another_hydra_app_of_the_environment_imports_neither_gradsurg_nor_torch(
    tmp_path: Path,
) -> None:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", "app.py", "hydra.output_subdir=null", "hydra.run.dir=."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.splitlines(), done.stderr) == (["True", "[]"], "")


def test_the_plug_in_is_found_beside_those_of_other_packages() -> None:
    # A file hydra_plugins/__init__.py would hide the launchers and sweepers that are installed.
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert (ROOT / "hydra_plugins" / "gradsurg_dotted" / "__init__.py").is_file()


@pytest.mark.parametrize("path", ["mine.Halve", "a.b.NormRescale", "a.halve_twice", "clip"])
def test_the_key_of_an_option_is_its_last_name_as_gradsurg_writes_names(path: str) -> None:
    assert key_of(path) == snake(path.rpartition(".")[2])


def test_a_dotted_path_is_a_target_and_has_a_key_of_its_own_in_a_list() -> None:
    config = compose_config("model=mine.Net", "transform=[clip,mine.HalveIt]", "logger=mine.Log")
    assert config["model"] == {"_target_": "mine.Net"}
    assert config["transform"]["halve_it"] == {"_target_": "mine.HalveIt"}
    assert [*config["transform"]] == ["clip", "halve_it"]
    assert config["logger"] == {"log": {"_target_": "mine.Log"}}
