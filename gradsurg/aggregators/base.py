"""The interface of an aggregator: combine the gradients of T tasks into one.

The gradients are the rows of a matrix J (T x P), called `rows` here; the Gramian is G = J Jᵀ (T x
T). Most aggregators compute weights w, and the combined gradient is Jᵀ w.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradsurg.aggregators.rows import (
    Block,
    SolvedOnRows,
    at_least_float32,
    combine,
    combine_safely,
    gramian_of,
    mapped,
    norm_of,
    pieces,
    solve_on_rows,
)
from gradsurg.aggregators.solvers import is_nearly_dependent
from gradsurg.plugins.fields import validated
from gradsurg.torch_internals.autograd import without_autocast

AggregatorState = dict[str, Tensor]
AggregatorProperty = Literal[
    "non_conflicting",  # J A(J) >= 0: no task's loss increases, to first order
    "permutation_invariant",  # the result does not depend on the order of the tasks
    "linear_under_scaling",  # A(diag(c) J) is linear in c > 0
    "scale_invariant",  # the direction of A(diag(c) J) does not depend on c > 0
    "homogeneous",  # A(c J) = c A(J) for c > 0: safe on gradients scaled by a loss scale
    "strongly_stationary",  # A(J) = 0 only if no direction improves a task without harm to others
    "deterministic",  # draws no random numbers
]

MEANS = "means"
"""The key of the running means of the rows in a state."""

FIXED_WEIGHT_PROPERTIES: frozenset[AggregatorProperty] = frozenset(
    {
        "permutation_invariant",
        "linear_under_scaling",
        "homogeneous",
        "strongly_stationary",
        "deterministic",
    }
)
"""The properties of positive weights that do not depend on the gradients, for a fixed state.

