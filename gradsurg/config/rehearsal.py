"""Whether the steps that a config asks for can be made: tried before anything is trained."""

import torch
from torch.optim import Optimizer

from gradsurg.config.faults import Faults
from gradsurg.config.make import ERRORS, Config, sentence
from gradsurg.config.schedules import WALKED, schedule_maker, walk
from gradsurg.config.settings import Settings
from gradsurg.intervention import Intervention, check_scaled
from gradsurg.runs.switches import check_compiled
from gradsurg.sites.base import Selector


def check_manner(
    settings: Settings,
    selector: Selector | None,
    intervention: Intervention | None,
    device: torch.device | None,
    faults: Faults,
) -> None:
    """Refuse a precision that the device does not have, and places where it changes the meaning."""
    if settings.precision == "float16":
        with faults.at("precision"):
            if device is not None and device.type != "cuda":
                raise ValueError(
                    "float16 needs CUDA, where the loss is scaled; the device is "
                    f"{device.type}, which has bfloat16"
                )
        if intervention is not None:
            with faults.at("site"):
                check_scaled(intervention, torch.amp.GradScaler("cpu"))
    if settings.compile and selector is not None:
        with faults.at("site"):
            check_compiled(selector)


def check_fields(config: Config, settings: Settings, optimizer: Optimizer, faults: Faults) -> None:
    """Refuse an optimizer or a schedule by its fields alone: no step is to be made."""
    _check_fused(settings, optimizer, faults)
    with faults.at("schedule"):
        schedule_maker(config["schedule"], settings.steps or WALKED)(optimizer)


def check_step(config: Config, settings: Settings, optimizer: Optimizer, faults: Faults) -> None:
    """Refuse an optimizer or a schedule that cannot make its steps; the model is thrown away."""
    _check_fused(settings, optimizer, faults)
    with faults.at("optimizer"):
        _step(optimizer)
    with faults.at("schedule"):
        walk(schedule_maker(config["schedule"], settings.steps)(optimizer), settings.steps)


def _check_fused(settings: Settings, optimizer: Optimizer, faults: Faults) -> None:
    if settings.precision == "float16" and getattr(optimizer, "_step_supports_amp_scaling", False):
        with faults.at("optimizer.fused"):
            raise ValueError(
                "must be false with precision=float16: a fused optimizer takes the loss scale off "
                "the gradients by itself, after a surgery at stage 'step' has seen them"
            )


def _step(optimizer: Optimizer) -> None:
    """One step on gradients of zero: what an optimizer asks of its fields it asks then."""
    for group in optimizer.param_groups:
        if group.get("capturable"):
            return  # which is for other devices than the one that the model is on here
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except ERRORS as error:
        raise ValueError(f"{type(optimizer).__name__} cannot step: {sentence(error)}") from error
    optimizer.zero_grad()
