"""Benchmark aggregators against those of TorchJD 0.18 (the `bench` extra).

python -m scripts.bench multitask [--rounds 10] [--only UPGrad] [--sizes 8x1000000] [--threads 1]

Both run alternately in one process, in reversed order every other round. Each round has a new
random float32 matrix for both, as a training step has, so that no result can be reused. Small
matrices get more rounds. The times are CPU times of the process: the minimum measures the work, the
median also the load of the machine. `apart` is the ratio of the minima of two halves of TorchJD's
rounds, an estimate of the noise. A ratio of minima that exceeds its bound by more than the noise is
marked by `> bound`. `reads` is the ratio of our least time and that of summing all entries of the
matrix twice. Methods of TorchJD that need a package that is not
installed are left out.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter, process_time
from typing import Any
from warnings import filterwarnings

import torch
from torch import Tensor

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.plugins.registry import names

# What ECOS and CVXPY say of every problem that Nash-MTL poses to them.
filterwarnings("ignore", module="torchjd|cvxpy")

SIZES = (
    *("2x1000", "2x10000", "2x1000000"),
    *("8x1000", "8x10000", "8x1000000", "8x10000000", "32x1000000"),
)
# The largest ratio of the least times: at (method, size), then by the size, then everywhere.
BOUNDS = {
    ("NashMTL", "2x1000000"): 0.2,
    ("CAGrad", "2x1000000"): 0.2,
    ("ConFIG", "8x10000000"): 0.1,
    ("GradDrop", "8x10000000"): 0.1,
}
LARGE = "8x10000000"
GRAMIAN = 0.8
OTHERS = ("Mean", "GradDrop")
SMALL = 1.1  # the same for matrices of at most SMALL_ENTRIES, of which the calls are the cost
SMALL_ENTRIES = 100_000
MOST_ROUNDS, ENTRIES = 200, 20_000_000  # of one method at one size, for small matrices
LONGEST = 20.0  # seconds for one method at one size


def fields() -> dict[str, dict[str, Any]]:  # Any: fields have many types
    """Return the methods, with our fields that are equivalent to TorchJD's."""
    chosen: dict[str, dict[str, Any]] = {
        "Mean": {},
        "PCGrad": {},
        "UPGrad": {},
        "DualProj": {},
        "MGDA": {},
        "CAGrad": {"c": 0.5},
        "IMTLG": {},
        "NashMTL": {},
        "AlignedMTL": {},
        "ConFIG": {},
        "Krum": {},
    }
    return chosen | ({"GradDrop": {}} if "grad_drop" in names("aggregators") else {})


def lacking() -> str:
    """Return the missing package, or an empty string."""
    if find_spec("torchjd"):
        return ""
    return "multitask: needs TorchJD 0.18, which is not installed: pip install -e '.[bench]'"


def theirs(name: str, count: int) -> Callable[[Tensor], Tensor]:
    """Return the method of TorchJD. Raises ImportError if it needs a package that is missing."""
    made: type = getattr(import_module("torchjd.aggregation"), name)
    match name:
        case "CAGrad":
            return made(c=0.5)
        case "NashMTL":
            return made(n_tasks=count)
        case "Krum":
            return made(n_byzantine=0)
        case _:
            return made()


def table(rounds: int, only: list[str], sizes: list[str], threads: list[int]) -> str:
    """Return one table for each number of threads."""
    chosen = [name for name in fields() if any(part in name for part in only)]
    tables = []
    for count in threads:
        torch.set_num_threads(count)
        tables.append(f"threads: {count}\n{times(chosen, sizes, rounds)}")
    return "\n\n".join(tables)


def times(chosen: list[str], sizes: list[str], rounds: int) -> str:
    """Return one line for each method and size."""
    head = ["method", "T x P", "ours, ms", "(least)", "TorchJD, ms", "(least)"]
    head += ["ratio", "(least)", "apart", "reads"]
    lines = []
    for size in sizes:
        count, width = map(int, size.split("x"))
        turns = max(rounds, min(MOST_ROUNDS, ENTRIES // (count * width)))
        for name in chosen:
            own = getattr(gs, name)(**fields()[name])
            if count < own.least_tasks:
                continue
            try:
                arms = {"ours": own, "theirs": theirs(name, count)}
            except ImportError:
                continue
            taken = measured({**arms, "reads": read_twice}, count, width, turns)
            reads = min(taken["ours"]) / min(taken.pop("reads"))
            row = [name, size]
            for seconds in taken.values():
                row += [f"{1e3 * how(seconds):.3f}" for how in (median, min)]
                row[-1] = f"({row[-1]})"
            ratio, least = (how(taken["ours"]) / how(taken["theirs"]) for how in (median, min))
            bound, apart = bound_of(name, size), apart_of(taken["theirs"])
            late = "" if least <= bound * apart else f" > {bound:g}"
            lines.append([*row, f"{ratio:.3f}", f"({least:.3f}){late}", f"{apart:.3f}"])
            lines[-1].append(f"{reads:.2f}")
    return aligned([head, *lines], left=2)


def read_twice(rows: Tensor) -> Tensor:
    return rows.sum() + rows.sum()


def bound_of(name: str, size: str) -> float:
    count, width = map(int, size.split("x"))
    everywhere = SMALL if count * width <= SMALL_ENTRIES else 1.0
    if size == LARGE and name not in OTHERS:
        everywhere = GRAMIAN
    return BOUNDS.get((name, size), everywhere)


def apart_of(seconds: list[float]) -> float:
    """Return the minima of two halves, in pairs of rounds of both orders."""
    halves = [[own for i, own in enumerate(seconds) if i // 2 % 2 == half] for half in (0, 1)]
    least = [min(half) for half in halves if half]
    return max(least) / min(least)


def measured(
    arms: dict[str, Callable[[Tensor], Tensor]], count: int, width: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each call but the first, all of a round on the same new matrix."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    generator = torch.Generator().manual_seed(0)
    started = perf_counter()
    for turn in range(rounds + 1):
        rows = torch.randn(count, width, generator=generator)
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            began = process_time()
            arms[name](rows)
            taken[name].append(process_time() - began)
        if turn > 2 and perf_counter() - started > LONGEST:
            break
    return {name: own[1:] for name, own in taken.items()}
