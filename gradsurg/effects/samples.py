"""Pairs of gradients that are measured together, small ones with those of later steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from gradsurg.effects.sums import ScratchBuffers
from gradsurg.torch_internals import autograd

SMALL = 1 << 14  # entries of a sample that is copied, to be measured with others
COPIED = 1 << 16  # entries of such copies that wait
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude


@dataclass(slots=True)
class Sample:
    """Pairs of one device and dtype; in all of them the gradient was left as it is, or in none."""

    device: torch.device
    dtype: torch.dtype
    left: bool
    slots: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    befores: list[Tensor] = field(default_factory=list)
    afters: list[Tensor] = field(default_factory=list)
    total: int = 0

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """One pair more."""
        self.slots.append(slot)
        self.sizes.append(before.numel())
        self.befores.append(before)
        self.afters.append(after)
        self.total += before.numel()

    @property
    def kind(self) -> tuple[object, ...]:
        """Samples of the same kind can be measured together."""
        return self.device, self.dtype, self.left, *self.slots, *self.sizes


@dataclass(frozen=True, slots=True)
class Sums:
    """A column of sums for each slot, as many `times` as the slots were sampled."""

    slots: list[int]
    sizes: list[int]
    sums: Tensor
    times: int = 1

    @property
    def all_sizes(self) -> list[int]:
        """The size of the gradient of each column."""
        return self.sizes * self.times


@dataclass(slots=True)
class _Copies:
    """Samples of the same kind, flat."""

    sample: Sample
    befores: list[Tensor] = field(default_factory=list)
    afters: list[Tensor] = field(default_factory=list)


class Samples:
    """Samples on their way to sums.

    Measuring small gradients costs by the call: such samples are copied, and those of several steps
    measured as one.
    """

    def __init__(self) -> None:
        self.sums: list[Sums] = []
        self._rooms = ScratchBuffers()
        self._copies: dict[tuple[object, ...], _Copies] = {}
        self._copied = 0
        # Where the newest gradient of a slot begins in a flat tensor, and its size; or its sketch.
        self._newest: dict[int, tuple[Tensor, int, int]] = {}
        self._sketches: dict[int, Tensor] = {}
        self._sketched: set[int] = set()

    def begin(self) -> None:
        """From now on there are newer gradients."""
        self._sketched.clear()

    def take(self, sample: Sample, limit: int) -> None:
        """Copy a sample, or measure it, at most `limit` entries at a time."""
        if sample.total > SMALL:
            self._sketch(sample)
            self._measure(sample, limit)
            return
        if self._copied + sample.total > COPIED:
            self.measure()
        copies = self._copies.setdefault(sample.kind, _Copies(sample))
        copies.befores.append(_copy(sample.befores))
        if not sample.left:
            copies.afters.append(_copy(sample.afters))
        sample.befores, sample.afters = [], []
        self._copied += sample.total

    @torch.no_grad()
    def measure(self) -> None:
        """Sum over what was copied."""
        copies, self._copies, self._copied = self._copies, {}, 0
        for own in copies.values():
            slots, sizes, times = own.sample.slots, own.sample.sizes, len(own.befores)
            sums = self._rooms.sums(own.befores, own.afters or None, sizes)
            self.sums.append(Sums(slots, sizes, sums, times))
            begins = [0, *accumulate(sizes)]
            for slot, begin, size in zip(slots, begins, sizes, strict=False):
                self._newest[slot] = own.befores[-1], begin, size
                self._sketches.pop(slot, None)

    def sketches(self) -> Iterator[tuple[int, Tensor]]:
        """Entries of the newest gradient of each slot, once, in a row, and how many each stands
        for: a large gradient counts more than a small one.
        """
        newest, self._newest = self._newest, {}
        done, self._sketches = self._sketches, {}
        yield from done.items()
        for slot, (flat, begin, size) in newest.items():
            yield slot, _thinned(flat[begin : begin + size])

    def close(self) -> None:
        """Let go of all but sums and sketches."""
        self.measure()
        self._rooms = ScratchBuffers()

    def _sketch(self, sample: Sample) -> None:
        for slot, grad in zip(sample.slots, sample.befores, strict=True):
            if slot not in self._sketched:
                self._sketched.add(slot)
                self._newest.pop(slot, None)
                self._sketches[slot] = _thinned(grad.reshape(-1))

    def _measure(self, sample: Sample, limit: int) -> None:
        """Sum over a sample; a gradient that is large is worked on chunk by chunk."""
        befores, afters, sizes = sample.befores, sample.afters, sample.sizes
        if sample.total > limit:
            flat = befores[0].reshape(-1), afters[0].reshape(-1)
            parts = zip(flat[0].split(limit), flat[1].split(limit), strict=True)
            sums = torch.stack(
                [self._rooms.sums([b], None if sample.left else [a], [b.numel()]) for b, a in parts]
            ).sum(0)
        else:
            after = None if sample.left else [autograd.flat(afters)]
            sums = self._rooms.sums([autograd.flat(befores)], after, sizes)
        self.sums.append(Sums(sample.slots, sizes, sums))


def _copy(grads: list[Tensor]) -> Tensor:
    """The entries of gradients in memory of their own."""
    flat = autograd.flat(grads)
    return flat.clone() if len(grads) == 1 else flat  # of a single one it is an alias


def _thinned(flat: Tensor) -> Tensor:
    stride = max(1, flat.numel() // SKETCH)
    sample = flat.detach()[::stride].abs().float()
    return torch.stack([sample, torch.full_like(sample, stride)])
