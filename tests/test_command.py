"""The console command `gradsurg`: its commands, help, wrong words, and the width of its text."""

import subprocess
import sys
from io import StringIO

import pytest

from gradsurg import __main__ as command
from gradsurg.plugins.messages import terminal_width
from tests.conftest import Here

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


def test_help_of_no_command_imports_torch_or_a_library_of_reports() -> None:
    lines = "; ".join(["--help", *(f"{name} --help" for name in command.COMMANDS)])
    words = [sys.executable, "-c", SEVERAL, lines]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    *helps, libraries = done.stdout.split("--\n")
    assert libraries == "[]\n"
    begun = [" ".join(text.split()[:3]) for text in helps]
    usages = [
        f"usage: gradsurg {name}" for name in ("COMMAND", "script", "report", "reproduce", "fetch")
    ]
    assert begun == [usages[0], "Train a small", *usages[1:]]


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        ((), "usage: gradsurg COMMAND ..."),
        (("rnu",), "gradsurg: did you mean 'run'? There is no command 'rnu'. "),
        (("run", "--list", "nothing"), "There is no group or option 'nothing'.\n"),
        (("script", "transform=clip", "--", "no.py"), "no.py: there is no such script"),
        (("report", "nowhere"), "there is no folder 'nowhere'"),
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


def test_text_in_a_pipe_is_folded_to_columns_where_it_is_set_and_errors_are_not(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert terminal_width(StringIO()) is None
    monkeypatch.setenv("COLUMNS", "70")
    assert terminal_width(StringIO()) == 70
    ended = here("transform=clip", "steps=2", "seeds=2", "logger=none", "report=false")
    assert 60 < max(map(len, ended.out.splitlines())) <= 70
    assert len(here("site=nope").err.splitlines()) == 1
