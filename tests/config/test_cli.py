"""The command as a user types it: output, files and exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from gradsurg.config.overrides import CONFIG_DIR, GROUPS
from gradsurg.config.settings import Settings
from gradsurg.multitask.shared_parameters import SharedParameters
from tests.conftest import Ended, Here

SHORT = ("steps=20", "seeds=1", "logger=none")


def command(folder: Path, *words: str) -> Ended:
    """The command in a process of its own, from `folder`."""
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "gradsurg.run", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def runs(folder: Path, study: str = "digits-mlp") -> list[str]:
    """The run directories of a study without their hashes."""
    return sorted(
        path.name.rpartition("-")[0] for path in (folder / "runs" / study).glob("*-seed*")
    )


def finished(folder: Path) -> list[str]:
    return sorted(path.parent.name.rpartition("-")[0] for path in folder.rglob("summary.json"))


def test_wrong_input_ends_with_code_2_and_a_line_for_each_fault(folder: Path) -> None:
    for words, expected in (
        (("transform=[clip,clop]", "lr=0", "modl=mlp"), ["transform", "modl"]),  # names first
        (("transform=clip", "transform.clip.value=-1", "lr=0"), ["lr", "transform.clip.value"]),
    ):
        ended = command(folder, *words, *SHORT)
        assert ended.code == 2
        assert ended.out == ""
        assert [line.partition(": ")[0] for line in ended.err.splitlines()] == expected
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("transform=null",),
        ("transform=clip,noise",),
        ("-m", "transform=clip,noise", "lr=-1,-2"),
        ("transform=[clip",),
        ("transform=their_modul.halve",),
        ("--config-dir", "no", "transform=clip"),
    ],
    ids=" ".join,
)
def test_wrong_input_leaves_no_folder_and_no_traceback(
    here: Here, folder: Path, words: tuple[str, ...]
) -> None:
    ended = here(*words)
    assert ended.code == 2
    assert ended.err
    assert "Traceback" not in ended.err
    assert not (folder / "runs").exists()


def test_a_plan_prints_the_sites_and_trains_nothing(here: Here, folder: Path) -> None:
    ended = here("transform=clip", "dry_run=true", "site.pattern=*.bias", "logger=none")
    marked = [line.split()[1] for line in ended.out.splitlines() if line.startswith("*")]
    assert marked == ["hidden.0.linear.bias", "hidden.1.linear.bias", "output.bias"]
    assert not (folder / "runs").exists()


def test_a_sweep_runs_all_combinations(here: Here, folder: Path) -> None:
    ended = here("-m", "transform=none,clip,their_module.halve", "seed=range(0,2)", *SHORT)
    assert ended.code == 0
    expected = [f"{name}-seed{seed}" for name in ("clip", "halve", "none") for seed in range(2)]
    assert runs(folder) == finished(folder) == expected
    assert "6 runs: 6 finished" in ended.out


def test_finished_runs_are_not_repeated_unless_forced(here: Here, folder: Path) -> None:
    here("transform=clip", *SHORT)
    (summary,) = folder.glob("runs/digits-mlp/clip-*/summary.json")
    first = summary.stat().st_mtime_ns
    again = here("transform=clip", *SHORT)
    assert again.out.endswith("2 of them had been finished before; force=true repeats them\n")
    assert summary.stat().st_mtime_ns == first
    forced = here("transform=clip", "force=true", *SHORT)
    assert "finished before" not in forced.out
    assert summary.stat().st_mtime_ns > first


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


def test_options_may_stand_behind_overrides(here: Here, folder: Path) -> None:
    (folder / "confs" / "transform").mkdir(parents=True)
    (folder / "confs" / "transform" / "mine.yaml").write_text(
        "mine:\n  name: sign\n", encoding="utf-8"
    )
    behind = here("transform=mine", "--config-dir", "confs", *SHORT)
    assert behind.out.startswith("mine: test accuracy ")
    before = here("--config-dir", "confs", "transform=mine", "dry_run=true", *SHORT)
    assert before.out.startswith("mine at Parameters(")


def test_a_users_model_is_trained(here: Here) -> None:
    ended = here("transform=clip", "model=their_module.make_model", *SHORT)
    assert ended.code == 0
    assert "\n1.weight " in ended.out


def test_help_mentions_each_group_and_six_commands(here: Here) -> None:
    ended = here("--help")
    assert ended.code == 0
    assert ended.out.count("  python -m gradsurg.run ") == 6
    described = ended.out.partition("Groups.")[2].partition("\n\ntransform:")[0]
    missing = [group for group in GROUPS if group not in described]
    assert not missing
    assert "clip_global_norm" in ended.out


def choices(kind: object) -> list[str]:
    """The words that a key of this type can be."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return [str(word) for word in inside]
    return [word for part in inside for word in choices(part)]


