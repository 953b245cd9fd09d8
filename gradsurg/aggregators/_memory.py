"""Which of the losses are memories of earlier data, by name or by their order."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.messages import unknown

UNSHOWN = ("memory", "decay")
Order = NDArray[np.int64]


def places(aggregator: object, memory: Sequence[str], tasks: Sequence[str], count: int) -> Order:
    """Return the place of each of `count` rows: 0 for the current data, then the memories.

    Without names of memories, the first row is the current data. Raises FieldError if the call has
    no task names, or if more than one task is not named.
    """
    if not memory:
        return np.arange(count)
    if not tasks:
        text = (
            "is by name, and the call has no task names: use live.backward(losses), or pass "
            "AggregatorContext(tasks=...)"
        )
        raise FieldError(aggregator, [("memory", text)])
    current = [name for name in tasks if name not in memory]
    if len(current) > 1:
        wrong = [name for name in memory if name not in tasks]
        text = f"must name all losses but one, {', '.join(current)} are not named"
        if wrong:
            text = unknown(f"there is no loss '{wrong[0]}'", wrong[0], tasks)
        raise FieldError(aggregator, [("memory", text)])
    memories = iter(range(1, count + 1))
    return np.array([0 if name in current else next(memories) for name in tasks])


def memories(aggregator: object, memory: Sequence[str], tasks: Sequence[str]) -> Sequence[int]:
    """Return the indices of the memories among the tasks. Raises FieldError like `places`."""
    return np.flatnonzero(places(aggregator, memory, tasks, len(tasks))).tolist()


def order_note(memory: Sequence[str], tasks: Sequence[str]) -> str:
    """Return a note if the order of named losses decides which are memories; otherwise empty.

    Also empty if the names say the same: all but the first, and only these, begin with `memory`.
    """
    has_names = list(tasks) != [str(place) for place in range(len(tasks))]
    agree = all(name.startswith("memory") == (place > 0) for place, name in enumerate(tasks))
    if memory or len(tasks) < 2 or not has_names or agree:
        return ""
    first, *others = [f"'{name}'" for name in tasks]
    roles = "the last loss, is the memory" if len(others) == 1 else "the later losses, are memories"
    return (
        f"{', '.join(others)}, {roles}, and {first}, the first, the current data, by their order. "
        "To choose by name, set memory"
    )


def shown(aggregator: Any) -> str:  # Any: an instance of a dataclass
    """Return the repr without an unset `memory` or `decay`; states are identified by it."""
    values = {field.name: getattr(aggregator, field.name) for field in fields(aggregator)}
    parts = [f"{name}={value!r}" for name, value in values.items() if value or name not in UNSHOWN]
    return f"{type(aggregator).__name__}({', '.join(parts)})"
