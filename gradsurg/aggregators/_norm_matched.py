"""NormMatchedSum: the sum of the gradients, as long as what an aggregator makes of them."""

from torch import Tensor

from gradsurg.aggregators.base import Aggregator, Context, Property, State
from gradsurg.fields import validated


@validated
class NormMatchedSum(Aggregator):
    """The direction of the sum with the norm of A(J): the control that tells direction from length.

    Where the sum is zero it stays zero.
    """

    of: Aggregator

    @property
    def properties(self) -> frozenset[Property]:
        kept: frozenset[Property] = frozenset(
            {"permutation_invariant", "homogeneous", "deterministic"}
        )
        return self.of.properties & kept

    def init(self, num_tasks: int) -> State:
        return self.of.init(num_tasks)

    def merge(self, rows: Tensor, state: State, context: Context) -> tuple[Tensor, State]:
        merged, state = self.of.merge(rows, state, context)
        total = rows.sum(dim=0)
        norm = total.norm()
        return total * (merged.norm() / norm.where(norm > 0, norm.new_ones(()))), state
