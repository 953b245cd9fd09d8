"""The tree: what it prints, what it marks, and that it leaves nothing behind."""

import gc
import random
from contextlib import nullcontext
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.sites import tree
from gradsurg.sites.places import Selector
from tests.nets import attached, noisy, num_hooks, small
from tests.sites.points import Made

X = torch.linspace(-1, 1, 48).view(8, 6)


class Many(nn.Module):
    """A module called twice, one under no_grad, one frozen, one tied, one in a checkpoint, one that
    is never called, operations of the model's own, keyword inputs and a dict of outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.shared = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.spares = nn.ModuleList([nn.Linear(4, 2)])

    def forward(self, ids: Tensor, *, gain: float) -> dict[str, Any]:
        h = self.shared(functional.gelu(self.shared(self.words(ids)))) * self.scale * gain
        with torch.no_grad():
            target = self.teacher(h)
        h = checkpoint(self.body, self.frozen(h), use_reentrant=False)
        return {"logits": self.tied(h), "hidden": [h, target], "top": ids.max()}


MANY = {"ids": torch.arange(6).view(2, 3), "gain": 2.0}


def _sites(model: nn.Module, example: object, at: Selector) -> list[str]:
    return sorted(tree(model, example, at).sites)


# Printed text


def test_the_margin_marks_selected_sites_and_parameters_are_listed_under_their_module() -> None:
    model = small()
    model.last.bias.requires_grad_(False)
    at = gs.Parameters("last.*") | gs.Outputs("act") | gs.Nodes("matmul", module="first")
    seen = tree(model, X, at)
    assert str(seen) == (
        "  module#call  class       output  params  nodes\n"
        "  root#0       Sequential  8x3\n"
        "    first#0    Linear      8x5         35  T, Addmm\n"
        "*     first#0/AddmmBackward[0]  8x5\n"
        "*   act#0      ReLU        8x5             Relu\n"
        "    last#0     Linear      8x3         18  T, Addmm\n"
        "*     last.weight          3x5\n"
        "-     last.bias: frozen\n"
        "\n"
        "4 calls, 53 parameters, 5 nodes\n"
        "3 sites selected (*), 1 left out (-)"
    )
    assert repr(seen) == str(seen)
    assert seen.sites == ("first#0/AddmmBackward[0]", "act#0", "last.weight")


def test_calls_are_listed_in_order_and_a_shared_module_has_a_row_per_call() -> None:
    rows = tree(Many(), MANY).rows
    order = "root words shared shared teacher frozen body body.0 body.1 tied spares.0"
    assert [row.name for row in rows] == order.split()
    assert [row.call for row in rows] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, None]
    assert [row.depth for row in rows] == [0, 1, 1, 1, 1, 1, 1, 2, 2, 1, 0]
    assert [row.num_params for row in rows] == [4, 28, 20, 20, 20, 20, 0, 20, 0, 28, 10]
    assert [row.label for row in rows if row.again] == ["shared#1"]
    assert [row.label for row in rows if row.no_grad] == ["teacher#0"]
    nodes = {row.label: dict(row.nodes) for row in rows}
    assert nodes["root#0"] == {"Gelu": 1, "Mul": 2}
    assert nodes["shared#1"] == {"View": 2, "T": 1, "Addmm": 1}
    assert nodes["body.1#0"] == {"Relu": 1}
    assert nodes["teacher#0"] == nodes["spares.0"] == {}


def test_outputs_are_listed_by_key_and_long_cells_are_cut() -> None:
    seen = tree(Many(), MANY)
    for part in (
        "  logits 2x3x7, hidden.0 2x3x4, +2 more  ",
        "    shared#1    Linear      2x3x4                                    (20)  View",
        "\n  never called:\n  spares.0      Linear ",
    ):
        assert part in str(seen)
    shapes = {path: str(shape) for path, shape in seen.rows[0].outputs}
    assert list(shapes) == [".logits", ".hidden.0", ".hidden.1", ".top"]
    assert shapes[".top"] == "()"


@pytest.mark.parametrize(
    ("at", "changes"),
    [
        (gs.Outputs("act"), ""),
        (gs.Activations("act"), "; a transform there changes activations"),
        (gs.EveryModule("act"), "; a transform there changes activations"),
        (gs.Weights("first.*"), "; a transform there changes weights"),
        (gs.SavedTensors("act"), "; a transform there changes saved tensors"),
        (gs.Updates("first.*"), "; a transform there changes updates"),
        (gs.Weights("first.*") | gs.Updates("first.*"), " changes weights, updates"),
    ],
)
def test_the_tree_and_the_plan_say_what_is_changed_if_not_gradients(
    at: Selector, changes: str
) -> None:
    (line,) = (line for line in str(tree(small(), X, at)).splitlines() if "selected (*)" in line)
    assert line.endswith(changes or "selected (*)")
    plan = gs.Surgery(gs.Intervention(gs.Scale(0.5), at)).plan(small())
    assert (f", changes {at.changed_tensors}" in plan) == bool(changes)


def test_skipped_sites_have_a_reason_and_aliases_name_their_site() -> None:
    marks = tree(Many(), MANY, gs.Outputs() | gs.Parameters()).site_lines
    out = {mark.site: mark.left_out for mark in marks if mark.left_out}
    assert out == {
        "teacher#0": "needs no gradient",
        "frozen.weight": "frozen",
        "frozen.bias": "frozen",
        "spares.0#0": "not met",
    }
    # A list of modules is never called, so it has no row.
    text = str(tree(Many(), MANY, gs.Outputs()))
    assert "spares#0" not in text
    same = {mark.site: mark.same_as for mark in marks if mark.same_as}
    assert same == {"body#0": "body.1#0", "tied.weight": "words.weight"}
    spare = tree(Many(), MANY, gs.Parameters()).rows[-1]
    assert [mark.site for mark in spare.site_lines] == ["spares.0.weight", "spares.0.bias"]


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
            torch.ones(2, 5, 16),
        ),
        (nn.LSTM(4, 6, num_layers=2), torch.ones(5, 2, 4)),
    ],
    ids=["transformer", "lstm"],
)
def test_a_table_of_a_real_model_is_aligned_and_fits_into_120_columns(
    model: nn.Module, example: Tensor
) -> None:
    seen = tree(model, example, gs.Outputs() | gs.Parameters() | gs.Nodes("*"))
    lines = str(seen).splitlines()
    assert max(map(len, lines)) <= 120
    start = lines[0].index("class")
    rows = [line for line in lines[1 : lines.index("")] if line[:1] in " *" and "#" in line[:start]]
    called = [row for row in seen.rows if row.call is not None]
    assert len(rows) >= len(called)
    assert all(any(line[start:].startswith(row.kind) for line in rows) for row in called)
    assert sum(row.num_params for row in seen.rows if not row.again) == seen.num_params


# Marks: the places that an attachment hooks

IMAGES = torch.linspace(-1, 1, 48).view(8, 2, 3)


def test_node_outputs_that_get_a_gradient_are_sites() -> None:
    def forward(self: Made, x: Tensor) -> Tensor:
        first, _, last = self.linear(x).split(2, dim=1)
        return first * last

    model = Made(forward, linear=nn.Linear(6, 6))
    seen = tree(model, X, gs.Nodes("Split"))
    assert seen.sites == ("root#0/SplitBackward[0].0", "root#0/SplitBackward[0].2")
    assert [str(mark.tensor) for mark in seen.site_lines] == ["8x2", "8x2"]
    returns = Made(lambda self, x: x.split(2, dim=1)[1])
    seen = tree(returns, X.clone().requires_grad_(), gs.Nodes("Split"))
    assert seen.sites == ("root#0/SplitBackward[0].1",)


def test_an_exception_that_the_model_catches_does_not_hide_later_calls() -> None:
    def tries(self: Made, x: Tensor) -> Tensor:
        try:
            return self.wrong(x)
        except RuntimeError:
            return self.right(x)

    inner = Made(tries, wrong=nn.Sequential(nn.Linear(5, 2)), right=nn.Linear(6, 2))
    named = {row.name: row for row in tree(nn.Sequential(inner, nn.ReLU()), X).rows}
    assert [named[name].depth for name in ("0", "0.wrong", "1")] == [1, 2, 1]
    assert named["0"].outputs == named["0.right"].outputs == named["1"].outputs
    assert named["0.wrong"].outputs == ()


def test_shapes_are_shown_for_gradients_that_enter_a_node_not_for_those_that_leave() -> None:
    # A gradient that leaves is summed to the shape of its source only afterwards.
    entering = tree(small(), X, gs.Nodes("Relu")).site_lines
    leaving = tree(small(), X, gs.Nodes("Relu", side="leave")).site_lines
    assert [str(mark.tensor) for mark in entering] == ["8x5"]
    assert [(mark.site, mark.tensor) for mark in leaving] == [("act#0/ReluBackward[0].0", None)]


def test_the_end_of_the_table_tells_of_sites_elsewhere_and_of_a_wrong_number() -> None:
    seen = tree(small(), X, gs.EveryModule("CrossEntropyLoss"))
    assert seen.sites == ()
    assert str(seen).endswith("at modules outside the model, which are not listed")
    wrong, right = (str(tree(small(), X, gs.Outputs().expect(number))) for number in (12, 3))
    assert "3 sites selected (*) where 12 are expected" in wrong
    assert "expected" not in right


def test_predicates_see_the_modules_of_the_model_itself() -> None:
    model, seen = small(), []
    tree(model, X, gs.Outputs("act").where(lambda place: seen.append(place.thing) or True))
    assert seen == [model.act]


# Arguments


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, *, z: float = 1.0) -> Tensor:
        return x * z - y


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (nn.Linear(6, 2), X),
        (Two(), (X, X)),
        (Two(), {"x": X, "y": X, "z": 2.0}),
        (nn.GRU(6, 2), nn.utils.rnn.pack_sequence([X, X[:3]])),
    ],
    ids=["tensor", "tuple", "keywords", "named_tuple"],
)
def test_an_example_is_a_value_a_tuple_or_a_dict_of_keywords(
    model: nn.Module, example: object
) -> None:
    assert [row.label for row in tree(model, example).rows] == ["root#0"]


def test_the_tree_works_with_gradients_off() -> None:
    model = small()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert _sites(model, X, gs.Nodes("Relu")) == ["act#0/ReluBackward[0]"]


class Answer:
    def __init__(self, value: Tensor) -> None:
        self.value = [value]


class Writes(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.clamp_(max=0.0)
        return super().forward(input)


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (
            Made(lambda self, x: Answer(self.linear(x)), linear=nn.Linear(6, 2)),
            "no autograd node is known: none leads to Answer",
        ),
        (
            Made(lambda self, x: checkpoint(self.inner, x, use_reentrant=True), inner=small()),
            "nodes that a reentrant checkpoint makes in the backward pass are not listed",
        ),
        (
            nn.Sequential(Writes(6, 2)),
            "the forward has changed parameters, which were not restored: 0.bias",
        ),
    ],
    ids=["no tensor", "reentrant checkpoint", "written parameter"],
)
def test_what_the_tree_cannot_show_is_noted(model: nn.Module, note: str) -> None:
    seen = tree(model, X.clone().requires_grad_(), gs.Nodes("Relu") if "reent" in note else None)
    assert seen.notes == (note,)
    assert str(seen).endswith(f"note: {note}")
    assert seen.sites == ()


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"lazy module.*Not made yet: 0.weight, 0.bias"):
        tree(model, X)
    assert isinstance(model[0], nn.LazyLinear)


def test_a_tree_inside_a_backward_is_refused() -> None:
    model = small()
    x = X.clone().requires_grad_()
    y = model(x)
    y.register_hook(lambda grad: print(tree(model, X)))
    with pytest.raises(RuntimeError, match="before or after the backward pass"):
        y.sum().backward()


# It leaves nothing behind


class Restless(nn.Module):
    """All that a forward may change."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(6, 2)
        self.other = nn.Linear(6, 2).requires_grad_(False)
        self.relu = nn.ReLU(inplace=True)
        self.noise = torch.Generator().manual_seed(3)
        self.plain = torch.zeros(2)
        self.count, self.seen, self.cache = 0, [], {"x": 1}
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(x)
        self.cache["y"] = x
        self.plain.add_(1)
        self.made = x
        self.linear.bias.requires_grad_(False)
        x.mul_(random.random() + np.random.rand() + torch.rand((), generator=self.noise))
        y = self.linear(self.drop(self.norm(self.relu(x))))
        self.linear.weight.sum().backward()
        self.train(not self.training)
        if self.fails:
            raise ValueError("broken")
        return y + self.other(x)


