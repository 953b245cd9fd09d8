"""Make one training step of an experiment before it trains: the first step of its first run.

It finds the errors that need a model: a pattern that matches nothing, a site without a gradient, a
transform that raises, an optimizer that cannot step, a metric that the task does not have.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from timeit import repeat

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import Entry, SurgeryWarning
from gradsurg.effects.summary import effects_by_path
from gradsurg.experiment.errors import ErrorCollector
from gradsurg.experiment.loop import Batches, outputs_of
from gradsurg.experiment.making import user_code
from gradsurg.experiment.optimization import (
    MAX_CHECKED_STEPS,
    check_learning_rates,
    make_optimizer,
    make_schedule,
)
from gradsurg.experiment.run import Run
from gradsurg.experiment.runs import Experiment
from gradsurg.experiment.settings import VALIDATION
from gradsurg.plugins.fields import FieldError, in_short
from gradsurg.plugins.messages import full_message, one_line, place_in_user_code, shortened, unknown
from gradsurg.plugins.registry import is_own
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.torch_internals import compiling, random_state
from gradsurg.transforms.identity import Identity
from gradsurg.triggers.base import Decision, Trigger, TriggerContext

METRIC_EXAMPLES = 8  # the examples by which the names of metrics are found


def check_optimizer(
    experiment: Experiment, model: nn.Module, errors: ErrorCollector
) -> Optimizer | None:
    """Make the optimizer and the schedule, and step through the learning rates."""
    settings = experiment.settings
    with compiling.without_dynamo():
        optimizer = errors.made("optimizer", lambda: make_optimizer(experiment.optimizer, model))
        if optimizer is None:
            return None
        is_scaled = settings.precision == "float16"
        if is_scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
            errors.add(
                "optimizer.fused",
                "must be false with precision=float16: a fused optimizer takes the loss scale off "
                "the gradients by itself, after a surgery at stage 'step' has seen them",
            )
        with errors.at("schedule"):
            steps = settings.steps or MAX_CHECKED_STEPS
            schedule = make_schedule(experiment.config["schedule"], steps, optimizer)
            check_learning_rates(schedule, settings.steps)
    return optimizer


def try_step(
    experiment: Experiment,
    data: Data,
    model: nn.Module,
    optimizer: Optimizer,
    errors: ErrorCollector,
) -> None:
    """Make the first step of the first run, on a model that is thrown away; report its errors.

    A site without a gradient is an error for a model and a task of gradsurg, and a warning for a
    user's own, whose later steps may differ.
    """
    trial = _Trial.of(experiment, data)
    try:
        with random_state.preserved(), compiling.uncompiled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run repeats these warnings
            entries = trial.step(model, optimizer)
    except FieldError as error:
        with errors.at("shared" if error.owner == "SharedParameters" else "site"):
            raise error
    except (Exception, SystemExit) as error:  # a user's transform, model or task may raise anything
        if _check_model(experiment.task, model, data, errors):
            text = one_line(error)
            if hasattr(error, "__notes__"):  # which name the transform and the site
                text = full_message(error).removeprefix("ValueError: ")
            errors.add(trial.key_of(error), text + place_in_user_code(error))
    else:
        if experiment.intervention is not None:
            try:
                effects_by_path(
                    [], [{"site": entry.site} for entry in entries], experiment.settings.log
                )
            except LookupError as error:
                errors.add("log", one_line(error).removeprefix("log: "))
        if text := trial.silence(entries):
            if all(is_own(experiment.config[group]) for group in ("model", "task")):
                errors.add("site", text)
            else:
                warnings.warn(f"{text}, as far as one step tells", SurgeryWarning, stacklevel=2)


def check_metrics(
    experiment: Experiment, data: Data, model: nn.Module, errors: ErrorCollector
) -> None:
    """Check the examination and the metrics of a model that can be trained."""
    settings, task, watched = experiment.settings, experiment.task, data.watched
    examined: list[str] = []
    if isinstance(task, Examined):
        fields = experiment.config["task"]
        with errors.at("task"), user_code(fields, "examine"), untouched(model):
            examined = examined_names(task, model, data)
    if settings.metric is None and settings.until is None:
        return
    own: list[str] = []
    with errors.at("metric" if settings.metric is not None else "until"), untouched(model):
        own = metric_names(task, model, *few_examples(data))
    if errors.lines:
        return
    if settings.metric is not None and settings.tune is None:
        names = [f"{part}/{name}" for part in ("test", "train", watched) for name in own]
        names += [f"test/{name}" for name in task.trajectory_metric_names]
        names += [f"examined/{name}" for name in examined]
        if settings.metric not in names:
            fault = f"there is no {settings.metric}"
            errors.add("metric", unknown(fault, settings.metric, list(dict.fromkeys(names))))
    if settings.until is not None:
        with errors.at("until"):
            if watched == "validation" and settings.until.metric.startswith("test/"):
                metric = settings.until.metric.replace("test/", VALIDATION)
                raise ValueError(
                    f"with validation={settings.set_aside:g} the test data are looked at once, at "
                    f"the end: give {metric}, or validation=0"
                )
            settings.until.check([f"{watched}/{name}" for name in own])


def few_examples(data: Data) -> tuple[Tensor, Tensor]:
    """Return the first examples of the part that is evaluated during training."""
    inputs, targets = data.part(data.watched)
    return inputs[:METRIC_EXAMPLES], targets[:METRIC_EXAMPLES]


def metric_names(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """Return the names of the metrics of a task, found with these examples."""
    return [*task.metrics(outputs_of(model, inputs), targets)]


def examined_names(task: Examined, model: nn.Module, data: Data) -> list[str]:
    """Return the names of the numbers of an examination, found with two examples."""
    two = replace(data, test_inputs=data.test_inputs[:2], test_targets=data.test_targets[:2])
    numbers = task.examine(model.eval(), two).numbers
    model.train()
    return [*numbers]


def step_seconds(run: Run) -> float:
    """Return about how long a step of a run takes: the shortest of three without surgery."""
    with random_state.preserved():
        data = run.load_data()
        model = run.make_model(data).to(run.device)
        optimizer = run.make_optimizer(model)
        size = run.schedule.batch_size
        inputs, targets = (
            every[:size].to(run.device) for every in (data.train_inputs, data.train_targets)
        )

        def step() -> None:
            optimizer.zero_grad()
            run.task.loss(model(inputs), targets).backward()
            optimizer.step()

        return min(repeat(step, number=1, repeat=3))


@dataclass(frozen=True)
class _Trial:
    """The first step of the first run of an experiment."""

    experiment: Experiment
    run: Run
    batches: Batches

    @classmethod
    def of(cls, experiment: Experiment, data: Data) -> "_Trial":
        pair = experiment.pairs[0]
        run = pair.treated or pair.control
        assert run is not None
        return cls(experiment, run, run.batches(data, torch.device("cpu")))

    def step(self, model: nn.Module, optimizer: Optimizer) -> list[Entry]:
        """Make the step and return the ledger of the sites."""
        task, (inputs, targets) = self.run.task, next(self.batches.start(0))
        every = self.batches.steps_per_epoch
        with self._surgery.attach(model, optimizer, effects_every=0, steps_per_epoch=every) as live:
            model.zero_grad(set_to_none=True)
            live.set_batch(inputs=inputs, targets=targets)
            outputs = model(inputs)
            if live.reads_example_labels:
                live.set_example_labels(task.labels(targets))
            if self.run.backward_per_task and isinstance(task, MultiTask):
                live.backward(task.losses(outputs, targets))
            else:
                task.loss(outputs, targets).backward()
            items = self.experiment.interventions
            acts = any(item.aggregator is None and item.stage == "step" for item in items)
            # A transform in the step may differentiate, which needs the real Dynamo.
            with nullcontext() if acts else compiling.without_dynamo():
                _update(optimizer, self.run.device)
            return live.ledger.of(" -> ".join(live.labels[0]))

    @property
    def _surgery(self) -> Surgery:
        """The run's surgery, always acting. If it has no transform, Identity looks at the sites."""
        items = [replace(item, when=_Acting(item.when)) for item in self.experiment.interventions]
        items = items or [*self.run.surgery.interventions]
        if self.experiment.interventions and self.experiment.intervention is None:
            items.append(Intervention(Identity(), self.experiment.selector))
        return Surgery(*items, seed=self.run.seed)

    def key_of(self, error: BaseException) -> str:
        """Return the key of an error that names no object."""
        item, combining = self.experiment.intervention, self.experiment.combining
        notes = " ".join(getattr(error, "__notes__", ()))
        if combining is not None and (item is None or f"while {combining.names[0]} " in notes):
            return "aggregator"
        if item is None:
            return "site"
        return f"transform.{item.names[0]}" if len(item.names) == 1 else "transform"

    def silence(self, entries: Sequence[Entry]) -> str:
        """Return a sentence if no gradient has passed at any site, otherwise an empty string."""
        if any(entry.calls for entry in entries):
            return ""
        sites = shortened(entry.site for entry in entries) or in_short(self.experiment.selector)
        reasons = ", ".join(dict.fromkeys(entry.skipped for entry in entries if entry.skipped))
        return f"no gradient passes at {sites}" + (f" ({reasons})" if reasons else "")


