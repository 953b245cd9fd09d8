"""The numbers that a run has reported or printed, and which of them is the outcome."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Literal

from gradsurg.experiment.errors import ConfigError
from gradsurg.plugins.messages import printable, unknown
from gradsurg.report.wording import OUTCOME
from gradsurg.script.recorder import NUMBERS, OUTPUT
from gradsurg.stats import Direction

LOG = "output.txt"
"""The file in the folder of a run with all that the script prints."""
SOURCES = ("outcome", "W&B", "TensorBoard", "Lightning", "Trainer", "JSON", "printed")
"""Where numbers come from. Of a name that has several sources the first one counts."""
HIGHER = {"acc", "accuracy", "top", "f", "auc", "auroc", "ap", "map", "precision", "recall", "dice"}
HIGHER |= {"iou", "miou", "bleu", "rouge", "em", "score", "reward", "return", "r", "elbo", "psnr"}
HIGHER |= {"ssim", "hits", "mrr", "ndcg", "mcc", "kappa", "likelihood", "win", "success"}
LOWER = {"loss", "losses", "err", "error", "mse", "mae", "rmse", "ppl", "perplexity", "nll", "bpc"}
LOWER |= {"bpb", "wer", "cer", "fid", "kl", "entropy", "regret", "ece", "brier"}
"""Words in names of metrics, without digits at the end, that say that higher or lower is better."""
HELD_OUT = {"test", "val", "valid", "validation", "eval", "evaluation", "dev", "holdout"}
TRAINING = {"train", "training"}
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)\b"
NAME = r"(?<![\w/.@-])([A-Za-z_][\w/.@-]*(?: [A-Za-z]\w*){0,2})"
PRINTED = re.compile(rf"{NAME}['\"]?\s*[:=]\s*['\"]?({NUMBER})(\s?%)?", re.IGNORECASE)
"""`name: number` and `name=number`; a name has at most three words."""
MAX_LISTED = 20


@dataclass
class Series:
    """The values of one name, with the step of each."""

    source: str
    values: list[tuple[int, float]] = field(default_factory=list)
    place: int = 0  # position of the last value among all calls and lines

    @property
    def last(self) -> float:
        return self.values[-1][1]


Seen = dict[str, Series]


def read_numbers(folder: Path, steps: int) -> Seen:
    """Return all numbers of a run of so many steps by their names."""
    seen: Seen = {}
    marks: list[tuple[int, int]] = []  # the length of the output, and the step that then ended
    path = folder / NUMBERS
    place = 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        place += 1
        try:
            row = json.loads(line)
        except ValueError:  # the process was killed as it wrote
            continue
        if OUTPUT in row:
            marks.append((row[OUTPUT], row["step"]))
        else:
            _add(seen, row["source"], row["step"], row["numbers"], place)
    marks.append((1 << 62, steps))
    log = folder / LOG
    for end, line in _lines(log.read_bytes() if log.is_file() else b""):
        place += 1
        while marks[0][0] < end:
            marks.pop(0)
        source, numbers = in_line(line)
        _add(seen, source, marks[0][1], numbers, place)
    return seen


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of an output with their ends; a bar that is redrawn has several."""
    end = 0
    for line in re.split(rb"[\r\n]", content):
        end += len(line) + 1
        if line:
            yield end, line.decode(errors="replace")


def in_line(line: str) -> tuple[str, dict[str, float]]:
    """Return the numbers in a line of output by their names, and whether it is JSON or printed."""
    if line.lstrip().startswith("{"):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and v is not True}
            return "JSON", {
                key: float(value) for key, value in numbers.items() if value is not False
            }
    if "Error" in line or "Warning" in line:
        return "printed", {}
    found = PRINTED.findall(line)
    return "printed", {
        name.strip(): float(text) / (100 if percent else 1) for name, text, percent in found
    }


def _add(seen: Seen, source: str, step: int, numbers: Mapping[str, float], place: int) -> None:
    for name, value in numbers.items():
        series = seen.get(name)
        if series is not None and series.source != source:
            if SOURCES.index(series.source) < SOURCES.index(source):
                continue
            series = None
        if series is None:
            series = seen[name] = Series(source)
        series.values.append((step, value))
        series.place = place


