"""A stacked study has the files of a sequential one."""

import random
import signal
import subprocess
import sys
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
import torch
from gradsurg.experiments.yu2020.task import PCGradToy
from torch import Tensor

import gradsurg as gs
from gradsurg.experiment.execution import Record, execute
from gradsurg.experiment.run import ComputeOptions, Run, Schedule
from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_reader import read
from gradsurg.models.linear import Linear
from gradsurg.models.mlp import MLP
from gradsurg.models.multi_head import MultiHead
from gradsurg.models.point import Point
from gradsurg.stacked.study import execute_stacked
from gradsurg.tasks.base import Task
from gradsurg.tasks.digit_attributes import DigitAttributes
from gradsurg.tasks.digits import Digits
from gradsurg.tasks.quadratics_toy import QuadraticsToy
from tests.runs import ROOT, Listening, Wrapped, a_run, ended, make_model, untimed
from tests.transforms.cases import build, names

REFUSALS = ("needs", "hooks one model", "has no stacked form")
CLIP = ("transform=clip", "steps=4", "log_every=2", "seeds=2", "logger=console")
JSONL = ("metrics.jsonl", "effects.jsonl", "conflicts.jsonl")


def model(data):
    return MLP(data.input_shape, data.num_outputs, hidden=(16,))


def linear(data):
    return Linear(data.input_shape, data.num_outputs)


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def plain_sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def warmup(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=30)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def runs_of(*transforms, seeds=3, **fields) -> list[Run]:
    return [
        replace(a_run(transform, seed=seed), **{"make_model": model, **fields})
        for seed in range(seeds)
        for transform in transforms
    ]


def assert_close(found: object, expected: object, path: str = "") -> None:
    """Assert that two trees are equal but for float32 rounding that has grown in training."""
    match found, expected:
        case Tensor(), Tensor():
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        case dict(), dict():
            assert found.keys() == expected.keys(), path
            for key, value in found.items():
                assert_close(value, expected[key], f"{path}.{key}")
        case (list(), list()) | (tuple(), tuple()):
            assert len(found) == len(expected), path
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert_close(one, other, f"{path}.{number}")
        case float(), float() if path.endswith((".changed", ".totals.0.3")):
            assert isclose(found, expected, abs_tol=0.1), path  # which a last bit decides
        case float(), float() if not path.startswith(".seconds"):
            assert isclose(found, expected, rel_tol=2e-3, abs_tol=1e-4), path
        case _:
            assert found == expected or path.startswith(".seconds"), path


def assert_same_files(record: Record, other: Record) -> None:
    names = {path.name for path in record.directory.iterdir()}
    assert names == {path.name for path in other.directory.iterdir()}
    found, expected = RunDirectory(record.directory), RunDirectory(other.directory)
    for name in JSONL:
        assert_close(
            [untimed(row) for row in found.read_rows(name)],
            [untimed(row) for row in expected.read_rows(name)],
            name,
        )
    assert ended(record)["time/step_ms"] is None
    summary = untimed(ended(record))
    runner = summary.pop("runner")
    assert isinstance(runner, dict)
    assert runner["name"] == "stacked"
    assert_close(summary, untimed(ended(other)), "summary")
    assert_close(*(read(each.path / "run.json") for each in (found, expected)))
    assert_close(found.load_checkpoint(), expected.load_checkpoint())


def both(tmp_path, runs: list[Run]) -> list[tuple[Record, Record]]:
    """Train the runs in a stack and one by one."""
    notes: list[str] = []
    stacked = execute_stacked(runs, tmp_path / "stacked", [], tell=notes.append)
    assert len(stacked) == len(runs), notes
    return [(stacked[run.name], execute(run, tmp_path / "sequential", [])) for run in runs]


@pytest.mark.parametrize("optimizer", [{}, {"make_optimizer": adam}], ids=["sgd", "adam"])
def test_a_stack_of_seeds_and_arms_has_the_files_of_sequential_runs(tmp_path, optimizer) -> None:
    for record, other in both(tmp_path, runs_of(gs.Clip(0.01), None, seeds=2, **optimizer)):
        assert_same_files(record, other)
        runner = record.summary["runner"]
        assert isinstance(runner, dict)
        assert runner["replicas"] == 4
        if runner["first_step"] == "bit-identical":  # on some processors a product rounds otherwise
            found, expected = (
                RunDirectory(one.directory).load_checkpoint() or {} for one in (record, other)
            )
            for name, weight in found["model"].items():
                assert torch.equal(weight, expected["model"][name])
        else:
            assert "differs by" in runner["first_step"]