def _trace(model: nn.Module) -> dict[str, Any]:
    """All that could show that a forward has been: values, and the objects they are in."""
    return {
        "tensors": [
            (id(t), t._version, t.tolist()) for t in model.state_dict(keep_vars=True).values()
        ],
        "grads": [
            (id(p.grad), None if p.grad is None else p.grad.tolist(), p.requires_grad)
            for p in model.parameters()
        ],
        "modes": [module.training for module in model.modules()],
        "hooks": num_hooks(model),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())],
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    "at",
    [
        None,
        gs.Outputs() | gs.Parameters(),
        gs.Nodes("*"),
        gs.Weights(),
        gs.Parameters(stage="accumulated"),
    ],
)
def test_the_forward_of_the_tree_is_undone(
    at: Selector | None, fails: bool, training: bool
) -> None:
    model = Restless(fails=fails).train(training)
    model.linear.weight.grad = torch.ones(2, 6)
    x = X.clone()
    before, noise = _trace(model), model.noise.get_state()
    with pytest.raises(ValueError, match="broken") if fails else nullcontext():
        tree(model, x, at)
    assert _trace(model) == before
    assert torch.equal(x, X)
    assert torch.equal(model.noise.get_state(), noise)
    assert (model.count, model.seen, model.cache, model.plain.tolist()) == (0, [], {"x": 1}, [0, 0])


