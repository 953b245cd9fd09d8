"""The gradients of several tasks, side by side: the rows J of an aggregator."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor


@dataclass
class Block:
    """Parameters of one group, one dtype and one device: their gradients, a row a task.

    `room` has a row for each of the most tasks so far, and `rows` are the first of them.
    """

    group: str
    members: list[int]
    starts: list[int]
    room: Tensor
    rows: Tensor

    def fit(self, num_tasks: int) -> None:
        """A row for each of so many tasks; what the first hold stays."""
        if len(self.room) < num_tasks:
            self.room = self.room.new_empty(num_tasks, self.room.shape[1])
            self.room[: len(self.rows)] = self.rows
        self.rows = self.room[:num_tasks]


class Rows:
    """What the backward passes of several tasks give, for each parameter and task.

    A parameter that several tasks reach, and that has a group, has its place in a block. Which
    these are is known when all tasks have come; until then those of the last time, or those that
    are expected, are taken for them, and their gradients are written into the blocks as they come.
    All others are kept as they are, in `own`; those of leaves that are no parameters in `beyond`.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], groups: Sequence[str | None]
    ) -> None:
        self.params = params
        self.names = names
        self.groups = groups
        self.blocks: list[Block] = []
        self._places: dict[int, tuple[Block, int]] = {}
        self.clear(0)

    def clear(self, num_tasks: int) -> None:
        """Nothing has come yet, of so many tasks; of none, no room is kept either."""
        self.num_tasks = num_tasks
        self.own: list[dict[int, Tensor]] = [{} for _ in range(num_tasks)]
        self.beyond: list[dict[Tensor, Tensor]] = [{} for _ in range(num_tasks)]
        self.reached: list[set[int]] = [set() for _ in range(num_tasks)]
        self._written: list[bool] = [False] * num_tasks
        for block in self.blocks:
            block.rows = block.rows[:0]
            if not num_tasks:
                block.room = block.room.new_empty(0, block.room.shape[1])
            block.fit(num_tasks)

    def grow(self, num_tasks: int) -> None:
        """More tasks come, beside those that have."""
        more = num_tasks - self.num_tasks
        self.num_tasks = num_tasks
        self.own += [{} for _ in range(more)]
        self.beyond += [{} for _ in range(more)]
        self.reached += [set() for _ in range(more)]
        self._written += [False] * more
        for block in self.blocks:
            block.fit(num_tasks)

    def expect(self, reached: Sequence[set[int]]) -> None:
        """Make room for what the tasks are said to reach, before anything has come."""
        self._lay_out(self._shared(reached))

    def add(self, task: int, grads: Sequence[Tensor | None]) -> None:
        """The gradients of one pass of a task, None for what it does not reach."""
        self.reached[task] |= {index for index, grad in enumerate(grads) if grad is not None}
        for index, grad in enumerate(grads):
            if index in self._places and (grad is None or _is_dense(grad)):
                self._write(task, index, grad)
            elif grad is not None:
                kept = self.own[task].get(index)
                self.own[task][index] = grad if kept is None else kept + grad
        self._written[task] = True

    def add_beyond(
        self, task: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """The gradients of one pass of a task of leaves that are no parameters."""
        own = self.beyond[task]
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                own[leaf] = own[leaf] + grad if leaf in own else grad

    def settle(self, strict: bool = True) -> list[str]:
        """All tasks have come: what has a group and is reached by two of them, and nothing else,
        is in the blocks. Raises TypeError for what is not dense, unless it is to be left out; the
        names of what is.
        """
        shared = self._shared(self.reached)
        left = [index for index in shared if any(index in own for own in self._odd())]
        if left and strict:
            raise TypeError(self._refusal(left[0]))
        shared = [index for index in shared if index not in left]
        if self._places.keys() != set(shared):
            self._lay_out(shared)
        return [self.names[index] for index in left]

    def by_group(self) -> dict[str, list[Block]]:
        """The blocks of each group."""
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.group, []).append(block)
        return found

    def reaching(self, blocks: Sequence[Block]) -> list[int]:
        """The tasks that reach any parameter of these blocks."""
        members = {index for block in blocks for index in block.members}
        return [task for task, own in enumerate(self.reached) if own & members]

    def merged(self, found: Mapping[int, Tensor], weights: Sequence[float]) -> dict[Tensor, Tensor]:
        """A gradient for each leaf that any task reaches, with `found` for those in blocks.

        The others get the weighed sum of what the tasks have.
        """
        grads = {self.params[index]: grad for index, grad in found.items()}
        for weight, own, beyond in zip(weights, self.own, self.beyond, strict=True):
            theirs = {self.params[index]: grad for index, grad in own.items()}
            for leaf, grad in (theirs | beyond).items():
                weighed = grad if weight == 1 else grad * weight
                grads[leaf] = grads[leaf] + weighed if leaf in grads else weighed
        return grads

    def _shared(self, reached: Sequence[set[int]]) -> list[int]:
        least = min(2, self.num_tasks)
        counts = Counter(chain.from_iterable(reached))
        found = enumerate(self.groups)
        return [index for index, group in found if group is not None and counts[index] >= least]

    def _write(self, task: int, index: int, grad: Tensor | None) -> None:
        row = self._row(task, index)
        if not self._written[task]:
            row.zero_() if grad is None else row.copy_(grad)
        elif grad is not None:
            row += grad

    def _row(self, task: int, index: int) -> Tensor:
        """Where the gradient of a parameter stands, in its shape."""
        block, start = self._places[index]
        param = self.params[index]
        return block.rows[task, start : start + param.numel()].view(param.shape)

    def _lay_out(self, shared: Sequence[int]) -> None:
        """Make the blocks anew, of these parameters, in their order: what the steps before have
        reached decides nothing.
        """
        for index in self._places:
            for task, own in enumerate(self.own):
                if index in self.reached[task] and index not in own:
                    own[index] = self._row(task, index)
        members: dict[tuple[str, torch.dtype, torch.device], list[int]] = {}
        for index in shared:
            group, param = self.groups[index], self.params[index]
            assert group is not None
            members.setdefault((group, param.dtype, param.device), []).append(index)
        self.blocks, self._places = [], {}
        for (group, _, _), indices in members.items():
            self._make(group, indices)

    def _make(self, group: str, indices: list[int]) -> None:
        sizes = [self.params[index].numel() for index in indices]
        starts = [0, *accumulate(sizes)][:-1]
        rows = self.params[indices[0]].new_empty(self.num_tasks, sum(sizes))
        block = Block(group, indices, starts, rows, rows)
        self.blocks.append(block)
        for index, start in zip(indices, starts, strict=True):
            self._places[index] = block, start
            for task, own in enumerate(self.own):
                grad = own.pop(index, None)
                if grad is not None:
                    self._row(task, index).copy_(grad)
                elif self._written[task]:
                    self._row(task, index).zero_()

    def _odd(self) -> list[dict[int, Tensor]]:
        """Of each task, what no row can hold."""
        return [{i: grad for i, grad in own.items() if not _is_dense(grad)} for own in self.own]

    def _refusal(self, index: int) -> str:
        odd = next(own[index] for own in self._odd() if index in own)
        return (
            f"parameter '{self.names[index]}': an aggregator takes dense real gradients, "
            f"found {odd.dtype} with layout {odd.layout}: select others "
            "(SharedParameters('<pattern>')), or use engine='feature'"
        )


def _is_dense(grad: Tensor) -> bool:
    return grad.layout == torch.strided and grad.is_floating_point()


def views(block: Block, params: Sequence[Tensor], flat: Tensor) -> dict[int, Tensor]:
    """The parts of a flat gradient of a block, in the shapes of its parameters."""
    return {
        index: flat[start : start + params[index].numel()].view_as(params[index])
        for index, start in zip(block.members, block.starts, strict=True)
    }
