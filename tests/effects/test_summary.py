"""The numbers that are logged of few, and of many sites."""

from math import inf, nan

import pytest

from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.summary import effects_by_path, extremes, over_sites
from gradsurg.effects.tables import effect_table

LAYERS = 20
SUMMARY, EACH = len(EFFECT_NAMES) + 23, len(EFFECT_NAMES) + 4
"""The numbers about many sites, and the numbers of each site: `norm_max`, bytes, seen, calls and
the ratio too.
"""


def rows_of(layers: int = LAYERS) -> list[dict[str, object]]:
    """A weight and a bias of each layer; the cosine falls, the norm ratio rises with the layer."""
    rows: list[dict[str, object]] = []
    for layer in range(layers):
        for place, site in enumerate(("weight", "bias")):
            row: dict[str, object] = {"transform": "clip", "site": f"h.{layer}.{site}"}
            row |= {"seen": 4, "calls": 2, "bytes": 8.0, **dict.fromkeys(EFFECT_NAMES, 0.5)}
            row |= {"norm_before": 2.0, "norm_after": 0.5 + layer, "nonfinite": 0}
            row |= {"norm_max": 3.0 + layer + place / 2, "norm_max_step": layer}
            row |= {"nonfinite_step": None, "nonfinite_rank": None}
            rows.append(row | {"cosine": 1 - layer / LAYERS - place / 100})
    return rows


def test_many_sites_have_few_numbers_whose_names_stay_if_a_site_has_none() -> None:
    rows = rows_of()
    rows[0] |= {"cosine": None, "norm_before": 0.0}  # the best cosine, a gradient of zeros
    numbers = effects_by_path(rows, rows)
    assert len(numbers) == SUMMARY
    place = "effect/clip"
    cosines = [1 - layer / LAYERS - part / 100 for layer in range(LAYERS) for part in (0, 1)][1:]
    assert numbers[f"{place}/mean/cosine"] == pytest.approx(sum(cosines) / 39)
    assert numbers[f"{place}/mean/norm_before"] == pytest.approx(2 * 39 / 40)
    assert numbers[f"{place}/total/calls"] == 80
    assert numbers[f"{place}/max/norm_max"] == 22.5
    lowest = [numbers[f"{place}/worst_cosine/{rank}/cosine"] for rank in (1, 2, 3)]
    assert lowest == pytest.approx([0.04, 0.05, 0.09])
    # 19.5 / 2 twice, then 18.5 / 2; 0.5 / 2 is nearer to 1.
    ratios = [numbers[f"{place}/worst_norm_ratio/{rank}/norm_ratio"] for rank in (1, 2, 3)]
    assert ratios == [9.75, 9.75, 9.25]
    ends = ["0..h.2", "3..h.5", "6..h.9", "10..h.12", "13..h.15", "16..h.19"]
    blocks = {f"{place}/block/h.{end}" for end in ends}
    assert blocks == {path.rpartition("/")[0] for path in numbers if "/block/" in path}
    assert numbers[f"{place}/block/h.3..h.5/norm_ratio"] == 2.25
    assert effects_by_path(rows[30:], rows).keys() <= numbers.keys()
    # A site that was not seen is in no block.
    assert effects_by_path(rows, rows[:30])[f"{place}/total/calls"] == 80


def test_few_sites_and_those_asked_for_have_numbers_of_their_own() -> None:
    few, many = rows_of(6), rows_of()
    each = effects_by_path(few, few)
    assert len(each) == 12 * EACH
    assert each == {path: number for path, number in each.items() if "/h." in path}
    assert effects_by_path(few, many).keys().isdisjoint(each)  # the others have no gradient now
    assert len(effects_by_path(many, many, "sites")) == 40 * EACH
    chosen = effects_by_path(many, many, "*.1?.bias", "mine")
    assert len(chosen) == SUMMARY + 10 * EACH
    assert chosen["mine/clip/h.12.bias/norm_after"] == 12.5
    with pytest.raises(LookupError, match=r"log: .* found '\*.bais'. Nearest of 40 sites: h.*bias"):
        effects_by_path(many, many, "*.bais")


def test_a_table_of_many_sites_has_those_that_stand_out() -> None:
    rows = rows_of()
    head, _, whole, *others, largest, smallest, rest = effect_table(
        rows, rest="elsewhere"
    ).splitlines()
    assert head.split()[:3] == ["site", "norm", "before"]
    assert whole.split()[:5] == ["all", "40", "sites", "2", "10"]
    assert whole.split()[-1] == "320"
    sites = [line.split()[0] for line in others]
    assert sites == ["h.19.bias", "h.19.weight", "h.18.bias", "h.18.weight"]
    title, *norms = largest.replace(": ", ", ").split(", ")
    assert title == "largest norms"
    assert norms == [
        "h.19.bias 22.5 (step 19)",
        "h.19.weight 22 (step 19)",
        "h.18.bias 21.5 (step 18)",
    ]
    assert smallest == "smallest norms: h.0.weight 2, h.0.bias 2, h.1.weight 2"
    assert rest == "36 more rows: elsewhere"
    assert len(effect_table(rows, most=40).splitlines()) == 2 + 40
    unchanged = [{**row, "changed": 0.0, "cosine": 1.0} for row in rows]
    assert effect_table(unchanged).splitlines()[-1] == "40 more rows: in effects.jsonl"


def test_a_table_names_the_first_site_that_is_not_finite() -> None:
    rows = rows_of()
    for rank, (layer, step) in enumerate([(30, 7), (29, 7), (5, 9)], 1):
        rows[layer] |= {"nonfinite_step": step, "nonfinite_rank": rank, "norm_before": nan}
    line = "first NaN or infinity: h.15.weight (step 7)"
    assert effect_table(rows).splitlines()[-2] == line
    assert effect_table(rows[28:32]).splitlines()[-1] == line
    two = effect_table([*rows, {**rows[0], "transform": "scale"}]).splitlines()
    assert f"clip: {line}" in two


def test_the_extremes_of_rows_without_a_largest_norm_are_those_of_the_means() -> None:
    norms = {"a": 2.0, "b": nan, "c": 4.0, "d": 1.0}
    rows = [{"site": name, "norm_before": norm} for name, norm in norms.items()]
    assert extremes(rows) == {
        "largest norms": [("c", 4.0, None), ("a", 2.0, None), ("d", 1.0, None)],
        "smallest norms": [("d", 1.0, None), ("a", 2.0, None), ("c", 4.0, None)],
    }
    rows[1] |= {"norm_max": 0.5, "norm_max_step": 3}
    assert extremes(rows)["smallest norms"][0] == ("b", 0.5, 3)


def test_the_means_of_both_norms_are_over_the_same_sites():
    rows = [{"norm_before": inf, "norm_after": 1.0}, {"norm_before": 4.0, "norm_after": 2.0}]
    norms = ("norm_before", "norm_after")
    assert over_sites(rows, norms) == {"norm_before": 4.0, "norm_after": 2.0}
    control = [{"norm_before": 4.0, "norm_after": None}]
    assert over_sites(control, norms) == {"norm_before": 4.0, "norm_after": None}
