"""The gradients of several tasks, side by side: the rows J of an aggregator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Block:
    """Parameters of one group, one dtype and one device: their gradients, a row a task."""

    group: str
    members: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.empty(0, 0))


class Rows:
    """What the backward passes of several tasks give, for each parameter and task.

    A parameter that several tasks reach, and that has a group, has its place in a block; its
    gradients are written there as they come. All others are kept as they are, in `own`. The first
    time nobody knows which those are: what is shared moves to its block when all have come.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], groups: Sequence[str | None]
    ) -> None:
        self.params = params
        self.names = names
        self.groups = groups
        self.blocks: dict[tuple[str, torch.dtype, torch.device], Block] = {}
        self.places: dict[int, tuple[Block, int]] = {}
        self.clear(0)

    def clear(self, num_tasks: int) -> None:
        """Nothing has come yet, of so many tasks."""
        self.num_tasks = num_tasks
        self.own: list[dict[int, Tensor]] = [{} for _ in range(num_tasks)]
        self.reached: list[set[int]] = [set() for _ in range(num_tasks)]
        self._written: list[bool] = [False] * num_tasks
        for block in self.blocks.values():
            if len(block.rows) != num_tasks:
                block.rows = block.rows.new_empty(num_tasks, block.rows.shape[1])

    def add(self, task: int, grads: Sequence[Tensor | None]) -> None:
        """The gradients of one pass of a task, None for what it does not reach."""
        for index, grad in enumerate(grads):
            if grad is not None:
                self._check(index, grad)
                self.reached[task].add(index)
            place = self.places.get(index)
            if place is None:
                if grad is not None:
                    kept = self.own[task].get(index)
                    self.own[task][index] = grad if kept is None else kept + grad
                continue
            block, start = place
            row = block.rows[task, start : start + self.params[index].numel()]
            if not self._written[task]:
                row.zero_() if grad is None else row.copy_(grad.reshape(-1))
            elif grad is not None:
                row += grad.reshape(-1)
        self._written[task] = True

    def settle(self) -> None:
        """All tasks have come: give a place to what is shared and has none yet."""
        least = min(2, self.num_tasks)
        newcomers: dict[tuple[str, torch.dtype, torch.device], list[int]] = {}
        for index, (param, group) in enumerate(zip(self.params, self.groups, strict=True)):
            count = sum(index in own for own in self.own)
            if group is not None and count >= least and index not in self.places:
                newcomers.setdefault((group, param.dtype, param.device), []).append(index)
        for key, indices in newcomers.items():
            self._move(self.blocks.setdefault(key, Block(key[0])), indices)

    def _move(self, block: Block, indices: Sequence[int]) -> None:
        start = block.rows.shape[1] if block.members else 0
        size = start + sum(self.params[index].numel() for index in indices)
        rows = self.params[indices[0]].new_zeros(self.num_tasks, size)
        if start:
            rows[:, :start] = block.rows
        for index in indices:
            stop = start + self.params[index].numel()
            for row, own in zip(rows, self.own, strict=True):
                grad = own.pop(index, None)
                if grad is not None:
                    row[start:stop] = grad.reshape(-1)
            block.members.append(index)
            block.starts.append(start)
            self.places[index] = block, start
            start = stop
        block.rows = rows

    def by_group(self) -> dict[str, list[Block]]:
        """The blocks of each group."""
        found: dict[str, list[Block]] = {}
        for block in self.blocks.values():
            found.setdefault(block.group, []).append(block)
        return found

    def reaching(self, blocks: Sequence[Block]) -> list[int]:
        """The tasks that reach any parameter of these blocks."""
        members = {index for block in blocks for index in block.members}
        return [task for task, own in enumerate(self.reached) if own & members]

    def merged(self, found: Mapping[int, Tensor], weights: Sequence[float]) -> dict[int, Tensor]:
        """A gradient for each parameter that any task reaches, with `found` for those in blocks.

        The others get the weighed sum of what the tasks have.
        """
        grads = dict(found)
        for weight, own in zip(weights, self.own, strict=True):
            for index, grad in own.items():
                weighed = grad if weight == 1 else grad * weight
                grads[index] = grads[index] + weighed if index in grads else weighed
        return grads

    def _check(self, index: int, grad: Tensor) -> None:
        if grad.layout != torch.strided or not grad.is_floating_point():
            raise TypeError(
                f"parameter '{self.names[index]}': an aggregator takes dense real gradients, "
                f"found {grad.dtype} with layout {grad.layout}"
            )


def views(block: Block, params: Sequence[Tensor], flat: Tensor) -> dict[int, Tensor]:
    """The parts of a flat gradient of a block, in the shapes of its parameters."""
    return {
        index: flat[start : start + params[index].numel()].view_as(params[index])
        for index, start in zip(block.members, block.starts, strict=True)
    }
