"""Options of a run: accumulation, precision, compiling, and the condition that ends it early."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional

import gradsurg as gs
from gradsurg.core.intervention import Intervention
from gradsurg.core.surgery import Surgery
from gradsurg.experiment.execution import execute
from gradsurg.experiment.loop import Batches, Step, StepOptions, train
from gradsurg.experiment.run import ComputeOptions, Run, Until, check_compiled
from gradsurg.experiment.settings import Settings
from gradsurg.tasks.digits import Digits
from gradsurg.transforms.base import Transform
from tests.conftest import Here
from tests.nets import num_hooks, sgd, small, weights
from tests.runs import (
    SHORT,
    Wrapped,
    a_run,
    assert_resumes,
    data,
    ended,
    kept_in,
    lines,
    untimed,
)

BFLOAT16 = StepOptions(autocast=torch.bfloat16)


def go(model: nn.Module, batches: Batches, options: StepOptions, steps: int = 7) -> list[Step]:
    loss = functional.cross_entropy
    return list(train(model, sgd(model), loss, batches, steps, options=options))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


# Accumulation.


@pytest.mark.parametrize("step", [0, 2, 9])
def test_accumulated_batches_together_are_one_large_batch(step: int) -> None:
    for number in range(step, step + 5):
        parts = list(islice(data(4, accumulate=2).start(number), 2))
        inputs, targets = next(data(8).start(number))
        assert torch.equal(torch.cat([part for part, _ in parts]), inputs)
        assert torch.equal(torch.cat([part for _, part in parts]), targets)
    assert data(4, accumulate=2).steps_per_epoch == data(8).steps_per_epoch == 3


def test_an_epoch_needs_examples_for_all_batches_of_a_step() -> None:
    assert data(13, accumulate=2).steps_per_epoch == 1


def by_hand(
    model: nn.Module,
    batches: Batches,
    each: Callable[[Tensor], Tensor] = lambda grad: grad,
    whole: Callable[[Tensor], Tensor] = lambda grad: grad,
    steps: int = 7,
) -> list[float]:
    """Accumulation as anybody would write it: `each` changes a batch's gradients, `whole` the sum.

    It gives the losses.
    """
    optimizer, stream, losses = sgd(model), batches.start(0), []
    params = list(model.parameters())
    for _ in range(steps):
        sums = [torch.zeros_like(param) for param in params]
        total = torch.zeros(())
        for inputs, targets in islice(stream, batches.accumulate):
            loss = functional.cross_entropy(model(inputs), targets) / batches.accumulate
            for gradient_sum, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
                gradient_sum += each(grad)
            total += loss.detach()
        for param, grad in zip(params, sums, strict=True):
            param.grad = whole(grad)
        optimizer.step()
        losses.append(total.item())
    return losses


def test_accumulation_equals_a_loop_written_by_hand() -> None:
    plain, model = small(), small()
    losses = by_hand(plain, data(4, accumulate=3))
    steps = go(model, data(4, accumulate=3), StepOptions())
    assert [step.loss.item() for step in steps] == losses
    assert same(plain, model)


def clamp(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


@pytest.mark.parametrize("stage", ["backward", "step"])
@pytest.mark.filterwarnings("ignore:.*unless the transform is linear:gradsurg.SurgeryWarning")
def test_a_clip_acts_on_the_gradients_of_each_batch_or_on_their_sum(stage: str) -> None:
    each, whole, model = small(), small(), small()
    by_hand(each, data(4, accumulate=3), each=clamp)
    by_hand(whole, data(4, accumulate=3), whole=clamp)
    assert not same(each, whole)
    optimizer = sgd(model)
    surgery = Surgery(Intervention(gs.Clip(0.01), at=gs.Parameters(stage=stage)))
    with surgery.attach(model, optimizer) as live:
        loss = functional.cross_entropy
        for _ in train(model, optimizer, loss, data(4, accumulate=3), 7):
            pass
        calls = {entry.calls for entry in live.ledger}
    assert same(model, each if stage == "backward" else whole)
    assert calls == {7 * (3 if stage == "backward" else 1)}
    assert live.step == 7


# Precision.


def test_the_forward_and_the_loss_are_computed_under_autocast_and_the_backward_is_not() -> None:
    plain, model = small(), small()
    optimizer = sgd(plain)
    for inputs, targets in islice(data().start(0), 7):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(plain(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    go(model, data(), BFLOAT16)
    assert same(plain, model)
    go(other := small(), data(), StepOptions())
    assert not same(other, model)
    assert not torch.is_autocast_enabled("cpu")


class Scaled:
    """Losses whose gradients are infinite at the steps `bad`."""

    def __init__(self, bad: Iterable[int]) -> None:
        self.bad = set(bad)
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = functional.cross_entropy(outputs, targets)
        return loss * torch.inf if self.calls - 1 in self.bad else loss


def test_a_scaled_loss_equals_the_loop_in_pytorchs_docs_and_skipped_steps_are_marked() -> None:
    plain, model = small(), small()
    optimizer, scaler, loss_fn = sgd(plain), GradScaler("cpu", init_scale=1024.0), Scaled([2, 3])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number, (inputs, targets) in enumerate(islice(data().start(0), 7)):
        optimizer.zero_grad()
        scaler.scale(loss_fn(plain(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number not in loss_fn.bad:
            schedule.step()
    second, second_scaler = sgd(model), GradScaler("cpu", init_scale=1024.0)
    second_schedule = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
    options = StepOptions(scaler=second_scaler, schedule=second_schedule)
    surgery = Surgery(Intervention(gs.Identity(), at=gs.Parameters(stage="step")))
    with surgery.attach(model, second, scaler=second_scaler) as live:
        steps = list(train(model, second, Scaled([2, 3]), data(), 7, options=options))
    assert [step.skipped for step in steps] == [False, False, True, True, False, False, False]
    assert same(plain, model)
    assert second_scaler.state_dict() == scaler.state_dict()
    assert second_schedule.state_dict() == schedule.state_dict()
    assert live.step == 5


def test_only_float16_needs_a_scaler() -> None:
    cpu = torch.device("cpu")
    assert ComputeOptions().scaler(cpu) is None
    assert ComputeOptions(precision="bfloat16").scaler(cpu) is None
    scaler = ComputeOptions(precision="float16").scaler(cpu)
    assert isinstance(scaler, GradScaler)
    assert [
        ComputeOptions(precision=name).autocast for name in ("float32", "bfloat16", "float16")
    ] == [
        None,
        torch.bfloat16,
        torch.float16,
    ]


# Compiling.


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "at",
    [
        gs.Parameters(),
        gs.Parameters(stage="step"),
        gs.Outputs(),
        gs.Outputs("first") | gs.Outputs("last"),
        gs.Inputs(types="Linear"),
        gs.Activations(types="ReLU"),
        gs.ModuleGradients(types="ReLU"),
        gs.Weights("first.*"),
    ],
    ids=str,
)
def test_surgery_on_a_compiled_model_equals_that_on_an_eager_one(
    at: gs.sites.places.Selector,
) -> None:
    def run(switches: ComputeOptions) -> tuple[list[Tensor], object, object]:
        model = small()
        optimizer = sgd(model)
        surgery = Surgery(Intervention(gs.Clip(0.02), at=at))
        with surgery.attach(model, optimizer, effects_every=2) as live:
            with switches.compiled(model) as called:
                loss = functional.cross_entropy
                assert (called is model) == (switches.compile is None)
                for _ in train(called, optimizer, loss, data(), 4):
                    pass
            table = live.ledger.table()
            effects = str(live.effects.rows())
        assert not num_hooks(model, optimizer)
        return weights(model), table, effects

    eager, compiled = run(ComputeOptions()), run(ComputeOptions(compile="aot_eager"))
    assert all(map(torch.equal, eager[0], compiled[0]))
    assert eager[1:] == compiled[1:]


def test_every_run_of_a_process_is_compiled_despite_pytorchs_limit_of_recompilations() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 3):
        switches = ComputeOptions(compile=backend)  # pyright: ignore[reportArgumentType]  # it counts
        with switches.compiled(small()) as called:
            called(data().inputs)
    assert len(graphs) == limit + 3


def test_compiling_keeps_the_hooks_of_the_surgery() -> None:
    model = small()
    with Surgery(Intervention(gs.Clip(0.1), at=gs.Outputs())).attach(model) as live:
        before = [list(module._forward_hooks.values()) for module in model.modules()]
        with ComputeOptions(compile="eager").compiled(model):
            inside = [list(module._forward_hooks.values()) for module in model.modules()]
        assert inside == before
        model(data().inputs).sum().backward()
        assert all(entry.calls for entry in live.ledger)


@pytest.mark.parametrize(
    "at",
    [
        gs.Nodes("Relu"),
        gs.Uses("first.weight"),
        gs.SavedTensors(),
        gs.EveryModule(),
        gs.Outputs() | gs.Nodes("Relu"),
    ],
    ids=lambda at: type(at).__name__,
)
def test_sites_that_compiling_changes_are_refused(at: gs.sites.places.Selector) -> None:
    with pytest.raises(ValueError, match="cannot act in a compiled model: "):
        check_compiled(at)
    check_compiled(gs.Outputs() | gs.Parameters())


# Runs.

SWITCHES = {
    "accumulate": ComputeOptions(accumulate=3),
    "bfloat16": ComputeOptions(precision="bfloat16"),
    "compiled": ComputeOptions(compile="aot_eager"),
    "scaled": ComputeOptions(precision="float16"),
    "all": ComputeOptions(accumulate=2, precision="bfloat16", compile="eager"),
}


STEP = gs.Parameters(stage="step")


@pytest.fixture
def eager_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler whose scale doubles every fourth step, so that its state matters in a short run."""

    def scaler(switches: ComputeOptions, device: torch.device) -> GradScaler | None:
        scaled = switches.precision == "float16"
        return GradScaler(device.type, growth_interval=4) if scaled else None

    monkeypatch.setattr(ComputeOptions, "scaler", scaler)


