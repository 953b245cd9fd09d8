"""Benchmark the CPU time of starting Python and gradsurg, in processes that take turns.

python -m scripts.bench start [--rounds 8]
"""

import os
import sys
import tempfile
from functools import partial
from statistics import median

from gradsurg.effects.tables import aligned
from scripts.bench.turns import beginning, in_turns, of_pairs

RUN = ["-m", "gradsurg.run"]
ONE_STEP = [*RUN, "transform=none", "seeds=1", "steps=1", "force=true"]
LIBRARIES = "import torch, hydra"
ARMS = {
    "import torch": ["-c", "import torch"],
    LIBRARIES: ["-c", LIBRARIES],
    "import gradsurg": ["-c", "import gradsurg"],
    "gradsurg's Surgery and Clip": ["-c", "import gradsurg as gs; gs.Surgery, gs.Clip"],
    "help": [*RUN, "--help"],
    "dry_run": [*RUN, "transform=clip", "dry_run=true"],
    "steps=0": [*RUN, "transform=clip", "steps=0"],
    "steps=1": [*ONE_STEP, "logger=none"],
    "steps=1, W&B offline": ONE_STEP,
}
"""What each process runs; all ratios are to the second."""


def measure(rounds: int, names: list[str]) -> dict[str, list[float]]:
    """Return the seconds of CPU time of each process, without a first round that fills caches."""
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: partial(_seconds, ARMS[name], folder) for name in names}
        return in_turns(ways, rounds, warm=1)


def table(rounds: int, only: list[str]) -> str:
    """Return one line for each process whose name starts with one of `only`."""
    times = measure(rounds, list(dict.fromkeys([LIBRARIES, *beginning(ARMS, only)])))
    base = times[LIBRARIES]
    rows = [["process", "CPU s, median", "min", f"/ {LIBRARIES}", "of minima"]]
    for name, own in times.items():
        numbers = (median(own), min(own), of_pairs(own, base), min(own) / min(base))
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    return aligned(rows)


def _seconds(arguments: list[str], folder: str) -> float:
    """Return the CPU time of a Python process in `folder`; raise if it fails."""
    variables = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    # With the folder of this package on the path, wherever it was installed.
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = ["/bin/sh", "-c", 'cd "$0" && exec "$@" >/dev/null', folder, sys.executable]
    process = os.spawnve(os.P_NOWAIT, command[0], [*command, *arguments], variables)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"python {' '.join(arguments)} failed")
    return usage.ru_utime + usage.ru_stime
