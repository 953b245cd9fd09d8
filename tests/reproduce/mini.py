"""A small experiment, and runs of it that were never trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from gradsurg.report.arms import group
from gradsurg.report.load import LoadedRun
from gradsurg.report.study import Study
from gradsurg.reproduce.expected import read_expected
from gradsurg.reproduce.judge import Judgement, judge

STUDY, LARGE = "simple_transforms", "large_transforms"
BAND = {"name": "low_enough", "says": "It is low.", "runs": {"label": "clip"}, "high": 0.5}
BAND |= {"metric": "test/loss"}
MAIN = {"main": {"says": "Clipping helps."}}
MINI = {"claims": MAIN, "source": "Nobody 2000", "published": "0.4"}
MINI |= {"quick": [STUDY], "bands": [BAND]}
TIMES = {"time/train_s": 60, "time/step_ms": 2.5, "hardware": "a small machine"}
# The 95 % sign-flip interval of six values is their range: of its 63 subset means it leaves out
# floor(0.05 x 32) = 1 at each side, apart from the ends themselves.
SIX = (0.2, 0.3, 0.3, 0.4, 0.4, 0.5)
LOSSES = {**{("clip", seed): loss for seed, loss in enumerate(SIX)}, ("none", 0): 2.0}


def found(label: str, seed: int, summary: Mapping[str, object] | None, folder: Path) -> LoadedRun:
    return LoadedRun(
        path=folder / f"{label}-seed{seed}-0",
        state="finished" if summary else "failed",
        arm="control" if label == "none" else "treated",
        label=label,
        seed=seed,
        config={"seed": seed, "task": {"start": [1, 2]}, "transform": {label: {}}},
        summary=dict(summary) if summary else None,
    )


def with_values(values: Sequence[float], root: Path, metric: str = "test/loss") -> list[LoadedRun]:
    return [found("clip", seed, {metric: value}, root) for seed, value in enumerate(values)]


def expect(root: Path, told: object, paper: str = "mini") -> None:
    folder = root / "experiments" / paper
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(told, sort_keys=False)  # the first claim is the published one
    (folder / "expected.yaml").write_text(text, encoding="utf-8")


def expect_band(root: Path, **change: object) -> None:
    expect(root, {**MINI, "bands": [{**BAND, **change}]})


def judged_with(root: Path, runs: list[LoadedRun], /, **change: object) -> Judgement:
    expect_band(root, **change)
    (judged,) = judge(read_expected(root, "mini"), {STUDY: Study(root, group(runs))})
    return judged
