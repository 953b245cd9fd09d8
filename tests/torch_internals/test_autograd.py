"""Private behaviour of PyTorch on which gradsurg relies."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsurg.torch_internals import autograd


def test_what_stands_for_many_tensors_is_batched_and_what_has_no_storage_is_wrapped() -> None:
    seen = []

    def look(row: Tensor) -> Tensor:
        seen.append((autograd.is_batched(row), autograd.is_wrapped(row)))
        return row.sum()

    leaf = torch.ones(3, requires_grad=True)
    look(leaf)
    torch.func.grad(look)(torch.ones(3))
    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.vmap(torch.func.grad(look))(torch.ones(2, 3))
    leaf.register_hook(lambda grad: (look(grad), None)[1])
    torch.autograd.grad(leaf * 2, leaf, torch.eye(3), is_grads_batched=True)
    plain, wrapped, batched = (False, False), (False, True), (True, True)
    assert seen[:4] == [plain, wrapped, batched, batched]
    assert seen[4:] == [batched]


def test_the_forward_of_a_checkpoint_that_is_not_reentrant_is_told() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(autograd.in_checkpoint())
        return x.exp()

    x = torch.ones(1, requires_grad=True)
    run(x)
    for reentrant in (False, True):
        y = checkpoint(run, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        y.backward()
    assert seen == [False, True, False, False, False]


def test_vmap_is_known_to_be_active_and_a_batch_is_detached_in_it() -> None:
    seen = []

    def look(row: Tensor) -> Tensor:
        alone = autograd.detached(row)
        seen.append((autograd.in_vmap(), alone.requires_grad))
        return row * alone.sum()

    leaf = torch.ones(3, requires_grad=True)
    look(leaf)
    torch.func.grad(lambda row: look(row).sum())(torch.ones(3))
    torch.func.vmap(torch.func.grad(lambda row: look(row).sum()))(torch.ones(2, 3))
    handle = leaf.register_hook(look)
    doubled = torch.autograd.grad(
        leaf**2, leaf, torch.eye(3), is_grads_batched=True, create_graph=True
    )
    assert seen == [(False, False), (False, False), (True, False), (False, False)]
    handle.remove()
    # The derivative of g * constant, with g = 2 x and the constant 2.
    (second,) = torch.autograd.grad(doubled[0].sum(), leaf)
    assert second.tolist() == [4.0, 4.0, 4.0]


def test_a_leaf_is_asked_whether_its_hooks_run_without_running_them() -> None:
    leaf, calls = torch.ones(3, requires_grad=True), list[int]()
    assert autograd.without_hooks([leaf]) == []
    handles = [leaf.register_hook(lambda grad, n=n: calls.append(n)) for n in (1, 2)]
    assert autograd.without_hooks([leaf]) == []
    assert (calls, leaf.grad) == ([], None)
    leaf.sum().backward()
    assert calls == [1, 2]
    for handle in handles:
        handle.remove()
    assert autograd.without_hooks([leaf]) == []


def test_gradients_from_the_engine_are_those_of_autograd_grad() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (used * torch.arange(3.0)).exp().sum()
    expected, absent = torch.autograd.grad(
        loss, [used, unused], retain_graph=True, allow_unused=True
    )
    for keep_graph in (True, False):
        found, nothing = autograd.gradients_of(loss, [used, unused], keep_graph)
        assert nothing is absent is None
        assert found is not None
        assert found.equal(expected)
    assert used.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        autograd.gradients_of(loss, [used], keep_graph=False)


def test_the_calls_on_the_stack_are_listed_from_the_innermost() -> None:
    inner, found = nn.Identity(), list[int]()
    model = nn.Sequential(nn.Sequential(inner))
    inner.register_forward_pre_hook(lambda *_: found.extend(autograd.calls_on_stack()))
    model(1)
    assert found == [id(inner), id(model[0]), id(model)]
    assert autograd.calls_on_stack() == []
