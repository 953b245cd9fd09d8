"""What a job prints, against summaries made by hand."""

import ast
import json
import math
from pathlib import Path

import pytest

from gradsurg.plugins.messages import TEXT_WIDTH
from gradsurg.report.text import Runs, report
from gradsurg.report.wording import titles
from gradsurg.training.run_directory import RunDirectory

T_975_2 = 4.302652729911275  # Student's t, two degrees of freedom


def summary(label: str, seed: int, accuracy: float | None, **more: object) -> dict[str, object]:
    return {
        "state": "finished",
        "arm": "control" if label == "none" else "treated",
        "label": label,
        "seed": seed,
        "steps": 100,
        "train/loss": 0.5 + seed / 1e9,
        "train/accuracy": 0.9,
        "test/loss": 0.25,
        "test/accuracy": accuracy,
        "time/step_ms": 1.0,
        "time/measured_step_ms": 2.0,
        "effects_every": 10,
        "notes": [],
        **more,
    }


def effect(site: str, **more: object) -> dict[str, object]:
    return {
        "step": 50,
        "transform": "clip",
        "site": site,
        "calls": 50,
        "sampled": 5,
        "norm_before": 2.0,
        "norm_after": 1.0,
        "cosine": 0.9,
        "changed": 0.25,
        "flipped": 0.0,
        "zeroed": 0.0,
        "distance": 0.5,
        "nonfinite": 0,
        **more,
    }


@pytest.fixture
def write(tmp_path):
    def write(outcome: dict[str, object], *effects: dict[str, object]) -> Path:
        place = RunDirectory(tmp_path / "study" / f"{outcome['label']}-seed{outcome['seed']}-1234")
        place.append_effects(effects or [effect("hidden.0.linear.weight")])
        place.write_summary(outcome)
        return place.path

    return write


def pairs(write, treated: list[float], control: list[float], **more: object) -> list[Runs]:
    """One pair a seed; `more` goes into the treated summaries."""
    numbered = enumerate(zip(treated, control, strict=True))
    return [
        Runs(write(summary("clip", seed, a, **more)), write(summary("none", seed, b)))
        for seed, (a, b) in numbered
    ]


def row_of(text: str, title: str) -> list[str]:
    (line,) = [
        line for line in text.splitlines() if line.startswith(f"{title} ") and "median" not in line
    ]
    return line.removeprefix(title).split()


