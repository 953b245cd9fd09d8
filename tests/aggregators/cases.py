"""The row of each aggregator: a matrix of gradients, and what has to come out, by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gradsurg.aggregators.base import Aggregator
from gradsurg.catalogue import find

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


ROWS = (Row("mean", [[1.0, 2.0], [3.0, -4.0]], [2.0, -1.0]),)


def made(name: str, **fields: Any) -> Aggregator:  # Any: fields have many types
    """What a yaml describes, with some of its fields changed."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return find("aggregators", config.pop("name"))(**{**config, **fields})
