"""Forks of a test's process that work together in a process group."""

import gc
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """One of `count` processes."""

    rank: int
    count: int

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes."""
        values: list[Value] = [value] * self.count
        distributed.all_gather_object(values, value)
        return values


ALONE = Ranks(0, 1)


def in_ranks(count: int, work: Callable[[Ranks, Path], Value]) -> Value:
    """Call `work(ranks, folder)` in `count` processes; return the result of this one, rank 0.

    Raises AssertionError with the traceback of another one that has raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork waits for ever for the other threads of its parent
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        others = [
            forked(lambda rank=rank: _work(rank, count, folder, work), folder / f"{rank}")
            for rank in range(1, count)
        ]
        held: list[object] = []
        try:
            return _work(0, count, folder, work, held)
        finally:
            for pid in others:
                os.waitpid(pid, 0)
            torch.set_num_threads(threads)
            for failure in folder.glob("*.failure"):
                raise AssertionError(pickle.loads(failure.read_bytes()))


def forked(work: Callable[[], object], name: Path) -> int:
    """Call `work` in a fork that ends with it, and writes its error into `<name>.failure`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child:
        return child
    try:
        gc.freeze()  # a process group of an earlier test would wait for threads that are not here
        work()
        os._exit(0)
    except BaseException:
        name.with_suffix(".failure").write_bytes(pickle.dumps(traceback.format_exc()))
        os._exit(1)


def _work(
    rank: int,
    count: int,
    folder: Path,
    work: Callable[[Ranks, Path], Value],
    held: list[object] | None = None,
) -> Value:
    """Do the work of a rank in the process group, which `held` keeps alive.

    A thread of gloo that still runs a callback of a communication hook would end the program if it
    were the last to let go of the group.
    """
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    if held is not None:
        held.append(distributed.group.WORLD)
    # A rank whose work sends nothing would end while another one still connects, which then fails.
    distributed.barrier()
    (own := folder / f"of{rank}").mkdir()
    try:
        return work(Ranks(rank, count), own)
    finally:
        distributed.destroy_process_group()
