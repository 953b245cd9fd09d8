"""The W&B logger: offline runs read back have all that was logged."""

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradsurg.loggers.wandb import Wandb, _glob_argument, _location
from gradsurg.plugins import registry
from gradsurg.plugins.fields import FieldError
from tests.loggers.offline import info, inspect, of_type, rows, run_wandb


def test_wandb_run_read_back_has_what_was_logged(tmp_path):
    done = run_wandb(
        tmp_path,
        """
logger = Wandb(mode="offline", project="clipping")
for seed, state in ((0, "finished"), (1, "diverged")):
    logger.start(run(seed))
    logger.log(10, {"train/loss": 1.5, "effect/clip/hidden.0.linear.weight/changed": 0.125})
    logger.log(20, {"train/loss": float("nan") if seed else 0.75})
    logger.finish(state, {"test/accuracy": 0.875})
print(json.dumps(logger.notes()))
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    paths = [*sorted((tmp_path / "runs").glob("clip-*/wandb/offline-run-*"))]
    assert len(paths) == 2
    first, second = (inspect(tmp_path, path) for path in paths)

    (begun,) = of_type(first, "run")
    named = ("display_name", "run_group", "job_type", "project", "tags")
    assert [begun[key] for key in named] == ["clip 0", "study", "clip", "clipping", ["clip", "mlp"]]
    config = begun["config"]["update"]
    assert (config["lr"], config["model"]) == (0.1, {"hidden": [64, 64]})
    (axis,) = of_type(first, "metric")
    assert (axis["glob_name"], axis["step_metric"]) == ("*", "global_step")
    *lines, table = rows(first)
    assert lines == [
        {"global_step": 10, "train/loss": 1.5, "effect/clip/hidden.0.linear.weight/changed": 0.125},
        {"global_step": 20, "train/loss": 0.75},
    ]
    assert "table-file" in table.values()
    assert rows(second)[1] == {"global_step": 20, "train/loss": "NaN"}
    outcomes = [
        {key: update["update"][key] for key in ("state", "test/accuracy")}
        for records in (first, second)
        for update in of_type(records, "summary")
        if "state" in update["update"]
    ]
    assert outcomes == [
        {"state": "finished", "test/accuracy": 0.875},
        {"state": "diverged", "test/accuracy": 0.875},
    ]
    assert [of_type(records, "exit")[0]["exit_code"] for records in (first, second)] == [0, 1]
    assert json.loads(done.stdout) == [
        "W&B (offline): 2 runs under runs",
        "  to upload: wandb sync runs/*/wandb/offline-run-*",
    ]


VARIABLES = """
os.environ.update(WANDB_PROJECT="ours", WANDB_NAME="my-name", WANDB_RUN_GROUP="my-group",
                  WANDB_JOB_TYPE="my-type", WANDB_TAGS="one,two",
                  WANDB_DIR=os.path.abspath("scratch"), WANDB_RUN_ID="fixed", WANDB_RESUME="must",
                  WANDB_MODE="offline")
"""


@pytest.mark.slow
def test_variables_of_wandb_act_where_no_field_is_given_and_each_run_has_its_own_id(tmp_path):
    done = run_wandb(
        tmp_path,
        VARIABLES
        + """
logger = Wandb()
for seed in (0, 1, 0):  # the first is repeated: its W&B run is replaced
    logger.start(run(seed))
    logger.log(10, {"train/loss": seed + 1.5})
    logger.finish("finished", {})
print(json.dumps(logger.notes()))
""",
    )
    assert done.returncode == 0
    assert done.stderr == "WANDB_RUN_ID is ignored: each run has an id of its own\n"
    paths = [*tmp_path.glob("scratch/wandb/offline-run-*")]
    assert not [*tmp_path.glob("runs/*/wandb")]
    assert json.loads(done.stdout)[1] == "  to upload: wandb sync scratch/wandb/offline-run-*"
    records = [inspect(tmp_path, path) for path in paths]
    assert sorted(rows(one)[0]["train/loss"] for one in records) == [1.5, 2.5]
    begun = [of_type(one, "run")[0] for one in records]
    assert len({one["run_id"] for one in begun} | {"fixed"}) == 3
    named = ("project", "display_name", "run_group", "job_type", "tags")
    for one in begun:
        assert [one[key] for key in named] == [
            "ours",
            "my-name",
            "my-group",
            "my-type",
            ["one", "two"],
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("project", "variable", "used"),
    [
        ("typed", "ours", "typed"),
        pytest.param("gradsurg", "ours", "gradsurg", marks=pytest.mark.full),
        (None, None, "gradsurg"),
    ],
)
def test_a_project_that_is_given_wins_over_the_variable(tmp_path, project, variable, used):
    setting = f"os.environ['WANDB_PROJECT'] = {variable!r}" if variable else ""
    done = run_wandb(
        tmp_path,
        f"""
{setting}
logger = Wandb(mode="offline", project={project!r})
logger.start(run(0))
logger.finish("finished", {{}})
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.glob("runs/*/wandb/offline-run-*")
    (begun,) = of_type(inspect(tmp_path, path), "run")
    assert begun["project"] == used


@pytest.mark.slow
def test_the_summary_has_the_last_and_the_best_value_of_a_metric_with_a_direction(tmp_path):
    done = run_wandb(
        tmp_path,
        """
from dataclasses import replace
logger = Wandb(mode="offline", panels="all")
logger.start(replace(run(0), better={"loss": "lower", "accuracy": "higher"}))
for step, (loss, accuracy) in enumerate(((2.5, 0.5), (0.5, 0.75), (1.5, 0.25))):
    logger.log(step, {"train/loss": loss, "train/loss_first": loss, "test/accuracy": accuracy,
                      "test/other": 1.0, "conflict/sum/shared/norm/loss": loss})
logger.finish("finished", {"train/loss": 1.5, "test/accuracy": 0.25, "test/loss": 0.125})
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.glob("runs/*/wandb/offline-run-*")
    records = inspect(tmp_path, path)
    defined = {one["name"]: one["summary"] for one in of_type(records, "metric") if "name" in one}
    assert defined == {
        "train/loss": {"min": True},
        "train/loss_first": {"min": True},
        "test/accuracy": {"max": True},
    }
    summary = {
        key: value for one in of_type(records, "summary") for key, value in one["update"].items()
    }
    known = {key: value for key, value in summary.items() if key.startswith(("train/", "test/"))}
    assert known == {
        "train/loss": 1.5,
        "train/loss.min": 0.5,
        "train/loss_first": {"min": 0.5},
        "test/accuracy": 0.25,
        "test/accuracy.max": 0.75,
        "test/loss": 0.125,
        "test/other": 1.0,
    }


@pytest.mark.slow
def test_the_run_of_a_study_has_its_config_its_verdict_and_one_artifact(tmp_path):
    (tmp_path / "page.html").write_text("<p>page</p>", encoding="utf-8")
    done = run_wandb(
        tmp_path,
        """
from gradsurg.loggers.base import StudyInfo
study = StudyInfo(
    "my study", Path("runs/report"), [{"arm": "clip"}], verdict="clip raises test accuracy.",
    config={"command": "python -m gradsurg.run"}, files=[Path("page.html")],
    surgery={"clip": {"transform": {"clip": {"value": 0.1}}}}, environment=[{"torch": "2"}],
)
Wandb(mode="offline").study(study)
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.glob("runs/report/wandb/offline-run-*")
    records = inspect(tmp_path, path)
    (begun,) = of_type(records, "run")
    verdict = "clip raises test accuracy."
    assert begun["notes"] == verdict
    config = begun["config"]["update"]
    assert (config["study"], config["command"]) == ("my study", "python -m gradsurg.run")
    assert any(one["update"].get("verdict") == verdict for one in of_type(records, "summary"))
    (artifact,) = [one for one in of_type(records, "artifact") if one["type"] == "study"]
    assert artifact["name"] == "my-study"
    files = {one["path"]: Path(one["local_path"]) for one in artifact["manifest"]["contents"]}
    assert {*files} == {"page.html", "surgery.json", "environment.json"}
    assert all(file.is_absolute() for file in files.values())
    assert files["page.html"].read_text(encoding="utf-8") == "<p>page</p>"
    surgery = json.loads(files["surgery.json"].read_text(encoding="utf-8"))
    assert surgery["clip"]["transform"] == {"clip": {"value": 0.1}}
    assert json.loads(files["environment.json"].read_text(encoding="utf-8")) == [{"torch": "2"}]


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABAQAAAAA3bvkkAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
"""A picture of one pixel."""

SITE = """
site = {"norm_before": 2.0, "norm_after": 1.0, "cosine": 0.9, "changed": 0.5, "flipped": 0.1,
        "zeroed": 0.0, "distance": 0.6, "nonfinite": 0, "seen": 10, "calls": 10}
values = {f"effect/clip/layer{number}/{name}": value
          for number in range(6) for name, value in site.items()}
values |= {"conflict/mean/shared/conflict_rate": 1.0, "others/mean/shared/pcgrad/weight/a": 0.5}
"""


@pytest.mark.slow
@pytest.mark.parametrize("panels", ["few", pytest.param("all", marks=pytest.mark.full)])
def test_three_numbers_of_a_site_have_a_panel_and_all_are_logged(tmp_path, panels):
    code = f"""{SITE}
logger = Wandb(mode="offline", panels={panels!r})
logger.start(run(0))
logger.log(10, {{"train/loss": 1.5, **values}})
logger.log(20, {{"train/loss": 1.5, **values}})
logger.finish("finished", {{}})
"""
    done = run_wandb(tmp_path, code)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = tmp_path.glob("runs/clip-*/wandb/offline-run-*")
    records = inspect(tmp_path, path)
    row = rows(records)[0]
    assert row["effect/clip/layer0/norm_ratio"] == 0.5
    assert len(row) == 2 + 6 * 11 + 2
    metrics = of_type(records, "metric")
    hidden = {metric["name"] for metric in metrics if metric.get("options", {}).get("hidden")}
    shown = {name for name in row if name not in hidden and name != "global_step"}
    assert len(shown) == (2 + 6 * 3 if panels == "few" else 1 + 6 * 11 + 2)
    tables = [
        json.loads(file.read_text(encoding="utf-8")) for file in path.rglob("effects*.table.json")
    ]
    if panels == "all":
        assert tables == []
        return
    (table,) = tables
    assert table["columns"][:3] == ["transform", "site", "global_step"]
    assert set(table["columns"][3:]) == {
        name.rpartition("/")[2] for name in row if "layer0" in name
    }
    assert [line[:3] for line in table["data"]] == [["clip", f"layer{k}", 20] for k in range(6)]


@pytest.mark.slow
def test_a_study_logged_again_replaces_that_of_the_same_logger_only(tmp_path):
    (tmp_path / "one.png").write_bytes(b64decode(DOT))
    done = run_wandb(
        tmp_path,
        """
from gradsurg.loggers.base import StudyInfo

for project, number in (("one", 1), ("two", 2), ("one", 3)):
    logger = Wandb(mode="offline", project=project)
    figures = [("outcome", Path("one.png"))]
    logger.study(StudyInfo("study", Path("runs/report"), [{"arm": "clip", "n": number}], figures))
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    paths = (tmp_path / "runs" / "report" / "wandb").glob("offline-run-*")
    kept = {}
    for path in paths:
        (begun,) = of_type(inspect(tmp_path, path), "run")
        (table,) = path.rglob("*.table.json")
        (picture,) = path.rglob("*.png")
        assert picture.read_bytes() == b64decode(DOT)
        assert (begun["run_group"], begun["job_type"]) == ("study", "report")
        kept[begun["project"]] = json.loads(table.read_text(encoding="utf-8"))["data"]
    assert kept == {"one": [["clip", 3]], "two": [["clip", 2]]}


@pytest.mark.slow
def test_a_study_that_wandb_has_is_not_sent_again_and_a_half_sent_one_is(tmp_path):
    done = run_wandb(
        tmp_path,
        """
from gradsurg.loggers.base import StudyInfo

place = Path("runs/report")
for number, killed in ((1, False), (1, False), (2, True), (2, False), (2, False)):
    _init = Wandb._init
    def init(self, *args):
        run = _init(self, *args)
        if killed:
            run.finish = lambda **_: 1 / 0
        return run
    Wandb._init = init
    try:
        Wandb(mode="offline").study(StudyInfo("study", place, [{"arm": "clip", "n": number}]))
    except ZeroDivisionError:
        import wandb
        wandb.teardown()
    Wandb._init = _init
    print([path.name.rpartition("-")[2] for path in place.glob("wandb/offline-run-*")])
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, same, torn, again, last = done.stdout.splitlines()
    assert first == same
    assert len({first, torn, again}) == 3
    assert again == last
    (path,) = (tmp_path / "runs" / "report").rglob("*.table.json")
    assert json.loads(path.read_text(encoding="utf-8"))["data"] == [["clip", 2]]


@pytest.mark.slow
def test_training_survives_a_killed_wandb_core_and_the_next_run_is_logged(tmp_path):
    done = run_wandb(
        tmp_path,
        """
logger = GuardedLogger(Wandb(mode="offline"))
logger.start(run(0))
logger.log(10, {"train/loss": 1.5})
kill_core()
for step in range(20, 2000, 10):
    logger.log(step, {"train/loss": 0.5})
    if logger.failure: break
logger.finish("finished", {})
print(logger.failure)
logger.start(run(1))
logger.log(10, {"train/loss": 0.25})
logger.finish("finished", {})
print(logger.notes()[-1])
""",
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "wandb stopped logging; training goes on. In log: " in done.stderr
    failure, note = done.stdout.splitlines()
    assert failure.startswith("In log: ConnectionResetError: ")
    assert note == f"wandb: stopped in 1 of 2 runs. {failure}"
    (second,) = (tmp_path / "runs" / "clip-1" / "wandb").glob("offline-run-*")
    assert rows(inspect(tmp_path, second)) == [{"global_step": 10, "train/loss": 0.25}]


@pytest.mark.full
def test_a_run_of_a_wandb_sweep_has_the_rows_of_one_run_only(tmp_path):
    done = run_wandb(
        tmp_path,
        """
from gradsurg.loggers.base import StudyInfo

os.environ.update(WANDB_SWEEP_ID="sweep1", WANDB_RUN_ID="agents01")
logger = GuardedLogger(Wandb(mode="offline"))
for seed in range(3):
    logger.start(run(seed))
    logger.log(10, {"train/loss": seed + 1.5})
    logger.finish("finished", {})
logger.study(StudyInfo("study", Path("runs/report"), [{"arm": "clip"}]))
print(logger.notes()[-1])
""",
    )
    (path,) = (tmp_path / "runs").glob("*/wandb/offline-run-*")
    assert path.name.endswith("-agents01")
    assert rows(inspect(tmp_path, path)) == [{"global_step": 10, "train/loss": 1.5}]
    rule = "the agent of a W&B sweep has one run for each command, and this command trains several"
    assert rule in done.stderr
    assert "stopped in 2 of 4 runs" in done.stdout
    assert "seed=0 control=none" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "field", "made", "notes"),
    [
        pytest.param(None, "auto", "offline", 2, marks=pytest.mark.full),
        pytest.param("disabled", "auto", None, 0, marks=pytest.mark.full),
        ("online", "auto", "offline", 3),
        pytest.param(None, "online", "offline", 3, marks=pytest.mark.full),
    ],
)
def test_wandb_without_an_account_never_prompts_and_follows_the_settings(
    tmp_path, mode, field, made, notes
):
    done = run_wandb(
        tmp_path,
        f"""
logger = Wandb(mode={field!r})
for seed in range(2):
    logger.start(run(seed))
    logger.log(10, {{"train/loss": 1.5}})
    logger.finish("finished", {{}})
print(json.dumps(logger.notes()))
""",
        mode,
    )
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert len(found) == notes
    told = "wandb is not logged in (`wandb login`): runs stay offline\n" if notes == 3 else ""
    assert done.stderr == told
    folders = [path.name.split("-")[0] for path in (tmp_path / "runs").glob("*/wandb/*run-*-*")]
    assert folders == ([] if made is None else [made] * 2)


@pytest.mark.slow
def test_wandb_with_an_account_is_online_and_offline_where_it_cannot_connect(tmp_path):
    done = run_wandb(
        tmp_path,
        """
import wandb
wandb.login = lambda **options: options == {"prompt": False, "verify": False}
made, init = [], wandb.init
def stub(**options):
    made.append(options["mode"])
    if options["mode"] == "online":
        raise wandb.errors.CommError("no route\\nand more")
    return init(**options)
wandb.init = stub
logger = Wandb()
for seed in range(2):
    logger.start(run(seed))
    logger.finish("failed", {})
print(json.dumps([made, logger.notes()[2:]]))
""",
    )
    remark = "wandb cannot go online (no route): runs stay offline"
    assert (done.returncode, done.stderr) == (0, f"{remark}\n")
    assert json.loads(done.stdout) == [["online", "offline", "offline"], [remark]]


def test_wandb_fields_are_checked():
    with pytest.raises(FieldError) as caught:
        registry.find("loggers", "wandb")(mode="sometimes", project="a/b")
    assert [field for field, _ in caught.value.faults] == ["mode", "project"]


def test_each_wandb_logger_has_its_own_session():
    first, second = Wandb(), Wandb()
    assert first == second
    assert first._session is first._session
    assert first._session is not second._session


def test_the_upload_command_is_quoted_for_a_shell():
    one = [Path("my runs/s/a-1/wandb/offline-run-1-x")]
    assert _glob_argument(one) == "'my runs/s/a-1/wandb/offline-run-1-x'"
    assert _location(one) == "my runs/s/a-1/wandb/offline-run-1-x"
    two = [*one, Path("my runs/s/b-2/wandb/offline-run-2-y")]
    assert _glob_argument(two) == "'my runs/s'/*/wandb/offline-run-*"
    assert _location(two) == "2 runs under my runs/s"
    same = [Path("r/a/wandb/offline-run-1-x"), Path("r/a/wandb/offline-run-2-y")]
    assert _glob_argument(same) == "r/a/wandb/offline-run-*"


class Sent:
    """A stand-in for a W&B run that records its calls."""

    url = project_url = "https://wandb.test/run"

    def __init__(self, resumed: bool = False) -> None:
        self.rows: list[dict[str, float]] = []
        self.resumed = resumed
        self.summary: dict[str, object] = {"global_step": 20} if resumed else {}
        self.settings = SimpleNamespace(sync_dir="there")

    def define_metric(self, name: str, **_: object) -> None:
        self.axis = name

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.mark.parametrize(
    ("before", "resumed", "mode", "run_id", "steps"),
    [
        ("run", True, "online", "abcd", [30, 40]),  # W&B has the rows up to 20
        ("run", False, "online", None, [10, 20, 30, 40]),
        ("offline-run", True, "offline", None, [10, 20, 30, 40]),
        ("offline-run", True, "online", "abcd", [30, 40]),
    ],
)
def test_a_resumed_run_continues_the_same_wandb_run_online_and_replaces_one_offline(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    resumed: bool,
    mode: str,
    run_id: str | None,
    steps: list[int],
) -> None:
    import wandb

    made: list[tuple[dict[str, Any], Sent]] = []

    def init(**options: object) -> Sent:
        made.append((options, Sent(resumed=options["resume"] == "allow")))
        return made[-1][1]

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(Wandb, "_resolved_mode", lambda _: mode)
    folder = tmp_path / "wandb" / f"{before}-20250101_000000-abcd"
    folder.mkdir(parents=True)
    logger = Wandb(panels="all", project="clipping", entity="somebody")
    logger.start(replace(info(tmp_path), resumed=resumed))
    for step in (10, 20, 30, 40):
        logger.log(step, {"train/loss": 0.5})
    logger.finish("failed", {})
    ((options, run),) = made
    assert (options["mode"], options["entity"]) == (mode, "somebody")
    assert (options["id"] == "abcd") == (run_id == "abcd")
    assert options["resume"] == ("never" if run_id is None else "allow")
    assert [row["global_step"] for row in run.rows] == steps
    assert (run.exit_code, run.summary["state"]) == (1, "failed")
    assert folder.is_dir() == (before == "run")


def test_rows_are_sent_to_wandb_in_batches_and_all_before_the_end(
    monkeypatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("gradsurg.loggers.wandb.monotonic", lambda: clock[0])
    logger = Wandb()
    run: Any = Sent()
    logger._session.run, logger._session.sent_at = run, clock[0]
    counts = []
    for step in range(1, 14):
        logger.log(step, {"train/loss": 0.5})
        counts.append(len(run.rows))
    assert counts == [0] * 9 + [10] * 4
    clock[0] += 2
    logger.log(14, {"train/loss": 0.5})
    assert len(run.rows) == 14
    logger.log(15, {"train/loss": 0.5})
    logger.finish("finished", {"test/loss": 1.0})
    assert [row["global_step"] for row in run.rows] == list(range(1, 16))
