"""Train each run in the processes that torchrun has started, each with a part of every batch.

Rank 0 runs the command: it alone composes, decides what to train, logs and writes. The others wait
for the next run and train it with rank 0 (`run_in_all`). An order says which run to train; orders
and errors go through a gloo process group that lasts as long as the command. The default process
group of `torch.distributed` is made for each run (`Team.together`): an error in one process ends
the run in all, and the next run begins with a new group.
"""

import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from datetime import timedelta
from time import sleep
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.messages import full_message, shortened, tell
from gradsurg.torch_internals import lookup

Value = TypeVar("Value")

FOREVER = timedelta(days=30)  # one process may evaluate or draw a report while the others wait
GRACE = 2.0  # seconds in which rank 0 may print that the command was interrupted
LOST = "a process was lost; the same command resumes from the last checkpoint"

_team: "Team | None" = None


class LostProcess(KeyboardInterrupt):
    """Another process has ended. Handled as an interruption of the command: the run can resume."""


class Team:
    """All processes of the command, as seen from this one.

    Every process calls `broadcast` and `together` in the same order.
    """

    def __init__(self) -> None:
        self.store, self.rank, self.count = next(rendezvous("env://"))
        store = PrefixStore("orders", self.store)
        # Any: its methods are not typed.
        self._orders: Any = ProcessGroupGloo(store, self.rank, self.count, FOREVER)
        self._runs = 0
        self.is_training = False

    def broadcast(self, value: Any, source: int = 0) -> Any:  # Any: what pickle can hold
        """Return the value of the process `source`. Raises LostProcess if a process has ended."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        try:
            self._orders.broadcast(size, source).wait()
            if self.rank != source:
                content = torch.empty(int(size), dtype=torch.uint8)
            self._orders.broadcast(content, source).wait()
        except RuntimeError as error:
            raise LostProcess from error
        return pickle.loads(content.numpy().tobytes())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make the default process group of torch.distributed for a block.

        An error in one process ends the block in all. A process with an error of its own raises it;
        the others raise RuntimeError with the rank and the error of the first such process.
        """
        self._runs, self.is_training = self._runs + 1, True
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"run{self._runs}", self.store),
            rank=self.rank,
            world_size=self.count,
        )
        error = None
        try:
            yield
        except BaseException as raised:  # of a user's code: any
            error = raised
            _clear(raised)
            if not isinstance(raised, Exception):  # the command ends
                raise
        finally:
            distributed.destroy_process_group()
        own = error if error and not _is_consequence(error) else None
        failure = (full_message(own), "".join(traceback.format_exception(own))) if own else ("", "")
        failures = [self.broadcast(failure, source) for source in range(self.count)]
        self.is_training = False
        if own:
            raise own
        for number, (line, trace) in enumerate(failures):
            if line:
                cause = RuntimeError(trace)
                raise RuntimeError(f"rank {number} of {self.count}: {line}") from cause
        if error:
            raise error

    def end(self) -> None:
        """Tell the other processes that the command has ended, and close the connections."""
        if not self.is_training:  # else their communication fails
            with suppress(LostProcess):
                self.broadcast(None)
        self._orders.abort()
        del self._orders, self.store  # their threads abort an interpreter that ends before them


def _clear(error: BaseException | None) -> None:
    """Release the objects in the frames of an error.

    They include the wrapped model, which keeps connections open: until these are closed, the other
    processes wait for this one.
    """
    # A destructor would swallow the exception that the handler of SIGTERM raises.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_consequence(error: BaseException) -> bool:
    """Whether the error is a failed communication: another process has raised or ended."""
    return isinstance(error, distributed.DistError) or "gloo/" in str(error)