def switched(name: str, transform: Transform | None = None, at: int = 0) -> Run:
    """A run with these switches whose loss raises at call `at`."""
    task = Wrapped(at, "raise") if at else Digits()
    return replace(a_run(transform, STEP, task=task), compute=SWITCHES[name])


@pytest.mark.usefixtures("eager_scaler")
@pytest.mark.parametrize("name", SWITCHES)
def test_an_interrupted_run_with_compute_options_ends_like_an_uninterrupted_one(
    tmp_path: Path, name: str
) -> None:
    transform = gs.Chain(gs.GrokfastEMA(), gs.Clip(0.05))
    at = 16 * SWITCHES[name].accumulate - 1
    whole = assert_resumes(lambda call: switched(name, transform, call), tmp_path, at)
    plain = execute(a_run(transform, STEP), tmp_path / "plain", [])
    if name not in ("compiled",):
        assert lines(whole, "metrics.jsonl") != lines(plain, "metrics.jsonl")


@pytest.mark.parametrize("name", ["accumulate", "bfloat16", "compiled"])
def test_an_idle_surgery_with_compute_options_changes_nothing(tmp_path: Path, name: str) -> None:
    control = execute(switched(name), tmp_path, [])
    treated = execute(switched(name, gs.Clip(1e9)), tmp_path, [])
    assert lines(treated, "metrics.jsonl") == lines(control, "metrics.jsonl")
    outcome = {key for key in ended(control) if key.startswith(("test/", "train/"))}
    assert {key: ended(treated)[key] for key in outcome} == {
        key: ended(control)[key] for key in outcome
    }


