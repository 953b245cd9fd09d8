"""Which tasks reach what an aggregator has."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from gradsurg.multitask.rows import Block, Rows


def reaching(rows: Rows, blocks: Sequence[Block]) -> tuple[list[int], list[Tensor]]:
    """The tasks that reach a group, and their rows of each of its blocks."""
    tasks = rows.reaching(blocks)
    if len(tasks) == rows.num_tasks:
        return tasks, [block.rows for block in blocks]
    return tasks, [block.rows[tasks] for block in blocks]


def meeting(given: Mapping[str, Tensor], parts: Sequence[Sequence[Tensor | None]]) -> list[int]:
    """The tasks with a gradient where they part. Raises ValueError if there are no two of several,
    or none.
    """
    tasks = [task for task, own in enumerate(parts) if any(grad is not None for grad in own)]
    if len(tasks) < min(2, len(given)):
        names = list(given)
        said = ", ".join(names[task] for task in tasks) or "none"
        raise ValueError(
            f"losses: of {', '.join(names)} the representation has a gradient of {said} alone, so "
            "there is nothing to make one of"
        )
    return tasks


def had_alone(rows: Rows) -> dict[int, str]:
    """Of each task, a parameter that others reach as well, but with gradients of zero alone."""
    found: dict[int, str] = {}
    for block in rows.blocks:
        sizes = [rows.params[index].numel() for index in block.members]
        for index, part in zip(block.members, block.rows.split(sizes, dim=1), strict=True):
            tasks = part.any(dim=1).nonzero().flatten().tolist()
            if len(tasks) == 1:
                found.setdefault(tasks[0], rows.names[index])
    return found


def some(losses: Mapping[str, float], tasks: Sequence[int]) -> dict[str, float]:
    """The losses of these tasks."""
    items = list(losses.items())
    return dict(items[task] for task in tasks)


def nothing_shared(rows: Rows, given: Iterable[str]) -> ValueError:
    """That no two tasks meet, and how many parameters each reaches."""
    counts = zip(given, rows.reached, strict=True)
    said = ", ".join(f"{name} reaches {len(own)}" for name, own in counts)
    return ValueError(
        "losses: no parameter that an aggregator has is reached by two tasks, so there is nothing "
        f"to make one of; of all {len(rows.params)} parameters {said}"
    )
