"""Decide which runs can be replicas of one stack, and name the reason where one cannot."""

import json
from collections.abc import Mapping
from shutil import which

from torch import nn, optim

from gradsurg.core.intervention import Intervention
from gradsurg.experiment.run import Run
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.sites.parameters import Parameters
from gradsurg.stacked.acting import STEP_TRIGGERS
from gradsurg.stacked.stack import OPTIMIZERS
from gradsurg.torch_internals.hook_tables import has_backward_hooks, has_step_hooks, tensor_tables
from gradsurg.triggers.for_task import ForTask

TREATMENT = (
    "seed",
    "label",
    "transform",
    "site",
    "when",
    "order",
    "control",
    "sources",
    "aggregator",
    "shared",
)
"""Keys of an identity in which the replicas of one stack may differ."""

STAGES = ("backward", "accumulated", "step")
"""Stages of `Parameters` that are exact on the slice of one replica."""

NEEDS = {
    "error": "the gradient of the model's output",
    "examples": "the gradients of single examples",
    "labels": "the labels of the examples",
    "skip": "to skip steps",
}
"""Needs of a transform that the slice of one replica does not provide."""

CXX = ("g++", "clang++", "cl")
"""The C++ compilers that inductor can use on a CPU."""

MODULES: Mapping[type[nn.Module], str] = {
    nn.RNNBase: "has no rule for vmap",
    nn.RNNCellBase: "is run step by step",
    nn.modules.batchnorm._NormBase: "keeps running statistics",
    nn.modules.dropout._DropoutNd: "draws random numbers",
}


def stack_key(run: Run) -> str:
    """Return a text that is equal for runs that share model, task, optimizer and schedule."""
    shared = {key: value for key, value in run.identity.items() if key not in TREATMENT}
    return json.dumps([run.study, shared, repr(run.schedule)], sort_keys=True, default=repr)


def run_refusal(run: Run) -> str:
    """Return the reason why a run cannot be a replica, as far as it is known without its model."""
    compute, schedule = run.compute, run.schedule
    checks = {
        f"{compute.ranks} processes": compute.ranks > 1,
        f"accumulate={compute.accumulate}": compute.accumulate > 1,
        f"precision={compute.precision}": compute.precision != "float32",
        "update_effect_every": schedule.update_effect_every > 0,
    }
    if keys := [key for key, is_set in checks.items() if is_set]:
        return f"{keys[0]} has no stacked form"
    if compute.compile == "inductor" and run.device.type == "cpu" and not any(map(which, CXX)):
        return f"compile=true needs a C++ compiler: there is no {', '.join(CXX)}"
    items = run.surgery.interventions
    aggregators = [item for item in items if item.aggregator is not None]
    if aggregators:
        alone = len(items) == 1 or (run.shadow and len(aggregators) == 1 and len(items) == 2)
        if not alone:
            return "an aggregator with other interventions has no stacked form"
        if compute.compile is not None:
            return "compile=true with an aggregator has no stacked form"
    reasons = (intervention_refusal(item) for item in items)
    return next(filter(None, reasons), "")


def intervention_refusal(item: Intervention) -> str:
    """Return the reason why an intervention cannot act on the slices of a stack, or ''."""
    if any(isinstance(part, ForTask) for part in item.when.parts):
        return "ForTask reads the backward pass of each task"
    if item.aggregator is not None:
        at = item.at
        assert isinstance(at, SharedParameters)
        name = type(item.aggregator).__name__
        if at != SharedParameters():
            return f"{name} has a stacked form at SharedParameters() alone, without arguments"
        if not all(isinstance(part, STEP_TRIGGERS) for part in item.when.parts):
            return f"{name} has a stacked form for triggers that read steps or epochs"
        return ""
    if kind := next((kind for kind in item.at.kinds if type(kind) is not Parameters), None):
        return f"{type(kind).__name__} hooks one model, and a stack has its parameters only"
    if item.stage not in STAGES:
        return f"stage '{item.stage}' has no stacked form"
    if needs := [text for need, text in NEEDS.items() if need in item.needs]:
        return f"{item.operator!r} needs {needs[0]}"
    if item.forward_triggers:
        return f"{item.forward_triggers[0]!r} reads the forward pass"
    return ""


def model_refusal(model: nn.Module, optimizer: optim.Optimizer) -> str:
    """Return the reason why a model or its optimizer has no stacked form, or ''."""
    if type(optimizer) not in OPTIMIZERS:
        return f"{type(optimizer).__name__} has no stacked form; SGD, Adam and AdamW have one"
    for name, module in model.named_modules():
        for kind, reason in MODULES.items():
            if isinstance(module, kind) and _is_active(module):
                return f"'{name}' ({type(module).__name__}) {reason}"
    return _hook_refusal(model, optimizer)


def _hook_refusal(model: nn.Module, optimizer: optim.Optimizer) -> str:
    """Return the reason if a user's model or optimizer has hooks of its own that see gradients."""
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            return f"'{name or type(model).__name__}' has a backward hook of its own"
    for name, param in model.named_parameters():
        if tensor_tables(param):
            return f"'{name}' has a hook of its own"
    if has_step_hooks(optimizer):
        return f"{type(optimizer).__name__} has a step hook of its own"
    return ""


def _is_active(module: nn.Module) -> bool:
    """Whether a module of `MODULES` does in training as its reason says."""
    match module:
        case nn.modules.batchnorm._NormBase():
            return module.track_running_stats
        case nn.modules.dropout._DropoutNd():
            return module.p > 0
        case _:
            return True
