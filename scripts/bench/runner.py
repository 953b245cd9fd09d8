"""Benchmark the overhead of the command: per step and for finished runs.

python -m scripts.bench runner [--rounds 8]
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

import torch
from torch import Tensor

from gradsurg.effects.tables import aligned
from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.execution import execute
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.planning import Job, outcome_table, plan_runs
from gradsurg.experiment.run import Run
from gradsurg.experiment.run_directory import SUMMARY, RunDirectory
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.sweep import jobs_of_study
from gradsurg.loggers.base import Logger, RunEnd, RunInfo

WARM, STEPS, CLIP = 50, 2000, 0.01
MAX_OVERHEAD, MAX_RESUME_S = 1.10, 2.0
RUNS, JOBS = 1000, 50
SWEEP = ["transform=none,clip,scale_by_sign,norm_rescale,zero", "seed=range(0,10)", "logger=none"]

Times = dict[str, list[tuple[float, float]]]  # (wall, CPU) a round, by what was timed


def table(rounds: int, only: Sequence[str]) -> str:
    """Return tables of `overhead` and `resuming`, with their bounds."""
    parts = [f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"]
    with TemporaryDirectory() as folder:
        for part in (overhead, resuming):
            if any(part.__name__.startswith(name) for name in only):
                parts.append(part(rounds, Path(folder)))
    return "\n\n".join(parts)


@dataclass
class Stopwatch(Logger):
    """Times the intervals between logged steps."""

    between: tuple[int, int]
    stamps: list[tuple[float, float]] = field(default_factory=list)

    def start(self, run: RunInfo) -> None:
        self.stamps = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step in self.between:
            self.stamps.append(_now())

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        pass

    def abandon(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []


def overhead(rounds: int, place: Path) -> str:
    """Return ratios of the runner's step times to those of a plain loop, measured alternately."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    common = [f"steps={WARM + STEPS}", "seeds=1", "control=none", "effects_every=10"]
    common += [f"out={place}"]
    watch = Stopwatch((WARM, WARM + STEPS))
    arms: dict[str, Callable[[], None]] = {}
    whole: dict[str, list[float]] = {}
    times: Times = {}
    for name, clip in (("none", False), ("clip", True)):
        words = [f"transform={name}", *common]
        words += [f"transform.clip.value={CLIP}"] if clip else []
        full, bare = _experiment(words), _experiment([*words, "logger=none"])
        run = full.pairs[0].runs[0]
        arms[f"by hand, {name}"] = lambda run=run, clip=clip, name=name: _note(
            times, f"by hand, {name}", _by_hand(run, clip)
        )
        for label, made in (("logger=none", bare), ("console, W&B offline", full)):
            key = f"{label}, {name}"
            arms[key] = lambda key=key, made=made: _runner(key, made, watch, place, times, whole)
    for turn in range(rounds):
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            arms[name]()
    rows = [["the runner's steps / by hand", "wall: median (minimum)", "CPU", "bound", "rest, s"]]
    for key, seconds in whole.items():
        base = times[f"by hand, {key.rpartition(', ')[2]}"]
        rows.append([key, *_ratios(times[key], base), f"{MAX_OVERHEAD:g}", f"{min(seconds):.2f}"])
    step = 1000 * min(wall for wall, _ in times["by hand, none"]) / STEPS
    note = (
        f"digits, mlp, batches of 64: steps {WARM} to {WARM + STEPS}, {step:.3f} ms each by hand; "
        f"{rounds} rounds.\nCounted: batches, steps, effects every 10, a log every 50 (JSONL, "
        "loggers), checkpoints, at most one a second.\nBy hand: the loss every 50. rest: data, "
        "model, W&B's init and finish, the summary, once a run"
    )
    return f"{note}\n{aligned(rows)}"


