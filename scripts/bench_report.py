"""Benchmark time and memory of `python -m gradsurg.report` on 200 synthetic runs of 1000 steps."""

import os
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from gradsurg.effects.tables import aligned
from gradsurg.training.run_directory import RunDirectory
from gradsurg.training.run_identity import directory_name

ARMS, SEEDS, STEPS, EFFECTS_EVERY = 20, 10, 1000, 10
SITES = [f"hidden.{layer}.linear.{kind}" for layer in range(3) for kind in ("weight", "bias")]
MAX_SECONDS, MAX_MB, MAX_PAGE_MB = 10, 1000, 3


def table() -> str:
    """Return three measurements with their bounds."""
    with TemporaryDirectory() as folder:
        study = Path(folder) / "first"
        make(study)
        began = perf_counter()
        command = [sys.executable, "-m", "gradsurg.report", str(study)]
        # waited for by hand: only so are the child's own memory and exit code told together
        process = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        )
        _, status, usage = os.wait4(process, 0)
        seconds = perf_counter() - began
        if status:
            raise RuntimeError(
                f"the report ended with exit code {os.waitstatus_to_exitcode(status)}"
            )
        page = (study / "report" / "index.html").stat().st_size / 1e6
    memory = usage.ru_maxrss / 1000
    return aligned(
        [
            ["200 runs of 1000 steps", "found", "bound"],
            ["seconds", f"{seconds:.1f}", f"{MAX_SECONDS}"],
            ["seconds of CPU", f"{usage.ru_utime + usage.ru_stime:.1f}", ""],
            ["peak memory, MB", f"{memory:.0f}", f"{MAX_MB}"],
            ["page, MB", f"{page:.2f}", f"{MAX_PAGE_MB}"],
        ]
    )


def make(study: Path) -> None:
    """Write the run files of one control and nineteen strengths of clipping."""
    numbers = random.Random(0)
    for seed in range(SEEDS):
        names = []
        for arm in range(ARMS):
            config: dict[str, object] = {"seed": seed, "steps": STEPS, "model": {"name": "mlp"}}
            if arm:
                config["transform"] = {"clip": {"name": "clip", "value": 0.001 * arm}}
            label = "clip" if arm else "none"
            names.append(directory_name(f"{label}-seed{seed}", config))
            facts: dict[str, object] = {
                "study": "first",
                "arm": "treated" if arm else "control",
                "label": label,
            }
            facts |= {"seed": seed, "steps": STEPS, "control": names[0] if arm else None}
            _write(RunDirectory(study / names[-1]), facts, config, numbers)


def _write(
    place: RunDirectory, facts: dict[str, object], config: dict[str, object], n: random.Random
) -> None:
    place.plan(facts, config)
    lines = [{"step": step, "train/loss": 2 / step + n.random()} for step in range(1, STEPS + 1)]
    for line in lines:
        place.append_metrics(line)
    names = ("norm_before", "norm_after", "cosine", "changed", "flipped", "zeroed", "distance")
    counts = {"seen": EFFECTS_EVERY, "calls": EFFECTS_EVERY, "sampled": 1, "nonfinite": 0}
    place.append_effects(
        {"step": step, "transform": facts["label"], "site": site, **counts}
        | {name: n.random() for name in names}
        for step in range(EFFECTS_EVERY, STEPS + 1, EFFECTS_EVERY)
        for site in SITES
    )
    outcome = {
        f"{part}/{name}": n.random() for part in ("train", "test") for name in ("loss", "accuracy")
    }
    place.write_summary(
        {"state": "finished", **facts, **outcome}
        | {"time/step_ms": 1 + n.random(), "time/measured_step_ms": 2.0, "effects_every": 10}
        | {"notes": []}
    )


if __name__ == "__main__":
    print(table())
