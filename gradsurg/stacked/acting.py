"""Apply the transforms of replicas to their slices of the stacked gradients.

Replicas with the same interventions form a group. A deterministic transform of gradsurg, with a
trigger that reads steps or epochs, acts on all slices of its group at once: directly if it is
elementwise without state, else by `vmap`. At any other transform the hooks of each replica run on
its own slices.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from gradsurg.core.intervention import Intervention
from gradsurg.core.site_hook import is_trusted
from gradsurg.effects.effects import made_nonfinite, sketches
from gradsurg.effects.ledger import Entry
from gradsurg.effects.sums import NUM_SUMS, Array, effect_numbers, stacked_sums
from gradsurg.experiment.execution import OpenRun
from gradsurg.experiment.run import Run
from gradsurg.stacked.tasks import Aggregated, Grads, TaskRows
from gradsurg.transforms.base import (
    GroupTransform,
    Stateless,
    Transform,
    TransformContext,
    TransformState,
    substate,
)
from gradsurg.transforms.identity import Identity
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock, TriggerContext
from gradsurg.triggers.epochs import Epochs
from gradsurg.triggers.every import Every
from gradsurg.triggers.phase import Phase
from gradsurg.triggers.steps import Steps

MAX_DIFFERENCE = 1e-5  # relative, of a result under vmap from the one on a slice

STEP_TRIGGERS = (Always, Steps, Every, Epochs, Phase)
"""Triggers whose decision is the same for all sites and seeds."""


class Slices:
    """A group whose hooks run replica by replica: the backward pass of its parameters alone."""

    def __init__(self, runs: Mapping[int, OpenRun]) -> None:
        self._runs = runs
        self._params = {row: dict(run.model.named_parameters()) for row, run in runs.items()}

    def act(self, step: int, grads: Grads, active: Sequence[int]) -> None:
        """Replace the slices of the active replicas by the results of their hooks."""
        for row in active:
            if row not in self._runs:
                continue
            opened, params = self._runs[row], self._params[row]
            present = {name: param for name, param in params.items() if name in grads}
            slices = [grads[name][row] for name in present]
            torch.autograd.backward(list(present.values()), slices)
            opened.live.before_step()
            for own, param in zip(slices, present.values(), strict=True):
                if not opened.run.shadow and param.grad is not None:
                    own.copy_(param.grad)
                param.grad = None
            opened.live.tick()

    def end_interval(self, row: int, done: int) -> None:
        """Do nothing: the hooks have counted and measured."""

    def clear(self) -> None:
        """Do nothing, as `end_interval`."""


class Batch:
    """A group whose transforms act on all slices `rows` at once.

    The gradients are counted here, and added to the ledger and the effects of each replica when an
    interval ends. `difference` is the largest of a result from that on a slice, in `try_on`.
    """

    def __init__(self, runs: Sequence[OpenRun], rows: slice, params: Mapping[str, Tensor]) -> None:
        lead = runs[0]
        (item,) = _transforms(lead.run)
        labels = lead.live.labels[0]  # those of aggregators are the last
        self._item, self._labels, self._label = item, labels, " -> ".join(labels)
        self.runs, self._rows = runs, rows
        self._shadow = lead.run.shadow
        entries = [entry for entry in lead.live.ledger if entry.intervention == self._label]
        self._sites = [entry.site for entry in entries if not entry.skipped]
        self._values = [params[site].detach()[rows] for site in self._sites]
        self._stateless = all(isinstance(link, Stateless) for link in item.links)
        self._clock = Clock(epoch_length=lead.batches.steps_per_epoch)
        self._contexts = [
            [
                TransformContext(
                    site, seed=lead.run.surgery.seed, backward=self._clock, label=label
                )
                for site in self._sites
            ]
            for label in labels
        ]
        self._states = [self._first_state(number) for number in range(len(item.links))]
        self._fired = self._not_fired = 0
        self._samples: list[tuple[int, list[Tensor]]] = []  # steps, and sums of each link and site
        self._sketches: list[Tensor] = []  # of each link and site, at the first of the steps
        self._numbers: tuple[Array, NDArray[np.bool_] | None] | None = None  # of the interval
        self._places: dict[int, tuple[list[Entry], list[int]]] = {}  # entries and slots of a row
        self.difference = 0.0

    def try_on(self, grads: Grads) -> bool:
        """Whether the results on the first and the last replica are those on their own slices."""
        current = self._slices(grads)
        for number, link in enumerate(self._item.links):
            after, state = self._apply(number, current)
            for row in {0, len(self.runs) - 1}:
                own = [grad[row] for grad in current]
                contexts = [
                    TransformContext(
                        context.site,
                        value=value[row],
                        seed=self.runs[row].run.surgery.seed,
                        backward=self._clock,
                        label=context.label,
                    )
                    for context, value in zip(self._contexts[number], self._values, strict=True)
                ]
                before = {key: value[row] for key, value in self._states[number].items()}
                results, alone = _update(link, own, before, contexts)
                pairs = [*zip((one[row] for one in after), results, strict=True)]
                pairs += [(state[key][row], value) for key, value in alone.items()]
                worst = max((difference(one, other) for one, other in pairs), default=0.0)
                self.difference = max(self.difference, worst)
            current = after
        return self.difference <= MAX_DIFFERENCE

    def act(self, step: int, grads: Grads, active: Sequence[int]) -> None:
        """Replace the slices of the group by the results of its transforms."""
        clock, item = self._clock, self._item
        clock.step = step
        every = self.runs[0].run.schedule.effects_every
        sampling = every > 0 and step % every == 0
        always = isinstance(item.when, Always)
        skips = self._shadow and self._stateless and not sampling
        if skips and always:
            return
        if not always and not item.when.fires(TriggerContext(clock, label=self._label)):
            self._not_fired += 1
            return
        self._fired += 1
        if skips:
            return
        current = self._slices(grads)
        sums: list[Tensor] = []
        for number in range(len(item.links)):
            after, self._states[number] = self._apply(number, current)
            if sampling:
                sums += [stacked_sums(*pair) for pair in zip(current, after, strict=True)]
                if not self._samples:
                    self._sketches += [sketches(grad) for grad in current]
            current = after
        if sampling:
            self._samples.append((step, sums))
        if self._shadow:
            return
        for site, result in zip(self._sites, current, strict=True):
            grads[site][self._rows] = result

    def end_interval(self, row: int, done: int) -> None:
        """Add counts, effects and states to a replica's own, as its hooks would have."""
        if not self._holds(row):
            return
        row -= self._rows.start
        live, labels = self.runs[row].live, self._labels
        if row not in self._places:
            entries = [live.ledger.sites[self._label][site] for site in self._sites]
            slots = [live.effects.slot(label, entry) for label in labels for entry in entries]
            self._places[row] = entries, slots
        entries, slots = self._places[row]
        for entry in entries:
            entry.fired += self._fired
            entry.not_fired += self._not_fired
        if self._samples:
            numbers, made = self._interval()
            for slot, own, sketch in zip(slots, numbers[:, row], self._sketches, strict=True):
                live.effects.add_numbers(slot, own, sketch[row])
            if made is not None and made[..., row].any():
                sample, index = np.argwhere(made[..., row])[0]
                live.effects.note_nonfinite(slots[index], self._samples[sample][0])
        for number, link in enumerate(self._item.links):
            if not self._states[number]:
                continue
            state = {key: value[row] for key, value in self._states[number].items()}
            self._save_state(live.session.states, number, link, state)
        live.clock.step = done - 1
        live.tick()

    def clear(self) -> None:
        """Begin a new interval."""
        self._fired = self._not_fired = 0
        self._samples, self._sketches, self._numbers = [], [], None

    def _interval(self) -> tuple[Array, NDArray[np.bool_] | None]:
        """Return the sums over the interval of the numbers of all pairs, (links and sites, k, 2,
        numbers), and whether each pair (samples, links and sites, k) got entries that are not
        finite; None if no pair did.
        """
        if self._numbers is None:
            stacked = [torch.stack(sums) for _, sums in self._samples]
            sums = torch.stack(stacked).numpy()
            sizes = np.array([value[0].numel() for value in self._values] * len(self._labels))
            places = np.broadcast_to(sizes[:, None], sums.shape[:-1]).ravel()
            numbers = effect_numbers(sums.reshape(-1, NUM_SUMS), places)
            numbers = numbers.reshape(*sums.shape[:-1], *numbers.shape[1:])
            # One after the other, as the hooks would add them.
            made = made_nonfinite(sums)
            self._numbers = np.add.reduce(numbers, axis=0), made if made.any() else None
        return self._numbers

    def _holds(self, row: int) -> bool:
        return self._rows.start <= row < self._rows.stop

    def _slices(self, grads: Grads) -> list[Tensor]:
        return [grads[site][self._rows] for site in self._sites]

    def _apply(self, number: int, grads: Sequence[Tensor]) -> tuple[list[Tensor], TransformState]:
        """Apply one link to all slices; return the results and the next state."""
        link, state = self._item.links[number], self._states[number]
        contexts = self._contexts[number]
        for context, value in zip(contexts, self._values, strict=True):
            context.step, context.value = self._clock.step, value
        if isinstance(link, Identity):
            return list(grads), state
        if isinstance(link, Stateless) and "elementwise" in link.properties:
            pairs = zip(grads, contexts, strict=True)
            return [link.apply(grad, context) for grad, context in pairs], state

        def one(
            grads: list[Tensor], values: list[Tensor], state: TransformState
        ) -> tuple[list[Tensor], TransformState]:
            for context, value in zip(contexts, values, strict=True):
                context.value = value
            return _update(link, grads, state, contexts)

        return vmap(one, randomness="error")(list(grads), self._values, state)

    def _first_state(self, number: int) -> TransformState:
        """Return the states of all replicas, as of their checkpoints or new."""
        link = self._item.links[number]
        states = []
        for row, run in enumerate(self.runs):
            saved = self._saved_state(run.live.session.states, number, link)
            states.append(saved or _init(link, [value[row] for value in self._values]))
        return {key: torch.stack([state[key] for state in states]) for key in states[0]}

    def _saved_state(
        self, states: Mapping[str, TransformState], number: int, link: Transform
    ) -> TransformState:
        label = self._labels[number]
        if link.scope == "group":
            return states.get(f"{label}/group", {})
        return {
            f"{index}.{key}": value
            for index, site in enumerate(self._sites)
            for key, value in states.get(f"{label}/{site}", {}).items()
        }

    def _save_state(
        self, states: dict[str, TransformState], number: int, link: Transform, state: TransformState
    ) -> None:
        label = self._labels[number]
        if state and link.scope == "group":
            states[f"{label}/group"] = state
        elif state:
            for index, site in enumerate(self._sites):
                states[f"{label}/{site}"] = substate(state, f"{index}.")


