"""Skipped steps: the optimizer does not step, and everything else goes on."""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adam, Optimizer

import gradsurg as gs
from gradsurg.experiment.execution import execute
from tests.nets import attached, backward, small, states_of, train, weights
from tests.runs import a_run, lines, notes

Make = Callable[[Iterable[Tensor]], Optimizer]

DECAY = {"lr": 0.1, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(SGD, momentum=0.9, **DECAY),
    "adam": partial(Adam, amsgrad=True, **DECAY),
    "fused": partial(optim.AdamW, lr=0.1, fused=True),
    "foreach": partial(optim.AdamW, foreach=True, **DECAY),
    "adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    "asgd": partial(optim.ASGD, lr=0.1, lambd=0.1),
    "rmsprop": partial(optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "adafactor": partial(optim.Adafactor, **DECAY),
    **{
        kind.__name__: partial(kind, lr=0.1)
        for kind in (optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.Rprop)
    },
}


def _spoil(model: nn.Module, value: float = torch.nan) -> None:
    """Put one wrong entry into one gradient."""
    backward(model, 99)
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[0, 0] = value


def _same(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        keys = first.keys() == second.keys()
        return keys and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spoilt", [0, 3])
def test_a_skipped_step_is_bit_identical_to_none(name: str, spoilt: int) -> None:
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    twin, other = copy.deepcopy((model, optimizer))
    with attached(model, gs.SkipUpdate(), None, optimizer) as live:
        train(model, optimizer, spoilt)
        optimizer.zero_grad()
        _spoil(model)
        optimizer.step()
        train(model, optimizer, 2, start=spoilt)
        assert live.skipped_steps == {"skip_update": 1}
        assert live.step == spoilt + 3
    train(twin, other, spoilt + 2)
    assert all(map(torch.equal, weights(model), weights(twin)))
    assert _same(optimizer.state_dict(), other.state_dict())


def _is_skipped(skip: gs.SkipUpdate, pattern: str = "*", value: float = torch.nan) -> bool:
    """Whether a step with one wrong entry changes nothing; its gradients are there after it."""
    model, elsewhere = small(), nn.Parameter(torch.ones(2))
    params = [*model.parameters(), elsewhere]
    optimizer, before = SGD(params, lr=0.1), [param.detach().clone() for param in params]
    with attached(model, skip, gs.Parameters(pattern), optimizer):
        _spoil(model, value)
        elsewhere.sum().backward()
        grads = [param.grad for param in params]
        optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    return all(map(torch.equal, params, before))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e3])
def test_the_joint_norm_and_entries_that_are_not_finite_are_the_reasons(value: float) -> None:
    assert _is_skipped(gs.SkipUpdate(None), value=value) is (value != 1e3)
    assert _is_skipped(gs.SkipUpdate(500.0), value=value)
    assert _is_skipped(gs.SkipUpdate(5000.0), value=value) is (value != 1e3)


def test_the_norm_is_that_of_the_selected_parameters_and_all_of_the_optimizer_are_skipped() -> None:
    assert _is_skipped(gs.SkipUpdate(), "first.*")
    assert not _is_skipped(gs.SkipUpdate(), "last.*")


def test_what_comes_later_does_not_act_in_a_skipped_step() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    surgery = gs.Surgery(
        gs.Intervention(gs.Chain(gs.SkipUpdate(), gs.Momentum()), at=gs.Parameters(stage="step")),
        gs.Intervention(gs.AddNoise(sigma=1.0), at=gs.Parameters(stage="step")),
        gs.Intervention(gs.AddNoise(sigma=1.0), at=gs.Updates()),
    )
    with surgery.attach(model, optimizer):
        train(model, optimizer, 1)
        optimizer.zero_grad()
        _spoil(model)
        before, states = weights(model), copy.deepcopy(states_of(surgery))
        optimizer.step()
        assert all(map(torch.equal, weights(model), before))
        del states["skip_update/group"], (now := states_of(surgery))["skip_update/group"]
        assert _same(now, states)
        train(model, optimizer, 1)
    assert all(weight.isfinite().all() for weight in weights(model))


def test_steps_are_skipped_only_while_the_trigger_fires_and_not_in_shadow() -> None:
    for when, shadow in ((gs.Steps(stop=1), False), (None, True)):
        model = small()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(model, gs.SkipUpdate(1e-6), None, optimizer, when, shadow=shadow) as live:
            start = weights(model)
            train(model, optimizer, 1)
            assert all(map(torch.equal, weights(model), start)) is not shadow
            train(model, optimizer, 1)
            assert not all(map(torch.equal, weights(model), start))
            assert live.skipped_steps == {"skip_update": 2 if shadow else 1}


def test_a_closure_is_called_and_its_step_skipped() -> None:
    model = small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        _spoil(model)
        calls.append(1)
        return 0.0

    before = weights(model)
    with attached(model, gs.SkipUpdate(), None, optimizer) as live:
        assert optimizer.step(closure) == 0.0
        assert live.skipped_steps == {"skip_update": 1}
    assert len(calls) == 1
    assert all(map(torch.equal, weights(model), before))


def test_a_grad_scaler_skips_by_itself_and_the_norm_is_unscaled() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    surgery = gs.Surgery(gs.Intervention(gs.SkipUpdate(100.0)))
    before = weights(model)
    with surgery.attach(model, optimizer, scaler=scaler) as live:
        for factor, moves in ((torch.inf, False), (1e6, False), (1.0, True)):
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(2, 6)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, weights(model), before)) is not moves
        assert live.skipped_steps == {"skip_update": 1}  # the norm's
    assert scaler.get_scale() == 2.0**9  # the infinity's


def test_an_optimizer_that_steps_without_gradients_is_refused() -> None:
    model = small()

    class Decay(SGD):
        def step(self, closure: object = None) -> None:  # pyright: ignore
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.mul_(0.9)

    optimizer = Decay(model.parameters(), lr=0.1)
    with attached(model, gs.SkipUpdate(), None, optimizer):
        train(model, optimizer, 1)
        _spoil(model)
        with pytest.raises(RuntimeError, match="Decay has changed parameters without a gradient"):
            optimizer.step()


@pytest.mark.parametrize(
    ("max_norm", "note"), [(1e-6, r"skipped steps of .* (\d+) of \1 "), (1e6, "skipped no step of")]
)
def test_a_run_says_how_many_steps_were_skipped(tmp_path: Path, max_norm: float, note: str) -> None:
    record = execute(a_run(gs.SkipUpdate(max_norm)), tmp_path, [])
    assert re.match(f"skip_update {note}", notes(record)[0])
    row = lines(record, "metrics.jsonl")[-1]
    assert row["skipped_steps/skip_update"] == (row["step"] if max_norm < 1 else 0)
