"""Updates: the change that the optimizer makes to each parameter in a step."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, GroupFn, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
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
        model, steps, scope, stack = attached.model, attached.steps, attached.scope, attached.stack
        params = expect_params(self, model, attached)
        for optimizer, part in steps.split(params, scope):
            _refuse_lbfgs(optimizer)
            updates = _StepUpdates(optimizer, part, attached)
            steps.at_begin(optimizer, updates.before_step, stack)
            steps.after(optimizer, updates.after_step, stack)


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
        model, steps, scope, stack = attached.model, attached.steps, attached.scope, attached.stack
        params = expect_params(self, model, attached)
        for index, (optimizer, part) in enumerate(steps.split(params, scope)):
            _refuse_lbfgs(optimizer)
            matched = _SecondOptimizer(optimizer, part, attached, f"optimizer{index}")
            steps.at_begin(optimizer, matched.copy_values, stack)
            steps.before(optimizer, matched.treat, stack)
            steps.after(optimizer, matched.match, stack)


class _SecondOptimizer:
    """What runs around a step of an optimizer whose updates get the norm of treated ones."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Mapping[str, nn.Parameter],
        attached: Attached,
        key: str,
    ) -> None:
        self._optimizer = optimizer
        self._params = dict(params)
        self._registry = attached
        self._key = key  # of the state in that of the surgery
        self._before: dict[str, Tensor] = {}  # empty except during a step
        self._treated: dict[str, Tensor] = {}
        values = [ref(param) for param in params.values()]
        self._group_hook: GroupFn = attached.group_hook(list(params), values)

    def copy_values(self) -> None:
        """Copy the parameters."""
        self._before = {name: param.detach().clone() for name, param in self._params.items()}

    def treat(self) -> None:
        """Keep the transformed gradients; those of the optimizer stay as they are."""
        grads = [param.grad for param in self._params.values()]
        results = zip(self._params, self._group_hook(grads), strict=True)
        self._treated = {name: grad.detach() for name, grad in results if grad is not None}

    @torch.no_grad()
    def match(self) -> None:
        """Make the treated updates and give their norms to those of the optimizer."""
        if not self._before or not self._treated:  # attached during the step
            return
        for name, treated in self._treated_updates().items():
            param, before = self._params[name], self._before[name]
            update = param - before
            keeps = (treated == update).all()  # before + (after - before) is rounded
            param.copy_(torch.where(keeps, param, before + norm_matched(update, treated)))
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it holds casts of the weights before
        self._before, self._treated = {}, {}

    def _treated_updates(self) -> dict[str, Tensor]:
        """Step the second optimizer from the values before the step; return its updates."""
        copies = {name: self._before[name].clone() for name in self._treated}
        for name, copied in copies.items():
            copied.grad = self._treated[name]
        second = copy.copy(self._optimizer)  # without hooks, as Optimizer.__getstate__ leaves out
        for attribute in ("grad_scale", "found_inf"):  # of a GradScaler, read by fused optimizers
            setattr(second, attribute, getattr(self._optimizer, attribute, None))
        by_param = {self._params[name]: copied for name, copied in copies.items()}
        second.param_groups = [
            {**group, "params": [by_param[p] for p in group["params"] if p in by_param]}
            for group in self._optimizer.param_groups
        ]
        state = self._registry.state(self._key)
        second.state = self._read_state(state, copies)
        second.step()
        for name, copied in copies.items():
            for key, entry in second.state[copied].items():
                state |= self._written(f"{name}.{key}", entry)
        return {name: copied - self._before[name] for name, copied in copies.items()}

    # Any: entries of an optimizer's state.
    def _read_state(
        self, state: Mapping[str, Tensor], copies: Mapping[str, Tensor]
    ) -> defaultdict[Tensor, Any]:
        read: defaultdict[Tensor, Any] = defaultdict(dict)
        for key, entry in state.items():
            name, _, part = key.rpartition(".")
            if name in copies:  # Adam's `step` is on the CPU, also after a checkpoint was loaded
                like = self._optimizer.state[self._params[name]].get(part, entry)
                # A copy: optimizers write in place, and a `state_dict` has this tensor.
                read[copies[name]][part] = entry.to(like.device, copy=True)
        return read

    def _written(self, key: str, entry: object) -> dict[str, Tensor]:
        if isinstance(entry, Tensor):
            return {key: entry}
        if entry is None:  # as the momentum of SGD without momentum
            return {}
        raise TypeError(
            f"update_norm_matched needs an optimizer whose state is tensors, and "
            f"{type(self._optimizer).__name__} has {key} = {entry!r}"
        )


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "Updates cannot act on LBFGS, which computes curvature from its own updates; "
            "choose another optimizer"
        )


class _StepUpdates:
    """What runs around a step of an optimizer. It ends on detach, so it may hold parameters."""

    def __init__(
        self, optimizer: Optimizer, params: Mapping[str, nn.Parameter], attached: Attached
    ) -> None:
        self._optimizer = optimizer
        self._params = list(params.values())
        self._before: list[Tensor] = []  # empty except during a step
        values = [self._value(index) for index in range(len(params))]
        gradients = [_gradient(param) for param in self._params]
        self._group_hook: GroupFn = attached.group_hook(list(params), values, gradients)

    def before_step(self) -> None:
        """Copy the parameters."""
        self._before = [param.detach().clone() for param in self._params]

    @torch.no_grad()
    def after_step(self) -> None:
        """Transform the updates and write those entries that changed."""
        if not self._before:  # attached during the step
            return
        updates = [
            None if param.grad is None else param - before
            for param, before in zip(self._params, self._before, strict=True)
        ]
        results = self._group_hook(updates)
        self._write(updates, results, getattr(self._optimizer, "found_inf", None))
        self._before = []

    def _write(
        self,
        updates: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
        found_inf: Tensor | None,
    ) -> None:
        rows = zip(self._params, self._before, updates, results, strict=True)
        changed = False
        for param, before, update, result in rows:
            if update is None or result is None or result is update:
                continue
            # before + (after - before) is rounded, and is not `after`.
            keeps = result == update
            if found_inf is not None:  # a fused optimizer has skipped the step if it is 1
                keeps |= found_inf.to(keeps.device) > 0
            param.copy_(torch.where(keeps, param, before + result))
            changed = True
        if changed and torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it holds casts of the weights before

    def _value(self, index: int) -> Callable[[], Tensor | None]:
        return lambda: self._before[index] if self._before else None


def _gradient(param: nn.Parameter) -> Callable[[], Tensor | None]:
    def gradient() -> Tensor | None:
        grad = param.grad
        return grad.to_dense() if grad is not None and grad.is_sparse else grad

    return gradient
