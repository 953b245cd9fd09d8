"""The effects that are logged: all sites of a small model, a summary of a large one."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from operator import itemgetter
from statistics import fmean

from gradsurg.effects.numbers import EFFECT_NAMES, NORM_RATIO, NORMS

LARGEST, MEAN = "norm_max", "norm_before"
AUTO, SITES = "auto", "sites"
MAX_SITES = 12  # of a transform; with more it is summarized
NUM_WORST = 3  # sites shown with the lowest cosines, and with the most extreme norm ratios
NUM_BLOCKS = 6  # of consecutive layers, in a summary
COUNTS = ("seen", "calls", "bytes", "nonfinite")  # added up over sites; others are averaged
MEANS = (*(name for name in EFFECT_NAMES if name not in COUNTS), NORM_RATIO.name)
LOGGED = ("seen", "calls", *EFFECT_NAMES, LARGEST, NORM_RATIO.name, "bytes")
REAL = (int, float)
COMPARED = ("cosine", NORM_RATIO.name)  # the numbers by which these sites are chosen
LAYER = re.compile(r"(?:.*\.)?\d+(?=\.|$)")  # to the last number: `h.0`, `layer1.2`

Row = Mapping[str, object]
Finite = dict[str, float]
"""The numbers of a row that are finite."""


def effects_by_path(
    rows: Iterable[Row], seen: Iterable[Row], log: str = AUTO, prefix: str = "effect"
) -> dict[str, float]:
    """Return the numbers of effect rows as `effect/<transform>/<place>/<number>`.

    Numbers without a value are left out. A place is a site or, for a transform with more than
    MAX_SITES, one of `summarized`. With `log="sites"` it is always a site. Any other `log` is a
    pattern, whose sites come beside the summary. `seen` has a row of each site so far, so that
    paths stay the same when a site has no gradient. Raises LookupError if no site matches.
    """
    sites = {name: [str(row["site"]) for row in own] for name, own in by_transform(seen).items()}
    known = [site for own in sites.values() for site in own]
    pattern = "*" if log in (AUTO, SITES) else log
    if known and not any(fnmatchcase(site, pattern) for site in known):
        rule = f"must be '{AUTO}', '{SITES}' or a pattern that matches a site"
        close = ", ".join(get_close_matches(log, known, cutoff=0))
        raise LookupError(f"log: {rule}, found '{log}'. Nearest of {len(known)} sites: {close}")
    numbers: dict[str, float] = {}
    for transform, own in by_transform(rows).items():
        is_summarized = log != SITES and len(sites.get(transform, ())) > MAX_SITES
        shown = [*_summarized(own, sites[transform])] if is_summarized else []
        if pattern != "*":
            shown += [row for row in own if fnmatchcase(str(row["site"]), pattern)]
        elif log != AUTO or not is_summarized:
            shown += own
        for row in shown:
            place = f"{prefix}/{transform}/{row['site']}/"
            for name in LOGGED:
                if isinstance(value := row.get(name), REAL):
                    numbers[place + name] = value
    return numbers


def by_transform(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each transform."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(str(row.get("transform")), []).append(row)
    return parts


def _summarized(rows: Sequence[Row], sites: Sequence[str]) -> Iterator[Row]:
    """Yield about 30 numbers about one transform at many `sites`, in rows by place.

    `mean` has the means over the sites, `total` the sums of counts, `max` the largest norm.
    `worst_cosine/1` to `/3` are the lowest cosines, `worst_norm_ratio/1` to `/3` the ratios
    farthest from 1. `block/<layers>` has the mean cosine and norm ratio of one of at most 6 blocks
    of consecutive layers. A number that is not finite counts in `nonfinite` alone.
    """
    known = [_finite(row) for row in rows]
    yield {**_over(known, MEANS), "site": "mean"}
    yield {**_over(known, COUNTS), "site": "total"}
    largest = (row[LARGEST] for row in known if LARGEST in row)
    yield {"site": "max", LARGEST: max(largest, default=None)}
    for name in COMPARED:
        for rank, index in enumerate(_worst(known, name), 1):
            yield {"site": f"worst_{name}/{rank}", name: known[index][name]}
    block_of, blocks = _blocks(tuple(sites)), {}
    for row, numbers in zip(rows, known, strict=True):
        if (block := block_of.get(str(row["site"]))) is not None:
            blocks.setdefault(block, []).append(numbers)
    for block, inside in blocks.items():
        yield {**_over(inside, COMPARED), "site": f"block/{block}"}


def over_sites(rows: Iterable[Row], names: Iterable[str]) -> Row:
    """Return the sums of the counts and the means of other numbers, None without a value.

    The means of both norms are over the same rows, those with both, if there are any.
    """
    return _over([_finite(row) for row in rows], names)


def worst(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows with the lowest cosine, or with the norm ratio farthest from 1."""
    return [rows[index] for index in _worst([_finite(row) for row in rows], name)]


