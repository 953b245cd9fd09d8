"""Which runs are one arm, and what an arm is called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsurg.report.reading import Found

ABOUT_SURGERY = ("transform", "site", "when", "order", "control", "aggregator", "sources")
UNSAID = ("seed", "gradsurg", "order", "sources")
"""Keys that no name tells: they repeat others, or would not be understood."""


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but their seed, in its order."""

    name: str
    runs: tuple[Found, ...]
    config: Mapping[str, object]

    @property
    def is_control(self) -> bool:
        return self.runs[0].arm == "control"

    @property
    def whole(self) -> list[Found]:
        """Runs that ended as planned: the only ones that are averaged."""
        return [run for run in self.runs if run.state == "finished" and run.summary]


def group(runs: Sequence[Found]) -> list[Arm]:
    """The arms of a study, the treated ones first, each with a name of its own."""
    groups: dict[str, list[Found]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    own = [tuple(sorted(group, key=lambda run: (run.seed, run.name))) for group in groups.values()]
    configs = [flat(group[0].config or {}) for group in own]
    names = _names([_called(group[0]) for group in own], configs)
    arms = [Arm(*parts) for parts in zip(names, own, configs, strict=True)]
    return sorted(arms, key=_order)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:  # Any: YAML's values
    """A nested config as dotted keys."""
    items: dict[str, object] = {}
    for key, item in config.items():
        if isinstance(item, Mapping):
            items |= flat(item, f"{prefix}{key}.")
        else:
            items[f"{prefix}{key}"] = item
    return items


def _called(run: Found) -> str:
    if run.state == "missing":
        return "control (not there)"
    if run.arm == "control":
        return "control" if run.label == "none" else run.label
    return run.label


def _names(labels: list[str], configs: list[dict[str, object]]) -> list[str]:
    """Each label with what tells its arm from the others."""
    shared = _telling(configs, about_surgery=False)
    names = []
    for label, config in zip(labels, configs, strict=True):
        same = [other for name, other in zip(labels, configs, strict=True) if name == label]
        keys = [*shared, *_telling(same, about_surgery=True)]
        said = [_said(key, keys, config[key]) for key in keys if _is_said(key, keys, config)]
        names.append(" · ".join([label, *said]))
    # what still has no name of its own gets a number
    repeats: dict[str, int] = {}
    for place, name in enumerate(names):
        repeats[name] = repeats.get(name, 0) + 1
        if repeats[name] > 1:
            names[place] = f"{name} #{repeats[name]}"
    return names


def _telling(configs: list[dict[str, object]], about_surgery: bool) -> list[str]:
    """The keys in which configs differ; of a group whose names differ the name is enough."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = []
    for key in keys:
        top, _, rest = key.partition(".")
        if top in UNSAID or (top in ABOUT_SURGERY) != about_surgery:
            continue
        having = [config for config in configs if key in config]
        values = {repr(config[key]) for config in having}
        missing = len(having) < len([config for config in configs if config])
        if len(values) > 1 or (missing and not rest):
            found.append(key)
    return found


def _is_said(key: str, keys: Sequence[str], config: Mapping[str, object]) -> bool:
    return key in config and config[key] is not None


def _said(key: str, keys: Sequence[str], found: object) -> str:
    """`mlp` for a name, else the last part of the key and the value: `value=0.01`."""
    last = key.rpartition(".")[2]
    shown = f"{found:g}" if isinstance(found, float) else str(found)
    if isinstance(found, list | tuple):
        shown = f"[{','.join(map(str, found))}]"
    if last == "name":
        return shown
    ambiguous = sum(other.rpartition(".")[2] == last for other in keys) > 1
    return f"{'.'.join(key.split('.')[-2:]) if ambiguous else last}={shown}"


def _order(arm: Arm) -> tuple[object, ...]:
    numbers = [item for item in arm.config.values() if isinstance(item, int | float)]
    return arm.is_control, arm.runs[0].label, len(numbers), numbers, arm.name