FEW = Schedule(steps=6, batch_size=16, log_every=3, checkpoint_every=3, effects_every=2)


# The extremes of tgr are chosen among entries that are equal but for rounding, and the gradients
# that perp_grad projects are perpendicular already but for rounding.
@pytest.mark.one_in(40)
@pytest.mark.parametrize("name", sorted({*names()} - {"tgr", "perp_grad"}))
def test_a_transform_acts_on_a_stack_as_on_each_run_or_is_refused(tmp_path, name) -> None:
    transform = build(name)
    try:
        runs = runs_of(transform, seeds=2, schedule=FEW, make_model=linear)
    except (ValueError, TypeError):
        return  # it cannot act at parameters
    notes: list[str] = []
    stacked = execute_stacked(runs, tmp_path / "stacked", [], tell=notes.append)
    if not stacked:
        assert any(part in notes[0] for part in REFUSALS), notes
        return
    for run in runs:
        assert_same_files(stacked[run.name], execute(run, tmp_path / "sequential", []))


def test_a_stateful_transform_and_noise_and_a_trigger_act_as_in_each_run(tmp_path) -> None:
    arms = (gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05)), gs.AddNoise(0.001), gs.ClipGlobalNorm(0.5))
    arms = (*arms, gs.Clip(100.0))  # which changes nothing, and a note says so
    when = gs.Steps(4, 20, 2)
    runs = [
        replace(a_run(arm, seed=seed, when=when), make_model=model)
        for seed in range(2)
        for arm in arms
    ]
    for record, other in both(tmp_path, runs):
        assert_same_files(record, other)


def test_a_replica_that_diverges_ends_and_the_others_go_on(tmp_path) -> None:
    def huge(module):
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    runs = [
        *runs_of(gs.Clip(0.01), None, seeds=2, make_optimizer=huge),
        replace(a_run(gs.Scale(1e30), seed=5), make_model=model, make_optimizer=huge),
    ]
    pairs = both(tmp_path, runs)
    assert [ended(record)["state"] for record, _ in pairs] == ["finished"] * 4 + ["diverged"]
    for record, other in pairs[:-1]:
        assert_same_files(record, other)
    found, expected = (ended(record) for record in pairs[-1])
    for key in ("steps", "diverged_step", "nonfinite", "notes"):
        assert found.get(key) == expected.get(key)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compute": ComputeOptions(accumulate=2)}, "accumulate=2 has no stacked form"),
        ({"make_optimizer": lambda m: torch.optim.Rprop(m.parameters())}, "Rprop has no stacked"),
        ({"make_model": make_model}, "(Dropout) draws random numbers"),
    ],
)
def test_a_run_without_a_stacked_form_is_named_and_left(tmp_path, fields, reason) -> None:
    notes: list[str] = []
    assert not execute_stacked(runs_of(gs.Clip(0.01), **fields), tmp_path, [], tell=notes.append)
    (note,) = notes
    assert reason in note
    assert note.endswith("3 runs trained one by one")


def test_a_stack_that_fails_is_left_to_runs_one_by_one(tmp_path) -> None:
    runs = runs_of(gs.Clip(0.01), None, seeds=2, task=Wrapped(3, "raise"))
    notes: list[str] = []
    assert not execute_stacked(runs, tmp_path, [], tell=notes.append)
    assert notes[-1].startswith("the stack failed (Torn")
    for run in runs:
        assert execute(replace(run, task=Digits()), tmp_path, []).action == "trained"


def torn_runs(task: Task, warm: bool = False) -> list[Run]:
    options = {"task": task, "make_optimizer": adam, "make_lr_schedule": cosine}
    if warm:
        options |= {"make_optimizer": plain_sgd, "make_lr_schedule": warmup}
    return runs_of(gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05)), None, seeds=2, **options)