Weights that can be 0 for some losses, or underflow to it, are not strongly stationary."""


@dataclass(slots=True)
class AggregatorContext:
    """The step, the tasks and the losses that a call of an aggregator may read.

    Args:
        step: The number of optimizer steps done.
        group: The name of the parameter group.
        tasks: The names of the rows, in order.
        losses: A tensor (T,) on the CPU.
        start: The index in the group of the first column, for aggregators that are called on some
            columns at a time.
        call: The number of updates since the last counted step; 0 if an optimizer was given.
        selection: The selector of the shared parameters, empty if it selects all. It is part of
            the seed, so that equally named groups of two selectors draw different numbers.
    """

    step: int = 0
    seed: int = 0
    group: str = ""
    tasks: tuple[str, ...] = ()
    losses: Tensor | None = None
    start: int = 0
    call: int = 0
    selection: str = ""

    def generator(self, device: torch.device | str = "cpu", block: int = 0) -> torch.Generator:
        """Return a generator seeded by (seed, selection, group, step, call, block).

        An aggregator that draws one number for each column uses one generator for each block of
        columns, so that the result does not depend on how the columns are split.
        """
        key = f"{self.seed}/{self.group}/{self.step}"
        key += f"/of {self.selection}" if self.selection else ""
        key += f"/call {self.call}" if self.call else ""
        key += f"/{block}" if block else ""
        # The CPU generator keeps only the low 32 bits of a seed, so the key is hashed first.
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
        return torch.Generator(device).manual_seed(seed)


class Aggregator(ABC):
    """Base class of all aggregators: T gradients in, one gradient out.

    Subclasses are decorated by `@validated`: their fields are their whole configuration. State
    belongs to a group of parameters: `init` creates it, and each call returns the next state.
    """

    tags: ClassVar[frozenset[AggregatorProperty]] = frozenset()
    """The properties guaranteed for any fields."""

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        """Return further properties by name, and whether each holds for these fields."""
        return {}

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        """The properties guaranteed for these fields: by default the `tags`, and those of
        `tags_if`. `gradsurg.testing.check_aggregator` tests them.

        They hold for finite rows, and for any fixed state and context.
        """
        held: set[AggregatorProperty] = {name for name, holds in self.tags_if().items() if holds}
        return self.tags | held

    @property
    def num_tasks(self) -> int | None:
        """The required number of tasks, or None for any number."""
        return None

    @property
    def least_tasks(self) -> int:
        """The minimum number of tasks."""
        return 1

    def loss_scale_error(self) -> str:
        """Return why a loss scale on the gradients changes the result; empty if it does not."""
        if "homogeneous" in self.properties:
            return ""
        return (
            f"{self!r} depends on the size of the gradients, which the loss scale changes, as "
            "'homogeneous' is not one of its properties"
        )

    def memories(self, tasks: Sequence[str]) -> Sequence[int]:
        """Return the indices of the tasks whose gradients only constrain the result.

        A parameter that only such a task reaches is combined too, with gradients of zero for the
        other tasks.
        """
        return ()

    def order_note(self, tasks: Sequence[str]) -> str:
        """Return a note if the order of the losses decides their roles; otherwise empty."""
        return ""

    def init(self, num_tasks: int) -> AggregatorState:
        """Return the state before the first call; by default there is none.

        A tensor (T, 0) stands for one with the columns and the dtype of the rows, unknown here.
        """
        return {}

    @abstractmethod
    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """Combine the `rows` (T, P) into one gradient (P,) of their dtype and device.

        Returns the gradient and the next state.
        """

    def __call__(self, rows: Tensor, context: AggregatorContext | None = None) -> Tensor:
        """Combine the rows (T, P) into one gradient (P,), from the initial state.

        Raises TypeError if `rows` is not a matrix of real floating-point numbers.
        """
        if not isinstance(rows, Tensor):
            raise TypeError(f"{type(self).__name__} needs a tensor, found {rows!r}")
        count = rows.shape[0] if rows.ndim == 2 else 0
        if not count or not rows.is_floating_point():
            raise TypeError(
                f"{type(self).__name__} needs a real matrix with one row for each task, "
                f"found {rows.dtype} of shape {list(rows.shape)}"
            )
        # `no_grad` would cost several per cent of a product that takes a millisecond.
        rows = rows.detach() if rows.requires_grad else rows
        with without_autocast([rows]):
            return self.merge(rows, self.init(count), context or AggregatorContext())[0]


class GramianAggregator(Aggregator):
    """Base class of aggregators that read the gradients only through their Gramian."""

    def loss_scale_error(self) -> str:
        return ""  # its Gramian comes without the scale

    def mixing(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> Tensor | None:
        """Return coefficients (T, 2) in float64 to combine running means instead of the rows.

        With a_i and b_i in line i, the mean of row i becomes a_i times its old value plus b_i times
        the row. The state has the means as `means` (T, P). None: the rows themselves are combined.
        """
        return None

    @abstractmethod
    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """Return the weights (T,) of the rows and the next state, in float64 on the CPU."""

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        result = combine_by_gramian(self, [rows], state, context)
        return result.grads[0], result.state


class Weighting(GramianAggregator):
    """Base class of Gramian aggregators without state or randomness: implement `weights`."""

    @abstractmethod
    def weights(self, gramian: Tensor) -> Tensor:
        """Return the weights (T,) of the rows, from G (T, T); both in float64, on the CPU."""

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.weights(gramian), state


class LossWeighting(Aggregator):
    """Base class of aggregators that weight the losses and read no gradient.

    One backward pass of the weighted sum is enough, unless a nonlinear transform has to see the
    gradient of each task. The weights also apply to parameters that one task alone uses, as if the
    losses had been multiplied.
    """

    def loss_scale_error(self) -> str:
        return ""  # the losses come without the scale

    @abstractmethod
    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """Return the weights (T,) of the losses and the next state, in float64 on the CPU."""

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        weights, state = self.weigh(rows.shape[0], state, context)
        return combine(rows, weights), state


class Entrywise(Aggregator):
    """Base class of aggregators that compute each entry from the same entry of every row."""

    @abstractmethod
    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        """Combine some columns (T, p) of the rows into (p,); `context.start` is the index of the
        first.

        Splitting the columns over several calls may change the rounding of sums and nothing else.
        """

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.apply(rows, context), state


@validated
class NormMatchedSum(Aggregator):
    """Give the sum of the gradients the norm of A(J), where A is the aggregator `of`.

    A control experiment: it separates the effect of an aggregator's direction from the effect of
    its norm.

    A sum of zero stays zero; NaN and infinity propagate. A `LossWeighting` is refused, because it
    also changes the gradients of parameters that one task alone uses.
    """

    of: Aggregator

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        preserved: frozenset[AggregatorProperty] = frozenset(
            {"permutation_invariant", "homogeneous", "deterministic"}
        )
        return self.of.properties & preserved

    @property
    def num_tasks(self) -> int | None:
        return self.of.num_tasks

    @property
    def least_tasks(self) -> int:
        return self.of.least_tasks

    def memories(self, tasks: Sequence[str]) -> Sequence[int]:
        return self.of.memories(tasks)

    def loss_scale_error(self) -> str:
        return self.of.loss_scale_error()

    def order_note(self, tasks: Sequence[str]) -> str:
        return self.of.order_note(tasks)

    def init(self, num_tasks: int) -> AggregatorState:
        return self.of.init(num_tasks)

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        merged, state = self.of.merge(rows, state, context)
        return norm_matched_sums([rows], [merged])[0], state


def norm_matched_sums(blocks: Sequence[Block], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of the rows of each block, rescaled to the joint norm of `grads`."""
    ones = torch.ones(len(blocks[0]), dtype=torch.float64)
    sums = mapped(blocks, lambda rows, _: combine(at_least_float32(rows), ones).double())
    norm = norm_of(sums)
    ratio = norm_of(grads) / (norm if norm > 0 else 1.0)
    return [(total * ratio).to(grad.dtype) for total, grad in zip(sums, grads, strict=True)]


