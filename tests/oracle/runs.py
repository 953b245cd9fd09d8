"""Compare the runs that small command lines leave, and the reports of the reference's runs."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from signal import SIGKILL
from typing import Any

import polars as pl
import torch
import yaml

from gradsurg.plugins.registry import named
from tests.oracle.side import SIDES, End, Job, differences, report, run_both

UNCOMPARED = (
    "time/*",
    "outcome/time/*",
    "*step_ms*",
    "hardware",
    "_*",
    "step time",
    "*artifact_path",
)
"""Keys of summaries, rows and tables that are times, hardware, or W&B's own numbers and links."""
SENTENCES = ("notes",)
"""Keys of summaries of which only the number of sentences is compared."""
TOLERANCE = 1e-6
"""Of effects and conflicts. All else is equal bit by bit."""
ROWS = {"metrics.jsonl": 0.0, "effects.jsonl": TOLERANCE, "conflicts.jsonl": TOLERANCE}

THEIRS = """
import os, signal
from pathlib import Path
from torch import nn
from gradsurg.models.mlp import MLP


def halve(grad):
    return grad / 2


class Fragile(MLP):
    calls = 0

    def forward(self, inputs):
        at = Path("kill_at")
        self.calls += self.training
        if self.training and at.exists() and self.calls == int(at.read_text()):
            at.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def make(shape, num_outputs, dropout=0.0):
    return Fragile(shape, num_outputs, hidden=(16,), dropout=dropout)
"""
TIGHT = "tight:\n  _target_: gradsurg.Clip\n  value: 0.001\n"


@dataclass(frozen=True)
class Line:
    """A command line, given `times` times; the first may kill itself at a training step."""

    words: str
    times: int = 1
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_words(self) -> list[str]:
        """The words with short defaults for the keys that they lack."""
        words = self.words.split()
        keys = {word.partition("=")[0] for word in words}
        keys |= {"seeds"} if "seed" in keys else set()  # they exclude one another
        defaults = ["steps=12", "seeds=2", "log_every=4", "logger=none", "report=false"]
        return words + [word for word in defaults if word.partition("=")[0] not in keys]


OVERLAY = "task=overlay task.num_train=256 task.num_test=64 model=multi_head conflict_every=2"
KILLED = "transform=[grokfast_ema,noise] model=theirs.make +model.dropout=0.3 steps=24 control=none"
LINES = {
    "plain": Line("transform=none eval_every=4"),
    "chain": Line("transform=[clip,noise,scale_by_sign] transform.clip.value=0.02 effects_every=3"),
    "attribute": Line("transform=[clip,noise] attribute=true"),
    "nodes": Line("transform=scale_by_sign site=relu_nodes when=warmup when.stop=6"),
    "outputs": Line(
        "transform=clip_norm transform.clip_norm.max_norm=0.0001 site=outputs "
        "site.pattern=blocks.* model=convnet steps=6 log_every=2"
    ),
    "triggers": Line("transform=sign when=any_of"),
    "threshold": Line("transform=clip when=threshold when.above=0.02 when.measure=norm"),
    "group": Line(
        "transform=clip_global_norm transform.clip_global_norm.max_norm=0.1 site.stage=step "
        "accumulate=2 batch_size=16"
    ),
    "stateful": Line(
        "transform=[grokfast_ema,momentum] site.stage=step optimizer=adam schedule=cosine lr=0.01"
    ),
    "random": Line("transform=random_mask site=inputs model.dropout=0.2"),
    "norm_matched": Line("transform=clip control=norm_matched"),
    "update_norm_matched": Line("transform=clip control=update_norm_matched optimizer=adam"),
    "placebo": Line("transform=sign control=placebo lr=0.01"),
    "no control": Line(
        "transform=per_sample_clip transform.per_sample_clip.of.max_norm=0.1 control=none "
        "batch_size=8 seed=3"
    ),
    "pcgrad": Line(f"aggregator=pcgrad {OVERLAY}"),
    "mgda": Line(f"aggregator=mgda transform=clip shared.granularity=module seeds=1 {OVERLAY}"),
    "feature": Line(
        "aggregator=upgrad task=overlay model=multi_head shared.engine=feature "
        "shared.features=relu lr=0.03"
    ),
    "tune": Line("transform=clip tune=optimizer.lr=log(0.01,1,3) tune_seeds=2 seeds=1 steps=6"),
    "until": Line("transform=clip until='accuracy>=0.2' eval_every=4 steps=80 validation=0.3"),
    "sweep": Line("-m transform=none,clip,[sign,clip] lr=0.1,0.2 steps=6"),
    "diverged": Line("-m transform=scale transform.scale.factor=1e38,2 seed=0"),
    "resume": Line(
        f"{KILLED} checkpoint_every=5 checkpoint_seconds=0", times=2, files={"kill_at": "19"}
    ),
    "own code": Line("--config-dir confs transform=[tight,theirs.halve] logger=console"),
    "loggers": Line("transform=clip logger=[wandb,tensorboard] report=auto"),
}


