"""Bases for `ProjectSubspace`, of the gradients or the inputs of a task that is to be kept."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsurg.torch_internals.autograd import detached
from gradsurg.transforms.project_subspace import orthonormal

Bases = dict[str, Tensor]
"""A matrix (entries, k) for each parameter, by name."""


def ogd_basis(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    before: Mapping[str, Tensor] | None = None,
) -> Bases:
    """Return an orthonormal basis of the gradients of the logit of each example's label.

    `batches` are inputs (n, ..) and labels (n,); the model returns logits (n, classes). Each
    example adds one vector over all trainable parameters; `before`, a basis of earlier tasks, is
    extended. The basis of a parameter is (entries, k), in float32 or wider, for
    `ProjectSubspace(path, vectors="group")` after `torch.save(basis, path)`.

    Orthogonal gradient descent with ground-truth logits, OGD-GTL: Farajtabar et al., AISTATS 2020
    (arXiv 1910.07104).
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    columns: list[Tensor] = []
    for inputs, labels in batches:
        for example, label in zip(inputs, labels, strict=True):
            logit = model(example[None])[0, int(label)]
            grads = torch.autograd.grad(logit, list(params.values()), materialize_grads=True)
            columns.append(torch.cat([grad.flatten() for grad in grads]))
    if before is not None:
        if missing := sorted(set(params) ^ set(before)):
            raise ValueError(f"before: must have the trainable parameters; differs in {missing}")
        columns = [*torch.cat([before[name] for name in params]).T, *columns]
    if not columns:
        raise ValueError("batches: must have an example, found none")
    joint = orthonormal(torch.stack(columns, dim=1))
    parts = joint.split([param.numel() for param in params.values()])
    return dict(zip(params, parts, strict=True))


@torch.no_grad()
def gpm_basis(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    threshold: float = 0.97,
    before: Mapping[str, Tensor] | None = None,
) -> Bases:
    """Return orthonormal bases of the inputs of each `Linear` and `Conv2d`, for their weights.

    Column i of R holds the input of one application of the weight: a row of a linear layer's input,
    or a patch. The basis is extended by the first left singular vectors of R - M Mᵀ R, M of
    `before`, until |M Mᵀ R|² + |its first k terms|² >= threshold |R|² (equation 9). The basis of a
    weight is (inputs, k), for `ProjectSubspace(path, vectors="rows")` at `*.weight` after
    `torch.save(basis, path)`.

    Gradient projection memory: Saha, Garg and Roy, ICLR 2021 (arXiv 2103.09762), algorithm 1. A
    layer that is not called keeps its basis of `before`.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: must be > 0 and <= 1, found {threshold}")
    seen: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                columns = seen.setdefault(f"{name}.weight" if name else "weight", [])
                handle = module.register_forward_pre_hook(partial(_record, columns))
                hooks.callback(handle.remove)
        for inputs in batches:
            model(inputs)
    if not seen:
        raise ValueError("model: has no Linear and no Conv2d")
    return {
        name: _extended(columns, (before or {}).get(name), threshold)
        for name, columns in seen.items()
        if columns or name in (before or {})
    }


def _record(columns: list[Tensor], module: nn.Module, args: tuple[Tensor, ...]) -> None:
    assert isinstance(module, nn.Linear | nn.Conv2d)
    columns.append(_columns(module, args[0]))


def _columns(module: nn.Linear | nn.Conv2d, inputs: Tensor) -> Tensor:
    """Return the inputs of each application of the weight, (inputs, applications)."""
    inputs = detached(inputs).float()
    if isinstance(module, nn.Linear):
        return inputs.flatten(0, -2).T
    if module.groups > 1 or isinstance(module.padding, str) or module.padding_mode != "zeros":
        raise ValueError("gpm_basis: Conv2d with groups or another padding than zeros is unknown")
    patches = functional.unfold(
        inputs,
        module.weight.shape[2:],
        dilation=module.dilation,
        padding=module.padding,
        stride=module.stride,
    )
    return patches.transpose(0, 1).flatten(1)


def _extended(inputs: list[Tensor], before: Tensor | None, threshold: float) -> Tensor:
    """Return `before` and the singular vectors that reach the threshold."""
    if not inputs and before is not None:
        return before
    columns = torch.cat(inputs, dim=1)
    total = columns.square().sum()
    basis = columns[:, :0] if before is None else before.to(columns)
    inside = basis @ (basis.T @ columns)
    left, values, _ = torch.linalg.svd(columns - inside, full_matrices=False)
    explained = torch.cat([inside.square().sum()[None], values.square()]).cumsum(0)
    enough = explained >= threshold * total * (1 - 1e-6)
    rank = int(enough.nonzero()[0]) if enough.any() else len(values)
    return orthonormal(torch.cat([basis, left[:, :rank]], dim=1))
