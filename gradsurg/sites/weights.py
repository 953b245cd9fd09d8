"""Weights: the values of the parameters."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Shared
from gradsurg.sites.grads import Access, Steps, actor, params_at, places_of, write_value
from gradsurg.sites.places import Door, Kind, Named, PlacesHook, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.sites.step_hooks import Act
from gradsurg.torch_internals import autograd, compiling


def _watch_step(door: Door, found: Sequence[Named], shared: Shared) -> None:
    def make(hook: PlacesHook, optimizer: Optimizer) -> tuple[None, Act]:
        return None, _editor(hook, optimizer)

    Steps(door, STEP, make).hook(found)


def _watch_forward(door: Door, found: Sequence[Named], shared: Shared) -> None:
    hooks = door.meet_all(places_of(door, FORWARD, found))
    edits = [(_editor(hook), hook) for hook in hooks]

    @compiling.untraced
    def before(module: nn.Module, args: tuple[object, ...]) -> None:
        # The recomputation of a checkpoint needs the weights of its forward.
        if module.training and not autograd.in_backward():
            for edit, hook in edits:
                edit(*params_at(hook))

    door.stack.callback(door.model.register_forward_pre_hook(before).remove)


STEP = Kind("Weights", "step", params_of, _watch_step, known_at="watch")
FORWARD = Kind("Weights", "forward", params_of, _watch_forward, known_at="watch")


@validated
class Weights(ParamSelector):
    """Transform the values of the parameters whose name fits `pattern`, a glob or `re:`.

    At stage `step`, the default, it acts after each step of the optimizer, to project, clip or
    decay. At stage `forward` it acts before each call of the model in training mode. The fields
    have the same meaning as those of `Parameters`.

    The parameter is modified in place and stays the same object: the optimizer and all hooks would
    keep the old one if `module.weight` were replaced by a new `nn.Parameter`. A value that the
    transform returns unchanged is not written.

    A frozen parameter is skipped and reported in the ledger. If a `GradScaler` skips a step,
    nothing is changed. At stage `forward`, PyTorch raises an error if a second forward runs before
    the backward of the first, since its weights have changed.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")
    changes: ClassVar[str] = "weights"
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "forward")

    def kind_at(self, stage: Stage | None) -> Kind:
        return FORWARD if (stage or self.stage) == "forward" else STEP


def _editor(hook: PlacesHook, optimizer: Optimizer | None = None) -> Act:
    """Return a function that edits parameters."""

    def write(param: nn.Parameter, result: Tensor) -> None:
        if not result.is_set_to(param):  # else a group has left it as it is
            write_value(optimizer, param, result)

    return actor(hook, Access(Tensor.detach, write, lambda _: None, torch.no_grad))
