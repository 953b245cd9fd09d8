"""Buckets: the gradients that DistributedDataParallel sends, or those that it gets back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

import torch
from pydantic import Field
from torch import Tensor, distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from gradsurg.plugins.fields import validated
from gradsurg.sites._grads import Access, hook_accumulated
from gradsurg.sites.base import Attached, SiteFn, Stage
from gradsurg.sites.contexts import refusal
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.wrapped_models import when_wrapped
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need

Bucket = distributed.GradBucket  # pyright: ignore[reportPrivateImportUsage] - documented
Reduce = Literal["allreduce", "fp16", "powerSGD"]
Future = torch.futures.Future[Tensor]

DENSE, SPARSE, PALETTE = range(3)  # the forms in which a gradient is sent
MAX_VALUES = 256  # distinct values of a gradient that is sent as indices into a list of values
SAMPLE = 4096  # entries in which these values are looked for first
ALIGNMENT = 8  # bytes, so that every part of a message can be read as a tensor
NOT_SMALLER = 2**62  # the size that a process announces if all its gradients are dense
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
    communication hook `fp16` or `powerSGD` of rank `power_rank`. With `allreduce`, gradients that a
    transform at `sent` made sparse, or reduced to at most 256 distinct values, are sent in a
    shorter form without loss, if that takes fewer bytes: as indices and values, or as 1, 2, 4
    or 8 bits an entry. The effects have the `bytes` that one process sends for a gradient.

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
        has_changed = self._transform(bucket, "sent")
        future, reduce = None, self.parts[0].at.reduce
        if reduce == "allreduce" and self._at("sent"):
            future = self._exchange(bucket, has_changed)
        if future is None:
            future = self._reduce(bucket, reduce)
        if self._at("reduced"):
            bucket.buffer().copy_(future.wait())
            self._transform(bucket, "reduced")
            future = _done(bucket.buffer())
        return future

    def _at(self, stage: Stage) -> list[_Part]:
        return [part for part in self.parts if part.attached.stage == stage]

    def _transform(self, bucket: Bucket, stage: Stage) -> bool:
        """Apply the interventions of a stage; return whether a gradient has another value."""
        has_changed = False
        for part in self._at(stage):
            for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # A copy, because a state may keep the gradient and the bucket is used again.
                result = part.sites[param][1](view.clone()) if param in part.sites else None
                if result is not None:
                    view.copy_(result)
                    has_changed = True
        return has_changed

    def _reduce(self, bucket: Bucket, reduce: Reduce) -> Future:
        """Average the dense gradients of a bucket."""
        power, sizes, n = self.power_state, [], self.group.size()
        for view in bucket.gradients():
            entries, width = view.numel(), 2 if reduce == "fp16" else view.element_size()
            if power is not None and power.iter >= POWER_SGD_START:
                entries = _power_sgd_entries(view, power.matrix_approximation_rank)
            sizes.append(round(2 * (n - 1) / n * entries * width))
        self._count(bucket, sizes)
        if power is not None:
            # It waits for itself several times, and two buckets at once would mix their messages.
            return _done(powerSGD_hook.powerSGD_hook(power, bucket).wait())
        if reduce == "fp16":
            return default_hooks.fp16_compress_hook(self.group, bucket)
        return default_hooks.allreduce_hook(self.group, bucket)

    def _exchange(self, bucket: Bucket, has_changed: bool) -> Future | None:
        """Send the gradients of a bucket in their shortest form; None if that takes more bytes.

        A message goes to each other process, while an all-reduce of d bytes sends 2 d (n-1) / n.
        """
        views, n = bucket.gradients(), self.group.size()
        messages = [_encoded(view) for view in views] if has_changed else []
        own = sum(map(len, messages)) if has_changed else NOT_SMALLER
        size = torch.tensor(own, device=bucket.buffer().device)
        distributed.all_reduce(size, distributed.ReduceOp.MAX, self.group)
        longest = int(size)
        if longest * n >= 2 * bucket.buffer().nbytes:
            return None
        message = pad(torch.cat(messages), (0, longest - own))
        received = [torch.empty_like(message) for _ in range(n)]
        distributed.all_gather(received, message, self.group)
        self._count(bucket, [(n - 1) * len(part) for part in messages])
        bucket.buffer().zero_()
        for other in received:
            start = 0
            for view in views:
                grad, start = _decoded(other, start, view)
                view += grad.div_(n)
        return _done(bucket.buffer())

    def _count(self, bucket: Bucket, sizes: Sequence[int]) -> None:
        """Count the bytes that this process sends for each parameter."""
        for param, size in zip(bucket.parameters(), sizes, strict=False):
            for part in self.parts:
                if param in part.sites:
                    part.attached.count_bytes(part.sites[param][0], size)


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


# A message is a header of two int32, the form and a count, and then
# DENSE: all entries; SPARSE: `count` values, `count` indices;
# PALETTE: `count` values, then for each entry the index of its value, in as few bits as are needed.


def _encoded(grad: Tensor) -> Tensor:
    """Return the shortest message that has all entries of a gradient, as bytes."""
    flat = grad.reshape(-1)
    forms = [(DENSE, [flat])]
    if flat.numel() < 2**31 and flat.count_nonzero() * (4 + flat.element_size()) < flat.nbytes:
        places = flat.nonzero()[:, 0]
        forms.append((SPARSE, [flat[places], places.int()]))
    values, indices = _palette(flat)
    if len(values):
        _, shifts = _bits(len(values), grad.device)
        rows = pad(indices, (0, -len(indices) % len(shifts))).view(-1, len(shifts))
        forms.append((PALETTE, [values, (rows << shifts).sum(1, dtype=torch.uint8)]))
    form, parts = min(forms, key=lambda each: sum(part.nbytes for part in each[1]))
    header = torch.tensor([form, len(parts[0])], dtype=torch.int32, device=grad.device)
    contents = [part.contiguous().view(torch.uint8) for part in (header, *parts)]
    return torch.cat([pad(each, (0, -len(each) % ALIGNMENT)) for each in contents])


def _decoded(message: Tensor, start: int, like: Tensor) -> tuple[Tensor, int]:
    """Return the gradient that begins at a place of a message, and the place where it ends."""
    dtype, size = like.dtype, like.numel()
    header, start = _read(message, start, 2, torch.int32)
    form, count = header.tolist()
    values, start = _read(message, start, count, dtype)
    if form == SPARSE:
        places, start = _read(message, start, count, torch.int32)
        flat = torch.zeros(size, dtype=dtype, device=like.device)
        flat[places.long()] = values
    elif form == PALETTE:
        bits, shifts = _bits(count, like.device)
        packed, start = _read(message, start, -(-size * bits // 8), torch.uint8)
        indices = (packed[:, None] >> shifts) & (2**bits - 1)
        flat = values[indices.reshape(-1)[:size].int()]
    else:
        flat = values.clone()
    return flat.reshape(like.shape), start


def _read(message: Tensor, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return `count` entries of a message, and the place where the next part begins."""
    end = start + count * dtype.itemsize
    return message[start:end].view(dtype), end + -end % ALIGNMENT


def _palette(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values, in order, and the index of each entry; empty if they are many."""
    values = flat[:: max(1, flat.numel() // SAMPLE)].unique()
    while 0 < len(values) <= MAX_VALUES and not values.isnan().any():
        indices = torch.searchsorted(values, flat, out_int32=True).clamp_(max=len(values) - 1)
        others = flat[values[indices] != flat]
        if not len(others):
            return values, indices.to(torch.uint8)
        values = torch.cat([values, others[: 16 * SAMPLE]]).unique()
    return flat[:0], flat[:0]


def _bits(count: int, device: torch.device) -> tuple[int, Tensor]:
    """The bits of an index into `count` values, and the place of each index in a byte."""
    bits = next(bits for bits in (1, 2, 4, 8) if count <= 2**bits)
    return bits, torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