@pytest.mark.usefixtures("eager_scaler")
def test_the_steps_that_the_scaler_skips_are_counted_and_resumed(tmp_path: Path) -> None:
    whole = execute(switched("scaled"), tmp_path, [])
    skipped = ended(whole)["skipped_steps"]
    assert isinstance(skipped, int)
    assert 0 < skipped < SHORT.steps
    checkpoint = kept_in(whole.directory)
    assert checkpoint["skipped"] == skipped
    assert set(checkpoint["scaler"]) >= {"scale", "growth_factor"}
    assert untimed(ended(whole))["steps"] == SHORT.steps


pytestmark = pytest.mark.usefixtures("one_thread")


def short_until(condition: str):
    return replace(SHORT, eval_every=5, until=Until.of(condition))


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("test/accuracy >= 0.95", {"test/accuracy": 0.95}, True),
        ("test/accuracy>=0.95", {"test/accuracy": 0.949}, False),
        ("test/loss <= 1e-3", {"test/loss": 0.001}, True),
        ("test/loss <= 1e-3", {"test/loss": float("nan")}, False),
        ("test/loss <= 1e-3", {"test/loss": None}, False),
    ],
)
def test_until_compares_a_metric_with_a_bound(text, values, holds) -> None:
    assert Until.of(text).holds(values) is holds