def test_help_explains_each_key_and_each_word_that_it_can_be(here: Here) -> None:
    out = here("--help").out
    text = out.partition("what they can be:")[2].partition("Groups and keys as")[0]
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
        assert not (kinds[key] is bool and "true: " not in line), key


def test_overrides_are_put_behind_options() -> None:
    from gradsurg.run import _options_first

    words = ["a=1", "--config-dir", "there", "b=2", "-m", "~c"]
    assert _options_first(words) == ["--config-dir", "there", "-m", "~c", "a=1", "b=2"]


@pytest.mark.parametrize("words", [("transform=clop",), ("step=3",), ("transform=[clip",)])
def test_a_config_is_not_printed_of_words_that_make_none(here: Here, words: tuple[str]) -> None:
    ended = here("--cfg", "job", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(words[0].partition("=")[0])


def test_a_config_is_printed_of_values_that_are_wrong(here: Here) -> None:
    ended = here("--cfg", "job", "transform=clip", "transform.clip.value=-1")
    assert ended.code == 0
    assert "value: -1" in ended.out


def test_a_trigger_that_never_fires_ends_with_code_2_and_trains_nothing(
    here: Here, folder: Path
) -> None:
    ended = here("transform=clip", "when.start=20", *SHORT)
    assert ended.code == 2
    assert ended.err.startswith("when.start: Steps(start=20, stop=None, every=1) never ")
    assert ended.err.count("\n") == 1
    assert not (folder / "runs").exists()


def test_with_a_users_model_a_site_without_a_gradient_is_only_a_warning(here: Here) -> None:
    own = ("transform=clip", "model=their_module.make_model", *SHORT)
    ended = here(*own, "site=captured")
    assert ended.code == 0
    assert "as far as one step tells" in ended.err
    ended = here(*own, "when=depth", "when.low=9")
    assert ended.code == 0
    assert ended.err.startswith("warning: Depth(low=9, high=None) never fires in 20 steps")
    # No step of a model, whosever it is, comes after the last.
    assert here(*own, "when.start=20").code == 2


def test_a_command_whose_output_pipe_is_closed_runs_to_its_end(folder: Path) -> None:
    program = "from gradsurg.plugins.pipes import ignore_closed_pipes; ignore_closed_pipes()\n"
    program += "import sys\nfor line in range(9999): print('a line', flush=True)\n"
    program += "print('and a word', file=sys.stderr); open('done', 'w').close(); sys.exit(3)"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as begun:
        assert begun.stdout is not None
        assert begun.stderr is not None
        assert begun.stdout.readline() == b"a line\n"
        begun.stdout.close()
        told = begun.stderr.read()
    assert (begun.returncode, told) == (3, b"and a word\n")
    assert (folder / "done").is_file()


@pytest.mark.parametrize("module", ["gradsurg.run", "gradsurg.report"])
def test_help_into_a_closed_pipe_ends_with_code_0(folder: Path, module: str) -> None:
    words = [sys.executable, "-u", "-m", module, "--help"]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as begun:
        assert begun.stdout is not None
        assert begun.stderr is not None
        begun.stdout.close()
        told = begun.stderr.read()
    assert (begun.returncode, told) == (0, b"")