def _update(optimizer: Optimizer, device: torch.device) -> None:
    """Step an optimizer. Raises a FieldError about the optimizer if it cannot."""
    if device.type != "cpu":  # the trial is made on the CPU
        for group in optimizer.param_groups:
            group |= {"capturable": False} if "capturable" in group else {}
    try:
        optimizer.step()
    except Exception as error:  # PyTorch's own checks raise any class
        if isinstance(error, FieldError) or hasattr(error, "__notes__"):
            raise  # of a transform at stage step
        text = f"{type(optimizer).__name__} cannot step: {one_line(error)}"
        raise FieldError(optimizer, [("", text)]) from error


class _Acting(Trigger):
    """Evaluates `of`, and fires: the first step tries a transform that acts at later ones alone."""

    def __init__(self, of: Trigger) -> None:
        self.of = of

    @cached_property
    def parts(self) -> tuple[Trigger, ...]:
        return self.of.parts

    def fires(self, context: TriggerContext) -> Decision:
        try:
            return None if self.of.fires(context) is None else True
        except FieldError:
            raise
        except Exception as error:  # whatever the trigger raises, under its key
            raise FieldError(self.of, [("", one_line(error))]) from error


def _check_model(task: Task, model: nn.Module, data: Data, errors: ErrorCollector) -> bool:
    """Return whether two examples pass through a model, forward and backward; report its error."""
    inputs, targets = data.train_inputs[:2], data.train_targets[:2]
    try:
        with random_state.preserved():
            task.loss(model(inputs), targets).backward()
    except (Exception, SystemExit) as error:  # a user's model or task may raise anything
        errors.add(
            "model",
            f"inputs {list(inputs.shape)} do not pass through it and the task's loss: "
            f"{type(error).__name__}: {one_line(error)}",
        )
        return False
    return True
