"""Read, transform and write the `.grad`s of parameters, and act around steps of optimizers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.sites.contexts import refusal
from gradsurg.sites.places import Attached, Selector, SiteFn
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import Make, Params, StepActions
from gradsurg.torch_internals import autograd

Value = Callable[[], Tensor | None]

Act = Callable[[Sequence[Tensor | None]], None]
"""Transforms the `.grad`s of parameters; None stands for one that is left alone."""


def hook_steps(at: ParamSelector, attached: Attached, make: Make, joint: bool = False) -> None:
    """Run the functions that `make` returns around each step of the optimizers.

    Without `joint`, a group of parameters in several optimizers is refused.
    """

    def made(params: Params, optimizers: Sequence[Optimizer]) -> StepActions:
        if len(optimizers) > 1 and not joint:
            raise refusal(at, "several optimizers")
        is_lbfgs = any(isinstance(each, LBFGS) for each in optimizers)
        if is_lbfgs and (attached.may_skip or at.copies_params):
            raise refusal(at, "LBFGS")
        return make(params, optimizers)

    select = partial(expect_params, at, attached.model, attached, takes_shards=joint)
    attached.check_at_end(attached.steps.hook(select, made, attached.scope, attached.stack))


def write_value(
    optimizer: Optimizer | None, param: nn.Parameter, new: Tensor, keeps: Tensor | None = None
) -> None:
    """Set the value of a parameter, but not where `keeps` is True.

    Nor after a step that a fused optimizer has skipped on the device.
    """
    found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler; 1 if skipped
    if found_inf is not None:
        skipped = found_inf.to(param.device) > 0
        keeps = skipped if keeps is None else keeps | skipped
    param.copy_(new if keeps is None else torch.where(keeps, param, new))


def forget_casts() -> None:
    """Clear the cache of autocast, which holds casts of the weights before they were changed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def no_value(*_: object) -> None:
    """Return no value: none is needed, or the hook receives it in place of a gradient."""


def _grad(param: Tensor) -> Tensor | None:
    return param.grad


def _set_grad(param: Tensor, grad: Tensor) -> None:
    param.grad = grad


@dataclass(frozen=True)
class Access:
    """How hooks read a parameter and its gradient, and write a new gradient.

    `value` returns how to read a parameter, None if nobody does; `around` is entered while hooks
    run.
    """

    read: Callable[[Tensor], Tensor | None] = _grad
    write: Callable[[Tensor, Tensor], None] = _set_grad
    value: Callable[[nn.Parameter], Value] = ref
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def actor(
    params: Mapping[str, nn.Parameter],
    attached: Attached,
    access: Access,
    skip: Callable[[], None] | None = None,
) -> Act:
    """Return a function that transforms the `.grad`s of the parameters, given in this order.

    A transform of single tensors gets one after the other, a group transform all of them.
    """
    values = [access.value(param) for param in params.values()]
    if attached.scope == "group":
        group_hook = attached.group_hook([*params], values, skip=skip)

        def act(params: Sequence[Tensor | None]) -> None:
            grads = [None if param is None else access.read(param) for param in params]
            with access.around():
                results = group_hook(grads)
                if results is grads:
                    return
                del grads  # `group_hook` frees each gradient when its result is there
                for param, result in zip(params, results, strict=True):
                    if param is not None and result is not None:
                        access.write(param, result)

        return act
    hooks = [attached.hook_at(name, value) for name, value in zip(params, values, strict=True)]
    if access == Access():

        def act_on_plain(params: Sequence[Tensor | None]) -> None:
            for param, hook in zip(params, hooks, strict=True):
                # The hook may be older than the parameter, if one of its name was replaced.
                if param is not None and (result := hook(param.grad, param)) is not None:
                    param.grad = result

        return act_on_plain

    def act_on_each(params: Sequence[Tensor | None]) -> None:
        with access.around():
            for param, hook, value in zip(params, hooks, values, strict=True):
                if param is None:
                    continue
                result = hook(access.read(param), value() if access.value is ref else None)
                if result is not None:
                    access.write(param, result)

    return act_on_each


def hook_accumulated(
    params: Mapping[str, nn.Parameter], attached: Attached, access: Access
) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    for name, param in params.items():
        if access == Access() and attached.scope == "tensor":
            hook = _replacing_grad(attached.hook_at(name, ref(param)))
        else:
            hook = partial(_act_on, actor({name: param}, attached, access))
        attached.stack.callback(param.register_post_accumulate_grad_hook(hook).remove)


def _replacing_grad(hook: SiteFn) -> Callable[[Tensor], None]:
    def replace_grad(param: Tensor) -> None:
        result = hook(param.grad)
        if result is not None:
            param.grad = result

    return replace_grad


def _act_on(act: Act, param: Tensor) -> None:
    act([param])


# Parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.


def access_to(selector: Selector, params: Mapping[str, nn.Parameter], attached: Attached) -> Access:
    """Return how to read and write the `.grad`s: as they are, their parts, or gathered.

    Processes communicate at `step`, where all decide alike; not at `accumulated`.
    """
    sharded = [cast(Any, param) for param in params.values() if autograd.is_sharded(param)]
    if not sharded:
        return Access()
    meshes = {param.device_mesh for param in sharded}
    for mesh in meshes:
        if mesh.ndim != 1:
            raise refusal(selector, "FSDP2, meshes", ndim=mesh.ndim)
    mesh = sharded[0].device_mesh
    if attached.stateful:
        processes = mesh.size()
        made = int(attached.state("#parts").setdefault("processes", torch.tensor(processes)))
        if made != processes:
            raise refusal(selector, "FSDP2, resumed", made=made, found=processes)
    are_alike = len(meshes) == 1 and len(sharded) == len(params)
    by_parts = attached.acts_on_shards and are_alike
    if by_parts and not (attached.varies and attached.stage == "accumulated"):
        sizes = {name: param.numel() for name, param in params.items()}
        around = partial(attached.on_shards, mesh.get_group(), sizes)
        return Access(_part, _write_part, _no_reader, around)
    if attached.stage == "accumulated":
        reason = attached.varies or "the transform or its trigger needs whole gradients"
        raise refusal(selector, "FSDP2, accumulated", reason=reason)
    attached.note("it needs whole gradients: those of sharded parameters were gathered")
    return Access(_whole_grad, _write_share, _late_value if attached.needs_value else _no_reader)


def _no_reader(param: nn.Parameter) -> Value:
    return no_value


def _late_value(param: nn.Parameter) -> Value:
    held = ref(param)

    def value() -> Tensor | None:
        param = held()
        return None if param is None else _whole(param.detach())

    return value


def _whole(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).full_tensor() if autograd.is_sharded(tensor) else tensor


def _whole_grad(param: Tensor) -> Tensor | None:
    return None if param.grad is None else _whole(param.grad)


def _part(param: Tensor) -> Tensor | None:
    return None if param.grad is None else cast(Any, param.grad).to_local()


def _write_part(param: Tensor, part: Tensor) -> None:
    """Set the sharded gradient of which this process has `part`."""
    param.grad = autograd.sharded(part, param.grad)


def _write_share(param: Tensor, whole: Tensor) -> None:
    """Set the gradient, and keep the part of it that is of this process."""
    like = cast(Any, param.grad)
    if not autograd.is_sharded(like):
        param.grad = whole
        return
    (placement,), rank = like.placements, like.device_mesh.get_local_rank()
    parts = whole.chunk(like.device_mesh.size(), placement.dim)
    part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    _write_part(param, part)
