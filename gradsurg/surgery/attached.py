"""One intervention in place: its gates and its hooks."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from weakref import ref

from torch import Tensor, nn

from gradsurg.effects.ledger import Entry, SurgeryWarning
from gradsurg.hooks.controller import HookController
from gradsurg.hooks.group_hook import GroupHook
from gradsurg.hooks.session import Session
from gradsurg.hooks.transform_hook import TransformHook
from gradsurg.sites.base import GroupFn, Place, RegisterHooks, SiteHook
from gradsurg.sites.wrapped_models import when_averaged
from gradsurg.surgery.intervention import Intervention, averages_differ, sum_matters
from gradsurg.surgery.roll_call import SiteCount
from gradsurg.torch_internals import compiling
from gradsurg.triggers.base import TensorTrigger
from gradsurg.triggers.flag import Flag


class Attached:
    """One intervention in place: its gates, made as its selector asks for them, and its hooks."""

    def __init__(self, intervention: Intervention, labels: Sequence[str], session: Session) -> None:
        self.intervention = intervention
        self.wanted = intervention  # what it is to be once the backward at hand has ended
        self.controller = controller = HookController(
            session, labels, intervention.operator, intervention.when, intervention.stage
        )
        self.ledger = session.ledger
        self.label = controller.label
        self.labels = controller.labels
        self.stack = ExitStack()
        self.eyes = ExitStack()  # the hooks by which its trigger sees a forward
        self._hooks: list[tuple[RegisterHooks, ExitStack]] = []  # those that are off while it rests
        self._rests = False
        self.notes: list[str] = []
        self._checks: list[Callable[[], str]] = []
        self._sum_matters = sum_matters(intervention)
        self._made: dict[str, TransformHook] = {}
        self._roll_call = SiteCount(intervention.at, controller, self._made)
        # What the model had when it was hooked.
        self._known: dict[int, ref[nn.Module | Tensor]] = {}

    @property
    def needs_value(self) -> bool:
        """Whether its transform or its trigger looks at the tensor whose gradient passes."""
        return self.controller.needs_value

    @property
    def stateful(self) -> str:
        """The first of its transforms and triggers that keeps a memory of each site."""
        return self.controller.stateful

    @property
    def unsteady(self) -> str:
        """Why a tensor that passes twice may have two results."""
        controller = self.controller
        if self.stateful:
            return f"{self.stateful} remembers what it has met"
        for _, link in controller.links:
            if "deterministic" not in link.properties:
                return f"{link!r} is not known to draw no random numbers"
        for part in self.intervention.when.parts:
            if isinstance(part, TensorTrigger) and part.source not in ("grad", "value"):
                return f"{part!r} looks at the newest forward"
        return ""

    @property
    def moment(self) -> object:
        """What else decides about a result: step, switches and fields as they are now."""
        item, clock = self.intervention, self.controller.session.clock
        return item.operator, item.when, clock.step, clock.epoch, tuple(clock.flags.items())

    @property
    def flags(self) -> list[Flag]:
        """The switches that its trigger asks for, or is to ask for."""
        return flags_of(self.intervention) + flags_of(self.wanted)

    def hook(self, session: Session) -> None:
        """Hook all that its selector selects."""
        item, stack = self.intervention, self.stack
        scope = item.operator.scope
        things = (*session.model.modules(), *session.model.parameters())
        self._known = {id(thing): ref(thing) for thing in things}
        item.at.hook(session.model, session.optimizer, item.stage, scope, self, stack)
        if averages_differ(item):
            when_averaged(session.model, stack, self._averaged)
        self._roll_call.begin(session.model, stack)

    def knew(self, thing: object) -> bool:
        """Whether the model had this module or parameter when it was hooked."""
        held = self._known.get(id(thing))
        return held is not None and held() is thing

    def change(self, intervention: Intervention) -> None:
        """Another transform of the same links, or another trigger, in the same places."""
        if intervention.operator != self.intervention.operator:
            self._sum_matters = sum_matters(intervention)
        self.intervention = intervention
        self.controller.set(intervention.operator, intervention.when)
        for gate in self._made.values():
            gate.renew()
        if self._rests:
            self.rest()

    def refresh(self) -> None:
        """Take up states that were loaded, at the step of the day."""
        self.controller.reset()
        for gate in self._made.values():
            gate.load_states()
        if self._rests:
            self.rest()

    def close(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.controller.disable()
        self._made.clear()
        self._known = {}
        self._checks = []
        self._hooks = []
        self.stack.close()
        self.eyes.close()

    def forget_memory(self) -> None:
        """Drop what its trigger has remembered at each site."""
        states = self.controller.session.states
        for key in [key for key in states if _is_of(key, self.label) and key.endswith("/when")]:
            del states[key]

    def forget_states(self) -> None:
        """Drop the states of its transforms too."""
        self.forget_memory()
        states = self.controller.session.states
        for key in [key for key in states if any(_is_of(key, label) for label in self.labels)]:
            del states[key]

    def selects(self, place: Place) -> bool | None:
        return self._roll_call.selects(place)

    def expect(
        self,
        site: str,
        aliases: Sequence[str] = (),
        skipped: str = "",
        foreign: Sequence[str] = (),
    ) -> None:
        self.ledger.enter(self.label, site, aliases, skipped, foreign)

    def forget(self, site: str) -> None:
        self.ledger.forget(self.label, site)

    def note(self, text: str) -> None:
        said = f"{self.label}: {text}"
        if said not in self.notes:
            self.notes.append(said)

    def check_at_end(self, check: Callable[[], str]) -> None:
        self._checks.append(check)

    def register(self, put: RegisterHooks, stack: ExitStack) -> None:
        with ExitStack() as hooked:
            put(hooked)
            own = hooked.pop_all()
        stack.callback(own.close)
        self._hooks.append((put, own))

    def rest(self) -> None:
        """Take off, in steps in which nothing would come of them, the hooks that can be put anew.

        What has been compiled with hooks keeps them: it would not see new ones.
        """
        if not self.controller.skips_step:
            if self._rests:
                self._rests = False
                for put, own in self._hooks:
                    put(own)
        elif not self._rests and self._hooks and not compiling.has_compiled():
            self._rests = True
            for _, own in self._hooks:
                own.close()

    def finish(self) -> list[str]:
        """All that is to be said of it when it ends."""
        checks = [*self._checks, self._roll_call.complaint]
        own = [entry for entry in self.ledger if entry.intervention == self.label]
        if all(entry.all_calls or entry.skipped for entry in own):  # else the ledger tells
            checks.append(self._roll_call.silence)
        for check in checks:
            if text := check():
                self.note(text)
        return self.notes

    def hook_for(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteHook:
        gate = self._made.get(site)
        if gate is None:
            gate = TransformHook(self.controller, self._entry(site), value)
            self._made[site] = gate
        return gate.hook

    def group_hook(
        self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]
    ) -> GroupFn:
        gates = [
            TransformHook(self.controller, self._entry(site), value)
            for site, value in zip(sites, values, strict=True)
        ]
        self._made |= dict(zip(sites, gates, strict=True))
        return GroupHook(self.controller, gates)

    def begin(self) -> None:
        """A step begins."""
        controller = self.controller
        controller.begin_step()
        if controller.max_calls > 1:
            if self._sum_matters and not controller.has_several_tasks:
                self._warn_of_parts(controller.max_calls)
            controller.max_calls = 1

    def _warn_of_parts(self, most: int) -> None:
        """Say once that the stage has changed the transform's meaning in the last step."""
        self._sum_matters = False
        numbered = (
            (site, link.context.call + 1)
            for site, gate in self._made.items()
            for link in gate.links
        )
        where = next((site for site, number in numbered if number == most), "")
        warnings.warn(
            f"{self.label}: site '{where}' had {most} gradients in one optimizer step and the "
            "transform is not linear: acting on each is not acting on their sum. Use "
            "stage='step' for the sum.",
            SurgeryWarning,
            stacklevel=3,
        )

    def _averaged(self, processes: int) -> None:
        if processes > 1:
            self.note(
                f"it acted on the gradients of each of {processes} processes, before "
                "DistributedDataParallel averaged them, and the transform is not linear: acting on "
                "each is not acting on their average. Use stage='step' for the average."
            )

    def _entry(self, site: str) -> Entry:
        return self.ledger.enter(self.label, site)


def flags_of(intervention: Intervention) -> list[Flag]:
    """The switches that its trigger asks for."""
    return [part for part in intervention.when.parts if isinstance(part, Flag)]


def check_flags(flags: Sequence[Flag]) -> None:
    """Refuse a switch that would be both on and off at first."""
    first: dict[str, Flag] = {}
    for flag in flags:
        if first.setdefault(flag.flag, flag).on != flag.on:
            raise ValueError(f"{flag!r}: another trigger has this switch as on={not flag.on}")


def _is_of(key: str, label: str) -> bool:
    """Whether a state is that of a link, or of an intervention: no label has a slash."""
    return key.partition("/")[0] == label
