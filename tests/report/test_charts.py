"""The charts of a report: their data, their limits, and that Vega draws what was chosen."""

from typing import Any

import polars as pl
import pytest

from gradsurg.report import charts
from gradsurg.stats import t_critical

COMPARED = {
    "against": "control",
    "unit": "seed",
    "block": None,
    "n": 6,
    "planned": 6,
    "interval": "95 %",
    "verdict": "lower",
    "seeds": list(range(6)),
    "differences": [0.01, -0.02, -0.03, -0.04, -0.05, -0.06],
    "low": -0.05,
    "high": -0.01,
    "difference": -0.03,
}


def compared(*rows: dict[str, object]) -> pl.DataFrame:
    schema = {"block": pl.String, "low": pl.Float64, "high": pl.Float64}
    schema |= {"seeds": pl.List(pl.Int64), "difference": pl.Float64}
    return pl.DataFrame([{**COMPARED, **row} for row in rows], schema_overrides=schema)


def spec_of(chart: charts.Chart, **chosen: object) -> dict[str, Any]:
    """The specification, with these values of its parameters."""
    spec = chart.to_dict()
    for one in spec["params"] if chosen else ():
        one["value"] = chosen.get(one["name"], one.get("value"))
        if one["value"] is None:
            del one["value"]
    return spec


def svg(chart: charts.Chart, **chosen: object) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(spec_of(chart, **chosen))


def marks(drawn: str, kind: str) -> int:
    """The number of drawn items of a kind of mark."""
    parts = drawn.split(f'class="mark-{kind} role-mark')[1:]
    return sum(part.split("</g>")[0].count("<path") for part in parts)


def rows_of(chart: charts.Chart) -> list[dict[str, Any]]:
    spec = chart.to_dict()
    data = spec["data"]
    values = data["values"] if "values" in data else spec["datasets"][data["name"]]
    return list(values)


def test_the_forest_plot_has_shares_in_percentage_points_and_a_dashed_range() -> None:
    chart = charts.outcome_chart(
        compared(
            {"arm": "clip", "metric": "test/accuracy"},
            {"arm": "sign", "metric": "test/accuracy", "interval": "range", "verdict": "unclear"},
            {"arm": "sign", "metric": "test/accuracy", "block": "split 1", "difference": 7.0},
            {"arm": "zero", "metric": "test/accuracy", "difference": None, "differences": []},
        )
    )
    first, second = rows_of(chart)
    assert (first["difference"], first["low"], first["high"]) == (-3.0, -5.0, -1.0)
    assert first["differences"] == pytest.approx([1, -2, -3, -4, -5, -6])
    assert (first["is_clear"], second["is_clear"]) == (True, False)
    assert (first["is_range"], second["is_range"]) == (False, True)
    drawn = svg(chart)
    assert "difference in test accuracy (pp)" in drawn
    assert marks(drawn, "symbol") == 2
    assert 'stroke-dasharray="4,3"' in drawn
    assert marks(drawn, "rect") == 2 * 6  # the seeds
    loss = charts.outcome_chart(compared({"arm": "sign", "metric": "test/loss"}))
    assert rows_of(loss)[0]["difference"] == -0.03
    assert "difference in test loss" in svg(loss)
    assert 'stroke-dasharray="4,3"' not in svg(loss)


def test_the_forest_plot_says_n_only_where_it_differs() -> None:
    frame = compared(*({"arm": arm, "metric": "test/loss"} for arm in ("clip", "sign")))
    assert [row["arm"] for row in rows_of(charts.outcome_chart(frame))] == ["clip", "sign"]
    frame = frame.with_columns(n=pl.Series([6, 5]))
    names = [row["arm"] for row in rows_of(charts.outcome_chart(frame))]
    assert names == ["clip (n = 6)", "sign (n = 5)"]


