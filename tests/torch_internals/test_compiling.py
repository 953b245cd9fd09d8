"""The corners of torch.compile that it has but does not export."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsurg.torch_internals import compiling


@pytest.mark.filterwarnings("ignore")  # Dynamo trips over its own warnings when they are errors
def test_an_untraced_function_runs_as_it_is_in_compiled_code() -> None:
    seen: list[bool] = []

    @compiling.untraced
    def look(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + len(seen)

    called = torch.compile(lambda x: look(x) * 2, backend="eager")
    assert [called(torch.ones(1)).item() for _ in range(3)] == [4.0, 6.0, 8.0]
    assert seen == [False] * 3


def test_a_compiled_graph_tells_what_each_output_lets_through_and_whether_it_runs_again() -> None:
    def compiled(keeps: bool, retain: bool) -> tuple[Tensor, Tensor]:
        torch.compiler.reset()
        first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))

        def forward(scale: Tensor) -> tuple[Tensor, Tensor]:
            return (scale * first.tanh().exp()).sum(), (scale * second.tanh().exp()).sum()

        with compiling.keeping_buffers() if keeps else nullcontext():
            outputs = torch.compile(forward, backend="aot_eager")(torch.zeros(2))
            node: Any = outputs[0].grad_fn
            assert compiling.can_run_again(node)
            sum(outputs).backward(retain_graph=retain)
        return outputs

    for keeps, retain in ((True, True), (True, False), (False, True), (False, False)):
        outputs = compiled(keeps, retain)  # before torch 2.13 a node without them is empty
        node = outputs[0].grad_fn
        assert compiling.can_run_again(node) == (keeps or retain)
        if retain:
            through = [compiling.dependent_inputs(node, number) for number in range(2)]
            assert sorted(through) == [[0], [1]]
    torch.compiler.reset()


def _settings() -> tuple[bool, str]:
    functorch = import_module("torch._functorch.config")
    caches = import_module("torch.compiler.config")
    return functorch.donated_buffer, caches.cache_key_tag


def test_blocks_that_keep_buffers_may_overlap() -> None:
    before = _settings()
    first, second = compiling.keeping_buffers(), compiling.keeping_buffers()
    first.__enter__()
    inside = _settings()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _settings() == inside != before
    second.__exit__(None, None, None)
    assert _settings() == before


PER_THREAD = torch.__version__ >= "2.12"  # PyTorch's settings; before, one of all threads


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["here first", "there first"])
def test_blocks_of_two_threads_keep_the_buffers_of_each_and_restore_its_settings(
    order: tuple[int, int],
) -> None:
    before, blocks = _settings(), [compiling.keeping_buffers() for _ in range(2)]
    with ThreadPoolExecutor(max_workers=1) as pool:
        in_thread = [lambda call, *args: call(*args), lambda *call: pool.submit(*call).result()]
        blocks[0].__enter__()
        inside = _settings()
        assert in_thread[1](_settings) == (before if PER_THREAD else inside)
        in_thread[1](blocks[1].__enter__)
        expected = [inside, inside]
        for number in order:
            assert [run(_settings) for run in in_thread] == expected
            in_thread[number](blocks[number].__exit__, None, None, None)
            if PER_THREAD:
                expected[number] = before
        assert [run(_settings) for run in in_thread] == [before, before] != [inside, inside]


def test_a_block_closed_by_another_thread_ends_none_of_its_blocks() -> None:
    before = _settings()
    with ThreadPoolExecutor(max_workers=1) as pool:
        strange = compiling.keeping_buffers()
        pool.submit(strange.__enter__).result()
        with compiling.keeping_buffers():
            inside = _settings()
            strange.__exit__(None, None, None)
            assert _settings() == inside != before
        assert _settings() == before
        assert pool.submit(_settings).result() == (inside if PER_THREAD else before)


def test_asking_a_compiled_graph_first_keeps_its_buffers() -> None:
    torch.compiler.reset()
    leaf = torch.ones(2, requires_grad=True)
    output = torch.compile(lambda: leaf.tanh().exp().sum(), backend="aot_eager")()
    assert compiling.dependent_inputs(output.grad_fn, 0) == [0]
    assert compiling.can_run_again(output.grad_fn)
    for _ in range(2):
        output.backward(retain_graph=True)
    torch.compiler.reset()


@pytest.mark.slow
def test_an_optimizer_steps_without_dynamo_and_is_excluded_from_graphs_later() -> None:
    code = """
import sys, torch
from gradsurg.torch_internals import compiling
before = dict(vars(torch))
param = torch.nn.Parameter(torch.ones(2, 2))
made = [value for value in vars(torch.optim).values() if isinstance(value, type)]
made = [kind for kind in made if kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")]
with compiling.without_dynamo():
    for kind in made:
        optimizer = kind([param], lr=0.5)
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
print(len(made) > 10, sorted(name for name in sys.modules if name.startswith("torch._dynamo")))
print("_dynamo" in vars(torch))

optimizer = torch.optim.SGD([param], lr=0.5)
print(torch._dynamo.__file__.endswith("__init__.py"))
add = optimizer.add_param_group.__wrapped__
print(add.__dynamo_disable is not add)
with compiling.without_dynamo():
    print(hasattr(torch._dynamo, "optimize"))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["True []", "False", "True", "True", "True"], done.stderr
