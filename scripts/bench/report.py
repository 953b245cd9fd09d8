"""Measure time and memory of `python -m gradsurg.report` on synthetic studies.

python -m scripts.bench report [--sizes 200x1000 2000x20 10000x20]
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from gradsurg.effects.tables import aligned
from gradsurg.experiment.run_identity import directory_name

REPORT = "gradsurg.report"
SEEDS, ROWS_OF_EFFECTS = 10, 100
SITES = [f"hidden.{layer}.linear.{kind}" for layer in range(3) for kind in ("weight", "bias")]
SIZES = ("200x1000",)
MAX_CPU, MAX_MB, MAX_PAGE_MB = 30, 1000, 3
CONFIG = {
    "gradsurg": "0.1.0",
    "torch": "2.13",
    "batch_size": 64,
    "device": "cpu",
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "schedule": {"name": "constant"},
    "accumulate": 1,
    "precision": "float32",
    "model": {"name": "mlp", "hidden": [64, 64], "activation": "relu", "dropout": 0.0},
    "task": {"name": "digits", "test_fraction": 0.25, "split_seed": 0, "label_noise": 0.0},
    "site": {"name": "parameters", "pattern": "*", "types": "*", "depth": None, "stage": None},
    "when": {"name": "steps", "start": 0, "stop": None, "every": 1},
    "sources": {},
}


def table(sizes: Sequence[str]) -> str:
    """Return the measurements of one study of each size, such as `200x1000`, with their bounds."""
    rows = [["study", "seconds of CPU", "peak memory, MB", "page, MB"]]
    for size in sizes:
        with TemporaryDirectory() as folder:
            study = Path(folder) / "first"
            make(study, *map(int, size.split("x")))
            rows.append([size, *measured(study)])
    return aligned([*rows, ["bound", f"{MAX_CPU}", f"{MAX_MB}", f"{MAX_PAGE_MB}"]])


def measured(study: Path) -> list[str]:
    """Report on a study in a process of its own; return its CPU, memory and page."""
    process = subprocess.Popen([sys.executable, "-m", REPORT, study], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)  # the resources of this child alone
    if status:
        raise RuntimeError(f"the report ended with exit code {os.waitstatus_to_exitcode(status)}")
    page = (study / "report" / "index.html").stat().st_size / 1e6
    cpu = usage.ru_utime + usage.ru_stime
    return [f"{cpu:.1f}", f"{usage.ru_maxrss / 1000:.0f}", f"{page:.2f}"]


def make(study: Path, runs: int, steps: int) -> None:
    """Write the run files of one control and `runs / 10 - 1` strengths of clipping."""
    numbers = random.Random(0)
    for seed in range(SEEDS):
        control = None
        for arm in range(runs // SEEDS):
            label = "clip" if arm else "none"
            config: dict[str, object] = {**CONFIG, "seed": seed, "steps": steps}
            if arm:
                config |= {"transform": {"clip": {"name": "clip", "value": 0.001 * arm}}}
            name = directory_name(f"{label}-seed{seed}", config)
            facts = {
                "study": study.name,
                "arm": "treated" if arm else "control",
                "label": label,
                "seed": seed,
                "steps": steps,
                "control": control,
            }
            control = control or name
            _write(study / name, facts, config, steps, numbers)


def _write(
    folder: Path,
    facts: dict[str, object],
    config: dict[str, object],
    steps: int,
    numbers: random.Random,
) -> None:
    folder.mkdir(parents=True)
    outcome = {
        f"{part}/{name}": numbers.random()
        for part in ("train", "test")
        for name in ("loss", "accuracy")
    }
    times = {"time/step_ms": 1 + numbers.random(), "time/measured_step_ms": 2.0}
    summary = {"state": "finished", **facts, **outcome, **times, "effects_every": 10, "notes": []}
    files = {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "run.json": json.dumps(facts, indent=2),
        "metrics.jsonl": "".join(
            f'{{"step":{step},"train/loss":{2 / step + numbers.random()}}}\n'
            for step in range(1, steps + 1)
        ),
        "effects.jsonl": "".join(_effects(str(facts["label"]), steps, numbers)),
        "summary.json": json.dumps(summary, indent=2),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


def _effects(label: str, steps: int, numbers: random.Random) -> Iterator[str]:
    every = max(10, steps // ROWS_OF_EFFECTS)
    names = ("norm_before", "norm_after", "cosine", "changed", "flipped", "zeroed", "distance")
    counts = f'"seen":{every},"calls":{every},"sampled":1,"nonfinite":0'
    for step in range(every, steps + 1, every):
        for site in SITES:
            values = ",".join(f'"{name}":{numbers.random():.6f}' for name in names)
            start = f'{{"step":{step},"transform":"{label}","site":"{site}"'
            yield f"{start},{counts},{values}}}\n"