def run_in_all(command: Callable[[], None], follow: Callable[[Team], None]) -> None:
    """Run a command in the processes of torchrun: rank 0 calls `command`, the others `follow`.

    The others print nothing but an error of their own, and exit with code 0, or 1 after an error or
    an interruption. If rank 0 was killed, one of them prints `LOST`. SIGTERM acts as Ctrl-C does.
    """
    global _team
    if torch.cuda.is_available():
        # so that device=cuda is the GPU of this process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        team = _team = Team()
    except ValueError as error:  # an environment variable of torchrun is missing
        tell(f"torchrun: {error}")
        sys.exit(2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if team.rank:
        _follow(team, follow)
    try:
        command()
    finally:
        with suppress(RuntimeError):  # the process with the store has ended
            team.store.add("told", 1)
        team.end()
        _team = None


def _follow(team: Team, follow: Callable[[Team], None]) -> NoReturn:
    code = 1
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            follow(team)
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends to all
        sleep(GRACE)
        try:
            is_told = team.store.add("told", 1) > 1
        except RuntimeError:  # the machine that had the store has gone
            is_told = os.environ.get("LOCAL_RANK") != "0"
        if not is_told:
            tell(LOST)
    except BaseException as error:
        tell(f"rank {team.rank} of {team.count}: {full_message(error)}")
    finally:
        sys.stderr.flush()
        os._exit(code)  # gloo's threads abort some interpreters that end


def tell_others(value: object) -> None:
    """Send an order to the other processes of the command, if there are any."""
    if _team:
        _team.broadcast(value)


def launched() -> int:
    """Return the number of processes of this command, also before a run is trained."""
    return _team.count if _team else 1


def together() -> AbstractContextManager[None]:
    """Return `Team.together` of this command; in a single process a context without effect."""
    return _team.together() if _team else nullcontext()


def rank() -> int:
    """Return the rank of this process while a run is trained, otherwise 0."""
    return distributed.get_rank() if _is_joined() else 0


def count() -> int:
    """Return the number of processes while a run is trained, otherwise 1."""
    return distributed.get_world_size() if _is_joined() else 1


def _is_joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def mean(values: Tensor) -> Tensor:
    """Return the mean over the processes that train a run; `values` is overwritten."""
    if count() > 1:
        distributed.all_reduce(values)
        values /= count()
    return values


def from_first(value: Value) -> Value:
    """Return the value that rank 0 has."""
    values = [value]
    if count() > 1:
        distributed.broadcast_object_list(values)
    return values[0]


def gathered(value: Value) -> list[Value]:
    """Return the values of all processes to rank 0, an empty list to the others."""
    if count() == 1:
        return [value]
    values: list[Value] | None = [value] * count() if rank() == 0 else None
    distributed.gather_object(value, values)
    return values or []


def wrapped(model: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel; the model itself in a single process.

    `find_unused_parameters` also keeps the order of sums fixed, so that a resumed run is
    bit-identical with any number of processes.
    """
    if count() == 1:
        return model
    return DistributedDataParallel(model, find_unused_parameters=True)


def check_ranks(model: nn.Module) -> None:
    """Check that the weights and buffers of a model are bit-identical in all processes.

    Every process of the default process group calls it, at the same step. It computes a checksum of
    the bits of each tensor and makes one all-reduce; a difference in a single bit is found. Raises
    RuntimeError with the names of the tensors that differ. Without a process group it does nothing.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if not named or count() == 1:
        return
    sums = torch.stack([_checksum(tensor.detach()) for tensor in named.values()])
    both = torch.cat([sums, -sums])
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    largest, smallest = both.chunk(2)
    differs = (largest != -smallest).tolist()
    differing = [name for name, is_other in zip(named, differs, strict=True) if is_other]
    if differing:
        raise RuntimeError(
            f"the processes have different weights: {shortened(differing)}. Something that differs "
            "between them has changed an averaged gradient or a weight"
        )


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns as integers, each times a weight that depends on its position."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = real.contiguous().view(kinds[real.element_size()]).flatten()
    weights = torch.arange(bits.numel(), device=bits.device) % 1021 + 1
    return (bits.to(torch.int64) * weights).sum()


def refuse_batch_norm(model: nn.Module) -> str:
    """Return why a model with batch normalization cannot be trained in several processes, or ''."""
    batch_norm = lookup("torch.nn.modules.batchnorm:_BatchNorm")
    for name, module in model.named_modules():
        if isinstance(module, batch_norm) and not isinstance(module, nn.SyncBatchNorm):
            return (
                f"'{name}' ({type(module).__name__}) normalizes each process's part of the batch "
                "by itself, so that the result depends on the number of processes"
            )
    return ""
