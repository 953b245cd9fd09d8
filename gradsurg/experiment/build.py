"""Build the objects of an experiment from a resolved config, and check them all."""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from gradsurg.aggregators.base import LossWeighting
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment import processes
from gradsurg.experiment.controls import control_interventions
from gradsurg.experiment.errors import MAX_RUNS, ConfigError, ErrorCollector, too_many
from gradsurg.experiment.from_config import intervention_of, interventions_of
from gradsurg.experiment.making import make, user_code
from gradsurg.experiment.run import check_compiled
from gradsurg.experiment.runs import Experiment, create_model, on_splits
from gradsurg.experiment.settings import (
    REQUIRED,
    Config,
    ControlKind,
    check_settings_of,
    settings_of,
)
from gradsurg.experiment.trial_step import (
    check_metrics,
    check_optimizer,
    few_examples,
    metric_names,
    try_step,
)
from gradsurg.experiment.tuning import (
    FIRST_SEED,
    Candidate,
    Tuning,
    Values,
    tuned_arms,
    tuned_config,
    tuned_grid,
    tuning_metric,
)
from gradsurg.loggers.base import GuardedLogger, Logger
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.messages import unknown
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform
from gradsurg.triggers.for_task import ForTask
from gradsurg.triggers.steps import Steps


def build(config: Config, trial: bool = True) -> Experiment:
    """Build every object of an experiment, and try one training step.

    First the values are checked, then their combinations, then the trial step. Raises ConfigError
    with all errors of the first of these that has any. There is no trial step without `trial`, or
    if all runs have finished.
    """
    errors = ErrorCollector(check_settings_of(config))
    if not all(isinstance(config.get(key), Mapping) for key in REQUIRED):
        errors.raise_if_any()
    experiment, data, model = _parts(config, errors)
    _check_combinations(experiment, data, model, errors)
    errors.raise_if_any()
    experiment = _with_all_arms(experiment, data, model, errors)
    errors.raise_if_any()
    finished = experiment.is_finished
    if not finished:
        optimizer = check_optimizer(experiment, model, errors)
        if trial and optimizer is not None and not errors.lines:
            try_step(experiment, data, model, optimizer, errors)
    if trial and not errors.lines and not (finished and experiment.settings.metric is None):
        check_metrics(experiment, data, model, errors)
    errors.raise_if_any()
    return experiment


def _parts(config: Config, errors: ErrorCollector) -> tuple[Experiment, Data, nn.Module]:
    """Make the objects that the groups of a config name. Raises ConfigError with all errors."""
    settings = None if errors.lines else settings_of(config)
    task = errors.made("task", lambda: make(config["task"], Task))
    selector, intervention, combining = interventions_of(config, task, errors)
    data = model = None
    content = ""
    if task is not None:
        with errors.at("task"), user_code(config["task"], "load"):
            data, content = task.load(), task.content
    if not isinstance(data, Data | None):
        errors.add("task", f"load() must return a gradsurg.tasks.base.Data, found {data!r}")
        data = None
    if task is not None and data is not None and settings is not None and settings.set_aside:
        with errors.at("validation"), user_code(config["task"], "load_with_validation"):
            data = task.load_with_validation(settings.set_aside)
    if data is not None:
        with errors.at("model"), random_state.preserved():
            model = create_model(config, data)
    loggers = []
    for key, fields in (config.get("logger") or {}).items():
        with errors.at(f"logger.{key}"):
            logger = make(fields, Logger)
            loggers.append(GuardedLogger(logger, json.dumps([key, fields])))
    device = settings and errors.made("device", lambda: _device(settings.device))
    if errors.lines or not (settings and task and selector and device and data) or model is None:
        raise ConfigError(errors.lines)
    parts = (settings, task, device, selector, intervention, combining, content, (*loggers,))
    return Experiment(config, *parts), data, model


