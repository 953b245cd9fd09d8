"""The tables of hooks: what is in them, and which hooks are gradsurg's."""

import torch
from torch import nn

import gradsurg as gs
from gradsurg.torch_internals import hook_tables
from gradsurg.torch_internals.hook_tables import call_tables, foreign_hooks


def test_the_tables_of_modules_tensors_and_the_process_hold_their_hooks() -> None:
    model, weight = nn.Linear(2, 2), torch.ones(2, requires_grad=True)

    def hook(*args: object) -> None: ...

    calls = ("forward_pre", "forward", "full_backward", "full_backward_pre")
    registered = (
        *((getattr(model, f"register_{call}_hook"), lambda: call_tables(model)) for call in calls),
        (model.register_state_dict_post_hook, lambda: hook_tables.module_tables(model)),
        (nn.modules.module.register_module_forward_hook, hook_tables.process_tables),
        (weight.register_hook, lambda: hook_tables.tensor_tables(weight)),
        (weight.register_post_accumulate_grad_hook, lambda: hook_tables.tensor_tables(weight)),
    )
    for register, tables in registered:
        before = len(foreign_hooks(*tables()))
        handle = register(hook)
        assert len(foreign_hooks(*tables())) == before + 1
        handle.remove()
        assert len(foreign_hooks(*tables())) == before


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
