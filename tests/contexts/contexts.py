"""Contexts in which users attach: training steps that return the gradient of a probe."""

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.sites.base import Selector
from tests.contexts.kinds import FACTOR, Kind, Nested, Net
from tests.sites.points import recomputed

Attach = Callable[..., AbstractContextManager[gs.Live | None]]
Step = Callable[[Kind, Attach], Tensor]
"""A training step: builds a model, attaches (for the plain run, does nothing), gives the probe."""


def _net(**fields: bool) -> Net:
    torch.manual_seed(0)
    return Net(**fields)


def _inputs() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).abs()


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _ready(**fields: bool) -> tuple[Net, torch.optim.SGD]:
    model = _net(**fields)
    return model, _sgd(model)


def _probe(model: nn.Module, kind: Kind) -> Tensor:
    param = dict(model.named_parameters())[kind.probe]
    if kind.of == "update":
        return _whole(param.detach()) - dict(_net().named_parameters())[kind.probe].detach()
    tensor = param if kind.of == "value" else param.grad
    whole = _whole(param if tensor is None else tensor).detach()
    return torch.zeros_like(whole) if tensor is None else whole.clone()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run(model: nn.Module, loss: Tensor, kind: Kind, optimizer: torch.optim.Optimizer) -> Tensor:
    if kind.of == "captured":
        (captured,) = torch.autograd.grad(loss, [dict(model.named_parameters())[kind.probe]])
        return captured
    loss.backward()
    optimizer.step()
    return _probe(model, kind)


