"""What was expected to fire and what did."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class SurgeryWarning(UserWarning):
    """Something about a surgery that its user should know: a site that never fired, a stage that
    changes the meaning."""


@dataclass(slots=True)
class Entry:
    """One site of one intervention: gradients seen, and those the trigger let the transform act on."""

    intervention: str
    site: str
    aliases: list[str] = field(default_factory=list)
    skipped: str = ""
    calls: int = 0
    fired: int = 0


class Ledger:
    """The entries of an attachment, in the order in which the sites were met."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def enter(
        self, intervention: str, site: str, aliases: Sequence[str] = (), skipped: str = ""
    ) -> Entry:
        """The entry of a site, made when it is first met."""
        entry = self.entries.setdefault((intervention, site), Entry(intervention, site))
        entry.aliases.extend(alias for alias in aliases if alias not in entry.aliases)
        entry.skipped = skipped
        for alias in aliases:
            self.forget(intervention, alias)
        return entry

    def forget(self, intervention: str, site: str) -> None:
        """Take out a site that was expected and is another one, or several, unless it has acted."""
        entry = self.entries.get((intervention, site))
        if entry is not None and not entry.calls:
            del self.entries[intervention, site]

    def complaints(self) -> list[str]:
        """One sentence for each way in which what was attached did not act."""
        said = []
        for name in dict.fromkeys(entry.intervention for entry in self):
            own = [entry for entry in self if entry.intervention == name]
            silent = [entry for entry in own if not entry.calls]
            if silent:
                sites = ", ".join(
                    entry.site + (f" ({entry.skipped})" if entry.skipped else "")
                    for entry in silent
                )
                said.append(f"{name}: attached, but no gradient ever passed at: {sites}")
            if any(entry.calls for entry in own) and not any(entry.fired for entry in own):
                calls = sum(entry.calls for entry in own)
                said.append(f"{name}: its trigger never fired in {calls} gradients")
        return said

    def table(self) -> str:
        """One line a site: what it is, its other names, gradients seen, gradients acted on."""
        lines = [f"{'intervention':<20} {'calls':>8} {'fired':>8}  site"]
        for entry in self:
            names = " = ".join([entry.site, *entry.aliases])
            # An evaluation without gradients says nothing about the training.
            note = f"  ({entry.skipped})" if entry.skipped and not entry.calls else ""
            lines.append(
                f"{entry.intervention:<20} {entry.calls:>8} {entry.fired:>8}  {names}{note}"
            )
        return "\n".join(lines)