def _with_all_arms(
    experiment: Experiment, data: Data, model: nn.Module, errors: ErrorCollector
) -> Experiment:
    """Return the experiment with the runs that `attribute`, `splits` and `tune` ask for."""
    settings, config, item = experiment.settings, experiment.config, experiment.intervention
    _check_number_of_runs(experiment)
    if settings.attribute and item is not None:
        without = {}
        for link in config["transform"]:
            fields = {key: value for key, value in config["transform"].items() if key != link}
            rest = {key: make(it, Transform) for key, it in fields.items()}
            shorter = intervention_of(rest, experiment.selector, item.when)
            changed = {**config, "transform": fields}
            without[link] = replace(experiment, config=changed, intervention=shorter)
        experiment = replace(experiment, without=without)
    with errors.at("splits"):
        experiment = on_splits(experiment, data)
    if settings.tune is not None:
        with errors.at("tune"):
            experiment = replace(experiment, tuning=_tuning(experiment, data, model))
    return experiment


def _tuning(experiment: Experiment, data: Data, model: nn.Module) -> Tuning:
    """Build the experiment of each point of the grid. Raises ValueError for the first wrong one."""
    settings = experiment.settings
    seeds = range(FIRST_SEED, FIRST_SEED + settings.tune_seeds)
    if common := {*seeds} & {*settings.all_seeds}:
        raise ValueError(f"{min(common)} is one of the tuning seeds, and cannot be compared too")
    with untouched(model):
        known = metric_names(experiment.task, model, *few_examples(data))
    metric, lower = tuning_metric(settings, known)

    def candidate(values: Values) -> Candidate:
        changed = tuned_config(experiment.config, settings, values)
        try:
            with warnings.catch_warnings():
                # The warnings of the config itself are enough.
                warnings.simplefilter("ignore", SurgeryWarning)
                return Candidate(values, build(changed, trial=False).pair)
        except ConfigError as error:
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            raise ValueError(f"{shown}: {error.faults[0]}") from error

    grid = tuned_grid(experiment.config, settings)
    return Tuning(metric, lower, seeds, tuned_arms(grid, seeds[0], candidate))


def _check_number_of_runs(experiment: Experiment) -> None:
    """Refuse very many runs before they are made, unless `yes` is given."""
    settings = experiment.settings
    seeds, grid = len(settings.all_seeds), settings.tune
    if grid is not None:
        seeds += settings.tune_seeds * len(grid)
    count = seeds * settings.splits * len(experiment.pair(0).runs)
    if count > MAX_RUNS and not settings.yes:
        key = "tune" if grid is not None else "seeds"
        raise ConfigError([f"{key}: {too_many(count, 'runs')}"])


