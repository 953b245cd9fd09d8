"""Check before training that a config can train, with at most one trial step.

The trial step finds errors that need a model: a pattern that matches nothing, a site without a
gradient, a trigger that never fires, an aggregator that does not fit the tasks.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import unwrap
from itertools import product
from timeit import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.core.intervention import Intervention
from gradsurg.core.observers import observed_modules
from gradsurg.core.site_hook import is_trusted
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import Entry, SurgeryWarning
from gradsurg.experiment.errors import ErrorCollector, joined
from gradsurg.experiment.instantiate import Config, user_code
from gradsurg.experiment.loop import Batches, outputs_of
from gradsurg.experiment.optimizers import optimizer_maker
from gradsurg.experiment.run import VALIDATION, Run, check_compiled
from gradsurg.experiment.runs import optimizer_config
from gradsurg.experiment.schedules import MAX_CHECKED_STEPS, check_learning_rates, schedule_maker
from gradsurg.experiment.settings import Settings
from gradsurg.multitask.features import module_of
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, only_changed_field
from gradsurg.plugins.messages import full_message, nearest, one_line, place_in_user_code
from gradsurg.sites.base import Selector
from gradsurg.sites.state_guard import untouched
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.torch_internals import compiling, random_state
from gradsurg.transforms.base import (
    GroupTransform,
    Need,
    TransformContext,
    TransformProperty,
    TransformState,
)
from gradsurg.transforms.identity import Identity
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock, Decision, TensorTrigger, Trigger, TriggerContext
from gradsurg.triggers.for_task import ForTask

METRIC_EXAMPLES = 8  # the examples by which the names of metrics are found
MAX_ASKED_STEPS = 100_000  # of a longer run a trigger is taken to fire
SHOWN_BY_A_STEP: set[Need] = {"entering", "error", "labels"}  # needs whose lack only a step shows
LABEL = "dry_run"


def check_settings(
    settings: Settings,
    selector: Selector | None,
    intervention: Intervention | None,
    combining: Intervention | None,
    device: torch.device | None,
    data: Data | None,
    errors: ErrorCollector,
) -> None:
    """Check the short keys against the device, the data, the site and the engine."""
    if data is not None:
        _check_batch_size(settings, data, errors)
    engine = combining.at.engine if combining and isinstance(combining.at, SharedParameters) else ""
    if engine == "feature" and settings.accumulate > 1:
        errors.add(
            "shared.engine",
            "feature makes its update of one forward and needs accumulate=1, found "
            f"accumulate={settings.accumulate}; engine full takes several",
        )
    if settings.precision == "float16":
        if device is not None and device.type != "cuda":
            errors.add(
                "precision",
                "float16 needs CUDA, where the loss is scaled; the device is "
                f"{device.type}, which has bfloat16",
            )
        for key, item in (("site", intervention), ("aggregator", combining)):
            if item is not None:
                with errors.at(key):
                    item.check_loss_scale(torch.amp.GradScaler("cpu"))
    if settings.compile and selector is not None:
        with errors.at("site"):
            check_compiled(selector)
    if settings.compile and engine == "feature":
        errors.add(
            "shared.engine",
            "feature goes on from a representation, which a model that is compiled as one does "
            "not show: use full, or compile=false",
        )


def check_places(
    config: Config,
    settings: Settings,
    selector: Selector | None,
    combining: Intervention | None,
    model: nn.Module | None,
    errors: ErrorCollector,
) -> None:
    """Check the optimizer, the schedule and the sites without a step, for a run of 0 steps."""
    if model is None:
        return
    make_optimizer = optimizer_maker(optimizer_config(config, settings))
    with compiling.without_dynamo():
        optimizer = errors.attempt("optimizer", lambda: make_optimizer(model))
    if optimizer is not None:
        _check_fused(settings, optimizer, errors)
        with errors.at("schedule"):
            schedule_maker(config["schedule"], settings.steps or MAX_CHECKED_STEPS)(optimizer)
    for key, places in (("site", selector), ("shared", combining and combining.at)):
        if places is not None:
            with errors.at(key):
                places.find(model)
                if isinstance(places, SharedParameters) and places.features:
                    module_of(model, places.features)


def check_model(task: Task, model: nn.Module, data: Data, errors: ErrorCollector) -> bool:
    """Pass two examples through a model, forward and backward; return whether that raises nothing.

    Only for a model of which no trial step has shown it.
    """
    inputs, targets = data.train_inputs[:2], data.train_targets[:2]

    def check() -> None:
        try:
            task.loss(model(inputs), targets).backward()
        except (Exception, SystemExit) as error:  # a user's model or task may raise anything
            raise ValueError(
                f"inputs {list(inputs.shape)} do not pass through it and the task's loss: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error

    with random_state.preserved():
        return errors.passes("model", check)


def check_optimizer(
    config: Config, settings: Settings | None, model: nn.Module | None, errors: ErrorCollector
) -> None:
    """Check the optimizer and the schedule."""
    make_optimizer = optimizer_maker(optimizer_config(config, settings))
    # Most errors of an optimizer occur with any parameter.
    stand_in = model or nn.Linear(1, 1, bias=False)
    with compiling.without_dynamo():
        optimizer = errors.attempt("optimizer", lambda: make_optimizer(stand_in))
        if optimizer is not None and settings is not None:
            _check_fused(settings, optimizer, errors)
            with errors.at("optimizer"):
                _step_on_zeros(optimizer)
            with errors.at("schedule"):
                schedule = schedule_maker(config["schedule"], settings.steps)(optimizer)
                check_learning_rates(schedule, settings.steps)


def check_metrics(
    config: Config,
    settings: Settings | None,
    task: Task,
    model: nn.Module,
    data: Data,
    errors: ErrorCollector,
) -> None:
    """Check the examination and the metrics of a model that can be trained."""
    examined: list[str] = []
    if isinstance(task, Examined):
        with errors.at("task"), user_code(config["task"], "examine"), untouched(model):
            examined = examined_names(task, model, data)
    if settings is not None and settings.metric is not None and settings.tune is None:
        with errors.at("metric"), untouched(model):
            own = metric_names(task, model, *few_examples(data))
            names = [f"{part}/{name}" for part in ("test", "train", data.watched) for name in own]
            names += [f"test/{name}" for name in task.trajectory_metric_names]
            names += [f"examined/{name}" for name in examined]
            if settings.metric not in names:
                choices = nearest(settings.metric, list(dict.fromkeys(names)))
                raise ValueError(f"there is no {settings.metric}. {choices}")
    if settings is not None and settings.until is not None:
        with errors.at("until"), untouched(model):
            part, names = data.watched, metric_names(task, model, *few_examples(data))
            if part == "validation" and settings.until.metric.startswith("test/"):
                metric = settings.until.metric.replace("test/", VALIDATION)
                raise ValueError(
                    f"with validation={settings.set_aside:g} the test data are looked at once, at "
                    f"the end: give {metric}, or validation=0"
                )
            settings.until.check([f"{part}/{name}" for name in names])


def few_examples(data: Data) -> tuple[Tensor, Tensor]:
    """Return the first examples of the part that is evaluated during training."""
    inputs, targets = data.part(data.watched)
    return inputs[:METRIC_EXAMPLES], targets[:METRIC_EXAMPLES]


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


def metric_names(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[str]:
    """Return the names of the metrics of a task, found with these examples."""
    return [*task.metrics(outputs_of(model, inputs), targets)]


def examined_names(task: Examined, model: nn.Module, data: Data) -> list[str]:
    """Return the names of the numbers of an examination, found with two examples."""
    two = replace(data, test_inputs=data.test_inputs[:2], test_targets=data.test_targets[:2])
    numbers = task.examine(model.eval(), two).numbers
    model.train()
    return [*numbers]


def check_first_step(
    task: Task,
    data: Data,
    model: nn.Module,
    settings: Settings | None,
    selector: Selector,
    trigger: Trigger | None,
    intervention: Intervention | None,
    combining: Intervention | None,
    certain: bool,
    errors: ErrorCollector,
) -> bool:
    """Make one training step with the surgery; report its exceptions and the hooks it never
    reaches. Return whether the model works without the surgery.

    `settings` is None if they are wrong themselves. A site without a gradient and a trigger that
    never fires are errors if `certain`, else warnings: a later step of a user's own model may
    differ.
    """
    trial = _Trial(task, data, model, settings, certain, errors)
    made = _try_step(trial, selector, trigger, intervention, combining)
    return made or trial.model_works


def _try_step(
    trial: "_Trial",
    selector: Selector,
    trigger: Trigger | None,
    intervention: Intervention | None,
    combining: Intervention | None,
) -> bool:
    """Make the step and check its hooks; return whether it was made to its end."""
    task, model, errors = trial.task, trial.model, trial.errors
    if combining is not None and not isinstance(task, MultiTask):
        combining = None  # which is an error already
    if trigger is not None and not trial.check_names(trigger):
        trigger = None
    fires = trial.fires_by_step(trigger) if trigger is not None else True
    recorder = None
    if trigger is not None and fires is None:
        recorder = FiringRecorder(trigger, trial.num_steps)
    several = isinstance(task, MultiTask) and (
        combining is not None
        or any(isinstance(part, ForTask) for part in (trigger.parts if trigger else ()))
    )
    real = None
    if intervention is not None and several:
        real = intervention
    elif intervention is not None and (
        intervention.checking_links or intervention.operator.needs & SHOWN_BY_A_STEP
    ):
        real = replace(intervention, when=Always())
    elif intervention is not None and trigger is not None:
        # A user's transform may raise anything: better here than after the first control.
        real = None if all(map(is_trusted, intervention.links)) else intervention
    grouped = intervention is not None and intervention.operator.scope == "group"
    identity = _GroupIdentity() if grouped else Identity()
    watching = errors.attempt(
        "site", lambda: Intervention(identity, selector, recorder or Always(), (LABEL,))
    )
    if watching is None:
        return False
    items = [
        item for item in (watching, real, combining and replace(combining, when=Always())) if item
    ]
    key = "site"
    if real is not None:
        links = real.names
        key = f"transform.{links[0]}" if len(links) == 1 else "transform"
    elif combining is not None:
        key = "aggregator"
    if (
        combining is not None
        and isinstance(combining.at, SharedParameters)
        and combining.at.features
    ):
        name = combining.at.features
        if not errors.passes("shared", lambda: module_of(model, name)):
            return False
    before = len(errors.lines)
    entries = trial.step(items, several, key)
    if len(errors.lines) > before:
        return False
    trial.check_gradients(entries, selector)
    if recorder is not None and recorder.error is not None:
        with errors.at("when"):
            if isinstance(recorder.error, FieldError):
                raise recorder.error
            raise ValueError(one_line(recorder.error))
    silent = fires is False or (recorder is not None and not recorder.fired)
    if trigger is not None and silent and len(errors.lines) == before:
        trial.never_fires(trigger, trial.certain or fires is False)
    return True


@dataclass(frozen=True)
class _Trial:
    """A training step on a model that is thrown away."""

    task: Task
    data: Data
    model: nn.Module
    settings: Settings | None
    certain: bool
    errors: ErrorCollector

    @cached_property
    def model_works(self) -> bool:
        """Whether the model works without the surgery; asked only if the step has failed."""
        return check_model(self.task, self.model, self.data, self.errors)

    def check_names(self, trigger: Trigger) -> bool:
        """Check the modules and tasks that a trigger names; return whether all exist."""
        before = len(self.errors.lines)
        for part in trigger.parts:
            with self.errors.at("when"):
                if isinstance(part, TensorTrigger) and part.reads_forward:
                    observed_modules([part], self.model)
                if isinstance(part, ForTask):
                    self._check_task_name(part)
        return len(self.errors.lines) == before

    def fires_by_step(self, trigger: Trigger) -> bool | None:
        """Return whether a trigger fires at any step; None if that also depends on a gradient or
        the batch.

        A user's own trigger may have a memory, or be set from outside: it is taken to fire.
        """
        ours = all(type(part).__module__.startswith("gradsurg.") for part in trigger.parts)
        if self.settings is None or not ours or self.num_steps > MAX_ASKED_STEPS:
            return True
        result: bool | None = False
        tasks = [part.task for part in trigger.parts if isinstance(part, ForTask)] or [""]
        for step, task in product(range(self.num_steps), tasks):
            context = _ChanceRecorder(Clock(step=step, epoch_length=self._epoch, task=task))
            fires = trigger.fires(context)
            if fires is True or context.drawn:
                return True
            if fires is not False:
                result = None
        return result

    def step(self, items: Sequence[Intervention], several: bool, key: str) -> list[Entry]:
        """Make a training step that changes no parameter and return the ledger.

        An error that does not name its object is reported under `key`.
        """
        optimizer = _NoUpdate(self.model.parameters(), {})
        inputs, targets = self._first_batch()
        with (
            self.errors.at(key),
            random_state.preserved(),
            compiling.uncompiled(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the run repeats these warnings
            try:
                attached = Surgery(*items).attach(
                    self.model, optimizer, effects_every=0, steps_per_epoch=self._epoch
                )
                with attached as live:
                    self.model.zero_grad(set_to_none=True)
                    outputs = self.model(inputs)
                    if live.reads_example_labels:
                        live.set_example_labels(self.task.labels(targets))
                    if several and isinstance(self.task, MultiTask):
                        live.backward(self.task.losses(outputs, targets))
                    else:
                        self.task.loss(outputs, targets).backward()
                    optimizer.step()
                    return list(live.ledger)
            except FieldError:
                raise
            # A user's transform, model or task may raise anything.
            except (Exception, SystemExit) as error:
                if self.model_works:
                    # Notes name the transform and the site at which it has raised.
                    has_notes = hasattr(error, "__notes__")
                    named = full_message(error).removeprefix("ValueError: ")
                    text = named if has_notes else one_line(error)
                    raise ValueError(text + place_in_user_code(error)) from error
        return []

    def check_gradients(self, entries: Sequence[Entry], selector: Selector) -> None:
        """Report sites at which no gradient arrived."""
        entries = [entry for entry in entries if entry.intervention == LABEL]
        if any(entry.calls for entry in entries):
            return
        sites = ", ".join(entry.site for entry in entries) or repr(selector)
        reasons = ", ".join(dict.fromkeys(entry.skipped for entry in entries if entry.skipped))
        text = f"no gradient passes at {sites}" + (f" ({reasons})" if reasons else "")
        self._report("site", text, self.certain)

    def never_fires(self, trigger: Trigger, certain: bool) -> None:
        """Report a trigger that fires at no step of the run."""
        assert self.settings is not None
        length = f"{self.settings.steps} steps with batches of {self.settings.batch_size}"
        after = ", nor in the examination after them" if isinstance(self.task, Examined) else ""
        text = f"{trigger!r} never fires in {length} and epochs of {self._epoch} steps{after}"
        self._report(joined("when", only_changed_field(trigger)), text, certain)

    @property
    def num_steps(self) -> int:
        """The number of steps at which triggers are evaluated: one more if there is an
        examination."""
        steps = self.settings.steps if self.settings is not None else 1
        return steps + isinstance(self.task, Examined)

    def _first_batch(self) -> tuple[Tensor, Tensor]:
        """Return the first batch of the first seed."""
        data, settings = self.data, self.settings
        if settings is None or self._batch > data.epoch_size:  # which is an error already
            return data.train_inputs[: self._batch], data.train_targets[: self._batch]
        order = data.order.batches if data.order is not None else None
        batches = Batches(
            data.train_inputs,
            data.train_targets,
            self._batch,
            settings.all_seeds[0],
            order=order,
            epoch_size=data.epoch_size,
        )
        return next(batches.start(0))

    @property
    def _batch(self) -> int:
        return self.settings.batch_size if self.settings is not None else 2

    @property
    def _epoch(self) -> int:
        accumulate = self.settings.accumulate if self.settings is not None else 1
        return max(1, self.data.epoch_size // (self._batch * accumulate))

    def _check_task_name(self, trigger: ForTask) -> None:
        names = self.task.names if isinstance(self.task, MultiTask) else ()
        if trigger.task not in names:
            choices = nearest(trigger.task, list(names)) if names else "The task has one loss."
            raise FieldError(trigger, [("task", f"there is no loss '{trigger.task}'. {choices}")])

    def _report(self, key: str, text: str, certain: bool) -> None:
        if certain:
            self.errors.add(key, text)
        else:
            warnings.warn(f"{text}, as far as one step tells", SurgeryWarning, stacklevel=2)


class FiringRecorder(Trigger):
    """A trigger that never fires and records whether `of` would, at any step and site."""

    def __init__(self, of: Trigger, steps: int) -> None:
        self.of = of
        self.steps = steps
        self.fired = False
        self.error: Exception | None = None

    @cached_property
    def parts(self) -> tuple[Trigger, ...]:
        return self.of.parts

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None:
            return None
        if not self.fired and self.error is None:
            try:
                self.fired = any(self._may_fire(context, step) for step in range(self.steps))
            except Exception as error:  # the trigger's own; reported after the step
                self.error = error
        return False

    def _may_fire(self, context: TriggerContext, step: int) -> bool:
        """Return whether it may fire at a step; chance and the device may decide either way."""
        asked = _ChanceRecorder(
            replace(context.clock, step=step),
            context.seed,
            context.label,
            context.site,
            context.grad,
            context.value,
            dict(context.state),
        )
        return self.of.fires(asked) is not False or asked.drawn


@dataclass
class _ChanceRecorder(TriggerContext):
    """A context that records whether a random number was drawn: another seed may differ."""

    drawn: bool = False

    def chance(self, *key: object) -> float:
        self.drawn = True
        return super().chance(*key)


class _NoUpdate(Optimizer):
    """Leaves the parameters as they are."""

    add_param_group = unwrap(Optimizer.add_param_group)  # the wrapper imports Dynamo

    def step(self, closure: Any = None) -> Any:  # Any: PyTorch's result depends on the closure
        return None


class _GroupIdentity(GroupTransform):
    """Leaves the gradients of a group as they are."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return Identity().properties

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        return list(grads), state


