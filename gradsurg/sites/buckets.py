"""Buckets: the gradients that DistributedDataParallel sends, or those that it gets back."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

import torch
from pydantic import Field
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.fields import validated
from gradsurg.sites._grads import Access, hook_accumulated
from gradsurg.sites.contexts import refusal
from gradsurg.sites.places import Attached, SiteFn, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.wrapped_models import when_wrapped
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need

Bucket = distributed.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented
Reduce = Literal["allreduce", "fp16", "powerSGD"]
Future = torch.futures.Future[Tensor]

POWER_SGD_START = 2  # backward passes before PowerSGD begins: the buckets change after the first


@validated
class Buckets(ParamSelector):
    """The gradients in the buckets of DistributedDataParallel, one parameter after the other.

    Stages: `sent`, the gradient of this process, before the average (the default); `reduced`, the
    average. Neither acts in a backward pass of `no_sync`; the next pass has the sum. A parameter
    that this process has not used has a gradient of zeros. Parameters are selected as by
    `Parameters`. In a program of one process, which sends nothing, both stages act on `.grad` after
    each backward pass.

    `reduce` is the average: `allreduce` as in DistributedDataParallel itself, or PyTorch's
    communication hook `fp16` or `powerSGD` of rank `power_rank`. All entries are sent, also zeros.
    The effects have the `bytes` that one process sends for a gradient.

    The model has one communication hook, which stays registered and averages as before when no
    surgery is attached. A communication hook of others is refused.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("sent", "reduced")

    reduce: Reduce = "allreduce"
    power_rank: Annotated[int, Field(ge=1)] = 1

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        if autograd.in_backward():
            raise refusal(self, "attached in a backward pass")
        params = expect_params(self, model, attached)
        if not (distributed.is_available() and distributed.is_initialized()):
            hook_accumulated(params, attached, Access())
            return
        if self.reduce == "powerSGD":
            begun = attached.state("powerSGD")
            if begun:
                attached.note("reduce='powerSGD' began anew: its state is not that of a surgery")
            begun["begun"] = torch.ones(())
        sites: dict[Tensor, tuple[str, SiteFn]] = {
            param: (name, attached.hook_at(name, ref(param))) for name, param in params.items()
        }
        when_wrapped(model, stack, partial(_join, _Part(self, attached, sites)))


@dataclass(frozen=True, eq=False)
class _Part:
    """One attached intervention, with the name and the hook of each parameter."""

    at: Buckets
    attached: Attached
    sites: dict[Tensor, tuple[str, SiteFn]]


_DISPATCHERS: "WeakKeyDictionary[DistributedDataParallel, _Dispatcher]" = WeakKeyDictionary()


def _join(part: _Part, wrapper: DistributedDataParallel) -> None:
    """Let the communication hook of a model, registered once, act for an intervention.

    Raises RuntimeError if the model has another hook, ValueError if others average otherwise.
    """
    if wrapper not in _DISPATCHERS:
        # A copy of a model lists the hook of the model, and does not have it.
        own = f"{_average.__module__}.{_average.__qualname__}"
        if others := [name for name in autograd.comm_hooks(wrapper) if name != own]:
            raise refusal(part.at, "foreign communication hook", hook=others[0])
        assert wrapper.process_group is not None
        _DISPATCHERS[wrapper] = _Dispatcher(wrapper.process_group)
        wrapper.register_comm_hook(_DISPATCHERS[wrapper], _average)
    dispatcher = _DISPATCHERS[wrapper]
    if part in dispatcher.parts:
        return
    own = (part.at.reduce, part.at.power_rank)
    for other in dispatcher.parts:
        if (found := (other.at.reduce, other.at.power_rank)) != own:
            raise refusal(part.at, "different averages", found=found, own=own)
    if not dispatcher.parts and part.at.reduce == "powerSGD":
        dispatcher.power_state = powerSGD_hook.PowerSGDState(
            dispatcher.group, part.at.power_rank, start_powerSGD_iter=POWER_SGD_START
        )
    dispatcher.parts.append(part)
    part.attached.stack.callback(dispatcher.remove, part)


def _average(state: "_Dispatcher", bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    return state.average(bucket)  # PyTorch checks this signature


@dataclass(eq=False)
class _Dispatcher:
    """The communication hook of one model: the attached interventions, in order."""

    group: distributed.ProcessGroup
    parts: list[_Part] = field(default_factory=list)
    power_state: powerSGD_hook.PowerSGDState | None = None

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a copy of the model, or one that is saved, has no surgery

    def remove(self, part: _Part) -> None:
        """Detach an intervention."""
        self.parts.remove(part)
        if not self.parts:
            self.power_state = None

    def average(self, bucket: Bucket) -> Future:
        """Average one bucket, transformed before and after."""
        if not self.parts:
            return default_hooks.allreduce_hook(self.group, bucket)
        self._transform(bucket, "sent")
        future = self._reduce(bucket)
        if self._at("reduced"):
            bucket.buffer().copy_(future.wait())
            self._transform(bucket, "reduced")
            future = _done(bucket.buffer())
        return future

    def _at(self, stage: Stage) -> list[_Part]:
        return [part for part in self.parts if part.attached.stage == stage]

    def _transform(self, bucket: Bucket, stage: Stage) -> None:
        """Apply the interventions of a stage."""
        for part in self._at(stage):
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # A copy, because a state may keep the gradient and the bucket is used again.
                result = part.sites[param][1](view.clone()) if param in part.sites else None
                if result is not None:
                    view.copy_(result)

    def _reduce(self, bucket: Bucket) -> Future:
        """Average the gradients of a bucket, and count the bytes that this process sends."""
        reduce, power, n = self.parts[0].at.reduce, self.power_state, self.group.size()
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            entries, width = view.numel(), 2 if reduce == "fp16" else view.element_size()
            if power is not None and power.iter >= POWER_SGD_START:
                entries = _power_sgd_entries(view, power.matrix_approximation_rank)
            for part in self.parts:
                if param in part.sites:
                    size = round(2 * (n - 1) / n * entries * width)
                    part.attached.count_bytes(part.sites[param][0], size)
        if power is not None:
            # It waits for itself several times, and two buckets at once would mix their messages.
            return _done(powerSGD_hook.powerSGD_hook(power, bucket).wait())
        if reduce == "fp16":
            return default_hooks.fp16_compress_hook(self.group, bucket)
        return default_hooks.allreduce_hook(self.group, bucket)


def _done(buffer: Tensor) -> Future:
    future = torch.futures.Future[Tensor]()
    future.set_result(buffer)
    return future


def _power_sgd_entries(grad: Tensor, rank: int) -> int:
    """The numbers that PowerSGD sends for a gradient: two factors, unless it is not much less."""
    rows = grad.shape[0] if grad.ndim else 1
    columns = grad.numel() // max(rows, 1)
    factors = (rows + columns) * min(rank, rows, columns)
    return factors if factors * 2 < grad.numel() else grad.numel()
