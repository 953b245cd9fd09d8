"""Weights: the values of the parameters."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites._grads import forget_casts, hook_steps, no_value, write_value
from gradsurg.sites.places import Attached, Stage
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import Params, StepActions
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
        def make(params: Params, optimizers: Sequence[Optimizer]) -> StepActions:
            return StepActions(after=_editor(params, attached, optimizers[0]))

        if attached.stage == "step":
            hook_steps(self, attached, make)
            return
        edit = _editor(expect_params(self, attached.model, attached), attached)

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            # The recomputation of a checkpoint needs the weights of its forward.
            if module.training and not autograd.in_backward():
                edit()

        attached.stack.callback(attached.model.register_forward_pre_hook(hook).remove)


def _editor(
    params: Params, attached: Attached, optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """Return a function that edits all parameters. It is dropped on detach, so it may hold them."""
    held = list(params.values())
    group_hook = attached.group_hook(list(params), [no_value] * len(held))

    @torch.no_grad()
    def edit() -> None:
        values = [param.detach() for param in held]
        changed = False
        results = list(group_hook([*values]))  # all of them, before a weight is written
        for param, value, result in zip(held, values, results, strict=True):
            if result is not None and result is not value:
                is_view = _overlaps(result, value)
                write_value(optimizer, param, result.clone() if is_view else result)
                changed = True
        if changed:
            forget_casts()

    return edit


def _overlaps(result: Tensor, value: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