def assert_readable(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= TEXT_WIDTH, text
    assert text == text.strip()
    assert "\n\n\n" not in text


def test_the_outcome_is_the_paired_difference_worked_out_by_hand(write) -> None:
    text = report(pairs(write, [0.80, 0.84, 0.91], [0.90, 0.90, 0.90]))
    mean = (-0.10 - 0.06 + 0.01) / 3
    sd = math.sqrt(sum((d - mean) ** 2 for d in (-0.10, -0.06, 0.01)) / 2)
    reach = T_975_2 * sd / math.sqrt(3)
    assert row_of(text, "test accuracy") == [
        "85.00%",
        "90.00%",
        "1/3",
        "-5.00",
        "pp",
        f"{100 * (mean - reach):+.2f}",
        "to",
        f"{100 * (mean + reach):+.2f}",
        "pp",
        "0.5",  # sums of 0.17 and 0.15, each with either sign, of 8
    ]
    assert row_of(text, "test loss") == ["0.25", "0.25", "0/3", "+0", "+0", "to", "+0", "1"]
    assert "with 3 seeds the exact sign-flip p is at least 0.25: 6 can reach 0.05" in text
    said = " ".join(text.split("\n\n")[0].split())
    assert said == (
        "clip: no clear difference in test accuracy against the control arm, lower in 2 and higher "
        "in 1 of 3 seeds: median -6.00 pp, mean -5.00 pp (95 % interval "
        f"{100 * (mean - reach):+.2f} to {100 * (mean + reach):+.2f} pp, paired t); "
        "sign-flip p 0.5."
    )
    assert_readable(text)


@pytest.mark.parametrize(("treated", "word"), [(0.95, "higher"), (0.85, "lower")])
@pytest.mark.parametrize("seeds", [3, 6])
def test_a_clear_difference_is_said_with_a_caution_for_few_seeds(
    write, treated: float, word: str, seeds: int
) -> None:
    shifts = [0.001 * seed for seed in range(seeds)]
    text = report(pairs(write, [treated + shift for shift in shifts], [0.9] * seeds))
    said = " ".join(text.split("\n\n")[0].split())
    hint = "a hint that " if seeds < 6 else ""
    where = f"in {seeds} of {seeds} seeds: median "
    assert said.startswith(f"clip: {hint}test accuracy is {word} than in the control arm {where}")
    assert ("(95 % interval" in said.partition("median")[2].partition("mean")[0]) == (seeds >= 6)
    assert ("Fewer than 6 seeds cannot reach p < 0.05" in said) == (seeds < 6)
    assert_readable(text)


def test_a_difference_that_no_signing_reaches_again_is_told_to_be_below(write) -> None:
    text = report(pairs(write, [0.95] * 15, [0.9] * 15))
    assert row_of(text, "test accuracy")[-2:] == ["<", "0.0001"]


def test_the_share_of_a_link_is_the_chain_minus_the_chain_without_it(write) -> None:
    runs = []
    for seed, whole in enumerate((0.8, 0.84, 0.88)):
        rest = {
            "clip": write(summary("noise", seed, whole - 0.02)),
            "noise": write(summary("clip", seed, 0.9, state="diverged" if seed else "finished")),
        }
        treated = write(summary("clip+noise", seed, whole))
        runs.append(Runs(treated, write(summary("none", seed, 0.9)), rest))
    text = report(runs)
    assert "Each link's share in test accuracy, the chain minus the chain without it:" in text
    assert row_of(text, "clip") == ["+2.00", "pp", "+2.00", "to", "+2.00", "pp", "0.25", "3"]
    assert row_of(text, "noise") == ["-10.00", "pp", "one", "seed:", "no", "interval", "1"]
    assert "12 runs" in text
    assert_readable(text)
    gone = [Runs(run.treated, run.control, {"clip": None}) for run in runs]
    assert row_of(report(gone), "clip") == ["-", "no", "seed", "has", "both", "0"]


def test_one_seed_has_no_interval_and_says_so(write) -> None:
    text = report(pairs(write, [0.8], [0.9]))
    assert text.splitlines()[0] == (
        "clip: test accuracy -10.00 pp against the control arm; one seed: no interval."
    )
    assert row_of(text, "test accuracy")[5:] == ["one", "seed:", "no", "interval"]
    assert row_of(text, "step time") == ["1", "ms", "1", "ms", "+0%"]


def test_a_diverged_run_is_counted_apart_with_its_pair(write) -> None:
    runs = pairs(write, [0.8, 0.8, 0.8], [0.9, 0.9, 0.9])
    write(summary("clip", 1, None, state="diverged", **{"test/loss": None}))
    text = report(runs)
    said = " ".join(text.split())
    assert said.startswith(
        "1 of 3 seeds diverged with clip, 0 of 3 in the control arm (exact McNemar p 1). Means and "
        "medians are over the seeds in which neither arm diverged. clip: test accuracy -10.00 pp "
    )
    assert "; two seeds: no interval." in said
    assert row_of(text, "test accuracy")[:5] == ["80.00%", "90.00%", "0/2", "-10.00", "pp"]


def test_step_times_are_medians_and_ratios_seed_by_seed(write) -> None:
    treated = [
        write(summary("clip", seed, 0.9, **{"time/step_ms": time}))
        for seed, time in enumerate((1.1, 1.2, 2.0))
    ]
    control = [write(summary("none", seed, 0.9)) for seed in range(3)]
    text = report([Runs(a, b) for a, b in zip(treated, control, strict=True)])
    assert row_of(text, "step time") == (
        ["1.2", "ms", "1", "ms", "+20%", "+10%", "to", "+100%", "(range)"]
    )
    said = " ".join(text.split())
    assert "median over the steps that measure no effects; its difference is the median" in said
    assert "(one in 10) takes 2 ms with clip." in said


def test_notes_of_one_kind_are_told_once_with_their_number(write) -> None:
    runs = [
        Runs(
            write(
                summary(
                    "clip",
                    seed,
                    0.9,
                    notes=[
                        f"clip changed nothing. Quantiles of |g|: {seed}",
                        "zero: its trigger never fired in 10 gradients",
                    ][: 2 - seed],
                )
            ),
            write(summary("none", seed, 0.9)),
        )
        for seed in range(2)
    ]
    found = [line for line in report(runs).splitlines() if line.startswith("Note")]
    assert found == [
        "Note (2 runs): clip changed nothing. Quantiles of |g|: 0",
        "Note (1 run): zero: its trigger never fired in 10 gradients",
    ]


def test_no_pairs_give_the_outcome_alone(write) -> None:
    runs = [Runs(write(summary("clip", seed, 0.8 + seed / 10)), None) for seed in range(2)]
    text = report(runs)
    assert text.splitlines()[:4] == [
        "clip, no control: 2 seeds",
        "  train loss: 0.5 (0.5 to 0.5)",
        "  test loss: 0.25 (0.25 to 0.25)",
        "  test accuracy: 85.00% (80.00% to 90.00%)",
    ]
    write(summary("clip", 1, None, state="diverged"))
    assert report(runs).splitlines()[1] == "1 of 2 runs diverged"
    assert "  test accuracy: 80.00%" in report(runs).splitlines()
    assert_readable(text)


def test_a_plain_run_prints_its_gradients_without_a_norm_after(write) -> None:
    rows = [
        effect(site, transform="none", norm_after=norm, norm_before=norm, changed=0.0, cosine=1.0)
        for site, norm in (("a.weight", 2.0), ("b.weight", 0.125))
    ]
    text = report([Runs(None, write(summary("none", 0, 0.9), *rows))])
    assert text.splitlines()[0] == "plain run, no surgery: 1 seed"
    table = text.split("\n\n")[2].splitlines()
    assert [line.split() for line in table] == [
        ["site", "norm", "before", "calls"],
        [table[1]],
        ["a.weight", "2", "50"],
        ["b.weight", "0.125", "50"],
    ]


def test_the_table_has_the_means_over_runs_and_no_column_of_zeros(write) -> None:
    runs = [
        Runs(
            write(summary("clip", seed, 0.9), effect("a.weight", changed=0.2 + 0.2 * seed)),
            write(summary("none", seed, 0.9), effect("a.weight", transform="none")),
        )
        for seed in range(2)
    ]
    text = report(runs)
    assert "Gradients at each site, means over 2 runs at one step in 10:" in text
    assert row_of(text, "a.weight") == ["2", "1", "0.9000", "30.0%", "100"]
    for column in ("zeroed", "sign flips", "non-finite", "transform"):
        assert column not in text


def acting(write, control: str, cosine: float) -> str:
    """The report of three seeds with a control that acts."""
    runs = []
    for seed in range(3):
        path = write(summary("clip", seed, 0.8))
        other = write(summary(f"{control}-clip", seed, 0.9, arm="control"))
        rows = [
            json.loads(line) for line in (path / "effects.jsonl").read_text("utf-8").splitlines()
        ]
        lines = [json.dumps({**row, "cosine": cosine}) for row in rows]
        (path / "effects.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        runs.append(Runs(path, other))
    return " ".join(report(runs).split())


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ("norm_matched", "The norm-matched arm has the gradient's direction with the norm that"),
        (
            "update_norm_matched",
            "The update-norm-matched arm has the direction of the optimizer's plain update with",
        ),
        ("placebo", "The placebo arm turns each gradient as far as clip, to the same norm,"),
    ],
)
def test_a_control_that_acts_is_explained_and_costs_are_for_a_plain_one(
    write, control: str, words: str
) -> None:
    text = acting(write, control, 0.9)
    assert f"than in the {control.replace('_', '-')} arm" in text
    assert words in text
    assert "step time " not in text
    assert "control=plain tells what clip costs" in text


