"""One attached intervention: what acts and when, decided for all its sites once a step."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd.graph import Node

from gradsurg.effects.effects import Effects
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Stateless, Transform, TransformContext, TransformState
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock, Decision, TensorTrigger, Trigger, TriggerContext

ERRORS = Exception  # whatever a user's transform raises: it gets a note and is raised again


class HookController:
    """One attached intervention: what its gates share. Its flags are set once a step."""

    __slots__ = (
        "asleep",
        "at_once",
        "clock",
        "effects",
        "firing",
        "grouped",
        "idle",
        "label",
        "lasts",
        "links",
        "looks",
        "most",
        "needs_entering",
        "needs_value",
        "on",
        "opened",
        "ready",
        "rests",
        "sampling",
        "seed",
        "settled",
        "shadow",
        "short",
        "spared",
        "stateless",
        "states",
        "trigger",
    )

    def __init__(
        self,
        links: Sequence[tuple[str, Transform]],
        trigger: Trigger,
        effects: Effects,
        states: dict[str, TransformState],
        clock: Clock,
        seed: int = 0,
        shadow: bool = False,
        stepping: bool = False,
        at_once: bool = False,
        rests: bool = False,
    ) -> None:
        self.label = " -> ".join(label for label, _ in links)
        self.effects = effects
        self.states = states
        self.clock = clock
        self.seed = seed
        self.shadow = shadow
        # What passes outside a backward may be written to before a backward ends: measure it now.
        self.at_once = at_once
        # What is put into `.grad` or handed out may be written to: nobody else may hold it.
        self.rests = rests
        # Whether autocast may be asked about once a step: a backward is in it or not, and where no
        # steps are counted, or a forward enters and leaves it, it is asked about each time.
        self.lasts = stepping and not at_once
        self.most = 1  # gradients in one step at one site
        self.on = True
        self.spared: Collection[Node] = ()  # what comes to these is left alone
        self.set(links, trigger)

    def set(self, links: Sequence[tuple[str, Transform]], trigger: Trigger) -> None:
        """What acts and when, now or anew."""
        self.links = links
        self.trigger = trigger
        sources = {part.source for part in trigger.parts if isinstance(part, TensorTrigger)}
        self.looks = "grad" in sources
        needs = {need for _, link in links for need in link.needs}
        self.needs_entering = "entering" in needs
        self.needs_value = "value" in needs or "value" in sources
        self.stateless = all(isinstance(link, Stateless) for _, link in links)
        self.grouped = any(link.scope == "group" for _, link in links)
        self.begin_anew()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.clock.step

    def begin_anew(self) -> None:
        """Other links, other states: what gates have seen of the old ones tells nothing."""
        self.opened = object()
        # Whether steps were sampled when all below was found, where nothing else can change it.
        self.settled: bool | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins: decide for all sites whether the trigger fires and effects are sampled.

        A trigger that has to see the site or its gradient says None: it is asked there.
        """
        sampling = self.effects.sampling
        self.ready: object = None
        if self.settled is sampling:
            return
        fires = self._ask(TriggerContext(self.clock, self.seed, self.label))
        self.firing = fires if isinstance(fires, bool) else None
        self.sampling = sampling
        # A shadowed transform without state leaves no trace in a step that is not measured.
        self.idle = self.shadow and not sampling and self.stateless
        # Nor does its trigger, where it asks for nothing: the step may be that of a plain model.
        self.asleep = self.idle and isinstance(self.trigger, Always)
        # The short way: nothing to ask, nothing to measure at once.
        self.short = (
            self.on
            and fires is True
            and not (self.idle or self.needs_value or self.needs_entering)
            and not ((self.at_once and sampling) or self.spared)
        )
        if isinstance(self.trigger, Always):
            self.settled = sampling

    def begin_again(self) -> None:
        """Something else that triggers read has changed inside the step."""
        self.settled = None
        self.begin()

    def pause(self) -> None:
        """What passes from now on is neither acted on nor counted."""
        self.on = False
        self.begin_again()

    def resume(self) -> None:
        """The end of a pause."""
        self.on = True
        self.begin_again()

    def spare(self, nodes: Collection[Node]) -> None:
        """What comes to these autograd nodes from now on is neither acted on nor counted."""
        self.spared = nodes
        self.begin_again()

    @property
    def passes(self) -> bool:
        """Whether what has come is left alone, whatever the trigger says."""
        if not self.on or self.asleep:
            return True
        return bool(self.spared) and autograd.running_node() in self.spared

    def recur(self, context: TransformContext) -> None:
        """A site has met another gradient in the same step."""
        context.call += 1
        if context.call >= self.most:
            self.most = context.call + 1

    def opens(self) -> bool:
        """Whether the short way is open, which it is not under autocast; `ready` says so for the
        rest of this step where that can be told.
        """
        if not self.short or autograd.any_autocast():
            return False
        if self.lasts:
            self.ready = self.opened
        return True

    def is_autocast(self, device: str) -> bool:
        """Whether what runs now runs under the autocast of this device."""
        return is_autocast_available(device) and torch.is_autocast_enabled(device)

    def fires(self, site: str, grad: Tensor, value: Tensor | None) -> bool | Tensor:
        """Whether the trigger fires at this gradient."""
        key = f"{self.label}/{site}/when"
        trigger_context = TriggerContext(self.clock, self.seed, self.label, site, grad, value)
        trigger_context.state = dict(self.states.get(key, {}))
        fires = self._ask(trigger_context)
        if fires is None:
            raise TypeError(f"{self.trigger!r}: fires() said None where the gradient was at hand")
        if trigger_context.state:
            if any(autograd.is_batched(tensor) for tensor in trigger_context.state.values()):
                raise RuntimeError(
                    f"{self.trigger!r} remembers one thing for each site, and inside vmap the site "
                    f"'{site}' has many gradients at once"
                )
            self.states[key] = {name: own.detach() for name, own in trigger_context.state.items()}
        if isinstance(fires, Tensor) and fires.device != grad.device:
            return fires.to(grad.device, non_blocking=True)
        return fires

    def _ask(self, trigger_context: TriggerContext) -> Decision:
        """What the trigger says, if it may say that."""
        try:
            fires = self.trigger.fires(trigger_context)
        except ERRORS as error:
            where = (
                f"at site '{trigger_context.site}'"
                if trigger_context.site
                else "before a gradient was there"
            )
            error.add_note(f"while {self.trigger!r} was asked {where}, step {self.step}")
            raise
        if isinstance(fires, Tensor):
            found = f"{fires.dtype} of shape {list(fires.shape)}"
            fits = fires.dtype is torch.bool and not fires.ndim
        else:
            found, fits = repr(fires), fires is None or isinstance(fires, bool)
        if not fits:
            raise TypeError(
                f"{self.trigger!r}: fires() must say True, False, None or a bool tensor of no "
                f"dimension, found {found}"
            )
        return fires

    def retire(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        self.on = self.short = False
        self.ready = None
