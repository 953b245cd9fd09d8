"""Pitfalls of processes, parameters, modules and other libraries around a hook."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from tests.nets import attached, backward, gradients, sgd, small, train
from tests.pitfalls.nets import Reused, Saved, leaf


@pytest.fixture
def process_group(tmp_path: Path):
    """A process group of one process, as DDP requires."""
    store = vars(dist)["FileStore"](str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_p26_hooks_on_parameters_act_before_ddp_reduces_and_step_after(process_group) -> None:
    for stage in ("backward", "step"):
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        order: list[str] = []

        def reduce(state: object, bucket, order: list[str] = order):
            order.append(f"reduced {bucket.buffer().abs().max().item() == 0}")
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, reduce)
        at = gs.Parameters(stage=stage)
        with gs.Surgery(gs.Intervention(gs.Zero(), at=at)).attach(model, optimizer):
            backward(model)
            optimizer.step()
        assert order == [f"reduced {stage == 'backward'}"]


@pytest.mark.parametrize("how", ["assign", "setattr", "overwrite"])
def test_p28_a_replaced_parameter_is_reported(how: str) -> None:
    model = small()
    with (
        pytest.warns(gs.SurgeryWarning, match="parameters were replaced.*first.weight"),
        attached(model, gs.Scale(2.0)),
    ):
        backward(model)
        match how:
            case "assign":
                state = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
            case "setattr":
                model.first.weight = nn.Parameter(model.first.weight.detach().clone())
            case "overwrite":
                torch.__future__.set_overwrite_module_params_on_conversion(True)
                model.double()
                torch.__future__.set_overwrite_module_params_on_conversion(False)


@dataclass
class Answer:
    """An output type of a module that is no tensor."""

    logits: Tensor


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.part(x))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answering = Answering()

    def forward(self, x: Tensor) -> Tensor:
        return self.answering(x).logits.sum()


def test_p29_an_output_in_a_dataclass_is_hooked_or_refused() -> None:
    with attached(model := Asking(), gs.Scale(2.0), gs.Outputs("answering")) as live:
        model(torch.ones(1, 2)).backward()
    (entry,) = live.ledger
    assert (entry.aliases or [entry.site], entry.calls) == (["answering#0.logits"], 1)
    model = Asking()
    with (
        pytest.raises(RuntimeError, match="Outputs"),
        attached(model, gs.Scale(2.0), gs.ModuleGradients("answering")),
    ):
        model(torch.ones(1, 2, requires_grad=True))


class OneUsed(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = OneUsed()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a, b)


def test_p30_an_unused_input_keeps_no_gradient() -> None:
    def of_b(manager: AbstractContextManager, model: nn.Module) -> Tensor | None:
        a, b = leaf(), leaf()
        with manager:
            model(a, b).sum().backward()
        return b.grad

    model = Both()
    zero = of_b(model.one.register_full_backward_hook(lambda *_: None), model)
    assert zero is not None
    assert zero.item() == 0.0
    model = Both()
    with pytest.warns(gs.SurgeryWarning, match="no gradient ever passed at: one#0.input.1"):
        assert of_b(attached(model, gs.Scale(2.0), gs.Inputs("one")), model) is None


def test_p31_inputs_act_for_autograd_grad_where_full_backward_hooks_do_not() -> None:
    model, seen = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []
    with model[1].register_full_backward_hook(lambda *_: seen.append("full")):
        x = torch.ones(1, 1)
        torch.autograd.grad(model(x).sum(), model[1].weight)
    assert seen == []
    (plain,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    with attached(model, gs.Scale(2.0), gs.Inputs("1")):
        (treated,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    assert torch.equal(treated, 2 * plain)


def test_p32_a_group_acts_once_a_backward_with_a_reentrant_checkpoint() -> None:
    model, calls = Saved(reentrant=True), []
    handle = register_multi_grad_hook(list(model.parameters()), lambda grads: calls.append(grads))
    x = torch.ones(1, 2, requires_grad=True)
    with handle:
        model(x).backward()
    assert len(calls) == 1  # all of its parameters are inside
    root = (leaf() * 2).sum()
    handle = register_multi_grad_hook([root], calls.append)
    with handle:
        root.backward()
    assert len(calls) == 1  # never for the root itself
    model.zero_grad()
    with attached(model, gs.ClipGlobalNorm(1e-3), gs.Group()) as live:
        model(x).backward()
    assert {entry.calls for entry in live.ledger} == {1}
    norm = torch.stack([grad.norm() for grad in gradients(model).values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_p37_hooks_of_other_libraries_are_kept_and_named() -> None:
    model, order = small(), []
    theirs = model.first.weight.register_hook(lambda grad: order.append("theirs"))
    on_module = model.first.register_forward_hook(lambda *_: order.append("module"))
    with attached(model, gs.Scale(2.0), gs.Parameters("first.weight")) as live:
        backward(model)
    with attached(model, gs.Scale(2.0), gs.Outputs("first")) as outputs:
        backward(model)
    backward(model)
    assert order == ["module", "theirs"] * 3
    assert "beside hooks of others: tests.pitfalls.test_surroundings" in live.ledger.table()
    assert "beside hooks of others: tests.pitfalls.test_surroundings" in outputs.ledger.table()
    theirs.remove()
    on_module.remove()


def test_p38_a_full_backward_hooks_wrapper_node_does_not_hide_the_inner_nodes() -> None:
    model = small()
    plain = model(torch.ones(1, 6)).grad_fn.name()
    with model.last.register_full_backward_hook(lambda *_: None):
        assert model(torch.ones(1, 6)).grad_fn.name() != plain
        with attached(model, gs.Scale(2.0), gs.Nodes("Addmm", module="last")) as live:
            backward(model)
    assert [entry.site for entry in live.ledger] == ["last#0/AddmmBackward[0]"]


def test_p40_the_global_random_generator_is_not_used() -> None:
    model = small()
    before = torch.get_rng_state()
    optimizer, chance = sgd(model), gs.Probability(p=1.0)
    with attached(model, gs.AddNoise(sigma=1.0), optimizer=optimizer, when=chance):
        train(model, optimizer, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_p42_attaching_the_same_surgery_twice_is_refused() -> None:
    x, calls = leaf(), []

    def hook(grad: Tensor) -> None:
        calls.append(grad)

    x.register_hook(hook)
    x.register_hook(hook)
    x.sum().backward()
    assert len(calls) == 2
    surgery, model = gs.Surgery(gs.Intervention(gs.Scale(2.0))), Reused()
    with surgery.attach(model):
        with pytest.raises(RuntimeError, match="attached already"), surgery.attach(model):
            pass
        model(leaf()).sum().backward()
    assert gradients(model)["part.weight"].item() == 20.0


def test_p43_the_ledger_lists_the_hooks_on_nodes() -> None:
    node = (leaf() * 2).grad_fn
    assert node is not None
    node.register_prehook(lambda grads: None)
    assert not [name for name in dir(node) if "hooks" in name]
    with attached(model := small(), gs.Scale(2.0), gs.Nodes("*", module="last")) as live:
        backward(model)
    assert [entry.site for entry in live.ledger] == [
        "last#0/TBackward[0]",
        "last#0/AddmmBackward[0]",
    ]
