"""The backward passes of several losses, one a task, and what they give to each parameter."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase

from gradsurg.hooks.controller import Session
from gradsurg.multitask.aggregation import Aggregation, check_apart
from gradsurg.multitask.compiled import leaves_of, runs_once
from gradsurg.multitask.features import REENTRANT
from gradsurg.multitask.flow import Call, flowing
from gradsurg.multitask.losses import leaf_of, nodes_of, values
from gradsurg.multitask.rows import Block, Rows
from gradsurg.sites.selection import owned_params
from gradsurg.torch_internals.compiling import COMPILED
from gradsurg.torch_internals.random_state import kept

ONCE = (
    "a graph was compiled before the surgery was attached, for one backward alone, which may write "
    "to what the forward has saved"
)
RECOMPILE = "Call torch.compiler.reset() and compile it inside the block."

ERRORS = BaseException  # whatever stops a pass: what it has written is dropped, and it goes on


class Passes:
    """The rows that the passes of one live.backward fill, or of several that are one step's."""

    def __init__(self, session: Session, aggregations: Sequence[Aggregation]) -> None:
        self.waiting: dict[str, float] = {}  # the losses so far of rows that wait for more
        self.compiled = False  # whether the last went through graphs that hide what is reached
        self._alive: dict[str, set[int]] = {}  # what each was seen to reach in compiled graphs
        self._looked: dict[str, float] = {}  # those of rows that are only looked at
        self._session = session
        self._aggregations = aggregations
        self._rows: Rows | None = None
        self._norms: list[_NormBase] = []  # the modules that count batches

    def collect(self, call: Call, strict: bool) -> tuple[Rows, dict[str, float]] | None:
        """The rows and the losses of a step; None while they wait for its last batch. `strict` as
        `Rows.settle` has it.
        """
        before = self.waiting
        rows = self._fill(call, list({**before, **call.losses}), anew=not before)
        losses = self._added(before, call)
        self.waiting = {} if call.last else losses
        if not call.last:
            return None
        rows.settle(strict)
        return rows, losses

    def look(self, call: Call) -> tuple[Rows, dict[str, float]] | None:
        """As `collect`, for a measurement, which changes nothing and refuses nothing.

        The graph stays for the backward that follows. A task that reaches nothing is left out, and
        where there is nothing to measure it is None, which is told.
        """
        if REENTRANT in _names(call.losses):
            self._session.warn_once(
                "the losses hold a reentrant checkpoint, through which no task can be followed: "
                "their conflicts are not measured. Use checkpoint(use_reentrant=False)."
            )
            return None
        if runs_once(call.losses.values()):
            self._session.warn_once(
                f"{ONCE}: in such steps the conflicts of the tasks are not measured. {RECOMPILE}"
            )
            return None
        try:
            self._current()
        except LookupError as error:  # all that is selected is frozen by now
            self._session.warn_once(f"{error.args[0]}: the conflicts of the tasks are not measured")
            return None
        before, self._looked = self._looked, {}
        before = before if list(before) == list(call.losses) else {}
        with kept(call.device):  # a hook of somebody else's may draw, and draws again after this
            rows = self._fill(call, list(call.losses), anew=not before, looks=True)
        losses = self._added(before, call)
        if not call.last:
            self._looked = losses
            return None
        if left := rows.settle(strict=False):
            self._session.warn_once(
                f"the gradients of {', '.join(left)} are not dense and real, and have no part in "
                "the conflicts"
            )
        return rows, losses

    def groups(self, rows: Rows) -> Iterator[tuple[Aggregation, str, list[Block]]]:
        """The blocks of each group, and the aggregator that has them."""
        by_label = {one.label: one for one in self._aggregations}
        for key, blocks in rows.by_group().items():
            label, _, group = key.partition("/")
            yield by_label[label], group, blocks

    def discard(self) -> bool:
        """Drop the rows that wait for more; whether there were any."""
        waited, self.waiting = bool(self.waiting), {}
        if waited and self._rows is not None:
            self._rows.clear(self._rows.num_tasks)
        return waited

    def close(self) -> None:
        """Let everything go."""
        self._rows = None
        self.waiting = self._looked = {}

    def _added(self, before: Mapping[str, float], call: Call) -> dict[str, float]:
        """The losses of the step so far."""
        losses = values(call.losses, self._session.loss_scale)
        added = {name: loss + before.get(name, 0.0) for name, loss in losses.items()}
        return {**before, **added}

    def _fill(self, call: Call, tasks: list[str], anew: bool, looks: bool = False) -> Rows:
        """The rows of the `tasks`, with the gradients of these losses written or added to them. One
        that only `looks` leaves the graph as it is, and refuses no task.
        """
        given = call.losses
        nodes = nodes_of(given.values())
        names = {node.name() for node in nodes}
        if REENTRANT in names:
            raise RuntimeError(
                "the losses hold a reentrant checkpoint, which has one backward and hides its "
                "parameters from autograd.grad: use checkpoint(use_reentrant=False), or "
                "engine='feature' if it is below where the tasks part"
            )
        self.compiled = compiled = COMPILED in names
        refuse_a_second_backward(given, shared=not call.retain)
        rows = self._room(len(tasks), anew, looks)
        beyond = [] if looks else _beyond(nodes, rows.params)
        counts = [own for norm in self._norms if norm.training for own in norm.buffers()]
        before = [own._version for own in counts]  # num_batches_tracked has a true one
        reached: list[set[int]] = [set() for _ in given]
        if (len(tasks) > 1 or not call.last) and (compiled or not rows.blocks):
            reached = [_leaves(loss, rows.params) for loss in given.values()]
        if not rows.blocks:
            rows.expect(reached)
        try:
            for index, (name, loss) in enumerate(given.items()):
                again = looks or call.retain or index < len(given) - 1
                # A checkpoint makes its forward anew in each pass: one counts, as without tasks.
                remade = index > 0 and before != [own._version for own in counts]
                with (
                    flowing(name, self._session.clock, call),
                    _unchanged(counts if looks or remade else []),
                ):
                    leaves = [*rows.params, *beyond]
                    grads = torch.autograd.grad(loss, leaves, retain_graph=again, allow_unused=True)
                grads, theirs = grads[: len(rows.params)], grads[len(rows.params) :]
                if all(grad is None for grad in grads) and not looks:
                    raise ValueError(f"losses['{name}']: reaches no parameter of the model")
                if compiled:
                    grads = self._without_zeros(name, grads, reached[index])
                rows.add(tasks.index(name), grads)
                rows.add_beyond(tasks.index(name), beyond, theirs)
        except ERRORS:
            rows.clear(0)
            raise
        return rows

    def _room(self, count: int, anew: bool, looks: bool) -> Rows:
        """The rows of so many tasks, with what has come so far, if not `anew`."""
        rows = self._current()
        if anew or (looks and rows.num_tasks != count):
            rows.clear(count)
        elif not rows.num_tasks:
            raise ValueError(
                "the parameters that need a gradient have changed while gradients waited: change "
                "them between two steps"
            )
        elif rows.num_tasks != count:
            rows.grow(count)
        return rows

    def _without_zeros(
        self, name: str, grads: Sequence[Tensor | None], reached: set[int]
    ) -> list[Tensor | None]:
        """None for what is zero throughout and is not `reached`: a compiled graph has a gradient
        for all that it holds, and so a task seems to reach the heads of the others.
        """
        there = [grad.any() for grad in grads if grad is not None]
        device = there[0].device if there else None
        said = iter(torch.stack([own.to(device) for own in there]).tolist() if there else [])
        alive = self._alive.setdefault(name, set())
        alive |= {index for index, grad in enumerate(grads) if grad is not None and next(said)}
        kept = [
            grad if index in alive or index in reached else None for index, grad in enumerate(grads)
        ]
        if there and all(grad is None for grad in kept):
            self._session.warn_once(
                f"losses['{name}']: its gradient is zero throughout, and a compiled graph does not "
                "tell what it reaches: it has no say in such steps. Compute losses outside of what "
                "is compiled.",
                key=f"{name} is blank",
            )
        return kept

    def _current(self) -> Rows:
        """The rows for the parameters as they are now."""
        model, optimizer = self._session.model, self._session.optimizer
        named = {param: own[0][0] for param, own in owned_params(model).items()}
        for group in optimizer.param_groups if optimizer is not None else []:
            for param in group["params"]:
                named.setdefault(param, f"parameter {len(named)} of the optimizer")
        params = {param: name for param, name in named.items() if param.requires_grad}
        rows = self._rows
        if rows is None or [*map(id, rows.params)] != [*map(id, params)]:
            keys = {}
            for one in self._aggregations:
                one.look(model)
            check_apart(self._aggregations)
            for one in self._aggregations:
                keys |= {name: f"{one.label}/{group}" for name, group in one.groups.items()}
            groups = [keys.get(name) for name in params.values()]
            self._alive = {}
            self._norms = [own for own in model.modules() if isinstance(own, _NormBase)]
            rows = self._rows = Rows(list(params), list(params.values()), groups)
        return rows


