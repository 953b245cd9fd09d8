"""The Gramian aggregators under test, with variants of their fields."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsurg.aggregators.base import Aggregator, AggregatorContext, GramianAggregator
from tests.aggregators.cases import CONFIGS, made
from tests.aggregators.inputs import ranks

STEMS = [
    path.stem
    for path in sorted(CONFIGS.glob("*.yaml"))
    # grad_norm reads losses, agem needs two tasks, crmogm is another aggregator at first, and moco
    # and db_mtl combine running means: they have tests of their own.
    if path.stem not in ("none", "grad_norm", "agem", "crmogm", "moco", "db_mtl")
    and isinstance(made(path.stem), GramianAggregator)
]
VARIANTS: dict[str, list[dict[str, object]]] = {
    "pcgrad": [
        {"order": "fixed"},
        {"target": "projected", "order": "one_permutation"},
        {"include_self": True},
        {"eps": 1e-3},
    ],
    "cagrad": [{"c": 0.0}, {"c": 1.0}, {"c": 2.0, "rescale": "1+c"}],
    "nash_mtl": [{"max_norm": 0.0}, {"max_norm": 0.0, "normalize": False}],
    "fair_grad": [{"alpha": 0.5}, {"alpha": 3.0, "max_norm": 0.0}],
    "aligned_mtl": [{"scale": "median"}, {"scale": "rmse"}],
    "krum": [{"num_byzantine": 1}],
}
ALL = [(stem, fields) for stem in STEMS for fields in [{}, *VARIANTS.get(stem, [])]]
SHAPES = [(count, rank) for count in (4, 8) for rank in ranks(count)]
CONTEXT = AggregatorContext(step=5, seed=2)


def aggregators(stems: list[str] | None = None) -> pytest.MarkDecorator:
    chosen = [case for case in ALL if stems is None or case[0] in stems]
    ids = [
        "-".join([stem, *(f"{key}={value}" for key, value in fields.items())])
        for stem, fields in chosen
    ]
    return pytest.mark.parametrize("aggregator", [made(s, **f) for s, f in chosen], ids=ids)


def by(aggregator: Aggregator, matrix: np.ndarray | Tensor) -> Tensor:
    return aggregator(torch.as_tensor(matrix), CONTEXT)
