"""Bands and claims: verdicts by whole intervals, what the values are, and the figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.report.arms import group
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import Band, Claim, Drawing, read_expected
from gradsurg.reproduce.figures import draw
from gradsurg.reproduce.judge import Judgement, Verdict, judge, mean_with_interval, verdicts
from gradsurg.reproduce.record import band_rows, make_record
from tests.reproduce.mini import (
    BAND,
    LARGE,
    LOSSES,
    MINI,
    SIX,
    STUDY,
    expect,
    found,
    judged_with,
    with_values,
)


@pytest.mark.parametrize(
    ("values", "bounds", "result"),
    [
        (SIX, {"high": 0.5}, "holds"),
        (SIX, {"high": 0.49}, "undecided"),
        (SIX, {"high": 0.2}, "undecided"),
        (SIX, {"high": 0.19}, "does not hold"),
        (SIX, {"low": 0.2}, "holds"),
        (SIX, {"low": 0.21}, "undecided"),
        (SIX, {"low": 0.51}, "does not hold"),
        (SIX, {"low": 0.2, "high": 0.5}, "holds"),
        (SIX, {"low": 0.3, "high": 0.4}, "undecided"),
        (SIX, {"low": 0.3, "high": 0.9}, "undecided"),
        (SIX, {"low": 0.6, "high": 0.9}, "does not hold"),
        (SIX, {"low": 0.0, "high": 0.1}, "does not hold"),
        (SIX[1:], {"high": 9.0}, "undecided"),  # five values have no interval
        ((0.25,) * 6, {"high": 0.25}, "holds"),
    ],
)
def test_a_mean_is_judged_by_its_whole_interval(
    root: Path, values: Sequence[float], bounds: dict[str, float], result: str
) -> None:
    judged = judged_with(root, with_values(values, root), **{"high": None, **bounds})
    assert judged.result == result
    assert judged.interval == ((min(values), max(values)) if len(values) == 6 else None)


@pytest.mark.parametrize(
    ("differences", "bounds", "result"),
    [
        ((1, 0, 0, 0, 0, 0, 0, 0), {"low": 0}, "undecided"),  # p = 1
        ((-1, 0, 0, 0, 0, 0, 0, 0), {"high": 0}, "undecided"),
        ((0,) * 8, {"low": 0}, "undecided"),
        ((0,) * 8, {"low": 0, "high": 0}, "holds"),
        ((1,) * 8, {"low": 0}, "holds"),
    ],
)
def test_a_difference_whose_interval_ends_at_a_bound_is_undecided(
    differences: Sequence[float], bounds: Mapping[str, float], result: str
) -> None:
    band = Band(name="x", says="x", metric="test/loss", minus={"label": "none"}, **bounds)
    assert Judgement(band, differences).result == result


@pytest.mark.parametrize(
    ("low", "high", "result"),
    [(0.1, 0.3, "holds"), (None, 0.2, "does not hold"), (0.2, None, "does not hold")],
)
def test_of_every_run_one_outside_the_band_is_enough(
    root: Path, low: float | None, high: float | None, result: str
) -> None:
    judged = judged_with(root, with_values((0.1, 0.3, 0.2), root), of="every", low=low, high=high)
    assert (judged.result, judged.measured, judged.chances) == (result, "0.1 to 0.3", None)


@pytest.mark.parametrize(
    ("count", "n", "bounds", "result"),
    [
        # 8 of 8: the lower end is 0.025^(1/8) = 0.6306; 0 of 8: the upper one is 1 less that
        (8, 8, {"low": 0.63}, "holds"),
        (8, 8, {"low": 0.64}, "undecided"),
        (0, 8, {"low": 0.36}, "undecided"),
        (0, 8, {"low": 0.37}, "does not hold"),
        (0, 8, {"high": 0.37}, "holds"),
        # 5 of 10: 0.1871 to 0.8129, from tables of Clopper and Pearson's interval
        (5, 10, {"low": 0.187, "high": 0.813}, "holds"),
        (5, 10, {"low": 0.188, "high": 0.813}, "undecided"),
        (5, 10, {"low": 0.187, "high": 0.812}, "undecided"),
        (5, 10, {"low": 0.813}, "does not hold"),
        (5, 10, {"high": 0.187}, "does not hold"),
    ],
)
def test_a_share_is_judged_by_its_exact_interval(
    root: Path, count: int, n: int, bounds: dict[str, float], result: str
) -> None:
    runs = with_values([int(seed < count) for seed in range(n)], root, "until/reached")
    band = {"metric": "until/reached", "of": "share", "high": None, **bounds}
    judged = judged_with(root, runs, **band)
    assert judged.result == result
    assert judged.measured.startswith(f"{count} of {n} (")
    halves = judged_with(root, with_values([0.5] * n, root, "until/reached"), **band)
    assert halves.lacking == "until/reached is not 0 or 1 in each run"


def test_the_verdicts_of_a_share_come_again_with_binomial_probabilities(root: Path) -> None:
    # The lower end is above 0.3 from 6 of 8 on: 0.349, of 5 of 8 it is 0.245. scipy.stats 1.17:
    # binom.sf(5, 8, 7 / 8) and, with Jeffreys' prior, betabinom.sf(5, 8, 7.5, 1.5).
    runs = with_values([1] * 7 + [0], root, "until/reached")
    band = {"metric": "until/reached", "of": "share", "low": 0.3, "high": None}
    chances = judged_with(root, runs, **band).chances or {}
    assert chances["holds"] == pytest.approx((0.93265, 0.81517), abs=1e-5)
    assert chances["undecided"] == pytest.approx((1 - 0.93265, 1 - 0.81517), abs=1e-5)
    assert chances["does not hold"] == (0, 0)  # 0 of 8 reaches up to 0.369
    # Its upper end is below 0.6 for 0 and 1 of 8, and only these: binom.cdf(1, 8, 1 / 8),
    # betabinom.cdf(1, 8, 1.5, 7.5).
    runs = with_values([1] + [0] * 7, root, "until/reached")
    chances = judged_with(root, runs, **{**band, "low": 0.6}).chances or {}
    assert chances["does not hold"] == pytest.approx((0.73630, 0.63020), abs=1e-5)


def test_the_verdicts_of_a_mean_come_again_with_normal_probabilities(root: Path) -> None:
    # With d = (bound - mean) sqrt(6) / sd and c = t.ppf(0.975, 5), of scipy.stats: the first is
    # nct.cdf(-c, 5, -d); the second nct.cdf(-c / sqrt(2), 5, -d sqrt(x / 5) / sqrt(2)), integrated
    # over chi2.pdf(x, 5).
    runs = with_values(SIX, root)
    chances = judged_with(root, runs, high=0.55).chances or {}
    assert chances["holds"] == pytest.approx((0.9571, 0.8215), abs=0.01)
    chances = judged_with(root, runs, low=0.55, high=None).chances or {}
    assert chances["does not hold"] == pytest.approx((0.9571, 0.8215), abs=0.01)
    assert chances["undecided"] == pytest.approx((0.0429, 0.1785), abs=0.01)
    # As far below as above: norm.cdf of what d leaves beside the margin, integrated likewise.
    chances = judged_with(root, runs, low=0.15, high=0.55).chances or {}
    assert chances["holds"] == pytest.approx((0.9154, 0.6802), abs=0.01)
    same = judged_with(root, with_values([0.25] * 6, root))
    assert (same.chances or {})["holds"] == (1, 1)
    for few in (with_values(SIX[1:], root), [found("clip", 0, None, root)]):
        assert judged_with(root, few).chances is None


def verdict_of(root: Path, *bands: tuple[Mapping[str, object], Sequence[float]]) -> Verdict:
    """The verdict of bands about arms of their own."""
    own = [
        {**BAND, "name": f"b{i}", "runs": {"label": f"arm{i}"}, **band}
        for i, (band, _) in enumerate(bands)
    ]
    expect(root, {**MINI, "bands": own})
    runs = [
        found(f"arm{i}", seed, {"test/loss": value}, root)
        for i, (_, values) in enumerate(bands)
        for seed, value in enumerate(values)
    ]
    expected = read_expected(root, "mini")
    (verdict,) = verdicts(expected, judge(expected, {STUDY: Study(root, group(runs))}))
    return verdict


SHARE = {"of": "share", "low": 0.3, "high": None}, (1,) * 7 + (0,)
EVERY = {"of": "every"}, (0.1,)
# Undecided except for 8 of 8 and 0 of 8: 1 - binom.pmf([0, 8], 8, 7 / 8).sum(), and of betabinom.
HALF = {**SHARE[0], "low": 0.5}, SHARE[1]


@pytest.mark.parametrize(
    ("bands", "result", "again"),
    [
        ((SHARE,), "holds", "82 % to 93 %"),
        ((SHARE, SHARE), "holds", "66 % to 87 %"),  # the squares of 0.8152 and 0.9327
        ((HALF,), "undecided", "65 % to 66 %"),
        ((SHARE, EVERY), "holds", "82 % to 93 % (1 of 2 bands)"),
        (
            (SHARE, ({"of": "every", "high": 0.05}, (0.1,))),
            "does not hold",
            "> 99 % (1 of 2 bands)",
        ),
        ((SHARE, ({}, SIX[1:])), "undecided", "> 99 % (1 of 2 bands)"),
        ((EVERY,), "holds", "-"),
        ((({**SHARE[0], "low": 0.0}, SHARE[1]),), "holds", "> 99 %"),
        ((SHARE, ({}, ())), "not measured", "-"),
    ],
)
def test_a_verdict_comes_again_if_its_bands_do(
    root: Path,
    bands: Sequence[tuple[Mapping[str, object], Sequence[float]]],
    result: str,
    again: str,
) -> None:
    verdict = verdict_of(root, *bands)
    assert (verdict.result, verdict.again) == (result, again)


def test_the_weakest_band_decides(root: Path) -> None:
    holds, half, fails = ({}, SIX), ({"high": 0.3}, SIX), ({"high": 0.1}, SIX)
    weaker = [(holds, "holds"), (half, "undecided"), (({}, ()), "not measured")]
    weaker.append((fails, "does not hold"))
    for count in range(1, 5):
        bands = [band for band, _ in weaker[:count]]
        assert verdict_of(root, *bands).result == weaker[count - 1][1]
        assert verdict_of(root, *reversed(bands)).result == weaker[count - 1][1]
    assert verdict_of(root, holds, ({"high": None}, (9.0,))).result == "holds"  # only reported


def test_a_difference_is_taken_seed_by_seed_with_its_exact_p_value(root: Path) -> None:
    own = with_values([1 + seed / 8 for seed in range(8)], root)
    control = [found("none", seed, {"test/loss": seed / 16}, root) for seed in reversed(range(8))]
    judged = judged_with(root, own + control, minus={"label": "none"}, low=1, high=None)
    assert judged.values == tuple(1 + seed / 16 for seed in range(8))
    assert (judged.result, judged.p_value) == ("holds", 2 / 2**8)  # all of one sign
    (row,) = band_rows([Verdict("main", Claim("x"), (judged,))])[1:]
    assert row[3].endswith("); p 0.0078")
    zeros = [found("none", seed, {"test/loss": 0.0}, root) for seed in range(8)]
    mixed = with_values([0, 1, -2, -3, -4, -5, -6, -7], root)
    # As far from 0: 0 and 1 with any sign, the others with one, and all of it mirrored.
    assert judged_with(root, mixed + zeros, minus={"label": "none"}).p_value == 2 * 4 / 2**8
    assert judged_with(root, own).p_value is None


@pytest.mark.parametrize(
    ("control", "minus", "lacking"),
    [
        ([1.0] * 5, "none", "runs and minus must be one run each of the same seeds"),
        ([1.0] * 6, "sign", "no run has these keys"),
        ([1.0] * 6, "clip", "runs and minus are the same runs"),
        ([*[1.0] * 5, None], "none", "1 of 12 runs: failed"),
    ],
)
def test_a_difference_without_a_pair_for_each_seed_is_not_measured(
    root: Path, control: list[float | None], minus: str, lacking: str
) -> None:
    runs = with_values(SIX, root)
    for seed, value in enumerate(control):
        runs.append(found("none", seed, {"test/loss": value} if value else None, root))
    judged = judged_with(root, runs, minus={"label": minus})
    assert (judged.measured, judged.result) == (lacking, "not measured")


def test_a_difference_can_be_to_another_study(root: Path) -> None:
    band = {**BAND, "study": STUDY, "minus_study": LARGE, "low": 0.6, "high": None}
    expect(root, {**MINI, "quick": [STUDY, LARGE], "bands": [band]})
    expected = read_expected(root, "mini")
    own = Study(root / "a", group(with_values([1 + value for value in SIX], root / "a")))
    large = [replace(run, label="none") for run in with_values(SIX[::-1], root / "b")]
    (judged,) = judge(expected, {STUDY: own, LARGE: Study(root / "b", group(large))})
    assert judged.values == pytest.approx((0.7, 0.9, 0.9, 1.1, 1.1, 1.3))  # 1.2 - 0.5, ...
    assert judged.result == "holds"
    (judged,) = judge(expected, {STUDY: own, LARGE: Study(root / "b", group(large[1:]))})
    assert judged.measured == "runs and minus must be one run each of the same seeds"


def test_diverged_runs_are_counted_where_the_band_is_about_them(root: Path) -> None:
    runs = [found("clip", seed, {"until/reached": 1, "test/loss": 0.25}, root) for seed in (0, 1)]
    lost = {"until/reached": 0, "test/loss": 0.25}
    runs.append(replace(found("clip", 2, lost, root), state="diverged"))
    share = {"of": "share", "low": 0.9, "high": None}
    assert judged_with(root, runs, metric="until/reached", **share).values == (1, 1, 0)
    assert judged_with(root, runs, metric="diverged", **share).values == (0, 0, 1)
    assert judged_with(root, runs).measured == "1 of 3 runs: diverged"
    expected = read_expected(root, "mini")
    for chosen, mean in ((runs, "0.25, diverged 1/3"), (runs[2:], "diverged 1/1")):
        own = {STUDY: Study(root, group(chosen))}
        record = make_record(expected, "quick", judge(expected, own), own, 1.0, {})
        assert [row["mean"] for row in record["arms"]] == [mean]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.876, 0.889, 0.892, 0.880, 0.884, 0.887], "0.8847 (0.8760 to 0.8920)"),
        ([-0.021, 0.002, -0.004, 0.0, 0.0, 0.0], "-0.004 (-0.021 to 0.002)"),
        ([1240.0, 960.0, 1680.0, 1000.0, 1100.0, 1200.0], "1200 (960 to 1680)"),
        ([-0.001, 0.0, 0.001, 0.0, 0.0, 0.0], "0.0000 (-0.0010 to 0.0010)"),
        ([0.12, 0.13, 0.14, 0.12, 0.14], "0.13"),  # of five there is no interval
        ([0.25] * 6, "0.25"),
        ([1e-9, 2e-9, 3e-9, 1e-9, 2e-9, 3e-9], "2e-09 (1e-09 to 3e-09)"),
        ([0.123456], "0.1235"),
    ],
)
def test_a_mean_has_as_many_digits_as_its_interval_allows(values: list[float], said: str) -> None:
    assert mean_with_interval(values) == said


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("test/loss - test/other-loss", -1.0),
        ("test/loss + test/loss - test/other-loss - test/loss", -1.0),
        ("test/other-loss", 3.0),
    ],
)
def test_metrics_are_added_and_subtracted_of_runs_chosen_by_their_config(
    root: Path, metric: str, expected: float
) -> None:
    runs = [found("clip", 0, {"test/loss": 2.0, "test/other-loss": 3.0}, root)]
    runs.append(found("none", 0, {"test/loss": 9.0, "test/other-loss": 9.0}, root))
    chosen = {"task.start": [1, 2], "label": "clip"}
    assert judged_with(root, runs, metric=metric, runs=chosen).values == (expected,)


def write_rows(run: LoadedRun, name: str, rows: Sequence[Mapping[str, object]]) -> None:
    run.path.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run.path / f"{name}.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("at", "expected", "quantity"),
    [
        ("end", 4.0, "test/loss"),
        ("most", 3.0, "test/loss, most"),
        ("least", 1.0, "test/loss, least"),
        (10, 3.0, "test/loss at step 10"),
        (15, None, "test/loss at step 15"),
        (20, 1.0, "test/loss at step 20"),
    ],
)
def test_a_metric_is_taken_at_the_end_or_from_the_rows(
    root: Path, at: object, expected: float | None, quantity: str
) -> None:
    run = found("clip", 0, {"test/loss": 4.0}, root)
    rows = [{"step": 10, "test/loss": 3.0}, {"step": 15}, {"step": 20, "test/loss": 1.0}]
    write_rows(run, "metrics", rows)
    judged = judged_with(root, [run], at=at)
    assert judged.band.quantity == quantity
    assert judged.values == (() if expected is None else (expected,))
    if expected is None:
        assert judged.measured == f"no {quantity} in clip-seed0-0"


@pytest.mark.parametrize("kind", ["curves", "outcomes"])
def test_a_figure_shows_each_seed_of_each_arm(root: Path, kind: str) -> None:
    runs = [
        found(*who, {"test/loss": loss}, root) for who, loss in LOSSES.items() if who[1] in (0, 1)
    ]
    for run in runs:
        write_rows(run, "metrics", [{"step": s, "test/loss": (run.seed + 1) / s} for s in (1, 2)])
    lone = draw(Drawing(kind, "test/loss"), Study(root, group(runs[:1])), root / "one")
    every = draw(Drawing(kind, "test/loss"), Study(root, group(runs)), root / "all")
    assert lone is not None
    assert every is not None
    assert every.name == "figure.png"
    assert lone.read_bytes() != every.read_bytes()
    assert draw(Drawing(kind, "test/accuracy"), Study(root, group(runs)), root) is None


def test_the_alignment_figure_has_an_angle_over_the_steps(root: Path) -> None:
    runs = [found("clip", 0, {"test/loss": 1.0}, root), found("none", 0, {"test/loss": 1.0}, root)]
    turned = (("a#0/Mm[0].1", 0.5), ("b#0", 0.25), ("b#0", None))
    for run in runs:
        rows = [
            {"step": step, "site": site, "norm_before": 1.0, "transform": name, "cosine": own}
            for step, (site, cosine) in enumerate(turned, 1)
            for name, own in (("clip", cosine), ("sign", 0.9))
        ]
        write_rows(run, "effects", rows)
    at = [("a#0/Mm[0].1", "end", 0.5), ("a#0/Mm[0].1", 1, 0.5), ("b#0", "most", 0.25)]
    for site, when, value in at:
        judged = judged_with(root, runs, metric=f"effect/clip/{site}/cosine", at=when)
        assert judged.values == (value,)
    assert draw(Drawing("own", "clip"), Study(root, group(runs)), root, "lillicrap2016") is not None
    assert draw(Drawing("own", "sign"), Study(root, group(runs[1:])), root, "lillicrap2016") is None
    assert draw(Drawing("own", "reverse"), Study(root, group(runs)), root, "lillicrap2016") is None


def test_trajectories_have_a_panel_for_each_label(root: Path) -> None:
    runs = [found(label, 0, {"test/loss": 1.0}, root) for label in ("clip", "none")]
    for run in runs:
        rows = [{"step": step, "test/x1": step / 9, "test/x2": 1.0} for step in (1, 2)]
        write_rows(run, "metrics", rows)
    study, drawing = Study(root, group(runs)), Drawing("own", "test/x")
    for paper in ("liu2021", "yu2020", "karimireddy2019"):
        drawn = draw(drawing, study, root / paper, paper)
        assert drawn is not None
        text = drawn.with_suffix(".svg").read_text(encoding="utf-8")
        assert all(f">{label}<" in text for label in ("clip", "none"))
    assert draw(Drawing("own", "test/y"), study, root, "liu2021") is None


def examined(label: str, seed: int, folder: Path, number: float) -> LoadedRun:
    """A run of an examination of two layers, with maps of two images."""
    numbers = {"examined/rank/b": number, "examined/rank/a": 0.5, "examined/ssim/b": 0.25}
    run = found(label, seed, {**numbers, "examined/ssim/a": 0.2, "test/loss": 1.0}, folder)
    one = [[1.0, -0.5], [0.0, number]]
    told = {"images": [one, one], "maps": {name: [one, one] for name in ("trained", "b", "a")}}
    RunDirectory(run.path).write_json("examined.json", told)
    return run


def test_a_figure_of_maps_shows_each_measure_of_each_seed_and_the_maps_of_each_arm(
    root: Path,
) -> None:
    who = [("clip", 0, 0.9), ("clip", 1, 0.8), ("none", 0, 0.1)]
    runs = [examined(label, seed, root, number) for label, seed, number in who]
    drawn = draw(Drawing("own", "examined"), Study(root, group(runs)), root / "all", "adebayo2018")
    fewer = draw(
        Drawing("own", "examined"), Study(root, group(runs[:1])), root / "one", "adebayo2018"
    )
    assert drawn is not None
    assert fewer is not None
    assert drawn.read_bytes() != fewer.read_bytes()
    text = drawn.with_suffix(".svg").read_text(encoding="utf-8")
    cells = ("rank", "ssim", "image", "trained", "b", "a", "1, clip", "1, control", "2, clip")
    assert all(f">{cell}<" in text for cell in cells)
    assert ">1, control<" not in fewer.with_suffix(".svg").read_text(encoding="utf-8")
