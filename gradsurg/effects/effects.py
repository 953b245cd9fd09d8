"""Measure the effect of each transform on each gradient, on the device."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, distributed

from gradsurg.effects.ledger import Entry, Ledger
from gradsurg.effects.measured import Measured, Values
from gradsurg.effects.numbers import EFFECT_NAMES, EFFECT_NUMBERS, EXTREME_NAMES, EXTREMES
from gradsurg.effects.summary import AUTO, effects_by_path
from gradsurg.effects.sums import (
    NUM_SUMS,
    add_on_cpu,
    eager_sums,
    effect_numbers,
    is_in_memory,
)
from gradsurg.effects.tables import effect_html, effect_table
from gradsurg.torch_internals import autograd

MAX_PAIRS = 4096  # pairs whose sums are kept until they are converted to numbers
SKETCH = 512  # entries of a gradient kept for the quantiles of its magnitude
REST = 'live.effects.table(sites="*")'


@dataclass(slots=True)
class _Slot:
    """One transform at one site, with the counts of its entry at the last fetch."""

    transform: str  # its label
    entry: Entry  # of the intervention at the site; all links of a `Chain` share it
    fetched_fired: int = 0
    fetched_calls: int = 0
    fetched_sent: int = 0  # bytes
    sketch: Tensor | None = None  # every `stride`-th entry of a gradient, for quantiles
    stride: int = 1
    is_sketched: bool = False  # since the last fetch, as one gradient is enough


class NonFinite(NamedTuple):
    """A transform that returned NaN or infinity for a finite gradient, with the site and step."""

    transform: str
    site: str
    step: int


class SlotState(TypedDict):
    """A slot (one transform at one site) in a checkpoint."""

    transform: str
    intervention: str
    site: str
    fetched_fired: int
    fetched_calls: int
    totals: list[list[float]]
    extremes: NotRequired[list[float]]  # not in earlier checkpoints


class EffectsState(TypedDict):
    """The effects in a checkpoint, except the measurements since the last fetch."""

    slots: list[SlotState]
    sketches: dict[str, dict[str, Tensor]]


@dataclass(slots=True, eq=False)
class Effects:
    """The numbers of each transform at each site, measured every `every` steps (0: never).

    Pairs of a gradient before and after a transform are summed at once and not kept. Sums on a
    device stay there until they are read, or there are MAX_PAIRS.
    """

    every: int
    sampling: bool = False
    others: dict[str, str] = field(default_factory=dict)
    """The tensors that an intervention changes, such as `activations`, if they are no gradients."""
    _step: int = 0
    _first_nonfinite: "NonFinite | None" = None
    _slots: list[_Slot] = field(default_factory=list)
    _fresh: Measured = field(default_factory=Measured)  # since the last fetch
    _totals: Measured = field(default_factory=Measured)  # before it
    _num_measured: int = 0  # pairs that were converted to numbers
    # The number of a slot by label of the transform, label of the intervention, and site.
    _places: dict[tuple[str, str, str], int] = field(default_factory=dict)
    # Slot, size and step of each pair not yet converted. Row i of `_sums` is for pair i; sums that
    # are on a device are in `_elsewhere`.
    _pairs: list[tuple[int, int, int]] = field(default_factory=list)
    _sums: Tensor = field(
        default_factory=partial(torch.zeros, MAX_PAIRS, NUM_SUMS, dtype=torch.float64, device="cpu")
    )
    _elsewhere: dict[int, Tensor] = field(default_factory=dict)  # sums on a device, by row
    # The arguments of `of_shards` inside its block; the rows of `_sums` that are of parts of
    # gradients, and the processes that have these parts.
    _shards: "tuple[distributed.ProcessGroup, Mapping[str, int]] | None" = None
    _parts: list[int] = field(default_factory=list)
    _parts_of: "distributed.ProcessGroup | None" = None

    def __repr__(self) -> str:  # without a number: those on a device are not waited for
        return f"Effects at {len(self._slots)} sites: table() is a text, rows() are the numbers"

    def slot(self, transform: str, entry: Entry) -> int:
        """Return the number of the slot, the place for the numbers of one transform at one site."""
        place = transform, entry.intervention, entry.site
        if place not in self._places:
            self._places[place] = len(self._slots)
            self._slots.append(_Slot(transform, entry))
        number = self._places[place]
        self._slots[number].entry = entry  # a resumed run has the slot already
        return number

    def add(self, slot: int, before: Tensor, after: Tensor) -> None:
        """Sum a pair of gradients. A pair inside vmap stands for many, and is not measured."""
        is_plain = is_in_memory(before) and (after is before or is_in_memory(after))
        if not is_plain and (autograd.is_batched(before) or autograd.is_batched(after)):
            return
        row = len(self._pairs)  # of `_sums`, which is zero from here on
        if row == MAX_PAIRS:
            self._collect()
            row = 0
        size = before.numel()
        if self._shards is not None:
            self._parts_of, sizes = self._shards
            size = sizes[self._slots[slot].entry.site]  # of the whole, for shares of its entries
            self._parts.append(row)
        self._pairs.append((slot, size, self._step))
        if is_plain and before.is_cpu:
            add_on_cpu(before, after, self._sums, row)
        else:
            self._elsewhere[row] = eager_sums(before, after)  # without a wait for the device
        owner = self._slots[slot]
        if not owner.is_sketched:
            owner.is_sketched = True
            owner.stride = max(1, before.numel() // SKETCH)
            # A copy, as the gradient may be changed; its magnitudes can wait.
            owner.sketch = before.detach().reshape(-1)[:: owner.stride].clone()

    @contextmanager
    def of_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> Iterator[None]:
        """Treat pairs added in the block as parts of gradients sharded over a process group.

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
        if self._parts:  # here, where all processes are: they must all take part
            self._add_parts()
        self.sampling = self.every > 0 and step % self.every == 0
        self._step = step

    def fetch(self, counted: bool = False) -> list[dict[str, object]]:
        """Return the rows since the last fetch: means over the sampled gradients, one row a slot.

        The means are None if the trigger did not fire. With `counted`, a site whose gradients were
        counted but not sampled has a row too, with means None.
        """
        self._collect()
        self._totals.merge(self._fresh)
        fresh = self._fresh.values()
        self._fresh.clear()
        rows = []
        for slot, fired, values in zip(self._slots, self._fired(), fresh, strict=True):
            slot.is_sketched = False
            entry, calls = slot.entry, slot.entry.all_calls
            counts = fired - slot.fetched_fired, calls - slot.fetched_calls
            unfired = self.every and not counts[0]  # seen and never acted on: worth a row
            if values.sampled or (counts[1] and (counted or unfired)):
                sent = entry.sent - slot.fetched_sent
                rows.append(_row(slot, values, *counts, sent / max(1, counts[1])))
                slot.fetched_sent = entry.sent
                slot.fetched_fired, slot.fetched_calls = fired, calls
        return rows

    def numbers(self, prefix: str = "effect", log: str = AUTO) -> dict[str, float]:
        """Return the numbers since the last call, or `fetch`, for a logger of your own.

        The keys are `<prefix>/<transform>/<site>/<number>`, with the numbers of `EFFECT_NUMBERS`,
        the gradients `seen` and the `calls` of the transform; those without a value are left out.
        If a transform has more than 12 sites there are about 30 numbers about all of them, such as
        `<prefix>/<transform>/mean/cosine`. `log="sites"` gives the numbers of each site instead, a
        pattern (`log="*.weight"`) those of the matching sites beside the summary. LookupError if
        none matches.
        """
        rows = self.fetch()
        seen = [
            {"transform": slot.transform, "site": slot.entry.site}
            for slot, sampled in zip(self._slots, self._totals.sampled(), strict=True)
            if sampled or (self.every and slot.entry.all_calls and not slot.fetched_fired)
        ]
        numbers = effects_by_path(rows, seen, log, prefix)
        return {path: float(value) for path, value in numbers.items()}

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of all gradients so far; the next `fetch` is not affected."""
        self._collect()
        # A copy, so that the numbers since the last fetch stay apart for the next one.
        both = Measured(self._totals.sums.copy(), self._totals.extremes.copy())
        both.merge(self._fresh)
        rows = []
        for slot, fired, values in zip(self._slots, self._fired(), both.values(), strict=True):
            calls = slot.entry.all_calls
            if values.sampled or (self.every and calls and not fired):
                sent = slot.entry.sent / max(1, slot.entry.calls)
                rows.append(_row(slot, values, fired, calls, sent))
        return rows

    def frame(self) -> Any:  # Any: polars is an optional dependency
        """Return `rows` as a polars DataFrame, or unchanged if polars is not installed."""
        rows = self.rows()
        if find_spec("polars") is None:
            return rows
        import polars as pl  # imported here: few who import gradsurg use a frame

        columns: dict[str, pl.DataType] = dict.fromkeys(("transform", "site"), pl.String())
        columns |= dict.fromkeys(("seen", "calls", "sampled"), pl.Int64())
        for number in (*EFFECT_NUMBERS, *EXTREMES):
            columns[number.name] = pl.Int64() if number.unit == "count" else pl.Float64()
        if any("bytes" in row for row in rows):
            columns["bytes"] = pl.Float64()
        return pl.DataFrame(rows, schema=columns)

    def state(self) -> EffectsState:
        """Return the state for a checkpoint, right after a fetch."""
        self._fit()
        totals = zip(self._totals.sums.tolist(), self._totals.extremes.tolist(), strict=True)
        slots = [
            SlotState(
                transform=slot.transform,
                intervention=slot.entry.intervention,
                site=slot.entry.site,
                fetched_fired=slot.fetched_fired,
                fetched_calls=slot.fetched_calls,
                totals=sums,
                extremes=extremes,
            )
            for slot, (sums, extremes) in zip(self._slots, totals, strict=True)
        ]
        sketches: dict[str, dict[str, Tensor]] = {}
        for slot in self._slots:
            if slot.sketch is not None:
                sketches.setdefault(slot.transform, {})[slot.entry.site] = _magnitudes(slot)
        return EffectsState(slots=slots, sketches=sketches)

    def resume(self, state: EffectsState, ledger: Ledger) -> None:
        """Load a state; the `ledger` must have been resumed before."""
        for saved in state["slots"]:
            name, site = saved["intervention"], saved["site"]
            # Another name of a site has no entry in the ledger.
            entry = ledger.sites.get(name, {}).get(site) or Entry(name, site)
            number = self.slot(saved["transform"], entry)
            slot = self._slots[number]
            slot.fetched_fired, slot.fetched_calls = saved["fetched_fired"], saved["fetched_calls"]
            self._fit()
            self._totals.sums[number] = saved["totals"]
            self._totals.extremes[number] = saved.get("extremes", -1)
            sketch = state["sketches"].get(slot.transform, {}).get(slot.entry.site)
            if sketch is not None and sketch.numel():
                slot.sketch, slot.stride = sketch[0], int(sketch[1, 0])
        # Gradients that are measured from now on come after all those before.
        self._num_measured = 1 + int(self._totals.extremes[:, 3].max(initial=-1))

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first measurement in which a transform made NaN or infinity of a finite gradient."""
        self._collect()
        return self._first_nonfinite

    def table(self, sites: str | None = None) -> str:
        """Return the rows of all gradients so far as a text table.

        With `sites` it has all sites that match this pattern. Without, a transform with more than
        20 sites has one row over all, and rows for its sites with the lowest cosine or the norm
        ratio farthest from 1.
        """
        rows = self.rows()
        if sites is None:
            table = effect_table(rows, rest=REST)
        else:
            chosen = [row for row in rows if fnmatchcase(str(row["site"]), sites)]
            table = effect_table(chosen, most=len(chosen))
        return "\n".join([table, *self._notes()])

    def _repr_html_(self) -> str:
        """The table for a notebook, which shows it where `live.effects` ends a cell."""
        return effect_html(self.rows(), REST, self._notes())

    def _notes(self) -> list[str]:
        return [
            f"{label}: the numbers are of {of}, not gradients" for label, of in self.others.items()
        ]

    def quantiles(self, transform: str, at: Sequence[float]) -> list[float]:
        """Return quantiles of |g| before `transform`, from recent gradients of each site."""
        slots = [slot for slot in self._slots if slot.transform == transform]
        rows = [_magnitudes(slot).cpu() for slot in slots if slot.sketch is not None]
        if not rows:
            return []
        magnitudes, weights = torch.cat(rows, dim=1)
        is_finite = magnitudes.isfinite()
        entries, order = magnitudes[is_finite].sort()
        if not len(entries):
            return []
        # The smallest entry with at least this share of the entries at or below it.
        shares = weights[is_finite][order].double().cumsum(0)
        # A factor below 1, so that a rounding error does not step over an exact share.
        ranks = torch.searchsorted(shares, torch.tensor(at).double() * shares[-1] * (1 - 1e-9))
        return entries[ranks].tolist()

    def _collect(self) -> None:
        """Convert the sums to numbers, after one copy to the host a device, and add them up."""
        self._fit()
        if not self._pairs:
            return
        self._add_parts()
        pairs, self._pairs = self._pairs, []
        elsewhere, self._elsewhere = self._elsewhere, {}
        # One copy for each device and dtype: each copy waits for its device.
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for row, sums in elsewhere.items():
            groups.setdefault((sums.device, sums.dtype), []).append(row)
        for rows in groups.values():
            stacked = torch.stack([elsewhere[row] for row in rows])
            self._sums[rows] = stacked.cpu().double()
        sums = self._sums[: len(pairs)].numpy()
        numbers = effect_numbers(sums, [size for _, size, _ in pairs])
        if self._first_nonfinite is None and sums[:, 7].any():
            # Column 0 is the sum of squares before the transform, 7 the count that is not finite.
            made = np.flatnonzero(np.isfinite(sums[:, 0]) & (sums[:, 7] > 0))
            if len(made):
                number, _, step = pairs[made[0]]
                slot = self._slots[number]
                self._first_nonfinite = NonFinite(slot.transform, slot.entry.site, step)
        sums[:] = 0
        slots, _, steps = np.array(pairs).T
        self._fresh.add(slots, numbers, steps, self._num_measured)
        self._num_measured += len(pairs)

    def _fit(self) -> None:
        """Make room for the numbers of new slots."""
        self._fresh.fit(len(self._slots))
        self._totals.fit(len(self._slots))

    def _fired(self) -> list[int]:
        """How often the trigger of each slot fired, after one copy to the host a device."""
        fired = [slot.entry.earlier_fired + slot.entry.fired for slot in self._slots]
        elsewhere: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, slot in enumerate(self._slots):
            if isinstance(count := slot.entry.fired_on_device, Tensor):  # 0 if none was on a device
                elsewhere.setdefault(count.device, []).append((number, count))
            else:
                fired[number] += count
        for pairs in elsewhere.values():
            counts = torch.stack([count.reshape(()) for _, count in pairs]).tolist()
            for (number, _), count in zip(pairs, counts, strict=True):
                fired[number] += int(count)
        return fired


def _magnitudes(slot: _Slot) -> Tensor:
    """The magnitudes in a sketch, and the number of entries that each represents: (2, n)."""
    assert slot.sketch is not None
    magnitudes = slot.sketch.reshape(-1).abs().float()
    return torch.stack([magnitudes, torch.full_like(magnitudes, slot.stride)])


COLUMNS = ("transform", "site", "seen", "calls", "sampled", *EFFECT_NAMES, *EXTREME_NAMES)


def _row(slot: _Slot, values: Values, fired: int, calls: int, sent: float) -> dict[str, object]:
    """A row of effects; `bytes`, the mean bytes sent for a gradient, if any were sent."""
    about = slot.transform, slot.entry.site, calls, fired, values.sampled
    row: dict[str, object] = dict(
        zip(COLUMNS, (*about, *values.numbers, *values.extremes), strict=True)
    )
    if sent:
        row["bytes"] = sent
    return row
