"""Updates: the change that the optimizer makes to each parameter in a step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import GroupFn, HookRegistry, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.transforms.base import Need, Scope


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
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    copies_params: ClassVar[bool] = True

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "gradient"})

    def hook(
        self,
        model: nn.Module,
        steps: OptimizerSteps,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        params = expect_params(self, model, registry)
        for optimizer, part in steps.split(params, scope):
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "Updates cannot act on LBFGS, which computes curvature from its own updates; "
                    "choose another optimizer"
                )
            updates = _StepUpdates(optimizer, part, registry)
            steps.at_begin(optimizer, updates.before_step, stack)
            steps.after(optimizer, updates.after_step, stack)


class _StepUpdates:
    """What runs around a step of an optimizer. It ends on detach, so it may hold parameters."""

    def __init__(
        self, optimizer: Optimizer, params: Mapping[str, nn.Parameter], registry: HookRegistry
    ) -> None:
        self._optimizer = optimizer
        self._params = list(params.values())
        self._before: list[Tensor] = []  # empty except during a step
        values = [self._value(index) for index in range(len(params))]
        gradients = [_gradient(param) for param in self._params]
        self._group_hook: GroupFn = registry.group_hook(list(params), values, gradients)

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