def refuse_a_second_backward(
    given: Mapping[str, Tensor], shared: bool, below: Iterable[Node] = ()
) -> None:
    """Raises RuntimeError if a second backward would come to wrong numbers; `shared` and `below` as
    `runs_once` has them.
    """
    if runs_once(given.values(), shared, below):
        raise RuntimeError(f"losses: {ONCE}. {RECOMPILE}")


def _names(given: Mapping[str, Tensor]) -> set[str]:
    return {node.name() for node in nodes_of(given.values())}


@contextmanager
def _unchanged(buffers: Sequence[Tensor]) -> Iterator[None]:
    """These hold after the block what they held before it."""
    before = [own.clone() for own in buffers]
    try:
        yield
    finally:
        for own, kept in zip(buffers, before, strict=True):
            own.copy_(kept)


def _beyond(nodes: Iterable[Node], params: Sequence[Tensor]) -> list[Tensor]:
    """The leaves in a graph that are no parameters of these."""
    known = set(map(id, params))
    leaves = map(leaf_of, nodes)
    return [leaf for leaf in leaves if leaf is not None and id(leaf) not in known]


def _leaves(loss: Tensor, params: Sequence[Tensor]) -> set[int]:
    """The parameters that a loss was made of."""
    found = leaves_of(loss)
    return {index for index, param in enumerate(params) if id(param) in found}
