"""One attached intervention: register, suspend, change and remove its hooks."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING

from torch import Tensor, distributed, nn

from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.hooks.controller import HookController, Session
from gradsurg.hooks.group_hook import GroupHook
from gradsurg.hooks.intervention import Intervention
from gradsurg.hooks.transform_hook import TransformHook
from gradsurg.plugins.reductions import of_shards
from gradsurg.sites.base import GroupFn, RegisterHooks, SiteHook, Stage
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.wrapped_models import when_averaged
from gradsurg.surgery.coverage import Coverage
from gradsurg.surgery.forward_observers import observe, observe_output_gradient
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

if TYPE_CHECKING:
    from gradsurg.per_example.gradients import ExampleSource


class Attachment:
    """One attached intervention: its hooks, and the `Attached` that its selector uses.

    `planned` is the intervention after the changes that wait for the end of a backward pass.
    """

    def __init__(self, intervention: Intervention, labels: Sequence[str], session: Session) -> None:
        self.intervention = intervention
        self.planned = intervention
        self.session = session
        self.controller = HookController(session, labels, intervention)
        self.label = self.controller.label
        self.labels = self.controller.labels
        self.notes: list[str] = []
        self._hooks: dict[str, TransformHook] = {}
        self.coverage = Coverage(intervention.at, self.controller, self._hooks)
        self.selects = self.coverage.selects
        self.stack = ExitStack()
        self._observers = ExitStack()  # the forward hooks for the trigger and the transform
        self._registered: list[
            tuple[RegisterHooks, ExitStack]
        ] = []  # hooks that are off while it rests
        self._is_resting = False
        self._calls = 0  # of all hooks, up to the last step
        self._step_calls = 0  # of all hooks, in the last step
        self._warned_of_parts = False
        self._end_checks: list[Callable[[], str]] = []
        self.examples: ExampleSource | None = None

    # Life cycle.

    def attach(self, model: nn.Module) -> None:
        """Hook all sites, and the modules that the trigger reads."""
        item = self.intervention
        self._observe(model)
        self.controller.begin_step()
        item.at.hook(self)
        if self.session.processes > 1 and item.differs_from_average:
            when_averaged(model, self.stack, self._note_average)
        self.coverage.check(model, self.stack)

    def change(self, intervention: Intervention) -> None:
        """Set another transform with the same links, or another trigger, at the same sites."""
        old, self.intervention = self.intervention, intervention
        if intervention.operator != old.operator:
            self._warned_of_parts = False
        self.controller.set(intervention)
        for hook in self._hooks.values():
            hook.renew()
        if self._is_resting:
            self.rest()
        if intervention.when is not old.when:
            self._drop_states([self.label], "/when")
            self._observers.close()
            self._observe(self.session.model)

    def load_states(self) -> None:
        """Use the states and the step loaded into the session."""
        self.controller.set(self.intervention)
        for hook in self._hooks.values():
            hook.load_states()
        if self._is_resting:
            self.rest()

    def begin_step(self) -> None:
        """Decide about the next step, and warn if a site had several gradients in the last.

        Hooks that do nothing in a step are removed for it.
        """
        controller = self.controller
        controller.begin_step()
        if self.examples is not None:
            self.examples.end_step()
        if self._registered and not self._is_resting:
            entries = [hook.entry for hook in self._hooks.values()]
            calls = sum(entry.fired + entry.not_fired + entry.on_device for entry in entries)
            # Fewer than in the step before: the graph may differ, or C++ code discarded a hook.
            if calls - self._calls < self._step_calls and (text := self._discarded_hooks_warning()):
                self.session.warn_once(f"{self.label}: {text}")
            self._calls, self._step_calls = calls, calls - self._calls
        if controller.max_calls > 1:
            if not controller.has_several_tasks and not self._warned_of_parts:
                self._warn_of_parts(controller.max_calls)
            controller.max_calls = 1
        if controller.skips_step is not self._is_resting:
            self.rest()

    def rest(self) -> None:
        """Remove hooks in steps in which they do nothing, and register them again after.

        Compiled code keeps its hooks, because it would not see new ones.
        """
        if not self.controller.skips_step:
            if self._is_resting:
                self._is_resting = False
                for register, stack in self._registered:
                    register(stack)
        elif not self._is_resting and self._registered and not compiling.has_compiled():
            self._is_resting = True
            for _, stack in self._registered:
                stack.close()

    def end_warnings(self) -> list[str]:
        """Return the warnings to emit on detach."""
        checks = [*self._end_checks, self.coverage.end_warning, self._discarded_hooks_warning]
        entries = [entry for entry in self.session.ledger if entry.intervention == self.label]
        if all(entry.all_calls or entry.skipped for entry in entries):  # else the ledger warns
            checks.append(self.coverage.unmatched_warning)
        for check in checks:
            if (text := check()) and f"{self.label}: {text}" not in self.session.warned:
                self.note(text)
        return self.notes

    def _discarded_hooks_warning(self) -> str:
        """A warning of parameters whose hooks C++ code has discarded, else empty."""
        own = {hook.hook for hook in self._hooks.values()}
        names = [
            name
            for name, param in self.session.model.named_parameters()
            if not own.isdisjoint((param._backward_hooks or {}).values())
            and not autograd.python_hooks_run(param)
        ]
        if not names:
            return ""
        return (
            f"a hook that C++ code registered on {', '.join(names)} has discarded the one here; "
            "since then gradients passed unchanged; use stage='accumulated'"
        )

    def close(self) -> None:
        """Remove all hooks; those on built graphs pass gradients unchanged from now on."""
        self.controller.disable()
        self._hooks.clear()
        self._end_checks = []
        self._registered = []
        self.stack.close()
        self._observers.close()

    def drop_records(self) -> None:
        """Drop the states and the ledger entries of an intervention that is removed."""
        self._drop_states([self.label], "/when")
        self._drop_states(self.labels)
        ledger = self.session.ledger
        for entry in [entry for entry in ledger if entry.intervention == self.label]:
            ledger.forget(entry.intervention, entry.site)

    # What a selector sees.

    @property
    def model(self) -> nn.Module:
        """The model whose places are hooked."""
        return self.session.model

    @property
    def steps(self) -> OptimizerSteps:
        """The optimizers of the surgery."""
        return self.session.steps

    @property
    def stage(self) -> Stage:
        """The stage at which the transform acts."""
        return self.intervention.stage

    @property
    def scope(self) -> Scope:
        """Whether the transform takes one gradient or a group of them."""
        return self.intervention.scope

    @property
    def needs_value(self) -> bool:
        """Whether its transform or its trigger reads the tensor whose gradient passes."""
        return self.controller.needs_value

    @property
    def may_skip(self) -> bool:
        """Whether a transform may skip the step of the optimizer."""
        return "skip" in self.intervention.needs

    @property
    def stateful(self) -> str:
        """The first of its transforms and triggers that has a state per site; empty if none."""
        return self.controller.stateful

    @property
    def unsteady(self) -> str:
        """Why two calls with the same gradient may have different results; empty if they cannot."""
        return f"{self.stateful} keeps a state" if self.stateful else self.varies

    @property
    def varies(self) -> str:
        """Why it may draw or decide differently in another process; empty if it cannot."""
        for link in self.intervention.links:
            if "deterministic" not in link.properties:
                return f"{link!r} may draw random numbers"
        for trigger in self.intervention.forward_triggers:
            return f"{trigger!r} reads the newest forward"
        return ""

    @property
    def acts_on_shards(self) -> bool:
        """Whether all of its transforms do, and nothing reads a whole gradient or parameter."""
        reads = self.controller.trigger_reads_gradient or self.controller.needs_value
        return not reads and all(link.acts_on_shards for link in self.intervention.links)

    @property
    def moment(self) -> object:
        """What else determines a result: transform, trigger, step, epoch, switches."""
        item, clock = self.intervention, self.session.clock
        return item.operator, item.when, clock.step, clock.epoch, tuple(clock.flags.items())

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        self.session.ledger.enter(self.label, site, aliases, skipped, foreign)

    def forget(self, site: str) -> None:
        self.session.ledger.forget(self.label, site)

    def note(self, text: str) -> None:
        note = f"{self.label}: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def check_at_end(self, check: Callable[[], str]) -> None:
        self._end_checks.append(check)

    def register(self, register_hooks: RegisterHooks, stack: ExitStack) -> None:
        with ExitStack() as handles:
            register_hooks(handles)
            registered = handles.pop_all()
        stack.callback(registered.close)
        self._registered.append((register_hooks, registered))

    def hook_at(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        hook = self._hooks.get(site)
        if hook is None:
            hook = self._hooks[site] = TransformHook(
                self.controller, self.session.ledger.enter(self.label, site), value
            )
        return hook.hook

    def group_hook(
        self,
        sites: Sequence[str],
        values: Sequence[Callable[[], Tensor | None]],
        gradients: Sequence[Callable[[], Tensor | None]] = (),
        skip: Callable[[], None] | None = None,
    ) -> GroupFn:
        ledger = self.session.ledger
        hooks = [
            TransformHook(self.controller, ledger.enter(self.label, site), value, gradient)
            for site, value, gradient in zip_longest(sites, values, gradients)
        ]
        self._hooks |= dict(zip(sites, hooks, strict=True))
        return GroupHook(self.controller, hooks, skip)

    @contextmanager
    def on_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> Iterator[None]:
        with of_shards(group), self.session.effects.of_shards(group, sizes):
            yield

    def count_bytes(self, site: str, number: int) -> None:
        self.session.ledger.entries[self.label, site].sent += number

    def state(self, key: str) -> dict[str, Tensor]:
        return self.session.states.setdefault(f"{self.label}/{key}", {})

    # Helpers.

    def _observe(self, model: nn.Module) -> None:
        """Hook the modules that the trigger and the transform read in a forward."""
        item, clock = self.intervention, self.session.clock
        for flag in item.flags:
            clock.flags.setdefault(flag.flag, flag.on)
        if item.forward_triggers:
            observe(item.forward_triggers, model, clock, self._observers, self.note)
        if "error" in item.needs:
            observe_output_gradient(model, clock, self._observers)
        if "examples" in item.needs:
            # Imported only by the few surgeries that need it.
            from gradsurg.per_example.gradients import ExampleSource
            from gradsurg.per_example.recorder import Recorder

            recorder = Recorder(model, self._observers)
            self.examples = ExampleSource(recorder, self.session, item.links[0])
            self.controller.examples_of = self.examples.of_group

    def _drop_states(self, labels: Sequence[str], suffix: str = "") -> None:
        """Drop the states with these labels; with suffix `/when`, only those of the trigger."""
        states = self.session.states
        keys = [key for key in states if key.partition("/")[0] in labels and key.endswith(suffix)]
        for key in keys:
            del states[key]

    def _warn_of_parts(self, most: int) -> None:
        """Warn once if acting on each of several gradients differs from acting on their sum."""
        self._warned_of_parts = True
        if not self.intervention.differs_from_sum:
            return
        calls = (
            (site, link.context.call + 1)
            for site, hook in self._hooks.items()
            for link in hook.links
        )
        where = next((site for site, number in calls if number == most), "")
        warnings.warn(
            f"{self.label}: site '{where}' had {most} gradients in one optimizer step and the "
            "transform is not linear: acting on each is not acting on their sum. Use "
            "stage='step' for the sum.",
            SurgeryWarning,
            stacklevel=3,
        )

    def _note_average(self, processes: int) -> None:
        if processes > 1:
            self.note(
                f"it acted on the gradients of each of {processes} processes, before "
                "DistributedDataParallel averaged them, and the transform is not linear: acting on "
                "each is not acting on their average. For the average use "
                "stage='backward_end' or stage='step'."
            )
