"""The command as a user types it: output, files and exit code."""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from gradsurg.experiment.compose import CONFIG_DIR
from gradsurg.experiment.overrides import prepared
from gradsurg.experiment.settings import Settings
from gradsurg.multitask.shared_parameters import SharedParameters
from tests.conftest import Here

SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")


def finished(folder: Path) -> list[str]:
    return sorted(path.parent.name.rpartition("-")[0] for path in folder.rglob("summary.json"))


def test_runs_after_an_edit_of_a_helper_are_trained_anew_and_named(
    here: Here, folder: Path
) -> None:
    (folder / "helper_of_times.py").write_text("K = 0.5\n", encoding="utf-8")
    text = "from helper_of_times import K\n\n\ndef times(grad):\n    return grad * K\n"
    (folder / "with_helper.py").write_text(text, encoding="utf-8")
    words = ("transform=with_helper.times", *SHORT)
    here(*words)
    (first,) = [name for name in finished(folder) if "times" in name]
    assert "finished before" in here(*words).out
    (folder / "helper_of_times.py").write_text("K = 0.25\n", encoding="utf-8")
    ended = here(*words)
    assert f"helper_of_times.py: edited since {first}" in ended.err
    assert len([name for name in finished(folder) if "times" in name]) == 2


def choices(kind: object) -> list[str]:
    """The words that a key of this type can be."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(word) for word in inside]
    return [word for part in inside for word in choices(part)]


def test_help_explains_each_key_and_each_word_that_it_can_be(here: Here) -> None:
    out = here("--help").out
    text = out.partition("Keys. Change one")[2]
    kinds = get_type_hints(Settings)
    fields = yaml.safe_load((CONFIG_DIR / "config.yaml").read_text(encoding="utf-8"))["shared"]
    of_shared = get_type_hints(SharedParameters)
    kinds |= {f"shared.{field}": of_shared[field] for field in fields}
    lines: dict[str, str] = {}
    last: list[str] = []
    for line in text.splitlines():
        if found := re.match(r"  (?! )([\w.]+(?: \w+)?)(?:  +| )(?=\S)", line):
            last = [key for key in found[1].split() if key in kinds]
        for key in last:
            lines[key] = lines.get(key, "") + line
    assert sorted(lines) == sorted(kinds)
    for key, line in lines.items():
        missing = [word for word in choices(kinds[key]) if not re.search(rf"\b{word}\b", line)]
        assert not missing, key


@pytest.mark.parametrize("module", ["run", "script", "report"])
def test_help_fits_a_terminal_and_shows_no_config(module: str) -> None:
    command = [sys.executable, "-m", f"gradsurg.{module}", "--help"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "_target_" not in done.stdout


def test_help_shows_defaults_and_where_the_options_are_listed(here: Here) -> None:
    text = " ".join(here("--help").out.split())
    assert "optimizer steps of a run [500]" in text
    assert (
        "of the forward pass: float32, bfloat16 or float16 (with a GradScaler, on CUDA) [fl" in text
    )
    assert re.search(r" transform: adagc, .*, \.\.\. and \d+ more: --list transform ", text)
    assert "task: char_lm, cifar10, diabetes, digits, " in text
    chosen = yaml.safe_load((CONFIG_DIR / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    for group, options in chain(*(one.items() for one in chosen if isinstance(one, dict))):
        if options and " " not in group:
            option = options if isinstance(options, str) else ",".join(options)
            assert re.search(rf" {group} [^\[\]]*\[{option}\]", text), group
    for flag in ("-m", "--list [GROUP]", "--json", "--config-dir DIR", "--cfg job"):
        assert flag in text


def test_overrides_are_put_behind_options() -> None:
    words = ["seeds=1", "--config-dir", "there", "steps=2", "-m", "~c"]
    assert prepared(words) == ["--config-dir", "there", "-m", "~c", "seeds=1", "steps=2"]


@pytest.mark.parametrize("words", [("transform=clop",), ("step=3",), ("transform=[clip",)])
def test_a_config_is_not_printed_of_words_that_make_none(here: Here, words: tuple[str]) -> None:
    ended = here("--cfg", "job", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(words[0].partition("=")[0])


def test_a_config_is_printed_of_values_that_are_wrong(here: Here) -> None:
    ended = here("--cfg", "job", "transform=clip", "transform.clip.value=-1")
    assert ended.code == 0
    assert "value: -1" in ended.out


def test_with_a_users_model_a_site_without_a_gradient_is_only_a_warning(here: Here) -> None:
    own = ("transform=clip", "model=their_module.make_model", *SHORT)
    ended = here(*own, "site=captured")
    assert ended.code == 0
    assert "as far as one step tells" in ended.err


def into_closed_pipe(folder: Path, *words: str, first: bytes = b"") -> tuple[int, bytes]:
    """Close the pipe after the first output; return the exit code and stderr."""
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as begun:
        assert begun.stdout is not None
        assert begun.stderr is not None
        assert begun.stdout.read(len(first)) == first
        begun.stdout.close()
        told = begun.stderr.read()
    return begun.returncode, told


def test_a_command_whose_output_pipe_is_closed_runs_to_its_end(folder: Path) -> None:
    program = "from gradsurg.plugins.pipes import ignore_closed_pipes; ignore_closed_pipes()\n"
    program += "import sys\nfor line in range(9999): print('a line', flush=True)\n"
    program += "print('and a word', file=sys.stderr); open('done', 'w').close(); sys.exit(3)"
    told = into_closed_pipe(folder, "-c", program, first=b"a line\n")
    assert told == (3, b"and a word\n")
    assert (folder / "done").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gradsurg.run", "gradsurg.report"])
def test_help_into_a_closed_pipe_ends_with_code_0(folder: Path, module: str) -> None:
    assert into_closed_pipe(folder, "-u", "-m", module, "--help") == (0, b"")
