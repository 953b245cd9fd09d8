"""Weights: the values of the parameters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, Stage
from gradsurg.sites.contexts import refusal
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import Params, StepActions
from gradsurg.sites.updates import forget_casts
from gradsurg.torch_internals import autograd, compiling


@validated
class Weights(ParamSelector):
    """The values of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `step`, after each step of the optimizer (the default), to project, clip or decay;
    `forward`, before each call of the model in training mode. The fields select as those of
    `Parameters`; a frozen parameter is skipped and reported in the ledger. If a `GradScaler` skips
    a step, nothing is changed. At stage `forward`, PyTorch raises an error if a second forward runs
    before the backward of the first, since its weights have changed.

    The parameter is modified in place and stays the same object: the optimizer and all hooks would
    keep the old one if `module.weight` were replaced by a new `nn.Parameter`. A value that the
    transform returns unchanged is not written.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")
    changes: ClassVar[str] = "weights"
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        select = partial(expect_params, self, model, attached)
        match attached.stage:
            case "step":
                make = partial(self._step_hooks, attached)
                attached.check_at_end(attached.steps.hook(select, make, attached.scope, stack))
            case "forward":
                edit = _editor(select(), attached)
                stack.callback(model.register_forward_pre_hook(_before_forward(edit)).remove)
            case _:
                raise AssertionError(attached.stage)

    def _step_hooks(
        self, attached: Attached, params: Params, optimizers: Sequence[Optimizer]
    ) -> StepActions:
        if len(optimizers) > 1:
            raise refusal(self, "several optimizers")
        return StepActions(after=_editor(params, attached))


def _before_forward(edit: Callable[[], None]) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        # The recomputation of a checkpoint needs the weights of its forward.
        if module.training and not autograd.in_backward():
            edit()

    return hook


def _editor(params: Params, attached: Attached) -> Callable[[], None]:
    """Return a function that edits all parameters. It is dropped on detach, so it may hold them."""
    held = list(params.values())
    group_hook = attached.group_hook(list(params), [_no_value] * len(held))

    @torch.no_grad()
    def edit() -> None:
        values = [param.detach() for param in held]
        changed = False
        for param, value, result in zip(held, [*values], group_hook([*values]), strict=True):
            if result is not None and result is not value:
                param.copy_(result.clone() if _overlaps(result, value) else result)
                changed = True
        if changed:
            forget_casts()

    return edit


def _no_value() -> None:
    """Return nothing: the hook receives the value in place of a gradient."""


def _overlaps(result: Tensor, value: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
