"""Attach interventions to a live model, and take them off again."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.effects import Effects
from gradsurg.gate import Gate, GroupGate, Operation
from gradsurg.ledger import Entry, Ledger, SurgeryWarning
from gradsurg.per import reduced_axes
from gradsurg.sites.base import GroupFn, Selector, SiteGate, Stage, through
from gradsurg.sites.parameters import Parameters
from gradsurg.transforms.base import Function, State, Transform, as_transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers import Always, Trigger

GradCallable = Callable[[Tensor], Tensor]

_HOOKS = count()  # tells places hooked by `hook` apart: two of them draw different noise


@dataclass(frozen=True)
class Intervention:
    """What, where and when: a transform (or a plain callable) at the sites of a selector.

    `names` labels the transform, or each link of a `Chain`, in logs. Raises ValueError if the
    transform cannot act at the selector's stage or needs a value that the sites do not have.
    """

    transform: Transform | GradCallable
    at: Selector = field(default_factory=Parameters)
    when: Trigger = field(default_factory=Always)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        transform = as_transform(self.transform)
        if not isinstance(transform, Transform):
            hint = f": did you mean {transform.__name__}()?" if isinstance(transform, type) else ""
            raise TypeError(
                f"transform: must be a Transform or a callable, found {transform!r}{hint}"
            )
        object.__setattr__(self, "transform", transform)
        if not isinstance(self.at, Selector):
            raise TypeError(
                f"at: must be a selector of sites, as Parameters('*'), found {self.at!r}"
            )
        if not isinstance(self.when, Trigger):
            raise TypeError(f"when: must be a trigger, as Steps(stop=100), found {self.when!r}")
        if self.names and len(self.names) != len(self.links):
            raise ValueError(f"names: {len(self.links)} links, found {len(self.names)} names")
        self._check_fit()
        for link in self.links:
            if isinstance(link, Function):
                warnings.warn(
                    f"{link!r} is a plain callable: nothing is known of its laws, so a stage that "
                    "changes its meaning cannot be told",
                    SurgeryWarning,
                    stacklevel=3,
                )

    @property
    def operator(self) -> Transform:
        """The transform; a plain callable has become one."""
        assert isinstance(self.transform, Transform)
        return self.transform

    @property
    def links(self) -> tuple[Transform, ...]:
        """The transforms that act one after the other, each measured by itself."""
        operator = self.operator
        return operator.links if isinstance(operator, Chain) else (operator,)

    @property
    def stage(self) -> Stage:
        """The moment at which it acts."""
        return self.at.resolve(self.operator.scope)

    def _check_fit(self) -> None:
        try:
            _ = self.stage
        except ValueError as error:
            # The link that needs a group is to blame, where there is one.
            guilty = next((k for k in self.links if k.scope == "group"), self.operator)
            raise ValueError(f"{type(guilty).__name__}: {error}") from None
        if self.operator.needs_value and not self.at.has_value:
            needy = next(link for link in self.links if link.needs_value)
            raise ValueError(
                f"{type(needy).__name__}: needs the value whose gradient it gets, and "
                f"{type(self.at).__name__} has none; it can act at Parameters or Outputs"
            )


class Surgery:
    """An ordered list of interventions that can be attached to a model, with their state.

    `seed` decides the random numbers of transforms that draw some; the global generators are never
    touched.
    """

    def __init__(self, *interventions: Intervention, seed: int = 0) -> None:
        for item in interventions:
            if not isinstance(item, Intervention):
                raise TypeError(f"Surgery takes Interventions, found {item!r}")
        self.interventions = interventions
        self.seed = seed
        self.labels = _labels(interventions)
        self._step = 0
        self._states: dict[str, State] = {}
        self._live: Live | None = None

    def __repr__(self) -> str:
        return f"Surgery({', '.join(map(repr, self.interventions))}, seed={self.seed})"

    @contextmanager
    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        effects_every: int = 1,
        shadow: bool = False,
        scaler: torch.amp.GradScaler | None = None,
    ) -> "Iterator[Live]":
        """Hook `model` for the length of a block; all hooks are gone after it, whatever happens.

        `optimizer` moves the step clock that triggers read, and is needed by stage `step`. Effects
        are measured every `effects_every` steps, 0 for never. `shadow` measures without applying.
        Tell the `scaler` if losses are scaled: a transform for which the scale matters is then
        refused at stages that see scaled gradients. Raises LookupError if a selector matches
        nothing, with what there is to match.
        """
        if self._live is not None:
            raise RuntimeError("this surgery is attached already; make a second one")
        live = Live(self, Effects(effects_every), shadow)
        with ExitStack() as stack:
            stack.callback(self._detach, live)
            self._live = live
            for intervention, labels in zip(self.interventions, self.labels, strict=True):
                _check_scaled(intervention, scaler)
                _check_pattern(intervention, model)
                live._add(intervention, labels, model, optimizer, stack)
            if optimizer is not None:
                stack.callback(optimizer.register_step_post_hook(lambda *_: live.tick()).remove)
            yield live
            live.effects.flush()
            for complaint in live._complaints(model):
                warnings.warn(complaint, SurgeryWarning, stacklevel=3)

    def plan(self, model: nn.Module) -> str:
        """What would be hooked, where and at what stage; nothing is touched."""
        lines = []
        for intervention, labels in zip(self.interventions, self.labels, strict=True):
            sites = intervention.at.find(model)
            lines.append(f"{' -> '.join(labels)} at {intervention.at!r}")
            lines.append(f"  stage {intervention.stage}, when {intervention.when!r}")
            lines.extend(f"  {site}" for site in sites)
        return "\n".join(lines) or "no intervention"

    def state_dict(self) -> dict[str, object]:
        """Step and transform state, for a checkpoint; plain tensors, numbers and strings."""
        states = {key: dict(state) for key, state in self._states.items()}
        step = self._live.step if self._live is not None else self._step
        return {"step": step, "transforms": self._names(), "states": states}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take up the state of an equal surgery. Raises ValueError if it is of another one."""
        if self._live is not None:
            raise RuntimeError("load the state before the surgery is attached")
        if state.get("transforms") != self._names():
            raise ValueError(
                f"this state is of {state.get('transforms')}, the surgery is {self._names()}"
            )
        step, states = state.get("step"), state.get("states")
        if not isinstance(step, int) or not isinstance(states, dict):
            raise ValueError("step must be a number and states a dict: is this a surgery's state?")
        self._step = step
        self._states = {key: dict(own) for key, own in states.items()}

    def _names(self) -> list[str]:
        return [f"{item.transform!r} at {item.at!r}" for item in self.interventions]

    def _detach(self, live: "Live") -> None:
        live._retire()
        self._step = live.step
        self._live = None