def eager(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        return _run(model, model(_inputs()).sum(), kind, optimizer)


def no_grad(kind: Kind, attach: Attach) -> Tensor:
    """An evaluation inside the block, whose output is the probe."""
    model = _net()
    with attach(model, _sgd(model)), torch.no_grad():
        return model(_inputs())


def in_place_consumer(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready(inplace=True)
    with attach(model, optimizer):
        return _run(model, model(_inputs()).sum(), kind, optimizer)


class _Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(lambda x: self.last(self.act(self.first(x))), x, self.reentrant)


def _checkpointed(kind: Kind, attach: Attach, reentrant: bool) -> Tensor:
    torch.manual_seed(0)
    model = _Checkpointed()
    model.reentrant = reentrant
    optimizer = _sgd(model)
    with attach(model, optimizer):
        return _run(model, model(_inputs().requires_grad_()).sum(), kind, optimizer)


def checkpoint_non_reentrant(kind: Kind, attach: Attach) -> Tensor:
    return _checkpointed(kind, attach, reentrant=False)


def checkpoint_reentrant(kind: Kind, attach: Attach) -> Tensor:
    return _checkpointed(kind, attach, reentrant=True)


def autocast_and_scaler(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with attach(model, optimizer, scaler=scaler):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_inputs()).float().sum()
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
        if kind.of == "captured":
            return _run(model, model(_inputs()).sum(), kind, optimizer)
        for _ in range(2):
            model(_inputs()).sum().backward()
        optimizer.step()
        return _probe(model, kind)


def compiled_after_attach(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        compiled = torch.compile(model, backend="aot_eager")
        return _run(model, compiled(_inputs()).sum(), kind, optimizer)


def compiled_before_attach(kind: Kind, attach: Attach) -> Tensor:
    """PyTorch ignores hooks that are added after the first compiled call."""
    model, optimizer = _ready()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(_inputs()).sum()
    with attach(compiled, optimizer):
        return _run(model, compiled(_inputs()).sum(), kind, optimizer)


Order = Literal["never", "inside", "in place", "before"]


def trained(at: Selector, order: Order, backend: str) -> tuple[list[Tensor], Mapping[str, object]]:
    """Return weights and ledger after some steps of a model whose modules pass on others' tensors.

    `order` selects whether it is compiled before attaching or inside the block.
    """
    torch.manual_seed(0)
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called: Callable[[Tensor], Tensor] = model
    if order == "before":
        called = torch.compile(model, backend=backend)
    surgery = gs.Surgery(gs.Intervention(gs.Scale(1.5), at=at))
    with surgery.attach(model, optimizer) as live:
        if order == "inside":
            called = torch.compile(model, backend=backend)
        if order == "in place":
            model.compile(backend=backend)
        for _ in range(3):
            params = list(model.parameters())
            grads = torch.autograd.grad(called(_inputs()).square().sum(), params)
            loss = called(_inputs()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if isinstance(at, gs.Captured):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
            optimizer.step()
        counts = {entry.site: (entry.calls, entry.fired, entry.aliases) for entry in live.ledger}
    return [param.detach().clone() for param in model.parameters()], counts


def torch_func(kind: Kind, attach: Attach) -> Tensor:
    model = _net()
    params = dict(model.named_parameters())
    with attach(model, _sgd(model)):
        grads = grad(lambda params: functional_call(model, params, (_inputs(),)).sum())(params)
        return grads[kind.probe].detach()


def double_backward(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        loss = model(_inputs()).sum()
        if kind.of == "captured":
            probe = dict(model.named_parameters())[kind.probe]
            return torch.autograd.grad(loss, [probe], create_graph=True)[0].detach()
        # A penalty whose second backward reaches no hooked place, so that factors stay readable.
        penalty = torch.autograd.grad(loss, [model.last.weight], create_graph=True)[0]
        (loss + 0.0 * penalty.sum()).backward()
        optimizer.step()
        return _probe(model, kind)


def autograd_grad(kind: Kind, attach: Attach) -> Tensor:
    model, optimizer = _ready()
    with attach(model, optimizer):
        loss = model(_inputs()).sum()
        if kind.of in ("value", "update"):
            return _run(model, loss, kind, optimizer)
        return torch.autograd.grad(loss, [dict(model.named_parameters())[kind.probe]])[0]


def deepcopied(kind: Kind, attach: Attach) -> Tensor:
    """Train a copy made inside the block; the attached model is not trained."""
    model = _net()
    with attach(model, _sgd(model)):
        twin = copy.deepcopy(model)
        optimizer = _sgd(twin)
        return _run(twin, twin(_inputs()).sum(), kind, optimizer)


def load_state_dict_assign(kind: Kind, attach: Attach) -> Tensor:
    model = _net()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, _sgd(model)):
        model.load_state_dict(state, assign=True)
        optimizer = _sgd(model)
        return _run(model, model(_inputs()).sum(), kind, optimizer)


def threads(kind: Kind, attach: Attach) -> Tensor:
    """Forward and backward in another thread than that of attach."""
    model, optimizer = _ready()
    probes: list[Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            probes.append(_run(model, model(_inputs()).sum(), kind, optimizer))
        except RuntimeError as error:
            errors.append(error)

    with attach(model, optimizer):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if errors:
        raise errors[0]
    return probes[0]


def _of_process() -> Tensor:
    return _inputs() * (1 + distributed.get_rank())


def ddp(kind: Kind, attach: Attach) -> Tensor:
    """Each process has other inputs, and all have the same result, or their own captured one."""
    model, optimizer = _ready()
    wrapped = DistributedDataParallel(model)
    with attach(wrapped, optimizer):
        probe = _run(model, wrapped(_of_process()).sum(), kind, optimizer)
    if kind.of != "captured":
        largest = probe.clone()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        assert torch.equal(largest, probe), "the processes differ"
    return probe


def fsdp2(kind: Kind, attach: Attach) -> Tensor:
    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = _sgd(model)
    with attach(model, optimizer):
        return _run(model, model(_of_process()).sum(), kind, optimizer)


PROCESS_CONTEXTS: dict[str, Step] = {"DDP": ddp, "FSDP2": fsdp2}
"""Contexts that every process of a group enters."""

CONTEXTS: dict[str, Step] = {
    "eager": eager,
    "no_grad": no_grad,
    "in-place consumer": in_place_consumer,
    "checkpoint, non-reentrant": checkpoint_non_reentrant,
    "checkpoint, reentrant": checkpoint_reentrant,
    "autocast + GradScaler": autocast_and_scaler,
    "accumulation": accumulation,
    "torch.compile inside the block": compiled_after_attach,
    "torch.compile before it": compiled_before_attach,
    "torch.func": torch_func,
    "double backward": double_backward,
    "autograd.grad": autograd_grad,
    "deepcopy": deepcopied,
    "load_state_dict(assign=True)": load_state_dict_assign,
    "threads": threads,
}

__all__ = ["CONTEXTS", "FACTOR", "PROCESS_CONTEXTS", "Attach", "Order", "Step", "trained"]
