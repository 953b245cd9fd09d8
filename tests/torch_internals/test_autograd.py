"""What gradsurg relies on in PyTorch without it being exported."""

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradsurg.torch_internals import autograd
from gradsurg.training.ranks import Ranks, in_ranks


def test_sequence_numbers_go_up_by_one_with_each_differentiable_node() -> None:
    leaf = torch.ones(2, requires_grad=True)
    before = autograd.next_sequence_number()
    node = (leaf * 2).grad_fn
    assert node is not None
    assert node._sequence_nr() == before
    assert autograd.next_sequence_number() == before + 1


def test_in_backward_is_true_inside_a_hook_alone() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(autograd.in_backward()))
    leaf.sum().backward()
    assert seen == [True]
    assert not autograd.in_backward()


def test_a_callback_comes_after_the_gradients_are_there() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        autograd.at_end_of_backward(lambda: seen.append(leaf.grad is not None))

    leaf.register_hook(hook)
    leaf.sum().backward()
    assert seen == [True]


def test_in_functorch_is_true_under_vmap_alone() -> None:
    seen = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(autograd.in_functorch())
        return row

    torch.vmap(look)(torch.ones(2, 3))
    assert seen == [True]
    assert not autograd.in_functorch()


def test_foreach_operations_do_what_their_names_say() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[2.0]])]
    assert [norm.item() for norm in autograd.foreach_norm(tensors, 2.0)] == [5.0, 2.0]
    halves = autograd.foreach_mul(tensors, torch.tensor(0.5))
    assert [half.tolist() for half in halves] == [[1.5, 2.0], [[1.0]]]


def test_each_backward_pass_has_a_number_of_its_own() -> None:
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: seen.append(autograd.backward_task()))
    for _ in range(2):
        leaf.sum().backward()
    assert len(set(seen)) == 2
    assert autograd.backward_task() == -1


def test_flat_puts_entries_one_after_the_other() -> None:
    assert autograd.flatten([torch.ones(2, 2), torch.tensor(3.0)]).tolist() == [1, 1, 1, 1, 3]


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
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(autograd.running_node())
            return grads[0] * 2

    result = Twice.apply(torch.ones(2, requires_grad=True))
    assert isinstance(result, torch.Tensor)
    result.sum().backward()
    assert seen == [result.grad_fn]
    assert autograd.running_node() is None


def _pair(seen: list[str], name: str) -> autograd.Pair:
    def pack(tensor: Tensor) -> Tensor:
        seen.append(name)
        return tensor.detach()

    return pack, lambda tensor: tensor


def test_pairs_of_hooks_for_saved_tensors_are_left_in_any_order() -> None:
    seen: list[str] = []
    first, second = _pair(seen, "first"), _pair(seen, "second")
    x = torch.ones(1, requires_grad=True)
    assert autograd.saved_tensor_hooks() is None
    autograd.push_saved_tensor_hooks(first)
    autograd.push_saved_tensor_hooks(second)
    x.exp()
    autograd.remove_saved_tensor_hooks(first)
    x.exp()
    assert autograd.saved_tensor_hooks() == second
    autograd.remove_saved_tensor_hooks(second)
    x.exp()
    assert autograd.saved_tensor_hooks() is None
    assert seen == ["second", "second"]


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
    for tensor in unwrapped:
        assert not autograd.is_wrapped(tensor)
        assert not tensor.requires_grad
        assert tensor.untyped_storage().size()


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


def test_a_change_in_place_raises_the_version_of_a_tensor_and_inference_tensors_have_none() -> None:
    tensor = torch.ones(1)
    before = autograd.version_of(tensor)
    tensor.add_(1)
    assert autograd.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert autograd.version_of(torch.ones(1).add_(1)) == 0


def test_a_global_forward_hook_with_keywords_leaves_nothing_behind() -> None:
    tables = vars(module)
    handle = module.register_module_forward_hook(lambda *_: None, with_kwargs=True)
    assert handle.id in tables["_global_forward_hooks_with_kwargs"]
    autograd.remove_global_forward_hook(handle)
    assert handle.id not in tables["_global_forward_hooks_with_kwargs"]
    assert handle.id not in tables["_global_forward_hooks"]


class _Passing(TorchFunctionMode):
    """A mode that lets everything pass, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_torch_functions_are_left_in_any_order() -> None:
    outer, inner = _Passing(), _Passing()
    autograd.push_function_mode(outer)
    autograd.push_function_mode(inner)
    assert autograd.function_modes() == [outer, inner]
    autograd.remove_function_mode(outer)
    assert autograd.function_modes() == [inner]
    autograd.remove_function_mode(outer)  # again, and nothing else is taken out
    torch.ones(1).neg()
    autograd.remove_function_mode(inner)
    torch.ones(1).neg()
    assert autograd.function_modes() == []
    assert (outer.count, inner.count) == (0, 2)


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


def test_a_first_hook_lives_and_dies_with_its_tensor() -> None:
    class Witness:
        def __call__(self, grad: torch.Tensor) -> None:
            """Leave the gradient as it is."""

    witness = Witness()
    held = ref(witness)
    y = torch.ones(2, requires_grad=True) * 2.0
    autograd.hook_first(y, witness)
    del witness
    gc.collect()
    assert held() is not None
    del y
    gc.collect()
    assert held() is None


def test_autocast_of_any_device_is_told() -> None:
    assert not autograd.any_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autograd.any_autocast()
    assert not autograd.any_autocast()


class _Counting(autograd.Mode):
    """Counts the torch functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

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
            process.register_module_forward_pre_hook,
            process.register_module_forward_hook,
            process.register_module_full_backward_pre_hook,
            process.register_module_full_backward_hook,
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


@pytest.mark.parametrize("kind", ["register_full_backward_pre_hook", "register_full_backward_hook"])
def test_a_forward_hook_replaces_the_backward_hook_of_its_own_call(kind: str) -> None:
    calls: list[str] = []
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)

    def old(*_: object) -> None:
        calls.append("old")

    def replace(called: torch.nn.Module, args: object, output: object) -> None:
        autograd.replace_backward_hook(called, old, lambda *_: calls.append("new"))

    getattr(layer, kind)(old)
    handle = layer.register_forward_hook(replace)
    first = layer(x)
    handle.remove()
    second = layer(x)
    second.sum().backward()
    assert calls == ["old"]
    first.sum().backward()
    assert calls == ["old", "new"]


def test_a_leaf_is_asked_whether_its_hooks_run_without_running_them() -> None:
    leaf, calls = torch.ones(3, requires_grad=True), list[int]()
    assert autograd.python_hooks_run(leaf)
    handles = [
        leaf.register_hook(lambda grad, number=number: calls.append(number)) for number in (1, 2)
    ]
    assert autograd.python_hooks_run(leaf)
    assert (calls, leaf.grad) == ([], None)
    leaf.sum().backward()
    assert calls == [1, 2]
    for handle in handles:
        handle.remove()
    assert autograd.python_hooks_run(leaf)


def test_the_communication_hooks_of_ddp_have_names() -> None:
    def work(ranks: Ranks, folder: Path) -> list[list[str]]:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        before = autograd.comm_hooks(wrapped)
        wrapped.register_comm_hook(None, allreduce_hook)
        return [before, autograd.comm_hooks(wrapped)]

    assert in_ranks(2, work) == [
        [],
        ["torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook"],
    ]
