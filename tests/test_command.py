"""The console command `gradsurg`: its commands, help, wrong words and completion."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg.__main__ import BASH, COMMANDS

ROOT = Path(__file__).parents[1]
SEVERAL = """
import runpy, sys
from contextlib import suppress
for line in sys.argv[1].split("; "):
    sys.argv = ["gradsurg", *line.split(" ", 1 if "--complete" in line else -1)]
    with suppress(SystemExit):
        runpy.run_module("gradsurg", run_name="__main__", alter_sys=True)
    print("--")
print(sorted({"torch", "polars", "altair", "numpy"} & set(sys.modules)))
"""
"""Runs several commands in one process, and prints the libraries that they have imported."""


def gradsurg(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "gradsurg", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(lines: str) -> list[list[str]]:
    """The lines that each of several commands prints, and then the imported libraries."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, lines],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [part.strip().splitlines() for part in done.stdout.split("--\n")]


def test_help_of_no_command_imports_torch_or_a_library_of_reports() -> None:
    # That of reproduce reads the records of papers, with polars.
    commands = [name for name in COMMANDS if name != "reproduce"]
    *helps, libraries = printed("; ".join(["--help", *(f"{name} --help" for name in commands)]))
    assert libraries == ["[]"]
    assert [text[0].split()[:3] for text in helps] == [
        ["usage:", "gradsurg", "COMMAND"],
        ["Train", "a", "small"],
        ["usage:", "gradsurg", "report"],
        ["usage:", "gradsurg", "fetch"],
    ]
    assert "torch" not in printed("reproduce --help")[-1][0]


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        ((), "usage: gradsurg COMMAND ..."),
        (("rnu",), "gradsurg: there is no command 'rnu'. There are: run, report, reproduce, "),
        (("--helpp",), "gradsurg: there is no command '--helpp'. There are: run, "),
        (("--shell-completion",), "gradsurg --shell-completion: name a shell. There are: bash"),
        (("run", "--list", "nothing"), "--list: there is no group 'nothing' to list. "),
        (("report", "nowhere"), "there is no folder nowhere"),
        (("reproduce", "nothing2000"), "there is no experiment 'nothing2000'. There are: "),
    ],
)
def test_a_wrong_word_gives_code_2_and_says_what_there_is(
    words: tuple[str, ...], stderr: str
) -> None:
    done = gradsurg(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert stderr in done.stderr
    assert len(done.stderr.splitlines()) == 1 or not words


def test_words_are_completed() -> None:
    lines = {
        "gradsurg re": ["report", "reproduce"],
        "gradsurg nothing ": [],
        "gradsurg report --w": ["--watch"],
        "gradsurg reproduce liu": ["liu2021"],
        "gradsurg run --li": ["--list"],
        "gradsurg run transform=clip_g": ["transform=clip_global_norm"],
        "gradsurg run -m transform=clip site.patt": ["site.pattern="],
        "gradsurg --shell-completion z": ["zsh"],
    }
    *completed, libraries = printed("; ".join(f"--complete {line}" for line in lines))
    assert dict(zip(lines, completed, strict=True)) == lines
    assert "torch" not in libraries[0]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "word", "reply"),
    [("gradsurg rep", "rep", "report reproduce"), ("gradsurg run optimizer=sg", "sg", "sgd")],
)
def test_the_script_for_bash_gives_the_part_behind_an_equals_sign(
    line: str, word: str, reply: str
) -> None:
    code = f"""
gradsurg() {{ "{sys.executable}" -m gradsurg "$@"; }}
complete() {{ :; }}; compopt() {{ :; }}
{BASH}
COMP_LINE='{line}' COMP_POINT={len(line)}
_gradsurg gradsurg {word} gradsurg
echo "${{COMPREPLY[*]}}"
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == reply.split()