@dataclass(frozen=True)
class AggregationResult:
    """The combined gradient of each block, and the next state.

    `weights` and `gramian` are None for aggregators without them. `on_rows` is True if the weights
    were computed from nearly dependent rows, and `fell_back` if that took a larger ridge than the
    first.
    """

    grads: list[Tensor]
    state: AggregatorState
    weights: Tensor | None = None
    gramian: Tensor | None = None
    on_rows: bool = False
    fell_back: bool = False


def combine_by_gramian(
    aggregator: GramianAggregator,
    blocks: Sequence[Block],
    state: AggregatorState,
    context: AggregatorContext,
    scale: float = 1.0,
    drop: bool = False,
) -> AggregationResult:
    """Combine the rows of J, given as blocks of columns and multiplied by a loss `scale`.

    With `drop`, blocks that are lists are emptied on the way (see `mapped`), unless the weights
    come from the rows. Raises NotConverged if a solver does not find the weights.
    """
    before, mixing = state, aggregator.mixing(len(blocks[0]), state, context)
    if mixing is not None:
        means = _mixed(aggregator, blocks, state[MEANS], mixing, scale)
        state = state | {MEANS: means}
        blocks = list(means.split([len(block[0]) for block in blocks], dim=1))
    gramian = gramian_of(blocks)
    if mixing is None and scale != 1.0:
        gramian = gramian / scale**2
    if needs_rows(aggregator, gramian):
        assert isinstance(aggregator, SolvedOnRows)
        harmless = "non_conflicting" in aggregator.properties
        solution = solve_on_rows(aggregator, blocks, gramian, scale, harmless, context.tasks)
        return AggregationResult(
            solution.grads, state, solution.weights, gramian, True, solution.fell_back
        )
    weights, state = checked_update(aggregator, gramian, state, context)
    grads = combine_safely(blocks, weights, gramian, drop)
    if mixing is not None:
        grads = [grad * scale for grad in grads]
        state = state if bool(gramian.isfinite().all()) else before
    return AggregationResult(grads, state, weights, gramian)


