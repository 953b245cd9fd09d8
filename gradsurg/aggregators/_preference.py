"""The share of each task, for aggregators that accept a preference."""

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import AggregatorProperty
from gradsurg.aggregators.solvers import Array
from gradsurg.plugins.fields import Contradiction, FieldError

Preference = (
    Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(min_length=1)]
    | None
)


class Preferring:
    """First base class of aggregators with the field `preference`, before `Weighting` for example.

    With equal shares they are permutation invariant. If all shares are above zero they also have
    the properties `if_positive`.
    """

    if TYPE_CHECKING:
        preference: Preference
    tags: ClassVar[frozenset[AggregatorProperty]] = frozenset()
    if_positive: ClassVar[frozenset[AggregatorProperty]] = frozenset({"strongly_stationary"})

    def __post_init__(self) -> None:
        if self.preference is not None and not any(self.preference):
            text = f"must have a share above 0, found {list(self.preference)}"
            raise Contradiction("preference", text)

    @property
    def num_tasks(self) -> int | None:
        return None if self.preference is None else len(self.preference)

    def tags_if(self) -> dict[AggregatorProperty, bool]:
        shares = self.preference or (1.0,)
        is_equal, is_positive = len({*shares}) == 1, min(shares) > 0
        return {"permutation_invariant": is_equal, **dict.fromkeys(self.if_positive, is_positive)}

    def shares(self, count: int) -> Array:
        """Return the shares of `count` tasks, 1 / `count` each without a preference.

        Raises FieldError for a preference of another length.
        """
        if self.preference is None:
            return np.array([1 / count] * count)  # `np.full` takes four times as long
        if len(self.preference) != count:
            found = f"{len(self.preference)} for {count} tasks"
            text = f"must be one share for each task, found {found}"
            raise FieldError(self, [("preference", text)])
        return np.array(self.preference)

    def nonzero_shares(self, gramian: Tensor) -> Array:
        """Return the shares of the tasks whose gradient is not zero."""
        return self.shares(len(gramian))[gramian.diagonal().numpy() > 0]