@pytest.mark.parametrize(
    "text",
    [
        "train/accuracy >= 0.9",
        "test/accuracy > 0.9",
        "test/loss",
        "test/loss <= nan",
    ],
)
def test_until_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match='must be like "validation/accuracy >= 0.95": a metric, '):
        Until.of(text)


def test_a_run_ends_at_the_first_test_that_reaches_until(tmp_path) -> None:
    whole = execute(a_run(schedule=replace(SHORT, eval_every=5)), tmp_path / "whole", [])
    rows = lines(whole, "metrics.jsonl")
    aim = rows[2]["test/loss"]
    assert aim < min(row["test/loss"] for row in rows[:2])
    ended = execute(a_run(schedule=short_until(f"test/loss <= {aim!r}")), tmp_path / "ended", [])
    assert ended.summary["state"] == "finished"
    assert ended.summary["steps"] == ended.summary["until/step"] == 15
    assert ended.summary["until/reached"] == 1
    assert ended.summary["test/loss"] == aim
    assert lines(ended, "metrics.jsonl") == rows[:3]


def test_until_is_decided_on_validation_data_and_the_test_data_are_looked_at_once(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    metrics = Digits.metrics

    def counted(self: Digits, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        looked.append(len(targets))
        return metrics(self, outputs, targets)

    monkeypatch.setattr(Digits, "metrics", counted)
    schedule = replace(short_until("accuracy >= 1"), validation=0.2)
    record = execute(a_run(schedule=schedule), tmp_path, [])
    num_train, num_validation, num_test = 1077, 270, 450
    assert looked == [num_validation] * 6 + [num_train, num_validation, num_test]
    row = lines(record, "metrics.jsonl")[-1]
    assert {"validation/loss", "validation/accuracy"} == {*row} - {"step", "train/loss"}
    assert record.summary["validation/loss"] == row["validation/loss"]
    assert record.summary["until"] == "validation/accuracy >= 1.0"


def test_a_run_that_does_not_reach_until_makes_all_steps(tmp_path) -> None:
    record = execute(a_run(schedule=short_until("test/accuracy >= 1")), tmp_path, [])
    assert (record.summary["steps"], record.summary["until/reached"]) == (30, 0)
    assert "until/step" not in record.summary


def test_an_interrupted_run_with_until_ends_at_the_same_step(tmp_path) -> None:
    schedule = short_until("test/loss <= 1.6")
    whole = assert_resumes(
        lambda at: a_run(task=Wrapped(at, "raise"), schedule=schedule), tmp_path, 12
    )
    assert whole.summary["steps"] in (15, 20, 25)


def test_until_needs_eval_every() -> None:
    fields = {"steps": 9, "batch_size": 4, "seeds": 1, "checkpoint_every": 9, "effects_every": 1}
    fields |= {"study": "s", "out": ".", "control": "plain", "device": "cpu", "log_every": 5}
    with pytest.raises(ValueError, match="until: is decided at evaluations: give eval_every"):
        Settings(**fields, until="test/loss <= 1")
    for other in (0.9, {"metric": "test/loss", "bound": 1.0}):
        with pytest.raises(ValueError, match='until: must be like "validation/accuracy >= 0.95"'):
            Settings(**fields, eval_every=5, until=other)


def test_until_with_an_unknown_metric_is_refused_before_training(here: Here) -> None:
    words = ("transform=clip", "log_every=5", "eval_every=5", "logger=none")
    ended = here(*words, "until='test/acc >= 1'")
    assert ended.code == 2
    assert ended.err == "until: the task has no test/acc, it has test/loss, test/accuracy\n"