def direction(name: str) -> Direction | None:
    """Return the good direction of a metric by the last known word in its name."""
    for word in reversed(_words(name)):
        if word in HIGHER:
            return "higher"
        if word in LOWER:
            return "lower"
    return None


def _words(name: str) -> list[str]:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    return [word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", spaced)]


@dataclass(frozen=True)
class Metric:
    """The number by which runs are compared: the last value of a name, its largest or smallest."""

    name: str
    better: Direction
    take: Literal["last", "max", "min"] = "last"

    @classmethod
    def of(cls, text: str) -> "Metric":
        """Parse `val/acc`, `max:val/acc`, or `lower:fid`, which gives the direction.

        Raises ConfigError if the direction is not known.
        """
        first, colon, rest = text.partition(":")
        match first if colon else "":
            case "max":
                return cls(rest, "higher", "max")
            case "min":
                return cls(rest, "lower", "min")
            case "higher" | "lower" as better:
                return cls(rest, better)
        known = direction(text)
        if known is None:
            write = f"write metric=higher:{text} or metric=lower:{text}"
            raise ConfigError([f"metric: whether more {text} is better is not known: {write}"])
        return cls(text, known)

    @property
    def key(self) -> str:
        """The key of the number in a summary."""
        return f"{OUTCOME}{'' if self.take == 'last' else f'{self.take} '}{self.name}"

    def value(self, seen: Seen) -> float | None:
        """Return the number of a run; None if it has not reported it, NaN if it ends with one."""
        if self.name not in seen:
            return None
        values = [value for _, value in seen[self.name].values]
        finite = [value for value in values if isfinite(value)]
        match self.take:
            case "last":
                value = values[-1]
            case "max":
                value = max(finite, default=nan)
            case "min":
                value = min(finite, default=nan)
        return as_share(self.name, value, finite)


def as_share(name: str, value: float, values: Sequence[float]) -> float:
    """Return an accuracy as a share of 1, also if the script reports per cent."""
    return value / 100 if "accuracy" in name and max(values, default=0.0) > 1 else value


def chosen_metric(seen: Seen) -> Metric | None:
    """Return the metric that is taken without `metric=`; None if there is none.

    It belongs to the first source that has a metric with a known direction. From
    `gradsurg.outcome` it is the first number. Elsewhere it is the latest number of held-out data,
    otherwise the latest of unnamed data, otherwise the latest.
    """
    for source in SOURCES:
        names = [name for name, series in seen.items() if series.source == source]
        if source == "outcome" and names:
            better = direction(names[0])
            return Metric(names[0], better) if better else None
        known = [name for name in names if direction(name)]
        for kind in (HELD_OUT, None):
            of_kind = [name for name in known if _is_of(name, kind)]
            if of_kind:
                last = max(of_kind, key=lambda name: (seen[name].place, of_kind.index(name)))
                return Metric.of(last)
        if known:
            return Metric.of(max(known, key=lambda name: seen[name].place))
    return None


def _is_of(name: str, kind: set[str] | None) -> bool:
    words = {*_words(name)}
    return bool(words & kind) if kind is not None else not words & TRAINING


def listing(seen: Seen, taken: Metric | None) -> list[str]:
    """Return lines with the names that were seen: the source, how many values, the last one."""
    names = sorted(seen, key=lambda name: (SOURCES.index(seen[name].source), -seen[name].place))
    shown = names[:MAX_LISTED]
    width = max((len(printable(name)) for name in shown), default=0)
    lines = []
    for name in shown:
        series = seen[name]
        count = f"{len(series.values)} value{'s' if len(series.values) > 1 else ''}"
        mark = "*" if taken is not None and name == taken.name else " "
        text = f"{printable(name):{width}}  {series.source}, {count}, last {series.last:.6g}"
        lines.append(f"{mark} {text}")
    return lines + [f"  and {len(names) - MAX_LISTED} more"] * (len(names) > MAX_LISTED)


def about_taken(taken: Metric) -> str:
    """Return a sentence that says which number is taken, and how to choose another one."""
    return (
        f"metric: the last value of {taken.name} is taken, {taken.better} is better; metric=NAME "
        "takes another one, metric=max:NAME its best value"
    )


def unknown_metric(name: str, seen: Seen) -> str:
    """Return the error for a metric that a run has not reported."""
    return f"metric: {unknown(f'the script reported no {name}', name, [*seen])}"
