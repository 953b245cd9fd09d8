"""Arms and blocks: the runs of a study grouped by their configs, and the names of the groups."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from gradsurg.experiment.run_directory import CONFIG
from gradsurg.report.load import LoadedRun, canonical

ABOUT_SURGERY = ("transform", "site", "when", "order", "control", "aggregator", "sources")
UNSAID = ("seed", "gradsurg", "order", "sources")
"""Keys that no name tells: they repeat others, or would not be understood."""
NAMES = ("name", "_target_")
"""Keys of a plug-in and of a dotted path, whose values are shown alone."""
SPLIT = "split_seed"


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but their seed and their split, in the seeds' order."""

    name: str
    runs: tuple[LoadedRun, ...]
    config: Mapping[str, object]

    @property
    def is_control(self) -> bool:
        return self.runs[0].arm == "control"

    @property
    def whole(self) -> list[LoadedRun]:
        """The finished runs, the only runs that are averaged."""
        return [run for run in self.runs if run.state == "finished" and run.summary]

    @property
    def at_chance(self) -> list[LoadedRun]:
        """The finished runs that are no better than chance, by the evidence in their summaries."""
        return [run for run in self.whole if (run.summary or {}).get("learned_nothing")]

    @property
    def is_at_chance(self) -> bool:
        """Whether most finished runs are no better than chance."""
        return 2 * len(self.at_chance) > len(self.whole)


def block_names(runs: Sequence[LoadedRun]) -> dict[str, str]:
    """Return the block of each run, such as `split 3`; empty names if there is one split only."""
    splits = {run.name: split_of(run) for run in runs}
    several = len({*splits.values()} - {None}) > 1
    return {
        name: f"split {split}" if several and split is not None else ""
        for name, split in splits.items()
    }


def split_of(run: LoadedRun) -> int | None:
    """Return the seed of the split into training and test data; None without one."""
    task = (run.config or {}).get("task")
    return task.get(SPLIT) if isinstance(task, Mapping) else None


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the seeds of a run and of its split. Any: YAML's values."""
    kept = {key: item for key, item in config.items() if key != "seed"}
    if isinstance(kept.get("task"), Mapping):
        kept["task"] = {key: item for key, item in kept["task"].items() if key != SPLIT}
    return kept


def group(runs: Sequence[LoadedRun], tuned: Collection[str] = ()) -> list[Arm]:
    """The arms of a study, treated arms first, each with a distinct name.

    Splits are drawn, and runs that differ in their split are of one arm. Tasks and models are
    chosen, and each has arms of its own. Values of `tuned` keys are the result of a choice, and in
    no name.
    """
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        groups.setdefault(_arm_key(run), []).append(run)
    # Arms that differ in a user's code alone are numbered: in the order of time.
    in_time = sorted(groups.values(), key=lambda group: min(map(_planned_at, group)))
    members = [tuple(sorted(group, key=lambda run: (run.seed, run.name))) for group in in_time]
    configs = [flat(group[0].config or {}) for group in members]
    told = [flat(_without_seeds(group[0].config or {})) for group in members]
    told = [{key: item for key, item in one.items() if key not in tuned} for one in told]
    names = _names([_called(group[0]) for group in members], told)
    arms = [Arm(*parts) for parts in zip(names, members, configs, strict=True)]
    return sorted(arms, key=_order)


def _arm_key(run: LoadedRun) -> str:
    if not run.config:
        return f"{run.label or run.name} without a config"
    return canonical(_without_seeds(run.config))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:  # Any: YAML's values
    """A nested config as dotted keys."""
    items: dict[str, object] = {}
    for key, item in config.items():
        if isinstance(item, Mapping):
            items |= flat(item, f"{prefix}{key}.")
        else:
            items[f"{prefix}{key}"] = item
    return items


def _called(run: LoadedRun) -> str:
    if run.state == "missing":
        return "control (not there)"
    if run.arm == "control":
        return "control" if run.label == "none" else run.label
    return run.label


def _names(labels: list[str], configs: list[dict[str, object]]) -> list[str]:
    """Return each label with the values that distinguish its arm: `clip 0.03, Adam`."""
    shared = _telling(configs, about_surgery=False)
    alike: dict[str, list[dict[str, object]]] = {}
    for label, config in zip(labels, configs, strict=True):
        alike.setdefault(label, []).append(config)
    telling = {label: _telling(same, about_surgery=True) for label, same in alike.items()}
    names = []
    for label, config in zip(labels, configs, strict=True):
        keys = telling[label]
        if len(keys) == 1 and _is_dose(keys[0], label, config):
            first, keys = f"{label} {value_text(config[keys[0]])}", []
        else:
            first = label
        keys = [*keys, *shared]
        told = [_key_text(key, keys, config) for key in keys if config.get(key) is not None]
        names.append(", ".join([first, *told]))
    # what still has no name of its own gets a number
    repeats: dict[str, int] = {}
    for place, name in enumerate(names):
        repeats[name] = repeats.get(name, 0) + 1
        if repeats[name] > 1:
            names[place] = f"{name} #{repeats[name]}"
    return names


def _is_dose(key: str, label: str, config: Mapping[str, object]) -> bool:
    """Whether the key is a number of the transform or aggregator that the label names."""
    group, *middle = key.split(".")[:-1]
    number = isinstance(config.get(key), int | float) and not isinstance(config.get(key), bool)
    return number and (group == "aggregator" or [group, *middle] == ["transform", label])


def _planned_at(run: LoadedRun) -> float:
    try:
        return (run.path / CONFIG).stat().st_mtime
    except OSError:  # the run is missing
        return inf


def _telling(configs: list[dict[str, object]], about_surgery: bool) -> list[str]:
    """The keys whose values differ.

    A nested key that some configs lack counts only if the others differ. A key whose value follows
    from the name beside it, such as Adam's own learning rate, does not count.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = []
    for key in keys:
        top, _, rest = key.partition(".")
        if top in UNSAID or (top in ABOUT_SURGERY) != about_surgery:
            continue
        having = [config for config in configs if key in config]
        values = {repr(config[key]) for config in having}
        missing = len(having) < len([config for config in configs if config])
        beside = f"{key.rpartition('.')[0]}.name"
        pairs = {(repr(config.get(beside)), repr(config[key])) for config in having}
        named = key != beside and rest and len(pairs) == len({name for name, _ in pairs})
        unlike = rest in NAMES and any(
            key not in config and f"{top}.{other}" in config
            for config in configs
            for other in NAMES
        )
        if (len(values) > 1 and not named) or (missing and not rest) or unlike:
            differing.append(key)
    return sorted(differing, key=lambda key: not _is_name(key))


def _is_name(key: str) -> bool:
    return key.rpartition(".")[2] in NAMES


def _key_text(key: str, keys: Sequence[str], config: Mapping[str, object]) -> str:
    """`mlp` for a name, otherwise the key's last part and the value: `value=0.01`."""
    if _is_name(key):
        return value_text(config[key])
    last = key.rpartition(".")[2]
    ambiguous = sum(other.rpartition(".")[2] == last for other in keys) > 1
    return f"{'.'.join(key.split('.')[-2:]) if ambiguous else last}={value_text(config[key])}"


def value_text(value: object) -> str:
    """A value of a config as a user writes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _order(arm: Arm) -> tuple[object, ...]:
    numbers = [item for item in arm.config.values() if isinstance(item, int | float)]
    return arm.is_control, arm.runs[0].label, len(numbers), numbers, arm.name