def _device(name: str) -> torch.device:
    """Return the device, after a tensor has been put on it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # waits, so that an error of the device comes here
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"there is no '{name}' here; auto takes what there is") from None
    return device


def _check_combinations(
    experiment: Experiment, data: Data, model: nn.Module, errors: ErrorCollector
) -> None:
    """Check the short keys against the device, the data, the site, the engine and the arms."""
    settings, task = experiment.settings, experiment.task
    item, combining = experiment.intervention, experiment.combining
    for key, is_wrong, text in _rules(experiment, data):
        if is_wrong:
            errors.add(key, text)
    for trigger in (part for each in experiment.interventions for part in each.when.parts):
        known = list(task.names) if isinstance(task, MultiTask) else []
        if isinstance(trigger, ForTask) and trigger.task not in known:
            fault = f"there is no loss '{trigger.task}'"
            one = f"{fault}. The task has one loss."
            rule = unknown(fault, trigger.task, known) if known else one
            with errors.at("when"):
                raise FieldError(trigger, [("task", rule)])
    for each in experiment.interventions if settings.precision == "float16" else ():
        with errors.at("site" if each is item else "aggregator"):
            each.check_loss_scale(torch.amp.GradScaler("cpu"))
    if settings.compile:
        with errors.at("site"):
            check_compiled(experiment.selector)
    if item is not None and combining is None and "update_norm_matched" in settings.controls:
        with errors.at("control"):
            control_interventions([item], "update_norm_matched")
    if experiment.compute.ranks > 1:
        _check_processes(experiment, model, errors)


def _rules(experiment: Experiment, data: Data) -> Iterator[tuple[str, object, str]]:
    """Yield a key, whether its value breaks a rule, and the error to report if it does."""
    settings, device = experiment.settings, experiment.device.type
    count, size, batches = data.epoch_size, settings.batch_size, settings.accumulate
    yield "batch_size", size > count, f"must be <= {count} examples, found {size}"
    steps = [each.when for each in experiment.interventions if isinstance(each.when, Steps)]
    start = max((when.start for when in steps), default=0)
    last = settings.steps - 1 + isinstance(experiment.task, Examined)  # an examination is a step
    rule = f"must be <= {last}, the last step of the run, found {start}"
    yield "when.start", settings.steps and start > last, rule
    rule = f"a step's batches must have <= {count} examples together"
    yield "accumulate", size <= count < size * batches, f"{rule}, found {batches} of {size}"
    combining = experiment.combining
    is_feature = combining and getattr(combining.at, "engine", "") == "feature"
    rule = "feature makes its update of one forward and needs accumulate=1"
    text = f"{rule}, found accumulate={batches}; engine full takes several"
    yield "shared.engine", is_feature and batches > 1, text
    text = (
        "feature goes on from a representation, which a model that is compiled as one does not "
        "show: use full, or compile=false"
    )
    yield "shared.engine", is_feature and settings.compile, text
    rule = "float16 needs CUDA, where the loss is scaled"
    text = f"{rule}; the device is {device}, which has bfloat16"
    yield "precision", settings.precision == "float16" and device != "cuda", text
    links = experiment.config.get("transform") or {}
    rule = "needs a chain of two transforms or more to leave one out of"
    text = f"{rule}, found {', '.join(links) or 'none'}"
    yield "attribute", settings.attribute and len(links) < 2, text
    for kind in settings.controls:
        yield from _control_rules(experiment, kind)


def _control_rules(experiment: Experiment, kind: ControlKind) -> Iterator[tuple[str, object, str]]:
    """Yield the rules of `_rules` for one kind of control."""
    settings, batches = experiment.settings, experiment.settings.accumulate
    item, combining = experiment.intervention, experiment.combining
    name = combining.names[0] if combining else ""
    plain = "needs control=plain or control=none"
    rule = f"the shorter chains have no {kind.replace('_', '-')} control, {plain}"
    lacks_control = settings.attribute and kind != "plain"
    yield "attribute", lacks_control, f"{rule}, found control={kind}"
    rule = f"{kind} is for transforms, and {name} is an aggregator: needs control=plain"
    text = f"{rule}, control=norm_matched or control=none, found control={kind}"
    yield "control", combining and kind in ("placebo", "update_norm_matched"), text
    text = (
        f"{kind} transforms the sum of the {batches} batches of a step and the treated arm each of "
        "them: needs site.stage=step or accumulate=1"
    )
    sums = kind == "update_norm_matched" and batches > 1 and not combining
    is_linear = item and all("linear" in link.properties for link in item.links)
    yield "control", sums and item and item.stage != "step" and not is_linear, text
    text = (
        f"{name} weighs the losses, and so the gradients of the heads too, which the norm-matched "
        f"sum does not, {plain}, found control=norm_matched"
    )
    weighs = combining and isinstance(combining.aggregator, LossWeighting)
    yield "control", weighs and kind == "norm_matched", text


def _check_processes(experiment: Experiment, model: nn.Module, errors: ErrorCollector) -> None:
    """Report settings with which several processes would not train as one process does."""
    settings, count = experiment.settings, experiment.compute.ranks
    item, combining = experiment.intervention, experiment.combining
    found = f"found {count} processes"
    if settings.batch_size % count:
        rule = f"must be a multiple of {count}, the processes that share each batch"
        errors.add("batch_size", f"{rule}, found {settings.batch_size}")
    for key, is_set in (
        ("compile", settings.compile),
        ("precision", settings.precision == "float16"),
    ):
        if is_set:
            errors.add(key, f"needs one process, {found}")
    at = combining.at if combining is not None else None
    if isinstance(at, SharedParameters) and at.engine == "feature" and at.reduce == "mean":
        text = "feature has no mean over processes: needs one process or shared.reduce=local"
        errors.add("shared.engine", f"{text}, {found}")
    if item is not None and "examples" in item.needs:
        name = "+".join(item.names)
        errors.add("transform", f"{name} needs all examples of a batch: one process, {found}")
    if reason := processes.refuse_batch_norm(model):
        errors.add("model", f"{reason}: needs one process, {found}")
