"""Buckets: the gradients in the communication hook of DistributedDataParallel."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.experiment.processes import check_ranks
from gradsurg.transforms.base import Transform
from tests.forks import Ranks, in_ranks
from tests.nets import gradients

SIZES = (16, 32, 4)


class Net(nn.Module):
    """Two layers, of which a process may leave out the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(SIZES[0], SIZES[1])
        self.last = nn.Linear(SIZES[1], SIZES[2])

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.last(self.first(x).relu() if both else x.repeat(1, 2))


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(10 * step + rank))


def _trained(
    rank: int,
    surgery: gs.Surgery | None,
    steps: int = 4,
    no_sync: bool = False,
    unused: bool = False,
    outer: bool = True,
    **options: bool,
) -> tuple[nn.Module, list[dict[str, object]]]:
    """Return a model after some steps, and the effects."""
    model = Net()
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = None if surgery is None else surgery.start(wrapped if outer else model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        if no_sync:
            with wrapped.no_sync():
                wrapped(_batch(rank, step + 100)).square().mean().backward()
        wrapped(_batch(rank, step), not (unused and rank)).square().mean().backward()
        optimizer.step()
    check_ranks(model)
    rows = [] if live is None else live.effects.rows()
    if live is not None:
        live.close()
        wrapped(_batch(rank, 0)).square().mean().backward()  # without a surgery
    return model, rows


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _surgery(transform: Transform, **fields: object) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(transform, at=gs.Buckets(**fields)))  # type: ignore[arg-type]


OPTIONS = {
    "default": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "no_sync": {"no_sync": True},
    "unused": {"unused": True},
    "attached to the inner model": {"outer": False},
}


def _no_op(ranks: Ranks, folder: Path) -> dict[str, bool]:
    equal = {}
    for name, options in OPTIONS.items():
        plain, _ = _trained(ranks.rank, None, **options)
        for stage in ("sent", "reduced"):
            treated, _ = _trained(ranks.rank, _surgery(gs.Identity(), stage=stage), **options)
            equal[f"{name}, {stage}"] = torch.equal(_weights(plain), _weights(treated))
            scaled, _ = _trained(ranks.rank, _surgery(gs.Scale(2.0), stage=stage), **options)
            if torch.equal(_weights(plain), _weights(scaled)):
                equal[f"{name}, {stage}"] = False
    return equal


def test_a_transform_that_changes_nothing_leaves_the_weights_bit_identical() -> None:
    equal = in_ranks(2, _no_op)
    assert len(equal) == 12
    assert all(equal.values()), equal


