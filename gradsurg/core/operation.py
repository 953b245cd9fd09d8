"""One intervention while it is attached: its trigger's answer, its places, and its hooks."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node

from gradsurg.core.checks import many_at_once
from gradsurg.core.intervention import Intervention
from gradsurg.core.observers import observe, observe_output_gradient
from gradsurg.core.site_hook import SiteHook
from gradsurg.sites.places import AVERAGED, Kind, Memory, Near, Place, Stage
from gradsurg.sites.wrapped_models import of_first_process
from gradsurg.torch_internals import autograd, random_state
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import WHEN, Decision, TriggerContext
from gradsurg.triggers.for_task import ForTask
from gradsurg.triggers.steps import Steps

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment
    from gradsurg.per_example.gradients import ExampleSource

STEADY = (Always(), Steps())
"""Triggers that fire in every step."""


class Operation:
    """One attached intervention. Its links are the transforms of a `Chain`, or its only transform.

    `set` stores everything that depends only on the transform and the trigger. `begin_step` decides
    what is the same for all gradients of a step, so that a `SiteHook` has little to do for each.
    """

    answer: bool | None  # whether the trigger fires in this step; None: `decide` at each gradient
    sampling: bool  # whether effects are measured in this step
    is_idle: bool  # whether nothing acts and nothing is counted in this step
    skips_transform: bool  # whether gradients are counted in this step, and none is transformed
    configuration: object  # another object after each change; hooks compare it by `is`
    open_configuration: object  # the same if `SiteHook`'s fast path is open, otherwise None

    def __init__(
        self,
        attachment: "Attachment",
        intervention: Intervention,
        labels: Sequence[str],
    ) -> None:
        self.attachment, self.labels = attachment, tuple(labels)  # of its links
        self.label = " -> ".join(labels)
        self.at, self.leaves = intervention.at, intervention.at.leaves
        self.stage: Stage = intervention.stage
        self.memory = Memory(intervention.stage)
        self.kinds = tuple(dict.fromkeys(leaf.kind_at(self.stage) for leaf in self.leaves))
        self.hooks: dict[str, SiteHook] = {}  # by site, also those not registered yet
        self.near: Near = frozenset()  # the names of modules and parameters that may have places
        self.met = set[tuple[Kind, str]]()  # the names among them at which a place was found
        self.placed: dict[str, None] = {}  # the sites at which PyTorch has a hook, in order
        # {the sites of a list: {label of a group transform: the sites its state was made for}}
        self.members: dict[tuple[str, ...], dict[str, list[str]]] = {}
        self.is_new = True  # while it is being attached, or bound to other optimizers
        self.notes: list[str] = []  # warnings to emit on detach
        self.end_checks: list[Callable[[], str]] = []  # return another note, or an empty text
        self.examples: ExampleSource | None = None  # for transforms that need single examples
        self.has_several_tasks = False  # whether `live.backward` sends one gradient for each task
        self.observers = ExitStack()  # the forward hooks for the trigger and the transform
        self.awaits_backward = False  # whether a backward pass will show the number of its places
        self.is_on, self.is_closed = True, False  # paused by `live.backward`; detached for good
        self.skipped_nodes: Collection[Node] = ()  # at which gradients pass unchanged
        self.set(intervention)

    def set(self, intervention: Intervention) -> None:
        """Set the transform and the trigger; the next gradient at each site is checked in full."""
        self.intervention, self.trigger = intervention, intervention.when
        attachment, parts = self.attachment, self.trigger.parts
        self.links = [
            facts._replace(label=label)
            for label, facts in zip(self.labels, intervention.facts, strict=True)
        ]
        # The parts of the trigger that name a task of `live.backward`.
        self.named_tasks = [part for part in parts if isinstance(part, ForTask)]
        # A user's trigger is watched until it has once answered without using a global generator.
        self._watches = intervention.has_own_trigger
        self.reads_gradient = intervention.reads_gradient
        # All processes have to change the average in the same way, but each has another batch and
        # its own switches: so they use what process 0 has.
        shares = self.stage in AVERAGED and attachment.processes > 1 and not attachment.shadow
        self._shared_observations = intervention.forward_triggers if shares else ()
        self._shared_flags = intervention.flags if shares else ()
        self._shares_answer = shares and intervention.has_own_trigger
        # The sites seen in the running backward pass. A site that comes again begins a new pass,
        # and there the switches are read from process 0 again.
        self._passed: set[str] = set()
        self.asks = intervention.asks
        self._needs_context = not self.asks.isdisjoint({"value", "entering", "layer", "gradient"})
        self._is_stateless = all(link.apply is not None for link in self.links)
        self.configuration = object()
        # The value of `sampling` for which the decisions of an earlier step hold; None: for none.
        self._decided_for: bool | None = None
        for hook in self.hooks.values():
            hook.renew()
        self.begin_step()

    def invalidate(self) -> None:
        """Decide and check anew after a change outside the intervention, such as of its state."""
        self.set(self.intervention)

    # Decisions of the trigger.

    def begin_step(self) -> None:
        """Decide for all sites whether the trigger fires and whether effects are measured."""
        attachment = self.attachment
        sampling = attachment.effects.sampling
        if self._passed:
            self._passed.clear()
        if self._decided_for is sampling:
            return  # the trigger fires in every step, and effects are measured as in the last one
        is_steady = self.trigger in STEADY
        answer: Decision = is_steady or self._evaluate(
            TriggerContext(attachment.clock, attachment.seed, self.label)
        )
        if self._shares_answer and distributed.is_initialized():
            answer = cast(Decision, of_first_process(answer))
        self.answer = answer if isinstance(answer, bool) else None
        self.sampling = sampling
        # In shadow results are not used: a transform without state runs in measured steps alone,
        # and with the trigger `Always`, which need not be asked, nothing is left to do in others.
        self.skips_transform = attachment.shadow and not sampling and self._is_stateless
        self.is_idle = not self.is_on or (self.skips_transform and isinstance(self.trigger, Always))
        is_open = (
            self.answer is True
            and not self.is_idle
            and not (self.skips_transform or self._needs_context or self.skipped_nodes)
        )
        # `SiteHook` compares this with the configuration for which it has checked a result.
        self.open_configuration = self.configuration if is_open else None
        self._decided_for = sampling if is_steady else None

    def reevaluate(self) -> None:
        """Decide again within a step: something that the trigger reads has changed."""
        self._decided_for = None
        self.begin_step()

    def switch(self, on: bool) -> None:
        """Neither act on nor count gradients while off; once detached it stays off."""
        if not self.is_closed:
            self.is_on = on
            self.reevaluate()

    def skip_nodes(self, nodes: Collection[Node]) -> None:
        """Ignore gradients at these nodes, which two passes of `SharedParameters` reach."""
        self.skipped_nodes = nodes
        self.reevaluate()

    def decide(self, site: str, grad: Tensor, value: Tensor | None) -> bool | Tensor:
        """Evaluate the trigger at one gradient."""
        attachment, key = self.attachment, f"{self.label}/{site}{WHEN}"
        if (self._shared_observations or self._shared_flags) and distributed.is_initialized():
            self._share(site)
        context = TriggerContext(attachment.clock, attachment.seed, self.label, site, grad, value)
        context.state = dict(attachment.states.get(key, {}))  # a trigger writes to this copy
        fires = self._evaluate(context)
        if fires is None:
            raise TypeError(f"{self.trigger!r}: fires() returned None though it had the gradient")
        if self._shares_answer and distributed.is_initialized():
            fires = cast(bool | Tensor, of_first_process(fires))
        if context.state:
            # Inside vmap one gradient stands for many, of which each would have its own state.
            if any(autograd.is_batched(tensor) for tensor in context.state.values()):
                raise many_at_once(self.trigger, site)
            attachment.states[key] = {
                name: autograd.unwrapped(tensor) for name, tensor in context.state.items()
            }
        if isinstance(fires, Tensor) and fires.device != grad.device:
            # Without a wait: the stream of the device orders the copy before its use.
            return fires.to(grad.device, non_blocking=True)
        return fires

    def _share(self, site: str) -> None:
        """Take over the observations of process 0, and once in each backward pass its switches."""
        clock = self.attachment.clock
        for part in self._shared_observations:
            if part in clock.observations and part not in clock.shared:
                clock.observations[part] = of_first_process(clock.observations[part])
                clock.shared.add(part)
        # At the first gradient of each pass: all processes must call this equally often.
        if self._shared_flags and (site in self._passed or not self._passed):
            switches = {
                part.flag: clock.flags.get(part.flag, part.on) for part in self._shared_flags
            }
            clock.flags.update(cast("dict[str, bool]", of_first_process(switches)))
            self._passed.clear()
        self._passed.add(site)

    def _evaluate(self, context: TriggerContext) -> Decision:
        """The answer of the trigger. Raises TypeError if it has another type than `Decision`."""
        try:
            with self._watched(context):
                fires = self.trigger.fires(context)
            # None is no answer yet: it may draw when it has seen the gradient.
            self._watches = self._watches and fires is None
        except Exception as error:  # a user's trigger may raise anything; it is raised again
            where = f"at site '{context.site}'" if context.site else "before a gradient was there"
            step = context.clock.step
            error.add_note(f"while {self.trigger!r} was evaluated {where}, step {step}")
            raise
        if isinstance(fires, Tensor):
            text = f"{fires.dtype} of shape {list(fires.shape)}"
            fits = fires.dtype is torch.bool and not fires.ndim
        else:
            text, fits = repr(fires), fires is None or isinstance(fires, bool)
        if not fits:
            raise TypeError(
                f"{self.trigger!r}: fires() must return True, False, None or a bool tensor of no "
                f"dimension, found {text}"
            )
        return fires

    def _watched(self, context: TriggerContext) -> AbstractContextManager[None]:
        """Raise RuntimeError if a user's trigger draws from a global generator."""
        if not self._watches:
            return nullcontext()
        return random_state.untouched(
            f"{self.label}: {self.trigger!r}",
            context.grad.device if context.grad is not None else torch.device("cpu"),
            "Draw from a torch.Generator seeded by context.seed, context.site and the step.",
        )

    # Answers to kinds of site.

    @property
    def stateful(self) -> str:
        """The first of its transforms and triggers that has a state per site; empty if none."""
        for link in self.intervention.links:
            if link.init(torch.zeros(1)):  # the state of any gradient shows whether there is one
                return repr(link)
        # The state of a trigger is made when it is first evaluated.
        keys = [key for key in self.attachment.states if key.endswith(WHEN)]
        has_state = any(key.partition("/")[0] == self.label for key in keys)
        return repr(self.trigger) if has_state else ""

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
    def unsteady(self) -> str:
        """Why the recomputation of a checkpoint may have another result; empty if it cannot."""
        return f"{self.stateful} keeps a state" if self.stateful else self.varies

    @property
    def moment(self) -> object:
        """What determines a result besides the gradient, compared by `==`; None once it is closed.

        A checkpoint compares both its forwards by it. Unrelated to `Attachment.tell`.
        """
        if self.is_closed:
            return None
        item, clock = self.intervention, self.attachment.clock
        return item.operator, item.when, clock.step, clock.epoch, tuple(clock.flags.items())

    # Life cycle.

    def hook_at(self, place: Place) -> SiteHook:
        """Return the hook of a place, always the same for a site, also of a tied parameter."""
        site = place.site
        if site not in self.hooks:
            self.met.add((place.kind, place.names[0]))
            self.hooks[site] = SiteHook(self, site, place.aliases if place.names[1:] else ())
        return self.hooks[site]

    def observe(self, model: nn.Module) -> None:
        """Hook the modules that the trigger and the transform read in a forward."""
        item, clock = self.intervention, self.attachment.clock
        self.observers.close()
        self.attachment.begin_flags(item)
        if item.forward_triggers:
            observe(item.forward_triggers, model, clock, self.observers, self.note)
        if "error" in item.needs:
            observe_output_gradient(model, clock, self.observers)
        if "examples" in item.needs:
            # Imported only by the few surgeries that need it.
            from gradsurg.per_example.gradients import ExampleSource
            from gradsurg.per_example.recorder import Recorder

            recorder = Recorder(model, self.observers)
            self.examples = ExampleSource(recorder, item.links[0])

    def note(self, text: str) -> None:
        """Record a warning that is emitted when the surgery ends."""
        note = f"{self.label}: {text}"
        if note not in self.notes and note not in self.attachment.warned:
            self.notes.append(note)

    def close(self) -> None:
        """Pass all gradients unchanged from now on.

        Graphs that were built before keep the functions of the hooks, and by them this object. So
        it lets go of the hooks and of the attachment, and with it of the states and the model.
        """
        self.is_on, self.is_closed, self.is_idle, self.open_configuration = False, True, True, None
        self.observers.close()
        for hook in self.hooks.values():
            hook.close()
        self.hooks.clear()
        vars(self).pop("attachment", None)  # deleted, so that its type need not allow None
