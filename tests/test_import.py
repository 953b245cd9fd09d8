"""What `import gradsurg` brings in, and what it does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsurg as gs
from gradsurg.plugins.registry import find, names
from gradsurg.sites.nodes import Nodes
from gradsurg.transforms.clip import Clip
from scripts.stub import STUB, written

HEAVY = ("hydra", "matplotlib", "numba", "omegaconf", "plotly", "polars", "sklearn", "wandb")


def _fresh(code: str, *arguments: str, **variables: str) -> str:
    """The output of a fresh interpreter that runs `code`, with warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    environment = os.environ | variables
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMAND = """
import os, runpy, sys
from contextlib import suppress
libraries, *sys.argv[1:] = sys.argv[1:]
with suppress(SystemExit):
    runpy.run_module("gradsurg.run", run_name="__main__", alter_sys=True)
print(sorted(set(libraries.split()) & set(sys.modules)))
"""
"""Runs a command in this process; prints the listed libraries that it has imported."""


def test_no_public_name_brings_in_a_library_that_only_the_runner_needs() -> None:
    code = f"""
import sys
import gradsurg
assert len(dir(gradsurg)) > 20
for name in dir(gradsurg):
    getattr(gradsurg, name)
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    assert _fresh(code).strip() == "[]"


@pytest.mark.slow
def test_the_check_above_would_see_such_a_library() -> None:
    code = f"import sys, gradsurg.run\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert "hydra" in _fresh(code)


@pytest.mark.slow
def test_help_imports_neither_torch_nor_a_library_of_runs() -> None:
    libraries = "torch numpy sklearn wandb matplotlib scipy altair polars pydantic"
    out = _fresh(COMMAND, libraries, "--help")
    assert out.splitlines()[-1] == "[]"
    assert "clip_global_norm" in out


@pytest.mark.slow
def test_a_dry_run_imports_neither_the_compiler_nor_a_library_that_it_does_not_use(
    tmp_path: Path,
) -> None:
    libraries = "torch torch._dynamo numba sklearn scipy pandas wandb matplotlib altair polars"
    for site in ("relu_nodes", "parameters"):
        words = f"transform=clip dry_run=true out={tmp_path} site={site} logger=console"
        out = _fresh(COMMAND, libraries, *words.split())
        assert "hidden.0" in out
        assert out.splitlines()[-1] == "['torch']"


@pytest.mark.slow
def test_a_command_that_trains_nothing_brings_in_neither_compiler_nor_wandb(tmp_path: Path) -> None:
    code = f"""
import os, sys
import gradsurg.run
from contextlib import suppress
os.chdir({str(tmp_path)!r})
for words in sys.argv[1].split("/"):
    sys.argv[1:] = words.split()
    with suppress(SystemExit):
        gradsurg.run.main()
print(sorted(set(("torch._dynamo", "numba", "sklearn", "wandb")) & set(sys.modules)))
"""
    once = "transform=clip steps=2 seeds=1 logger=none"
    assert _fresh(code, once).splitlines()[-1] == "['numba', 'torch._dynamo']"
    assert _fresh(code, f"transform=clip steps=0/{once}").splitlines()[-1] == "[]"


@pytest.mark.slow
def test_importing_touches_no_random_numbers_and_the_names_are_right_in_any_order() -> None:
    code = """
import sys
import gradsurg
print("torch" in sys.modules)
import torch
torch.manual_seed(1)
state, threads = torch.get_rng_state(), torch.get_num_threads()
import gradsurg.comparison, gradsurg.core.hook
print(gradsurg.compare.__name__, gradsurg.hook.__name__, gradsurg.sites.__name__)
print(torch.equal(state, torch.get_rng_state()), threads == torch.get_num_threads())
"""
    first, names, same = _fresh(code).splitlines()
    assert (first, names) == ("False", "compare hook gradsurg.sites")
    assert same == "True True"


def test_dir_lists_the_surgery_and_every_transform_and_site() -> None:
    listed = set(dir(gs))
    assert {"Surgery", "Intervention", "Steps", "Always", "SurgeryWarning", "hook"} <= listed
    for kind in ("transforms", "sites"):
        assert {find(kind, stem).__name__ for stem in names(kind)} <= listed
    assert set(gs.HOMES) <= listed


def test_editors_and_type_checkers_are_told_of_all_that_python_finds() -> None:
    assert STUB.read_text(encoding="utf-8") == written(), "python scripts/stub.py writes it anew"


@pytest.mark.parametrize("name", dir(gs))
def test_every_listed_name_is_there(name: str) -> None:
    assert getattr(gs, name) is not None


def test_names_are_those_of_the_classes_themselves() -> None:
    assert gs.Clip is Clip
    assert gs.Nodes is Nodes


def test_the_spellings_that_users_have_learnt_are_kept() -> None:
    made = {
        "Clamp": gs.Clamp(low=-1.0, high=1.0),
        "Clip": gs.Clip(0.5),
        "ScaleBySign": gs.ScaleBySign(positive=1.0, negative=0.0),
        "Scale": gs.Scale(10.0),
        "Zero": gs.Zero(),
        "GrokfastEMA": gs.GrokfastEMA(),
        "Parameters": gs.Parameters("*.weight", stage="step"),
        "Outputs": gs.Outputs("layer1.*", call=0),
        "Nodes": gs.Nodes("Relu", module="layer1.*"),
        "Steps": gs.Steps(start=1, stop=2, every=3),
    }
    assert {name: type(thing).__name__ for name, thing in made.items()} == {n: n for n in made}
    assert gs.Scale(10.0) == gs.Scale(factor=10.0)
    assert {"hook", "compare", "Surgery", "Intervention", *made} <= set(dir(gs))
    for method in ("attach", "plan", "state_dict", "load_state_dict"):
        assert callable(getattr(gs.Surgery, method))


@pytest.mark.parametrize("name", ["Clipp", "clip", "CLIP", "mlp", "Mlp", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'gradsurg' has no attribute '{name}'"):
        getattr(gs, name)


@pytest.mark.full
def test_python_adds_the_name_that_was_meant() -> None:
    code = "import gradsurg; gradsurg.PCGradd"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Did you mean: 'PCGrad'?" in done.stderr
