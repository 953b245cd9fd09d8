"""Whether the steps that a config asks for can be made: tried before anything is trained."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.config.faults import Faults
from gradsurg.config.make import ERRORS, Config, sentence, theirs
from gradsurg.config.optimizers import optimizer_maker
from gradsurg.config.probe import Trial
from gradsurg.config.schedules import WALKED, schedule_maker, walk
from gradsurg.config.settings import Settings
from gradsurg.multitask.features import module_of
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.sites.base import Selector
from gradsurg.sites.state_guard import untouched
from gradsurg.surgery.intervention import Intervention
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.training.loop import outputs_of
from gradsurg.training.run import check_compiled
from gradsurg.transforms.base import Need
from gradsurg.triggers.base import Trigger

FEW = 8  # examples by which a metric's name is known
ASKED: set[Need] = {"entering", "error"}  # whether it comes, a step tells


def check_manner(
    settings: Settings,
    selector: Selector | None,
    intervention: Intervention | None,
    joint: Intervention | None,
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
        for key, own in (("site", intervention), ("aggregator", joint)):
            if own is not None:
                with faults.at(key):
                    own.check_loss_scale(torch.amp.GradScaler("cpu"))
    if settings.compile and selector is not None:
        with faults.at("site"):
            check_compiled(selector)
    if settings.compile and joint is not None and isinstance(joint.at, SharedParameters):
        with faults.at("shared.engine"):
            if joint.at.engine == "feature":
                raise ValueError(
                    "feature goes on from a representation, which a model that is compiled as one "
                    "does not show: use full, or compile=false"
                )


def check_batch(settings: Settings, data: Data | None, faults: Faults) -> None:
    """Refuse more examples in a step than there are."""
    if data is None:
        return
    count, size, several = data.epoch_size, settings.batch_size, settings.accumulate
    if size > count:
        faults.lines.append(f"batch_size: must be <= {count} examples, found {size}")
    elif size * several > count:
        rule = f"a step's batches must have <= {count} examples together"
        faults.lines.append(f"accumulate: {rule}, found {several} of {size}")


def check_waiting(settings: Settings, joint: Intervention | None, faults: Faults) -> None:
    """Refuse several batches a step of an engine that has the gradients of one forward."""
    if joint is None or settings.accumulate == 1:
        return
    assert isinstance(joint.at, SharedParameters)
    if joint.at.engine == "feature":
        faults.lines.append(
            "shared.engine: feature makes its update of one forward and needs accumulate=1, found "
            f"accumulate={settings.accumulate}; engine full takes several"
        )


def check_examination(
    config: Config, task: Task | None, model: nn.Module | None, data: Data | None, faults: Faults
) -> None:
    """Refuse a model that the task could not examine after its training: two examples tell."""
    if model is None or data is None or not isinstance(task, Examined):
        return
    with faults.at("task"), theirs(config["task"], "examine"), untouched(model):
        examined(task, model, data)


def examined(task: Examined, model: nn.Module, data: Data) -> list[str]:
    """The names of what an examination finds, by two examples."""
    two = replace(data, test_inputs=data.test_inputs[:2], test_targets=data.test_targets[:2])
    numbers = task.examine(model.eval(), two).numbers
    model.train()
    return [*numbers]


def check_untrained(
    config: Config,
    settings: Settings,
    selector: Selector | None,
    joint: Intervention | None,
    model: nn.Module | None,
    faults: Faults,
) -> None:
    """What can be wrong though no step is to be made, without the seconds that a step takes."""
    if model is None:
        return
    make_optimizer = optimizer_maker(config, settings, bare=True)
    optimizer = faults.made("optimizer", lambda: make_optimizer(model))
    if optimizer is not None:
        _check_fields(config, settings, optimizer, faults)
    for key, places in (("site", selector), ("shared", joint and joint.at)):
        if places is not None:
            with faults.at(key):
                places.find(model)
                if isinstance(places, SharedParameters) and places.features:
                    module_of(model, places.features)


def check_optimizer(
    config: Config, settings: Settings | None, model: nn.Module | None, faults: Faults
) -> None:
    """Refuse an optimizer or a schedule that cannot be made, or cannot make its steps."""
    make_optimizer = optimizer_maker(config, settings)
    # What is wrong with an optimizer is mostly so for any parameter.
    stand_in = model or nn.Linear(1, 1, bias=False)
    optimizer = faults.made("optimizer", lambda: make_optimizer(stand_in))
    if optimizer is not None and settings is not None:
        _check_step(config, settings, optimizer, faults)


def check_until(
    settings: Settings | None,
    task: Task | None,
    model: nn.Module | None,
    data: Data | None,
    faults: Faults,
) -> None:
    """Refuse a condition on a metric that the task has not got, by a few of its examples."""
    until = settings and settings.until
    if until is None or task is None or model is None or data is None:
        return
    with faults.at("until"), untouched(model):
        tests = data.test_inputs[:FEW], data.test_targets[:FEW]
        until.check([f"test/{name}" for name in metrics_of(task, model, *tests)])


def metrics_of(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """The names of a task's metrics, by a few of its examples."""
    return [*task.metrics(outputs_of(model, inputs), targets)]


def check_acting(
    trial: Trial,
    selector: Selector,
    trigger: Trigger | None,
    intervention: Intervention | None,
    joint: Intervention | None,
    faults: Faults,
) -> None:
    """Refuse what could never act, and what a training step with it shows."""
    said = len(faults.lines)
    with faults.at("site"):
        trial.check_site(selector)
    if intervention and intervention.operator.needs & ASKED and len(faults.lines) == said:
        with faults.at("transform"):
            trial.check_transform(intervention)
    if trigger is not None and len(faults.lines) == said:
        with faults.at("when"):
            trial.check_when(selector, trigger)
    if joint is not None and isinstance(trial.task, MultiTask) and not faults.lines:
        with faults.at(""):
            trial.check_joint(joint, *([intervention] if intervention else []))


def _check_fields(config: Config, settings: Settings, optimizer: Optimizer, faults: Faults) -> None:
    """Refuse an optimizer or a schedule by its fields alone: no step is to be made."""
    _check_fused(settings, optimizer, faults)
    with faults.at("schedule"):
        schedule_maker(config["schedule"], settings.steps or WALKED)(optimizer)


def _check_step(config: Config, settings: Settings, optimizer: Optimizer, faults: Faults) -> None:
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