def assert_resumed(torn: Path, whole: Path, warm: bool = False) -> None:
    """Resume a stack, and assert that its runs end as those of a whole one."""
    resumed = execute_stacked(torn_runs(Digits(), warm), torn, [])
    expected = execute_stacked(torn_runs(Digits(), warm), whole, [])
    assert [record.action for record in resumed.values()] == ["resumed"] * 4
    for name, record in resumed.items():
        for file in JSONL:
            rows, others = (
                [untimed(row) for row in RunDirectory(one.directory).read_rows(file)]
                for one in (record, expected[name])
            )
            assert_close(rows, others, file)
        assert ended(record)["test/loss"] == pytest.approx(ended(expected[name])["test/loss"])


@pytest.mark.parametrize("warm", [False, True], ids=["adam, cosine", "sgd, warm-up"])
def test_an_interrupted_stack_is_resumed_with_the_same_files(tmp_path, monkeypatch, warm) -> None:
    monkeypatch.setattr("gradsurg.stacked.study.SAVE_SHARE", 0)  # save at every occasion
    runs = torn_runs(Wrapped(27, "interrupt"), warm)  # one call a step, and two before the first
    with pytest.raises(KeyboardInterrupt):
        execute_stacked(runs, tmp_path / "torn", [])
    folders = [RunDirectory(run.directory(tmp_path / "torn")) for run in runs]
    assert [folder.state for folder in folders] == ["interrupted"] * 4
    for folder in folders[:2]:  # as of a process that was killed while it saved the checkpoints
        (folder.path / "checkpoint_previous.pt").replace(folder.path / "checkpoint.pt")
    steps = [(folder.load_checkpoint() or {})["step"] for folder in folders]
    assert steps == [10, 10, 20, 20]
    assert_resumed(tmp_path / "torn", tmp_path / "whole", warm)


KILLED = """
import sys
from pathlib import Path
from gradsurg.stacked import study
from tests.runs import Wrapped
from tests.stacked.test_stacked import torn_runs

study.SAVE_SHARE = 0  # save at every occasion
study.execute_stacked(torn_runs(Wrapped(27, "kill")), Path(sys.argv[1]), [], 1)
"""


@pytest.mark.slow
def test_a_killed_stack_is_resumed_with_the_same_files(tmp_path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "torn")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert_resumed(tmp_path / "torn", tmp_path / "whole")


@pytest.mark.slow
def test_a_compiled_stack_is_never_called_bit_identical(tmp_path) -> None:
    options = {"compute": ComputeOptions(compile="aot_eager"), "make_optimizer": adam}
    runs = runs_of(gs.Clip(0.01), None, seeds=2, **options)
    notes: list[str] = []
    stacked = execute_stacked(runs, tmp_path / "compiled", [], tell=notes.append)
    plain = runs_of(gs.Clip(0.01), None, seeds=2, make_optimizer=adam)
    expected = execute_stacked(plain, tmp_path / "plain", [])
    for run, other in zip(runs, plain, strict=True):
        found, wanted = ended(stacked[run.name]), ended(expected[other.name])
        assert found["test/loss"] == pytest.approx(wanted["test/loss"], rel=1e-4)
        runner = found["runner"]
        assert isinstance(runner, dict)
        assert runner["first_step"].startswith("differs by ")
        assert runner["compile_s"] > 0
    assert "4 runs as one stack, compiled in " in notes[0]


def test_a_compiled_stack_without_a_compiler_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gradsurg.stacked.refusals.which", lambda name: None)
    runs = runs_of(None, compute=ComputeOptions(compile="inductor"))
    notes: list[str] = []
    assert not execute_stacked(runs, tmp_path, [], tell=notes.append)
    assert notes[0].startswith("compile=true needs a C++ compiler: there is no g++")


@pytest.mark.slow
def test_the_command_trains_a_stack_and_shows_it_in_the_report(here) -> None:
    ended = here(*CLIP, "runner=stacked")
    assert ended.code == 0, ended.err
    assert "runner=stacked: 4 runs as one stack; its first step " in ended.err
    assert "4/4 treated clip-seed1: finished" in ended.err
    assert "test accuracy" in ended.out
    assert "step time" not in ended.out.lower()  # a run in a stack has no time of its own
    assert "4 of them had been finished before" in here(*CLIP).out


