"""The private tables of hooks on modules and tensors."""

from torch import nn

from gradsurg.torch_internals import module_hooks


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
