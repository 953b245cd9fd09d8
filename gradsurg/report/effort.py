"""What a study has cost: on what its runs were trained, and for how long."""

from collections import Counter
from collections.abc import Sequence

from gradsurg.report.reading import Found
from gradsurg.report.wording import count


def effort(runs: Sequence[Found]) -> list[str]:
    """Training time and hardware, a sentence each, with how many runs they are of."""
    ended = [run.summary for run in runs if run.summary]
    times = [summary["time/train_s"] for summary in ended if summary.get("time/train_s")]
    said = []
    if times:
        of = count(len(times), "run") if len(times) == len(runs) else _of(len(times), len(runs))
        said.append(f"Trained for {duration(sum(times))} in all ({of}).")
    places = Counter(str(summary["hardware"]) for summary in ended if summary.get("hardware"))
    if len(places) == 1:
        said.append(f"Hardware: {next(iter(places))}.")
    elif places:
        shown = [f"{place} ({count(number, 'run')})" for place, number in places.most_common()]
        said.append(f"Hardware: {'; '.join(shown)}.")
    return said


def duration(seconds: float) -> str:
    """`3.2 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _of(number: int, runs: int) -> str:
    return f"{number} of {count(runs, 'run')}"