@pytest.mark.slow
def test_the_jobs_of_a_sweep_are_replicas_of_one_stack(here) -> None:
    words = ("-m", "transform=clip,sign,zero", *CLIP[1:])
    ended = here(*words, "runner=stacked")
    assert ended.code == 0, ended.err
    assert "runner=stacked: 8 runs as one stack" in ended.err
    assert "job 1:" not in ended.err  # its runs have finished
    assert ended.out.count("finished") >= 3
    forced = here(*words, "runner=stacked", "force=true")
    assert "runner=stacked: 8 runs as one stack" in forced.err
    assert forced.err.count("as one stack") == 1


@pytest.mark.parametrize("taken", [0, 3])
def test_a_directory_that_cannot_be_locked_is_left(tmp_path, monkeypatch, taken) -> None:
    lock, calls = RunDirectory.lock, []

    def limited(directory: RunDirectory, wait: bool = True):
        calls.append(directory)
        if len(calls) > taken:
            raise OSError(24, "Too many open files")
        return lock(directory, wait)

    monkeypatch.setattr(RunDirectory, "lock", limited)
    runs = runs_of(gs.Clip(0.01), None, seeds=2, schedule=FEW)
    assert len(execute_stacked(runs, tmp_path, [])) == taken


def test_loggers_get_a_whole_run_when_it_ends(tmp_path) -> None:
    heard, alone = Listening(), Listening()
    runs = runs_of(gs.Clip(0.01), None, seeds=1, schedule=FEW)
    execute_stacked(runs, tmp_path / "stacked", [heard])
    for run in reversed(runs):  # the control first
        execute(run, tmp_path / "sequential", [alone])
    assert [info.label for info in heard.begun] == [info.label for info in alone.begun]
    found, expected = ([(step, untimed(row)) for step, row in one.logged] for one in (heard, alone))
    assert_close(found, expected)
    assert [state for state, _ in heard.ended] == ["finished", "finished"]


def point(data):
    return Point(data.input_shape, data.num_outputs, start=tuple(torch.randn(2).tolist()))


def multi_head(data):
    return MultiHead(data.input_shape, data.num_outputs, heads=data.heads, hidden=(8,), width=8)


AGGREGATORS = (gs.Sum(), gs.Mean(), gs.PCGrad(), gs.MGDA(), gs.CAGrad(), gs.NashMTL())
ON_TASKS = [(one, task) for one in AGGREGATORS for task in (DigitAttributes(), PCGradToy())]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("aggregator", "task"), [*ON_TASKS, (gs.DWA(), DigitAttributes())])
def test_an_aggregator_combines_the_tasks_of_a_stack_as_of_each_run(
    tmp_path, aggregator, task
) -> None:
    schedule = Schedule(
        steps=6, batch_size=16, log_every=3, checkpoint_every=3, effects_every=2, conflict_every=4
    )
    make = point if isinstance(task, PCGradToy) else multi_head
    shared = gs.SharedParameters()
    arms = {
        "treated": [gs.Intervention(aggregator, shared)],
        "control": [
            gs.Intervention(gs.Identity(), gs.Parameters(), names=("none",)),
            gs.Intervention(gs.Sum(), shared),
        ],
    }
    runs = [
        replace(
            a_run(None, seed=seed),
            surgery=gs.Surgery(*arms[arm], seed=seed),
            shadow=arm == "control",
            arm=arm,
            identity={"label": arm, "seed": seed},
        )
        for seed in range(2)
        for arm in arms
    ]
    options = {"task": task, "make_model": make, "schedule": schedule, "make_optimizer": adam}
    for record, other in both(tmp_path, [replace(run, **options) for run in runs]):
        assert_same_files(record, other)


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (
            [(gs.PCGrad(), gs.SharedParameters(granularity="tensor"))],
            "PCGrad has a stacked form at",
        ),
        (
            [(gs.Sum(), gs.SharedParameters()), (gs.Clip(1.0), gs.Parameters())],
            "an aggregator with other interventions has no stacked form",
        ),
        ([(gs.Clip(1.0), gs.Parameters(), gs.ForTask("1"))], "ForTask reads the backward pass"),
    ],
)
def test_an_aggregator_without_a_stacked_form_is_named(tmp_path, items, reason) -> None:
    surgery = gs.Surgery(*(gs.Intervention(*item) for item in items))
    runs = runs_of(None, task=PCGradToy(), surgery=surgery, shadow=False)
    notes: list[str] = []
    assert not execute_stacked(runs, tmp_path, [], tell=notes.append)
    assert notes[0].startswith(reason)