class Live:
    """A surgery while it is attached: its effects, its ledger, its step clock."""

    def __init__(self, surgery: Surgery, effects: Effects, shadow: bool) -> None:
        self.effects = effects
        self.ledger = Ledger()
        self.shadow = shadow
        self.step = surgery._step
        self._surgery = surgery
        self._gates: list[_Gates] = []
        self._began = self.step
        self._params: dict[str, ref[nn.Parameter]] = {}
        effects.begin(self.step)

    def tick(self) -> None:
        """One optimizer step is done; called by the optimizer's own hook where one was given."""
        self.step += 1
        self.effects.begin(self.step)
        for gates in self._gates:
            gates.begin(self.step)

    def _add(
        self,
        intervention: Intervention,
        labels: Sequence[str],
        model: nn.Module,
        optimizer: Optimizer | None,
        stack: ExitStack,
    ) -> None:
        surgery = self._surgery
        operation = Operation(
            links=list(zip(labels, intervention.links, strict=True)),
            trigger=intervention.when,
            effects=self.effects,
            states=surgery._states,
            seed=surgery.seed,
            shadow=self.shadow,
            stepping=optimizer is not None,
        )
        operation.begin(self.step)
        intervention.at.find(model)
        if isinstance(intervention.at, Parameters):
            self._params |= {name: ref(param) for name, param in model.named_parameters()}
        gates = _Gates(" -> ".join(labels), operation, self.ledger, _sum_matters(intervention))
        self._gates.append(gates)
        stage = intervention.stage
        intervention.at.hook(model, optimizer, stage, intervention.operator.scope, gates, stack)

    def _retire(self) -> None:
        """Hooks on graphs that are already built outlive their handles; from now on they pass."""
        for gates in self._gates:
            gates.operation.retire()

    def _complaints(self, model: nn.Module) -> list[str]:
        said = self.ledger.complaints()
        met = {entry.intervention for entry in self.ledger}
        said += [
            f"{gates.label}: attached, but none of its sites was met: was the model called?"
            for gates in self._gates
            if gates.label not in met
        ]
        whens = {type(item.when).__name__ for item in self._surgery.interventions} - {"Always"}
        if whens and self.step == self._began and any(entry.calls for entry in self.ledger):
            said.append(
                f"{', '.join(sorted(whens))}: no optimizer step was counted; "
                "attach(model, optimizer) or call live.tick() after each step"
            )
        now = dict(model.named_parameters())
        replaced = [name for name, held in self._params.items() if now.get(name) is not held()]
        if replaced:
            said.append(
                "parameters were replaced while the block was open, and what took their place is "
                f"not hooked: {', '.join(replaced)}; attach after replacing"
            )
        return said


