"""The processes that train one run together: forks of this one, each with a part of every batch.

Rank 0 is this process. It alone logs, evaluates and writes; the others end with the training.
"""

import contextlib
import copy
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.messages import tell
from gradsurg.torch_internals import random_state

Value = TypeVar("Value")

NETWORK = "GLOO_SOCKET_IFNAME"  # the processes of one machine need no other than `lo`
PATIENCE = 5.0  # seconds for the other processes to end after an error
WATCH = 0.2  # seconds between two looks whether rank 0 is still there
LOST = ("gloo", "connection", "broken pipe", "socket", "store")
"""Parts of the messages of an error that another process has caused by ending."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, as the one with number `rank` sees them.

    All `count` processes call each method, in the same order. One process talks to nobody.
    """

    rank: int = 0
    count: int = 1

    def wrapped(self, model: nn.Module, first_loss: Callable[[nn.Module], Tensor]) -> nn.Module:
        """Return the model for training, whose gradients are averaged over the processes.

        `first_loss` returns the loss of a model for a batch: it tells whether there are parameters
        without a gradient, which DistributedDataParallel has to search for in each step then.
        """
        if self.count == 1:
            return model
        trial = copy.deepcopy(model)
        with random_state.preserved():
            first_loss(trial).backward()
        unused = any(param.requires_grad and param.grad is None for param in trial.parameters())
        is_searched = bool(self.mean(torch.tensor(float(unused))) > 0)
        return DistributedDataParallel(model, find_unused_parameters=is_searched)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the processes."""
        if self.count > 1:
            distributed.all_reduce(values)
            values /= self.count
        return values

    def from_first(self, value: Value) -> Value:
        """Return the value that rank 0 has."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def gathered(self, value: Value) -> list[Value]:
        """Return the values of all processes to rank 0, an empty list to the others."""
        if self.count == 1:
            return [value]
        values: list[Value] | None = [value] * self.count if self.rank == 0 else None
        distributed.gather_object(value, values)
        return values or []


ALONE = Ranks()


def check_ranks(model: nn.Module) -> None:
    """Check that the weights and buffers of a model are bit-identical in all processes.

    Every process of the default process group calls it, at the same step. It computes a checksum of
    the bit patterns of each tensor and makes one all-reduce; a difference in one bit is noticed.
    Raises RuntimeError with the names of tensors that differ. Without a process group it returns.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not named or distributed.get_world_size() == 1:
        return
    sums = torch.stack([_checksum(tensor.detach()) for tensor in named.values()])
    both = torch.cat([sums, -sums])
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    largest, smallest = both.chunk(2)
    differing = [
        name
        for name, differs in zip(named, (largest != -smallest).tolist(), strict=True)
        if differs
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise RuntimeError(
            f"the processes have different weights: {', '.join(differing[:3])}{more}. Something "
            "that differs between them has changed an averaged gradient or a weight"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns as integers, each times a number that depends on its place."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.contiguous().view(kinds[real.element_size()]).flatten()
    weights = torch.arange(bits.numel(), device=bits.device) % 1021 + 1
    return (bits.to(torch.int64) * weights).sum()


def refuse_batch_norm(model: nn.Module) -> str:
    """Return why a model cannot be trained by several processes; empty if it can."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            return (
                f"'{name}' ({type(module).__name__}) normalizes each process's part of the batch "
                "by itself, so that the result depends on the number of processes"
            )
    return ""


def in_ranks(count: int, work: Callable[[Ranks, Path], Value]) -> Value:
    """Call `work(ranks, folder)` in `count` processes; return the result of rank 0, this one.

    `folder` is a temporary one of each process. The others are forks that end with `work`. Each
    has one thread, because a fork waits for ever for the other threads of its parent. Raises
    RuntimeError naming the rank if one of them was killed or has raised, else what rank 0 raises.
    If rank 0 is killed, the others end, and rank 1 prints a line.
    """
    if count == 1:
        return work(ALONE, Path())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gradsurg-") as root:
        folders = [Path(root) / f"{rank}" for rank in range(count)]
        for folder in folders:
            folder.mkdir()
        store = f"file://{root}/store"
        others = {
            rank: _forked(Ranks(rank, count), store, folders[rank], work)
            for rank in range(1, count)
        }
        try:
            _join(Ranks(0, count), store)
            result = work(Ranks(0, count), folders[0])
            _wait(others)
            return result
        except Exception as error:
            cause = _cause(others, folders, error)
            raise (cause or error) from (error if cause else None)
        finally:
            torch.set_num_threads(threads)
            leave_group()
            for pid in others.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _join(ranks: Ranks, store: str) -> None:
    """Join the process group."""
    if sys.platform == "linux":
        os.environ.setdefault(NETWORK, "lo")
    distributed.init_process_group(
        "gloo", init_method=store, rank=ranks.rank, world_size=ranks.count
    )


def leave_group() -> None:
    """End the communication between the processes."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _forked(ranks: Ranks, store: str, folder: Path, work: Callable[[Ranks, Path], object]) -> int:
    """Fork a process that does the work of a rank and ends; return its number."""
    first = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child:
        return child
    try:
        # A process group of an earlier run waits, when it is collected, for threads not forked.
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends all
        watch = threading.Thread(target=_end_with, args=(first, ranks, folder.parent), daemon=True)
        watch.start()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 gives the same
            _join(ranks, store)
            work(ranks, folder)
        os._exit(0)
    except BaseException as error:  # rank 0 raises it
        with contextlib.suppress(OSError):
            failure = (f"{type(error).__name__}: {error}", traceback.format_exc())
            (folder / "failure").write_bytes(pickle.dumps(failure))
        if _is_lost(error):
            sleep(3 * WATCH)  # if it is rank 0 that has ended, `_end_with` says so
        # Before the traceback is released: that of DistributedDataParallel can wait for ever.
        os._exit(1)


def _end_with(first: int, ranks: Ranks, root: Path) -> None:
    """End this process when rank 0 has; rank 1 prints a line and removes the temporary folder."""
    while os.getppid() == first:
        sleep(WATCH)
    if ranks.rank == 1:
        tell(f"rank 0 of {ranks.count} was killed, and the others have ended with it")
        shutil.rmtree(root, ignore_errors=True)
    os._exit(1)


def _cause(others: dict[int, int], folders: list[Path], error: Exception) -> RuntimeError | None:
    """Return the error of the rank that failed first; None if rank 0 did.

    The processes that have ended are removed from `others`.
    """
    if not _is_lost(error):
        return None
    deadline = monotonic() + PATIENCE
    while others and monotonic() < deadline:
        for rank in list(others):
            pid, status = os.waitpid(others[rank], os.WNOHANG)
            if not pid:
                continue
            del others[rank]
            if os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                return RuntimeError(f"rank {rank} of {len(folders)} was killed ({name})")
            failure = folders[rank] / "failure"
            if failure.is_file():
                line, text = pickle.loads(failure.read_bytes())
                if not _is_lost(line):
                    result = RuntimeError(f"rank {rank} of {len(folders)}: {line}")
                    result.add_note(text)
                    return result
        sleep(0.01)
    return None


def _is_lost(error: object) -> bool:
    return any(part in f"{error}".lower() for part in LOST)


def _wait(others: dict[int, int]) -> None:
    """Wait until the processes have ended, for `PATIENCE` seconds; remove those from `others`."""
    deadline = monotonic() + PATIENCE
    while others and monotonic() < deadline:
        for rank in list(others):
            if os.waitpid(others[rank], os.WNOHANG)[0]:
                del others[rank]
        sleep(0.002)
