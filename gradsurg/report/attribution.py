"""Attribution: what each link of a chain has to do with the outcome."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsurg.stats import Difference, paired_difference

Config = Mapping[str, Any]  # Any: what YAML can hold


@dataclass(frozen=True)
class LeftOut:
    """Names of two runs: of a chain, and of the same chain without a link."""

    whole: str
    link: str
    without: str


def left_out(configs: Mapping[str, Config]) -> list[LeftOut]:
    """Among runs by name, with their resolved configs, all that differ in one link of a chain.

    The relation is in the configs and is written nowhere else: a run of a shorter chain can be of
    several whole ones, of an attribution and of a sweep. A link is a key of `transform`: a `chain`
    or a `scheduled` transform is one link with all that is inside.
    """
    names = {_canonical(config): name for name, config in configs.items()}
    found = []
    for whole, config in configs.items():
        order = config.get("order") or []
        for link in order if len(order) > 1 else []:
            shorter = names.get(_canonical(_without(config, link)))
            # A dotted path has one source in both, or it was edited in between.
            if shorter and _sources(configs[shorter]) <= _sources(config):
                found.append(LeftOut(whole, link, shorter))
    return found


def share(whole: Sequence[float | None], without: Sequence[float | None]) -> Difference | None:
    """A link's share in a metric: the whole chain minus the chain without it, seed by seed.

    Shares need not add up to what the chain does: two links that do the same have none each. A seed
    where either is missing is left out; None if no seed is left.
    """
    both = [(a, b) for a, b in zip(whole, without, strict=True) if a is not None and b is not None]
    return paired_difference([a for a, _ in both], [b for _, b in both]) if both else None


def _without(config: Config, link: str) -> Config:
    rest = {key: fields for key, fields in config["transform"].items() if key != link}
    return {**config, "transform": rest, "order": [key for key in config["order"] if key != link]}


def _canonical(config: Config) -> str:
    kept = {key: item for key, item in config.items() if key != "sources"}
    return json.dumps(kept, sort_keys=True, default=str)


def _sources(config: Config) -> set[tuple[str, str]]:
    return set((config.get("sources") or {}).items())