class _Gates:
    """The gates of one intervention, made as its selector asks for them."""

    def __init__(self, label: str, operation: Operation, ledger: Ledger, sum_matters: bool) -> None:
        self.label = label
        self.operation = operation
        self.ledger = ledger
        self.sum_matters = sum_matters
        self.needs_value = operation.needs_value
        self._made: dict[str, Gate] = {}

    def expect(self, site: str, aliases: Sequence[str] = (), skipped: str = "") -> None:
        self.ledger.enter(self.label, site, aliases, skipped)

    def forget(self, site: str) -> None:
        self.ledger.forget(self.label, site)

    def gate(self, site: str, value: Callable[[], Tensor | None] | None = None) -> SiteGate:
        gate = self._made.get(site)
        if gate is None:
            gate = Gate(self.operation, self._entry(site), value)
            self._made[site] = gate
        return gate.hook

    def group(self, sites: Sequence[str], values: Sequence[Callable[[], Tensor | None]]) -> GroupFn:
        gates = [
            Gate(self.operation, self._entry(site), value)
            for site, value in zip(sites, values, strict=True)
        ]
        self._made = dict(zip(sites, gates, strict=True))
        return GroupGate(self.operation, gates)

    def begin(self, step: int) -> None:
        """A step begins; say once if the stage changed the transform's meaning in the last one."""
        self.operation.begin(step)
        most, where = 1, ""
        for site, gate in self._made.items():
            passed = gate.begin(step)
            if passed > most:
                most, where = passed, site
        if where and self.sum_matters:
            self.sum_matters = False
            warnings.warn(
                f"{self.label}: site '{where}' had {most} gradients in one optimizer step and the "
                "transform is not linear: acting on each is not acting on their sum. Use "
                "stage='step' for the sum.",
                SurgeryWarning,
                stacklevel=2,
            )

    def _entry(self, site: str) -> Entry:
        return self.ledger.enter(self.label, site)


def hook(place: Tensor | Node, transform: Transform | GradCallable) -> RemovableHandle:
    """Put a transform on one tensor's gradient, or on what enters one autograd node.

    The handle's `remove()` takes it off; the handle is also a context manager. No step is counted
    here: `context.step` stays 0; the n-th place hooked in a process draws the n-th noise. Raises
    ValueError for a group transform.
    """
    if not isinstance(place, Tensor | Node):
        raise TypeError(f"place: must be a tensor or a node of the graph, found {place!r}")
    intervention = Intervention(transform)
    if intervention.operator.scope == "group":
        raise ValueError(f"{transform!r} needs all gradients of a group at once; a hook has one")
    if intervention.operator.needs_value and not isinstance(place, Tensor):
        raise ValueError(f"{transform!r} needs the value whose gradient it gets; a node has none")
    (labels,) = _labels([intervention])
    links = list(zip(labels, intervention.links, strict=True))
    operation = Operation(
        links, Always(), Effects(every=0), {}, seed=0, shadow=False, stepping=False
    )
    operation.begin(0)
    ledger = Ledger()
    if isinstance(place, Tensor):
        gate = Gate(operation, ledger.enter("hook", f"tensor{next(_HOOKS)}"), ref(place))
        return place.register_hook(gate.hook)
    gates = [
        Gate(operation, ledger.enter("hook", f"{place.name()}{next(_HOOKS)}.{index}"), None).hook
        for index in range(len(place._input_metadata))
    ]
    return place.register_prehook(lambda grads: through(gates, grads))


def _labels(interventions: Sequence[Intervention]) -> list[tuple[str, ...]]:
    """A label for every link: as given, or its class's name in snake case; a second gets `_2`."""
    taken: set[str] = set()

    def label(given: str) -> str:
        numbered = (f"{given}_{number}" for number in count(2))
        free = next(name for name in chain([given], numbered) if name not in taken)
        taken.add(free)
        return free

    return [
        tuple(
            label(name)
            for name in intervention.names or [_snake(type(link)) for link in intervention.links]
        )
        for intervention in interventions
    ]


def _snake(cls: type) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def _sum_matters(intervention: Intervention) -> bool:
    """Whether acting on each of several backward passes differs from acting on their sum."""
    laws = intervention.operator.laws
    match intervention.stage:
        case "backward" if isinstance(intervention.at, Parameters):
            return "linear" not in laws
        case "accumulated":
            return not {"linear", "idempotent"} <= laws
        case _:
            return False


def _check_scaled(intervention: Intervention, scaler: torch.amp.GradScaler | None) -> None:
    scaled = scaler is not None and scaler.is_enabled() and intervention.stage != "step"
    if scaled and "homogeneous" not in intervention.operator.laws:
        raise ValueError(
            f"{intervention.operator!r}: stage '{intervention.stage}' sees gradients times the "
            "loss scale, and this transform depends on their size. Use Parameters(stage='step')."
        )


def _check_pattern(intervention: Intervention, model: nn.Module) -> None:
    """A pattern that cannot fit a parameter is refused now, not at its first gradient."""
    if not isinstance(intervention.at, Parameters):
        return
    params = dict(model.named_parameters(remove_duplicate=False))
    for link in intervention.links:
        per = getattr(link, "per", None)
        if not isinstance(per, str):
            continue
        for site in intervention.at.find(model):
            try:
                reduced_axes(per, params[site].ndim)
            except ValueError as error:
                raise ValueError(f"{type(link).__name__}.{error}, as '{site}' is") from None
