"""Products of the matrix of gradients J (T x P): the Gramian J Jᵀ, and Jᵀ w.

A Gramian in float64 shows singular values of J down to 1e-8 of the largest, a QR decomposition of J
down to 1e-16: `solve_on_rows` combines nearly dependent rows by a triangular factor from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from math import inf, sqrt
from operator import add, mul

import numpy as np
import torch
from torch import Tensor, distributed

from gradsurg.aggregators.solvers import NotConverged

Block = Tensor | MutableSequence[Tensor]
"""Some columns of J: a matrix (T, p), or T vectors (p,), of which PIECE columns are stacked at a
time, so that J is held once."""

_processes: ContextVar["distributed.ProcessGroup | None"] = ContextVar("processes", default=None)

PIECE = 1 << 16
COLUMNS = 65_536
"""Columns processed at once where an intermediate result is as large as its input."""
SMALL = 1 << 17
"""Entries up to which a CPU multiplies in float64 in less time than it takes to check float32."""
SUM_COLUMNS = 4096
"""Columns whose products are summed in their own dtype; longer float32 sums lose digits."""

ROW_TILE = 16
"""Rows from which a matrix product costs the same per row."""

HALVES = (torch.float16, torch.bfloat16)

LEAST_SQUARE = 1e-30
"""Mean square of a row below which float32 loses products: its minimum is 1e-38, here 1e-8
relative.
"""
MOST_COLUMNS = 1 << 40
"""Columns that J may have over all processes, which count their own alone."""
SMALLEST_NORMAL = 1.2e-38
"""Smallest float32 with full precision (the smallest normal number)."""
LARGE_NORM = 1e30
"""Norm from which float32 sums may overflow, also if the rows are multiplied by a loss scale."""

RIDGES = (2e-14, 1e-12, 1e-10, 1e-8, 1e-6)
"""Ridges of the solvers, relative to unit rows; each is tried if the one before fails."""
TOO_LONG = 1e-4
"""Relative excess of the norm of an update over its bound at which a solution is refused."""
TOO_MUCH_CONFLICT = 1e-6
"""Largest -g_i · d of a fallback, relative to |g_i| and to the bound of |d|; and the rounding."""
LEAST = 1e-13
"""Norm of a convex combination of unit rows in float64 that counts as zero."""
LARGEST_LEAST = 1e-3
"""Bound of the same for rows in half precision."""


@contextmanager
def across(group: "distributed.ProcessGroup | None") -> Iterator[None]:
    """In this context each process of `group` has some columns of J; with None, it has them all."""
    token = _processes.set(group)
    try:
        yield
    finally:
        _processes.reset(token)


def summed(part: Tensor) -> Tensor:
    """Return the sum over the processes that have columns of J, in float64 on the CPU."""
    total, group = part.double(), _processes.get()
    if group is not None:
        distributed.all_reduce(total, group=group)
    return total.cpu()


def part_name() -> str:
    """Return a name of the columns that this process has; empty if it has all."""
    group = _processes.get()
    return "" if group is None else f"/part {distributed.get_rank(group)}"


def _in_any(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in one of the processes that have columns of J."""
    return bool(summed(torch.tensor(flag, device=device)))


