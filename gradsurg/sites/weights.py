"""Weights: the parameters' values themselves."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import HookRegistry, Stage
from gradsurg.sites.parameters import check_owned
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

CLOCK = "gradsurg.surgery.surgery"  # where the hook is made that counts an optimizer's steps


@validated
class Weights(ParamSelector):
    """The values of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `step`, what the optimizer has left after each of its steps (the default), to project,
    clip or decay; `forward`, before each call of the model in training mode. They are selected as
    `Parameters` are; a frozen parameter is left out, and the ledger says so. Where a `GradScaler`
    skips a step, nothing is edited. At stage `forward` a forward whose backward comes after the
    next forward is refused by PyTorch, for its weights have been changed since.

    The parameter is written to in place and stays the object that it was. A new one in its place,
    `module.weight = nn.Parameter(...)`, would be trained no more: the optimizer keeps the old one,
    and all hooks stay there. What a transform leaves as it is, is not written to.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        chosen = expect_params(self, model, registry)
        edit = _editor(chosen, registry)
        match stage:
            case "step":
                if optimizer is None:
                    raise ValueError("stage 'step' needs the optimizer: attach(model, optimizer)")
                check_owned(optimizer, chosen)
                handle = optimizer.register_step_post_hook(lambda *_: edit())
                _clocks_last(optimizer)
            case "forward":
                handle = model.register_forward_pre_hook(_before(edit))
            case _:
                raise AssertionError(stage)
        stack.callback(handle.remove)


def _clocks_last(optimizer: Optimizer) -> None:
    """Let the steps be counted after the edit, also where that is added to an open block."""
    table = vars(optimizer)["_optimizer_step_post_hooks"]
    for key, hook in list(table.items()):
        if getattr(hook, "__module__", "") == CLOCK:
            table.move_to_end(key)


def _before(edit: Callable[[], None]) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> None:
        # A checkpoint's recomputation needs the weights that its forward had.
        if module.training and not autograd.in_backward():
            edit()

    return hook


def _editor(chosen: Mapping[str, nn.Parameter], registry: HookRegistry) -> Callable[[], None]:
    """What edits all of them. It dies with the block, so it may hold the parameters."""
    params = list(chosen.values())
    gate_all = registry.group_hook(list(chosen), [_nothing] * len(params))

    @torch.no_grad()
    def edit() -> None:
        values = [param.detach() for param in params]
        results = gate_all(values)
        changed = False
        for param, value, result in zip(params, values, results, strict=True):
            if result is not None and result is not value:
                param.copy_(result.clone() if _overlaps(result, value) else result)
                changed = True
        if changed and torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it holds casts of the old weights

    return edit


def _nothing() -> None:
    """What passes is the value itself."""


def _overlaps(result: Tensor, value: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
