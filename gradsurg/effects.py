"""What a transform did to each gradient, in numbers gathered on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypedDict

import torch
from torch import Tensor

from gradsurg import engine
from gradsurg.ledger import Entry, Ledger
from gradsurg.sums import Rooms, numbers
from gradsurg.tables import effect_table

NUMBERS = (
    "norm_before",
    "norm_after",
    "cosine",
    "changed",
    "flipped",
    "zeroed",
    "distance",
    "nonfinite",
)
"""Means over the sampled gradients of a site: L2 norms (in float32 one below 1e-19 reads 0), cosine
of before and after, fraction of entries changed, with the other sign, and made zero,
|after - before| / |before|; `nonfinite` counts entries that are NaN or infinite before or after."""

CHUNK = 1 << 16  # entries worked on at a time on a CPU: what fits its cache
KEPT = 1 << 22  # entries kept until they are measured together; worked on at a time elsewhere
WAITING = 256  # measured steps whose sums wait to become numbers
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude


@dataclass(slots=True)
class _Slot:
    transform: str
    entry: Entry
    fetched_fired: int = 0
    fetched_calls: int = 0
    fresh: list[float] = field(default_factory=lambda: [0.0] * (len(NUMBERS) + 1))
    totals: list[float] = field(default_factory=lambda: [0.0] * (len(NUMBERS) + 1))


@dataclass(slots=True)
class _Batch:
    """Flat gradients of one device and dtype that are measured together."""

    slots: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    befores: list[Tensor] = field(default_factory=list)
    afters: list[Tensor] = field(default_factory=list)
    total: int = 0


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
        self._rooms = Rooms()
        self._sums: list[tuple[list[int], list[int], Tensor]] = []
        self._sketches: dict[str, dict[str, Tensor]] = {}
        self._sketched: set[int] = set()
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
        if engine.is_batched(before):
            return
        if slot not in self._sketched:
            self._sketch(slot, before)
        # An alias: a second reference would keep autograd from taking the gradient over as it is.
        kept = after.detach()
        before = kept if before is after else before.detach()
        task = engine.backward_task()
        if task not in (-1, self._task):
            if self._pending:
                self.flush()  # what a backward that failed has left
            self._task = task
            engine.at_end_of_backward(self.flush)
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
        """Sum over the pending pairs; nothing is waited for."""
        pending, self._pending, self._kept = self._pending, [], 0
        batches: dict[tuple[torch.device, torch.dtype], _Batch] = {}
        pending.sort(key=_size)  # those of one size are summed in one call
        for slot, before, after in pending:
            batch = batches.setdefault((before.device, before.dtype), _Batch())
            size = before.numel()
            if batch.slots and batch.total + size > _limit(before):
                self._measure(batch)
                batch = batches[before.device, before.dtype] = _Batch()
            batch.slots.append(slot)
            batch.sizes.append(size)
            batch.befores.append(before)
            batch.afters.append(after)
            batch.total += size
        for batch in batches.values():
            self._measure(batch)
        if len(self._sums) > WAITING:
            self._collect()

    def close(self) -> None:
        """The block has ended: let go of all gradients and of the memory that was worked in."""
        self._pending, self._kept, self._rooms = [], 0, Rooms()

    def fetch(self) -> list[dict[str, object]]:
        """The rows since the last fetch: means over the sampled gradients, one row a slot.

        A site whose trigger did not fire has None for them: its gradients are counted all the same.
        """
        self.flush()
        self._collect()
        self._sketched.clear()
        rows = []
        for slot in self._slots:
            fired, calls = slot.entry.all_fired, slot.entry.all_calls
            counts = fired - slot.fetched_fired, calls - slot.fetched_calls
            if slot.fresh[-1] or (self.every and calls > slot.fetched_calls and not counts[0]):
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

    def _sketch(self, slot: int, before: Tensor) -> None:
        self._sketched.add(slot)
        stride = max(1, before.numel() // SKETCH)
        place = self._slots[slot]
        sample = before.detach().reshape(-1)[::stride].abs().float()
        # Beside each entry how many it stands for: a large gradient counts more than a small one.
        sketch = torch.stack([sample, torch.full_like(sample, stride)])
        self._sketches.setdefault(place.transform, {})[place.entry.site] = sketch

    def _measure(self, batch: _Batch) -> None:
        """A column of sums for each pair; one that is large is worked on chunk by chunk."""
        befores, afters, sizes = batch.befores, batch.afters, batch.sizes
        limit = _limit(befores[0])
        if batch.total > limit:
            flat = befores[0].reshape(-1), afters[0].reshape(-1)
            parts = zip(flat[0].split(limit), flat[1].split(limit), strict=True)
            sums = torch.stack([self._rooms.sums([b], [a], [b.numel()]) for b, a in parts]).sum(0)
        else:
            sums = self._rooms.sums(befores, afters, sizes)
        self._sums.append((batch.slots, sizes, sums))

    def _collect(self) -> None:
        """Copy what was summed to the host, one copy a device, and turn it into numbers."""
        devices: dict[torch.device, list[tuple[list[int], list[int], Tensor]]] = {}
        for item in self._sums:
            devices.setdefault(item[2].device, []).append(item)
        self._sums = []
        for items in devices.values():
            dtype = reduce(torch.promote_types, [sums.dtype for _, _, sums in items])
            wide = torch.cat([sums.to(dtype) for _, _, sums in items], dim=1).cpu()
            slots = [slot for own, _, _ in items for slot in own]
            sizes = [size for _, own, _ in items for size in own]
            for slot, row in zip(slots, numbers(wide.double(), sizes).tolist(), strict=True):
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
    row |= dict(zip(NUMBERS, means, strict=True))
    row["nonfinite"] = int(sums[-1])
    return row