def pieces(blocks: Sequence[Block]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield matrices (T, c) with all columns of the blocks: the number of the block, the first
    column in it, and the matrix."""
    for number, block in enumerate(blocks):
        if isinstance(block, Tensor):
            yield number, 0, block
            continue
        for start in range(0, len(block[0]), PIECE):
            yield number, start, torch.stack([row[start : start + PIECE] for row in block])


def mapped(
    blocks: Sequence[Block], function: Callable[[Tensor, int], Tensor], drop: bool = False
) -> list[Tensor]:
    """Return a vector (p,) for each block, from `function(matrix, its first column in J)`.

    With `drop`, a block that is a list of rows is emptied as soon as it is done, to free memory.
    """
    results, first = [], 0
    for block in blocks:
        if isinstance(block, Tensor):
            width = block.shape[1]
            results.append(function(block, first))
        else:
            width = len(block[0])
            result = torch.empty_like(block[0], memory_format=torch.contiguous_format)
            for _, start, rows in pieces([block]):
                result[start : start + PIECE] = function(rows, first + start)
            results.append(result)
            if drop:
                block.clear()
        first += width
    return results


def gramian_of(blocks: Sequence[Block]) -> Tensor:
    """Return G = J Jᵀ (T, T) in float64 on the CPU.

    `blocks` are the blocks of columns of J, of any floating dtype and device. Products of at most
    4096 columns are summed in the dtype of the rows, and these sums in float64. The error of
    float32 rows is about 1e-7 |g_i| |g_j| (2e-4 for one float32 product over 1e7 columns).
    Half-precision rows are multiplied in float32.

    All products are computed in float64, at three times the cost, in three cases: the rows are so
    nearly dependent that a solver would amplify this error above 1e-6, products leave the range of
    float32, or the matrix is small.
    """
    if _processes.get() is None and sum(map(_entries_on_cpu, blocks)) <= SMALL:
        return reduce(add, [(wide := rows.double()) @ wide.T for _, _, rows in pieces(blocks)])
    gramian = _sum_over(blocks, _in_their_dtype)
    if all(block[0].dtype == torch.float64 for block in blocks):
        return gramian
    again = _out_of_range(gramian, blocks) or _nearly_dependent(gramian)
    return _sum_over(blocks, _in_float64) if again else gramian


def _entries_on_cpu(block: Block) -> float:
    """Return the number of entries of a matrix on the CPU, infinity for other blocks."""
    return block.numel() if isinstance(block, Tensor) and block.is_cpu else inf


def _sum_over(blocks: Sequence[Block], split: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    matrices = (rows for _, _, rows in pieces(blocks))
    products = (reduce(add, map(_product, split(rows))) for rows in matrices)
    return summed(_total(products, blocks))


def _total(parts: Iterable[Tensor], blocks: Sequence[Sequence[Tensor] | Tensor]) -> Tensor:
    """Return the sum of some tensors, on the device of the first block."""
    device = blocks[0][0].device
    return reduce(add, (part.to(device) for part in parts))


def _in_their_dtype(rows: Tensor) -> Sequence[Tensor]:
    """Return the rows; half-precision ones in pieces, which `_product` converts to float32."""
    return rows.split(64 * COLUMNS, dim=1) if rows.dtype in HALVES else [rows]


def _in_float64(rows: Tensor, order: Tensor | None = None) -> Iterator[Tensor]:
    """Yield float64 copies of some columns at a time, sized for the CPU cache or for one GPU
    launch, with the rows in this order.
    """
    columns = COLUMNS if rows.device.type == "cpu" else 64 * COLUMNS
    order = None if order is None else order.to(rows.device)
    for part in rows.split(columns, dim=1):
        yield part.double() if order is None else part[order].double()


def _out_of_range(gramian: Tensor, blocks: Sequence[Block]) -> bool:
    """Whether products of float32 numbers overflowed or underflowed, so that G is wrong."""
    sizes = gramian.numpy().diagonal().tolist()
    columns = MOST_COLUMNS if _processes.get() else sum([len(block[0]) for block in blocks])
    least = LEAST_SQUARE * columns
    if min(sizes) > least and max(sizes) < inf:  # products of two rows are between these
        return False
    if any(0 < size <= least or size == inf for size in sizes):
        return True
    # A size of 0 means zeros, or numbers whose squares underflow: read these few rows to decide.
    suspects = [index for index, size in enumerate(sizes) if size == 0]
    has_numbers = any(bool(block[index].any()) for index in suspects for block in blocks)
    return bool(suspects) and _in_any(has_numbers, blocks[0][0].device)


def _nearly_dependent(gramian: Tensor) -> bool:
    """Whether the smallest eigenvalue of the cosines is < 0.1: errors of G grow tenfold."""
    if len(gramian) == 2:  # the smallest eigenvalue is 1 - |cosine|
        (first, inner), (_, second) = gramian.tolist()
        return inner * inner > 0.81 * first * second
    # NumPy takes a quarter of the time for such small matrices.
    matrix = gramian.numpy()
    norms = np.sqrt(matrix.diagonal())
    with np.errstate(all="ignore"):
        cosines = (matrix / np.outer(norms, norms))[norms > 0][:, norms > 0]
    if not cosines.size or not np.isfinite(cosines).all():
        return False
    return bool(np.linalg.eigvalsh(cosines)[0] < 0.1)


def _product(block: Tensor) -> Tensor:
    block = at_least_float32(block)
    width = SUM_COLUMNS // len(block) if len(block) < 8 else SUM_COLUMNS
    whole = block.shape[1] // width * width
    rest = block[:, whole:]
    product = (rest @ rest.T).double()
    if not whole:
        return product
    parts = block[:, :whole].unflatten(1, (-1, width)).transpose(0, 1)
    # A matrix product ignores the symmetry of G: four products for two rows, where three suffice.
    # One product is fastest for a few rows; for more, computing half of it in blocks saves time.
    half = 1 if len(block) == 2 else len(block) // 2 // ROW_TILE * ROW_TILE
    if not half:
        return product + torch.bmm(parts, parts.mT).sum(0, dtype=torch.float64)
    first, second = parts[:, :half], parts[:, half:]
    left = torch.bmm(parts, first.mT).sum(0, dtype=torch.float64)
    last = torch.bmm(second, second.mT).sum(0, dtype=torch.float64)
    return product + torch.cat([left, torch.cat([left[half:].T, last])], dim=1)


def combine_safely(
    blocks: Sequence[Block], weights: Tensor, gramian: Tensor, drop: bool = False
) -> list[Tensor]:
    """Return Jᵀ w (p,) for each block of J, given its Gramian; `drop` is passed to `mapped`.

    Computed in float64 where the rows cancel, or where a weight that matters or a sum leaves the
    range of float32.
    """
    function = _combine_in_float64 if cancels(weights, gramian) else _combine
    return mapped(blocks, lambda rows, _: function(rows, weights), drop)


def cancels(weights: Tensor, gramian: Tensor) -> bool:
    """Return whether Jᵀ w needs float64: the rows cancel, or float32 does not hold a weight or a
    sum.
    """
    w, matrix = weights.tolist(), gramian.tolist()  # for a few tasks in half the time of arrays
    shares = [abs(weight) * sqrt(matrix[i][i]) for i, weight in enumerate(w)]
    square = sum([w[i] * sum(map(mul, w, row)) for i, row in enumerate(matrix)])
    reach = sum(shares)
    return (
        reach * reach > 16 * max(4, len(w)) * max(square, 0.0)
        or reach > LARGE_NORM
        or not _fits_float32(w, shares, 1e-8 * reach)
    )


def triangular_factor(blocks: Sequence[Block], order: Tensor) -> Tensor:
    """Return L (T, r) with L Lᵀ = J Jᵀ for the rows of J in this order, in float64 on the CPU.

    L comes from QR decompositions of blocks of columns, which keep all digits of float64 also for
    nearly dependent rows; a Gramian keeps half of them.
    """
    upper, count = torch.empty(0, len(order), dtype=torch.float64), len(order)
    for _, _, rows in pieces(blocks):
        for part in _in_float64(rows, order):
            # On a CPU a decomposition is faster within the cache.
            for piece in part.split(COLUMNS // 4, dim=1) if rows.is_cpu else [part]:
                stacked = torch.cat([upper.to(piece.device), piece.T])
                upper = torch.linalg.qr(stacked, mode="r").R
    if (group := _processes.get()) is not None:
        own = torch.cat([upper, upper.new_zeros(count - len(upper), count)])
        every = [torch.empty_like(own) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(every, own, group=group)
        upper = torch.linalg.qr(torch.cat(every), mode="r").R
    return upper.T.cpu()


def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Return Jᵀ w (P,) in the dtype and on the device of the rows."""
    fits = _fits_float32(weights.tolist())
    return (_combine if fits else _combine_in_float64)(rows, weights)


def _fits_float32(
    values: Sequence[float], shares: Sequence[float] | None = None, least: float = 0.0
) -> bool:
    """Whether float32 can hold all weights, except small ones whose share is <= `least`."""
    if min(values) > SMALLEST_NORMAL and max(values) < LARGE_NORM:
        return True
    sizes = [abs(value) for value in values]
    pairs = zip(sizes, shares or sizes, strict=True)
    return all(
        share <= least if size <= SMALLEST_NORMAL else not size >= LARGE_NORM
        for size, share in pairs
    )


def _combine_in_float64(rows: Tensor, weights: Tensor, order: Tensor | None = None) -> Tensor:
    weights = (weights if order is None else weights[order]).to(rows.device)
    return torch.cat([(weights @ part).to(rows.dtype) for part in _in_float64(rows, order)])


def _combine(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.dtype in HALVES:
        return _combine(rows.float(), weights).to(rows.dtype)
    return weights.to(rows) @ rows


def uninitialized(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized contiguous tensor on the CPU.

    NumPy asks Linux for huge pages: a first write to 40 MB takes 3 ms instead of 16.
    """
    return torch.from_numpy(np.empty(tuple(shape), str(dtype).removeprefix("torch.")))


def at_least_float32(rows: Tensor) -> Tensor:
    """Return half-precision rows in float32, others unchanged."""
    return rows.float() if rows.dtype in HALVES else rows


def is_finite(*blocks: Block) -> bool:
    """Return whether all entries are finite, in one pass.

    `rows.isfinite().all()` takes 30 times as long on a CPU.
    """
    if not blocks:
        return True
    tensors = [row for block in blocks for row in ([block] if isinstance(block, Tensor) else block)]
    ends = (torch.stack(tensor.aminmax()) for tensor in tensors if tensor.numel())
    nonfinite = not all(bool(pair.isfinite().all()) for pair in ends)
    return not _in_any(nonfinite, tensors[0].device)


class SolvedOnRows(ABC):
    """A second base class of weightings that need the rows where these are nearly dependent.

    Their weights grow without bound there, and cancel in the update.
    """

    def places(self, tasks: Sequence[str], count: int) -> np.ndarray:
        """Return the place of each of `count` rows, perhaps by the names of the tasks."""
        return np.arange(count)

    @abstractmethod
    def weights_of_rows(self, rows: Tensor, order: Tensor, ridge: float, least: float) -> Tensor:
        """Return the weights (T,) from `rows` (T, r), in float64; `order` has the place of each.

        `ridge` and `least` have the same meaning as in `solvers.solve_weights_of_rows`.
        """

    @abstractmethod
    def largest_norm(self, rows: Tensor, order: Tensor) -> float:
        """Return the largest norm that the update of these rows can have."""


@dataclass(frozen=True)
class RowSolution:
    """The combined gradient of each block, the weights, and whether a larger ridge was needed."""

    grads: list[Tensor]
    weights: Tensor
    fell_back: bool


def solve_on_rows(
    problem: SolvedOnRows,
    blocks: Sequence[Block],
    gramian: Tensor,
    scale: float,
    harmless: bool,
    tasks: Sequence[str] = (),
) -> RowSolution:
    """Return the update of the rows in `blocks`, which are multiplied by a loss `scale`.

    The norm of the update on the rows is checked, and after a fallback, if `harmless`, that it
    conflicts with no row. The rows are sorted first, so that rounding does not depend on the order
    of the tasks. Raises NotConverged if every ridge fails.
    """
    order = gramian.diagonal().argsort(stable=True)
    rows = triangular_factor(blocks, order) / scale
    norms = rows.norm(dim=1)
    places = torch.from_numpy(problem.places(tasks, len(gramian)))[order]
    bound = problem.largest_norm(rows, places)
    precision = max(torch.finfo(block[0].dtype).eps for block in blocks)
    least = min(max(8 * precision, LEAST), LARGEST_LEAST)
    longest = bound * (1 + TOO_LONG + precision) + 1e-15 * float(norms.max())
    excess = torch.inf
    weights = torch.empty_like(norms)
    for ridge in RIDGES:
        try:
            weights[order] = problem.weights_of_rows(rows, places, ridge, least)
        except NotConverged as error:
            excess = error.residual
            continue
        grads = mapped(blocks, lambda part, _: _combine_in_float64(part, weights, order))
        norm = norm_of(grads) / scale
        fell_back, conflict = ridge != RIDGES[0], 0.0
        if fell_back and harmless and bound:
            limits = bound * scale**2 * norms
            conflict = float((-products_of(blocks, grads, order) / limits).nan_to_num(0.0).max())
        if norm <= longest and conflict <= TOO_MUCH_CONFLICT + precision:
            return RowSolution(grads, weights, fell_back)
        excess = max(norm / bound - 1, conflict) if bound else torch.inf
    raise NotConverged("the solver for nearly dependent rows", excess)


def norm_of(grads: Sequence[Tensor]) -> float:
    """Return the joint norm of the parts of a gradient."""
    return float(summed(_total((grad.double().square().sum() for grad in grads), [grads]))) ** 0.5


def products_of(
    blocks: Sequence[Block], grads: Sequence[Tensor], order: Tensor | None = None
) -> Tensor:
    """Return g_i · d (T,) for the rows, in this order if given, in float64 on the CPU; d has a
    part in `grads` for each block."""
    products = (
        part @ piece[0]
        for number, start, rows in pieces(blocks)
        for part, piece in zip(
            _in_float64(rows, order),
            _in_float64(grads[number][None, start : start + rows.shape[1]]),
            strict=True,
        )
    )
    return summed(_total(products, blocks))
