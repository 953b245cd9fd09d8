"""What gradsurg relies on in PyTorch without it being exported."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradsurg.torch_internals import autograd


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_reentrant_checkpoint_is_a_function_whose_forward_is_running(reentrant: bool) -> None:
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append([node.name() for node in autograd.running_functions()])
        return x * 2

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    assert seen == [["CheckpointFunctionBackward"] if reentrant else []]
    assert autograd.running_functions() == []


def test_the_running_node_is_the_one_whose_backward_is_at_work() -> None:
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            seen.append(autograd.running_node())
            return grads[0] * 2

    result: Any = Twice.apply(torch.ones(2, requires_grad=True))
    result.sum().backward()
    assert seen == [result.grad_fn]
    assert autograd.running_node() is None


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


def test_the_end_of_a_backward_inside_a_backward_is_told_from_that_of_the_whole() -> None:
    seen = []

    def at_end(grad: Tensor) -> None:
        autograd.at_end_of_backward(lambda: seen.append(autograd.in_inner_backward()))

    def inner(grad: Tensor) -> None:
        with torch.enable_grad():
            leaf = torch.ones(1, requires_grad=True)
            (leaf * 2).register_hook(at_end)
            loss = leaf * 3
        loss.register_hook(at_end)
        loss.backward()

    leaf = torch.ones(1, requires_grad=True)
    middle = leaf * 2
    middle.grad_fn.register_hook(lambda *grads: inner(grads[0][0]))  # pyright: ignore[reportOptionalMemberAccess]
    middle.register_hook(at_end)
    middle.backward()
    assert seen == [True, False]


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


def test_an_unwrapped_tensor_has_a_storage_and_no_graph() -> None:
    unwrapped, outside = [], torch.ones(3, requires_grad=True)

    def look(row: Tensor) -> Tensor:
        product = row * outside
        unwrapped.append(autograd.unwrapped(product))
        return product.square().sum()

    look(outside)
    torch.func.grad(look)(torch.ones(3))
    torch.func.grad(lambda row: torch.func.grad(look)(row).sum())(torch.ones(3))
    assert len(unwrapped) == 3
    assert not any(autograd.is_wrapped(each) or each.requires_grad for each in unwrapped)
    assert all(tensor.untyped_storage().size() for tensor in unwrapped)


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


def test_a_first_hook_comes_before_those_of_others_and_is_seen_by_them() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2.0
    autograd.hook_first(y, lambda grad: grad * 3.0)
    handle = y.register_hook(lambda grad: grad + 1.0)
    assert len(y._backward_hooks or ()) == 2
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0]  # (1 * 3 + 1) * 2
    handle.remove()
    assert len(y._backward_hooks or ()) == 1


@pytest.mark.usefixtures("frozen_heap")
def test_a_first_hook_lives_and_dies_with_its_tensor() -> None:
    witness = lambda grad: None  # noqa: E731
    held = ref(witness)
    y = torch.ones(2, requires_grad=True) * 2.0
    autograd.hook_first(y, witness)
    del witness
    gc.collect()
    assert held() is not None
    del y
    gc.collect()
    assert held() is None


class _Counting(autograd.Mode):
    """Counts the torch functions that it sees."""

    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def _all_in_force() -> tuple[list[int], int, object]:
    tables = vars(torch.nn.modules.module)
    hooks = [key for name in autograd._TABLES for key in tables[name]]
    return hooks, len(autograd.function_modes()), autograd.saved_tensor_hooks()


def test_within_earlier_surroundings_only_what_was_there_before_is_in_force() -> None:
    seen: list[str] = []
    process = torch.nn.modules.module
    early = process.register_module_forward_hook(lambda *_: seen.append("early"))
    mode, later_mode, model = _Counting(), _Counting(), torch.nn.Linear(2, 2)
    pairs = [(lambda t, n=name: seen.append(n) or t, lambda t: t) for name in ("saved", "later")]
    autograd.push_function_mode(mode)
    autograd.push_saved_tensor_hooks(pairs[0])
    known = autograd.active_hooks()
    later = [
        register(lambda *_: seen.append("later"))
        for register in (
            getattr(process, f"register_module_{kind}_hook")
            for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward")
        )
    ]
    autograd.push_function_mode(later_mode)
    autograd.push_saved_tensor_hooks(pairs[1])
    before = _all_in_force()
    try:
        with pytest.raises(KeyError), autograd.only_hooks(known):
            model(torch.ones(1, 2, requires_grad=True)).exp().sum().backward()
            raise KeyError
        assert set(seen) == {"early", "saved"}
        assert mode.seen
        assert not later_mode.seen
        assert _all_in_force() == before
        model(torch.ones(1, 2, requires_grad=True)).exp().sum().backward()
        assert "later" in seen
        assert later_mode.seen
    finally:
        for pair in reversed(pairs):
            autograd.remove_saved_tensor_hooks(pair)
        autograd.remove_function_mode(later_mode)
        autograd.remove_function_mode(mode)
        for handle in [early, *later]:
            handle.remove()


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


def test_calls_of_a_module_are_counted_on_the_call_stack() -> None:
    seen: list[int] = []

    class Inner(torch.nn.Module):
        def forward(self, depth: int) -> None:
            seen.append(autograd.calls_on_stack(self))
            if depth:
                self(depth - 1)

    module = Inner()
    module(2)
    assert seen == [1, 2, 3]
    assert autograd.calls_on_stack(module) == 0


def test_the_tensors_saved_by_a_node_are_listed_by_name() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x * 2)
            return x * 1

        @staticmethod
        def backward(ctx, *grads):
            return grads[0]

    x = torch.ones(1, requires_grad=True)
    for y, names in ((x.tanh(), ["result"]), (Saves.apply(x), ["tensors.0", "tensors.1"])):
        saved = [*autograd.saved_by(y.grad_fn)]
        assert [name for name, _, _ in saved] == names
        assert all(torch.equal(raw.data, read()) for _, raw, read in saved)
        assert saved[0][1].unpack_hook is None


def test_tensors_in_place_of_parameters_are_in_the_tables() -> None:
    model, x = torch.nn.Sequential(torch.nn.BatchNorm1d(2)), torch.ones(1, 2)
    params, buffers = autograd.tensor_tables(model)
    given = {"0.weight": torch.zeros(2)}
    assert buffers[1]["running_mean"] is model[0].running_mean
    handle = model.register_forward_hook(lambda *_: seen.append(params[1]["weight"]))
    seen: list[object] = []
    torch.func.functional_call(model.eval(), given, (x,))
    handle.remove()
    assert seen == [given["0.weight"]]
    assert autograd.base_of(x.view(2)) is x
    assert autograd.base_of(x) is x
