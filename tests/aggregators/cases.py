"""The row of each aggregator: a matrix of gradients, and what has to come out, by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import yaml

from gradsurg.aggregators.base import Aggregator
from gradsurg.experiment.making import make

CONFIGS = Path(__file__).parents[2] / "conf" / "aggregator"


@dataclass(frozen=True)
class Row:
    """The aggregator of `conf/aggregator/<name>.yaml`, with some fields changed, at one matrix."""

    name: str
    rows: Sequence[Sequence[float]]
    expected: Sequence[float]
    fields: Mapping[str, Any] = field(default_factory=dict)  # Any: fields have many types
    losses: Sequence[float] | None = None
    step: int = 0
    tolerance: float = 1e-6


ACUTE = [[1.0, 0.0], [-1.0, 1.0]]  # two gradients that conflict
WIDE = [[1.0, 0.0], [-3.0, 1.0]]  # whose mean conflicts with the first
RIGHT = [[1.0, 0.0], [0.0, 3.0]]  # at right angles
FOUR = [[0.0, 0.0], [1.0, 0.0], [1.5, 0.0], [9.0, 0.0]]

ROWS = (
    Row("and_mask", [[1.0, 2.0, 0.0], [3.0, -4.0, 2.0]], [2.0, 0.0, 0.0]),
    Row("and_mask", [[1.0, 3.0], [1.0, 3.0], [4.0, -3.0]], [2.0, 1.0], {"threshold": 0.3}),
    # g = (1, 0) turned away from g_ref = (-1, 1): (1, 0) + 1/2 (-1, 1); the other way round g is
    # (-1, 1) and what is left of it is (0, 1).
    Row("agem", ACUTE, [0.5, 0.5]),
    Row("agem", ACUTE[::-1], [0.0, 1.0]),
    Row("agem", [[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0]),
    Row("agem", [[1.0, 2.0], [0.0, 0.0]], [1.0, 2.0]),
    Row("agem", [[1.0, 2.0]], [1.0, 2.0]),
    # At first the weights of MGDA.
    Row("crmogm", ACUTE, [0.2, 0.4]),
    # The weights of the first two periods.
    Row("dwa", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0], losses=[4.0, 1.0]),
    # The weights of the first call are 1.
    Row("excess_mtl", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0]),
    # c = 1 / (1/2 / 4 + 1/2 / 1) = 8/5; weights 1/5 and 4/5.
    Row("famo", [[1.0, 2.0], [3.0, -4.0]], [2.6, -2.8], losses=[4.0, 1.0]),
    Row("fixed_weights", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0]),
    Row("fixed_weights", [[1.0, 2.0], [3.0, -4.0]], [2.0, -1.0], {"weights": [0.5, 0.5]}),
    Row("fixed_weights", [[1.0], [2.0], [4.0]], [9.0], {"weights": [1.0, -2.0, 3.0]}),
    # Signs that agree; only zeros.
    Row("grad_drop", [[1.0, -2.0, 0.0], [3.0, 0.0, 0.0]], [4.0, -2.0, 0.0]),
    Row("grad_drop", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0], {"leak": 1.0}),
    # Means of rows clipped to length 5: (3, 4) / 2 and (1, 2); from (1.5, 2) another 5/2 of (3, 4).
    Row("centered_clip", [[6.0, 8.0], [0.0, 0.0]], [1.5, 2.0], {"tau": 5.0, "num_steps": 1}),
    Row("centered_clip", [[2.0, 4.0], [0.0, 0.0]], [1.0, 2.0]),
    Row("centered_clip", [[30.0, 40.0]], [6.0, 8.0], {"tau": 5.0, "num_steps": 2}),
    # The inner two of four points on a line; the center of a square, however far away a corner;
    # a corner of more than 120 degrees.
    Row("geometric_median", FOUR, [1.25, 0.0]),
    Row("geometric_median", [[5.0, 5.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]], [0.0, 0.0]),
    Row("geometric_median", [[9.0, 1.0], [0.0, 0.0], [-9.0, 1.0]], [0.0, 0.0]),
    # (1, 0) turned away from (-1, 1), as AGEM; with a margin g + (-1, 1) = (0, 1) conflicts with
    # no memory; (1, 1, 1) without its components along the two memories that it conflicts with.
    Row("gem", ACUTE, [0.5, 0.5]),
    Row("gem", ACUTE, [0.0, 1.0], {"margin": 1.0}),
    Row(
        "gem",
        [[1.0, 1.0, 1.0], [-2.0, 0.0, 0.0], [0.0, -3.0, 0.0], [0.0, 1.0, 1.0]],
        [0.0, 0.0, 1.0],
    ),
    # The weights of the first call are those before it has learnt anything.
    Row("grad_norm", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0], losses=[4.0, 1.0]),
    # exp(0) of each at first.
    Row("imtl_l", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0], losses=[4.0, 1.0]),
    Row("mean", [[1.0, 2.0], [3.0, -4.0]], [2.0, -1.0]),
    # The gradients (1/2, 0) and (0, 3) of the logarithms, both of norm 3.
    Row("db_mtl", RIGHT, [3.0, 3.0], losses=[2.0, 1.0]),
    # The mean is 2: weights 1/2 * 2/4 and 1/2 * 2/1.
    Row("geometric_mean", [[1.0, 2.0], [3.0, -4.0]], [3.25, -3.5], losses=[4.0, 1.0]),
    # Y = J / 2, Y Yt = diag(1, 9) / 4: w = P(1/2 - 1/80, 1/2 - 9/80) = (0.55, 0.45).
    Row("moco", RIGHT, [0.275, 0.675]),
    # Weights that nobody can know by hand but which sum to one.
    Row("random", [[1.0, -2.0], [1.0, -2.0]], [1.0, -2.0]),
    Row("random", [[1.0], [1.0], [1.0]], [1.0], {"draw": "dirichlet"}),
    # A = diag(1, 9): w = Π(1/2 - 1/20, 1/2 - 9/20) = Π(0.45, 0.05) = (0.7, 0.3).
    Row("modo", RIGHT, [0.7, 0.9]),
    # A = diag(1, 9) / 4: w = Π(1/2 - 1/4 - 1/8, 1/2 - 9/4 - 9/8) = (1, 0), and (2 + w) / 3 of it.
    Row("sdmgrad", RIGHT, [2 / 3, 1.0], {"pull": 2.0, "num_steps": 1, "lr": 1.0}),
    Row("sdmgrad", [[1.0, 2.0], [1.0, 2.0]], [1.0, 2.0]),
    # Half of the softmax of (log 3, 0) = (3/4, 1/4); shares (1, 2) of losses (log 3, 1/2) above 0
    # and 1/2 give weights 3/4 and 2/4.
    Row("stch", [[1.0, 2.0], [3.0, -4.0]], [0.75, 0.25], losses=[2 * log(3), 0.0]),
    Row(
        "stch",
        [[1.0, 2.0], [3.0, -4.0]],
        [2.25, -0.5],
        {"mu": 2.0, "preference": [1.0, 2.0], "ideal": [0.0, 0.5]},
        losses=[2 * log(3), 0.5],
    ),
    Row("sum", [[1.0, 2.0], [3.0, -4.0]], [4.0, -2.0]),
    Row("trimmed_mean", [[1.0, 2.0], [3.0, -4.0]], [2.0, -1.0]),
    Row("trimmed_mean", [[5.0, 9.0], [1.0, 9.0], [2.0, -1e30], [4.0, 1.0]], [3.0, 5.0]),
    # 0.3 * 6 = 1.8, so two at each end.
    Row("trimmed_mean", [[5.0], [1.0], [2.0], [9.0], [8.0], [4.0]], [4.5], {"beta": 0.3}),
    Row("trimmed_mean", [[5.0], [1.0], [2.0], [9.0], [8.0]], [5.0], {"beta": 0.5}),
    # Half of each at first: exp(0) / 2.
    Row("uncertainty_weighting", [[1.0, 2.0], [3.0, -4.0]], [2.0, -1.0], losses=[4.0, 1.0]),
    Row(
        "uncertainty_weighting",
        [[1.0, 2.0], [3.0, -4.0]],
        [4.0, -2.0],
        {"likelihood": "softmax"},
        losses=[4.0, 1.0],
    ),
    Row("pcgrad", ACUTE, [0.5, 1.5]),
    Row("pcgrad", ACUTE, [0.25, 0.75], {"reduction": "mean", "order": "fixed"}),
    Row("pcgrad", ACUTE, [-0.5, 1.5], {"target": "projected"}),
    Row("pcgrad", ACUTE, [1 / 6, 4 / 3], {"eps": 1.0, "order": "one_permutation"}),
    Row("grad_vac", ACUTE, [0.5, 1.5]),
    Row("mgda", ACUTE, [0.2, 0.4]),
    # (2, 0) + t (-3, 1) is nearest to 0 at t = 6/10.
    Row("mgda", ACUTE, [0.2, 0.6], {"preference": [2.0, 1.0]}),
    Row("upgrad", ACUTE, [0.25, 0.75]),
    # 3 times the projection (1/2, 1/2) of the first, once the projection (0, 1) of the second.
    Row("upgrad", ACUTE, [1.5, 2.5], {"preference": [3.0, 1.0]}),
    Row("dual_proj", WIDE, [0.0, 0.5]),
    # (3 - 3, 0 + 1) conflicts with none; (1, 0) turned away from (-3, 1).
    Row("dual_proj", WIDE, [0.0, 1.0], {"preference": [3.0, 1.0]}),
    Row("dual_proj", WIDE, [0.1, 0.3], {"preference": [1.0, 0.0]}),
    Row("cagrad", [[6.0, 0.0], [0.0, 8.0]], [4.0, 4.0], {"c": 0.2}),
    Row("cagrad", [[6.0, 0.0], [0.0, 8.0]], [3.5, 3.0], {"c": 1 / 3, "rescale": "1+c"}),
    Row("imtlg", RIGHT, [0.75, 0.75]),
    Row("con_fig", RIGHT, [2.0, 2.0]),
    Row("nash_mtl", RIGHT, [1.0, 1.0], {"max_norm": 0.0, "normalize": False}),
    Row("nash_mtl", RIGHT, [0.5**0.5, 0.5**0.5]),
    Row("fair_grad", [[1.0, 0.0], [0.0, 8.0]], [1.0, 2.0], {"alpha": 0.5, "max_norm": 0.0}),
    Row("aligned_mtl", RIGHT, [0.5, 0.5]),
    Row("aligned_mtl", RIGHT, [5**0.5 / 2, 5**0.5 / 2], {"scale": "rmse"}),
    Row("krum", FOUR, [1.0, 0.0]),
    Row("krum", FOUR, [1.25, 0.0], {"num_selected": 2}),
)


def made(name: str, **fields: Any) -> Aggregator:  # Any: fields have many types
    """The aggregator of a yaml file, with some of its fields changed."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return make({**config, **fields}, Aggregator)