def main(reference: Path) -> int:
    """Run all lines in both trees, compare their folders, then the reports of the reference's."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = _prepare(folder / "lines")
        ends = run_both(reference, jobs, folder / "lines")
        found = [*_ends(jobs, ends)]
        for name in LINES:
            places = [folder / "lines" / side / name for side in SIDES]
            found += _compare_folders(name, *places)
        reported = _report(reference, folder)
    print(f"runs: {len(LINES)} command lines compared, and {len(reported)} reports")
    for lines in reported.values():
        found += lines
    return report("runs", found)


def _prepare(folder: Path) -> list[Job]:
    """Write the files of the lines; return a job for each line and for its composed config."""
    jobs = []
    for name, line in LINES.items():
        files = {"theirs.py": THEIRS, "confs/transform/tight.yaml": TIGHT, **line.files}
        for side in SIDES:
            for path, text in files.items():
                file = folder / side / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
        jobs += [Job(name, line.all_words)] * line.times
        if "-m" not in line.all_words:
            jobs.append(Job(name, [*line.all_words, "--cfg", "job", "--resolve"]))
    return jobs


def _ends(jobs: list[Job], ends: Mapping[str, list[End]]) -> Iterator[str]:
    """Compare exit codes and composed configs."""
    if not any(end.code == -SIGKILL for end in ends[SIDES[0]]):
        raise RuntimeError("the reference: no run was killed, so that none is resumed")
    for job, expected, found in zip(jobs, *(ends[side] for side in SIDES), strict=True):
        where = f"{job.folder}: "
        yield from differences(f"{where}exit code", found.code, expected.code)
        if expected.code not in (0, 1, -SIGKILL):
            raise RuntimeError(f"{job.words}: the reference ends with {expected}")
        if "--cfg" in job.words:
            configs = [named(yaml.safe_load(end.out)) for end in (found, expected)]
            yield from differences(f"{where}composed config", *configs)


def _compare_folders(name: str, reference: Path, tree: Path) -> Iterator[str]:
    """Compare all runs of two folders."""
    expected, found = _runs(reference), _runs(tree)
    if not expected:
        raise RuntimeError(f"{name}: the reference has no finished run")
    pairs = {run: run for run in expected if run in found}
    left = [sorted(runs.keys() - pairs.keys()) for runs in (expected, found)]
    renamed: dict[str, list[list[str]]] = defaultdict(lambda: [[], []])
    for side, runs in enumerate(left):
        for run in runs:
            renamed[run.rpartition("-")[0]][side].append(run)
    for old, new in renamed.values():
        yield from (f"{name}: run {run} only in the reference" for run in old[len(new) :])
        yield from (f"{name}: run {run} only in the working tree" for run in new[len(old) :])
        for one, other in zip(old, new, strict=False):
            yield f"{name}: run {other}, reference {one}"
            pairs[one] = other
    for one, other in pairs.items():
        yield from _compare_runs(f"{name}: {one.rpartition('-')[0]}", found[other], expected[one])
    yield from differences(f"{name}: W&B", _wandb(tree), _wandb(reference), TOLERANCE)
    yield from differences(f"{name}: TensorBoard", _events(tree), _events(reference), TOLERANCE)


def _runs(folder: Path) -> dict[str, Path]:
    """The folders of ended runs by their path, those of a tuning too."""
    places = [path.parent for path in folder.rglob("summary.json")]
    return {str(place.relative_to(folder)): place for place in sorted(places)}


def _config(file: Path) -> object:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def _compare_runs(where: str, found: Path, expected: Path) -> Iterator[str]:
    configs = [_config(path / "config.yaml") for path in (found, expected)]
    yield from differences(f"{where}/config.yaml", *configs)
    for name, tolerance in ROWS.items():
        rows = [_rows(path / name) for path in (found, expected)]
        yield from differences(f"{where}/{name}", *rows, tolerance)
    yield from differences(f"{where}/summary.json", _summary(found), _summary(expected))
    weights = [_weights(path) for path in (found, expected)]
    yield from differences(f"{where}/checkpoint.pt", *weights)


def _compared(key: str) -> bool:
    return not any(fnmatch(key, pattern) for pattern in UNCOMPARED)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:  # Any: what JSON can hold
    return {key: value for key, value in values.items() if _compared(key)}


def _rows(file: Path) -> list[dict[str, Any]]:  # Any: what JSON can hold
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return [_numbers(json.loads(line)) for line in lines]


def _summary(run: Path) -> dict[str, Any]:  # Any: what JSON can hold
    summary = _numbers(json.loads((run / "summary.json").read_text("utf-8")))
    return summary | {key: len(summary[key]) for key in SENTENCES if key in summary}


def _weights(run: Path) -> dict[str, Any]:  # Any: nested lists of numbers
    """The weights in a run's checkpoint; empty without one."""
    if not (run / "checkpoint.pt").is_file():
        return {}
    kept = torch.load(run / "checkpoint.pt", weights_only=True)
    return {name: value.tolist() for name, value in kept["state"]["model"].items()}


