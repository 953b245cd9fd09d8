"""One update of several losses: what `live.backward(losses)` does."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gradsurg.attached import Attached, Patient
from gradsurg.fields import nearest
from gradsurg.intervention import Intervention
from gradsurg.multitask.aggregation import SHARED, Aggregation, Around, check_host
from gradsurg.multitask.features import Watch, cut, side_by_side, split
from gradsurg.multitask.losses import Losses, named, values
from gradsurg.multitask.rows import Block, Rows, views
from gradsurg.sites._params import owned_params
from gradsurg.triggers.for_task import ForTask


class Joint:
    """The aggregators of an attachment, and the backward passes of its losses."""

    def __init__(self, patient: Patient, around: Around, shadow: bool) -> None:
        self.around = around
        self.aggregations: list[Aggregation] = []
        self._patient: Patient | None = patient
        self._shadow = shadow
        self._stack = ExitStack()
        self._watch: Watch | None = None
        self._rows: Rows | None = None
        self._held: dict[str, float] = {}  # the losses so far of rows that wait for more
        self._checked = (0, 0)

    def join(self, intervention: Intervention, label: str) -> None:
        """Take an aggregator in. Raises LookupError or ValueError if it could not act."""
        assert self._patient is not None
        model = self._patient.model
        one = Aggregation(intervention, label, intervention.at.find(model), self.around)
        for other in self.aggregations:
            if both := sorted(one.sites & other.sites):
                raise ValueError(
                    f"{label}: '{other.label}' acts on {', '.join(both)} already, and a parameter "
                    "has one aggregator"
                )
        check_host(intervention.when, label)
        if one.at.features:
            self._watch = Watch(model, one.at.features, self._stack)
        self.aggregations.append(one)

    def backward(self, losses: Losses, attached: Sequence[Attached], last: bool) -> None:
        """As `Live.backward` says."""
        given = named(losses)
        picky = [own for own in attached if _pickers(own)]
        _check_names(picky, given)
        if self._held and list(self._held) != list(given):
            raise ValueError(
                f"losses: the gradients of {', '.join(self._held)} wait for more, found "
                f"{', '.join(given)}"
            )
        one = self.aggregations[0] if self.aggregations else None
        if self._shadow or (not picky and (one is None or one.weighs)):
            self._at_once(one, given, attached, last)
        elif one is not None and one.at.engine == "feature":
            self._at_features(one, given, attached, last)
        else:
            self._one_by_one(given, attached, picky, last)

    def stepped(self) -> None:
        """The optimizer has made a step."""
        if self._held:
            self.around.tell(
                "the optimizer has made a step while gradients waited: the last live.backward of a "
                "step is the one with aggregate=True"
            )

    def complaints(self) -> list[str]:
        """What is to be said when the block ends."""
        met = {entry.intervention for entry in self.around.ledger if entry.all_calls}
        said = [
            f"{one.label}: attached, but live.backward(losses) was never called"
            for one in self.aggregations
            if one.label not in met
        ]
        if self._held:
            said.append("what waits since live.backward(.., aggregate=False) was never aggregated")
        return said

    def close(self) -> None:
        """Let everything go."""
        self._stack.close()
        self._patient = self._rows = self._watch = None
        self._held = {}

    # Three ways of going back: one pass, one pass a task, one pass from where the tasks part.

    def _at_once(
        self,
        one: Aggregation | None,
        given: Mapping[str, Tensor],
        attached: Sequence[Attached],
        last: bool,
    ) -> None:
        """One backward of the weighed losses. Measuring has passes of its own, and changes none."""
        weights = None
        if one is not None and not self._shadow:
            weights = one.weigh(values(given, self.around.scale), last)
        if self.aggregations and self.around.effects.sampling:
            self._observe(given, attached, weights)
        parts = list(given.values())
        if weights is not None:
            parts = [loss * own for loss, own in zip(parts, weights.tolist(), strict=True)]
        reduce(add, parts).backward()

    def _one_by_one(
        self,
        given: Mapping[str, Tensor],
        attached: Sequence[Attached],
        picky: Sequence[Attached],
        last: bool,
    ) -> None:
        """One backward a task, then one through the nodes alone that add to `.grad`."""
        self._check_stateful(attached, len(given))
        rows = self._filled(given, attached, picky)
        before, self._held = self._held, {}
        losses = values(given, self.around.scale)
        losses = {name: loss + before.get(name, 0.0) for name, loss in losses.items()}
        if not last:
            self._held = losses
            return
        found: dict[int, Tensor] = {}
        weights = [1.0] * len(given)
        for one, group, blocks in self._groups(rows):
            parts, own = _reaching(rows, blocks, losses)
            if absent := [name for name in losses if name not in own]:
                self.around.tell(
                    f"{one.label}: {', '.join(absent)} does not reach the shared parameters of "
                    f"'{group}', and has no say in their gradient"
                )
            merged = one.make(group, parts, own)
            if one.weighs and merged.weights is not None:
                weights = merged.weights.tolist()
            for block, grad in zip(blocks, merged.grads, strict=True):
                found |= views(block, rows.params, grad)
        if self.aggregations and not found:
            _nothing_shared(rows, given)
        grads = rows.merged(found, weights)
        rows.clear(0)
        with _paused(_at_leaves(attached)):
            leaves = [rows.params[index] for index in grads]
            torch.autograd.backward(leaves, list(grads.values()))

    def _at_features(
        self,
        one: Aggregation,
        given: Mapping[str, Tensor],
        attached: Sequence[Attached],
        last: bool,
    ) -> None:
        """A pass a task down to where they part, one from there on."""
        if not last:
            raise ValueError(
                "engine 'feature' has the gradients of one forward: aggregate=False needs engine "
                "'full'"
            )
        place = cut(given, self._watch.take() if self._watch is not None else None)
        parts: list[Sequence[Tensor | None]] = []
        leaves: dict[Tensor, Tensor] = {}
        for number, (name, loss) in enumerate(given.items(), 1):
            own = place.heads[name]
            with self._flowing(name, attached):
                ends = [*place.edges, *map(get_gradient_edge, own)]
                grads = torch.autograd.grad(
                    loss,
                    ends,
                    retain_graph=number < len(given),
                    allow_unused=True,
                )
            parts.append(grads[: len(place.edges)])
            pairs = zip(own, grads[len(place.edges) :], strict=True)
            leaves |= {leaf: grad for leaf, grad in pairs if grad is not None}
        pieces = side_by_side(parts)
        rows = [piece.rows for piece in pieces]
        merged = one.make(SHARED, rows, values(given, self.around.scale))
        if leaves:
            with _paused(_at_leaves(attached)):
                torch.autograd.backward(list(leaves), list(leaves.values()))
        grads = split(pieces, merged.grads)
        torch.autograd.backward([place.edges[index] for index in grads], list(grads.values()))

    def _observe(
        self, given: Mapping[str, Tensor], attached: Sequence[Attached], weights: Tensor | None
    ) -> None:
        """How the tasks conflict at this step, from passes of their own that no hook acts in."""
        with _paused(attached):
            rows = self._filled(given, attached, [], retain=True)
        losses = values(given, self.around.scale)
        for one, group, blocks in self._groups(rows):
            parts, own = _reaching(rows, blocks, losses)
            used = weights
            if used is not None:
                used = used[[index for index, name in enumerate(losses) if name in own]]
            one.observe(group, parts, own, used)
        rows.clear(0)

    def _filled(
        self,
        given: Mapping[str, Tensor],
        attached: Sequence[Attached],
        picky: Sequence[Attached],
        retain: bool = False,
    ) -> Rows:
        """The rows, with the gradients of these losses written or added to them."""
        rows = self._current_rows()
        if not self._held:
            rows.clear(len(given))
        for index, (name, loss) in enumerate(given.items()):
            again = retain or index < len(given) - 1
            with self._flowing(name, attached, picky):
                grads = torch.autograd.grad(
                    loss, rows.params, retain_graph=again, allow_unused=True
                )
            if all(grad is None for grad in grads):
                raise ValueError(f"losses['{name}']: reaches no parameter of the model")
            rows.add(index, grads)
        rows.settle()
        return rows

    def _current_rows(self) -> Rows:
        """The rows for the parameters as they are now."""
        assert self._patient is not None
        named = {param: own[0][0] for param, own in owned_params(self._patient.model).items()}
        if self._patient.optimizer is not None:
            for group in self._patient.optimizer.param_groups:
                for param in group["params"]:
                    named.setdefault(param, f"parameter {len(named)} of the optimizer")
        params = {param: name for param, name in named.items() if param.requires_grad}
        rows = self._rows
        if rows is None or [*map(id, rows.params)] != [*map(id, params)]:
            groups = [
                next((one, one.group(name)) for one in self.aggregations if name in one.sites)
                if any(name in one.sites for one in self.aggregations)
                else None
                for name in params.values()
            ]
            keys = [None if at is None else f"{at[0].label}/{at[1]}" for at in groups]
            rows = self._rows = Rows(list(params), list(params.values()), keys)
            self._held = {}
        return rows

    def _groups(self, rows: Rows) -> Iterator[tuple[Aggregation, str, list[Block]]]:
        by_label = {one.label: one for one in self.aggregations}
        for key, blocks in rows.by_group().items():
            label, _, group = key.partition("/")
            yield by_label[label], group, blocks

    def _check_stateful(self, attached: Sequence[Attached], num_tasks: int) -> None:
        """Refuse a memory through which the gradients of several tasks would pass in turn."""
        now = (len(attached), num_tasks)
        if now == self._checked or num_tasks == 1:
            return
        self._checked = now
        for own in attached:
            passes = own.intervention.stage in ("backward", "use", "captured")
            if passes and own.stateful and not _pickers(own):
                raise ValueError(
                    f"{own.label}: {own.stateful} remembers what passes at a site, and there the "
                    f"gradients of {num_tasks} tasks pass one after the other: give it "
                    "when=ForTask(...), or let it act after them with Parameters(stage='step')"
                )

    @contextmanager
    def _flowing(
        self, task: str, attached: Sequence[Attached], picky: Sequence[Attached] = ()
    ) -> Iterator[None]:
        """The gradient of this task flows in the block: transforms and triggers know it."""
        clock = self.around.clock
        clock.task = task
        for own in attached:
            own.expect_tasks()
        for own in picky:
            own.operation.begin_again()
        try:
            yield
        finally:
            clock.task = ""
            for own in picky:
                own.operation.begin_again()


@contextmanager
def _paused(attached: Sequence[Attached]) -> Iterator[None]:
    """None of these acts or counts in the block."""
    for own in attached:
        own.operation.pause()
    try:
        yield
    finally:
        for own in attached:
            own.operation.resume()


def _at_leaves(attached: Sequence[Attached]) -> list[Attached]:
    """Those that have met the gradient of each task, and are not to meet what was made of them."""
    return [own for own in attached if own.intervention.stage == "backward"]


def _pickers(attached: Attached) -> list[ForTask]:
    return [part for part in attached.intervention.when.parts if isinstance(part, ForTask)]


def _check_names(picky: Sequence[Attached], given: Mapping[str, Tensor]) -> None:
    for own in picky:
        for part in _pickers(own):
            if part.task not in given:
                raise LookupError(
                    f"{own.label}: {part!r}, and there is no loss '{part.task}'. "
                    f"{nearest(part.task, list(given))}"
                )


def _reaching(
    rows: Rows, blocks: Sequence[Block], losses: Mapping[str, float]
) -> tuple[list[Tensor], dict[str, float]]:
    """The rows of a group, and the losses, of the tasks that reach it."""
    tasks = rows.reaching(blocks)
    if len(tasks) == len(losses):
        return [block.rows for block in blocks], dict(losses)
    items = list(losses.items())
    return [block.rows[tasks] for block in blocks], dict(items[task] for task in tasks)


def _nothing_shared(rows: Rows, given: Mapping[str, Tensor]) -> None:
    counts = zip(given, rows.reached, strict=True)
    said = ", ".join(f"{name} reaches {len(own)}" for name, own in counts)
    raise ValueError(
        "losses: no parameter that an aggregator has is reached by two tasks, so there is nothing "
        f"to make one of; of all {len(rows.params)} parameters {said}"
    )
