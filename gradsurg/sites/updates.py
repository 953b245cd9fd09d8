"""Updates: the change that the optimizer makes to each parameter in a step."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites._grads import forget_casts, hook_steps, write_value
from gradsurg.sites.places import Attached, Stage
from gradsurg.sites.selection import ParamSelector
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
        hook_steps(self, attached, partial(_updates_actions, attached))


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
        hook_steps(self, attached, partial(_matched_actions, attached))


def _copies(params: Params) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def _updates_actions(
    attached: Attached, params: Params, optimizers: Sequence[Optimizer]
) -> StepActions:
    before: dict[str, Tensor] = {}  # the values; empty except during a step
    values = [partial(before.get, name) for name in params]
    gradients = [partial(_gradient, param) for param in params.values()]
    group_hook = attached.group_hook([*params], values, gradients)

    @torch.no_grad()
    def write_updates() -> None:
        if not before:  # attached during the step
            return
        updates = [
            None if param.grad is None else param - before[name] for name, param in params.items()
        ]
        results = list(group_hook([*updates]))  # all of them, before a weight is written
        rows = zip(params.items(), updates, results, strict=True)
        for (name, param), update, result in rows:
            if update is not None and result is not None and result is not update:
                keeps = result == update  # before + (after - before) is rounded, and is not `after`
                write_value(optimizers[0], param, before[name] + result, keeps)
        forget_casts()
        before.clear()

    return StepActions(begin=lambda: before.update(_copies(params)), after=write_updates)


def _gradient(param: nn.Parameter) -> Tensor | None:
    grad = param.grad
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _matched_actions(
    attached: Attached, params: Params, optimizers: Sequence[Optimizer]
) -> StepActions:
    before: dict[str, Tensor] = {}  # the values; empty except during a step
    treated: dict[str, Tensor] = {}  # the gradients
    (optimizer,) = optimizers
    group_hook = attached.group_hook([*params], [ref(param) for param in params.values()])
    key = f"optimizer{attached.steps.optimizers.index(optimizer)}"

    def treat() -> None:
        results = zip(params, group_hook([param.grad for param in params.values()]), strict=True)
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
                update, wanted = params[name] - before[name], copied - before[name]
                keeps = (wanted == update).all()  # before + (after - before) is rounded
                new = before[name] + norm_matched(update, wanted)
                write_value(optimizer, params[name], new, keeps)
            forget_casts()
        before.clear()

    return StepActions(lambda: before.update(_copies(params)), treat, match)


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