def test_splits_have_marks_without_seeds() -> None:
    frame = compared({"arm": "clip", "metric": "test/loss", "seeds": None, "unit": "split"})
    assert marks(svg(charts.outcome_chart(frame)), "rect") == 6


def logged(**runs: list[float | None]) -> pl.DataFrame:
    """Runs named `arm_seed`, or `arm_seed_diverged`, with a loss at each step."""
    rows = []
    for name, losses in runs.items():
        arm, seed, *state = name.split("_")
        about = {"run": name, "arm": arm, "seed": int(seed), "state": (*state, "finished")[0]}
        rows += [{**about, "step": step + 1, "train/loss": x} for step, x in enumerate(losses)]
    schema = {"train/loss": pl.Float64, "arm": pl.Categorical}
    return pl.DataFrame(rows, schema_overrides=schema)


def test_a_curve_is_the_mean_over_seeds_that_did_not_diverge_with_its_t_interval() -> None:
    means, seeds = charts.curve_frames(
        logged(
            clip_0=[1.0],
            clip_1=[2.0],
            clip_2=[6.0],
            clip_3_diverged=[900.0],
            none_0=[3.0],
            none_1=[5.0],
        )
    )
    clip, none = means.iter_rows(named=True)
    room = t_critical(3) * 7**0.5 / 3**0.5  # the variance of 1, 2 and 6 is 7
    assert (clip["mean"], clip["n"]) == (3.0, 3)
    assert (clip["low"], clip["high"]) == pytest.approx((3 - room, 3 + room))
    assert (none["mean"], none["low"]) == (4.0, None)
    assert seeds.filter(pl.col("state") == "diverged")["value"].to_list() == [900.0]


