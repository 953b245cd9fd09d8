"""Time several ways of doing the same in turns, in one process."""

from collections.abc import Callable, Mapping
from time import process_time
from typing import TypeVar

Result = TypeVar("Result")


def in_turns(
    ways: Mapping[str, Callable[[], Result]], rounds: int, warm: int = 3
) -> dict[str, list[Result]]:
    """Return the results of each way, one a round, after rounds that warm it up.

    Every other round goes backwards, so that no way always follows the same one.
    """
    results: dict[str, list[Result]] = {name: [] for name in ways}
    for turn in range(warm + rounds):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            result = ways[name]()
            if turn >= warm:
                results[name].append(result)
    return results


def cpu_seconds(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does the work and returns the CPU time of the process for it."""

    def seconds() -> float:
        began = process_time()
        work()
        return process_time() - began

    return seconds
