"""The grammar of `tune`: keys of the config, and the values that each of them is tried with."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import isfinite, nan, prod
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

RULE = (
    "must be lr, or KEY=log(from,to,number), KEY=lin(from,to,number) or KEY=[..], such as "
    "optimizer.lr=log(1e-3,1,7); several are joined by ';'"
)
RATES = ("lr", "optimizer.lr")
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the config's rate: the values of `lr` alone
PART = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.+?)\s*", re.DOTALL)
SPACED = re.compile(r"(log|lin)\((.*)\)", re.DOTALL)
DIGITS = 4  # of a value between the ends


@dataclass(frozen=True)
class Axis:
    """A key of the config with the values that it is tried with, in their order.

    `lr` alone has none: it is tried around the rate of a config (`Grid.around`).
    """

    key: str
    values: tuple[Any, ...]  # Any: what a YAML file can hold
    by_log: bool = False

    @property
    def is_rate(self) -> bool:
        """Whether it is a learning rate, also as an option of a script, such as `--lr`."""
        return self.key.lstrip("-") in RATES


@dataclass(frozen=True)
class Grid:
    """The product of the values of one or more keys."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, text: object) -> "Grid":
        """Parse `optimizer.lr=log(1e-3,1,7); model.width=[32,64]`, or `lr; model.width=[32,64]`.

        Raises ValueError if it has another form.
        """
        if not isinstance(text, str) or not text.strip(" ;"):
            raise ValueError(RULE)
        axes = tuple(_axis(part) for part in text.strip(" ;").split(";"))
        keys = [axis.key for axis in axes]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"has {twice[0]} twice")
        return cls(axes)

    def combinations(self) -> Iterator[dict[str, Any]]:  # Any: as above
        """Yield a value for each key, the last key varying fastest."""
        for values in product(*(axis.values for axis in self.axes)):
            yield {axis.key: value for axis, value in zip(self.axes, values, strict=True)}

    def __len__(self) -> int:
        return prod(len(axis.values or FACTORS) for axis in self.axes)

    def around(self, rate: object) -> "Grid":
        """Return the grid with values for `lr` alone: `FACTORS` times the rate of a config.

        Raises ValueError if the rate is not a positive number.
        """
        if all(axis.values for axis in self.axes):
            return self
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            rule = "the optimizer's config has no rate to try others around"
            raise ValueError(f"lr: {rule}; give the values, as lr=log(1e-3,1,7), found {rate!r}")
        values = tuple(rate * factor for factor in FACTORS)
        return self._with_rates(lambda axis: axis.values or values)

    def finer(self, count: int) -> "Grid | None":
        """Return a grid of `count` points: more learning rates in the same range, equally spaced on
        a logarithmic scale. None if no rate is an axis, or if no number of rates gives `count`.
        """
        rates = next((axis.values for axis in self.axes if axis.is_rate), ())
        number, rest = divmod(count * len(rates), len(self))
        if not rates or rest or min(rates) <= 0:
            return None
        values = tuple(_between(min(rates), max(rates), number, by_log=True))
        return self._with_rates(lambda _: values) if len({*values}) == number else None

    def _with_rates(self, values: Callable[[Axis], tuple[Any, ...]]) -> "Grid":  # Any: as above
        axes = (
            Axis(axis.key, values(axis), by_log=True) if axis.is_rate else axis
            for axis in self.axes
        )
        return Grid(tuple(axes))


def _axis(text: str) -> Axis:
    if text.strip() in RATES:
        return Axis("lr", (), by_log=True)
    match = PART.fullmatch(text)
    if match is None:
        raise ValueError(RULE)
    key, written = match.groups()
    spaced = SPACED.fullmatch(written)
    values = _spaced(written, *spaced.groups()) if spaced else _listed(written)
    if len(values) < 2 or any(value in values[:place] for place, value in enumerate(values)):
        raise ValueError(f"{key}: needs two values or more, each once")
    numbers = all(isinstance(value, int | float) for value in values)
    wide = numbers and min(values) > 0 and max(values) >= 10 * min(values)
    return Axis(key, tuple(values), wide or (spaced is not None and spaced[1] == "log"))


def _spaced(written: str, kind: str, ends: str) -> list[float]:
    """Return the values of `log(1e-3,1,7)`; whole numbers if a linear grid has no others."""
    by_log = kind == "log"
    try:
        first, last, count = ends.split(",")
        low, high, number = float(first), float(last), int(count)
    except ValueError:
        low, high, number = nan, nan, 0
    if not (number >= 2 and isfinite(high - low) and low < high) or (by_log and low <= 0):
        above = "0 < from < to" if by_log else "from < to"
        raise ValueError(f"{written}: needs (from,to,number) with {above} and 2 values or more")
    values = _between(low, high, number, by_log)
    whole = not by_log and all(value.is_integer() for value in values)
    return [int(value) for value in values] if whole else values


def _between(low: float, high: float, number: int, by_log: bool) -> list[float]:
    """Return so many equally spaced values with both ends."""
    shares = [k / (number - 1) for k in range(1, number - 1)]
    inside = [low * (high / low) ** x if by_log else low + (high - low) * x for x in shares]
    return [low, *(float(f"{value:.{DIGITS}g}") for value in inside), high]


def _listed(written: str) -> list[Any]:  # Any: as above
    """Return the values of a YAML list."""
    try:
        values = OmegaConf.to_container(OmegaConf.create(f"values: {written}"))
    except (OmegaConfBaseException, YAMLError, ValueError):
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("values"), list):
        raise ValueError(RULE)
    return values["values"]