class Vote(nn.Module):
    """One weight, whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def _gradients(ranks: Ranks, cases: dict[str, gs.Surgery]) -> dict[str, tuple[float, float, float]]:
    """The first two entries of the gradient and its bytes, where the ranks have 1 and 5."""
    found = {}
    for name, surgery in cases.items():
        wrapped = DistributedDataParallel(Vote())
        with surgery.attach(wrapped) as live:
            x = torch.full((64,), [1.0, 5.0][ranks.rank])
            x[0] = 10.0
            wrapped(x).backward()
            sent = live.effects.rows()[0]["bytes"]
        grad = wrapped.module.weight.grad
        assert isinstance(grad, Tensor)
        assert isinstance(sent, float)
        found[name] = (float(grad[0]), float(grad[1]), sent)
    return found


def _stages(ranks: Ranks, folder: Path) -> dict[str, tuple[float, float, float]]:
    return _gradients(
        ranks,
        {
            "sent": _surgery(gs.Clip(2.0), stage="sent"),
            "reduced": _surgery(gs.Clip(2.0), stage="reduced"),
            "largest": _surgery(gs.Mask(1 / 64)),
            "fp16": _surgery(gs.Identity(), reduce="fp16"),
        },
    )


def test_a_transform_acts_before_or_after_the_average_and_bytes_are_counted() -> None:
    found = in_ranks(2, _stages)
    assert found["reduced"] == (2.0, 2.0, 256.0)
    assert found["sent"] == (2.0, 1.5, 256.0)
    assert found["largest"] == (10.0, 0.0, 256.0)
    assert found["fp16"] == (10.0, 3.0, 128.0)


def _trainings(ranks: Ranks, folder: Path) -> dict[str, float]:
    found = {}
    for name, surgery in {
        "top-k with error feedback": _surgery(gs.ErrorFeedback(gs.Mask(0.05))),
        "a trigger that differs by process": gs.Surgery(
            gs.Intervention(gs.Mask(0.05), gs.Buckets("*.weight"), when=gs.Probability(0.5)),
            seed=ranks.rank,
        ),
        "fp16": _surgery(gs.Identity(), reduce="fp16"),
    }.items():
        model, rows = _trained(ranks.rank, surgery, steps=6)
        row = next(row for row in rows if row["site"] == "first.weight")
        assert isinstance(row["bytes"], float)
        found[name] = row["bytes"] / (4 * model.first.weight.numel())  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_the_ranks_agree_and_the_bytes_are_those_of_the_average(count: int) -> None:
    whole = 2 * (count - 1) / count
    assert in_ranks(count, _trainings) == {
        "top-k with error feedback": pytest.approx(whole, abs=1e-3),
        "a trigger that differs by process": pytest.approx(whole, abs=1e-3),
        "fp16": pytest.approx(whole / 2, abs=1e-3),
    }


def _resumed(ranks: Ranks, folder: Path) -> bool:
    def train(surgery: gs.Surgery, steps: range, state: dict | None = None) -> nn.Module:
        model = Net()
        if state is not None:
            model.load_state_dict(state)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with surgery.attach(wrapped, optimizer):
            for step in steps:
                optimizer.zero_grad()
                wrapped(_batch(ranks.rank, step)).square().mean().backward()
                optimizer.step()
        return model

    saved, again, whole = (_surgery(gs.ErrorFeedback(gs.Mask(0.05))) for _ in range(3))
    first = train(saved, range(3))
    again.load_state_dict(saved.state_dict())
    second = train(again, range(3, 6), first.state_dict())
    return torch.equal(_weights(train(whole, range(6))), _weights(second))


def test_the_error_of_error_feedback_survives_a_checkpoint() -> None:
    assert in_ranks(2, _resumed)


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _refusals(ranks: Ranks, folder: Path) -> dict[str, str]:
    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(Vote())

    foreign, plain = wrapped(), wrapped()
    foreign.register_comm_hook(None, allreduce_hook)
    two = gs.Surgery(
        gs.Intervention(gs.Identity(), gs.Buckets()),
        gs.Intervention(gs.Identity(), gs.Buckets(reduce="fp16")),
    )

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("of the transform")

    def inside() -> None:
        model = wrapped()
        model.module.weight.register_hook(lambda grad: _surgery(gs.Identity()).start(model).abort())
        model(torch.ones(64)).backward()

    def failing() -> None:
        model = wrapped()
        with gs.Surgery(gs.Intervention(fail, gs.Buckets())).attach(model):
            model(torch.ones(64)).backward()

    def late() -> None:
        model = wrapped()
        with _surgery(gs.Identity()).attach(model):
            model(torch.ones(64)).backward()
        model.register_comm_hook(None, allreduce_hook)

    return {
        "foreign": _message(lambda: _surgery(gs.Identity()).start(foreign)),
        "two": _message(lambda: two.start(plain)),
        "inside": _message(inside),
        "failing": _message(failing),
        "late": _message(late),
    }


@pytest.mark.parametrize("stage", ["sent", "reduced"])
def test_one_process_transforms_its_own_gradient(stage: str) -> None:
    model = Vote()
    with _surgery(gs.Clip(2.0), stage=stage).attach(model) as live:
        model(torch.full((64,), 5.0)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.unique().tolist() == [2.0]
    assert "bytes" not in live.effects.rows()[0]


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_refusals_name_the_reason() -> None:
    found = in_ranks(2, _refusals)
    assert "default_hooks.allreduce_hook already" in found["foreign"]
    assert "the same reduce, found allreduce and fp16" in found["two"]
    assert "inside a backward pass" in found["inside"]
    assert "ArithmeticError: of the transform" in found["failing"]
    assert "can only be called once" in found["late"]
    with pytest.raises(ValueError, match="several tensors at once"):
        gs.Intervention(gs.ClipGlobalNorm(1.0), gs.Buckets())
    with pytest.raises(ValueError, match=r"^Buckets.reduce: register PyTorch's powerSGD_hook"):
        gs.Buckets(reduce="powerSGD")  # type: ignore[arg-type]


def _changed_after_a_forward(ranks: Ranks, folder: Path) -> list[float]:
    wrapped = DistributedDataParallel(Vote())
    found: list[float] = []
    with _surgery(gs.Clip(2.0)).attach(wrapped.module) as live:
        for limit in (2.0, 3.0):
            wrapped.zero_grad()
            loss = wrapped(torch.full((64,), 5.0))
            live.set("clip", value=limit)
            loss.backward()
            found.append(float(gradients(wrapped)["module.weight"][0]))
    return found


def test_a_change_between_forward_and_backward_acts_at_once() -> None:
    assert in_ranks(2, _changed_after_a_forward) == [2.0, 3.0]


def _with_power_sgd(ranks: Ranks, folder: Path) -> float:
    """The largest entry of a gradient after PowerSGD and a clip."""
    model = nn.Linear(64, 64, bias=False)
    wrapped = DistributedDataParallel(model)
    state = PowerSGDState(None, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook)
    item = gs.Intervention(gs.Clip(2.0), at=gs.Parameters(stage="backward_end"))
    with gs.Surgery(item).attach(wrapped):
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(torch.full((1, 64), 5.0)).sum().backward()
    return float(gradients(model)["weight"].max())


def test_after_a_communication_hook_of_others_backward_end_acts() -> None:
    assert in_ranks(2, _with_power_sgd) == 2.0


def _copied(ranks: Ranks, folder: Path) -> list[float]:
    wrapped = DistributedDataParallel(Vote())
    with _surgery(gs.Clip(2.0), stage="reduced").attach(wrapped):
        twin = copy.deepcopy(wrapped)
        torch.save(wrapped, folder / "model")
        for model in (wrapped, twin):
            model(torch.full((64,), 5.0)).backward()
    with _surgery(gs.Clip(3.0)).attach(twin):
        twin.zero_grad()
        twin(torch.full((64,), 5.0)).backward()
        return [float(wrapped.module.weight.grad[0]), float(twin.module.weight.grad[0])]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_model_can_be_copied_and_saved_and_the_copy_attached() -> None:
    assert in_ranks(2, _copied) == [2.0, 3.0]
