"""The trials of a search: the best of each label, and the command that compares it afresh."""

import shlex
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean

from gradsurg.plugins.messages import printable
from gradsurg.report.load import LoadedRun, read_runs
from gradsurg.report.wording import count, title, value

NUM_SEEDS = 8
"""Seeds of the command that compares the best trial: enough for a test, and none of the trials'."""
OF_A_SEARCH = ("seed", "seeds", "force", "report")
"""Keys of a trial that its comparison does not have."""


def trials_in(folder: Path) -> list[LoadedRun]:
    """Return the runs of a study that searches have trained."""
    return [run for run in read_runs(folder) if run.search]


def trials_text(runs: Sequence[LoadedRun]) -> list[str]:
    """Return for each label two lines: its best trial, and how to compare it on other seeds."""
    trials: dict[tuple[str, ...], list[LoadedRun]] = {}
    for run in runs:
        trials.setdefault(_words_of(run), []).append(run)
    found: dict[tuple[str, str], dict[tuple[str, ...], list[LoadedRun]]] = {}
    for words, both in trials.items():
        own = [run for run in both if run.arm == "treated"] or both
        found.setdefault((own[0].label, own[0].search["metric"]), {})[words] = own
    return [line for (label, _), own in found.items() for line in _best(label, own)]


def _best(label: str, trials: Mapping[tuple[str, ...], Sequence[LoadedRun]]) -> list[str]:
    runs = [run for own in trials.values() for run in own]
    metric, lower = runs[0].search["metric"], runs[0].search["lower"]
    scores = {words: _score(own, metric, lower) for words, own in trials.items()}
    known = {words: score for words, score in scores.items() if abs(score) != inf}
    head = f"{count(len(trials), 'trial')} of {label}"
    if not known:
        return [f"{head}: none has finished"]
    best = min(known, key=lambda words: known[words] if lower else -known[words])
    others = [words for words in trials if words != best]
    chosen = [word for word in best if any(word not in words for words in others)]
    seeds = sorted({run.seed for run in runs})
    fresh = range(seeds[-1] + 1, seeds[-1] + 1 + NUM_SEEDS)
    words = [word for word in best if word != "control=none"]
    words += [f"seed=range({fresh.start},{fresh.stop})"]
    shown = f"{title(metric)} {value(metric, known[best])}, mean of {count(len(seeds), 'seed')}"
    return [
        printable(f"{head}: the best has {shown}: {' '.join(chosen) or ' '.join(best)}"),
        printable(f"to compare it on other seeds: python -m gradsurg.run -m {shlex.join(words)}"),
    ]


def _words_of(run: LoadedRun) -> tuple[str, ...]:
    return tuple(word for word in run.command if word.partition("=")[0] not in OF_A_SEARCH)


def _score(runs: Sequence[LoadedRun], metric: str, lower: bool) -> float:
    """Return the mean of a metric; the worst if a run has not finished."""
    values = [run.number(metric) if run.state == "finished" else None for run in runs]
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else (inf if lower else -inf)
