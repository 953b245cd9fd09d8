"""What an aggregator is: a frozen value that makes one gradient of the gradients of several tasks.

The gradients of T tasks are the rows of a matrix J (T x P), called `rows` here; its Gramian is
G = J Jᵀ (T x T). Nearly every aggregator gives weights w, and the gradient is Jᵀ w.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import hypot
from typing import Literal

import torch
from torch import Tensor

from gradsurg.aggregators.rows import combined, combined_safely, gramian_of, wide
from gradsurg.plugins.fields import validated
from gradsurg.torch_internals.autograd import undisturbed

AggregatorState = dict[str, Tensor]
AggregatorProperty = Literal[
    "non_conflicting",  # J A(J) >= 0: no task's loss grows, to first order
    "permutation_invariant",  # the order of the tasks does not matter, in all calls so far
    "linear_under_scaling",  # A(diag(c) J) is linear in c > 0
    "scale_invariant",  # the direction of A(diag(c) J) does not depend on c > 0
    "homogeneous",  # A(c J) = c A(J) for c > 0: safe on gradients scaled by a loss scale
    "strongly_stationary",  # A(J) = 0 only where no direction helps a task and harms none
    "deterministic",  # draws no random numbers
]

OF_GIVEN_WEIGHTS: frozenset[AggregatorProperty] = frozenset(
    {
        "permutation_invariant",
        "linear_under_scaling",
        "homogeneous",
        "strongly_stationary",
        "deterministic",
    }
)
"""What holds of weights above zero that no gradient decides, for a fixed state."""


@dataclass(slots=True)
class AggregatorContext:
    """What an aggregator may ask about the gradients at hand.

    `step` counts the optimizer steps done (from 0), `group` names the parameters they are of,
    `tasks` the rows in their order, `losses` are those of the tasks: T numbers, on the CPU.
    `start` counts the columns of the group that stand before those at hand, if not all are given.
    `call` counts the updates since the last step, where no optimizer tells which step one is of.
    `selection` says of which parameters the group is one, if not of all: groups of two selections
    draw apart.
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
        """A generator from (seed, selection, group, step, call, block) alone, and no global one.

        What draws a number for each column takes one for each block of columns, so that the pieces
        in which it is asked do not matter.
        """
        key = f"{self.seed}/{self.group}/{self.step}"
        key += f"/of {self.selection}" if self.selection else ""
        key += f"/call {self.call}" if self.call else ""
        key += f"/{block}" if block else ""
        # The CPU generator keeps only the low 32 bits of a seed, so the key is hashed first.
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
        return torch.Generator(device).manual_seed(seed)


class Aggregator(ABC):
    """One gradient of the gradients of several tasks.

    Subclasses are made by `@validated`: their fields are their whole configuration. State belongs
    to a group of parameters: `init` makes it for so many tasks, and each call gives the next one.
    """

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        """What is promised for these fields, each checked by `gradsurg.testing.check_aggregator`.

        For finite rows, and for any fixed state and context.
        """
        return frozenset()

    @property
    def num_tasks(self) -> int | None:
        """How many tasks it is for; None if it is for any number."""
        return None

    @property
    def least_tasks(self) -> int:
        """The fewest tasks it takes."""
        return 1

    def loss_scale_error(self) -> str:
        """Why a loss scale on the gradients changes the result; empty if it does not."""
        if "homogeneous" in self.properties:
            return ""
        return (
            f"{self!r}: sees gradients times the loss scale, and this aggregator depends on "
            "their size: 'homogeneous' is not one of its properties"
        )

    @abstractmethod
    def init(self, num_tasks: int) -> AggregatorState:
        """The state before the first gradients."""

    @abstractmethod
    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """One gradient (P,) of the `rows` (T, P), of their dtype and device, and the next state."""

    def __call__(self, rows: Tensor, context: AggregatorContext | None = None) -> Tensor:
        """One gradient (P,) of the rows (T, P), as it is at the first step.

        Raises TypeError for what is not a matrix of real floating-point numbers.
        """
        if not isinstance(rows, Tensor):
            raise TypeError(f"{type(self).__name__} takes a tensor, found {rows!r}")
        if rows.ndim != 2 or not rows.is_floating_point() or not len(rows):
            raise TypeError(
                f"{type(self).__name__} takes a matrix with a row of real numbers for each task, "
                f"found {rows.dtype} of shape {list(rows.shape)}"
            )
        # Not `no_grad`, which would cost several per cent of a product that takes a millisecond.
        rows = rows.detach() if rows.requires_grad else rows
        with undisturbed([rows]):
            return self.merge(rows, self.init(len(rows)), context or AggregatorContext())[0]


class GramianAggregator(Aggregator):
    """An aggregator that needs nothing of the gradients but their Gramian."""

    def loss_scale_error(self) -> str:
        return ""  # its Gramian comes without the scale

    @abstractmethod
    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """The weights (T,) of the rows and the next state; all in float64, on the CPU."""

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        gramian = gramian_of([rows])
        weights, state = checked_update(self, gramian, state, context)
        return combined_safely([rows], weights, gramian)[0], state


