"""The console command `gradsurg`: its commands, help and wrong words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsurg import __main__ as command
from gradsurg.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
SEVERAL = """
import runpy, sys
from contextlib import suppress
for line in sys.argv[1].split("; "):
    sys.argv = ["gradsurg", *line.split()]
    with suppress(SystemExit):
        runpy.run_module("gradsurg", run_name="__main__", alter_sys=True)
    print("--")
print(sorted({"torch", "polars", "altair", "numpy"} & set(sys.modules)))
"""
"""Runs several commands in one process, and prints the libraries that they have imported."""


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
        (("run", "--list", "nothing"), "--list: there is no group 'nothing' to list. "),
        (("report", "nowhere"), "there is no folder nowhere"),
        (("reproduce", "nothing2000"), "there is no experiment 'nothing2000'. There are: "),
    ],
)
def test_a_wrong_word_gives_code_2_and_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words, stderr: str
) -> None:
    monkeypatch.setattr(command, "ignore_closed_pipes", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gradsurg", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert stderr in told.err
    assert len(told.err.splitlines()) == 1 or not words
