"""The command: what it prints, where its runs lie, and that a sweep or a kill changes nothing."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.builds import faults
from tests.conftest import Here
from tests.loggers.offline import alone, inspect, of_type

SHORT = ("steps=20", "seeds=1", "logger=none", "report=false")


MINE = """
from torch import nn
from gradsurg.plugins.fields import validated
from gradsurg.tasks.digits import Digits
from gradsurg.transforms.base import Stateless


@validated
class Halve(Stateless):
    @property
    def properties(self):
        return frozenset()

    def apply(self, grad, context):
        return grad / 2


def linear(shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))


class FewDigits(Digits):
    pass
"""


def shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, in `folder`, with warnings as errors, except wandb's."""
    return subprocess.run(
        [sys.executable, "-m", "gradsurg.run", *words],
        cwd=folder,
        env={k: v for k, v in alone(folder).items() if k != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def directories(folder: Path, study: str = "digits-mlp") -> list[str]:
    """The names of a study's runs without their hashes."""
    paths = (folder / "runs" / study).glob("*-seed*")
    return sorted(path.name.rpartition("-")[0] for path in paths)


def of(folder: Path, label: str, study: str = "digits-mlp") -> Path:
    (path,) = (folder / "runs" / study).glob(f"{label}-????????")
    return path


def lines(place: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / name).read_text(encoding="utf-8").splitlines()]


def numbers(path: Path) -> dict[str, Any]:
    """All that a run has written down but its times and its own name."""
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in summary.items() if not key.startswith("time/")}
    files = {
        name: (path / name).read_text(encoding="utf-8")
        for name in ("metrics.jsonl", "effects.jsonl")
    }
    return kept | files


UNTIMED = ("step time", "----")


