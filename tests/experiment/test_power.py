"""The difference that the seeds of a command can find, by the spread of earlier control runs."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.stats import chi2

from gradsurg.experiment import power
from gradsurg.experiment.power import power_lines
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.stats import detectable_effect, equivalence_power
from tests.builds import built

CLIP = "transform=clip"


def end(folder: Path, accuracies: Sequence[float], *words: str, **more: object) -> None:
    """Write finished control runs with these test accuracies, one a seed, and more outcomes."""
    count = f"seeds={len(accuracies)}"
    pairs = built("transform=none", f"out={folder}", *words, count).pairs
    for pair, accuracy in zip(pairs, accuracies, strict=True):
        assert pair.control is not None
        directory = RunDirectory(pair.control.directory(folder))
        directory.plan(pair.control.facts, pair.control.identity)
        outcome = {"state": "finished", "test/accuracy": accuracy, "test/loss": 1.0}
        directory.write_summary(outcome | more)


def told(folder: Path, *words: str) -> list[str]:
    return power_lines([built(CLIP, f"out={folder}", "seeds=8", *words)])


def found(sd: float, arms: int = 1) -> float:
    """The effect that 8 seeds find, in percentage points."""
    return 100 * (detectable_effect(8, sqrt(2) * sd, level=0.05 / arms) or 0.0)


def test_two_controls_of_any_study_tell_it_with_its_uncertainty(tmp_path: Path) -> None:
    assert not told(tmp_path)
    end(tmp_path, [0.9, 0.92], "study=other", "steps=10", "lr=0.3")
    sd = stdev([0.9, 0.92])
    low, high = (found(sd / sqrt(chi2.ppf(p, df=1))) for p in (0.975, 0.025))
    assert told(tmp_path) == [
        f"8 seeds can find a difference in test accuracy of {found(sd):.2g} pp (80 % power; "
        f"{low:.2g} to {high:.2g} pp, as the spread is known only from 2 control runs at lr 0.3, "
        "10 steps)"
    ]


def test_runs_of_several_configs_are_pooled_within_each(tmp_path: Path) -> None:
    near, far = [0.90, 0.91, 0.92, 0.94], [0.50, 0.51, 0.53]
    end(tmp_path, near, "lr=0.3")
    end(tmp_path, far, "lr=0.001")
    end(tmp_path, [0.1], "lr=5")  # alone, it tells no spread
    sd = sqrt((3 * stdev(near) ** 2 + 2 * stdev(far) ** 2) / 5)
    assert told(tmp_path) == [
        f"8 seeds can find a difference in test accuracy of {found(sd):.2g} pp (80 % power, from "
        "the spread of 7 control runs at lr 0.001 to 0.3)"
    ]


@pytest.mark.parametrize(
    ("nearer", "farther", "runs"),
    [
        ((), ("lr=0.3",), "6 control runs"),
        (("lr=0.3",), ("steps=7",), "6 control runs at lr 0.3"),
        (("steps=10",), ("steps=7",), "12 control runs at 7 to 10 steps"),
        (
            ("steps=7", "validation=0.2"),
            ("optimizer=adam",),
            "6 control runs at 7 steps, validation 0.2",
        ),
        (("batch_size=8",), ("optimizer=adam",), "6 control runs with another batch_size"),
        (
            ("optimizer.momentum=0.5", "lr=1.5"),
            ("optimizer=adam",),
            "6 control runs with another momentum at lr 1.5",
        ),
    ],
    ids=["same config", "same steps", "other steps", "optimizer first", "other", "momentum"],
)
def test_nearer_configs_alone_are_taken_if_they_are_enough(
    nearer: tuple[str, ...], farther: tuple[str, ...], runs: str, tmp_path: Path
) -> None:
    end(tmp_path, [0.9, 0.91, 0.92, 0.93, 0.94, 0.96], *nearer)
    end(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], *farther)
    (line,) = told(tmp_path)
    assert line.endswith(f"from the spread of {runs})")


def test_another_optimizer_tells_it_only_if_the_same_has_no_two_runs(tmp_path: Path) -> None:
    end(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "optimizer=adam", "lr=0.01")
    end(tmp_path, [0.9], "lr=0.3")
    (line,) = told(tmp_path)
    assert line.endswith("from the spread of 6 control runs with Adam at lr 0.01)")
    end(tmp_path, [0.9, 0.91], "lr=0.3")
    (line,) = told(tmp_path)
    assert line.endswith("known only from 2 control runs at lr 0.3)")


def test_a_seed_counts_once_though_runs_measure_at_other_sites(tmp_path: Path) -> None:
    end(tmp_path, [0.9, 0.92])
    before = told(tmp_path)
    end(tmp_path, [0.9, 0.92], "site=outputs")
    assert told(tmp_path) == before


@pytest.mark.parametrize(
    "words", [("model=linear",), ("task.label_noise=0.1",), ("model.hidden=[8]",)]
)
def test_other_tasks_and_models_tell_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    end(tmp_path, [0.9, 0.92], *words)
    assert not told(tmp_path)
    assert len(told(tmp_path, *words)) == 1


def test_a_task_with_more_fields_is_another_one() -> None:
    part = "task:\n  name: own\n"
    assert power._has(f"seed: 0\n{part}site:\n", part)
    assert power._has(part, part)
    assert not power._has(f"seed: 0\n{part}  noise: 0.1\n", part)


@pytest.mark.parametrize(
    "more",
    [
        {"state": "diverged"},
        {"learned_nothing": {"metric": "test/accuracy", "beside": 0.1, "what": "chance"}},
        {"until": "validation/accuracy >= 0.9", "until/reached": 1, "until/step": 50},
    ],
    ids=["diverged", "learned nothing", "until"],
)
def test_runs_that_failed_to_learn_or_stopped_early_tell_nothing(
    more: dict[str, object], tmp_path: Path
) -> None:
    end(tmp_path, [0.9, 0.92], **more)
    assert not told(tmp_path)
    end(tmp_path, [0.9, 0.92], "lr=0.3", learned_nothing={})
    assert len(told(tmp_path)) == 1


def test_the_steps_to_a_target_have_a_spread_that_control_runs_do_not_tell(tmp_path: Path) -> None:
    words = ("eval_every=50", "validation=0.2")
    end(tmp_path, [0.9, 0.92], *words)
    assert told(tmp_path, *words)
    assert not told(tmp_path, *words, "until='accuracy >= 0.9'")


def test_runs_without_an_outcome_tell_nothing(tmp_path: Path) -> None:
    pairs = built("transform=none", f"out={tmp_path}", "seeds=4").pairs
    for run in (pair.control for pair in pairs[2:]):
        assert run is not None
        RunDirectory(run.directory(tmp_path)).plan(run.facts, run.identity)
    assert not told(tmp_path)


def test_a_run_that_two_studies_have_counts_once(tmp_path: Path) -> None:
    end(tmp_path, [0.9, 0.92])
    before = told(tmp_path)
    end(tmp_path, [0.9, 0.92], "study=other")
    assert told(tmp_path) == before


def test_each_task_and_model_of_a_sweep_has_a_line_of_its_own(tmp_path: Path) -> None:
    end(tmp_path, [0.9, 0.92])
    end(tmp_path, [0.8, 0.84], "model=linear")
    names = ("mlp", "linear")
    jobs = [built(CLIP, f"out={tmp_path}", "seeds=8", f"model={name}") for name in names]
    lines = power_lines(jobs)
    assert [line.partition(":")[0] for line in lines] == ["digits, mlp", "digits, linear"]
    sizes = [float(line.partition("accuracy of ")[2].split()[0]) for line in lines]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.05)


def swept(folder: Path, count: int, *words: str) -> list[str]:
    """The lines of a sweep over `count` arms."""
    arms = [f"transform.clip.value={k}" for k in range(1, count + 1)]
    return power_lines([built(CLIP, f"out={folder}", "seeds=8", arm, *words) for arm in arms])


def test_of_several_arms_it_is_told_what_one_of_them_can_show(tmp_path: Path) -> None:
    end(tmp_path, near := [0.90, 0.91, 0.92, 0.93, 0.94, 0.96])
    sd = stdev(near)
    assert found(sd, 6) > 1.5 * found(sd)
    assert swept(tmp_path, 6) == [
        f"8 seeds can find a difference in test accuracy of {found(sd):.2g} pp for one arm alone, "
        f"{found(sd, 6):.2g} pp for one of 6 (80 % power, from the spread of 6 control runs)"
    ]


def test_the_ranges_of_several_arms_stand_beside_each_other(tmp_path: Path) -> None:
    end(tmp_path, [0.90, 0.91])
    ends = [
        f"{found(sd / sqrt(chi2.ppf(0.975, df=1)), arms):.2g} to "
        f"{found(sd / sqrt(chi2.ppf(0.025, df=1)), arms):.2g} pp for one {of}"
        for sd in [stdev([0.90, 0.91])]
        for arms, of in ((1, "arm alone"), (2, "of 2"))
    ]
    (line,) = swept(tmp_path, 2)
    assert f"(80 % power; {', '.join(ends)}, as the spread" in line


def test_arms_that_need_more_seeds_are_told_beside_the_difference(tmp_path: Path) -> None:
    end(tmp_path, [0.90, 0.91, 0.92, 0.93, 0.94, 0.96])
    warning, line = swept(tmp_path, 7)
    assert warning.startswith("7 arms with 8 seeds: ")
    assert " pp for one arm alone (80 % power, " in line


@pytest.mark.parametrize(
    ("margin", "size"), [("3pp", 0.03), ("2%", 0.02 * fmean([0.90, 0.91, 0.92, 0.93, 0.94, 0.96]))]
)
def test_with_a_margin_it_tells_how_often_equal_arms_are_shown_to_be(
    margin: str, size: float, tmp_path: Path
) -> None:
    end(tmp_path, near := [0.90, 0.91, 0.92, 0.93, 0.94, 0.96])
    share = 100 * (equivalence_power(8, sqrt(2) * stdev(near), size) or 0.0)
    assert 0 < round(share) < 100
    assert told(tmp_path, f"margin={margin}") == [
        f"if the arms are equal, 8 seeds show test accuracy within {100 * size:.2g} pp of the "
        f"control in {share:.0f} % of studies (from the spread of 6 control runs)"
    ]


def test_with_a_margin_few_runs_tell_a_range(tmp_path: Path) -> None:
    end(tmp_path, [0.90, 0.91])
    (line,) = told(tmp_path, "margin=1pp")
    assert " % of studies (0 to 100 %, as the spread is known only from 2 control runs)" in line


def test_few_files_are_read_those_of_the_study_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(tmp_path, [0.9, 0.92], "lr=0.3")
    end(tmp_path, [0.7, 0.75, 0.8, 0.85], "lr=0.2", "study=newer")
    monkeypatch.setattr(power, "MAX_READ", 3)
    (line,) = told(tmp_path)
    assert "only from 2 control runs" in line
    (line,) = told(tmp_path, "study=third")
    assert "only from 3 control runs" in line


def test_a_difference_of_shares_is_at_most_100_pp(tmp_path: Path) -> None:
    end(tmp_path, [0.5, 0.9])
    (line,) = told(tmp_path)
    assert " to 100 pp, as the spread is known only from 2 control runs)" in line
