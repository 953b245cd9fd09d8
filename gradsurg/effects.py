"""What a transform did to each gradient, in numbers gathered on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsurg.ledger import Entry
from gradsurg.per import widened
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
"""Means over the sampled gradients of a site: L2 norms, cosine of before and after, fraction of
entries changed, with the other sign, and made zero, |after - before| / |before|; `nonfinite` counts
entries that are NaN or infinite before or after."""

SMALL = 1 << 15  # entries; a larger gradient is measured at once instead of being kept
KEPT = 1 << 22  # entries kept until they are measured together
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude


@dataclass(slots=True)
class _Slot:
    transform: str
    entry: Entry
    fetched_calls: int = 0
    totals: list[float] = field(default_factory=lambda: [0.0] * (len(NUMBERS) + 1))


class Effects:
    """Numbers for each (transform, site), gathered without waiting for the device.

    Gradients are kept until the end of a step and measured together; `fetch` copies everything to
    the host in one piece.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.sampling = False
        self._slots: list[_Slot] = []
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._kept = 0
        self._sums: dict[torch.device, Tensor] = {}
        self._sketches: dict[str, dict[str, Tensor]] = {}
        self._sketched: set[int] = set()

    def slot(self, transform: str, entry: Entry) -> int:
        """A place for the numbers of one transform at one site."""
        self._slots.append(_Slot(transform, entry))
        return len(self._slots) - 1

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """Take a pair of gradients; it is measured later if it is small."""
        if before.requires_grad or after.requires_grad:
            before, after = before.detach(), after.detach()
        if slot not in self._sketched:
            self._sketch(slot, before)
        self._pending.append((slot, before, after))
        size = before.numel()
        self._kept += size
        if size > SMALL or self._kept > KEPT:
            self.flush()

    def begin(self, step: int) -> None:
        """A step begins: measure what is pending of the last one, decide about sampling."""
        if self._pending:
            self.flush()
        self.sampling = self.every > 0 and step % self.every == 0

    @torch.no_grad()
    def flush(self) -> None:
        """Measure the pending pairs, device by device."""
        pending, self._pending, self._kept = self._pending, [], 0
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, Tensor]]] = {}
        for item in pending:
            groups.setdefault((item[1].device, item[1].dtype), []).append(item)
        for (device, _), items in groups.items():
            slots = [slot for slot, _, _ in items]
            rows = _measure([before for _, before, _ in items], [after for _, _, after in items])
            sums = self._room(device)
            sums.index_add_(0, _indices(slots, device), rows.to(sums.dtype))

    def fetch(self) -> list[dict[str, object]]:
        """The rows since the last fetch: means over the sampled gradients, one row a slot."""
        self.flush()
        fresh = [[0.0] * (len(NUMBERS) + 1) for _ in self._slots]
        for sums in self._sums.values():
            for own, part in zip(fresh, sums.tolist(), strict=False):
                own[:] = [a + b for a, b in zip(own, part, strict=True)]
            sums.zero_()
        self._sketched.clear()
        rows = []
        for slot, numbers in zip(self._slots, fresh, strict=True):
            slot.totals = [a + b for a, b in zip(slot.totals, numbers, strict=True)]
            if numbers[-1]:
                rows.append(_row(slot, numbers, slot.entry.fired - slot.fetched_calls))
                slot.fetched_calls = slot.entry.fired
        return rows

    def rows(self) -> list[dict[str, object]]:
        """The rows of everything so far."""
        self.fetch()
        return [
            _row(slot, slot.totals, slot.entry.fired) for slot in self._slots if slot.totals[-1]
        ]

    def table(self) -> str:
        """The rows of everything so far, as text."""
        return effect_table(self.rows())

    def quantiles(self, transform: str, at: Sequence[float]) -> list[float]:
        """Quantiles of |g| before `transform`, over a sample of the entries of its newest gradients."""
        sketches = [sketch.cpu() for sketch in self._sketches.get(transform, {}).values()]
        if not sketches:
            return []
        entries = torch.cat(sketches)
        entries = entries[entries.isfinite()]
        return entries.quantile(torch.tensor(at)).tolist() if len(entries) else []

    def _sketch(self, slot: int, before: Tensor) -> None:
        self._sketched.add(slot)
        stride = max(1, before.numel() // SKETCH)
        place = self._slots[slot]
        sketch = before.detach().reshape(-1)[::stride].abs().float()
        self._sketches.setdefault(place.transform, {})[place.entry.site] = sketch

    def _room(self, device: torch.device) -> Tensor:
        sums = self._sums.get(device)
        if sums is None or len(sums) < len(self._slots):
            wide = torch.float32 if device.type == "mps" else torch.float64
            grown = torch.zeros(2 * len(self._slots), len(NUMBERS) + 1, dtype=wide, device=device)
            if sums is not None:
                grown[: len(sums)] = sums
            sums = self._sums[device] = grown
        return sums


def _row(slot: _Slot, numbers: Sequence[float], calls: int) -> dict[str, object]:
    *sums, sampled = numbers
    row: dict[str, object] = {
        "transform": slot.transform,
        "site": slot.entry.site,
        "calls": calls,
        "sampled": int(sampled),
    }
    row |= {name: value / sampled for name, value in zip(NUMBERS, sums, strict=True)}
    row["nonfinite"] = int(sums[-1])
    return row


def _indices(slots: list[int], device: torch.device) -> Tensor:
    indices = torch.tensor(slots)
    return indices if device.type == "cpu" else indices.pin_memory().to(device, non_blocking=True)


def _measure(befores: list[Tensor], afters: list[Tensor]) -> Tensor:
    """One row for each pair: the numbers of NUMBERS and a one that counts it."""
    sizes = [before.numel() for before in befores]
    before = _flat(befores)
    after = _flat(afters)
    counts = befores[0].new_tensor(sizes, dtype=before.dtype).clamp(min=1)
    sums = _sums(before, after, sizes)
    norm_before, norm_after, distance = sums[:3].sqrt()
    product = norm_before * norm_after
    same = (norm_before == norm_after).to(before.dtype)
    cosine = torch.where(product > 0, (sums[3] / product).clamp(-1, 1), same)
    changed, flipped, zeroed = sums[4:7] / counts
    relative = torch.where(
        norm_before > 0, distance / norm_before, (norm_after > 0).to(before.dtype)
    )
    return torch.stack(
        [
            norm_before,
            norm_after,
            # A NaN norm fails every comparison above; its cosine is as unknown as itself.
            torch.where(product.isnan(), product, cosine),
            changed,
            flipped,
            zeroed,
            torch.where(norm_before.isnan(), norm_before, relative),
            sums[7],
            torch.ones_like(norm_before),
        ],
        dim=1,
    )


def _sums(before: Tensor, after: Tensor, sizes: list[int]) -> Tensor:
    """Eight sums over each of the consecutive pieces: a row a sum, a column a piece."""
    maps = before.new_empty(8, len(before))
    difference = after - before
    sign_before, sign_after = before.sign(), after.sign()
    torch.mul(before, before, out=maps[0])
    torch.mul(after, after, out=maps[1])
    torch.mul(difference, difference, out=maps[2])
    torch.mul(before, after, out=maps[3])
    # NaN differs from itself, but a NaN that stays is no change.
    torch.ne(after, before, out=maps[4]).sub_(
        ((before != before) & (after != after)).to(maps.dtype)
    )
    torch.lt(sign_before * sign_after, 0, out=maps[5])
    torch.logical_and(after == 0, before != 0, out=maps[6])
    torch.logical_not(difference.isfinite(), out=maps[7])
    if len(sizes) == 1:
        return maps.sum(1, keepdim=True)
    return torch.stack([piece.sum(1) for piece in maps.split(sizes, dim=1)], dim=1)


def _flat(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return widened(tensors[0].reshape(-1))
    return widened(torch.cat([tensor.reshape(-1) for tensor in tensors]))