@pytest.mark.parametrize("steps", [1, 2, 59, 60, 61, 150, 1000])
def test_a_curve_has_at_most_60_steps_with_the_first_and_the_last(steps: int) -> None:
    frame = logged(clip_0=[float(step) for step in range(steps)], clip_1=[0.0] * (steps // 2 + 1))
    means, _ = charts.curve_frames(frame)
    assert len(means) == min(steps, 60)
    assert (means["step"][0], means["step"][-1]) == (1, steps)


def test_one_arm_that_explodes_does_not_flatten_the_others() -> None:
    numbers = pl.Series([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, float("nan"), 1e6])
    low, high = charts.curve_limits(numbers)
    assert low == 0
    assert 1 < high < 4
    low, high = charts.curve_limits(numbers, by_log=True)
    assert low < -1.3
    assert high > 6
    assert charts.curve_limits(pl.Series([], dtype=pl.Float64)) == (0.0, 1.0)
    low, high = charts.curve_limits(pl.Series([3.0, 3.0]))
    assert low < 3 < high


def test_scale_and_arm_are_chosen_in_the_chart_of_curves() -> None:
    frame = logged(
        clip_0=[1.0, 0.1, 0.01], clip_1=[1.0, 0.1, 0.01], sign_0=[2.0, 1.0, 0.5], none_0=[1.0] * 3
    )
    chart = charts.curves_chart(frame, ["none"])
    whole = svg(chart)
    assert marks(whole, "line") == 3  # a mean each, no seeds
    assert marks(svg(chart, arm="clip"), "line") == 3 + 2
    assert ">0.01<" not in whole
    by_log = svg(chart, scale="log")
    assert ">0.01<" in by_log
    assert "train loss (log scale)" in by_log
    assert marks(by_log, "line") == 3
    assert charts.CONTROL in whole


def test_two_arms_show_all_their_seeds_and_more_arms_those_that_diverged() -> None:
    few = logged(clip_0=[1.0, 0.5], clip_1_diverged=[1.0, 3.0], none_0=[1.0, 0.6])
    drawn = svg(charts.curves_chart(few, ["none"]))
    assert marks(drawn, "line") == 2 + 3
    assert drawn.count(f'stroke="{charts.BAD}"') == 1
    more = pl.concat([few, logged(sign_0=[1.0, 0.4])], how="diagonal_relaxed")
    drawn = svg(charts.curves_chart(more, ["none"]))
    assert marks(drawn, "line") == 3 + 1
    assert drawn.count(f'stroke="{charts.BAD}"') == 1


def test_of_very_many_seeds_the_first_are_drawn_and_those_that_diverged_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(charts, "MAX_SEEDS", 2)
    frame = logged(clip_0=[1.0], clip_1=[2.0], clip_2_diverged=[9.0])
    layers = charts.curves_chart(frame, []).to_dict()["layer"]
    (values,) = (one["data"]["values"] for one in layers if "data" in one)
    assert sorted(row["seed"] for row in values) == [0, 2]


def test_eight_arms_and_their_controls_look_different() -> None:
    names = [f"arm{k}" for k in range(12)]
    looks = charts._looks(names, names[8:])
    colours, dashes = (look.to_dict()["scale"]["range"] for look in looks)
    assert len({(colour, *dash) for colour, dash in zip(colours, dashes, strict=True)}) == 12
    assert [colour == charts.CONTROL for colour in colours] == [k > 7 for k in range(12)]


def test_every_colour_has_one_for_the_dark_theme() -> None:
    dark = dict(zip(charts.LIGHT, charts.DARK, strict=True))
    assert {*charts.TASKS, charts.PAPER, charts.GRID} <= dark.keys()
    assert len(set(dark.values())) == len(charts.LIGHT)


def test_doses_are_lines_over_a_log_axis_and_the_metric_is_chosen() -> None:
    frame = compared(
        *(
            {"arm": f"clip {dose}", "metric": metric, "difference": -dose, "dose": dose}
            for metric in ("test/accuracy", "test/loss")
            for dose in (0.01, 0.1, 1.0)
        )
    ).with_columns(name=pl.lit("clip"), label=pl.lit("clip"), key=pl.lit("transform.clip.value"))
    chart = charts.dose_chart(frame)
    assert [row["difference"] for row in rows_of(chart)] == [-1, -10, -100, -0.01, -0.1, -1]
    drawn = svg(chart)
    assert "transform.clip.value (log scale)" in drawn
    assert "clip: difference in test accuracy (pp)" in drawn
    assert (marks(drawn, "line"), marks(drawn, "symbol")) == (1, 3)
    assert "clip: difference in test loss" in svg(chart, metric="test loss")
    (metric,) = chart.to_dict()["params"]
    assert metric["bind"]["options"] == ["test accuracy (pp)", "test loss"]
    (alone,) = charts.dose_chart(frame[:3]).to_dict()["params"]
    assert (alone["value"], "bind" in alone) == ("test accuracy (pp)", False)


def effects(*rows: tuple[object, ...]) -> pl.DataFrame:
    names = ("run", "step", "sampled", "cosine", "norm_before", "norm_after", "site")
    frame = pl.DataFrame(
        [dict(zip(names, (*row, "w")[:7], strict=True)) for row in rows],
        schema_overrides={"cosine": pl.Float64},
    )
    shares = dict.fromkeys(("changed", "flipped", "zeroed"), 0.5)
    texts = {"arm": "clip", "transform": "clip"}
    return frame.with_columns(**{k: pl.lit(v) for k, v in (shares | texts).items()})


def test_an_effect_is_the_mean_of_a_run_by_its_samples_and_then_over_runs() -> None:
    frame = charts.effect_frame(
        effects(
            ("a", 10, 1, 1.0, 2.0, 1.0),
            ("a", 20, 3, 0.0, 1.0, 1.0),
            ("b", 10, 1, 0.5, 0.0, 0.0),
            ("b", 20, 0, 0.9, 1.0, 1.0),  # nothing was measured
            ("b", 20, 1, None, 4.0, 1.0),
        )
    )
    at_10, at_20, whole = frame.sort("step", nulls_last=True).iter_rows(named=True)
    assert (at_10["step"], at_10["cosine"], at_10["ratio"]) == (10, 0.75, 0.5)
    assert (at_20["step"], at_20["cosine"], at_20["ratio"]) == (20, 0.0, 0.625)
    assert (whole["step"], whole["cosine"], whole["runs"]) == (None, (0.25 + 0.5) / 2, 2)
    assert whole["ratio"] == pytest.approx(((0.5 + 3) / 4 + 0.25) / 2)


def test_a_map_of_many_sites_has_fewer_intervals() -> None:
    rows = [("a", 10 * step, 1, 1.0, 1.0, 1.0, f"{k}") for step in range(1, 41) for k in range(50)]
    frame = charts.effect_frame(effects(*rows), max_cells=400)
    assert frame["step"].drop_nulls().n_unique() == 8
    assert charts.effect_frame(effects(*rows))["step"].drop_nulls().n_unique() == 24


def test_arms_with_several_transforms_are_named_by_both() -> None:
    clip = effects(("a", 10, 1, 1.0, 1.0, 1.0))
    both = pl.concat([clip, clip.with_columns(transform=pl.lit("noise"))])
    names = charts.effect_frame(both)["name"].unique().sort().to_list()
    assert names == ["clip: clip", "clip: noise"]


def test_the_map_of_effects_has_no_colour_where_nothing_changed() -> None:
    frame = effects(
        ("a", 10, 1, 1.0, 1.0, 1.0, "same"),
        ("a", 10, 1, 0.2, 1.0, 4.0, "longer"),
        ("a", 10, 1, 0.6, 1.0, 0.25, "shorter"),
    )
    chart = charts.effect_map(charts.effect_frame(frame))

    def fills(measure: str) -> list[str]:
        cells = svg(chart, measure=measure).split('class="mark-rect role-mark')[1].split("</g>")[0]
        return [part.split('"')[0] for part in cells.split('fill="')[1:]]

    white, blue, orange = "rgb(255, 255, 255)", "rgb(0, 114, 178)", "rgb(213, 94, 0)"
    assert fills("norm ratio") == [white, orange, blue]
    same, longer, shorter = fills("cosine")
    assert (same, longer) == (white, blue)
    assert shorter not in (white, blue)
    assert fills("sign flips") == [blue] * 3


def test_a_tuned_value_has_a_ring_and_one_that_diverged_a_cross() -> None:
    rows = [
        {"value": value, "seed": seed, "score": score, "is_chosen": value == 0.1}
        for value, scores in {0.01: (0.8, 0.82), 0.1: (0.9, 0.92), 1.0: (None, 0.5)}.items()
        for seed, score in enumerate(scores)
    ]
    about = {"arm": "clip", "key": "optimizer.lr", "metric": "validation/accuracy"}
    frame = pl.DataFrame(rows).with_columns(**{key: pl.lit(text) for key, text in about.items()})
    drawn = svg(charts.tuning_chart(frame))
    assert "optimizer.lr (log scale)" in drawn
    assert "validation accuracy (%)" in drawn
    assert marks(drawn, "symbol") == 5 + 3 + 1  # seeds, means, and the chosen one
    words = frame.with_columns(pl.col("value").cast(pl.String))
    assert ">0.1<" in svg(charts.tuning_chart(words))


def test_numbers_that_are_not_finite_are_left_out_and_the_others_have_few_digits() -> None:
    frame = pl.DataFrame({"a": [1 / 3, float("nan"), float("inf")], "b": ["x", "x", "y"]})
    assert charts.inline(frame).to_dict()["values"][0] == {"a": 0.3333, "b": "x"}
    assert charts.inline(frame, ["b"]).to_dict()["values"] == [
        {"b": "x", "a": [0.3333, None]},
        {"b": "y", "a": [None]},
    ]
    assert charts.short(200 / 3) == 66.67
    assert charts.short(float("inf")) is None
