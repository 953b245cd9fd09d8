"""Command lines that are wrong in unusual ways: one line each, code 2, no traceback, no hang."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest

from gradsurg.plugins.messages import full_message, printable
from gradsurg.stats import detectable_effect
from scripts import fuzz
from tests.conftest import Ended, Here

SHORT = ("steps=1", "seeds=1", "logger=none", "report=false")
CLIP = "transform=clip"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((CLIP, "+schedule.foo=1"), "schedule: needs a _target_, "),
        (("--cfg", "job", "steps=abc"), "steps: must be a whole number, found 'abc'"),
        (("-sc", "install=bash"), "-sc: is not offered: "),
        ((CLIP, "value=1"), "value: did you mean transform.clip.value? There is no key "),
        (
            (CLIP, "when=steps(start=3)&flag"),
            "when=steps(start=3)&flag: one trigger is when=steps ",
        ),
        ((CLIP, "optimizer.lr=true"), "optimizer.lr: must be a number, found True"),
        ((CLIP, "seed=false"), "seed: must be a whole number, found False"),
        ((CLIP, "task=overlay", "task.num_train=1e12"), "task: needs more memory than there is"),
        (("transform=[1.5]",), "hydra: TypeError: "),
        ((CLIP, "+=$HOME"), "hydra: AssertionError: "),
        ((CLIP, "hydra.run.dir=/proc/x"), "hydra: FileNotFoundError: [Errno 2] No such file or"),
        ((CLIP, "out=" + "x" * 300), "out: cannot be a folder ([Errno 36] File name too long: "),
        (("experiment=simple_transforms", "control=!"), "control=!: cannot be read: "),
        ((f"experiment={'9' * 5000}",), "hydra: ValueError: Exceeds the limit"),
        (
            ("--run", "--cfg=job", CLIP),
            "hydra: ValueError: Only one of --run, --multirun, --cfg, --info",
        ),
        (("--hydra-help", CLIP, "zzz=1"), "transform: this config has one as a whole"),
        (("-m", "transform=glob(zzz*)"), "transform=glob(zzz*): sweeps over no value. There are: "),
        (("-m", CLIP, "seed=range(3,0)"), "seed=range(3,0): sweeps over no value"),
        (("-m", CLIP, "seed=range(0,inf)"), "seed=range(0,inf): cannot be swept: it has no end"),
        (("-m", CLIP, "seed=range(0,100000)"), "seed: over 10,000 values need yes=true"),
        (("logger=wandb,console",), "logger=wandb,console: write 'logger=[wandb,console]', "),
        (
            ("clip.value=0.1",),
            "clip.value: did you mean transform=clip transform.clip.value=..? There",
        ),
        (
            (CLIP, "clip.value=0.1"),
            "clip.value: did you mean transform.clip.value? There is no key ",
        ),
        ((CLIP, "hydra.launcher.n_jobs=2"), "hydra.launcher.n_jobs: 'n_jobs' is not a key of"),
        ((CLIP, "margin=0"), "margin: needs a positive number in the metric's unit, such as "),
        ((CLIP, f"seeds={10**30}"), "seeds: must be < 9223372036854775808, found 1000000000000"),
        ((CLIP, f"splits={10**30}", "yes=true"), "splits: must be < 9223372036854775808, found "),
        ((CLIP, f"steps={10**30}"), "steps: must be < 9223372036854775808, found 10000000000"),
        ((CLIP, "--config-dir", "x" * 300), "--config-dir: there is no folder "),
        (("--list", "clip", "--config-dir", "x" * 300), "--list: there is no folder 'xxx"),
        (("--list", "x" * 300), "--list: there is no group or option 'xxx"),
        ((f"transform={'x' * 300}",), "transform: there is no 'xxx"),
        ((f"experiment={'x' * 300}",), "experiment: there is no 'xxx"),
        ((CLIP, "seeds=1000000000"), "seeds: 2,000,000,000 runs need yes=true; without it at most"),
        pytest.param(
            ("-m", CLIP, "seeds=2501", "model=mlp,linear"),
            "sweep: 10,004 runs need yes=true",
            marks=pytest.mark.slow,
        ),
        ((CLIP, "logger=sys.exit"), "logger.exit: sys.exit raised SystemExit"),
        (("transform=sys.exit",), "transform.exit: sys.exit raised SystemExit"),
    ],
)
def test_a_wrong_command_line_gives_one_line(
    here: Here, folder: Path, words: tuple[str, ...], line: str
) -> None:
    given = {word.partition("=")[0] for word in words}
    short = () if "--list" in words else SHORT
    ended = here(*words, *(word for word in short if word.partition("=")[0] not in given))
    lines = [text for text in ended.err.splitlines() if not text.startswith("warning: ")]
    assert ended.code == 2
    assert lines[0].startswith(line), lines
    assert len(lines) == 1
    assert not [*folder.rglob("summary.json")]


def test_a_key_without_a_value_and_an_unknown_key_are_one_line_each(here: Here) -> None:
    for words, key in (((CLIP, "effects_every=???", "foo=1"), "foo"), ((CLIP, "out=???"), "out")):
        (line,) = here(*words).err.splitlines()  # names are checked first
        assert line.startswith(f"{key}: ")


@pytest.mark.parametrize("name", ["builtins.abs", "operator.neg"])
def test_a_function_written_in_c_is_a_transform(here: Here, folder: Path, name: str) -> None:
    ended = here(f"transform={name}", *SHORT)
    assert ended.code == 0
    assert len([*folder.rglob("summary.json")]) == 2


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from gradsurg.run import main
for word in sys.argv[1:]:
    sys.argv[1:] = word.split("; ")
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def test_a_wrong_word_is_told_before_torch_is_imported(folder: Path) -> None:
    (folder / "mine.py").write_text("def halve(grad):\n    return grad / 2\n", encoding="utf-8")
    told = {
        "transform=clpi": "transform: did you mean 'clip'? There is no 'clpi'. ",
        "transform=mine": "transform: write transform=mine.<name>, with a class or ",
        "transfrom=clip": "transfrom: did you mean 'transform'? ",
        "transform=clip; transform.value=1": "transform.value: did you mean transform.clip.value? ",
        "transform=clip; --seeds; 3": "--seeds: write seeds=3, a key, not a flag",
        "transform=clip,sign": "transform=clip,sign: add -m: several values need a sweep",
        "-m; transform=glob(zz*)": "transform=glob(zz*): sweeps over no value. ",
        "clip": "clip: is not key=value",
        "transform": "transform: is not key=value. Did you mean --list transform?",
        "when=thrshold": "when: did you mean 'threshold'? ",
    }
    command = [sys.executable, "-c", WITHOUT_TORCH, *told]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2"] * len(told)
    for line, start in zip(ended.stderr.splitlines(), told.values(), strict=True):
        assert line.startswith(start)
        assert len(line) <= 160, "two lines of a terminal"


def test_many_runs_are_counted_and_timed_before_they_start(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsurg.experiment.planning.ANNOUNCED_RUNS", 3)
    ended = here("-m", CLIP, "model=mlp,linear", *SHORT)
    first = ended.err.splitlines()[0]
    assert first.startswith("2 jobs, 4 runs of 1 steps: at least ")
    assert first.endswith(" seconds on cpu, timed without surgery and evaluation")


def told(ended: Ended, about: str = "significant") -> list[str]:
    return [line for line in ended.err.splitlines() if about in line]


def test_too_few_seeds_for_any_arm_or_one_alone_are_told_before_training(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in SHORT if word != "seeds=1"]
    rule = "no difference can be significant (p <= 0.05); that needs at least seeds=6"
    two = (CLIP, *words, "seeds=2")
    assert told(here(*two)) == [f"2 seeds: {rule}"]
    assert not told(here(*two))  # its runs are finished

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsurg.experiment.job.execute", interrupted)
    assert told(here("-m", CLIP, "model=mlp,linear", *words, "seeds=2")) == [f"2 seeds: {rule}"]
    assert told(here(CLIP, *words, "seeds=5")) == [f"5 seeds: {rule}"]
    assert told(here("-m", CLIP, *words, "seed=7,8")) == [f"2 seeds: {rule}"]
    for swept in (("transform=clip,sign",), (CLIP, "model=mlp,linear")):
        assert told(here("-m", *swept, *words, "seeds=6")) == [
            "2 arms with 6 seeds: an arm that differs alone needs seeds=7 to be significant (q <= "
            "0.05)"
        ]
    for more in (
        (CLIP, *SHORT),
        (CLIP, "control=none", *words, "seeds=2"),
        ("transform=none", *words, "seeds=2"),
    ):
        assert not told(here(*more))


def test_the_difference_that_the_seeds_can_find_is_told_by_finished_controls(
    here: Here, folder: Path
) -> None:
    words = [word for word in SHORT if word != "seeds=1"]
    assert not told(here("transform=none", *words, "seeds=6"), "can find")
    files = [*folder.rglob("none-seed*/summary.json")]
    for place, file in enumerate(files):
        summary = json.loads(file.read_text("utf-8"))
        outcome = {"test/accuracy": 0.9 + 0.01 * place, "test/loss": 1.0, "learned_nothing": {}}
        file.write_text(json.dumps(summary | outcome), encoding="utf-8")
    effect = 100 * (detectable_effect(6, 2**0.5 * stdev(0.01 * n for n in range(6))) or 0)
    (line,) = told(here(CLIP, *words, "seeds=6"), "can find")
    assert line == (
        f"6 seeds can find a difference in test accuracy of {effect:.2g} pp (80 % power, from the "
        "spread of 6 control runs)"
    )
    assert not told(here(CLIP, *words, "seeds=6"), "can find")  # all runs are finished
    assert not told(here("transform=sign", "metric=test/loss", *words, "seeds=6"), "can find")


def test_very_many_runs_are_planned_with_yes(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsurg.experiment.build.MAX_RUNS", 1)
    monkeypatch.setattr("gradsurg.experiment.planning.MAX_RUNS", 1)
    assert here(CLIP, *SHORT).code == 2
    assert here(CLIP, "yes=true", *SHORT).code == 0


def test_out_is_the_folder_of_the_start_also_if_code_changes_the_current_one(
    here: Here, folder: Path
) -> None:
    source = "import os\ndef moves(grad):\n    os.chdir('/')\n    return grad / 2\n"
    (folder / "moving.py").write_text(source, encoding="utf-8")
    words = ("transform=moving.moves,clip", "checkpoint_every=1", "checkpoint_seconds=0")
    ended = here("-m", *words, *SHORT)
    assert ended.code == 0
    assert Path.cwd() == folder
    assert len([*folder.glob("runs/digits-mlp/*/summary.json")]) == 3
    assert len([*folder.glob("runs/digits-mlp/*/checkpoint.pt")]) == 3
    assert not Path("/runs").exists()


def test_control_characters_do_not_reach_the_terminal(here: Here) -> None:
    assert printable("a\x1b[31mb\nc\u202eü") == "a\\x1b[31mb\\nc\\u202eü"
    assert full_message(ValueError("\x1b]0;title\x07")) == "ValueError: \\x1b]0;title\\x07"
    ended = here(CLIP, "study='\x1b[31m'", *SHORT)
    assert ended.code == 2
    assert "\x1b" not in ended.err
    ended = here(CLIP, "zzz\x1b[31m\nfoo", *SHORT)
    assert ended.code == 2
    assert "\x1b" not in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_random_command_lines_end_well() -> None:
    for index in range(8):  # .ci/full goes on to 5000
        words, _, faults = fuzz.case(f"0-{index}")
        assert faults == {}, words