Group = Slices | Batch | Aggregated


def groups_of(
    runs: Sequence[OpenRun], params: Mapping[str, Tensor], grads: Grads, tasks: TaskRows | None
) -> list[Group]:
    """Return the groups of neighbouring runs with equal interventions.

    `grads` are the stacked gradients of a step, on which a batch is compared with slices, and
    `tasks` those of each task.
    """
    groups: list[Group] = []
    start = 0
    for _, same in groupby(runs, key=lambda opened: treatment(opened.run)):
        rows = slice(start, start + len(list(same)))
        start, transforms = rows.stop, _transforms(runs[rows.start].run)
        aggregates = len(transforms) < len(runs[rows.start].run.surgery.interventions)
        if aggregates and tasks is not None:
            groups.append(Aggregated(runs[rows], rows, tasks))
            if not transforms:
                continue
        batch = _batch(runs[rows], rows, params, grads)
        if batch is None and aggregates:
            raise ValueError("the transforms beside an aggregator do not act on all runs at once")
        groups.append(batch or Slices({row: runs[row] for row in range(*rows.indices(len(runs)))}))
    return groups


def treatment(run: Run) -> str:
    """Return a text that is equal for runs with equal interventions."""
    return f"{not run.shadow} {run.surgery.interventions!r}"


