"""A trial step on a model that is thrown away: what could never act is found before a run."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from gradsurg.config.culprits import culprit, guilty, inside, joined, parts
from gradsurg.config.ever import Asked, Ever
from gradsurg.config.make import ERRORS, sentence
from gradsurg.config.settings import Settings
from gradsurg.effects.ledger import Entry, SurgeryWarning
from gradsurg.multitask.shared_parameters import SharedParameters
from gradsurg.plugins.fields import FieldError, nearest, told
from gradsurg.sites.base import Selector
from gradsurg.surgery.forward_observers import observed_modules
from gradsurg.surgery.intervention import Intervention, labels_of
from gradsurg.surgery.surgery import Surgery
from gradsurg.tasks.base import Data, Examined, MultiTask, Task
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import (
    GroupTransform,
    Scope,
    TransformContext,
    TransformProperty,
    TransformState,
)
from gradsurg.transforms.identity import Identity
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock, Trigger
from gradsurg.triggers.for_task import ForTask

Losing = Callable[[Tensor, Tensor], Tensor | Mapping[str, Tensor]]

PATIENCE = 100_000  # steps: of a longer run nobody waits to hear that nothing would ever act
SILENT = "no gradient passes at"


@dataclass(frozen=True)
class Trial:
    """What a run would be of. `steady` if one step of it tells of all: the model and the task are
    gradsurg's own; where they are a user's, what does not act now may act later, and is warned of.
    """

    model: nn.Module
    task: Task
    data: Data
    settings: Settings | None  # None: they are wrong themselves
    label: str
    scope: Scope
    steady: bool

    def check_site(self, selector: Selector) -> None:
        """Raises FieldError if nothing is found to hook, or if no gradient passes there."""
        if self._site_fault(selector):
            path, part = guilty(selector, lambda other: bool(self._site_fault(other)))
            fault = self._site_fault(part)
            field = culprit(part, lambda other: not self._site_fault(other))
            self._refuse(joined(path, field), fault, self.steady or SILENT not in fault)

    def check_joint(self, joint: Intervention, *others: Intervention) -> None:
        """Raises FieldError, with the whole key, if no training step with an aggregator can be
        made: that of `shared` if it acted elsewhere, that of another intervention if it says so.
        """
        fault = self._joint_fault(joint, *others)
        if not fault:
            return
        for other in others:
            label = " -> ".join(labels_of(other))
            if fault.startswith(f"{label}: "):
                text = fault.removeprefix(f"{label}: ")
                own = any(text.startswith(repr(part)) for part in other.when.parts)
                raise FieldError("", [("when" if own else "transform", text)])

        def acts(at: Selector) -> bool:
            return not self._joint_fault(replace(joint, at=at), *others)

        if joint.at != SharedParameters() and acts(SharedParameters()):
            field = culprit(joint.at, acts)
            text = fault.removeprefix(f"{field}: ").removeprefix("SharedParameters: ")
            raise FieldError("", [(joined("shared", field), text)])
        own = re.match(rf"{type(joint.aggregator).__name__}\.(\w+): ", fault)
        field, text = (own[1], fault[own.end() :]) if own else ("", fault)
        raise FieldError("", [(joined("aggregator", field), text)])

    def check_transform(self, intervention: Intervention) -> None:
        """Raises ValueError if a training step with the transform cannot be made, as where what it
        needs does not come.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                surgery = Surgery(replace(intervention, when=Always()))
            self._ledger(surgery, self.task.loss)
        except ERRORS as error:  # whatever it is, training would meet it too
            raise ValueError(sentence(error)) from error

    def check_when(self, selector: Selector, trigger: Trigger) -> None:
        """Raises FieldError if the trigger cannot be asked, or fires at no step of the run."""
        for path, part in parts(trigger):
            try:
                observed_modules(part, self.model)
            except LookupError as error:
                self._refuse(joined(path, "source"), sentence(error), True)
            if isinstance(part, ForTask):
                names = self._names
                if part.task not in names:
                    near = nearest(part.task, list(names)) if names else "The task has one loss."
                    text = f"there is no loss '{part.task}'. {near}"
                    self._refuse(joined(path, "task"), text, True)
        own = all(type(part).__module__.startswith("gradsurg.") for part in trigger.parts)
        if self.settings is None or not own:
            return  # a user's own may have a memory, or be moved from outside
        if not self._fires(selector, trigger):
            path, part = guilty(trigger, lambda other: not self._fires(selector, other))
            field = culprit(part, lambda other: self._fires(selector, other))
            text = f"{part!r} never fires in {self._length(self.settings)}"
            certain = self.steady or self._by_step(trigger) is False
            self._refuse(joined(path, field), text, certain)

    def _refuse(self, key: str, text: str, certain: bool) -> None:
        if certain:
            raise FieldError("", [(key, text)])
        warnings.warn(f"{text}, as far as one step tells", SurgeryWarning, stacklevel=2)

    def _length(self, settings: Settings) -> str:
        length = f"{settings.steps} steps with batches of {settings.batch_size}"
        after = ", nor in the examination after them" if isinstance(self.task, Examined) else ""
        return f"{length} and epochs of {self._epoch} steps{after}"

    @property
    def _names(self) -> tuple[str, ...]:
        return self.task.names if isinstance(self.task, MultiTask) else ()

    @property
    def _steps(self) -> int:
        """The moments that a trigger is asked about: an examination comes after the last step."""
        steps = self.settings.steps if self.settings is not None else 1
        return steps + isinstance(self.task, Examined)

    @property
    def _batch(self) -> int:
        return self.settings.batch_size if self.settings is not None else 2

    @property
    def _epoch(self) -> int:
        together = self._batch * (self.settings.accumulate if self.settings is not None else 1)
        return max(1, self.data.epoch_size // together)

    def _site_fault(self, selector: Selector) -> str:
        try:
            entries = self._step(selector, Always())
        except ERRORS as error:  # whatever it is, training would meet it too
            return sentence(error)
        if any(entry.calls for entry in entries):
            return ""
        sites = ", ".join(entry.site for entry in entries) or repr(selector)
        reasons = ", ".join(dict.fromkeys(entry.skipped for entry in entries if entry.skipped))
        return f"{SILENT} {sites}" + (f" ({reasons})" if reasons else "")

    def _joint_fault(self, *interventions: Intervention) -> str:
        assert isinstance(self.task, MultiTask)
        try:
            self._ledger(Surgery(*interventions), self.task.losses)
        except (ValueError, TypeError) as error:
            return sentence(error)
        except ERRORS as error:  # whatever it is, training would meet it too
            return sentence(error) if type(error) is LookupError else told(error)
        return ""

    def _fires(self, selector: Selector, trigger: Trigger) -> bool:
        """Whether it may act at a step of the run. Raises FieldError if it cannot be asked."""
        by_step = self._by_step(trigger)
        if by_step is not None:
            return by_step
        ever = Ever(trigger, self._steps)
        self._step(selector, ever)
        if ever.fault:
            raise FieldError("", [ever.fault])
        return ever.hit

    def _by_step(self, trigger: Trigger) -> bool | None:
        """Whether the steps of the run let it act; None if something else decides on that too.

        Of a run that is too long to be asked, they do.
        """
        result: bool | None = False
        if self._steps > PATIENCE:
            return True
        tasks = [part.task for part in trigger.parts if isinstance(part, ForTask)] or [""]
        for step, task in product(range(self._steps), tasks):
            moment = Asked(Clock(step=step, epoch_length=self._epoch, task=task))
            fires = trigger.fires(moment)
            if fires is True or moment.drawn:
                return True
            if fires is not False:
                result = None
        return result

    def _step(self, selector: Selector, trigger: Trigger) -> list[Entry]:
        """One training step that changes nothing: what the ledger has afterwards."""
        leave = Identity() if self.scope == "tensor" else _LeaveGroup()
        several = any(isinstance(part, ForTask) for part in trigger.parts)
        loss: Losing = self.task.loss
        if several and isinstance(self.task, MultiTask):
            loss = self.task.losses
        return self._ledger(Surgery(Intervention(leave, selector, trigger, (self.label,))), loss)

    def _ledger(self, surgery: Surgery, loss: Losing) -> list[Entry]:
        """What the ledger has after a training step that changes nothing."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        count = self._batch
        inputs, targets = self.data.train_inputs[:count], self.data.train_targets[:count]
        with random_state.kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run will say the same
            attached = surgery.attach(
                self.model, optimizer, effects_every=0, steps_per_epoch=self._epoch
            )
            with attached as live:
                optimizer.zero_grad(set_to_none=True)
                found = loss(self.model(inputs), targets)
                found.backward() if isinstance(found, Tensor) else live.backward(found)
                optimizer.step()
                return list(live.ledger)


def check_stage(selector: Selector) -> None:
    """Raises FieldError if a selector has a stage that is none of its kind's."""
    for path, kind in parts(selector):
        allowed = dict.fromkeys((*kind.stages, *kind.group_stages)) if not inside(kind) else {}
        if allowed and kind.stage is not None and kind.stage not in allowed:
            text = f"{type(kind).__name__} cannot have stage '{kind.stage}'"
            fault = f"{text}; stages it can have: {', '.join(allowed)}"
            raise FieldError("", [(joined(path, "stage"), fault)])


class _LeaveGroup(GroupTransform):
    """The gradients of a group as they are."""

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return Identity().properties

    def init_group(self, grads: Sequence[Tensor]) -> TransformState:
        return {}

    def update_group(
        self, grads: Sequence[Tensor], state: TransformState, contexts: Sequence[TransformContext]
    ) -> tuple[list[Tensor], TransformState]:
        return list(grads), state
