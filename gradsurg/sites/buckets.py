"""Buckets: the gradients that DistributedDataParallel sends, or those that it gets back."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, ClassVar, Literal, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from pydantic import BeforeValidator
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites.calls import Shared
from gradsurg.sites.grads import hook_accumulated, places_of
from gradsurg.sites.places import Door, Hook, Kind, Named, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.sites.wrapped_models import when_wrapped
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need

Bucket = distributed.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented
Reduce = Literal["allreduce", "fp16"]


def _refuse_power_sgd(reduce: object) -> object:
    if reduce == "powerSGD":
        raise Contradiction(
            "reduce",
            "register PyTorch's powerSGD_hook on the model and use Parameters with "
            "stage='backward_end', or use the transform power_sgd here",
        )
    return reduce


@cache
def _kind(stage: Stage, reduce: Reduce) -> Kind:
    def watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
        if autograd.in_backward():
            door.refuse("attached in a backward pass", kind)
        places = places_of(door, kind, found)
        if not (distributed.is_available() and distributed.is_initialized()):
            hook_accumulated(door, places)
            return
        hooks = {cast(Tensor, each.thing): cast(Hook, door.meet(each)) for each in places}
        # If this is not the first `watch`, a graph may be there: models met before join at once.
        met: WeakSet[DistributedDataParallel] = door.kept.setdefault(Buckets, WeakSet())
        part = _Part(door, kind, stage, reduce, hooks, door.stack, met)
        for wrapper in [*met]:
            _join(part, wrapper)
        when_wrapped(door.model, door.stack, partial(_join, part))

    kind = Kind("Buckets", f"{stage} {reduce}", params_of, watch, known_at="watch")
    return kind


@validated
class Buckets(ParamSelector):
    """Select the gradients in the buckets of DistributedDataParallel, one parameter after the
    other.

    `stage="sent"` (the default) is the gradient of this process, before the average; `"reduced"` is
    the average. `reduce` selects the average: `allreduce`, the one of DistributedDataParallel
    itself, or `fp16`, PyTorch's communication hook that sends two bytes an entry. Parameters are
    selected like for `Parameters`.

    Neither stage acts in a backward pass of `no_sync`; the next pass has the sum. A parameter that
    this process has not used has a gradient of zeros. All entries are sent, also zeros. The effects
    have the `bytes` that one process sends for a gradient. In a program of one process, which sends
    nothing, both stages act on `.grad` after each backward pass.

    gradsurg registers one communication hook on the model. It stays registered after the surgery
    and then only averages, like DistributedDataParallel itself. A model that already has a
    communication hook is refused.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("sent", "reduced")

    reduce: Annotated[Reduce, BeforeValidator(_refuse_power_sgd)] = "allreduce"

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return _kind(stage or self.stage or "sent", self.reduce)


@dataclass(frozen=True, eq=False)
class _Part:
    """The hooks of a surgery at one stage, by parameter; `met` are the models that have them."""

    door: Door
    kind: Kind
    stage: Stage
    reduce: Reduce
    hooks: dict[Tensor, Hook]
    stack: ExitStack
    met: WeakSet[DistributedDataParallel]


_DISPATCHERS: "WeakKeyDictionary[DistributedDataParallel, _Dispatcher]" = WeakKeyDictionary()


def _join(part: _Part, wrapper: DistributedDataParallel) -> None:
    """Let the communication hook of a model, registered once, act for a part of a surgery.

    Raises RuntimeError if the model has another hook, ValueError if a part has another `reduce`.
    """
    if wrapper not in _DISPATCHERS:
        # A copy of a model lists the hook of the original, but does not have it.
        own = f"{_average.__module__}.{_average.__qualname__}"
        if others := [name for name in autograd.comm_hooks(wrapper) if name != own]:
            part.door.refuse("foreign communication hook", part.kind, hook=others[0])
        assert wrapper.process_group is not None
        _DISPATCHERS[wrapper] = _Dispatcher(wrapper.process_group)
        wrapper.register_comm_hook(_DISPATCHERS[wrapper], _average)
    parts = _DISPATCHERS[wrapper].parts
    for other in parts:
        if other.reduce != part.reduce:
            found = {"found": other.reduce, "own": part.reduce}
            part.door.refuse("different averages", part.kind, **found)
    if part not in parts:  # the model is called again
        part.met.add(wrapper)
        parts.append(part)
        part.stack.callback(parts.remove, part)


@dataclass(eq=False)
class _Dispatcher:
    """The communication hook of one model: the attached parts, in order."""

    group: distributed.ProcessGroup
    parts: list[_Part] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return object, ()  # a copy of the model, or one that is saved, has no surgery

    def transform(self, bucket: Bucket, stage: Stage) -> None:
        """Call the hooks of a stage."""
        for part in self.parts:
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if part.stage == stage and param in part.hooks:
                    # A copy, because a state may keep the gradient and the bucket is used again.
                    result = part.hooks[param].call(view.clone(), param)
                    if result is not None:
                        view.copy_(result)

    def count_bytes(self, bucket: Bucket) -> None:
        """Count the bytes that this process sends for each gradient."""
        n = self.group.size()
        for part in self.parts:
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if param in part.hooks:
                    width = 2 if part.reduce == "fp16" else view.element_size()
                    part.hooks[param].count_bytes(round(2 * (n - 1) / n * view.numel() * width))


# PyTorch checks this signature.
def _average(dispatcher: _Dispatcher, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket, transformed before and after."""
    parts = dispatcher.parts
    dispatcher.transform(bucket, "sent")
    dispatcher.count_bytes(bucket)
    is_fp16 = any(part.reduce == "fp16" for part in parts)
    average = default_hooks.fp16_compress_hook if is_fp16 else default_hooks.allreduce_hook
    future = average(dispatcher.group, bucket)
    if any(part.stage == "reduced" for part in parts):
        bucket.buffer().copy_(future.wait())
        dispatcher.transform(bucket, "reduced")
        future = torch.futures.Future[Tensor]()
        future.set_result(bucket.buffer())
    return future
