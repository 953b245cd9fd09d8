"""EveryModule: the global module hooks, inside and outside the model."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as process

import gradsurg as gs
from tests.nets import attached, backward, batch, gradients, small
from tests.sites.points import TEN, Double, Shared, calls_of, grad_of, point

FORWARD = ("forward_pre", "forward")
BACKWARD = ("full_backward_pre", "full_backward")


def _tail(kind: str) -> str:
    return ".input" if kind in ("forward_pre", "full_backward") else ""


@pytest.mark.parametrize("kind", [*FORWARD, *BACKWARD])
def test_a_module_outside_the_model_has_the_name_of_its_class(kind: Any) -> None:
    model, loss, x = nn.Sequential(Double()), nn.L1Loss(), point(3.0)
    y = torch.zeros(())
    with attached(model, TEN, gs.EveryModule("L1Loss", kind=kind)) as live:
        for _ in range(2):
            x.grad = None
            y = loss(model(x), torch.zeros(1))
            y.backward()
    # A loss is linear here: ten times its input, its output or a gradient come to the same.
    assert (grad_of(x), y.item()) == ([20.0], 60.0 if kind in FORWARD else 6.0)
    place = f"{_tail(kind)}.0" if _tail(kind) else ""
    seen = {site: calls for site, calls in calls_of(live).items() if calls}
    assert seen.pop(f"L1Loss#0{place}") == 2
    assert set(seen) <= {"L1Loss#0.input.1"}  # the target is a value too, and has no gradient


def test_calls_are_counted_within_the_model_and_are_0_outside() -> None:
    model, alone = Shared(), Double()
    with attached(model, gs.Identity(), gs.EveryModule(types="Double")) as live:
        for _ in range(2):
            model(point())
            alone(point())
            alone(point())
            model.twice(point())
    assert calls_of(live) == {"twice#0": 4, "twice#1": 2, "Double#0": 4}


def test_a_plan_names_what_it_looks_for_outside_the_model() -> None:
    plan = gs.Surgery(gs.Intervention(gs.Zero(), gs.EveryModule("NLLLoss"))).plan(small())
    assert "what fits EveryModule(pattern='NLLLoss'" in plan


@pytest.mark.usefixtures("frozen_heap")
def test_modules_outside_the_model_are_not_kept_alive() -> None:
    model = small()
    for kind in ("forward", "full_backward"):
        with attached(model, gs.Scale(2.0), gs.EveryModule(kind=kind)):
            loss = nn.MSELoss()
            loss(model(batch()[0]), torch.zeros(8, 3)).backward()
            held = ref(loss)
            del loss
            model(batch()[0])
            gc.collect()
            assert held() is None


def test_global_hooks_of_the_deprecated_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a process has had hooks of the other kind, torch refuses these.
    monkeypatch.setattr(process, "_global_is_full_backward_hook", None)
    handle = process.register_module_backward_hook(lambda module, entering, leaving: None)
    try:
        with (
            pytest.raises(ValueError, match="the process': it has hooks of the deprecated"),
            attached(small(), gs.Zero(), gs.EveryModule(kind="full_backward")),
        ):
            pass
    finally:
        handle.remove()


def test_a_foreign_global_hook_is_left_alone_and_reported() -> None:
    def others(module: nn.Module, args: object) -> None:
        seen.append(type(module).__name__)

    seen: list[str] = []
    handle = process.register_module_forward_pre_hook(others)
    model = small()
    with attached(model, gs.Identity(), gs.EveryModule("first")) as live:
        backward(model)
    handle.remove()
    assert "Linear" in seen
    assert "others" in live.ledger.table()
    assert gradients(model)