def extremes(rows: Sequence[Row]) -> dict[str, list[tuple[str, float, object]]]:
    """Return the sites with the largest and with the smallest norms, each with its norm and step.

    The largest norms belong to one step; the smallest are means, for which the step is None. A row
    of earlier versions has the mean alone, a row with a NaN the largest norm alone.
    """
    found = {}
    for title, names in (
        ("largest norms", (LARGEST, MEAN)),
        ("smallest norms", (MEAN, LARGEST)),
    ):
        known = []
        for row in rows:
            numbers = _finite(row)
            name = next((name for name in names if name in numbers), None)
            if name is not None:
                step = row.get("norm_max_step") if name == LARGEST else None
                known.append((str(row["site"]), numbers[name], step))
        known.sort(key=itemgetter(1), reverse=names[0] == LARGEST)
        if known:
            found[title] = known[:NUM_WORST]
    return found


def first_nonfinite(rows: Iterable[Row]) -> Row | None:
    """Return the row where the backward pass met the first NaN or infinity, if there is one."""
    known = [row for row in rows if row.get("nonfinite_step") is not None]
    return min(known, key=itemgetter("nonfinite_step", "nonfinite_rank"), default=None)


def _finite(row: Row) -> Finite:
    """Return the finite numbers of a row, and the ratio of its norms."""
    known: Finite = {
        name: value for name, value in row.items() if isinstance(value, REAL) and isfinite(value)
    }
    before, after = (known.get(name) for name in NORMS)
    if before and after is not None:
        known[NORM_RATIO.name] = after / before
    return known


def _over(rows: Sequence[Finite], names: Iterable[str]) -> Row:
    # The two means can be compared only if they are over the same sites.
    both = [row for row in rows if NORMS[0] in row and NORMS[1] in row] or rows
    values = {
        name: [row[name] for row in (both if name in NORMS else rows) if name in row]
        for name in names
    }
    return {
        name: (sum if name in COUNTS else fmean)(column) if column else None
        for name, column in values.items()
    }


def _worst(rows: Iterable[Finite], name: str) -> list[int]:
    """Return the indices of the worst rows."""
    known = [(row[name], index) for index, row in enumerate(rows) if name in row]
    if name == NORM_RATIO.name:
        # A norm that is halved is as far from 1 as one that is doubled.
        known = [(min(v, 1 / v) if v else v, index) for v, index in known]
    return [index for _, index in sorted(known)[:NUM_WORST]]


@lru_cache(maxsize=8)  # the sites of a transform seldom change between logs
def _blocks(sites: tuple[str, ...]) -> dict[str, str]:
    """The block of consecutive layers of each site, named by the first and the last layer."""
    layers: dict[str, list[str]] = {}
    for site in sites:
        # Without a number, for example in `fc1.weight`, the module is the layer.
        layer = match[0] if (match := LAYER.match(site)) else site.rpartition(".")[0] or site
        layers.setdefault(layer, []).append(site)
    names, count = [*layers], min(len(layers), NUM_BLOCKS)
    block_of: dict[str, str] = {}
    for start, end in pairwise(len(names) * index // count for index in range(count + 1)):
        name = "..".join(dict.fromkeys((names[start], names[end - 1])))
        for layer in names[start:end]:
            block_of |= dict.fromkeys(layers[layer], name)
    return block_of
