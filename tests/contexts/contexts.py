"""Contexts in which users attach: training steps that return the gradient of a probe.

python -m tests.contexts.contexts prints the cells of a context of several processes to a test.
"""

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from tests.contexts.kinds import KINDS, TABLE, Kind, Net
from tests.core.by_hand import SIGNS, by_hand, signs
from tests.forks import Ranks, in_ranks
from tests.sites.points import recomputed

Attach = Callable[..., AbstractContextManager[gs.Live | None]]
Step = Callable[[Kind, Attach], Tensor]
"""A training step: builds a model, attaches (for the plain run, does nothing), gives the probe."""

Change = Callable[[nn.Module], nn.Module]


def _x() -> Tensor:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).abs()
    return inputs * (1 + distributed.get_rank() if distributed.is_initialized() else 1)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _ready(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = make()
    return model, _sgd(model)


def _params(model: nn.Module) -> dict[str, nn.Parameter]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name.removeprefix("_orig_mod."): param for name, param in inner.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _probe(model: nn.Module, kind: Kind) -> Tensor:
    param = _params(model)[kind.probe]
    if kind.of == "gradient":
        return torch.zeros_like(_whole(param)) if param.grad is None else _whole(param.grad)
    before = _params(_ready()[0])[kind.probe].detach()
    return _whole(param) - before if kind.of == "update" else _whole(param)


def _run(model: nn.Module, loss: Tensor, kind: Kind, optimizer: torch.optim.Optimizer) -> Tensor:
    if kind.of == "captured":
        return torch.autograd.grad(loss, [_params(model)[kind.probe]])[0]
    loss.backward()
    optimizer.step()
    return _probe(model, kind)


def _same(model: nn.Module) -> nn.Module:
    return model


def _trains(
    make: Callable[[], nn.Module] = Net, before: Change = _same, inside: Change = _same
) -> Step:
    """Return a step of a model that is changed before it is attached, or in the block."""

    def step(kind: Kind, attach: Attach) -> Tensor:
        model = before(_ready(make)[0])
        optimizer = _sgd(model)
        with attach(model, optimizer):
            known = {*model.parameters()}
            model = inside(model)
            if known != {*model.parameters()}:
                optimizer = _sgd(model)
            return _run(model, model(_x().requires_grad_()).sum(), kind, optimizer)

    return step


class _Checkpointed(Net):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(super().forward, x, self.reentrant)


def _compile(model: nn.Module) -> Any:  # Any: PyTorch types it as a function
    return torch.compile(model, backend="aot_eager")


def _compile_and_call(model: nn.Module) -> nn.Module:
    """PyTorch ignores hooks that are added after the first compiled call."""
    compiled = _compile(model)
    compiled(_x().requires_grad_())  # as later: for other inputs it is compiled again
    return compiled


def _load(model: nn.Module) -> nn.Module:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def _shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def no_grad(kind: Kind, attach: Attach) -> Tensor:
    """An evaluation inside the block, whose output is the probe."""
    model, optimizer = _ready()
    with attach(model, optimizer), torch.no_grad():
        return model(_x())


def autocast_and_scaler(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with attach(model, optimizer, scaler=scaler):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_x()).float().sum()
        if kind.of == "captured":
            return _run(model, loss, kind, optimizer)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return _probe(model, kind)


def accumulation(kind: Kind, attach: Attach) -> Tensor:
    """Two backward passes before a step; stages with running sums act on the first one twice."""
    model, optimizer = _ready()
    with attach(model, optimizer):
        if kind.of != "captured":
            model(_x()).sum().backward()
        return _run(model, model(_x()).sum(), kind, optimizer)


def torch_func(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    params = dict(model.named_parameters())
    with attach(model, optimizer):
        grads = grad(lambda params: functional_call(model, params, (_x(),)).sum())(params)
        return grads[kind.probe].detach()


def double_backward(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        loss = model(_x()).sum()
        if kind.of == "captured":
            probe = _params(model)[kind.probe]
            return torch.autograd.grad(loss, [probe], create_graph=True)[0].detach()
        # A penalty whose second backward reaches no hooked place, so that factors stay readable.
        penalty = torch.autograd.grad(loss, [model.last.weight], create_graph=True)[0]
        return _run(model, loss + 0.0 * penalty.sum(), kind, optimizer)


def autograd_grad(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        loss = model(_x()).sum()
        if kind.of in ("value", "update"):
            return _run(model, loss, kind, optimizer)
        return torch.autograd.grad(loss, [_params(model)[kind.probe]])[0]


def threads(kind: Kind, attach: Attach) -> Tensor:
    """Forward and backward in another thread than that of attach."""
    model, optimizer = _ready()
    with attach(model, optimizer), ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: _run(model, model(_x()).sum(), kind, optimizer)).result()


def ddp(kind: Kind, attach: Attach) -> Tensor:
    """Each process has other inputs, and all have the same result, or their own captured one."""
    probe = _trains(before=DistributedDataParallel)(kind, attach)
    if kind.of != "captured":
        largest = probe.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        assert torch.equal(largest, probe), "the processes differ"
    return probe


STEPS: dict[str, Step] = {
    "eager": _trains(),
    "no_grad": no_grad,
    "in-place consumer": _trains(lambda: Net(inplace=True)),
    "checkpoint, non-reentrant": _trains(_Checkpointed),
    "checkpoint, reentrant": _trains(lambda: _Checkpointed(True)),
    "autocast + GradScaler": autocast_and_scaler,
    "accumulation": accumulation,
    "torch.compile after attaching": _trains(inside=_compile),
    "torch.compile before attaching": _trains(before=_compile_and_call),
    "torch.func": torch_func,
    "double backward": double_backward,
    "autograd.grad": autograd_grad,
    "deepcopy": _trains(inside=copy.deepcopy),
    "load_state_dict(assign=True)": _trains(inside=_load),
    "threads": threads,
    "DDP": ddp,
    "FSDP2": _trains(before=_shard),
    "torchrun": ddp,
}
"""The step of each context of the table."""

PROCESSES = ("DDP", "FSDP2", "torchrun")
"""Contexts that every process of a group enters."""


FACTOR = 10.0


def outcome(kind: Kind, context: str) -> tuple[str, str]:
    """Return the measured outcome, `IGNORED` or `WRONG` if nothing was said of it, and messages.

    It acts if it gives the result of hooks by hand, bit for bit; of several processes, and in
    `torch.compile`, if it gives the result of a factor.
    """
    is_exact = context not in PROCESSES and "compile" not in context
    step, at, transform = STEPS[context], kind.make(), SIGNS if is_exact else gs.Scale(FACTOR)

    def attach(model: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[gs.Live]:
        return gs.Surgery(gs.Intervention(transform, at)).attach(model, *args, **kwargs)

    def hook(model: nn.Module, optimizer: Any, **_: object) -> AbstractContextManager[None]:
        return by_hand(kind.name, model, signs, optimizer, kind.pattern)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = step(kind, lambda *args, **kwargs: nullcontext())
        except RuntimeError as error:
            return "n/a", str(error)  # PyTorch itself does not do that
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            treated = step(kind, attach)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            return "refused", str(error)
    text = " ".join(str(item.message) for item in caught if item.category is gs.SurgeryWarning)
    if torch.allclose(treated, plain, rtol=0.02):
        return ("reported" if text else "IGNORED"), text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = step(kind, hook) if is_exact else FACTOR * plain
    if not torch.allclose(treated, expected, rtol=0.0 if is_exact else 0.02, atol=0.0):
        return "WRONG", text
    # One that is not linear warns of several gradients in a step, whatever the kind.
    return ("warned" if TABLE[kind.name][context] == "warned" and text else "acts"), text


@cache
def column(context: str) -> dict[str, str]:
    """Return the measured outcomes in a context of two processes, by kind of site."""
    if context == "torchrun":
        launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [sys.executable, "-m", *launch, "-m", "tests.contexts.contexts"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def work(ranks: Ranks, folder: Path) -> dict[str, str]:
        return {name: outcome(kind, context)[0] for name, kind in KINDS.items()}

    return in_ranks(2, work)


def main() -> None:
    """In a process of torchrun: print the cells of DistributedDataParallel."""
    distributed.init_process_group("gloo")
    cells = {name: outcome(kind, "torchrun")[0] for name, kind in KINDS.items()}
    if not distributed.get_rank():
        print(json.dumps(cells), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
