"""One intervention while it is attached: its hooks, its decisions, its warnings."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, zip_longest
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch
from torch import Tensor, distributed, nn

from gradsurg.core.coverage import Coverage
from gradsurg.core.firing import Firing
from gradsurg.core.group import GroupHook
from gradsurg.core.intervention import Intervention
from gradsurg.core.observers import observe, observe_output_gradient
from gradsurg.core.session import Session
from gradsurg.core.site_hook import NO_STEP, UNCHECKED, SiteHook
from gradsurg.plugins.reductions import of_shards
from gradsurg.sites.base import GroupFn, ReadTensor, SiteFn, Stage
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.sites.wrapped_models import when_averaged
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

if TYPE_CHECKING:
    from gradsurg.per_example.gradients import ExampleSource

TWICE = "two surgeries"
"""The key of the warning of equal interventions in two surgeries."""

EXAMINED = 4  # first gradients of a site, until it is taken for one in each backward pass

_hooked: "WeakSet[Attached]" = WeakSet()  # in all surgeries


class Attached:
    """One intervention while it is attached, as its selector and its hooks see it.

    `has_several_tasks` says that `live.backward` sends one gradient a task.
    """

    def __init__(self, intervention: Intervention, labels: Sequence[str], session: Session) -> None:
        self.intervention = intervention
        self.session = session
        self.labels = tuple(labels)
        self.label = " -> ".join(labels)
        self.stage: Stage = intervention.stage
        self.scope: Scope = intervention.scope
        self.firing = Firing(session, self.label, intervention)
        self.stack = ExitStack()
        self.notes: list[str] = []
        self.examples: ExampleSource | None = None
        self.has_several_tasks = False
        self.was_compiled = compiling.has_compiled()  # something, before the hooks were there
        self.first_step = session.clock.step
        self.hooks: dict[str, SiteHook] = {}
        self.coverage = Coverage(intervention.at, self.label, self.firing, self.hooks)
        self.selects = self.coverage.selects
        if (changed := intervention.at.changed_tensors) != "gradients":
            session.effects.others[self.label] = changed
        self._observers = ExitStack()  # the forward hooks for the trigger and the transform
        self._most_calls = 1  # the most gradients at one site in this step
        self._roots: dict[str, ref[Tensor]] = {}  # of the last backward pass at each site
        self._end_checks: list[Callable[[], str]] = []

    # Life cycle.

    def attach(self) -> None:
        """Hook all sites, and the modules that the trigger reads."""
        item, model = self.intervention, self.session.model
        _hooked.add(self)
        with _collector_paused():
            if item.flags or item.forward_triggers or item.needs & {"error", "examples"}:
                self._observe(model)
            self.firing.begin_step()
            item.at.hook(self)
            if self.session.processes > 1 and item.differs_from_average:
                when_averaged(model, self.stack, self._note_average)
            self.coverage.check(model, self.stack)

    def change(self, intervention: Intervention) -> None:
        """Set another transform with the same links, or another trigger, at the same sites."""
        old, self.intervention = self.intervention, intervention
        if intervention.operator != old.operator:
            self._most_calls = 1
            self.session.warned.discard(f"{self.label} acts on parts")
        self.firing.set(intervention)
        for hook in self.hooks.values():
            hook.renew()
        if intervention.when is not old.when:
            self._drop_states([self.label], "/when")
            self._observers.close()
            self._observe(self.session.model)

    def load_states(self) -> None:
        """Use the states and the step loaded into the session."""
        self.firing.set(self.intervention)
        for hook in self.hooks.values():
            for link in hook.links:
                link.load()
                link.context.step = NO_STEP

    def begin_step(self) -> None:
        """Decide about the next step, and warn if a site had several gradients in the last."""
        self.firing.begin_step()
        if self.examples is not None:
            self.examples.end_step()
        if (most := self._most_calls) > 1:
            if not self.has_several_tasks and self.intervention.differs_from_sum:
                hooks = self.hooks.values()
                had_most = (hook for hook in hooks if hook.links[0].context.call + 1 == most)
                for hook in islice(had_most, 1):
                    self._warn_of_parts(hook, most, "optimizer step")
            self._most_calls = 1

    def note_repeat(self, hook: SiteHook, call: int) -> None:
        """Note a further gradient of the same step at one site; `call` counts from 0."""
        if call >= self._most_calls:
            self._most_calls = call + 1
        if call < EXAMINED and self.session.clock.step == self.first_step:
            self.note_nested(hook)

    def note_first(self, hook: SiteHook) -> None:
        """Notice at the first gradient of a site what may change it a second time."""
        self.note_nested(hook)
        site, session = hook.entry.site, self.session
        for other in () if session.shadow else list(_hooked):
            if other.session.target is session.target and other.repeats(self, site):
                session.warn_once(
                    f"{self.label}: two open surgeries have this intervention, and both changed "
                    f"the gradient at '{site}'; close() the one that is not meant",
                    key=TWICE,
                )
                other.session.warned.add(TWICE)

    def repeats(self, other: "Attached", site: str) -> bool:
        """Whether it acts as an intervention of another surgery does, and has done so at a site."""
        hook, is_on = self.hooks.get(site), self.firing.answer is not False
        if hook is None or not is_on or self.session.shadow or self.session is other.session:
            return False
        has_fired = bool(hook.entry.fired or hook.entry.on_device)
        return has_fired and self.intervention == other.intervention

    def note_nested(self, hook: SiteHook) -> None:
        """Notice several gradients of one backward pass at one site, in the first step."""
        in_time = self.stage in ("use", "backward", "accumulated")
        root = autograd.root_of_nested_backward() if in_time else None
        if root is not None:
            known = self._roots.get(hook.entry.site)
            is_linear = "linear" in self.intervention.operator.properties
            if known is not None and known() is root and not is_linear:
                self._warn_of_parts(hook, 2, "backward pass, as of reentrant checkpoints,")
            self._roots[hook.entry.site] = ref(root)

    def end_warnings(self) -> list[str]:
        """Return the warnings to emit on detach."""
        checks = [*self._end_checks, self.coverage.end_warning, self.discarded_hooks]
        checks.append(self._nan_states)
        entries = self.session.ledger.of(self.label)
        if all(entry.all_calls or entry.skipped for entry in entries):  # else the ledger warns
            checks.append(self.coverage.unmatched_warning)
        for check in checks:
            if text := check():
                self.note(text)
        return self.notes

    def close(self) -> None:
        """Remove all hooks; those on built graphs pass gradients unchanged from now on."""
        self.firing.disable()
        self._end_checks = []
        self.stack.close()
        self._observers.close()
        self.coverage.close()
        for hook in self.hooks.values():
            hook.close()
        self.hooks.clear()

    def _nan_states(self) -> str:
        """A warning of the first state of a site or of a group that holds a NaN, else empty."""
        transforms = dict(zip(self.labels, self.intervention.links, strict=True))
        tensors = [
            (key, tensor)
            for key, state in self.session.states.items()
            if key.partition("/")[0] in transforms and not key.endswith("/when")
            for tensor in state.values()
            if type(tensor) is Tensor and not tensor.is_meta
        ]
        if not tensors:
            return ""
        # Read together, to synchronize with the device once.
        device = tensors[0][1].device
        flags = torch.stack([tensor.isnan().any().to(device) for _, tensor in tensors]).tolist()
        has_nan = zip(tensors, flags, strict=True)
        spoilt = [*dict.fromkeys(key for (key, _), flag in has_nan if flag)]
        if not spoilt:
            return ""
        label, _, site = spoilt[0].partition("/")
        others = f" and {len(spoilt) - 1} more" if spoilt[1:] else ""
        return (
            f"put Sanitize before {type(transforms[label]).__name__}: its state at {site}{others} "
            f"holds a NaN at step {self.session.clock.step}"
        )

    def drop_records(self) -> None:
        """Drop the states and the ledger entries of an intervention that is removed."""
        self._drop_states([self.label], "/when")
        self._drop_states(self.labels)
        for entry in self.session.ledger.of(self.label):
            self.session.ledger.forget(self.label, entry.site)

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
    def needs_value(self) -> bool:
        """Whether its transform or its trigger reads the tensor whose gradient passes."""
        return self.intervention.reads_value

    @property
    def needs_layer(self) -> bool:
        return "layer" in self.intervention.needs

    @property
    def may_skip(self) -> bool:
        """Whether a transform may skip the step of the optimizer."""
        return "skip" in self.intervention.needs

    @property
    def stateful(self) -> str:
        """The first of its transforms and triggers that has a state per site; empty if none."""
        for link in self.intervention.links:
            if link.init(torch.zeros(1)):
                return repr(link)
        # The state of a trigger is made when it is first evaluated.
        keys = [key for key in self.session.states if key.endswith("/when")]
        has_state = any(key.partition("/")[0] == self.label for key in keys)
        return repr(self.intervention.when) if has_state else ""

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
        reads = self.firing.reads_gradient or self.intervention.reads_value
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
        if note not in self.notes and note not in self.session.warned:
            self.notes.append(note)

    def check_at_end(self, check: Callable[[], str]) -> None:
        self._end_checks.append(check)

    def hook_at(self, site: str, value: ReadTensor | None = None) -> SiteFn:
        return self._hook(site, value).call

    @contextmanager
    def keeping_states(self, site: str) -> Iterator[None]:
        hook, states = self._hook(site, None), self.session.states
        keys = [*(f"{label}/{site}" for label in self.labels), f"{self.label}/{site}/when"]
        before = {key: states[key] for key in keys if key in states}
        try:
            yield
        finally:
            for key in keys:
                states.pop(key, None)
            states |= before
            hook.checked_for = UNCHECKED  # which makes the first state
            for link in hook.links:
                link.load()

    def group_hook(
        self,
        sites: Sequence[str],
        values: Sequence[ReadTensor],
        gradients: Sequence[ReadTensor] = (),
        skip: Callable[[], None] | None = None,
    ) -> GroupFn:
        rows = zip_longest(sites, values, gradients)
        return GroupHook(self, [self._hook(*row) for row in rows], skip)

    @contextmanager
    def on_shards(
        self, group: "distributed.ProcessGroup", sizes: Mapping[str, int]
    ) -> Iterator[None]:
        with of_shards(group), self.session.effects.of_shards(group, sizes):
            yield

    def count_bytes(self, site: str, number: int) -> None:
        self.session.ledger.enter(self.label, site).sent += number

    def state(self, key: str) -> dict[str, Tensor]:
        return self.session.states.setdefault(f"{self.label}/{key}", {})

    # Helpers.

    def _hook(
        self, site: str, value: ReadTensor | None, gradient: ReadTensor | None = None
    ) -> SiteHook:
        """The hook of a site, with these functions: a tensor may have been replaced."""
        hook = self.hooks.get(site)
        if hook is None:
            hook = self.hooks[site] = SiteHook(self, self.session.ledger.enter(self.label, site))
        hook.value, hook.gradient = value or hook.value, gradient or hook.gradient
        return hook

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

    def _drop_states(self, labels: Sequence[str], suffix: str = "") -> None:
        """Drop the states with these labels; with suffix `/when`, only those of the trigger."""
        states = self.session.states
        keys = [key for key in states if key.partition("/")[0] in labels and key.endswith(suffix)]
        for key in keys:
            del states[key]

    def _warn_of_parts(self, hook: SiteHook, number: int, period: str) -> None:
        """Warn once that acting on each of several gradients differs from acting on their sum."""
        self.session.warn_once(
            f"{self.label}: site '{hook.entry.site}' had {number} gradients in one {period} and "
            "the transform is not known to be linear: acting on each is not acting on their sum. "
            "Use stage='step' for the sum.",
            key=f"{self.label} acts on parts",
        )

    def discarded_hooks(self) -> str:
        """A warning of parameters whose hooks C++ code has discarded, else empty."""
        if self.stage != "backward":
            return ""
        values = ((site, hook.value()) for site, hook in self.hooks.items())
        named: dict[Tensor, str] = {
            value: site for site, value in values if isinstance(value, nn.Parameter)
        }
        names = [named[param] for param in autograd.without_hooks(named)]
        if not names:
            return ""
        return (
            f"a hook that C++ code registered on {', '.join(names)} has discarded the one here; "
            "since then gradients passed unchanged; use stage='accumulated'"
        )

    def _note_average(self, processes: int) -> None:
        if processes > 1:
            self.note(
                f"it acted on the gradients of each of {processes} processes, before "
                "DistributedDataParallel averaged them, and the transform is not linear: acting on "
                "each is not acting on their average. For the average use "
                "stage='backward_end' or stage='step'."
            )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector in the block, if it is enabled.

    While thousands of hooks are made, which all live on, it would look through all objects of the
    process again and again: two thirds of the time of attaching.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
