"""The effects that are logged: each site of a small model, a summary of those of a large one."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from statistics import fmean

from gradsurg.effects.numbers import EFFECT_NAMES, NORM_RATIO, NORMS

AUTO, SITES = "auto", "sites"
MAX_SITES = 12  # of a transform; with more it is summarized
NUM_WORST = 3
NUM_BLOCKS = 6
COUNTS = ("seen", "calls", "bytes", "nonfinite")
MEANS = (*(name for name in EFFECT_NAMES if name not in COUNTS), NORM_RATIO.name)
COMPARED = ("cosine", NORM_RATIO.name)
LAYER = re.compile(r"(?:.*\.)?\d+(?=\.|$)")  # to the last number: `h.0`, `layer1.2`

Row = Mapping[str, object]


def effects_by_path(
    rows: Iterable[Row], seen: Iterable[Row], log: str = AUTO, prefix: str = "effect"
) -> dict[str, float]:
    """Return the numbers of effect rows as `effect/<transform>/<place>/<number>`.

    Those without a value are left out. A place is a site or, of a transform with more than
    MAX_SITES, one of `summarized`. With `log="sites"` it is always a site; another `log` is a
    pattern: then the sites that match it, beside the summary. `seen` has a row of each site so far:
    so that paths stay the same when a site has no gradient. Raises LookupError if no site matches.
    """
    sites = {name: [str(row["site"]) for row in own] for name, own in by_transform(seen).items()}
    known = [site for own in sites.values() for site in own]
    pattern = "*" if log in (AUTO, SITES) else log
    if known and not any(fnmatchcase(site, pattern) for site in known):
        rule = f"must be '{AUTO}', '{SITES}' or a pattern that matches a site"
        close = ", ".join(get_close_matches(log, known, cutoff=0))
        raise LookupError(f"log: {rule}, found '{log}'. Nearest of {len(known)} sites: {close}")
    numbers = {}
    for transform, own in by_transform(rows).items():
        is_summarized = log != SITES and len(sites.get(transform, ())) > MAX_SITES
        shown = [*_summarized(own, sites[transform])] if is_summarized else []
        if log != AUTO or not is_summarized:
            shown += [row for row in own if fnmatchcase(str(row["site"]), pattern)]
        for row in shown:
            for name in ("seen", "calls", *EFFECT_NAMES, NORM_RATIO.name, "bytes"):
                if isinstance(value := row.get(name), int | float):
                    numbers[f"{prefix}/{transform}/{row['site']}/{name}"] = value
    return numbers


def by_transform(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each transform."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(str(row.get("transform")), []).append(row)
    return parts


def _summarized(rows: Sequence[Row], sites: Sequence[str]) -> Iterator[Row]:
    """Yield about 30 numbers about one transform at many `sites`, in rows by place.

    `mean` has the means over the sites, `total` the sums of counts. `worst_cosine/1` to `/3` are
    the lowest cosines, `worst_norm_ratio/1` to `/3` the ratios farthest from 1. `block/<layers>`
    has the mean cosine and norm ratio of one of at most 6 blocks of consecutive layers. A number
    that is not finite counts in `nonfinite` alone.
    """
    yield {**over_sites(rows, MEANS), "site": "mean"}
    yield {**over_sites(rows, COUNTS), "site": "total"}
    for name in COMPARED:
        for rank, row in enumerate(worst(rows, name), 1):
            yield {"site": f"worst_{name}/{rank}", name: _number(row, name)}
    for block, members in _blocks(sites):
        inside = [row for row in rows if row["site"] in members]
        yield {**over_sites(inside, COMPARED), "site": f"block/{block}"}


def over_sites(rows: Sequence[Row], names: Iterable[str]) -> Row:
    """Return the sums of the counts and the means of other numbers, None without a value.

    The means of both norms are over the same rows, those with both, if there are any.
    """
    both = [row for row in rows if all(_number(row, name) is not None for name in NORMS)] or rows
    rows_of = {name: both if name in NORMS else rows for name in names}
    values = {
        name: [v for row in own if (v := _number(row, name)) is not None]
        for name, own in rows_of.items()
    }
    return {
        name: (sum if name in COUNTS else fmean)(column) if column else None
        for name, column in values.items()
    }


def worst(rows: Iterable[Row], name: str) -> list[Row]:
    """Return the rows with the lowest cosine, or with the norm ratio farthest from 1."""
    is_ratio = name == NORM_RATIO.name
    known = [(value, row) for row in rows if (value := _number(row, name)) is not None]
    ranked = [(min(v, 1 / v) if is_ratio and v else v, row) for v, row in known]
    return [row for _, row in sorted(ranked, key=itemgetter(0))[:NUM_WORST]]


def _number(row: Row, name: str) -> float | None:
    """Return a finite number of a row, or None."""
    if name == NORM_RATIO.name:
        before, after = _number(row, "norm_before"), _number(row, "norm_after")
        return after / before if before and after is not None else None
    value = row.get(name)
    return value if isinstance(value, int | float) and isfinite(value) else None


def _blocks(sites: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sites of each block of consecutive layers, named by the first and the last one."""
    layers: dict[str, list[str]] = {}
    for site in sites:
        layer = match[0] if (match := LAYER.match(site)) else site.rpartition(".")[0] or site
        layers.setdefault(layer, []).append(site)
    names, count = [*layers], min(len(layers), NUM_BLOCKS)
    for start, end in pairwise(len(names) * index // count for index in range(count + 1)):
        name = "..".join(dict.fromkeys((names[start], names[end - 1])))
        yield name, [site for layer in names[start:end] for site in layers[layer]]
