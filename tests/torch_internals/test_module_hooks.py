"""The private tables of hooks on modules and tensors."""

import torch
from torch import nn

import gradsurg as gs
from gradsurg.sites.calls import remove_hook
from gradsurg.torch_internals import compiling, hook_tables, module_hooks
from gradsurg.torch_internals.hook_tables import call_tables, foreign_hooks


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


def test_a_hook_that_was_removed_in_a_call_does_nothing_in_it() -> None:
    module, ran = nn.Identity(), []
    own = compiling.untraced(lambda module, args, kwargs, output: ran.append("own"))

    def first(*_: object) -> None:
        remove_hook(handle)
        ran.append("first")

    module.register_forward_hook(first)
    handle = module.register_forward_hook(own, with_kwargs=True)
    module(1)
    remove_hook(handle)  # there is none any more
    assert (ran, len(module._forward_hooks)) == (["first"], 1)


def test_hooks_of_gradsurg_are_its_own_and_can_be_removed() -> None:
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda *_: None)
    with gs.Surgery(gs.Intervention(gs.Scale(1.0), gs.Outputs())).start(model) as live:
        tables = call_tables(model)
        assert sum(map(len, tables)) > 1
        assert len(foreign_hooks(*tables)) == 1
        for table in tables:
            hook_tables.remove_own(table)
        assert [*map(len, tables)] == [1, 0, 0, 0]
        live.abort()
    handle.remove()


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
