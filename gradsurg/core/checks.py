"""Checks of the gradients, results and states of one intervention at one site."""

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from gradsurg.core.pitfalls.autograd_grad import FunctionalGradients
from gradsurg.core.pitfalls.sparse import SparseGradient
from gradsurg.plugins.fields import in_short
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Transform, TransformState

if TYPE_CHECKING:
    from gradsurg.core.site_hook import SiteHook

WRITABLE = ("accumulated", "sent", "reduced", "backward_end", "step", "forward", "captured")
"""Stages whose results others may write to: optimizers to `.grad`, users to activations.

At these, every result of a user's transform is cloned, since the transform may still hold it."""


def check_dense(hook: "SiteHook", grad: Tensor) -> None:
    """Raise TypeError for a sparse or a complex gradient."""
    if grad.layout is not torch.strided or grad.is_complex():
        transform = hook.operation.intervention.operator
        text = f"{transform!r} takes real gradients, found {grad.dtype}"
        if not grad.is_complex():
            text = SparseGradient.text("sparse gradient", transform=transform)
        raise TypeError(f"site '{hook.entry.site}': {text}")


def check_result(
    hook: "SiteHook",
    index: int,
    grad: Tensor,
    version: int,
    result: object,
    value: Tensor | None,
    state: TransformState,
) -> Tensor:
    """Return the result, cloned if writing to it could change a tensor that the transform holds.

    Raises TypeError for a result unlike the gradient, RuntimeError if the transform has
    modified the gradient, which was at `version`, or has returned the storage of the value.
    """
    link, site = hook.operation.links[index], hook.entry.site
    if (
        not is_like(result, grad)
        or result.device != grad.device
        or result.layout is not grad.layout
    ):
        raise result_error(hook, index, grad, result)
    # PyTorch counts the writes to a tensor in place; inference tensors alone have no count.
    if autograd.version_of(grad) != version:
        raise RuntimeError(
            f"{link.label}: changed the gradient in place at site '{site}', where other "
            "branches may read it. Return a new tensor."
        )
    if value is not None and _shares_storage(result, value):
        raise RuntimeError(
            f"{link.label}: returned the storage of the value at site '{site}', which would "
            "then be the gradient too. Return a clone."
        )
    if link.is_trusted or result is grad:
        return result
    is_kept = any(_shares_storage(result, tensor) for tensor in state.values())
    return result.clone() if is_kept or hook.operation.stage in WRITABLE else result


def refuse_graph(hook: "SiteHook", index: int, grad: Tensor) -> None:
    """Raise RuntimeError if a graph of the gradient is made, whose derivative would be wrong."""
    # With create_graph, a gradient may have no graph itself (a linear loss), while the result
    # depends on the value and should have one: so grad mode in a backward pass counts too.
    # Activations have a graph without it, and so has everything under `torch.func.grad`.
    has_graph = grad.requires_grad or (torch.is_grad_enabled() and autograd.in_backward())
    if has_graph and hook.operation.stage != "forward" and not autograd.in_functorch():
        link = hook.operation.links[index]
        raise RuntimeError(
            f"{link.label}: use no create_graph=True: {link.transform!r} is not differentiable, "
            f"so a penalty on the gradient at '{hook.entry.site}' would have a wrong derivative"
        )


def check_no_state(hook: "SiteHook", transform: Transform, grad: Tensor) -> None:
    """Raise RuntimeError if the transform keeps a state: the gradient stands for many."""
    if transform.init(torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)):
        raise many_at_once(transform, hook.entry.site)


def check_state_fits(hook: "SiteHook", index: int, grad: Tensor, state: TransformState) -> None:
    """Raise ValueError if the state was made for a gradient of another shape."""
    link = hook.operation.links[index]
    # `init` shows which shapes a state for this gradient would have.
    needed, found = (
        {name: list(tensor.shape) for name, tensor in each.items()}
        for each in (link.transform.init(grad), state)
    )
    if needed != found:
        name = next(name for name in {**needed, **found} if needed.get(name) != found.get(name))
        raise ValueError(
            f"{link.label}: give batches of one size (DataLoader(drop_last=True)), attach anew or "
            f"select parameters: at '{hook.entry.site}' the gradient is {list(grad.shape)} and "
            f"needs a state '{name}' of {needed.get(name)}, found {found.get(name)}"
        )


def result_error(hook: "SiteHook", index: int, grad: Tensor, result: object) -> TypeError:
    """The error for a result of another type, shape, dtype, device or layout."""
    link, step = hook.operation.links[index], hook.contexts[index].step
    return TypeError(
        f"{link.label}: return a tensor like the gradient. At site '{hook.entry.site}', step "
        f"{step}, the gradient is {_described(grad)}, found {_described(result)}."
    )


def is_like(result: object, grad: Tensor) -> TypeGuard[Tensor]:
    """Whether a result is a tensor with the shape and dtype of the gradient."""
    return isinstance(result, Tensor) and result.shape == grad.shape and result.dtype is grad.dtype


def _shares_storage(result: Tensor, value: Tensor) -> bool:
    if autograd.is_wrapped(result) or autograd.is_wrapped(value):
        return False  # tensors of torch.func and vmap have no storage of their own
    # Empty tensors, and those on the meta device, all have the address 0.
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    return type(value).__name__


def many_at_once(stateful: object, site: str) -> RuntimeError:
    """The error for a state inside vmap, which `is_grads_batched` uses too."""
    text = FunctionalGradients.text("vmap", transform=in_short(stateful))
    return RuntimeError(f"site '{site}': {text}")