def untimed(printed: str) -> str:
    """The output, without the times and without the width of a column that they decide."""
    lines = [line for line in printed.splitlines() if not line.startswith(UNTIMED)]
    text = "\n".join(" ".join(line.split()) for line in lines)
    return re.sub(r"Step time:[^:]*?ms\swith\s", "", text)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The main job, small, started by a user in a folder that is not the checkout."""
    folder = tmp_path_factory.mktemp("first")
    words = ["transform=clip", "steps=60", "seeds=2", "log_every=20", "study=first"]
    return folder, shell(folder, *words)


def test_the_main_job_prints_the_answer_first_then_outcomes_then_effects(first) -> None:
    _, done = first
    assert done.returncode == 0, done.stderr
    paragraphs = done.stdout.strip().split("\n\n")
    verdict = " ".join(paragraphs[0].split())
    for part in ("est accuracy of clip minus control", "one split, 450 test examples", "2 seeds"):
        assert part in verdict
    assert paragraphs[1].startswith("A test at the level 0.05 needs 6 seeds")
    head, _, *table = paragraphs[2].splitlines()
    assert re.split(r"\s{2,}", head.strip()) == ["clip", "control", "difference", "range", "higher"]
    titles = [re.split(r"\s{2,}", line)[0] for line in table[:5]]
    metrics = ["test accuracy", "test loss", "train loss", "train loss AUC"]
    assert titles == [*metrics, "step time (ms)"]
    assert paragraphs[3] == "Gradients at each site, means over 2 runs:"
    effects = paragraphs[4].splitlines()
    assert re.split(r"\s{2,}", effects[0])[:3] == ["site", "norm before", "norm after"]
    assert len(effects) == 2 + 6
    assert effects[2].startswith("hidden.0.linear.weight")


def test_the_main_job_ends_with_where_its_runs_lie_and_how_to_upload_them(first) -> None:
    folder, done = first
    ending = " ".join(done.stdout.split("\n\n")[-1].split())
    found = re.fullmatch(
        r"4 runs in runs/first report: runs/first/report/index.html "
        r"W&B \(offline\): 5 runs, one for the report, under runs/first "
        r"to upload: wandb sync (\S+)",
        ending,
    )
    assert found, ending
    places = list((folder / "runs" / "first").glob("*-seed*"))
    uploaded = [path.parents[1] for path in folder.glob(found.group(1))]
    assert sorted(uploaded) == sorted([*places, folder / "runs" / "first" / "report"])


def test_each_run_has_a_directory_with_its_files(first) -> None:
    folder, _ = first
    assert not list(folder.rglob(".hydra"))
    assert {path.name for path in (folder / "runs").iterdir()} == {"first"}
    assert directories(folder, "first") == ["clip-seed0", "clip-seed1", "none-seed0", "none-seed1"]
    for place in (folder / "runs" / "first").glob("*-seed*"):
        assert re.fullmatch(r"(clip|none)-seed[01]-[0-9a-f]{8}", place.name)
        names = {path.name for path in place.iterdir() if path.is_file()}
        own = {"run.json", "config.yaml", "metrics.jsonl", "effects.jsonl", "summary.json"}
        assert names == own | {"again.yaml"}
        assert [row["step"] for row in lines(place, "metrics.jsonl")] == [20, 40, 60]


def test_the_main_job_is_a_study_of_its_own_whose_page_and_tables_are_written(first) -> None:
    folder, _ = first
    report = folder / "runs" / "first" / "report"
    names = {path.name for path in report.iterdir() if path.is_file()}
    tables = {"runs.parquet", "comparison.parquet", "effects.parquet", "outcome.md", "outcome.tex"}
    assert names == {"index.html", ".written.json", *tables}
    rows = (report / "outcome.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in rows if line.startswith("| clip | test accuracy |")]
    assert "| 2 of 2 |" in row
    (path,) = report.glob("wandb/offline-run-*")
    (begun,) = of_type(inspect(folder, path), "run")
    assert (begun["run_group"], begun["job_type"]) == ("first", "report")
    assert [*(report / "wandb" / path.name / "files").rglob("study_*.table.json")]


def test_progress_goes_to_stderr_a_line_a_run_and_nothing_else(first) -> None:
    _, done = first
    lines = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert lines == [
        "2 seeds",  # too few for a significant difference
        "1/4 control seed0-digits-mlp",
        "2/4 treated clip-seed0-digits-mlp",
        "3/4 control seed1-digits-mlp",
        "4/4 treated clip-seed1-digits-mlp",
    ]


def test_the_offline_wandb_runs_have_study_arm_config_and_outcome(first) -> None:
    folder, _ = first
    for label, arm in (("clip-seed0", "treated"), ("none-seed0", "control")):
        place = of(folder, label, "first")
        (path,) = place.glob("wandb/offline-run-*")
        records = inspect(folder, path)
        (begun,) = of_type(records, "run")
        assert (begun["run_group"], begun["job_type"]) == ("first", arm)
        assert begun["tags"] == [label.partition("-")[0]]
        config = OmegaConf.to_container(OmegaConf.load(place / "config.yaml"))
        assert isinstance(config, dict)
        told = {key: value for key, value in begun["config"]["update"].items() if key in config}
        assert told == config
        assert bool(begun["config"]["update"].get("surgery")) == (arm == "treated")
        summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        last = {}
        for update in of_type(records, "summary"):
            last |= update["update"]
        assert last["test/accuracy"] == summary["test/accuracy"]
        assert last["state"] == "finished"


def test_a_command_run_again_repeats_nothing_and_prints_the_same(command, tmp_path) -> None:
    printed, _ = command("transform=clip", *SHORT)
    files = [path for path in (tmp_path / "runs").rglob("*-seed*/*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    again, _ = command("transform=clip", *SHORT)
    note = "2 of them had been finished before; force=true repeats them\n"
    assert again == printed + note
    assert {path: path.stat().st_mtime_ns for path in before} == before
    forced, _ = command("transform=clip", *SHORT, "force=true")
    assert untimed(forced) == untimed(printed)
    summaries = [path for path in before if path.name == "summary.json"]
    assert len(summaries) == 2
    assert all(path.stat().st_mtime_ns > before[path] for path in summaries)


def test_without_a_transform_it_is_a_plain_run_that_shows_the_gradients(command, tmp_path) -> None:
    printed, _ = command("transform=none", *SHORT)
    assert printed.startswith("There is no treated arm to compare: 1 of 1 run finished.\n")
    assert "control  test accuracy  1 " in printed
    head = next(line for line in printed.splitlines() if line.startswith("site "))
    assert re.split(r"\s{2,}", head) == ["site", "norm before", "calls"]
    assert len(re.findall(r"^(?:hidden|output)\S+ +0\.\d+ +20$", printed, re.MULTILINE)) == 6
    assert directories(tmp_path) == ["none-seed0"]


def test_without_a_control_the_treated_arm_stands_alone(command, tmp_path) -> None:
    printed, _ = command("transform=clip", *SHORT, "control=none")
    assert printed.startswith("There is no control to compare with: 1 of 1 run finished, ")
    assert "difference" not in printed
    assert directories(tmp_path) == ["clip-seed0"]


def test_diverged_runs_are_counted_apart_and_the_command_ends_well(command, tmp_path) -> None:
    words = ("transform=scale", "transform.scale.factor=1e9", "steps=40", "logger=none")
    printed, _ = command(*words, "seeds=2", "log_every=10")
    assert printed.startswith("2 of 2 seeds diverged with scale and 0 with control (exact ")
    assert "(exact McNemar p 0.5); no seed is left to compare." in " ".join(printed.split())
    assert re.search(r"\ncontrol +test accuracy +2 ", printed)
    summary = json.loads((of(tmp_path, "scale-seed1") / "summary.json").read_text(encoding="utf-8"))
    assert summary["state"] == "diverged"
    assert summary["steps"] < 40
    again, _ = command(*words, "seeds=2", "log_every=10")
    assert "4 of them had been finished before" in again


def test_a_sweep_runs_every_combination_and_shares_the_controls(command, tmp_path) -> None:
    words = ("transform=none,[sign,clip]", "lr=0.1,0.2", "seed=0,1", "steps=5", "logger=none")
    printed, told = command("-m", *words, "report=false")
    labels = ["none", "sign+clip"]
    names = sorted(f"{label}-seed{seed}" for label in labels for seed in (0, 1) for _ in (0, 1))
    assert directories(tmp_path) == names
    assert "8 runs: 8 finished" in printed
    # the plain jobs come first; each of the four others finds its control
    assert told.count("job ") == 8
    rates = [
        OmegaConf.select(OmegaConf.load(path / "config.yaml"), "optimizer.lr")
        for path in (tmp_path / "runs" / "digits-mlp").glob("*-seed*")
    ]
    assert sorted(rates) == [0.1] * 4 + [0.2] * 4


def test_a_job_of_a_sweep_ends_as_it_would_alone(command, tmp_path) -> None:
    words = ("steps=20", "seeds=1", "logger=none", "model.dropout=0.3", "report=false")
    command("-m", "transform=add_noise,grokfast_ema,clip", "study=sweep", *words)
    command("transform=clip", "study=alone", *words)
    swept, alone = (of(tmp_path, "clip-seed0", study) for study in ("sweep", "alone"))
    assert swept.name == alone.name
    assert numbers(swept) == numbers(alone)


def test_a_command_leaves_generator_threads_and_warnings_as_they_were(command) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_num_threads(), list(warnings.filters)
    hooks = dict(torch.nn.modules.module._global_forward_hooks)
    words = ("steps=5", "seeds=1", "logger=none", "threads=2", "report=false")
    command("-m", "transform=add_noise,clip", *words)
    after = torch.get_rng_state(), torch.get_num_threads(), list(warnings.filters)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert dict(torch.nn.modules.module._global_forward_hooks) == hooks


def test_a_plan_is_printed_and_nothing_is_trained(command, tmp_path) -> None:
    printed, _ = command(
        "transform=[clip,noise]", "site.pattern=output.*", "when=warmup", "dry_run=true"
    )
    title, *tree, empty, size, selected, said = printed.splitlines()
    links = "clip: Clip(value=0.01) -> noise: AddNoise("
    assert title.startswith(links)
    assert " at Parameters(pattern='output.*', " in title
    assert [line.split() for line in tree if line[0] == "*"] == [
        ["*", "output.weight", "10x64"],
        ["*", "output.bias", "10"],
    ]
    assert tree[-3].split() == ["output#0", "Linear", "2x10", "650", "T,", "Addmm"]
    assert (empty, size) == ("", "10 calls, 8,970 parameters, 8 nodes")
    assert selected == "2 sites selected (*)"
    assert said == "stage backward, when Steps(start=0, stop=100, every=1), 2 sites"
    assert list(tmp_path.rglob("*")) == []


def test_the_files_of_a_user_are_found_in_the_folder_where_the_command_is_given(
    command, tmp_path
) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    words = ("model=mine.linear", "task=mine.FewDigits")
    printed, _ = command("transform=[clip,mine.Halve]", *words, *SHORT)
    assert re.search(r"^clip +1\.weight", printed, re.MULTILINE)
    assert re.search(r"^halve +1\.weight", printed, re.MULTILINE)
    study = "mine.FewDigits-mine.linear"
    assert directories(tmp_path, study) == ["clip+halve-seed0", "none-seed0"]


def test_no_steps_are_a_check_of_the_command(command, tmp_path, capsys) -> None:
    line = "steps=0: {} checked, nothing to train\n"
    none = ("steps=0", "logger=none")
    assert command("transform=clip", "schedule=one_cycle", *none)[0] == line.format("1 job")
    assert command("-m", "transform=clip,sign", *none)[0] == line.format("2 jobs")
    for word, told in (
        ("optimizer.lr=-1", "optimizer: SGD(lr=-1, momentum=0.0, weight_decay=0.0) is refused: "),
        ("+schedule.gama=1", "schedule: needs a _target_, "),
        ("site.pattern=heads", "site.pattern: nothing matches 'heads'"),
    ):
        with pytest.raises(SystemExit) as ended:
            command(word, *none)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(told)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_with_no_steps_prints_that_nothing_is_trained(command, capsys) -> None:
    printed, _ = command("transform=clip", "when.start=5", "dry_run=true", "steps=0")
    plan, told = printed.rstrip().rsplit("\n", 1)
    assert told == "steps=0: 1 job checked, nothing to train"
    assert plan.startswith("clip: Clip(value=0.01) at Parameters(")
    with pytest.raises(SystemExit) as ended:
        command("transform=clip", "when.start=5", "dry_run=true", "steps=5")
    assert ended.value.code == 2
    assert "when.start: must be <= 4" in capsys.readouterr().err


def test_all_wrong_overrides_are_reported_and_nothing_is_trained(command, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command("transform=clip", "out=''", "lr=-1", "steps=-1")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    keys = [line.partition(":")[0] for line in told.err.splitlines()]
    assert sorted(keys) == ["lr", "out", "steps"]
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_groups_and_six_commands_that_compose(command) -> None:
    told, _ = command("--help")
    commands = re.findall(r"^  python -m gradsurg\.run (.+)$", told, re.MULTILINE)
    assert len(commands) == 6
    for group in ("transform", "site", "when", "model", "task", "optimizer", "logger"):
        assert re.search(rf"^{group}: \w+", told, re.MULTILINE), group
    assert "clip_global_norm" in told
    for line in commands:
        assert not faults(line)


def test_a_run_is_trained_again_from_its_folder(here: Here) -> None:
    words = ("transform=[norm_matched,noise]", "transform.norm_matched.of.value=0.003")
    at = ("site=nodes", "site.pattern=Addmm", "when=all_of", "schedule=cosine", "optimizer=adam")
    rest = ("seeds=2", "steps=4", "log_every=2", "logger=none", "report=false")
    assert here(*words, *at, *rest).code == 0
    study = Path("runs/digits-mlp")
    names = sorted(path.name for path in study.iterdir())
    (run,) = study.glob("norm_matched+noise-seed1-*")
    before = (run / "metrics.jsonl").read_bytes(), (run / "effects.jsonl").read_bytes()
    again = here("--config-dir", str(run), "--config-name", "again", "force=true")
    assert again.code == 0, again.err
    assert sorted(path.name for path in study.iterdir()) == names
    assert ((run / "metrics.jsonl").read_bytes(), (run / "effects.jsonl").read_bytes()) == before
    other = here("--config-dir", str(run), "--config-name", "again", "site=outputs")
    assert (other.code, other.err[:36]) == (2, "site: this config has one as a whole")
