"""What gradsurg relies on in PyTorch without it being exported."""

import pytest
import torch
from torch import Tensor
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
