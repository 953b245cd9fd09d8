"""The page's section about the experiment: plug-ins, the command that repeats it, versions."""

import shlex
from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

from gradsurg.report.arms import NAMES, value_text
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import Study

GROUPS = (
    "script",
    "task",
    "model",
    "optimizer",
    "schedule",
    "transform",
    "aggregator",
    "site",
    "when",
)
PLAIN_VALUES = (None, "*", "", {}, [])
TRAINING = {
    "steps": "{} steps",
    "batch_size": "batches of {}",
    "accumulate": "accumulate {}",
    "precision": "precision {}",
}
USUAL = {"schedule": "constant", "site": "parameters", "when": "steps: start 0; every 1"}
USUAL |= {"accumulate": "1", "precision": "float32"}
"""Texts that a reader takes for granted."""
MAX_COMMANDS = 4
NO_COMMAND = (
    "not recorded by the version that trained these runs; each run's config.yaml is complete"
)
Config = Mapping[str, Any]  # Any: YAML's values


def experiment(study: Study) -> list[tuple[str, str]]:
    """Return names and texts: each plug-in with its numbers, training, command, versions, hardware.

    Where runs differ, all values.
    """
    runs = study.all_runs
    treated = [run for run in runs if run.arm != "control" and run.config] or runs
    configs = [run.config for run in treated if run.config]
    if not configs:
        return []
    texts = {key: _plugin(configs, key) for key in GROUPS}
    facts = [(key, text) for key, text in texts.items() if text not in ("", USUAL.get(key))]
    seeds = sorted({run.seed for run in runs if run.seed >= 0})
    span = len(seeds) > 2 and seeds == [*range(seeds[0], seeds[-1] + 1)]
    named = f"{seeds[0]} to {seeds[-1]}" if span else ", ".join(map(str, seeds))
    texts = {key: _values(configs, key) for key in TRAINING}
    length = [
        TRAINING[key].format(text)
        for key, text in texts.items()
        if text not in ("", USUAL.get(key))
    ]
    facts.append(("training", ", ".join([*length, f"seeds {named}"])))
    facts += [("command", line) for line in commands(treated) or [NO_COMMAND]]
    made = dict.fromkeys(f"{key} {item}" for run in runs for key, item in run.made_with.items())
    facts += [("versions", ", ".join(made))] * bool(made)
    ended = [run.summary for run in runs if run.summary]
    places = dict.fromkeys(str(summary.get("hardware") or "") for summary in ended)
    return facts + [("hardware", place) for place in places if place]


def _plugin(configs: Sequence[Config], key: str) -> str:
    """`clip: value 0.01, 0.1` for the options of a group, with all their settings."""
    items = [config[key] for config in configs if config.get(key)]
    if key == "transform":
        by_item = (item.values() if isinstance(item, Mapping) else [item] for item in items)
        items = [fields for values in by_item for fields in values]
    by_name: dict[str, list[Config]] = {}
    for item in items:
        fields = item if isinstance(item, Mapping) else {"name": item}
        name = str(fields.get("name") or fields.get("_target_", ""))
        by_name.setdefault(name, []).append(fields)
    texts = []
    for name, options in by_name.items():
        keys = dict.fromkeys(key for fields in options for key in fields if key not in NAMES)
        numbers = [f"{key} {text}" for key in keys if (text := _values(options, key))]
        texts.append(f"{name}: {'; '.join(numbers)}" if numbers else name)
    return ", or ".join(filter(None, texts))


def _values(configs: Sequence[Config], key: str) -> str:
    values = [config.get(key) for config in configs]
    texts = dict.fromkeys(value_text(one) for one in values if one not in PLAIN_VALUES)
    return ", ".join(sorted(texts, key=_numeric))


def _numeric(text: str) -> tuple[float, str]:
    """The place of a value among others: numbers by their size."""
    try:
        return float(text), ""
    except ValueError:
        return inf, text


LATER = ("seeds=", "splits=")


def commands(runs: Sequence[LoadedRun]) -> list[str]:
    """Return the commands that repeat these runs; one of a sweep, if its jobs are all there."""
    given = (tuple(word for word in run.command if word != "force=true") for run in runs)
    jobs = list(dict.fromkeys(words for words in given if words))
    keys = [[word.partition("=")[0] for word in job] for job in jobs]
    values = [list(dict.fromkeys(words)) for words in zip(*jobs, strict=False)]
    alike = all(one == keys[0] for one in keys) and prod(map(len, values)) == len(jobs)
    # other seeds were asked for by another command, after a look
    alike = alike and all(len(words) == 1 for words in values if words[0].startswith(LATER))
    alike = alike and not any("--" in job for job in jobs)  # a script has no sweeps
    if len(jobs) > 1 and alike:
        joined = [
            f"{key}={','.join(sorted((word.partition('=')[2] for word in words), key=_numeric))}"
            for key, words in zip(keys[0], values, strict=True)
        ]
        jobs = [("-m", *joined)]
    lines = [
        shlex.join(["python", "-m", f"gradsurg.{'script' if '--' in job else 'run'}", *job])
        for job in jobs[:MAX_COMMANDS]
    ]
    more = f"and {len(jobs) - MAX_COMMANDS} more, of the other arms"
    return [*lines, *[more] * (len(jobs) > MAX_COMMANDS)]
