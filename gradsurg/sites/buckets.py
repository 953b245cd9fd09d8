"""Buckets: the gradients that DistributedDataParallel sends, or those that it gets back."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, ClassVar, Literal, cast
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Shared
from gradsurg.sites.grads import hook_accumulated, places_of
from gradsurg.sites.places import Door, Hook, Kind, Named, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.sites.wrapped_models import when_wrapped
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need

Bucket = distributed.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented
Reduce = Literal["allreduce", "fp16", "powerSGD"]
Average = tuple[Reduce, int]
"""How gradients are averaged, and the rank of PowerSGD."""

Future = torch.futures.Future[Tensor]

POWER_SGD_START = 2  # backward passes before PowerSGD begins: the buckets change after the first


@cache
def _kind(stage: Stage, average: Average) -> Kind:
    def watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
        if autograd.in_backward():
            door.refuse("attached in a backward pass", kind)
        places = places_of(door, kind, found)
        if not (distributed.is_available() and distributed.is_initialized()):
            hook_accumulated(door, places)
            return
        hooks = {cast(Tensor, each.thing): cast(Hook, door.meet(each)) for each in places}
        # A graph may be there already if it is watched anew: PowerSGD goes on, too.
        powers: _Powers = door.kept.setdefault(Buckets, WeakKeyDictionary())
        part = _Part(door, kind, stage, average, hooks, door.stack, powers)
        for wrapper in [*powers]:
            _join(part, wrapper)
        when_wrapped(door.model, door.stack, partial(_join, part))

    kind = Kind("Buckets", f"{stage} {average}", params_of, watch, known_at="watch")
    return kind


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

    def kind_at(self, stage: Stage | None) -> Kind:
        return _kind(stage or self.stage or "sent", (self.reduce, self.power_rank))


_Powers = WeakKeyDictionary[DistributedDataParallel, powerSGD_hook.PowerSGDState | None]
"""The wrappers that were met, with the state of PowerSGD."""


@dataclass(frozen=True, eq=False)
class _Part:
    """The hooks of a surgery at one stage, by parameter."""

    door: Door
    kind: Kind
    stage: Stage
    average: Average
    hooks: dict[Tensor, Hook]
    stack: ExitStack
    powers: _Powers


_DISPATCHERS: "WeakKeyDictionary[DistributedDataParallel, _Dispatcher]" = WeakKeyDictionary()


def _join(part: _Part, wrapper: DistributedDataParallel) -> None:
    """Let the communication hook of a model, registered once, act for a part of a surgery.

    Raises RuntimeError if the model has another hook, ValueError if others average otherwise.
    """
    door = part.door
    if wrapper not in _DISPATCHERS:
        # A copy of a model lists the hook of the model, and does not have it.
        own = f"{_average.__module__}.{_average.__qualname__}"
        if others := [name for name in autograd.comm_hooks(wrapper) if name != own]:
            door.refuse("foreign communication hook", part.kind, hook=others[0])
        assert wrapper.process_group is not None
        _DISPATCHERS[wrapper] = _Dispatcher(wrapper.process_group)
        wrapper.register_comm_hook(_DISPATCHERS[wrapper], _average)
    dispatcher = _DISPATCHERS[wrapper]
    if part in dispatcher.parts:
        return
    for other in dispatcher.parts:
        if other.average != part.average:
            door.refuse("different averages", part.kind, found=other.average, own=part.average)
    if wrapper not in part.powers:
        reduce, rank = part.average
        make = partial(powerSGD_hook.PowerSGDState, start_powerSGD_iter=POWER_SGD_START)
        part.powers[wrapper] = make(dispatcher.group, rank) if reduce == "powerSGD" else None
    if not dispatcher.parts:
        dispatcher.power_state = part.powers[wrapper]
    dispatcher.parts.append(part)
    part.stack.callback(dispatcher.remove, part)


@dataclass(eq=False)
class _Dispatcher:
    """The communication hook of one model: the attached parts, in order."""

    group: distributed.ProcessGroup
    parts: list[_Part] = field(default_factory=list)
    power_state: powerSGD_hook.PowerSGDState | None = None

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a copy of the model, or one that is saved, has no surgery

    def remove(self, part: _Part) -> None:
        """Detach a part."""
        self.parts.remove(part)
        if not self.parts:
            self.power_state = None

    def transform(self, bucket: Bucket, stage: Stage) -> None:
        """Call the hooks of a stage."""
        for part in self.parts:
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                hook = part.hooks.get(param)
                if part.stage != stage or hook is None:
                    continue
                # A copy, because a state may keep the gradient and the bucket is used again.
                result = hook.call(view.clone(), param)
                if result is not None:
                    view.copy_(result)

    def reduce(self, bucket: Bucket) -> Future:
        """Average the gradients of a bucket, and count the bytes that this process sends."""
        (reduce, _), power, n = self.parts[0].average, self.power_state, self.group.size()
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            entries, width = view.numel(), 2 if reduce == "fp16" else view.element_size()
            if power is not None and power.iter >= POWER_SGD_START:
                entries = _power_sgd_entries(view, power.matrix_approximation_rank)
            for part in self.parts:
                if param in part.hooks:
                    part.hooks[param].count_bytes(round(2 * (n - 1) / n * entries * width))
        if power is not None:
            # It waits for itself several times, and two buckets at once would mix their messages.
            return _done(powerSGD_hook.powerSGD_hook(power, bucket).wait())
        if reduce == "fp16":
            return default_hooks.fp16_compress_hook(self.group, bucket)
        return default_hooks.allreduce_hook(self.group, bucket)


# PyTorch checks this signature.
def _average(dispatcher: _Dispatcher, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket, transformed before and after."""
    if not dispatcher.parts:
        return default_hooks.allreduce_hook(dispatcher.group, bucket)
    dispatcher.transform(bucket, "sent")
    future = dispatcher.reduce(bucket)
    if any(part.stage == "reduced" for part in dispatcher.parts):
        bucket.buffer().copy_(future.wait())
        dispatcher.transform(bucket, "reduced")
        future = _done(bucket.buffer())
    return future


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
