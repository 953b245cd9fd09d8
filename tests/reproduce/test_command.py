"""The command of a reproduction: verdicts, records, errors and exit codes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gradsurg
from gradsurg.report.arms import group
from gradsurg.report.study import Study
from gradsurg.reproduce import command, studies
from gradsurg.reproduce.expected import papers, read_expected
from gradsurg.reproduce.record import read_record, recorded, tables, write_record
from gradsurg.reproduce.studies import FinishedStudy, PlannedRun, StudyPlan
from tests.conftest import Ended, Here
from tests.reproduce.mini import (
    BAND,
    LARGE,
    LOSSES,
    MAIN,
    MINI,
    SIX,
    STUDY,
    TIMES,
    expect,
    expect_band,
    found,
)

ROOT = Path(__file__).parents[2]
Reproduce = Callable[..., Ended]
Losses = dict[tuple[str, int], float | None]


def foreseen(label: str, seed: int) -> PlannedRun:
    known = {"label": label, "seed": seed, "task.start": [1, 2]}
    return PlannedRun(known, 10, {"test/loss": 0, "test/other-loss": 0, "train/loss": 5})


@pytest.fixture
def losses() -> Losses:
    """The outcomes of the runs of the study; None has failed."""
    return dict(LOSSES)


@pytest.fixture
def reproduce(
    root: Path,
    losses: Losses,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Reproduce:
    """The command, with a runner that trains nothing."""

    def run_study(words: Sequence[str], planned: StudyPlan) -> FinishedStudy:
        folder = root / "runs" / words[0].removeprefix("experiment=")
        runs = [
            found(*who, None if loss is None else {"test/loss": loss, **TIMES}, folder)
            for who, loss in losses.items()
        ]
        return FinishedStudy(Study(folder, group(runs)))

    planned = StudyPlan(root, {f"{who[0]}-{who[1]}": foreseen(*who) for who in losses}, 3_600_000)
    monkeypatch.setattr(studies, "run_study", run_study)
    monkeypatch.setattr(studies, "plan_study", lambda words: planned)

    def reproduced(*words: str) -> Ended:
        code = command.main(words, root)
        return Ended(code, *capsys.readouterr())

    return reproduced


def spaced(text: str) -> str:
    """Return a text with single spaces."""
    return " ".join(text.split())


def test_a_measured_claim_gives_exit_code_0_and_its_verdict(reproduce: Reproduce) -> None:
    ended = reproduce("mini")
    assert ended.code == 0
    assert "main It is low. <= 0.5 0.35 (0.20 to 0.50) 6 holds" in spaced(ended.out)
    # d = 0.15 sqrt(6) / 0.1049: computed as above
    told = "(1 of 1 bands hold). Probability of this verdict for as many new seeds: 67 % to 80 %."
    assert f"mini, main: holds {told}\n" in ended.out


@pytest.mark.parametrize(
    ("high", "before", "after", "code"),
    [
        (0.5, "", "holds", 0),
        (0.4, "", "undecided", 0),
        (0.1, "", "does not hold", 0),
        (0.4, "undecided", "undecided", 0),
        (0.1, "does not hold", "does not hold", 0),
        (0.5, "holds", "undecided", 1),
        (0.5, "holds", "does not hold", 1),
        (0.1, "does not hold", "holds", 1),
        (0.5, "", "not measured", 1),
        (0.5, "holds", "not measured", 1),
        (0.5, "not measured", "holds", 0),
    ],
)
def test_the_exit_code_tells_whether_the_recorded_verdict_came_again(
    root: Path,
    reproduce: Reproduce,
    losses: Losses,
    high: float,
    before: str,
    after: str,
    code: int,
) -> None:
    far = {"holds": high - 0.5, "undecided": high - 0.35, "does not hold": high + 1}
    expect_band(root, high=high)

    def measure(result: str, *words: str) -> Ended:
        for seed, loss in enumerate(SIX):
            losses["clip", seed] = loss + far[result] if result in far else None
        return reproduce("mini", *words)

    if before:
        measure(before, "--write")
    ended = measure(after)
    assert f"mini, main: {after}" in ended.out
    said = f"main: another verdict than the recorded one, {before}."
    assert (ended.code, said in ended.out) == (code, before not in ("", after, "not measured"))


def test_claims_are_judged_apart_and_a_held_variant_does_not_hide_the_published_one(
    root: Path, reproduce: Reproduce
) -> None:
    claims = {
        "main": {"says": "Clipping is best.", "front": "{all_lower}"},
        "variant": {"says": "It helps.", "conditions": "fewer steps", "front": "{low_enough}"},
        "large": {"says": "At scale.", "not_tested": "the model is too small"},
    }
    bands = [
        {**BAND, "name": "all_lower", "high": 0.1},
        {**BAND, "claim": "variant"},
        {**BAND, "name": "any", "says": "Reported.", "claim": "large", "high": None},
    ]
    expect(root, {**MINI, "claims": claims, "bands": bands})
    out = reproduce("mini", "--write").out
    assert "mini, main: does not hold (0 of 1 bands hold)." in out
    assert "mini, variant: holds (1 of 1 bands hold). Conditions: fewer steps." in out
    assert "mini, large: not tested: the model is too small.\n" in out
    listed = spaced(reproduce("--list").out)
    assert "mini main does not hold 7 Clipping is best." in listed
    assert "mini variant holds, with conditions 7 It helps." in listed
    assert "mini large not tested 7 At scale." in listed
    table = reproduce("--table").out
    value = "0.35 (0.20 to 0.50)"
    assert f"mini/README.md) main | Clipping is best. | {value} | **does not hold** |" in table
    assert f"variant | It helps. | {value} | **holds**: fewer steps | 67 % to 80 % | 7 |" in table
    assert "At scale. |  | **not tested**: the model is too small | - | 7 |" in table
    # with bounds too
    expect(root, {**MINI, "claims": claims, "bands": [*bands[:2], {**bands[2], "high": 0.5}]})
    assert "mini, large: not tested: the model is too small.\n" in reproduce("mini").out


def test_measurements_are_recorded_and_appear_in_the_tables(
    root: Path, reproduce: Reproduce
) -> None:
    assert "mini main not measured - Clipping helps." in spaced(reproduce("--list").out)
    assert "| Clipping helps. | - | **not measured** | - | - |" in reproduce("--table").out
    folder = root / "experiments" / "mini"
    (folder / "README.md").write_text("# Mini\n", encoding="utf-8")
    for _ in range(2):  # the second time in the place of the first
        assert reproduce("mini", "--write").code == 0
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# Mini\n\n<!-- begin")
    assert text.count("- `main`: Clipping helps. **holds** (1 of 1 bands hold).") == 1
    assert text.count("| main | It is low. | <= 0.5 | 0.35 (0.20 to 0.50) | 6 | holds |") == 1
    assert text.count(f"| {STUDY} | control | 0 | test/loss | 2 | 2 |") == 1
    each = "0.2, 0.3, 0.3, 0.4, 0.4, 0.5"
    assert text.count(f"| 0, 1, 2, 3, 4, 5 | test/loss | 0.35 (0.20 to 0.50) | {each} |") == 1
    assert "Bands. Measured on a small machine, gradsurg " in text
    (row,) = json.loads((folder / "measured.json").read_text(encoding="utf-8"))["bands"]
    assert row["values"] == [*SIX]
    main = {"says": "Clipping helps.", "front": "a loss of {low_enough}"}
    expect(root, {**MINI, "claims": {"main": main}, "result": "It is {low_enough}."})
    row = "| Clipping helps. | a loss of 0.35 (0.20 to 0.50) | **holds** | 67 % to 80 % | 7 |"
    assert row in reproduce("--table", "--write").out
    index = (root / "experiments" / "README.md").read_text(encoding="utf-8")
    assert row in index
    assert f"Measured on a small machine, gradsurg {gradsurg.__version__}, Python 3." in index
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "\n\nIt is 0.35 (0.20 to 0.50).\n\n" in text


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"high": 0.49}, "undecided"),
        ({"high": 0.1}, "does not hold"),
        ({"says": "It is quite low."}, "holds"),
        ({"metric": "test/other-loss"}, "not measured"),
        ({"runs": {"label": "none"}}, "not measured"),
        ({"minus": {"label": "none"}}, "not measured"),
        ({"of": "every"}, "not measured"),
        ({"at": "most"}, "not measured"),
        ({"name": "new"}, "not measured"),
    ],
)
def test_recorded_values_are_judged_anew_unless_the_band_takes_others(
    root: Path, reproduce: Reproduce, change: dict[str, object], result: str
) -> None:
    reproduce("mini", "--write")
    expect_band(root, **change)
    expected = read_expected(root, "mini")
    (verdict,) = recorded(expected, read_record(root / "experiments" / "mini"))
    assert verdict.result == result
    assert f"mini main {result} 7 " in spaced(reproduce("--list").out)
    reproduce("--table", "--write")
    text = (root / "experiments" / "mini" / "README.md").read_text(encoding="utf-8")
    assert f"**{result}**" in text


def test_a_full_form_has_studies_and_files_of_its_own(root: Path, reproduce: Reproduce) -> None:
    expect(root, {**MINI, "full": [LARGE]})
    said = "mini: 3,600,000 steps; the quick form has not been measured\n"
    assert reproduce("mini", "--cost").out == said
    assert "mini, full form: Nobody 2000" in reproduce("mini", "--full", "--write").out
    folder = root / "experiments" / "mini"
    there = {"expected.yaml", "full.json", "full.md"}
    assert {path.name for path in folder.iterdir()} == there
    text = (folder / "full.md").read_text(encoding="utf-8")
    assert "# mini, full form\n\n```\npython scripts/reproduce.py mini --full\n```\n" in text
    assert "Verdicts of the full form:\n\n- `main`: Clipping helps. **holds**" in text
    assert "mini main not measured - " in spaced(reproduce("--list").out)
    reproduce("mini", "--write")
    said = "mini: 3,600,000 steps, 2.5 hours of one core at the quick form's pace\n"
    assert reproduce("mini", "--cost").out == said
    (root / "drawn.png").write_bytes(b"a picture")
    expected, record = read_expected(root, "mini"), read_record(folder, "full")
    assert record is not None
    write_record(folder, expected, record, root / "drawn.png")
    assert (folder / "full.png").read_bytes() == b"a picture"
    assert "![mini, full form](full.png)" in (folder / "full.md").read_text(encoding="utf-8")


def test_nothing_is_recorded_without_write(root: Path, reproduce: Reproduce) -> None:
    before = sorted(root.rglob("*"))
    assert reproduce("mini").code == 0
    assert reproduce("--table").code == 0
    assert sorted(root.rglob("*")) == before


def test_a_study_with_other_overrides_is_another_which_is_not_recorded(
    root: Path, reproduce: Reproduce, losses: Losses
) -> None:
    ended = reproduce("mini", "seeds=1", "--write", "out=there")
    said = "--write records the study as it is configured: leave out seeds=1, or --write\n"
    assert (ended.code, ended.err) == (2, said)
    assert not (root / "experiments" / "mini" / "measured.json").exists()
    assert reproduce("mini", "--write", "out=there").code == 0
    losses["clip", 0] = 0.6
    assert reproduce("mini", "out=there").code == 1
    other = reproduce("mini", "seeds=1")  # not compared with the record
    assert other.code == 0
    assert "with seeds=1, which is not what the claims are about:\n" in other.out


def test_a_band_about_a_missing_number_is_refused_before_training(
    root: Path, reproduce: Reproduce
) -> None:
    expect_band(root, runs={"label": "clp"})
    fault = "did you mean 'clip'? No run has label: clp. There are: clip, none."
    ended = reproduce("mini")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"mini: low_enough: {STUDY}: {fault}\n"
    other = reproduce("mini", "seeds=1")  # then there can be other runs
    assert (other.code, other.err) == (1, "")
    assert "mini, main: not measured" in other.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mino"], "did you mean 'mini'? There is no experiment 'mino'.\n"),
        ([], "name a paper. There are: mini.\n"),
        (["mini", "--full"], "mini: there is no full form\n"),
        (["mini", "--cost"], "mini: there is no full form\n"),
    ],
)
def test_a_wrong_command_line_is_refused_with_exit_code_2(
    reproduce: Reproduce, words: list[str], said: str
) -> None:
    ended = reproduce(*words)
    assert (ended.code, ended.out, ended.err) == (2, "", said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quick": ["nowhere"]}, ": there is no study 'nowhere'. There are: large_"),
        ({"full": ["simple_transform"]}, "did you mean 'simple_transforms'?"),
        ({"full": ["one", "two"]}, ": full: must be as many studies as quick, in the same order"),
        ({"claim": "x"}, ": claim: did you mean 'claims'? There is no field 'claim'."),
        ({"claims": {}}, ": claims: must have at least 1 item, found {}"),
        ({"claims": {**MAIN, "other": MAIN["main"]}}, "none with bounds is about the claim other"),
        ({"bands": [{**BAND, "high": None}]}, "none with bounds is about the claim main"),
        ({"bands": []}, ": bands: must have at least 1 item, found []"),
        ({"bands": [BAND, BAND]}, "a name each, found low_enough twice"),
        (
            {"claims": {"main": {"says": "x", "front": "a loss of {low}"}}},
            ": claims.main.front: names no band {low}",
        ),
        ({"result": "a loss of {low}"}, ": result: names no band {low}"),
        ({"bands": [{**BAND, "low": 1}]}, "must be <= high, found low=1.0, high=0.5"),
        ({"bands": [{**BAND, "of": "total"}]}, "must be one of 'every', 'mean' or 'share'"),
        ({"bands": [{**BAND, "of": "share", "minus": {"label": "none"}}]}, "is for of=mean"),
        ({"bands": [{**BAND, "claim": "x"}]}, "must name a claim in the band low_enough, found x"),
        ({"bands": [{**BAND, "study": "x"}]}, "must name a study in the band low_enough, found x"),
        (
            {"bands": [{**BAND, "minus_study": LARGE}]},
            f"minus_study in the band low_enough, found {LARGE}",
        ),
        ({"quick": [STUDY, LARGE]}, "must name a study in the band low_enough, found none"),
        (
            {"figure": {"kind": "curves", "metric": "test/loss", "studies": ["simple"]}},
            ": figure: must name studies of quick, found simple. There are: simple_transforms.",
        ),
    ],
)
def test_a_wrong_expected_yaml_is_an_error_with_exit_code_2(
    root: Path, reproduce: Reproduce, change: dict[str, object], said: str
) -> None:
    expect(root, {**MINI, **change})
    ended = reproduce("--all")
    assert ended.code == 2
    assert ended.err.startswith("experiments/mini/expected.yaml: ")
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_the_list_has_two_lines_of_80_columns_for_each_claim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert command.main(["--list"], ROOT) == 0
    head, rule, *lines = capsys.readouterr().out.splitlines()
    claims = [(p, claim) for p in papers(ROOT) for claim in read_expected(ROOT, p).claims.items()]
    assert lines[2 * len(claims)] == ""
    for place, (paper, (name, claim)) in enumerate(claims):
        first, second = lines[2 * place : 2 * place + 2]
        assert first.split()[:2] == [paper, name]
        assert claim.says.startswith(second.strip().removesuffix(" .."))
        assert (second.strip() == claim.says) == (len(claim.says) <= 78)
    assert max(map(len, (head, rule, *lines))) <= 80


@pytest.mark.parametrize("paper", papers(ROOT))
def test_every_experiment_has_bands_and_a_readme(paper: str) -> None:
    assert read_expected(ROOT, paper).bands
    text = (ROOT / "experiments" / paper / "README.md").read_text(encoding="utf-8")
    assert f"python scripts/reproduce.py {paper}" in text
    index = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert f"[`{paper}`]({paper}/README.md)" in index


@pytest.mark.parametrize("paper", papers(ROOT))
def test_the_tables_of_every_experiment_are_those_of_its_record(paper: str) -> None:
    expected, folder = read_expected(ROOT, paper), ROOT / "experiments" / paper
    record = read_record(folder)
    if record is None:
        pytest.skip("not measured")
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert tables(expected, record) in text
    index = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    for verdict in recorded(expected, record):
        start = f"| [`{paper}`]({paper}/README.md) {verdict.name} |"
        (row,) = [line for line in index.splitlines() if line.startswith(start)]
        assert f"| **{verdict.result}**" in row
        assert f"`{verdict.name}`: **{verdict.result}**." in text.partition("**Setup.**")[0]


@pytest.mark.slow
def test_a_study_is_run_once_and_ignores_other_runs_in_its_folder(
    root: Path, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[Ended] = []
    # In this process, as the start of another takes long.
    monkeypatch.setattr(studies, "train", lambda words: ended.append(here(*words)))
    small = ["transform=clip,sign", "model=mlp", "steps=20", "logger=none", "report=false"]
    small.append(f"out={root / 'runs'}")
    expect_band(root, of="every", high=10, runs={})
    assert command.main(["mini", *small, "seed=0"], root) == 0
    assert "3 to train" in ended[0].err
    assert command.main(["mini", *small, "seed=0"], root) == 0
    assert "3 finished before, skipped" in ended[1].err
    assert command.main(["mini", *small, "seed=1"], root) == 0
    lines = capsys.readouterr().out.splitlines()
    # those of seed 0 lie in the same folder
    line = next(line for line in lines if line.startswith("main"))
    assert line.split()[-2:] == ["3", "holds"]


@pytest.mark.full
def test_a_tuned_study_has_the_runs_with_the_chosen_values_and_the_time_of_all(root: Path) -> None:
    words = [f"experiment={STUDY}", "transform=clip", "model=mlp", "steps=20", "seed=0"]
    words += ["logger=none", "report=false", f"out={root / 'runs'}"]
    words += ["tune='lr=[1e-9,0.1]'", "tune_seeds=1"]
    planned = studies.plan_study(words)
    study = studies.run_study(words, planned)
    assert planned.steps == 6 * 20
    assert len(study.trials) == 4
    rates = {run.label: (run.config or {})["optimizer"]["lr"] for run in study.study.all_runs}
    assert rates == {"clip": 0.1, "none": 0.1}
    times = [(run.summary or {})["time/train_s"] for run in (*study.study.all_runs, *study.trials)]
    assert study.minutes == pytest.approx(sum(times) / 60)


def test_a_wheel_which_has_no_experiments_is_refused_with_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["liu2021"], None) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "needs a checkout" in printed.err


@pytest.mark.slow
def test_a_wrong_override_is_an_error(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["mini", "steps=-1"], root) == 2
    assert "steps: must be >= 0, found -1" in capfd.readouterr().err


@pytest.mark.full
def test_the_counter_examples_of_error_feedback_hold(tmp_path: Path) -> None:
    assert command.main(["karimireddy2019", f"out={tmp_path}"]) == 0
