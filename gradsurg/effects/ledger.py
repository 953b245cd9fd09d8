"""What was expected to fire and what did."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict


class SurgeryWarning(UserWarning):
    """Something about a surgery that its user should know: a site that never fired, a stage that
    changes the meaning."""


@dataclass(slots=True)
class Entry:
    """One site of one intervention: gradients seen, and those the trigger let the transform act on.

    `fired` are those that the host let it act on, `left` those that it did not, `asked_device`
    those that the device decided on, `fired_on_device` how often it said yes; all of this
    attachment, `earlier_*` of those before it in a resumed run. `foreign` names the hooks of others
    at the same place.
    """

    intervention: str
    site: str
    aliases: list[str] = field(default_factory=list)
    skipped: str = ""
    foreign: list[str] = field(default_factory=list)
    fired: int = 0
    left: int = 0
    asked_device: int = 0
    fired_on_device: Any = 0  # Any: a tensor, and this floor does without torch
    earlier_calls: int = 0
    earlier_fired: int = 0

    def count(self, fires: Any) -> bool:  # Any: a bool, or a tensor where the device decides
        """Count a gradient that the trigger fires at; whether the transform is to be called."""
        if fires is True:
            self.fired += 1
        elif fires is False:
            self.left += 1
        else:
            self.fired_on_device = self.fired_on_device + fires
            self.asked_device += 1
        return fires is not False

    @property
    def calls(self) -> int:
        """Gradients seen in this attachment."""
        return self.fired + self.left + self.asked_device

    @property
    def all_calls(self) -> int:
        """Gradients seen, those before an interruption too."""
        return self.earlier_calls + self.calls

    @property
    def all_fired(self) -> int:
        """Gradients acted on, those before an interruption too."""
        return self.earlier_fired + self.fired + int(self.fired_on_device)

    def settle(self) -> None:
        """Turn what the device has counted into a number."""
        self.fired_on_device = int(self.fired_on_device)


class EntryState(TypedDict):
    """An entry as a checkpoint keeps it."""

    intervention: str
    site: str
    aliases: list[str]
    skipped: str
    calls: int
    fired: int


class Ledger:
    """The entries of an attachment, in the order in which the sites were met."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.resumed = False  # whether it counts on from where another ended

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def enter(
        self,
        intervention: str,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> Entry:
        """The entry of a site, made when it is first met."""
        entry = self.entries.get((intervention, site))
        if entry is None:
            entry = self.entries[intervention, site] = Entry(intervention, site)
        entry.aliases.extend(alias for alias in aliases if alias not in entry.aliases)
        entry.foreign.extend(name for name in foreign if name not in entry.foreign)
        entry.skipped = skipped
        for alias in aliases:
            self.forget(intervention, alias)
        return entry

    def forget(self, intervention: str, site: str) -> None:
        """Take out a site that was expected and is another one, or several, unless it has acted."""
        entry = self.entries.get((intervention, site))
        if entry is not None and not entry.all_calls:
            del self.entries[intervention, site]

    def settle(self) -> None:
        """Wait for what the device has counted: no tensor is held afterwards."""
        for entry in self:
            entry.settle()

    def state(self) -> list[EntryState]:
        """What a checkpoint keeps: the entries with all that they have counted."""
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
        """Go on counting where `states` ended; what had been forgotten by then is forgotten."""
        met = self.entries
        self.entries = {}
        self.resumed = True
        for state in states:
            key = state["intervention"], state["site"]
            entry = self.entries[key] = met.get(key) or Entry(*key)
            entry.aliases, entry.skipped = list(state["aliases"]), state["skipped"]
            entry.earlier_calls, entry.earlier_fired = state["calls"], state["fired"]

    def warnings(self, start: int = 0, reason: str = "") -> list[str]:
        """The warnings of sites and triggers that never fired.

        `start` is the step of the attach, `reason` a reason why hooks may not have run.
        """
        texts = []
        for name in dict.fromkeys(entry.intervention for entry in self):
            entries = [entry for entry in self if entry.intervention == name]
            silent = [entry for entry in entries if not entry.all_calls]
            if any(entry.all_calls for entry in entries):
                # A site skipped for a known reason is in the table, and not worth a warning.
                silent = [entry for entry in silent if not entry.skipped]
            if silent:
                sites = ", ".join(
                    entry.site + (f" ({entry.skipped})" if entry.skipped else "")
                    for entry in silent
                )
                texts.append(f"{name}: attached, but no gradient ever passed at: {sites}{reason}")
            calls = sum(entry.all_calls for entry in entries)
            if calls and not any(entry.all_fired for entry in entries):
                has_start = start and not self.resumed
                since = f"; this block began at step {start}" if has_start else ""
                texts.append(f"{name}: its trigger never fired in {calls} gradients{since}")
        return texts

    def table(self) -> str:
        """One line a site: what it is, its other names, gradients seen, gradients acted on.

        These are what the effects' table has as calls: the calls of the transform.
        """
        width = max([20, *(len(entry.intervention) for entry in self)])
        lines = [f"{'intervention':<{width}} {'seen':>8} {'acted on':>8}  site"]
        for entry in self:
            names = " = ".join([entry.site, *entry.aliases])
            # An evaluation without gradients says nothing about the training.
            note = f"  ({entry.skipped})" if entry.skipped and not entry.all_calls else ""
            if entry.foreign:
                note += f"  (beside hooks of others: {', '.join(entry.foreign)})"
            counts = f"{entry.all_calls:>8} {entry.all_fired:>8}"
            lines.append(f"{entry.intervention:<{width}} {counts}  {names}{note}")
        return "\n".join(lines)
