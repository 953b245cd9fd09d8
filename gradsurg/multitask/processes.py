"""The gradients and losses of the tasks in several processes: their means, or parts of them."""

from collections.abc import Mapping, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, distributed

from gradsurg.multitask.jacobian import Jacobian
from gradsurg.plugins.messages import shortened

MAX_LOSSES = 62
"""The losses are padded to a multiple of this number, so that differing tasks are noticed."""


def average_jacobian(
    group: "distributed.ProcessGroup", jacobian: Jacobian, losses: Mapping[str, float]
) -> dict[str, float]:
    """Replace the rows of all blocks by their means over the processes; return the mean losses.

    Raises RuntimeError in every process if the processes have different tasks, or tasks that reach
    different parameters.
    """
    reached = [sorted(of_task.intersection(jacobian.shared)) for of_task in jacobian.reached]
    means = mean_losses(group, losses, reached, jacobian.params[0].device)
    jacobian.map_shared(partial(_means, group))
    return means


def mean_losses(
    group: "distributed.ProcessGroup",
    losses: Mapping[str, float],
    reached: Sequence[Sequence[int]],
    device: torch.device,
) -> dict[str, float]:
    """Return the mean losses over the processes.

    Raises RuntimeError in every process if the processes have different tasks, or tasks that have
    `reached` different parameters.
    """
    # 20 bits: the sum of the squares of 8,192 processes is exact in float64.
    checksum = crc32(repr((list(losses), reached)).encode()) >> 12
    # Tensors of one length, so that processes with other tasks can be compared, too.
    rest = [0.0] * (-len(losses) % MAX_LOSSES)
    values = torch.tensor(
        [checksum, checksum**2, *losses.values(), *rest],
        dtype=torch.float64,
        device=device,
    )
    count = distributed.get_world_size(group)
    distributed.all_reduce(values, group=group)
    total, squares, *sums = values.tolist()
    if int(total) ** 2 != count * int(squares):  # equal only for equal checksums
        raise RuntimeError(
            "losses: give every process the same losses, found different tasks, or tasks that "
            f"reach other parameters; in this process {shortened(losses)}. Or use "
            "SharedParameters(reduce='local'), unless the parameters are sharded"
        )
    return {name: total / count for name, total in zip(losses, sums, strict=False)}


def _means(group: "distributed.ProcessGroup", grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the means of gradients, which others may hold."""
    means = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
    average(group, means)
    return means


def average(group: "distributed.ProcessGroup", tensors: Sequence[Tensor]) -> None:
    """Replace contiguous tensors by their means, with one all-reduce for each dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    count = distributed.get_world_size(group)
    for same in by_kind.values():
        flat = same[0] if len(same) == 1 else torch.cat([tensor.flatten() for tensor in same])
        flat /= count  # before the sum, which could overflow
        distributed.all_reduce(flat, group=group)
        if len(same) > 1:
            parts = flat.split([tensor.numel() for tensor in same])
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