def _mixed(
    aggregator: Aggregator, blocks: Sequence[Block], means: Tensor, mixing: Tensor, scale: float
) -> Tensor:
    """Return the next running means (T, P) of the rows, which are multiplied by a loss `scale`."""
    name, like = type(aggregator).__name__, blocks[0][0]
    check_one_kind(aggregator, blocks)
    widths = [len(block[0]) for block in blocks]
    result = like.new_empty(len(mixing), sum(widths))
    if means.shape not in ((len(mixing), 0), result.shape):
        raise ValueError(
            f"{name}: the state is of {list(means.shape)} tasks and parameters, found "
            f"{list(result.shape)}: their numbers must stay the same"
        )
    kept, new = mixing.to(like).unsqueeze(2).unbind(1)
    starts = [*accumulate(widths, initial=0)]
    for number, first, rows in pieces(blocks):
        columns = slice(starts[number] + first, starts[number] + first + rows.shape[1])
        result[:, columns] = new * rows / scale
        if means.numel():  # a row that keeps nothing of its mean ignores a NaN in it
            old = means[:, columns].to(like)
            result[:, columns] += torch.where(kept == 0, 0.0, kept * old)
    return result


def check_one_kind(aggregator: Aggregator, blocks: Sequence[Block]) -> None:
    """Raise TypeError for blocks of several dtypes or devices, which cannot form one matrix."""
    kinds = {f"{block[0].dtype} on {block[0].device}" for block in blocks}
    if len(kinds) > 1:
        raise TypeError(
            f"{type(aggregator).__name__} needs parameters of one dtype and device, "
            f"found {', '.join(sorted(kinds))}"
        )


def needs_rows(aggregator: GramianAggregator, gramian: Tensor) -> bool:
    """Return whether nearly dependent rows leave the update undetermined by the Gramian."""
    return isinstance(aggregator, SolvedOnRows) and is_nearly_dependent(gramian)


def checked_update(
    aggregator: GramianAggregator,
    gramian: Tensor,
    state: AggregatorState,
    context: AggregatorContext,
) -> tuple[Tensor, AggregatorState]:
    """Return the weights and the next state, with the weights checked.

    Raises TypeError if the weights are not a tensor, ValueError for a wrong dtype or shape.
    """
    weights, state = aggregator.update(gramian, state, context)
    if not isinstance(weights, Tensor):
        raise TypeError(f"{type(aggregator).__name__}: weights must be a tensor, found {weights!r}")
    if weights.shape != gramian.shape[:1] or weights.dtype != torch.float64:
        raise ValueError(
            f"{type(aggregator).__name__}: weights must be float64 of shape [{len(gramian)}], "
            f"found {weights.dtype} of shape {list(weights.shape)}"
        )
    return weights, state


def losses_of(
    aggregator: Aggregator, context: AggregatorContext, num_tasks: int, negative: bool = False
) -> Tensor:
    """Return the losses of the tasks in float64.

    Raises ValueError if the context has none, if their number is not `num_tasks`, or if one is < 0
    (unless `negative`).
    """
    name = type(aggregator).__name__
    if context.losses is None:
        raise ValueError(
            f"{name} needs the losses of the tasks: use live.backward(losses),"
            " or pass AggregatorContext(losses=...)"
        )
    if num_tasks != len(context.losses):
        raise ValueError(
            f"{name} needs a loss for each of the {num_tasks} tasks, found {len(context.losses)}"
        )
    losses = context.losses.detach().double()
    if not negative and (below := [loss for loss in losses.tolist() if loss < 0]):
        raise ValueError(f"{name} needs losses >= 0, found {min(below):.6g}")
    return losses


def state_of(aggregator: Aggregator, state: AggregatorState, key: str, num_tasks: int) -> Tensor:
    """Return the entry of the state under `key`.

    Raises ValueError if the number of tasks has changed.
    """
    if len(state[key]) != num_tasks:
        raise ValueError(
            f"{type(aggregator).__name__}: the state is of {len(state[key])} tasks, found "
            f"{num_tasks}: the number of tasks must stay the same"
        )
    return state[key]