@pytest.mark.parametrize("control", ["norm_matched", "placebo"])
def test_a_control_that_is_the_treatment_itself_gives_no_verdict(write, control: str) -> None:
    text = acting(write, control, 1 - 1e-9)
    assert text.startswith("clip turned no gradient (cosine 1 at every site), so the")
    assert "hint" not in text
    assert "compare with control=plain" in text
    assert "turned no gradient" not in acting(write, control, 0.9999)


def test_the_report_and_what_it_computes_with_name_no_torch() -> None:
    root = Path(__file__).parents[2] / "gradsurg"
    for path in [
        *(root / "report").glob("*.py"),
        root / "stats.py",
        root / "effects" / "tables.py",
    ]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])]
        modules = [getattr(node, "module", None) or "" for node in ast.walk(tree)]
        assert not [name for name in [*named, *modules] if name.partition(".")[0] == "torch"], path


def test_every_metric_of_a_task_is_shown_and_the_usual_ones_come_first() -> None:
    summary = {"test/r2": 0.5, "test/loss": 1.0, "train/loss": 0.9, "state": "finished"}
    summary |= {"examined/rank/output": 0.1, "update/cosine": 0.2}
    assert list(titles(summary).items()) == [
        ("train/loss", "train loss"),
        ("test/loss", "test loss"),
        ("test/r2", "test r2"),
        ("examined/rank/output", "examined rank output"),
    ]
