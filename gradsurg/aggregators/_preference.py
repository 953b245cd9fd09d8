"""The share of each task, for aggregators that accept a preference."""

from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor

from gradsurg.aggregators.base import Aggregator
from gradsurg.aggregators.solvers import Array
from gradsurg.plugins.fields import Contradiction, FieldError

Preference = (
    Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(min_length=1)]
    | None
)


def check_preference(preference: Preference) -> None:
    """Raise Contradiction if every share is zero."""
    if preference is not None and not any(preference):
        raise Contradiction("preference", f"must have a share above 0, found {list(preference)}")


def shares_of(aggregator: Aggregator, preference: Preference, count: int) -> Array:
    """Return the shares of `count` tasks, 1 / `count` each without a preference.

    Raises FieldError for a preference of another length.
    """
    if preference is None:
        return np.full(count, 1 / count)
    if len(preference) != count:
        text = f"must be one share for each task, found {len(preference)} for {count} tasks"
        raise FieldError(aggregator, [("preference", text)])
    return np.array(preference)


def nonzero_shares(aggregator: Aggregator, preference: Preference, gramian: Tensor) -> Array:
    """Return the shares of the tasks whose gradient is not zero."""
    return shares_of(aggregator, preference, len(gramian))[gramian.diagonal().numpy() > 0]


def is_symmetric(preference: Preference) -> bool:
    """Whether all tasks have the same share."""
    return preference is None or len(set(preference)) == 1