class Weighting(GramianAggregator):
    """A Gramian aggregator that remembers nothing and draws nothing: it writes only `weights`."""

    @abstractmethod
    def weights(self, gramian: Tensor) -> Tensor:
        """The weights (T,) of the rows, from G (T, T); both in float64, on the CPU."""

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.weights(gramian), state


class LossWeighting(Aggregator):
    """An aggregator that weighs the losses and looks at no gradient: one backward will do, unless a
    transform that is not linear is to meet the gradient of each task.

    Its weights are those of the tasks' own parameters too, as if the losses were weighed.
    """

    def loss_scale_error(self) -> str:
        return ""  # the losses come without the scale

    @abstractmethod
    def weigh(
        self, num_tasks: int, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        """The weights (T,) of the losses and the next state; all in float64, on the CPU."""

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        weights, state = self.weigh(len(rows), state, context)
        return combined(rows, weights), state


class Entrywise(Aggregator):
    """An aggregator whose result has entries that depend on the same entries of the rows alone."""

    @abstractmethod
    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        """The gradient (p,) of some columns of the rows (T, p), the first of them `context.start`.

        It may be asked in pieces, which change nothing but the rounding of sums.
        """

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return self.apply(rows, context), state


@validated
class NormMatchedSum(Aggregator):
    """The direction of the sum with the norm of A(J): the control that tells direction from length.

    Where the sum is zero it stays zero. Not for what weighs the losses: that changes the gradients
    of the tasks' own parameters too, and this does not.
    """

    of: Aggregator

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        kept: frozenset[AggregatorProperty] = frozenset(
            {"permutation_invariant", "homogeneous", "deterministic"}
        )
        return self.of.properties & kept

    @property
    def num_tasks(self) -> int | None:
        return self.of.num_tasks

    @property
    def least_tasks(self) -> int:
        return self.of.least_tasks

    def loss_scale_error(self) -> str:
        return self.of.loss_scale_error()

    def init(self, num_tasks: int) -> AggregatorState:
        return self.of.init(num_tasks)

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        merged, state = self.of.merge(rows, state, context)
        return sums_as_long([rows], [merged])[0], state


def sums_as_long(blocks: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the rows of each block, which together are as long as the gradients together."""
    ones = torch.ones(len(blocks[0]), dtype=torch.float64)
    sums = [combined(wide(rows), ones).double() for rows in blocks]
    norm = _norm(sums)
    ratio = _norm(grads) / (norm if norm > 0 else 1.0)
    return [(total * ratio).to(rows.dtype) for total, rows in zip(sums, blocks, strict=True)]


def checked_update(
    aggregator: GramianAggregator,
    gramian: Tensor,
    state: AggregatorState,
    context: AggregatorContext,
) -> tuple[Tensor, AggregatorState]:
    """The weights and the next state. Raises TypeError for what is no tensor, ValueError for
    weights of another form.
    """
    weights, state = aggregator.update(gramian, state, context)
    if not isinstance(weights, Tensor):
        raise TypeError(
            f"{type(aggregator).__name__}: its weights must be a tensor, found {weights!r}"
        )
    if weights.shape != gramian.shape[:1] or weights.dtype != torch.float64:
        raise ValueError(
            f"{type(aggregator).__name__}: its weights must be float64 of shape [{len(gramian)}], "
            f"found {weights.dtype} of shape {list(weights.shape)}"
        )
    return weights, state


def losses_of(aggregator: Aggregator, context: AggregatorContext, num_tasks: int) -> Tensor:
    """The losses of the tasks in float64, on the CPU as they come.

    Raises ValueError if they are not known, as on a bare matrix, not one for each task, or below 0.
    """
    name = type(aggregator).__name__
    if context.losses is None:
        raise ValueError(
            f"{name} needs the losses of the tasks: use live.backward(losses),"
            " or give an AggregatorContext(losses=...)"
        )
    if num_tasks != len(context.losses):
        raise ValueError(
            f"{name} needs a loss for each of the {num_tasks} tasks, found {len(context.losses)}"
        )
    losses = context.losses.detach().double()
    if below := [loss for loss in losses.tolist() if loss < 0]:
        raise ValueError(f"{name} needs losses >= 0, found {min(below):.6g}")
    return losses


def state_of(aggregator: Aggregator, state: AggregatorState, key: str, num_tasks: int) -> Tensor:
    """What is remembered of each task. Raises ValueError if there are now more tasks, or fewer."""
    if len(state[key]) != num_tasks:
        raise ValueError(
            f"{type(aggregator).__name__} remembers {len(state[key])} tasks, found {num_tasks}: "
            "the number of tasks must stay the same"
        )
    return state[key]


def _norm(grads: Sequence[Tensor]) -> float:
    return hypot(*[float(grad.double().norm()) for grad in grads])