@pytest.mark.parametrize("task", [QuadraticsToy(), PCGradToy()], ids=["three", "two"])
def test_metrics_of_a_stack_of_points_are_those_of_each(task) -> None:
    points = torch.randn(3, 1, 2).expand(3, 64, 2)
    targets = torch.ones(64, 2)
    expected = [task.metrics(own, targets) for own in points]
    for found, own in zip(task.stacked_metrics(points, targets), expected, strict=True):
        assert found == pytest.approx(own, rel=1e-6)


class Drawing(Digits):
    """Draws a number from the global generator when it loads."""

    def load(self):
        torch.rand(1)
        return super().load()


def test_a_task_that_draws_numbers_loads_its_data_in_each_run(tmp_path) -> None:
    for record, other in both(tmp_path, runs_of(None, seeds=2, task=Drawing(), schedule=FEW)):
        assert_same_files(record, other)


class Counting(MLP):
    """Scales its outputs by the number of its calls."""

    def __init__(self, data, kind: str) -> None:
        super().__init__(data.input_shape, data.num_outputs, hidden=(8,))
        self.kind, self.calls = kind, 0
        self.register_buffer("count", torch.zeros(()))
        if kind == "tensor hook":
            self.output.weight.register_hook(lambda grad: 2 * grad)
        if kind == "module hook":
            self.output.register_full_backward_hook(lambda module, given, got: None)

    def forward(self, inputs):
        match self.kind:
            case "buffer in place":
                self.count += 1
            case "buffer":
                self.count = self.count + 1
            case "number":
                self.calls += 1
            case "random":
                return super().forward(inputs) * random.random()
            case "wrong":
                batched = torch._C._functorch.is_batchedtensor(self.output.weight)
                return super().forward(inputs) * (2 if batched else 1)
        return super().forward(inputs) * (1 + self.count + self.calls)


def by_shape(module):
    params = list(module.parameters())
    decayed = [param for param in params if param.ndim > 1]
    rest = [param for param in params if param.ndim <= 1]
    return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.1)


def hooked(module):
    optimizer = plain_sgd(module)
    optimizer.register_step_pre_hook(lambda *arguments: None)
    return optimizer


def counting(kind: str):
    return {"make_model": lambda data: Counting(data, kind)}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (counting("buffer in place"), "the forward pass changes 'count' of the model"),
        (counting("buffer"), "the forward pass changes 'count' of the model"),
        (counting("number"), "the forward pass changes 'calls' of the model"),
        (counting("random"), "the forward pass draws random numbers"),
        (counting("wrong"), "the gradient of 'hidden.0.linear.weight' in a stack differs by"),
        (counting("tensor hook"), "'output.weight' has a hook of its own"),
        (counting("module hook"), "'output' has a backward hook of its own"),
        ({"make_optimizer": by_shape}, "the groups of the optimizer depend on the shapes"),
        ({"make_optimizer": hooked}, "SGD has a step hook of its own"),
    ],
)
def test_a_model_or_optimizer_that_would_train_otherwise_is_refused(
    tmp_path, fields, reason
) -> None:
    notes: list[str] = []
    runs = runs_of(gs.Clip(0.01), None, seeds=2, schedule=FEW, **fields)
    assert not execute_stacked(runs, tmp_path, [], tell=notes.append)
    assert reason in notes[-1]


def test_an_optimizer_groups_parameters_by_their_names(tmp_path) -> None:
    def by_name(module):
        named = dict(module.named_parameters())
        weights = [param for name, param in named.items() if name.endswith("weight")]
        biases = [param for name, param in named.items() if name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases}]
        return torch.optim.SGD(groups, lr=0.1)

    runs = runs_of(gs.Clip(0.01), None, seeds=2, schedule=FEW, make_optimizer=by_name)
    for record, other in both(tmp_path, runs):
        assert_same_files(record, other)
