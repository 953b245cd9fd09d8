"""The documented table of site kinds and contexts agrees with the behaviour."""

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.core import pitfalls
from gradsurg.core.pitfalls import CELLS, CONTEXTS
from gradsurg.plugins.registry import find, names
from gradsurg.sites.places import Selector
from tests.contexts.contexts import STEPS
from tests.contexts.kinds import BEGIN, END, KINDS, README
from tests.contexts.table import table
from tests.nets import attached, num_hooks, small
from tests.sites.points import recomputed


def test_the_readme_has_the_table_and_its_reasons() -> None:
    written = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(), "python -m tests.contexts.table writes it anew"


def test_every_kind_and_context_is_in_the_table_once() -> None:
    kinds = {find("sites", stem).__name__ for stem in names("sites")} - {"Combined"}
    assert {kind.partition(".")[0] for kind in pitfalls.KINDS} == kinds
    assert [*STEPS] == [*CONTEXTS]
    assert {of.kinds.partition(".")[0] for of in CELLS} <= kinds | {
        "*",
        "SharedParameters",
        "MatchedUpdates",
    }
    assert {of.outcome for of in CELLS} == {"warned", "reported", "refused", "n/a"}
    for kind in KINDS.values():
        cells = Counter(of.context for of in pitfalls.cells_of(kind.make()))
        assert [context for context, number in cells.items() if number > 1] == []


def test_outcomes_of_a_selector_are_shown_with_their_reasons() -> None:
    text = gs.sites.outcomes(gs.Parameters(stage="step") | gs.Nodes("Relu"))
    assert text.startswith("refused: an error; reported: no gradient passes; n/a: ")
    assert "Parameters (step) acts in: eager; in-place consumer" in text
    assert "Nodes (backward, enter) acts in: eager" in text
    assert "  refused (torch.compile after attaching): compiled code runs as one node." in text
    assert "FSDP2: sharded" not in text
    assert "{" not in text


def test_a_refusal_names_kind_site_reason_and_way_out() -> None:
    found = {"made": 2, "found": 3}
    error = pitfalls.refusal(gs.Parameters(), "FSDP2, resumed", site="a", **found)
    assert type(error) is ValueError
    assert str(error).startswith("Parameters: site 'a': resume with 2 processes: ")
    assert str(error).endswith(", found 3 processes.")
    error = pitfalls.refusal(gs.Outputs(), "TorchScript", site="a#0")
    assert str(error).endswith(f"'a#0': {pitfalls.cell(gs.Outputs(), 'TorchScript').text}")
    with pytest.raises(KeyError, match="Parameters in FSDP2"):
        pitfalls.cell(gs.Parameters(), "FSDP2", stage="step")


def _wrapped(reentrant: bool) -> nn.Module:
    how = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    return nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1), checkpoint_impl=how))


def _with(change: Callable[[nn.Module], object]) -> nn.Module:
    change(model := small())
    return nn.Sequential(model)


def _enable(model: nn.Module) -> None:
    """As transformers' gradient_checkpointing_enable does it."""
    function = partial(recomputed, use_reentrant=True)
    vars(model).update(gradient_checkpointing=True, _gradient_checkpointing_func=function)


def _sharded() -> nn.Module:
    model = small()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


