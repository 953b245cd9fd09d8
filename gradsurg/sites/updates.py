"""Updates: the change that the optimizer makes to each parameter in a step."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, Stage
from gradsurg.sites.contexts import refusal
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import Params, StepActions
from gradsurg.transforms.base import Need
from gradsurg.transforms.norm_matched import norm_matched


@validated
class Updates(ParamSelector):
    """The updates of the parameters whose name fits `pattern`, a glob or `re:`.

    Stage `step`: u = (value after the optimizer's step) - (value before it), with learning rate,
    momentum and weight decay in it. The transform gets u, with the value before the step as
    `context.value` and the gradient that the optimizer used as `context.gradient`. The parameter
    becomes the value before the step + T(u). An entry of u that T leaves as it is keeps the bits
    that the optimizer wrote. The state of the optimizer, as its momentum, is not changed.

    The fields select as those of `Parameters`; a frozen parameter is skipped and reported in the
    ledger, one without a gradient is left alone. With a closure the gradient is that of its last
    call. LBFGS is refused: it computes curvature from its own updates. Where a `GradScaler` skips
    a step, or a fused optimizer does so on the device, nothing is changed. A copy of the selected
    parameters exists during each step.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step",)
    changes: ClassVar[str] = "updates"
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    copies_params: ClassVar[bool] = True

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "gradient"})

    def hook(self, attached: Attached) -> None:
        _hook_steps(self, attached, _updates_actions)


@validated
class MatchedUpdates(ParamSelector):
    """The updates of the selected parameters, each rescaled to the norm of a treated update.

    The site of the control `update_norm_matched`. Stage `step`: the transform T gets each gradient
    g that the optimizer is about to use; its result goes to a second optimizer alone, of the same
    class and settings and with a state of its own, which steps from the same values. With u the
    optimizer's update from g and v the second optimizer's from T(g), the parameter becomes the
    value before the step + u |v| / |u|. Where v equals u, nothing is changed, bit for bit; where u
    is zero, so is the result.

    In steps in which the trigger does not fire the second optimizer gets g. Its state is part of
    the surgery's `state_dict`; it and the copies of the parameters double the optimizer's memory.
    LBFGS is refused, and an optimizer whose state holds anything but tensors.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step",)
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    copies_params: ClassVar[bool] = True

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "examples"})

    def hook(self, attached: Attached) -> None:
        _hook_steps(self, attached, _matched_actions)


Make = Callable[[Attached, Params, Optimizer], StepActions]


def _hook_steps(selector: ParamSelector, attached: Attached, make: Make) -> None:
    def make_actions(params: Params, optimizers: Sequence[Optimizer]) -> StepActions:
        if len(optimizers) > 1:
            raise refusal(selector, "several optimizers")
        if isinstance(optimizers[0], LBFGS):
            raise refusal(selector, "LBFGS")
        return make(attached, params, optimizers[0])

    select = partial(expect_params, selector, attached.model, attached)
    steps, scope, stack = attached.steps, attached.scope, attached.stack
    attached.check_at_end(steps.hook(select, make_actions, scope, stack))


def _updates_actions(attached: Attached, params: Params, optimizer: Optimizer) -> StepActions:
    held = [*params.values()]
    before: list[Tensor] = []  # the values; empty except during a step
    values = [partial(_value, before, index) for index in range(len(held))]
    gradients = [partial(_gradient, param) for param in held]
    group_hook = attached.group_hook([*params], values, gradients)

    def copy_values() -> None:
        before[:] = _copies(held)

    @torch.no_grad()
    def write_updates() -> None:
        if not before:  # attached during the step
            return
        updates = [
            None if param.grad is None else param - value
            for param, value in zip(held, before, strict=True)
        ]
        # A fused optimizer has skipped the step on the device if it is 1.
        found_inf = getattr(optimizer, "found_inf", None)
        rows = zip(held, before, updates, group_hook([*updates]), strict=True)
        for param, value, update, result in rows:
            if update is None or result is None or result is update:
                continue
            keeps = result == update  # before + (after - before) is rounded, and is not `after`
            if found_inf is not None:
                keeps |= found_inf.to(keeps.device) > 0
            param.copy_(torch.where(keeps, param, value + result))
        forget_casts()
        before.clear()

    return StepActions(begin=copy_values, after=write_updates)


def _value(values: Sequence[Tensor], index: int) -> Tensor | None:
    return values[index] if values else None


def _gradient(param: nn.Parameter) -> Tensor | None:
    grad = param.grad
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def _matched_actions(attached: Attached, params: Params, optimizer: Optimizer) -> StepActions:
    before: dict[str, Tensor] = {}  # the values; empty except during a step
    treated: dict[str, Tensor] = {}  # the gradients
    values = [ref(param) for param in params.values()]
    group_hook = attached.group_hook([*params], values)
    key = f"optimizer{attached.steps.optimizers.index(optimizer)}"

    def copy_values() -> None:
        before.update(zip(params, _copies(params.values()), strict=True))

    def treat() -> None:
        grads = [param.grad for param in params.values()]
        results = zip(params, group_hook(grads), strict=True)
        treated.clear()
        treated.update({name: grad.detach() for name, grad in results if grad is not None})

    @torch.no_grad()
    def match() -> None:
        if before and treated:  # else attached during the step
            copies = {name: before[name].clone() for name in treated}
            for name, copied in copies.items():
                copied.grad = treated[name]
            _step_second(optimizer, params, copies, attached.state(key))
            for name, copied in copies.items():
                param, update = params[name], params[name] - before[name]
                wanted = copied - before[name]
                keeps = (wanted == update).all()  # before + (after - before) is rounded
                new = before[name] + norm_matched(update, wanted)
                param.copy_(torch.where(keeps, param, new))
            forget_casts()
        before.clear()

    return StepActions(copy_values, treat, match)


def _step_second(
    optimizer: Optimizer, params: Params, copies: Mapping[str, Tensor], state: dict[str, Tensor]
) -> None:
    """Step the second optimizer, which has `state`, on copies of the parameters by their names."""
    second = copy.copy(optimizer)  # without hooks, as Optimizer.__getstate__ leaves out
    for attribute in ("grad_scale", "found_inf"):  # of a GradScaler, read by fused optimizers
        setattr(second, attribute, getattr(optimizer, attribute, None))
    by_param = {params[name]: copied for name, copied in copies.items()}
    second.param_groups = [
        {**group, "params": [by_param[p] for p in group["params"] if p in by_param]}
        for group in optimizer.param_groups
    ]
    second.state = defaultdict(dict)
    for key, entry in state.items():
        name, _, part = key.rpartition(".")
        if name in copies:  # Adam's `step` is on the CPU, also after a checkpoint was loaded
            like = optimizer.state[params[name]].get(part, entry)
            # A copy: optimizers write in place, and a `state_dict` has this tensor.
            second.state[copies[name]][part] = entry.to(like.device, copy=True)
    second.step()
    for name, copied in copies.items():
        for part, entry in second.state[copied].items():
            if isinstance(entry, Tensor):
                state[f"{name}.{part}"] = entry
            elif entry is not None:  # as the momentum of SGD without momentum
                raise TypeError(
                    f"update_norm_matched needs an optimizer whose state is tensors, and "
                    f"{type(optimizer).__name__} has {name}.{part} = {entry!r}"
                )


def forget_casts() -> None:
    """Clear the cache of autocast, which holds casts of the weights before they were changed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()
