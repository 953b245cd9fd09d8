"""The gradients of several tasks with respect to each parameter, one backward pass a task."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, chain, pairwise, product
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.batchnorm import _NormBase

from gradsurg.aggregators.rows import Block, is_finite, summed, uninitialized
from gradsurg.multitask.aggregation import Aggregation, check_disjoint
from gradsurg.multitask.features import REENTRANT
from gradsurg.multitask.graph import has_single_use_graph, leaf_ids, leaf_of, nodes_of
from gradsurg.multitask.losses import BackwardCall, loss_values
from gradsurg.multitask.shards import part_of, task_gradients
from gradsurg.plugins.messages import shortened
from gradsurg.sites.selectors import params_of
from gradsurg.torch_internals.autograd import (
    foreach_add_,
    foreach_copy_,
    gradients_of,
    version_of,
)
from gradsurg.torch_internals.compiling import COMPILED
from gradsurg.torch_internals.random_state import preserved

if TYPE_CHECKING:
    from gradsurg.core.attachment import Attachment

Key = TypeVar("Key", int, Tensor)

SINGLE_USE = (
    "a graph was compiled before the surgery was attached, for one backward pass only, which may "
    "overwrite saved tensors"
)
RECOMPILE = "Call torch.compiler.reset() and compile the model inside the block."


LARGE = 1 << 20
"""Entries from which the gradients of a parameter stay as autograd made them; smaller ones are
copied into blocks of about this width."""
MATRIX = 1 << 26
"""Entries up to which all gradients are copied into one matrix: a CPU reads that faster."""


class Jacobian:
    """The gradient of each task with respect to each parameter.

    A parameter with a group that at least two tasks reach is shared; which these are is known only
    after the last task.

    Attributes:
        groups: The group of each parameter, None for parameters without an aggregator.
        reached: For each task, the indices of the parameters with a gradient.
        shared: The indices of the shared parameters, after `finish`.
        has_common: Whether two tasks reach one of them.
    """

    def __init__(
        self, params: Sequence[Tensor], names: Sequence[str], groups: Sequence[str | None]
    ) -> None:
        self.params = params
        self._parts = [*map(part_of, map(Tensor.detach, params))]
        self.names = names
        self.groups = groups
        grouped = [index for index, group in enumerate(groups) if group is not None]
        ends = [*accumulate([self._parts[index].numel() for index in grouped], initial=0)]
        self._columns = dict(zip(grouped, pairwise(ends), strict=True))
        self._width = ends[-1]
        kinds = {(params[index].dtype, params[index].device.type) for index in grouped}
        self._fits = kinds == {(torch.float32, "cpu")}
        self.reset(0)

    @property
    def num_tasks(self) -> int:
        """The number of tasks."""
        return len(self.reached)

    def reset(self, num_tasks: int) -> None:
        """Drop all gradients and expect `num_tasks` tasks; 0 frees the memory of the matrix."""
        self.shared: list[int] = []
        self.has_common = False
        self.reached: list[set[int]] = []
        self._grads: list[dict[int, Tensor]] = []
        self._extra_leaves: list[dict[Tensor, Tensor]] = []
        self._matrix: Tensor | None = None
        if not num_tasks:
            self._buffer, self._places = torch.empty(0, self._width), []
        elif self._fits and num_tasks * self._width <= MATRIX:
            if len(self._places) < num_tasks:
                self._buffer = uninitialized((num_tasks, self._width), torch.float32)
                self._places = [*map(self._places_in, self._buffer)]
            self._matrix = self._buffer[:num_tasks]
        self.add_tasks(num_tasks)

    def _places_in(self, row: Tensor) -> dict[int, Tensor]:
        """Return the places of the gradients in a row of the matrix, by parameter."""
        items = self._columns.items()
        return {i: row[start:end].view_as(self._parts[i]) for i, (start, end) in items}

    def add_tasks(self, num_tasks: int) -> None:
        """Increase the number of tasks to `num_tasks`."""
        if self._matrix is not None and num_tasks > len(self._matrix):
            self._matrix = None  # its gradients stay where they are
        more = range(self.num_tasks, num_tasks)
        self.reached += [set() for _ in more]
        self._grads += [{} for _ in more]
        self._extra_leaves += [{} for _ in more]

    def add(self, task: int, grads: Sequence[Tensor | None]) -> None:
        """Add one gradient of a task for each parameter, None for those that it does not reach."""
        grads = self._copied(task, grads) if self._matrix is not None else grads
        _add(self._grads[task], enumerate(grads))
        self.reached[task] |= {*self._grads[task]}

    def add_extra_leaves(
        self, task: int, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of a task for leaves that are not parameters."""
        _add(self._extra_leaves[task], zip(leaves, grads, strict=True))

    def finish(
        self, strict: bool = True, least: int = 2, with_own: Collection[str] = ()
    ) -> list[str]:
        """Find the shared parameters, that `least` tasks reach, after the last task.

        Parameters of the groups `with_own` are shared if one task reaches them. Raises TypeError
        for a gradient that is not dense and real; if not `strict`, its parameter is not shared
        instead. Returns the names of the parameters left out.
        """
        least, counts = min(least, self.num_tasks), Counter(chain.from_iterable(self.reached))
        left_out: list[int] = []
        self.shared, self.has_common = [], False
        for index, group in enumerate(self.groups):
            if group is None or counts[index] < (1 if group in with_own else least):
                continue
            self.has_common |= counts[index] >= least
            present = [grads[index] for grads in self._grads if index in grads]
            wrong = [grad for grad in present if not _is_dense(grad)]
            if wrong and strict:
                raise TypeError(
                    f"parameter '{self.names[index]}': leave it out, by SharedParameters("
                    "'<pattern>'), or use engine='feature', features='<module>': aggregators take "
                    f"dense real gradients, found {wrong[0].dtype} with layout {wrong[0].layout}"
                )
            (left_out if wrong else self.shared).append(index)
        return [self.names[index] for index in left_out]

    def nonfinite_tasks(self) -> list[int]:
        """Return the tasks with a gradient that has a NaN or infinity."""
        every = (
            [*grads.values(), *extra.values()]
            for grads, extra in zip(self._grads, self._extra_leaves, strict=True)
        )
        return [
            task for task, grads in enumerate(every) if not is_finite(*filter(_is_dense, grads))
        ]

    def drop(self, task: int) -> None:
        """Drop the gradients of a task, as if it reached nothing."""
        self.reached[task], self._grads[task], self._extra_leaves[task] = set(), {}, {}

    def members_by_group(self) -> dict[str, list[int]]:
        """Return the shared parameters of each group."""
        by_group: dict[str, list[int]] = {}
        for index in self.shared:
            group = self.groups[index]
            assert group is not None
            by_group.setdefault(group, []).append(index)
        return by_group

    def take(
        self, members: Sequence[int], all_tasks: bool = False
    ) -> tuple[list[int], list[Block]]:
        """Return the tasks that reach one of these parameters, and the blocks with their rows.

        With `all_tasks`, return those that reach any parameter. The gradients are taken out of the
        Jacobian; a task that does not reach a parameter has gradients of zero there.
        """
        tasks = [
            task
            for task, reached in enumerate(self.reached)
            if reached & {*members} or (all_tasks and reached)
        ]
        blocks: list[Block] = []
        for pack in self._packs(members):
            if self._matrix is not None:
                block = self._matrix[:, self._columns[pack[0]][0] : self._columns[pack[-1]][1]]
                blocks.append(block if len(tasks) == self.num_tasks else block[tasks])
                for task, index in product(tasks, pack):
                    self._grads[task].pop(index, None)
                continue
            sizes = [self._parts[index].numel() for index in pack]
            absent = self._parts[pack[0]].new_zeros(1)
            rows = [
                [
                    self._grads[task].pop(index, absent.expand(size)).reshape(-1)
                    for index, size in zip(pack, sizes, strict=True)
                ]
                for task in tasks
            ]
            if sizes[0] >= LARGE:
                blocks.append([row for (row,) in rows])
                continue
            block = absent.new_empty(len(tasks), sum(sizes))
            for target, row in zip(block, rows, strict=True):
                torch.cat(row, out=target)
            blocks.append(block)
        return tasks, blocks

    def split(self, members: Sequence[int], grads: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the gradient of each parameter, from one for each block of `take(members)`."""
        result = {}
        for pack, flat in zip(self._packs(members), grads, strict=True):
            likes = [self._parts[index] for index in pack]
            parts = flat.split_with_sizes([like.numel() for like in likes])
            for index, like, part in zip(pack, likes, parts, strict=True):
                result[index] = part.view_as(like)
        return result

    def _packs(self, members: Sequence[int]) -> list[list[int]]:
        """Return the parameters of each block: several small ones of one dtype and device, or a
        large one. The large ones are last, by size, so that dropping one makes room for the next.
        If all gradients are in one matrix, a block is a run of parameters with adjacent columns.
        """
        if self._matrix is not None:
            runs: list[list[int]] = []
            for index in members:
                start, _ = self._columns[index]
                if runs and self._columns[runs[-1][-1]][1] == start:
                    runs[-1].append(index)
                else:
                    runs.append([index])
            return runs
        small: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
        large: list[int] = []
        for index in members:
            param = self._parts[index]
            if param.numel() >= LARGE:
                large.append(index)
                continue
            packs = small.setdefault((param.dtype, param.device), [[]])
            if sum(self._parts[other].numel() for other in packs[-1]) >= LARGE:
                packs.append([])
            packs[-1].append(index)
        large.sort(key=lambda index: self._parts[index].numel())
        return [*chain.from_iterable(small.values()), *([index] for index in large)]

    def map_shared(self, function: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        """Replace the shared parameters' gradients by a function, LARGE entries at a time."""
        some: list[tuple[int, int]] = []
        size, all_places = 0, product(range(self.num_tasks), self.shared)
        places = [(task, index) for task, index in all_places if index in self._grads[task]]
        for number, (task, index) in enumerate(places, 1):
            some.append((task, index))
            size += self._parts[index].numel()
            if size < LARGE and number < len(places):
                continue
            results = function([self._grads[task][index] for task, index in some])
            for (task, index), result in zip(some, results, strict=True):
                if self._matrix is not None:
                    self._grads[task][index].copy_(result)
                else:
                    self._grads[task][index] = result
            some, size = [], 0

    def _copied(self, task: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Copy the gradients into the matrix, or add them to those in it; return the others."""
        places = {
            index: place
            for index, place in self._places[task].items()
            if (grad := grads[index]) is not None and _is_dense(grad)
        }
        is_first = not self.reached[task]
        if is_first and len(places) < len(self._places[task]):
            self._buffer[task].zero_()
        if places:
            put = foreach_copy_ if is_first else foreach_add_
            put([*places.values()], [grads[index] for index in places])
        self._grads[task] |= places
        return [None if index in places else grad for index, grad in enumerate(grads)]

    def assemble(
        self, combined: Mapping[int, Tensor], weights: Sequence[float]
    ) -> dict[Tensor, Tensor]:
        """Return the gradient of each leaf that a task reaches.

        `combined` holds the gradients of the shared parameters; all others are the weighted sums
        over the tasks.
        """
        of_params: dict[int, Tensor] = dict(combined)
        of_extra: dict[Tensor, Tensor] = {}
        for weight, grads, extra in zip(weights, self._grads, self._extra_leaves, strict=True):
            _add(of_params, grads.items(), weight)
            _add(of_extra, extra.items(), weight)
        return {self.params[index]: grad for index, grad in of_params.items()} | of_extra

    def rows(self) -> dict[str, Tensor]:
        """Return the gradients of all tasks for each parameter (T, *shape), and drop them."""
        result = {}
        for index, (param, name) in enumerate(zip(self.params, self.names, strict=True)):
            zeros = param.detach().new_zeros(()).expand_as(param)
            result[name] = torch.stack([grads.pop(index, zeros) for grads in self._grads])
        return result

    def params_of_single_tasks(self) -> dict[int, str]:
        """Return, for each task, a shared parameter for which all others have a zero gradient."""
        names: dict[int, str] = {}
        for index in self.shared:
            flags = {
                task: grads[index].any() for task, grads in enumerate(self._grads) if index in grads
            }
            tasks = [task for task, flag in flags.items() if flag]
            if len(tasks) == 1 < len(flags):
                names.setdefault(tasks[0], self.names[index])
        return names

    def nothing_shared(self, tasks: Iterable[str]) -> str:
        """Return the error text for tasks without a shared parameter."""
        counts = shortened(
            f"{name} reaches {len(reached)}"
            for name, reached in zip(tasks, self.reached, strict=True)
        )
        return (
            "losses: two losses must depend on the same parameter that SharedParameters selects; "
            f"of all {len(self.params)} parameters {counts}"
        )


def jacobian_at(
    edges: Sequence[GradientEdge], task_grads: Sequence[Sequence[Tensor | None]], group: str
) -> tuple[dict[GradientEdge, Tensor], Jacobian]:
    """Return the Jacobian of gradients at edges, and the edges of its columns.

    Each of these edges comes with the gradient of one task; edges without a gradient are left out.
    A complex entry is two real entries of the Jacobian.
    """
    columns = dict(zip(edges, zip(*task_grads, strict=True), strict=True))
    found = {
        edge: next(grad for grad in column if grad is not None)
        for edge, column in columns.items()
        if any(grad is not None for grad in column)
    }
    names = [edge.node.name() for edge in found]
    jacobian = Jacobian([*map(_real, found.values())], names, [group] * len(found))
    jacobian.reset(len(task_grads))
    for task in range(len(task_grads)):
        grads = (columns[edge][task] for edge in found)
        jacobian.add(task, [None if grad is None else _real(grad) for grad in grads])
    jacobian.finish(least=1)
    return found, jacobian


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _add(
    total: dict[Key, Tensor], grads: Iterable[tuple[Key, Tensor | None]], weight: float = 1.0
) -> None:
    for key, grad in grads:
        if grad is not None:
            weighted = grad if weight == 1 else grad * weight
            total[key] = total[key] + weighted if key in total else weighted


def _is_dense(grad: Tensor) -> bool:
    return grad.layout == torch.strided and grad.is_floating_point()


class JacobianBuilder:
    """Run one backward pass a task and collect the Jacobian of an optimizer step.

    A step may have several `live.backward` calls, of which only the last has `aggregate=True`.
    """

    def __init__(self, attachment: "Attachment", aggregations: Sequence[Aggregation]) -> None:
        self.pending: dict[str, float] = {}  # the losses so far of a step that has not ended
        self.compiled = False  # whether the last graph had compiled parts
        # The sharded parameters; between forward and backward pass the model may have others.
        self.sharded: Mapping[Tensor, str] = {}
        self._alive: dict[str, set[int]] = {}  # per task: parameters with a nonzero gradient so far
        self._measured: dict[str, float] = {}  # as `pending`, for `measure`
        self._attachment = attachment
        self._aggregations = aggregations
        self._jacobian: Jacobian | None = None
        self._norms: list[_NormBase] = []  # the modules with running statistics

    def collect(self, call: BackwardCall, strict: bool) -> tuple[Jacobian, dict[str, float]] | None:
        """Return the Jacobian and the losses of the step; None before its last call.

        `strict` has the same meaning as in `Jacobian.finish`.
        """
        before = self.pending
        jacobian = self._backward(call, list({**before, **call.losses}), fresh=not before)
        losses = self._total_losses(before, call)
        self.pending = {} if call.last else losses
        if not call.last:
            return None
        jacobian.finish(strict, with_own=self._with_memories(losses))
        return jacobian, losses

    def measure(self, call: BackwardCall) -> tuple[Jacobian, dict[str, float]] | None:
        """Compute the same as `collect`, without side effects on training: the graph is kept,
        nothing is refused.

        A task that reaches no parameter is left out. If the conflicts cannot be measured, warns and
        returns None.
        """
        if any(node.name() == REENTRANT for node in nodes_of(call.losses.values())):
            self._attachment.warn_once(
                "the losses hold a reentrant checkpoint, which hides the gradients of single "
                "tasks: their conflicts are not measured. Use checkpoint(use_reentrant=False)."
            )
            return None
        if has_single_use_graph(call.losses.values()):
            self._attachment.warn_once(
                f"{SINGLE_USE}: in such steps the conflicts of the tasks are not measured. "
                f"{RECOMPILE}"
            )
            return None
        try:
            self._current()
        except LookupError as error:  # all selected parameters are frozen by now
            self._attachment.warn_once(
                f"{error.args[0]}: the conflicts of the tasks are not measured"
            )
            return None
        before, self._measured = self._measured, {}
        before = before if list(before) == list(call.losses) else {}
        # Hooks of others may draw random numbers, and do so again in the backward pass of the sum.
        with preserved(call.device):
            jacobian = self._backward(call, list(call.losses), fresh=not before, measuring=True)
        losses = self._total_losses(before, call)
        if not call.last:
            self._measured = losses
            return None
        if left_out := jacobian.finish(strict=False, with_own=self._with_memories(losses)):
            self._attachment.warn_once(
                f"the gradients of {shortened(left_out)} are not dense and real: the conflicts are "
                "measured without them"
            )
        return jacobian, losses

    def groups(self, jacobian: Jacobian) -> Iterator[tuple[Aggregation, str, list[int]]]:
        """Yield the aggregation, the name and the parameters of each group."""
        by_label = {aggregation.label: aggregation for aggregation in self._aggregations}
        for key, members in jacobian.members_by_group().items():
            label, _, group = key.partition("/")
            yield by_label[label], group, members

    def _with_memories(self, tasks: Iterable[str]) -> set[str]:
        """Return the groups of the aggregators for which a task is a memory."""
        return {
            f"{aggregation.label}/{group}"
            for aggregation in self._aggregations
            if aggregation.aggregator.memories(tuple(tasks))
            for group in aggregation.groups.values()
        }

    def discard(self) -> bool:
        """Drop the gradients of a step that has not ended; return whether there were any."""
        was_pending, self.pending = bool(self.pending), {}
        if was_pending and self._jacobian is not None:
            self._jacobian.reset(self._jacobian.num_tasks)
        return was_pending

    def close(self) -> None:
        """Free all gradients."""
        self._jacobian = None
        self.pending = self._measured = {}

    def _total_losses(self, before: Mapping[str, float], call: BackwardCall) -> dict[str, float]:
        """Return the sums of the losses of the step so far."""
        losses = loss_values(call.losses, self._attachment.loss_scale)
        totals = {name: loss + before.get(name, 0.0) for name, loss in losses.items()}
        return {**before, **totals}

    def _backward(
        self, call: BackwardCall, tasks: list[str], fresh: bool, measuring: bool = False
    ) -> Jacobian:
        """Add the gradients of the losses of a call to the Jacobian of `tasks`.

        If `fresh`, drop earlier gradients first. If `measuring`, keep the graph and refuse no task.
        """
        losses = call.losses
        nodes = nodes_of(losses.values())
        names = {kind.__name__ for kind in set(map(type, nodes))}
        if REENTRANT in names:
            raise RuntimeError(
                "losses: use checkpoint(.., use_reentrant=False): a reentrant checkpoint allows "
                "one backward pass and hides its parameters from autograd.grad. Or use "
                "engine='feature', if the checkpoint is below the module of features="
            )
        self.compiled = COMPILED in names
        check_repeatable(losses, shared=not call.retain_graph)
        jacobian = self._prepare(len(tasks), fresh, measuring)
        # Other leaves need nothing here if a backward pass accumulates their gradients: the pass of
        # the sum after a measurement, or those of `task_gradients` for sharded parameters.
        adds_up = measuring or bool(self.sharded)
        extra_leaves = [] if adds_up else _leaves_beyond(nodes, jacobian.params)
        statistics = [buffer for norm in self._norms if norm.training for buffer in norm.buffers()]
        versions = [version_of(buffer) for buffer in statistics]  # of num_batches_tracked too
        reached: list[set[int]] = [set() for _ in losses]
        if self.compiled and (len(tasks) > 1 or not call.last):
            reached = [_reached_params(loss, jacobian.params) for loss in losses.values()]
        leaves = [*jacobian.params, *extra_leaves]
        gradients = task_gradients if self.sharded else gradients_of
        try:
            for index, (name, loss) in enumerate(losses.items()):
                keep_graph = measuring or call.retain_graph or index < len(losses) - 1
                # A checkpoint repeats its forward in each pass, which updates the statistics again
                # (pytorch#96136). Only the first pass may do so, like a plain backward pass.
                repeated = index > 0 and versions != [version_of(buffer) for buffer in statistics]
                restored = _restored(statistics) if measuring or repeated else nullcontext()
                with call.task(name, self._attachment.clock), restored:
                    grads = gradients(loss, leaves, keep_graph)
                of_params, of_extra = grads[: len(jacobian.params)], grads[len(jacobian.params) :]
                if all(grad is None for grad in of_params) and not measuring:
                    rule = "depends on no parameter of the attached model that requires a gradient"
                    raise ValueError(f"losses['{name}']: leave it out: it {rule}")
                if self.compiled:
                    of_params = self._without_zeros(name, of_params, reached[index])
                jacobian.add(tasks.index(name), of_params)
                jacobian.add_extra_leaves(tasks.index(name), extra_leaves, of_extra)
        except BaseException:  # also an interrupt: a partial Jacobian must not be used
            jacobian.reset(0)
            raise
        return jacobian

    def _prepare(self, num_tasks: int, fresh: bool, measuring: bool) -> Jacobian:
        """Return the Jacobian with `num_tasks` rows, empty if `fresh`."""
        jacobian = self._current()
        if fresh or (measuring and jacobian.num_tasks != num_tasks):
            if any(jacobian.reached) or jacobian.num_tasks != num_tasks:
                jacobian.reset(num_tasks)
        elif not jacobian.num_tasks:
            raise ValueError(
                "live.backward: change requires_grad of parameters only after optimizer.step(): "
                "it changed between two live.backward calls of one step"
            )
        elif jacobian.num_tasks != num_tasks:
            jacobian.add_tasks(num_tasks)
        return jacobian

    def _without_zeros(
        self, name: str, grads: Sequence[Tensor | None], reached: set[int]
    ) -> list[Tensor | None]:
        """Replace zero gradients of parameters that the task does not reach by None.

        A compiled graph returns a gradient for every parameter in it, zeros for the heads of other
        tasks. A parameter counts as reached if `reached` has it or if the task ever had a nonzero
        gradient for it.
        """
        nonzero = [grad.any() for grad in grads if grad is not None]
        device = nonzero[0].device if nonzero else None
        flags = iter(summed(torch.stack([flag.to(device) for flag in nonzero])) if nonzero else [])
        alive = self._alive.setdefault(name, set())
        alive |= {index for index, grad in enumerate(grads) if grad is not None and next(flags)}
        filtered = [
            grad if index in alive or index in reached else None for index, grad in enumerate(grads)
        ]
        if nonzero and all(grad is None for grad in filtered):
            self._attachment.warn_once(
                f"losses['{name}']: compute it outside the compiled part: its gradient is zero, so "
                "the step leaves it out, as a compiled graph does not show which parameters it has",
                key=f"{name} is zero",
            )
        return filtered

    def _current(self) -> Jacobian:
        """Return the Jacobian, replaced if the parameters that require a gradient have changed."""
        model, jacobian = self._attachment.model, self._jacobian
        groups = [group["params"] for group in self._attachment.steps.param_groups]
        every = dict.fromkeys(chain(self.sharded or model.parameters(), *groups))
        params = [param for param in every if param.requires_grad]
        if jacobian is None or [*map(id, jacobian.params)] != [*map(id, params)]:
            names = dict(self.sharded) or first_names(model)
            for param in every:
                names.setdefault(param, f"parameter {len(names)} of the optimizer")
            keys = {}
            for aggregation in self._aggregations:
                aggregation.select(model)
            check_disjoint(self._aggregations)
            for aggregation in self._aggregations:
                label = aggregation.label
                keys |= {name: f"{label}/{group}" for name, group in aggregation.groups.items()}
            self._alive = {}
            self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
            used = [names[param] for param in params]
            jacobian = self._jacobian = Jacobian(params, used, [*map(keys.get, used)])
        return jacobian


def check_repeatable(
    losses: Mapping[str, Tensor], shared: bool, below: Iterable[Node] = ()
) -> None:
    """Raise RuntimeError if a second backward pass would compute wrong gradients.

    `shared` and `below` have the same meaning as in `has_single_use_graph`.
    """
    if has_single_use_graph(losses.values(), shared, below):
        raise RuntimeError(f"losses: {SINGLE_USE}. {RECOMPILE}")


def first_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters of a model, each with its first name."""
    return {param: names[0] for names, param, _ in params_of(model) if isinstance(param, Tensor)}


@contextmanager
def _restored(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of the buffers at the end of the block."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _leaves_beyond(nodes: Iterable[Node], params: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of a graph that are not in `params`."""
    known = set(map(id, params))
    leaves = map(leaf_of, nodes)
    return [leaf for leaf in leaves if leaf is not None and id(leaf) not in known]


def _reached_params(loss: Tensor, params: Sequence[Tensor]) -> set[int]:
    """Return the indices of the parameters in the graph of a loss."""
    ids = leaf_ids(loss)
    return {index for index, param in enumerate(params) if id(param) in ids}
