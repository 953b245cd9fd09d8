"""The private tables of hooks on modules and tensors."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as process

from gradsurg.torch_internals import autograd, module_hooks


def test_a_tensor_tells_its_hooks_its_version_and_its_base() -> None:
    leaf = torch.ones(2, requires_grad=True)
    tensor = leaf * 1
    view = tensor[:1]
    assert module_hooks.is_hookable(tensor)
    handle = tensor.register_hook(torch.clone)
    assert list(module_hooks.hooks_of(tensor).values()) == [torch.clone]
    handle.remove()
    assert not any(map(module_hooks.is_hookable, (leaf, tensor, leaf.detach(), "text")))
    assert module_hooks.hooks_of(leaf) == {}
    assert [module_hooks.is_view(each) for each in (leaf, tensor, view)] == [False, False, True]
    assert module_hooks.base_of(view) is tensor
    assert module_hooks.base_of(tensor) is tensor
    tensor.mul_(2)
    assert module_hooks.version(view) == module_hooks.version(tensor) == 1


def test_a_pre_hook_runs_before_those_that_it_is_to_precede() -> None:
    module, ran = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: ran.append("first"))
    late = module.register_forward_pre_hook(lambda *_: ran.append("late"))
    others = module._forward_pre_hooks[late.id]
    handle = module_hooks.register_pre_hook_before(
        lambda hook: hook is others, module, lambda module, args, kwargs: ran.append("between")
    )
    module(1)
    handle.remove()
    late.remove()
    module(1)
    assert ran == ["first", "between", "late", "first"]


@pytest.mark.parametrize("on_all", [False, True])
@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward"])
def test_a_full_backward_hook_leaves_no_flag_behind(
    kind: str, on_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_global_is_full_backward_hook", None)
    module, seen = nn.Linear(1, 1), []
    target, replaced = None if on_all else module, lambda *_: None

    def after(module: nn.Module, args: object, output: object) -> None:
        autograd.replace_backward_hook(module, replaced, lambda *_: seen.append(kind))

    module.register_forward_hook(after)
    for _ in range(2):
        with ExitStack() as stack:
            assert module_hooks.register_full_backward(target, kind, replaced, stack)
            tables: list[Any] = module_hooks.global_hooks()
            assert any(tables) is on_all
            module(torch.ones(1, requires_grad=True)).sum().backward()
        assert not any(tables)
        assert module._is_full_backward_hook is None
        assert process._global_is_full_backward_hook is None
    assert seen == [kind] * 2
    register = process.register_module_backward_hook if on_all else module.register_backward_hook
    legacy = register(replaced)
    assert not module_hooks.register_full_backward(target, kind, replaced, ExitStack())
    legacy.remove()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_the_parts_of_a_scripted_module_are_scripted() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    assert all(map(module_hooks.is_scripted, scripted.modules()))
    assert not module_hooks.is_scripted(nn.ReLU())
