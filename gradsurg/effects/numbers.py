"""The tables of logged numbers: the name, label and unit of each, for logs, terminal and report."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Number:
    """A logged number: its key in files, its label for readers, and how to print it.

    `better` is the direction that is good, for a number that has one.
    """

    name: str
    label: str
    unit: Literal["number", "cosine", "fraction", "count"] = "number"
    better: Literal["lower", "higher"] | None = None


EFFECT_NUMBERS = (
    Number("norm_before", "norm before"),
    Number("norm_after", "norm after"),
    Number("cosine", "cosine", "cosine"),
    Number("changed", "changed", "fraction"),
    Number("flipped", "sign flips", "fraction"),
    Number("zeroed", "zeroed", "fraction"),
    Number("distance", "relative distance"),
    Number("nonfinite", "non-finite", "count"),
)
"""The effect of a transform at a site, as means over the sampled gradients.

L2 norms before and after (a float32 norm below 1e-19 reads 0). The cosine of before and after, 0 if
the transform made a gradient zero. The shares of the entries that changed and that changed sign.
`zeroed`, of the entries that were not zero, the share that became zero. |after - before| /
|before|. `nonfinite`, the total of entries that are NaN or infinite before or after. A gradient
that is zero before is left out of the means of cosine and `zeroed` (None if all were zero). At
`Buckets` a row has `bytes` too, the mean number that this process sent for a gradient."""

EXTREMES = (
    Number("norm_max", "max norm"),
    Number("norm_max_step", "at step", "count"),
    Number("nonfinite_step", "since step", "count"),
    Number("nonfinite_rank", "non-finite rank", "count"),
)
"""The extremes of a site over the sampled gradients, None if there are none.

The largest finite L2 norm before the transform, and the step of the first gradient that had it. The
step of the first gradient with an entry that is NaN or infinite, before or after. The rank of the
site among the sites with such a gradient, by the time of their first one: rank 1 is the site where
the backward pass met the first. Steps count from 0. Only `norm_max` is logged."""

NORMS = ("norm_before", "norm_after")
NORM_RATIO = Number("norm_ratio", "norm ratio")
"""norm_after / norm_before, in summaries over many sites and in W&B."""

CONFLICT_NUMBERS = (
    Number("conflict_rate", "conflict rate", "fraction"),
    Number("norm_spread", "norm spread"),
    Number("condition", "condition number"),
    Number("cosine_to_mean", "cosine to mean", "cosine"),
    Number("norm_to_mean", "norm to mean"),
    Number("weight_entropy", "weight entropy"),
    Number("fallbacks", "fallbacks"),
)
"""The conflict of the gradients of several tasks in one group of parameters, at one step.

Share of the pairs of tasks with a negative cosine, largest norm over smallest nonzero norm,
condition number of the matrix of cosines, cosine and norm ratio of the update to the mean gradient,
entropy of the weights (0 for one task alone to 1 for equal weights), and number of updates so far
that are less exact or were skipped because a solver did not converge."""

CONFLICT_TASK_NUMBERS = (
    Number("norms", "norm"),
    Number("weights", "weight"),
    Number("decrease", "decrease"),
)
"""The same for each task: norm of its gradient, its weight in the update, and the decrease of its
loss, to first order, for a step with learning rate 1."""

TASK_METRICS = (
    Number("loss", "loss", better="lower"),
    Number("accuracy", "accuracy", "fraction", better="higher"),
    Number("r2", "R²", better="higher"),
)
"""Metrics of tasks with a known unit and direction, logged as `train/loss` or `test/<task>/r2`."""

EXTREME_NAMES = tuple(number.name for number in EXTREMES)
EFFECT_NAMES = tuple(number.name for number in EFFECT_NUMBERS)
CONFLICT_NAMES = tuple(number.name for number in CONFLICT_NUMBERS)
CONFLICT_TASK_NAMES = tuple(number.name for number in CONFLICT_TASK_NUMBERS)
