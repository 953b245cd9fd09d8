"""Module calls: the tensors in nested values, and modules that run no hooks."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from tests.nets import attached
from tests.sites.points import TEN, Made, grad_of, passed, point


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Tensor
    count: int = field(init=False, default=3)


class Plain:
    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.text = "text"


@dataclass
class Output(OrderedDict[str, Any]):
    """As a model output of transformers: keys are attributes, and are set one by one."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("last_hidden_state", "hidden_states"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_: object, **__: object) -> None:
        raise TypeError("You cannot use update")


def _output(**values: Any) -> Any:
    """Return that of transformers, if it is there."""
    if not find_spec("transformers"):
        return Output(**values)
    return import_module("transformers.modeling_outputs").BaseModelOutput(**values)


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a model output": (lambda h: Output(last_hidden_state=h), "last_hidden_state"),
    "a model output of transformers": (lambda h: _output(last_hidden_state=h), "last_hidden_state"),
    "a frozen dataclass": (Frozen, "h"),
    "an object": (Plain, "h"),
    "a distribution": (lambda h: torch.distributions.Exponential(h), "rate"),
    "a nested one": (lambda h: Output(hidden_states=(h, h * 0)), "hidden_states"),
}


@pytest.mark.parametrize("held", HOLDERS)
@pytest.mark.parametrize(
    "at",
    [
        gs.Outputs("out"),
        gs.Inputs("into"),
        gs.Inputs("into", path="total"),
        gs.Activations("out"),
        gs.Activations("into", side="input"),
        gs.EveryModule("out", kind="forward"),
        gs.EveryModule("into", kind="forward_pre"),
    ],
    ids=repr,
)
def test_a_module_returns_or_takes_any_holder_of_tensors(at: Any, held: str) -> None:
    make, name = HOLDERS[held]

    def read(self: Made, holder: Any) -> Tensor:
        assert type(holder) is type(make(torch.ones(1)))
        h = getattr(holder, name)
        assert not isinstance(holder, dict) or holder[name] is h
        return 3 * (h[0] + h[1] if isinstance(h, tuple) else h)

    out = Made(lambda self, x: make(x * 2))
    model = Made(lambda self, x: self.into(self.out(x * 1)), out=out, into=Made(read))
    grad, calls = passed(model, TEN, at, point(1.0))
    assert grad == [60.0]
    side = "into#0.input.0" if at.pattern == "into" else "out#0"
    assert calls[f"{side}.{name}{'.0' if held == 'a nested one' else ''}"] == 1
    changes_values = at.resolve("tensor") == "forward"
    if changes_values:
        with gs.Surgery(gs.Intervention(TEN, at)).attach(model):
            assert model(point()).item() == 60.0


def test_a_module_added_to_the_model_is_a_site_of_interventions_added_later() -> None:
    model, x = nn.Sequential(nn.Identity()), point()
    with attached(model, TEN, gs.Outputs("0")) as live:
        model.append(nn.ReLU())
        live.add(gs.Intervention(TEN, at=gs.Outputs("1")))
        model(x).backward()
    assert grad_of(x) == [100.0]