def _wandb(folder: Path) -> dict[str, object]:
    """Name, config, rows and outcome of each offline W&B run, by the folder it lies in."""
    runs = {}
    for file in sorted(folder.rglob("*.wandb")):
        command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", file]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records = [json.loads(line) for line in text.splitlines()]
        parts = {
            kind: [one[kind] for one in records if kind in one]
            for kind in ("run", "history", "summary", "metric")
        }
        begun = parts["run"][0]
        logged: dict[str, object] = {
            key: begun.get(key) for key in ("run_group", "job_type", "tags", "display_name")
        }
        logged["config"] = _numbers(begun.get("config", {}).get("update", {}))
        logged["metrics"] = sorted(one.get("name") or one["glob_name"] for one in parts["metric"])
        logged["rows"] = [_media_apart(one["item"]) for one in parts["history"]]
        outcome: dict[str, Any] = {}  # Any: what JSON can hold
        for one in parts["summary"]:
            outcome |= one.get("update", {})
        logged["outcome"] = _media_apart(outcome)
        runs[str(file.relative_to(folder).parents[2])] = logged
    return runs


def _media_apart(values: Mapping[str, Any]) -> dict[str, Any]:  # Any: what JSON can hold
    """The compared values; of a table or picture its type, without its file's name."""
    return {
        key: value["_type"] if isinstance(value, dict) and "_type" in value else value
        for key, value in _numbers(values).items()
    }


def _events(folder: Path) -> dict[str, object]:
    """Names and points in the event files of each run, by the folder they lie in."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        tags = {kind: names for kind, names in events.Tags().items() if isinstance(names, list)}
        scalars = [tag for tag in tags.pop("scalars") if _compared(tag)]
        points = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in scalars
        }
        logged[str(place.relative_to(folder))] = {**tags, "points": points}
    return logged


def _report(reference: Path, folder: Path) -> dict[str, list[str]]:
    """Let both trees report on the reference's studies; return the differences of each."""
    studies = sorted(
        {path.parents[1] for path in (folder / "lines" / SIDES[0]).glob("*/runs/*/*/summary.json")}
    )
    jobs = []
    for number, study in enumerate(studies):
        for side in SIDES:
            shutil.copytree(study, folder / "reports" / side / str(number) / study.name)
        words = [study.name, "--out", "out"]
        jobs.append(Job(str(number), words, module="gradsurg.report"))
    ends = run_both(reference, jobs, folder / "reports")
    found = {}
    for number, study in enumerate(studies):
        name = f"report of {study.parents[1].name}"
        old, new = (folder / "reports" / side / str(number) / "out" for side in SIDES)
        codes = [ends[side][number].code for side in reversed(SIDES)]
        found[name] = [*differences(f"{name}: exit code", *codes)]
        found[name] += differences(name, _tables(new), _tables(old), TOLERANCE)
    return found


def _tables(out: Path) -> dict[str, object]:
    """The numbers that a report exports: its frames by column, and the table of outcomes."""
    tables: dict[str, object] = {}
    for file in sorted(out.glob("*.parquet")):
        frame = pl.read_parquet(file)
        columns = sorted(name for name in frame.columns if _compared(name))
        tables[file.name] = frame.select(columns).to_dict(as_series=False)
    rows = {}
    for line in (out / "outcome.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) > 1 and _compared(cells[1]):
            numbers = [re.findall(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", cell) for cell in cells[2:]]
            rows[" ".join(cells[:2])] = numbers
    return tables | {"outcome.md": rows}
