"""Dose and response: arms that differ in one number only."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradsurg.report.grouping import UNSAID, Arm
from gradsurg.report.reading import canonical

MIN_DOSES = 3  # two points are a comparison, not a curve


@dataclass(frozen=True)
class Doses:
    """A key of the config and the arms that differ in nothing else, by its value."""

    key: str
    name: str
    doses: list[float]
    arms: list[Arm]


def doses(arms: Sequence[Arm]) -> list[Doses]:
    """Every set of at least three treated arms of one label with that many values of one number."""
    treated = [arm for arm in arms if not arm.is_control and arm.config]
    found = []
    for key in dict.fromkeys(key for arm in treated for key in arm.config):
        if key.partition(".")[0] in UNSAID:
            continue
        sets: dict[str, dict[float, Arm]] = {}
        for arm in treated:
            dose = arm.config.get(key)
            if isinstance(dose, int | float) and not isinstance(dose, bool):
                rest = {other: item for other, item in arm.config.items() if other != key}
                sets.setdefault(canonical([arm.runs[0].label, rest]), {})[float(dose)] = arm
        for own in sets.values():
            if len(own) >= MIN_DOSES:
                ordered = sorted(own.items())
                name = _shared_name([arm.name for _, arm in ordered], key)
                found.append(Doses(key, name, [x for x, _ in ordered], [a for _, a in ordered]))
    return found


def _shared_name(names: Sequence[str], key: str) -> str:
    """The parts of their names that all arms have in common."""
    parts = [part for part in names[0].split(" · ") if all(part in n.split(" · ") for n in names)]
    return " · ".join(parts) or key
