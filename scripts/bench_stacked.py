"""Benchmark runner=stacked: CPU seconds a run of a sequential study over those of a stacked one.

python scripts/bench.py stacked [--rounds 3] [--only digits]
"""

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any
from unittest.mock import patch

import torch

from gradsurg.effects.tables import aligned
from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.execution import execute
from gradsurg.experiment.run import Run
from gradsurg.stacked.study import execute_stacked

SEQUENTIAL = 8  # runs of the sequential study: they take as long as the others
REPLICAS = (32, 128)
CASES = {
    "digits mlp, README's default": ["transform=clip"],
    "tiny mlp 64-32-10, batch 32": ["transform=clip", "model.hidden=[32]", "batch_size=32"],
    "tiny mlp, effects_every=0": [
        "transform=clip",
        "model.hidden=[32]",
        "batch_size=32",
        "effects_every=0",
    ],
    "toy of karimireddy2019, sign": ["experiment=karimireddy2019_absolute", "transform=sign"],
    "toy, error_feedback": ["experiment=karimireddy2019_absolute", "transform=error_feedback"],
    "toy of yu2020, pcgrad": ["experiment=yu2020", "aggregator=pcgrad", "steps=2000"],
    "toy of yu2020, mgda": ["experiment=yu2020", "aggregator=mgda", "steps=2000"],
    "toy of liu2021, cagrad": ["experiment=liu2021", "aggregator=cagrad", "steps=1000"],
    "one number, batch 1": ["experiment=karimireddy2019_slope", "transform=sign"],
}

COMPILING = "gradsurg.stacked.stack.perf_counter"


def table(rounds: int, only: Sequence[str]) -> str:
    """Return the ratios of whole studies of a treated and a control arm, in one process."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:  # imports, and the kernel of the effects
        execute(_runs(["transform=clip", "steps=20"], 2, folder)[1], Path(folder), [], 1)
    counts = [f"{count}{form}" for form in ("", ", compiled") for count in REPLICAS]
    head = ["sequential / stacked, CPU", *counts, "ms a run", "compiling, s"]
    rows = [head]
    for name, words in CASES.items():
        if any(name.startswith(part) for part in only):
            rows.append([name, *_ratios(words, rounds)])
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    note = f"{load}; 1 thread, logger=none; median of {rounds} rounds; ms of a sequential run"
    return f"{note}\n{aligned(rows)}"


def _ratios(words: Sequence[str], rounds: int) -> list[str]:
    """Return the ratios for each number of replicas, without the seconds of compiling, and the
    milliseconds of a sequential run.
    """
    seconds: dict[object, list[float]] = {}
    compile_s: list[float] = []
    for _ in range(rounds):
        with TemporaryDirectory() as folder:
            alone = _runs(words, SEQUENTIAL, folder)
            began = process_time()
            for run in alone:
                execute(run, Path(folder), [], 1)
            seconds.setdefault(0, []).append((process_time() - began) / SEQUENTIAL)
        forms = ("false",) if any("aggregator=" in word for word in words) else ("false", "true")
        for form, count in product(forms, REPLICAS):
            with TemporaryDirectory() as folder, patch(COMPILING, process_time):
                runs = _runs([*words, f"compile={form}"], count, folder)
                began = process_time()
                notes: list[str] = []
                records = execute_stacked(runs, Path(folder), [], 1, tell=notes.append)
                taken = process_time() - began
                if len(records) < count:
                    raise RuntimeError(f"{words}: {'; '.join(notes)}")
            runner: Any = next(iter(records.values())).summary["runner"]
            compile_s.append(runner.get("compile_s", 0.0))
            seconds.setdefault((form, count), []).append((taken - compile_s[-1]) / count)
    alone = seconds.pop(0)
    ratios = (
        median(one / other for one, other in zip(alone, own, strict=True))
        for own in seconds.values()
    )
    shown = [f"{ratio:.1f}" for ratio in ratios]
    return [
        *(shown + ["-"] * (2 * len(REPLICAS) - len(shown))),
        f"{1000 * median(alone):.0f}",
        f"{max(compile_s):.1f}",
    ]


def _runs(words: Sequence[str], count: int, folder: str) -> list[Run]:
    arms = [*words, f"seeds={count // 2}", "seed=null", "logger=none", f"out={folder}"]
    experiment = build(compose.compose_config(*arms))
    return [run for pair in experiment.pairs for run in pair.runs]