def _check_batch_size(settings: Settings, data: Data, errors: ErrorCollector) -> None:
    """Refuse more examples in a step than the data has."""
    count, size, batches = data.epoch_size, settings.batch_size, settings.accumulate
    if size > count:
        errors.add("batch_size", f"must be <= {count} examples, found {size}")
    elif size * batches > count:
        rule = f"a step's batches must have <= {count} examples together"
        errors.add("accumulate", f"{rule}, found {batches} of {size}")


def _check_fused(settings: Settings, optimizer: Optimizer, errors: ErrorCollector) -> None:
    if settings.precision == "float16" and getattr(optimizer, "_step_supports_amp_scaling", False):
        errors.add(
            "optimizer.fused",
            "must be false with precision=float16: a fused optimizer takes the loss scale off the "
            "gradients by itself, after a surgery at stage 'step' has seen them",
        )


def _step_on_zeros(optimizer: Optimizer) -> None:
    """Make one step on gradients of zero: some optimizers check their fields only then."""
    for group in optimizer.param_groups:
        if group.get("capturable"):
            return  # for other devices than that of the model here
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except Exception as error:  # PyTorch's own checks raise any class
        raise ValueError(f"{type(optimizer).__name__} cannot step: {one_line(error)}") from error
    optimizer.zero_grad()
