"""Two processes: DistributedDataParallel and `fully_shard`, over gloo on the CPU."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import islice, product
from pathlib import Path

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gradsurg as gs
from tests.oracle.core_cells import TRANSFORMS, TRIGGERS, Make
from tests.oracle.core_models import MODELS, Heads, batches
from tests.oracle.core_outcome import Cell, Observed, outcome_of
from tests.oracle.core_sites import KINDS
from tests.oracle.core_tasks import AGGREGATORS
from tests.oracle.core_training import LOSS, STEPS, captured, plain

RANKS = 2
NETWORK = "GLOO_SOCKET_IFNAME"
CHOSEN = ("Scale", "Mask", "ClipGlobalNorm")
FEW = ("Parameters backward", "Parameters reduced", "Parameters step", "Buckets sent", "Outputs")


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": _ddp, "FSDP2": _fsdp}


def _train(
    wrapper: str, kind: str, make: Make, when: Make | None, passes: int, observed: Observed
) -> None:
    model = MODELS["mlp"]()
    wrapped = WRAPPERS[wrapper](model)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    observed.watch(model, optimizer)
    trigger = gs.Always() if when is None else when()
    surgery = gs.Surgery(gs.Intervention(make(), at=KINDS[kind](), when=trigger))
    backward = captured if kind == "Captured" else plain
    source = batches(model)
    with surgery.attach(wrapped, optimizer) as live:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for number, (x, y) in enumerate(islice(source, passes), 1):
                is_last = number == passes or wrapper != "DDP"
                with nullcontext() if is_last else wrapped.no_sync():
                    out = wrapped(x * (1 + distributed.get_rank()))
                    backward(LOSS(out, y), list(model.parameters()))
            optimizer.step()
    observed.take(surgery, live)


def _train_tasks(make: Make, fields: dict[str, object], observed: Observed) -> None:
    model = Heads()
    wrapped = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), 0.1)
    observed.watch(model, optimizer)
    surgery = gs.Surgery(gs.Intervention(make(), at=gs.SharedParameters(**fields)))
    with surgery.attach(wrapped, optimizer) as live:
        for x, y in islice(batches(model), STEPS):
            out: dict[str, Tensor] = wrapped(x * (1 + distributed.get_rank()))
            optimizer.zero_grad()
            live.backward({"task_c": LOSS(out["task_c"], y), "task_d": LOSS(out["task_d"], 1 - y)})
            optimizer.step()
    observed.take(surgery, live)


def cells() -> Iterator[Cell]:
    """Yield the combinations that both processes run together."""
    for wrapper, kind, name in product(WRAPPERS, KINDS, CHOSEN):
        run = partial(_train, wrapper, kind, TRANSFORMS[name], None, 1)
        yield Cell(kind, wrapper, name, run)
    for wrapper, kind in product(WRAPPERS, FEW):
        for name in ("Momentum", "AddNoise", "Clip", "ClipGlobalNorm"):
            run = partial(_train, wrapper, kind, TRANSFORMS[name], None, 2)
            yield Cell(kind, wrapper, f"{name}, accumulation", run)
        for name in ("Probability", "Threshold", "Steps"):
            run = partial(_train, wrapper, kind, TRANSFORMS["Scale"], TRIGGERS[name], 1)
            yield Cell(kind, wrapper, f"{name}, trigger", run)
    for (name, make), reduce in product(AGGREGATORS.items(), ("mean", "local")):
        run = partial(_train_tasks, make, {"reduce": reduce})
        yield Cell("SharedParameters", "DDP", f"{name}, {reduce}", run)


def _work(rank: int, folder: Path, chosen: list[Cell]) -> None:
    """Run cells as one of the processes and write their outcomes."""
    os.environ.setdefault(NETWORK, "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    outcomes = {}
    for cell in chosen:
        outcomes[f"{cell.key}, rank {rank}"] = cell.row, cell.column, outcome_of(cell)
        distributed.barrier()
    with (folder / f"rank{rank}.pickle").open("wb") as file:
        pickle.dump(outcomes, file)
    distributed.destroy_process_group()


def run_all(folder: Path, only: str) -> None:
    """Fork the processes, before autograd has threads, and wait for them."""
    chosen = [cell for cell in cells() if only in cell.key]
    if not chosen:
        return
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_work, args=(rank, folder, chosen)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise RuntimeError(f"the two processes ended with {codes}")
