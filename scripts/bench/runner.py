"""Benchmark the overhead of the command: its steps beside a plain loop.

python -m scripts.bench runner [--rounds 8] [--only none clip]
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import torch
from torch import Tensor

from gradsurg.effects.tables import aligned
from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.execution import execute
from gradsurg.experiment.loop import Batches
from gradsurg.experiment.run import Run
from gradsurg.experiment.runs import Experiment
from gradsurg.loggers.base import Logger, RunEnd, RunInfo
from scripts.bench.turns import beginning, in_turns, ratio

WARM, STEPS, CLIP = 50, 2000, 0.01
MAX_OVERHEAD = 1.10
NOTE = (
    "digits, mlp, batches of 64: steps {} to {}, {:.3f} ms each by hand; {} rounds.\nCounted: "
    "batches, steps, effects every 10, a log every 50 (JSONL, loggers), checkpoints, at most one a "
    "second.\nBy hand: the loss every 50. rest: data, model, W&B's init and finish, the summary"
)


@dataclass
class Stopwatch(Logger):
    """Notes the CPU time at the first and the last counted step."""

    stamps: list[float] = field(default_factory=list)

    def start(self, run: RunInfo) -> None:
        self.stamps = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step in (WARM, WARM + STEPS):
            self.stamps.append(process_time())

    def finish(self, state: RunEnd, summary: Mapping[str, float]) -> None:
        pass

    def abandon(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []


def table(rounds: int, only: Sequence[str]) -> str:
    """Return ratios of the command's step times to a plain loop's, measured alternately."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    rows = [["the command's steps / by hand", "median (minimum)", "bound", "rest, s"]]
    by_hand = []
    for name in beginning(("none", "clip"), only):
        with TemporaryDirectory() as folder:
            words = [f"transform={name}", f"steps={WARM + STEPS}", "seeds=1", "control=none"]
            words += ["effects_every=10", f"out={folder}"]
            words += [f"transform.clip.value={CLIP}"] if name == "clip" else []
            full, bare = (
                build(compose.compose_config(*words, *more)) for more in ([], ["logger=none"])
            )
            ways = {
                "by hand": partial(_by_hand, full.pairs[0].runs[0], name == "clip"),
                "logger=none": partial(_command, bare, Path(folder), count()),
                "console, W&B offline": partial(_command, full, Path(folder), count()),
            }
            times = in_turns(ways, rounds, warm=0)
        by_hand += [steps for steps, _ in times["by hand"]]
        for label, pairs in times.items():
            steps, rest = zip(*pairs, strict=True)
            base = [own for own, _ in times["by hand"]]
            cells = [ratio(steps, base), f"{MAX_OVERHEAD:g}", f"{min(rest):.2f}"]
            rows += [[f"{label}, {name}", *cells]] if label != "by hand" else []
    note = NOTE.format(WARM, WARM + STEPS, 1000 * median(by_hand) / STEPS, rounds)
    return f"{note}\n{aligned(rows)}"


def _by_hand(run: Run, clip: bool) -> tuple[float, float]:
    """Return the CPU seconds of the counted steps, and of the rest."""
    entered = began = process_time()
    torch.manual_seed(run.seed)
    data = run.task.load()
    model = run.make_model(data)
    optimizer = run.make_optimizer(model)
    for param in model.parameters() if clip else ():
        param.register_hook(lambda grad: grad.clamp(-CLIP, CLIP))
    size = run.schedule.batch_size
    stream = Batches(data.train_inputs, data.train_targets, size, run.seed).start(0)
    losses = []
    for step in range(WARM + STEPS):
        if step == WARM:
            began = process_time()
        inputs, targets = next(stream)
        optimizer.zero_grad()
        loss: Tensor = run.task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % run.schedule.log_every == 0:
            losses.append(loss.item())
    return process_time() - began, began - entered


def _command(experiment: Experiment, place: Path, numbers: "count[int]") -> tuple[float, float]:
    """Return the CPU seconds of the counted steps of a run of its own, and of the rest."""
    watch, began = Stopwatch(), process_time()
    study = f"round{next(numbers)}-{len(experiment.loggers)}"
    execute(
        replace(experiment.pairs[0].runs[0], study=study), place, [*experiment.loggers, watch], 1
    )
    first, last = watch.stamps
    return last - first, process_time() - began - (last - first)
