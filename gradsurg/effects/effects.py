"""Measure the effect of each transform on each gradient, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import TypedDict

import torch
from torch import Tensor

from gradsurg.effects.ledger import Entry, Ledger
from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.sums import Sample, Samples, numbers
from gradsurg.effects.tables import effect_table
from gradsurg.torch_internals import autograd

CHUNK = 1 << 16  # entries measured at a time on a CPU: as many as fit its cache
KEPT = 1 << 22  # entries kept until they are measured together; measured at a time elsewhere
MAX_SUMS = 256  # sums kept on the device until they are copied to the host


@dataclass(slots=True)
class _Slot:
    """One transform at one site; `fresh` are sums since the last fetch, `totals` those before."""

    transform: str
    entry: Entry
    fetched_fired: int = 0
    fetched_calls: int = 0
    fresh: list[float] = field(default_factory=lambda: [0.0] * (len(EFFECT_NAMES) + 1))
    totals: list[float] = field(default_factory=lambda: [0.0] * (len(EFFECT_NAMES) + 1))


class SlotState(TypedDict):
    """A slot in a checkpoint."""

    transform: str
    intervention: str
    site: str
    fetched_fired: int
    fetched_calls: int
    totals: list[float]


class EffectsState(TypedDict):
    """The effects in a checkpoint: all but the measurements since the last fetch."""

    slots: list[SlotState]
    sketches: dict[str, dict[str, Tensor]]


@dataclass(slots=True, eq=False)
class Effects:
    """The numbers of each transform at each site, measured every `every` steps (0: never).

    Gradients are kept until the end of their backward pass and measured together. Sums stay on the
    device until they are read, or exceed MAX_SUMS.
    """

    every: int
    sampling: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _places: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _pending: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    _kept: int = 0
    _samples: Samples = field(default_factory=Samples)
    _sketches: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _task: int = -1  # the backward pass at whose end a flush is due

    def slot(self, transform: str, entry: Entry) -> int:
        """The number of the slot of one transform at one site."""
        place = transform, entry.intervention, entry.site
        if place not in self._places:  # a resumed run has it already
            self._places[place] = len(self._slots)
            self._slots.append(_Slot(transform, entry))
        return self._places[place]

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """Keep a pair of gradients, to be measured when this backward pass ends.

        Inside vmap a tensor stands for many gradients, and is not measured.
        """
        if autograd.is_batched(before) or autograd.is_batched(after):
            return
        # Aliases: with a second reference autograd would copy the gradient.
        after_alias = after.detach()
        before = after_alias if before is after else before.detach()
        task = autograd.backward_task()
        if task not in (-1, self._task):
            if self._pending:
                self.flush()  # the gradients of a backward that failed
            self._task = task
            autograd.at_end_of_backward(self.flush)
        self._pending.append((slot, before, after_alias))
        size = before.numel()
        self._kept += size
        if size > CHUNK or self._kept > KEPT:
            self.flush()

    def begin(self, step: int) -> None:
        """Begin a step: measure pending gradients of the last one, decide about sampling."""
        if self._pending:
            self.flush()
        self.sampling = self.every > 0 and step % self.every == 0

    @torch.no_grad()
    def flush(self) -> None:
        """Measure the pending pairs, or copy them to be measured with those of later steps."""
        pending, self._pending, self._kept = self._pending, [], 0
        pending.sort(key=lambda pair: pair[1].numel())  # one size is summed in one call
        samples: dict[tuple[torch.device, torch.dtype, bool], Sample] = {}
        for slot, before, after in pending:
            key, size = (before.device, before.dtype, before is after), before.numel()
            sample = samples.get(key)
            if sample is not None and sample.total + size > sample.limit:
                self._samples.take(sample)
                sample = None
            if sample is None:
                limit = CHUNK if before.device.type == "cpu" else KEPT
                sample = samples[key] = Sample(*key, limit)
            sample.slots.append(slot)
            sample.sizes.append(size)
            sample.befores.append(before)
            sample.afters.append(after)
            sample.total += size
        for sample in samples.values():
            self._samples.take(sample)
        if len(self._samples.sums) > MAX_SUMS:
            self._collect()

    def close(self) -> None:
        """Release all gradients and buffers."""
        self._pending, self._kept = [], 0
        self._samples.close()

    def fetch(self, counted: bool = False) -> list[dict[str, object]]:
        """Return the rows since the last fetch: means over the sampled gradients, one row a slot.

        The means are None if the trigger did not fire. With `counted`, a site whose gradients were
        counted but not sampled has a row too, with means None.
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
        """Return the rows of all gradients so far; the next `fetch` is not affected."""
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
        """Return the state for a checkpoint, right after a fetch."""
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
            slots=slots,
            sketches={name: dict(sketches) for name, sketches in self._sketches.items()},
        )

    def resume(self, state: EffectsState, ledger: Ledger) -> None:
        """Load a state; the `ledger` must have been resumed before."""
        for saved in state["slots"]:
            entry = ledger.enter(saved["intervention"], saved["site"])
            slot = self._slots[self.slot(saved["transform"], entry)]
            slot.fetched_fired, slot.fetched_calls = saved["fetched_fired"], saved["fetched_calls"]
            slot.totals = list(saved["totals"])
        self._sketches = {name: dict(sketches) for name, sketches in state["sketches"].items()}

    def table(self) -> str:
        """Return the rows of all gradients so far as a text table."""
        return effect_table(self.rows())

    def quantiles(self, transform: str, at: Sequence[float]) -> list[float]:
        """Quantiles of |g| before `transform`, from a sample of entries of its newest gradients."""
        self._sketch()
        sketches = self._sketches.get(transform, {})
        if not sketches:
            return []
        rows = torch.cat([sketch.cpu() for sketch in sketches.values()], dim=1)
        entries, weights = rows[:, rows[0].isfinite()]
        if not len(entries):
            return []
        entries, order = entries.sort()
        # The smallest entry with at least this share of the entries at or below it.
        shares = weights[order].double().cumsum(0)
        ranks = torch.searchsorted(shares, torch.tensor(at).double() * shares[-1] * (1 - 1e-9))
        return entries[ranks].tolist()

    def _sketch(self) -> None:
        """Collect the sketches of the newest gradients."""
        self.flush()
        self._samples.measure()
        for slot, sketch in self._samples.sketches():
            place = self._slots[slot]
            self._sketches.setdefault(place.transform, {})[place.entry.site] = sketch

    def _collect(self) -> None:
        """Copy all sums to the host, one copy a device, and add up their numbers."""
        self._samples.measure()
        items, self._samples.sums = self._samples.sums, []
        for device in dict.fromkeys(item.sums.device for item in items):
            on_device = [item for item in items if item.sums.device == device]
            dtype = reduce(torch.promote_types, [item.sums.dtype for item in on_device])
            wide = torch.cat([item.sums.to(dtype) for item in on_device], dim=1)
            rows = numbers(wide, [size for item in on_device for size in item.all_sizes])
            ends = accumulate(len(item.slots) * item.times for item in on_device)
            for item, end in zip(on_device, ends, strict=True):
                part = rows[end - len(item.slots) * item.times : end]
                added = part.reshape(item.times, len(item.slots), -1).sum(0).tolist()
                for slot, row in zip(item.slots, added, strict=True):
                    self._slots[slot].fresh = _added(self._slots[slot].fresh, row)


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
