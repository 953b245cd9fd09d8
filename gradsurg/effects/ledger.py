"""The ledger: gradients expected, seen and acted on at each site of each intervention."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from gradsurg.effects.tables import aligned
from gradsurg.plugins.messages import shortened


class SurgeryWarning(UserWarning):
    """Warns that a surgery may act otherwise than expected: a site saw no gradient, or its stage
    changes the meaning of the transform.
    """


def warn_user(text: str) -> None:
    """Warn the first caller outside gradsurg."""
    # The number of frames is not constant: a warning may come from a hook, or from deep inside.
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gradsurg."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, SurgeryWarning, stacklevel=level)


@dataclass(slots=True)
class Entry:
    """The counts of one site of one intervention, in this attachment.

    A trigger decides on the host or on the device. Counts on the device stay there until they are
    read, because reading one waits for the device.
    """

    intervention: str  # its label
    site: str
    aliases: list[str] = field(default_factory=list)  # site ids that its other names would give
    skipped: str = ""  # why no gradient is expected, as "frozen"
    foreign: list[str] = field(default_factory=list)  # hooks of others at the same place
    is_other_name: bool = False  # whether the calls of its module go by another name
    is_traced: bool = False  # whether compiled code acts there, which counts nothing
    fired: int = 0  # gradients for which the trigger fired, decided on the host
    not_fired: int = 0
    on_device: int = 0  # gradients for which it was decided on the device
    fired_on_device: Any = 0  # those of them acted on. Any: a tensor; this file needs no torch
    earlier_calls: int = 0  # counts of an interrupted run
    earlier_fired: int = 0
    sent: int = 0  # bytes that this process sent for its gradients, at `Buckets`

    @property
    def calls(self) -> int:
        """Gradients seen in this attachment."""
        return self.fired + self.not_fired + self.on_device

    @property
    def all_calls(self) -> int:
        """Gradients seen, also before an interruption."""
        return self.earlier_calls + self.calls

    @property
    def all_fired(self) -> int:
        """Gradients acted on, also before an interruption."""
        return self.earlier_fired + self.fired + int(self.fired_on_device)

    def settle(self) -> None:
        """Copy the count on the device to the host."""
        self.fired_on_device = int(self.fired_on_device)


class EntryState(TypedDict):
    """An entry in a checkpoint."""

    intervention: str
    site: str
    aliases: list[str]
    skipped: str
    calls: int
    fired: int


@dataclass(slots=True, eq=False)
class Ledger:
    """The entries of an attachment, of each intervention in the order in which sites were met.

    `resumed` means that they include the counts of an interrupted run.
    """

    sites: dict[str, dict[str, Entry]] = field(default_factory=dict)  # by intervention and id
    resumed: bool = False

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self.sites.values() for entry in entries.values())

    def of(self, intervention: str) -> list[Entry]:
        """Return the entries of one intervention."""
        return list(self.sites.get(intervention, {}).values())

    def enter(
        self,
        intervention: str,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
    ) -> Entry:
        """Return the entry of a site; make it, or update its aliases and `skipped`."""
        entries = self.sites.setdefault(intervention, {})
        entry = entries.get(site)
        if entry is None:
            entry = entries[site] = Entry(intervention, site)
        entry.skipped = skipped
        for alias in aliases:
            if alias not in entry.aliases:
                entry.aliases.append(alias)
            self.forget(intervention, alias)  # it may have been met as a site of its own
        return entry

    def keep(self, entry: Entry) -> None:
        """Add an entry that was removed."""
        self.sites.setdefault(entry.intervention, {}).setdefault(entry.site, entry)

    def forget(self, intervention: str, site: str) -> None:
        """Remove the entry of a site, unless it has seen a gradient."""
        entries = self.sites.get(intervention, {})
        if site in entries and not entries[site].all_calls:
            del entries[site]

    def settle(self) -> None:
        """Copy all counts on the device to the host, and hold no tensor afterwards."""
        for entry in self:
            entry.settle()

    def state(self) -> list[EntryState]:
        """Return the entries with all their counts, for a checkpoint."""
        return [
            EntryState(
                intervention=entry.intervention,
                site=entry.site,
                aliases=list(entry.aliases),
                skipped=entry.skipped,
                calls=entry.all_calls,
                fired=entry.all_fired,
            )
            for entry in self
        ]

    def resume(self, states: Iterable[EntryState]) -> None:
        """Continue the counts of a checkpoint; expected sites it does not have are removed."""
        present = self.sites
        self.sites = {}
        self.resumed = True
        for state in states:
            name, site = state["intervention"], state["site"]
            entry = present.get(name, {}).get(site) or Entry(name, site)
            self.sites.setdefault(name, {})[site] = entry
            entry.aliases, entry.skipped = list(state["aliases"]), state["skipped"]
            entry.earlier_calls, entry.earlier_fired = state["calls"], state["fired"]

    def warnings(self, intervention: str, start: int = 0, reason: str = "") -> Iterator[str]:
        """Return the warnings of the sites and the trigger of an intervention that never fired.

        `start` is the step at attach; `reason` explains why hooks may not have run.
        """
        entries = self.of(intervention)
        if silent := self.silent(intervention):
            if all(entry.skipped for entry in entries if not entry.all_calls):
                reason = ""  # it is known at each site
            yield f"{intervention}: attached, but no gradient ever passed at: {silent}{reason}"
        calls = sum(entry.all_calls for entry in entries)
        if calls and not any(entry.all_fired for entry in entries):
            has_start = start and not self.resumed
            since = f"; this block began at step {start}" if has_start else ""
            yield f"{intervention}: its trigger never fired in {calls} gradients{since}"

    def silent(self, intervention: str) -> str:
        """Return the sites of an intervention at which no gradient passed, with the known reasons.

        If a gradient passed at another site, those with a reason, which `table` shows, are left
        out.
        """
        entries = self.of(intervention)
        silent = [entry for entry in entries if not entry.all_calls and not entry.is_traced]
        if len(silent) < len(entries):
            silent = [entry for entry in silent if not entry.skipped or entry.is_other_name]
        sites: dict[str, list[str]] = {}
        for entry in silent:
            sites.setdefault(f" ({entry.skipped})" * bool(entry.skipped), []).append(entry.site)
        return "; ".join(shortened(names) + why for why, names in sites.items())

    def table(self) -> str:
        """Format the entries, one line a site: gradients seen, gradients acted on, other names.

        Gradients acted on are the `calls` in the table of effects.
        """
        cells = [["intervention", "seen", "acted on", "site"]]
        for entry in self:
            names = " = ".join([entry.site, *entry.aliases])
            # A skipped site that has calls after all, for example in an evaluation, needs no note.
            note = f"  ({entry.skipped})" if entry.skipped and not entry.all_calls else ""
            if entry.is_traced:
                note += "  (in compiled code, where gradients are not counted)"
            if entry.foreign:
                note += f"  (beside hooks of others: {', '.join(entry.foreign)})"
            counts = [f"{entry.all_calls}", f"{entry.all_fired}"]
            cells.append([entry.intervention, *counts, f"{names}{note}"])
        return aligned(cells, left=(0, 3))