def _by_hand(run: Run, clip: bool) -> tuple[float, float]:
    torch.manual_seed(run.seed)
    data = run.task.load()
    model = run.make_model(data)
    optimizer = run.make_optimizer(model)
    if clip:
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-CLIP, CLIP))
    size = run.schedule.batch_size
    stream = Batches(data.train_inputs, data.train_targets, size, run.seed).start(0)
    began, losses = _now(), []
    for step in range(WARM + STEPS):
        if step == WARM:
            began = _now()
        inputs, targets = next(stream)
        optimizer.zero_grad()
        loss: Tensor = run.task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % run.schedule.log_every == 0:
            losses.append(loss.item())
    return _since(began)


def _runner(
    key: str,
    experiment: Experiment,
    watch: Stopwatch,
    place: Path,
    times: Times,
    whole: dict[str, list[float]],
) -> None:
    """Run the same steps by the runner, without its earlier run; return also the remaining time."""
    run = replace(experiment.pairs[0].runs[0], study=f"round{len(times.get(key, []))}-{key[0]}")
    began = perf_counter()
    execute(run, place, [*experiment.loggers, watch], 1)
    seconds = perf_counter() - began
    first, last = watch.stamps
    _note(times, key, (last[0] - first[0], last[1] - first[1]))
    whole.setdefault(key, []).append(seconds - times[key][-1][0])


def resuming(_: int, place: Path) -> str:
    """Measure the detection of finished runs and the checks of a sweep's jobs, once each."""
    out = place / "resume"
    experiment = _experiment(["transform=none", f"seeds={RUNS}", f"out={out}", "logger=none"])
    runs = [run for pair in experiment.pairs for run in pair.runs]
    rows = [[f"{RUNS} runs", "seconds", "bound"]]
    jobs: list[Job] = []

    def timed(what: str, call: Callable[[], object]) -> float:
        began = perf_counter()
        call()
        rows.append([what, f"{perf_counter() - began:.2f}", ""])
        return perf_counter() - began

    seconds = timed("named by their configs", lambda: jobs.extend(_jobs(runs, out)))
    timed("written down, none there", lambda: plan_runs(jobs, force=False))
    for run in runs:
        (run.directory(out) / SUMMARY).write_text('{"state": "finished"}', encoding="utf-8")
    assert all(RunDirectory(run.directory(out)).finished for run in runs)
    seconds += timed("looked up before the first job", lambda: plan_runs(jobs, force=False))
    seconds += timed("skipped by their jobs", lambda: [execute(run, out, []) for run in runs])
    seconds += timed("the table at the end", lambda: outcome_table(jobs))
    rows.append(["all but the writing", f"{seconds:.2f}", f"{MAX_RESUME_S:g}"])
    stamps = [perf_counter()]
    for _words, config in jobs_of_study(["hydra.mode=MULTIRUN", *SWEEP, f"out={out}"]):
        build(config)
        stamps.append(perf_counter())
    took = [1000 * (after - before) for before, after in pairwise(stamps[1:])]
    note = f"a sweep's jobs are built in {median(took):.0f} ms each (median of {JOBS})"
    return f"{aligned(rows)}\n{note}"


def _jobs(runs: Sequence[Run], out: Path) -> list[Job]:
    return [Job([f"seed={run.seed}"], [run], out) for run in runs]


def _experiment(words: list[str]) -> Experiment:
    return build(compose.compose_config(*words))


def _ratios(over: Sequence[tuple[float, float]], under: Sequence[tuple[float, float]]) -> list[str]:
    """Return the ratio of medians and, in brackets, of minima, for wall and CPU times."""
    cells = []
    for part in (0, 1):
        a, b = [pair[part] for pair in over], [pair[part] for pair in under]
        cells.append(f"{median(a) / median(b):.3f} ({min(a) / min(b):.3f})")
    return cells


def _note(times: Times, name: str, pair: tuple[float, float]) -> None:
    times.setdefault(name, []).append(pair)


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    return now[0] - began[0], now[1] - began[1]
