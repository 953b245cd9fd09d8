"""Measure the effect of each transform on each gradient, on the device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, distributed

from gradsurg.effects.ledger import Entry, Ledger
from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.summary import AUTO, effects_by_path
from gradsurg.effects.sums import (
    NUM_SUMS,
    Array,
    add_on_cpu,
    eager_sums,
    effect_numbers,
    is_in_memory,
)
from gradsurg.effects.tables import effect_table
from gradsurg.torch_internals import autograd

MAX_PAIRS = 4096  # pairs whose sums are kept until they are converted to numbers
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude


_zeros = partial(np.zeros, (2, len(EFFECT_NAMES)))  # sums, and numbers of gradients


@dataclass(slots=True)
class _Slot:
    """One transform at one site; `fresh` are numbers since the last fetch, `totals` those before.

    `sketch` has magnitudes of entries and, in a second row, the number of entries each represents.
    """

    transform: str
    entry: Entry
    fetched_fired: int = 0
    fetched_calls: int = 0
    fetched_sent: int = 0  # bytes
    fresh: Array = field(default_factory=_zeros)
    totals: Array = field(default_factory=_zeros)
    sketch: Tensor | None = None
    is_sketched: bool = False  # since the last fetch


class NonFinite(NamedTuple):
    """A transform that returned NaN or infinity for a finite gradient, with the site and step."""

    transform: str
    site: str
    step: int


class SlotState(TypedDict):
    """A slot in a checkpoint."""

    transform: str
    intervention: str
    site: str
    fetched_fired: int
    fetched_calls: int
    totals: list[list[float]]


class EffectsState(TypedDict):
    """The effects in a checkpoint: all but the measurements since the last fetch."""

    slots: list[SlotState]
    sketches: dict[str, dict[str, Tensor]]


@dataclass(slots=True, eq=False)
class Effects:
    """The numbers of each transform at each site, measured every `every` steps (0: never).

    Pairs of gradients are summed at once and not kept. Sums on a device stay there until they are
    read, or there are MAX_PAIRS.
    """

    every: int
    sampling: bool = False
    others: dict[str, str] = field(default_factory=dict)
    """What each intervention changes that does not change gradients, as `activations`."""
    _step: int = 0
    _first_nonfinite: "NonFinite | None" = None
    _slots: list[_Slot] = field(default_factory=list)
    _places: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _pairs: list[tuple[int, int, int]] = field(default_factory=list)  # slot, size and step of each
    _sums: Tensor = field(
        default_factory=partial(torch.zeros, MAX_PAIRS, NUM_SUMS, dtype=torch.float64, device="cpu")
    )
    _elsewhere: dict[int, Tensor] = field(default_factory=dict)  # sums on a device, by row
    _shards: "tuple[distributed.ProcessGroup, Mapping[str, int]] | None" = None
    _parts: list[int] = field(default_factory=list)  # rows of parts of gradients
    _parts_of: "distributed.ProcessGroup | None" = None

    def __repr__(self) -> str:  # without a number: those on a device are not waited for
        return f"Effects at {len(self._slots)} sites: table() is a text, rows() are the numbers"

    def slot(self, transform: str, entry: Entry) -> int:
        """The number of the slot of one transform at one site."""
        place = transform, entry.intervention, entry.site
        if place not in self._places:
            self._places[place] = len(self._slots)
            self._slots.append(_Slot(transform, entry))
        number = self._places[place]
        self._slots[number].entry = entry  # a resumed run has the slot already
        return number

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """Sum a pair of gradients. One inside vmap stands for many, and is not measured."""
        is_plain = is_in_memory(before) and (after is before or is_in_memory(after))
        if not is_plain and (autograd.is_batched(before) or autograd.is_batched(after)):
            return
        row = len(self._pairs)
        if row == MAX_PAIRS:
            self._collect()
            row = 0
        size = before.numel()
        if self._shards is not None:
            self._parts_of, sizes = self._shards
            size = sizes[self._slots[slot].entry.site]
            self._parts.append(row)
        self._pairs.append((slot, size, self._step))
        if is_plain and before.is_cpu:
            add_on_cpu(before, after, self._sums, row)
        else:
            self._elsewhere[row] = eager_sums(before, after)
        if not self._slots[slot].is_sketched:
            self._slots[slot].is_sketched = True
            self._slots[slot].sketch = _sketch(before.detach())

    @contextmanager
    def of_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> Iterator[None]:
        """Pairs added in the block are parts of gradients that are sharded over a process group.

        Their sums are added up over its processes when a step is counted, or read before that: all
        processes must do so, and add the same pairs. `sizes` are the numbers of entries of the
        whole gradients, by site.
        """
        self._shards = group, sizes
        try:
            yield
        finally:
            self._shards = None

    def _add_parts(self) -> None:
        """Add up the sums of parts over the processes, with one all-reduce."""
        if not self._parts or self._parts_of is None:
            return
        rows, self._parts = self._parts, []
        sums = torch.stack([self._elsewhere.get(row, self._sums[row]) for row in rows])
        distributed.all_reduce(sums, group=self._parts_of)
        for row, whole in zip(rows, sums, strict=True):
            if row in self._elsewhere:
                self._elsewhere[row] = whole
            else:
                self._sums[row] = whole

    def begin(self, step: int) -> None:
        """Begin a step: decide whether its gradients are measured."""
        if self._parts:
            self._add_parts()
        self.sampling = self.every > 0 and step % self.every == 0
        self._step = step

    def fetch(self, counted: bool = False) -> list[dict[str, object]]:
        """Return the rows since the last fetch: means over the sampled gradients, one row a slot.

        The means are None if the trigger did not fire. With `counted`, a site whose gradients were
        counted but not sampled has a row too, with means None.
        """
        self._collect()
        rows = []
        for slot in self._slots:
            slot.is_sketched = False
            fired, calls = slot.entry.all_fired, slot.entry.all_calls
            counts = fired - slot.fetched_fired, calls - slot.fetched_calls
            unfired = self.every and not counts[0]
            if slot.fresh.any() or (counts[1] and (counted or unfired)):
                sent = slot.entry.sent - slot.fetched_sent
                rows.append(_row(slot, slot.fresh, *counts, sent / max(1, counts[1])))
                slot.fetched_sent = slot.entry.sent
                slot.totals += slot.fresh
                slot.fresh = _zeros()
                slot.fetched_fired, slot.fetched_calls = fired, calls
        return rows

    def numbers(self, prefix: str = "effect", log: str = AUTO) -> dict[str, float]:
        """Return the numbers since the last call, or `fetch`, for a logger of your own.

        The keys are `<prefix>/<transform>/<site>/<number>`, with the numbers of `EFFECT_NUMBERS`,
        the gradients `seen` and the `calls` of the transform; those without a value are left out.
        If a transform has more than 12 sites they are about 30 numbers about all of them, such as
        `<prefix>/<transform>/mean/cosine`. With `log="sites"` they are those of each site, with a
        pattern (`log="*.weight"`) those of the sites that match it, beside the summary. LookupError
        if none matches.
        """
        numbers = effects_by_path(self.fetch(), self.rows(), log, prefix)
        return {path: float(value) for path, value in numbers.items()}

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of all gradients so far; the next `fetch` is not affected."""
        self._collect()
        rows = []
        for slot in self._slots:
            numbers = slot.totals + slot.fresh
            fired, calls = slot.entry.all_fired, slot.entry.all_calls
            if numbers.any() or (self.every and calls and not fired):
                sent = slot.entry.sent / max(1, slot.entry.calls)
                rows.append(_row(slot, numbers, fired, calls, sent))
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
                totals=slot.totals.tolist(),
            )
            for slot in self._slots
        ]
        sketches: dict[str, dict[str, Tensor]] = {}
        for slot in self._slots:
            if slot.sketch is not None:
                sketches.setdefault(slot.transform, {})[slot.entry.site] = slot.sketch
        return EffectsState(slots=slots, sketches=sketches)

    def resume(self, state: EffectsState, ledger: Ledger) -> None:
        """Load a state; the `ledger` must have been resumed before."""
        for saved in state["slots"]:
            name, site = saved["intervention"], saved["site"]
            # Another name of a site has no entry in the ledger.
            entry = ledger.sites.get(name, {}).get(site) or Entry(name, site)
            slot = self._slots[self.slot(saved["transform"], entry)]
            slot.fetched_fired, slot.fetched_calls = saved["fetched_fired"], saved["fetched_calls"]
            slot.totals = np.array(saved["totals"])
            slot.sketch = state["sketches"].get(slot.transform, {}).get(slot.entry.site)

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first measured gradient of finite entries for which a transform returned others."""
        self._collect()
        return self._first_nonfinite

    def table(self, sites: str | None = None) -> str:
        """Return the rows of all gradients so far as a text table.

        With `sites` it has all sites that match this pattern; without, only those that stand out of
        a transform with more than 20.
        """
        rows = self.rows()
        if sites is None:
            table = effect_table(rows, rest='live.effects.table(sites="*")')
        else:
            chosen = [row for row in rows if fnmatchcase(str(row["site"]), sites)]
            table = effect_table(chosen, most=len(chosen))
        notes = (
            f"{label}: the numbers are of {of}, not gradients" for label, of in self.others.items()
        )
        return "\n".join([table, *notes])

    def quantiles(self, transform: str, at: Sequence[float]) -> list[float]:
        """Quantiles of |g| before `transform`, from entries of a recent gradient of each site."""
        sketches = [slot.sketch for slot in self._slots if slot.transform == transform]
        rows = [sketch.cpu() for sketch in sketches if sketch is not None]
        if not rows:
            return []
        magnitudes, weights = torch.cat(rows, dim=1)
        is_finite = magnitudes.isfinite()
        entries, order = magnitudes[is_finite].sort()
        if not len(entries):
            return []
        # The smallest entry with at least this share of the entries at or below it.
        shares = weights[is_finite][order].double().cumsum(0)
        ranks = torch.searchsorted(shares, torch.tensor(at).double() * shares[-1] * (1 - 1e-9))
        return entries[ranks].tolist()

    def _collect(self) -> None:
        """Convert the sums to numbers, after one copy to the host a device, and add them up."""
        if not self._pairs:
            return
        self._add_parts()
        pairs, self._pairs = self._pairs, []
        elsewhere, self._elsewhere = self._elsewhere, {}
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for row, sums in elsewhere.items():
            groups.setdefault((sums.device, sums.dtype), []).append(row)
        for rows in groups.values():
            stacked = torch.stack([elsewhere[row] for row in rows])
            self._sums[rows] = stacked.cpu().double()
        sums = self._sums[: len(pairs)].numpy()
        numbers = effect_numbers(sums, [size for _, size, _ in pairs])
        made = np.flatnonzero(np.isfinite(sums[:, 0]) & (sums[:, 7] > 0))
        if len(made) and self._first_nonfinite is None:
            number, _, step = pairs[made[0]]
            slot = self._slots[number]
            self._first_nonfinite = NonFinite(slot.transform, slot.entry.site, step)
        self._sums[: len(pairs)] = 0
        fresh = np.stack([slot.fresh for slot in self._slots])
        np.add.at(fresh, [slot for slot, *_ in pairs], numbers)  # one after the other
        for slot, row in zip(self._slots, fresh, strict=True):
            slot.fresh = row


def _sketch(grad: Tensor) -> Tensor:
    """About SKETCH magnitudes of a gradient, and the number of entries that each represents:
    (2, n).
    """
    flat = grad.reshape(-1)
    stride = max(1, len(flat) // SKETCH)
    magnitudes = flat[::stride].abs().float()
    return torch.stack([magnitudes, torch.full_like(magnitudes, stride)])


def _row(slot: _Slot, numbers: Array, fired: int, calls: int, sent: float) -> dict[str, object]:
    """A row of effects; `bytes`, the mean bytes sent for a gradient, if any were sent."""
    sums, counts = numbers.tolist()
    row: dict[str, object] = {
        "transform": slot.transform,
        "site": slot.entry.site,
        "seen": calls,
        "calls": fired,
        "sampled": int(counts[0]),
    }
    means = [value / count if count else None for value, count in zip(sums, counts, strict=True)]
    row |= dict(zip(EFFECT_NAMES, means, strict=True))
    row["nonfinite"] = int(sums[-1])
    if sent:
        row["bytes"] = sent
    return row
