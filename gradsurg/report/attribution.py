"""Attribution: what each link of a chain has to do with the outcome."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsurg.effects.tables import aligned
from gradsurg.report.certainty import p_cell
from gradsurg.report.wording import amount, interval, title
from gradsurg.stats import Difference, paired_difference

Config = Mapping[str, Any]  # Any: what YAML can hold
Outcomes = Sequence[float | None]

ABOUT_SHARES = "the chain minus the chain without it"


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


def share(whole: Outcomes, without: Outcomes) -> Difference | None:
    """A link's share in a metric: the whole chain minus the chain without it, seed by seed.

    Shares need not add up to what the chain does: two links that do the same have none each. A seed
    where either is missing is left out; None if no seed is left.
    """
    both = _both(whole, without)
    return paired_difference([a for a, _ in both], [b for _, b in both]) if both else None


def shares_text(key: str, links: Mapping[str, tuple[Outcomes, Outcomes]]) -> str:
    """A table of each link's share in a metric, of its values with and without the link."""
    rows = [["link", "share", "95 % interval", "sign-flip p", "seeds"]]
    for link, (whole, without) in links.items():
        found = share(whole, without)
        if found is None:
            rows.append([link, "-", "no seed has both", "", "0"])
            continue
        p_value = p_cell([a - b for a, b in _both(whole, without)])
        rows.append([link, amount(key, found.mean), interval(key, found), p_value, str(found.n)])
    return f"Each link's share in {title(key)}, {ABOUT_SHARES}:\n\n{aligned(rows)}"


def _both(whole: Outcomes, without: Outcomes) -> list[tuple[float, float]]:
    pairs = zip(whole, without, strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def _without(config: Config, link: str) -> Config:
    rest = {key: fields for key, fields in config["transform"].items() if key != link}
    return {**config, "transform": rest, "order": [key for key in config["order"] if key != link]}


def _canonical(config: Config) -> str:
    kept = {key: item for key, item in config.items() if key != "sources"}
    return json.dumps(kept, sort_keys=True, default=str)


def _sources(config: Config) -> set[tuple[str, str]]:
    return set((config.get("sources") or {}).items())