def test_an_error_in_the_forward_names_its_module() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="shapes") as caught:
        tree(model, X[:, :3])
    assert caught.value.__notes__ == ["in first#0, called with the example input"]


@pytest.mark.usefixtures("frozen_heap")
def test_a_tree_keeps_neither_the_model_nor_its_tensors_alive() -> None:
    model, x = noisy(), IMAGES.clone()
    outputs: list[ref[Tensor]] = []
    handle = model.register_forward_hook(lambda *given: outputs.append(ref(given[2])))
    seen = tree(model, x, gs.Outputs() | gs.Nodes("*"))
    handle.remove()
    gc.collect()
    assert [output() for output in outputs] == [None, None]
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert seen.sites


def test_the_tree_does_not_fill_the_autocast_cache() -> None:
    model = small()
    with torch.autocast("cpu", torch.bfloat16):
        first = str(tree(model, X))
        assert torch.is_autocast_cache_enabled()
        # A cast that was kept would have been made before the second one.
        assert str(tree(model, X)) == first
    assert "ToCopy" in first


def test_an_attached_surgery_does_not_see_the_tree() -> None:
    model = small()
    calls: list[int] = []
    with attached(model, gs.Scale(2.0), gs.Activations("act")) as live:
        plain, before = model(X), num_hooks(model)
        model.register_forward_hook(lambda *_: calls.append(1))
        counted = [(entry.site, entry.calls) for entry in live.ledger]
        shown = tree(model, X, gs.Activations())
        assert [(entry.site, entry.calls) for entry in live.ledger] == counted
        assert num_hooks(model) == before + 1
        assert torch.equal(model(X), plain)
        model.zero_grad()
        model(X).sum().backward()
    assert shown.sites == ("first#0", "act#0", "last#0")
    assert calls == [1, 1, 1, 1]
