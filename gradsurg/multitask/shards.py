"""Parameters of `fully_shard`: each process has a part of the averaged gradient of every task."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, distributed

from gradsurg.aggregators.base import (
    Aggregator,
    Entrywise,
    GramianAggregator,
    LossWeighting,
    NormMatchedSum,
)
from gradsurg.core.pitfalls import refusal
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.torch_internals.autograd import is_sharded, sharded
from gradsurg.torch_internals.hook_tables import accumulate_hooks, set_accumulate_hooks


def group_of(
    params: Iterable[Tensor], at: SharedParameters, aggregator: Aggregator | None = None
) -> "distributed.ProcessGroup | None":
    """Return the processes that have the parts of the parameters, None if these are whole.

    Raises TypeError if the update cannot be computed by parts, for a kind of sharding or of
    aggregator.
    """
    params = [param for param in params if param.requires_grad]
    meshes = {cast(Any, param).device_mesh for param in params if is_sharded(param)}
    if not meshes:
        return None
    inner = aggregator.of if isinstance(aggregator, NormMatchedSum) else aggregator
    reads_rows = not isinstance(inner, GramianAggregator | LossWeighting | Entrywise | None)
    is_mixed = not all(map(is_sharded, params))
    several = len(meshes) > 1 or next(iter(meshes)).ndim > 1
    for is_here, advice, reason in (
        (is_mixed, "shard all parameters", "some parameters are not sharded"),
        (several, "shard all over one mesh of one dimension", "the parameters have several"),
        (at.engine == "feature", "use engine='full'", "engine='feature' needs whole parameters"),
        (at.reduce == "local", "use reduce='mean'", "reduce='local' needs whole gradients"),
        (reads_rows, "use another aggregator", f"{type(inner).__name__} reads whole rows"),
    ):
        if is_here:
            raise refusal(at, "FSDP2, aggregators", advice=advice, reason=reason)
    return next(iter(meshes)).get_group()


def part_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has; all of it if it is not sharded."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def task_gradients(
    loss: Tensor, params: Sequence[Tensor], retain_graph: bool
) -> list[Tensor | None]:
    """Return the part of the averaged gradient of a loss for each parameter.

    `autograd.grad` reaches other tensors than the sharded parameters, so the gradients are taken
    from `.grad`, without the hooks that wait for the gradient of the step.
    """
    before = [(param.grad, accumulate_hooks(param)) for param in params]
    for param in params:
        param.grad = None
        set_accumulate_hooks(param, None)
    try:
        torch.autograd.backward(loss, retain_graph=retain_graph)
        return [None if param.grad is None else part_of(param.grad) for param in params]
    finally:
        for param, (grad, hooks) in zip(params, before, strict=True):
            param.grad = grad
            set_accumulate_hooks(param, hooks)


def accumulate_parts(parts: Mapping[Tensor, Tensor]) -> None:
    """Add to each parameter's `.grad`, of which this process has a part, and run its hooks."""
    # Like `fully_shard`, which sets `.grad` and calls these hooks itself, and no other hooks.
    for param, part in parts.items():
        grad = sharded(part, param)
        param.grad = grad if param.grad is None else param.grad + grad
        for hook in [*(accumulate_hooks(param) or {}).values()]:
            hook(param)