def _acts_at_once(run: Run) -> bool:
    """Whether the interventions of a run can act on all slices of a group at once."""
    items = _transforms(run)
    if len(items) != 1 or not all(isinstance(part, STEP_TRIGGERS) for part in items[0].when.parts):
        return False
    return all(is_trusted(link) and "deterministic" in link.properties for link in items[0].links)


def _transforms(run: Run) -> list[Intervention]:
    """Return the interventions of a run that have no aggregator."""
    return [item for item in run.surgery.interventions if item.aggregator is None]


def _batch(
    runs: Sequence[OpenRun], rows: slice, params: Mapping[str, Tensor], grads: Grads
) -> Batch | None:
    """Return the batch of equal runs; None if the interventions have to act on slices."""
    if not _acts_at_once(runs[0].run):
        return None
    live = runs[0].live
    label = " -> ".join(live.labels[0])
    sites = (
        entry.site for entry in live.ledger if entry.intervention == label and not entry.skipped
    )
    if any(site not in grads for site in sites):
        return None
    try:
        batch = Batch(runs, rows, params)
        return batch if batch.try_on(grads) else None
    except (RuntimeError, ValueError, TypeError, NotImplementedError):  # as vmap without a rule
        return None


def _init(link: Transform, grads: Sequence[Tensor]) -> TransformState:
    """Return the first state of a link: of the group, or of each site by its index."""
    if isinstance(link, GroupTransform) and link.scope == "group":
        return link.init_group(grads)
    return {
        f"{index}.{key}": value
        for index, grad in enumerate(grads)
        for key, value in link.init(grad).items()
    }


def _update(
    link: Transform,
    grads: Sequence[Tensor],
    state: TransformState,
    contexts: Sequence[TransformContext],
) -> tuple[list[Tensor], TransformState]:
    """Apply a link at all sites of one replica, with a state as of `_init`."""
    if isinstance(link, GroupTransform) and link.scope == "group":
        acted, state = link.update_group(grads, state, contexts)
        return list(acted), state
    results: list[Tensor] = []
    states: TransformState = {}
    for index, (grad, context) in enumerate(zip(grads, contexts, strict=True)):
        result, after = link.update(grad, substate(state, f"{index}."), context)
        results.append(result)
        states |= {f"{index}.{key}": value for key, value in after.items()}
    return results, states


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest entry; 0 if all bits are equal."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return inf
    if torch.equal(found, expected):
        return 0.0
    if not found.is_floating_point() or not torch.equal(found.isfinite(), expected.isfinite()):
        return inf
    finite = expected.isfinite()
    size = expected[finite].abs().max().item()
    return (found - expected)[finite].abs().max().item() / size if size else inf
