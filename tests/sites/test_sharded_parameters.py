"""Parameters of fully_shard: the averaged gradient, of which each process has a part."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.forks import Ranks, in_ranks

STEPS = 3


def _model() -> nn.Sequential:
    """A model with a bias of one entry, of which a process has no part."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))


def _batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def _halve(grad: Tensor) -> Tensor:
    return grad / 2 if float(grad.norm()) > 0 else grad


AT_STEP: dict[str, Callable[[], Transform | Callable[[Tensor], Tensor]]] = {
    "identity": gs.Identity,
    "clip": lambda: gs.Clip(0.01),
    "momentum": lambda: gs.Momentum(),
    "clip_norm": lambda: gs.ClipNorm(0.01),
    "clip_norm of units": lambda: gs.ClipNorm(0.01, per="unit"),
    "norm_rescale": gs.NormRescale,
    "largest": lambda: gs.ClipNorm(0.01, p=float("inf")),
    "clip_global_norm": lambda: gs.ClipGlobalNorm(0.01),
    "rescale_global_norm": gs.RescaleGlobalNorm,
    "adaptive_clip": lambda: gs.AdaptiveClip(warmup=1),
    "skip_update": lambda: gs.SkipUpdate(0.5),
    "mask": lambda: gs.Mask(0.3),
    "noise": lambda: gs.AddNoise(0.01),
    "error feedback": lambda: gs.ErrorFeedback(gs.Mask(0.3)),
    "weight decay": lambda: gs.AddDecayed(0.1),
    "chain": lambda: gs.Chain(gs.Clip(0.1), gs.ClipGlobalNorm(0.01)),
    "function": lambda: _halve,
}


def _trained(
    transform: Transform | Callable[[Tensor], Tensor],
    rank: int,
    stage: str = "step",
    sharded: bool = True,
) -> tuple[list[Tensor], list[dict[str, object]]]:
    """Return weights and effects; the sharded model has one half of each batch in a process."""
    model = _model()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    surgery = gs.Surgery(gs.Intervention(transform, gs.Parameters(stage=stage)))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with surgery.attach(model, optimizer) as live:
            for step in range(STEPS):
                optimizer.zero_grad()
                batch = _batch(step).chunk(2)[rank] if sharded else _batch(step)
                model(batch).square().mean().backward()
                optimizer.step()
    weights = [
        (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for param in model.parameters()
    ]
    return weights, live.effects.rows()


def _results(ranks: Ranks, folder: Path) -> dict[str, tuple[list[Tensor], list[dict[str, object]]]]:
    results = {name: _trained(make(), ranks.rank) for name, make in AT_STEP.items()}
    results["accumulated"] = _trained(gs.Clip(0.01), ranks.rank, "accumulated")
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[list[Tensor], list[dict[str, object]]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return in_ranks(2, _results)


@pytest.mark.parametrize("name", [*AT_STEP, "accumulated"])
@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")
def test_weights_and_effects_are_those_of_one_process(
    results: dict[str, tuple[list[Tensor], list[dict[str, object]]]], name: str
) -> None:
    weights, effects = results[name]
    transform = gs.Clip(0.01) if name == "accumulated" else AT_STEP[name]()
    stage = "accumulated" if name == "accumulated" else "step"
    expected, expected_effects = _trained(transform, 0, stage, sharded=False)
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)
    assert len(effects) == len(expected_effects)
    for row, other in zip(effects, expected_effects, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            close = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
            assert row[name] == close, (row["site"], name)


def _messages(ranks: Ranks, folder: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))

    def tried(transform: Transform, stage: str, when: object = None, late: bool = False) -> str:
        model = _model()
        if not late:
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        when = when or gs.Always()
        item = gs.Intervention(transform, gs.Parameters(stage=stage), when=when)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                live = gs.Surgery(item).start(model, optimizer)
                if late:
                    fully_shard(model, mesh=mesh)
                model(_batch(0)).sum().backward()
                live.close()
            except (TypeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
        return "; ".join(str(item.message) for item in caught)

    def resumed() -> str:
        model = _model()
        fully_shard(model, mesh=mesh)
        surgery = gs.Surgery(gs.Intervention(gs.Momentum(), gs.Parameters(stage="accumulated")))
        surgery.start(model).abort()
        for state in surgery._states.values():
            state["processes"] = torch.tensor(3)
        with pytest.raises(ValueError, match="processes") as caught:
            surgery.start(model)
        return str(caught.value)

    def one_by_one() -> str:
        """Each gradient is gathered after the one before was written."""
        model, written = _model(), []
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def act(grad: Tensor) -> Tensor:
            pairs = zip(model.parameters(), grads, strict=True)
            written.append(sum(param.grad is not grad for param, grad in pairs))
            return grad * 2

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            item = gs.Intervention(act, gs.Parameters(stage="step"))
            with gs.Surgery(item).attach(model, optimizer):
                model(_batch(0)).sum().backward()
                grads = [param.grad for param in model.parameters()]
                optimizer.step()
        return str(written)

    clip = gs.Clip(0.01)
    return {
        "one by one": one_by_one(),
        **{stage: tried(clip, stage) for stage in gs.Parameters.stages},
        "noise": tried(gs.AddNoise(0.1), "accumulated"),
        "norm": tried(gs.Mask(0.1), "accumulated"),
        "batch": tried(clip, "accumulated", gs.Shape(above=2)),
        "gathered": tried(gs.Mask(0.1), "step"),
        "late": tried(clip, "backward", late=True),
        "resumed": resumed(),
    }


def test_what_does_not_act_on_parts_is_told() -> None:
    found = in_ranks(2, _messages)
    for stage in ("backward", "backward_end"):
        assert "their hooks do not run. Use Parameters with stage='step'" in found[stage]
    assert found["accumulated"] == ""
    assert found["one by one"] == "[0, 1, 2, 3]"
    assert "may draw random numbers. Use stage='step'" in found["noise"]
    assert "needs whole gradients. Use stage='step'" in found["norm"]
    assert "reads the newest forward. Use stage='step'" in found["batch"]
    assert "those of sharded parameters were gathered" in found["gathered"]
    assert "resume with 3 processes" in found["resumed"]
    assert "found 2 processes" in found["resumed"]
    assert "have no hooks, for example after fully_shard: 0.weight" in found["late"]