COMPILED = "torch.compile after attaching"
VISIBLE: dict[str, tuple[Callable[[], Any], list[str]]] = {  # Any: PyTorch's wrappers
    "plain": (small, []),
    "compiled": (lambda: torch.compile(small(), backend="eager"), [COMPILED]),
    "compiled in place": (lambda: _with(lambda model: model.compile(backend="eager")), [COMPILED]),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.ReLU())), ["TorchScript"]),
    "wrapped": (lambda: _wrapped(False), ["checkpoint, non-reentrant"]),
    "wrapped, reentrant": (lambda: _wrapped(True), ["checkpoint, reentrant"]),
    "enabled": (lambda: _with(_enable), ["checkpoint, reentrant"]),
    "DDP": (lambda: DistributedDataParallel(small()), ["DDP"]),
    "static": (
        lambda: DistributedDataParallel(small(), static_graph=True),
        ["DDP", "static_graph"],
    ),
    "sharded": (_sharded, ["FSDP2"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", VISIBLE)
def test_contexts_of_a_model_are_seen_when_it_is_attached(name: str) -> None:
    make, expected = VISIBLE[name]
    assert pitfalls.visible_contexts(make()) == expected


def test_a_plan_has_the_cells_of_the_contexts_that_are_seen() -> None:
    at = gs.Nodes("Relu")
    surgery, cell = gs.Surgery(gs.Intervention(gs.Scale(2.0), at)), pitfalls.cell(at, COMPILED)
    expected = f"  {cell.kinds.replace('.', ' ')} {cell.outcome} ({COMPILED}): {cell.text}"
    assert expected in surgery.plan(torch.compile(small(), backend="eager"))  # type: ignore[arg-type]
    assert COMPILED not in surgery.plan(small())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("make", "transform", "at"),
    [
        *((_sharded, gs.Scale(2.0), at) for at in (gs.Parameters(), gs.Updates(), gs.Weights())),
        (VISIBLE["static"][0], gs.Sum(), gs.SharedParameters()),
    ],
)
def test_what_the_table_refuses_is_refused_before_the_optimizer_is_known(
    make: Callable[[], nn.Module], transform: Any, at: Selector
) -> None:
    model = make()
    context = pitfalls.visible_contexts(model)[-1]
    with pytest.raises(pitfalls.cell(at, context).error) as caught:
        gs.Surgery(gs.Intervention(transform, at)).start(model)
    assert str(caught.value) == str(pitfalls.refusal(at, context))
    assert num_hooks(model) == num_hooks(make())


class _Twice(nn.Module):
    """A layer that is called twice, each time in a checkpoint; the gradients are 2 and -1.5."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = nn.Linear(1, 1, bias=False), reentrant

    def forward(self, x: Tensor) -> Tensor:
        first, second = (recomputed(self.part, x, self.reentrant) for _ in range(2))
        return 2.0 * first - 1.5 * second


def _clipped(at: Selector, reentrant: bool) -> tuple[tuple[float, float], list[str]]:
    """Return the step of the weight, the input's gradient, and the warnings before that step."""
    model, x = _Twice(reentrant), torch.ones(1, 1, requires_grad=True)
    nn.init.ones_(model.part.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(model, gs.Clip(1.0), at, optimizer):
            model(x).sum().backward()
            texts = [str(item.message) for item in caught]
            optimizer.step()
    assert x.grad is not None
    return (1.0 - model.part.weight.item(), x.grad.item()), texts


EXACT = {
    gs.Parameters(stage="backward_end"): (0.5, 0.5),
    gs.Parameters(stage="step"): (0.5, 0.5),
    gs.Outputs("part"): (0.0, 0.0),
    gs.Inputs("part"): (0.5, 0.0),
}
"""What `Clip(1.0)` makes of the gradient: of all of the weight it is 0.5, of each use 1 - 1."""

SEVERAL = {
    gs.Parameters(): (0.0, 0.5),
    gs.Parameters(stage="accumulated"): (1.0, 0.5),
    gs.Inputs("part", path="total"): (0.5, 0.0),
}
"""The same where each checkpoint has a gradient of its own."""


@pytest.mark.parametrize(("at", "expected"), (EXACT | SEVERAL).items(), ids=repr)
def test_a_weight_used_twice_under_reentrant_checkpoints(
    at: Selector, expected: tuple[float, float]
) -> None:
    plain, checkpointed = (_clipped(at, reentrant)[0] for reentrant in (False, True))
    assert checkpointed == pytest.approx(expected)
    assert (plain != checkpointed) == (at in SEVERAL)
    with nullcontext() if at in SEVERAL else pytest.raises(KeyError):
        assert pitfalls.cell(at, "shared weight, reentrant checkpoint").outcome == "warned"


@pytest.mark.parametrize("at", [*[*SEVERAL][:2], gs.Uses("part.weight")], ids=repr)
def test_acting_twice_at_a_site_in_a_backward_pass_is_told_in_it(at: Selector) -> None:
    told = "had 2 gradients in one backward pass, one in each reentrant"
    assert any(told in text for text in _clipped(at, reentrant=True)[1])


def test_a_model_without_parameters_is_not_taken_for_a_sharded_one() -> None:
    with gs.Surgery(gs.Intervention(gs.Scale(2.0), at=gs.Outputs("*"))).attach(nn.ReLU()) as live:
        assert live.step == 0
        live.abort()
