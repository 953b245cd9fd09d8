"""What a transform did to each gradient, in numbers gathered on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import TypedDict

import torch
from torch import Tensor

from gradsurg.effects.ledger import Entry, Ledger
from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.samples import Sample, Samples
from gradsurg.effects.sums import numbers
from gradsurg.effects.tables import effect_table
from gradsurg.torch_internals import autograd

CHUNK = 1 << 16  # entries worked on at a time on a CPU: what fits its cache
KEPT = 1 << 22  # entries kept until they are measured together; worked on at a time elsewhere
WAITING = 256  # sums that wait to become numbers


@dataclass(slots=True)
class _Slot:
    transform: str
    entry: Entry
    fetched_fired: int = 0
    fetched_calls: int = 0
    fresh: list[float] = field(default_factory=lambda: [0.0] * (len(EFFECT_NAMES) + 1))
    totals: list[float] = field(default_factory=lambda: [0.0] * (len(EFFECT_NAMES) + 1))


class SlotState(TypedDict):
    """A slot as a checkpoint keeps it."""

    transform: str
    intervention: str
    site: str
    fetched_fired: int
    fetched_calls: int
    totals: list[float]


class EffectsState(TypedDict):
    """What a checkpoint keeps of the effects: all but what was gathered since the last fetch."""

    slots: list[SlotState]
    sketches: dict[str, dict[str, Tensor]]


class Effects:
    """Numbers for each (transform, site), gathered without waiting for the device.

    Gradients are kept until the end of their backward pass and measured together; `fetch` copies
    everything to the host in one piece.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.sampling = False
        self._slots: list[_Slot] = []
        self._places: dict[tuple[str, str, str], int] = {}
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._kept = 0
        self._samples = Samples()
        self._sketches: dict[str, dict[str, Tensor]] = {}
        self._task = -1  # the backward pass at whose end there will be a flush

    def slot(self, transform: str, entry: Entry) -> int:
        """A place for the numbers of one transform at one site."""
        place = transform, entry.intervention, entry.site
        if place not in self._places:  # a resumed run has had it
            self._places[place] = len(self._slots)
            self._slots.append(_Slot(transform, entry))
        return self._places[place]

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """Take a pair of gradients, to be measured when this backward pass ends.

        Inside vmap a gradient stands for many, and is not measured.
        """
        if autograd.is_batched(before):
            return
        # An alias: a second reference would keep autograd from taking the gradient over as it is.
        kept = after.detach()
        before = kept if before is after else before.detach()
        task = autograd.backward_task()
        if task not in (-1, self._task):
            if self._pending:
                self.flush()  # what a backward that failed has left
            self._task = task
            autograd.at_end_of_backward(self.flush)
        self._pending.append((slot, before, kept))
        size = before.numel()
        self._kept += size
        if size > CHUNK or self._kept > KEPT:
            self.flush()

    def begin(self, step: int) -> None:
        """A step begins: measure what is pending of the last one, decide about sampling."""
        if self._pending:
            self.flush()
        self.sampling = self.every > 0 and step % self.every == 0

    @torch.no_grad()
    def flush(self) -> None:
        """Have the pending pairs measured, or copied to be measured with those of later steps;
        nothing is waited for.
        """
        pending, self._pending, self._kept = self._pending, [], 0
        pending.sort(key=_size)  # those of one size are summed in one call
        samples: dict[tuple[torch.device, torch.dtype, bool], Sample] = {}
        for slot, before, after in pending:
            key = before.device, before.dtype, before is after
            sample = samples.setdefault(key, Sample(*key))
            if sample.sizes and sample.total + before.numel() > _limit(before):
                self._samples.take(sample, _limit(before))
                sample = samples[key] = Sample(*key)
            sample.add(slot, before, after)
        for sample in samples.values():
            self._samples.take(sample, _limit(sample.befores[0]))
        if len(self._samples.sums) > WAITING:
            self._collect()

    def close(self) -> None:
        """The block has ended: let go of all gradients and of the memory that was worked in."""
        self._pending, self._kept = [], 0
        self._samples.close()

    def fetch(self, counted: bool = False) -> list[dict[str, object]]:
        """The rows since the last fetch: means over the sampled gradients, one row a slot.

        A site whose trigger did not fire has None for them: its gradients are counted all the same.
        With `counted` so has one whose gradients were not sampled, which else waits.
        """
        self.flush()
        self._collect()
        self._samples.begin()
        rows = []
        for slot in self._slots:
            fired, calls = slot.entry.all_fired, slot.entry.all_calls
            counts = fired - slot.fetched_fired, calls - slot.fetched_calls
            unfired = self.every and not counts[0]
            if slot.fresh[-1] or (counts[1] and (counted or unfired)):
                rows.append(_row(slot, slot.fresh, *counts))
                slot.totals = _added(slot.totals, slot.fresh)
                slot.fresh = [0.0] * len(slot.fresh)
                slot.fetched_fired, slot.fetched_calls = fired, calls
        return rows

    def rows(self) -> list[dict[str, object]]:
        """The rows of everything so far; the next `fetch` is not changed by it."""
        self.flush()
        self._collect()
        rows = []
        for slot in self._slots:
            numbers = _added(slot.totals, slot.fresh)
            fired, calls = slot.entry.all_fired, slot.entry.all_calls
            if numbers[-1] or (self.every and calls and not fired):
                rows.append(_row(slot, numbers, fired, calls))
        return rows

    def state(self) -> EffectsState:
        """What a checkpoint keeps, right after a fetch."""
        slots = [
            SlotState(
                transform=slot.transform,
                intervention=slot.entry.intervention,
                site=slot.entry.site,
                fetched_fired=slot.fetched_fired,
                fetched_calls=slot.fetched_calls,
                totals=slot.totals,
            )
            for slot in self._slots
        ]
        self._sketch()
        return EffectsState(
            slots=slots, sketches={name: dict(own) for name, own in self._sketches.items()}
        )

    def resume(self, state: EffectsState, ledger: Ledger) -> None:
        """Go on where `state` ended; `ledger` has been resumed before."""
        for kept in state["slots"]:
            entry = ledger.enter(kept["intervention"], kept["site"])
            slot = self._slots[self.slot(kept["transform"], entry)]
            slot.fetched_fired, slot.fetched_calls = kept["fetched_fired"], kept["fetched_calls"]
            slot.totals = list(kept["totals"])
        self._sketches = {name: dict(own) for name, own in state["sketches"].items()}

    def table(self) -> str:
        """The rows of everything so far, as text."""
        return effect_table(self.rows())

    def quantiles(self, transform: str, at: Sequence[float]) -> list[float]:
        """Quantiles of |g| before `transform`, from a sample of its newest gradients' entries."""
        self._sketch()
        sketches = self._sketches.get(transform, {})
        if not sketches:
            return []
        rows = torch.cat([sketch.cpu() for sketch in sketches.values()], dim=1)
        entries, weights = rows[:, rows[0].isfinite()]
        if not len(entries):
            return []
        entries, order = entries.sort()
        # The smallest entry with at least this share of all entries at or below it.
        shares = weights[order].double().cumsum(0)
        ranks = torch.searchsorted(shares, torch.tensor(at).double() * shares[-1] * (1 - 1e-9))
        return entries[ranks].tolist()

    def _sketch(self) -> None:
        """Take over the sketches of the newest gradients."""
        self.flush()
        self._samples.measure()
        for slot, sketch in self._samples.sketches():
            place = self._slots[slot]
            self._sketches.setdefault(place.transform, {})[place.entry.site] = sketch

    def _collect(self) -> None:
        """Copy what was summed to the host, one copy a device, and turn it into numbers."""
        self._samples.measure()
        items, self._samples.sums = self._samples.sums, []
        for device in dict.fromkeys(item.sums.device for item in items):
            own = [item for item in items if item.sums.device == device]
            dtype = reduce(torch.promote_types, [item.sums.dtype for item in own])
            wide = torch.cat([item.sums.to(dtype) for item in own], dim=1)
            rows = numbers(wide, [size for item in own for size in item.all_sizes])
            ends = accumulate(len(item.slots) * item.times for item in own)
            for item, end in zip(own, ends, strict=True):
                part = rows[end - len(item.slots) * item.times : end]
                added = part.reshape(item.times, len(item.slots), -1).sum(0).tolist()
                for slot, row in zip(item.slots, added, strict=True):
                    self._slots[slot].fresh = _added(self._slots[slot].fresh, row)


def _size(kept: tuple[int, Tensor, Tensor]) -> int:
    return kept[1].numel()


def _limit(grad: Tensor) -> int:
    """Entries that are worked on at a time: twelve times as many are kept room for."""
    return CHUNK if grad.device.type == "cpu" else KEPT


def _added(numbers: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(numbers, more, strict=True)]


def _row(slot: _Slot, numbers: Sequence[float], fired: int, calls: int) -> dict[str, object]:
    *sums, sampled = numbers
    row: dict[str, object] = {
        "transform": slot.transform,
        "site": slot.entry.site,
        "seen": calls,
        "calls": fired,
        "sampled": int(sampled),
    }
    means = [value / sampled if sampled else None for value in sums]
    row |= dict(zip(EFFECT_NAMES, means, strict=True))
    row["nonfinite"] = int(sums[-1])
    return row
