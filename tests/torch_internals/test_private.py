"""Private objects of PyTorch that are missing are reported by name, and only when they are used."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradsurg.torch_internals import lookup, needs, private

PACKAGE = Path(__file__).parents[2] / "gradsurg"
GONE = r"gradsurg uses torch\.nn\.Module\._gone, which torch 9\.1 lacks: install a version"


@pytest.fixture
def _other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1")


@pytest.mark.usefixtures("_other_version")
def test_a_missing_object_is_named_with_the_version_when_it_is_used() -> None:
    gone = private("torch.nn:Module._gone")
    decorated = needs("torch.nn:Module._buffers", "torch.nn:Module._gone")(lambda: None)
    for use in (gone, decorated, lambda: gone.__code__, lambda: lookup("torch.nn:Module._gone")):
        with pytest.raises(RuntimeError, match=GONE):
            use()
    with pytest.raises(RuntimeError, match=r"gradsurg uses torch\._gone\.Thing, which torch 9\.1"):
        private("torch._gone:Thing")()


def test_an_object_that_exists_is_returned_as_it_is() -> None:
    def function() -> None: ...

    assert private("torch.nn:Module._call_impl") is torch.nn.Module._call_impl
    assert lookup("torch.optim:Optimizer.step") is torch.optim.Optimizer.step
    assert needs("torch.nn:Module._parameters")(function) is function  # declared by the class
    assert needs("torch.amp:GradScaler._per_optimizer_states")(function) is function  # __init__
    assert needs("torch.nn:Module._call_impl.inner")(function) is function  # a local function


def paths() -> Iterator[str]:
    """The paths that the package gives to `private`, `lookup`, `needs` and `exists`."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="private" | "lookup" | "needs" | "exists"), args=args
                ):
                    yield from (str(arg.value) for arg in args if isinstance(arg, ast.Constant))


@pytest.mark.parametrize("path", sorted(set(paths())))
def test_every_object_that_gradsurg_uses_exists_in_this_version(path: str) -> None:
    needs(path)(lambda: None)()


def test_gradsurg_works_without_objects_that_it_does_not_use() -> None:
    code = """
import torch
del torch._C._autograd._top_saved_tensors_default_hooks, torch._foreach_norm
del torch.nn.parallel.DistributedDataParallel._get_active_ddp_module
import gradsurg as gs
from gradsurg.torch_internals import autograd

for name in dir(gs):
    getattr(gs, name)
tensor = torch.ones(2, requires_grad=True)
gs.hook(tensor, gs.Clip(0.5))
tensor.sum().backward()
print(tensor.grad.tolist())
try:
    autograd.saved_tensor_hooks()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    grad, error = done.stdout.splitlines()
    assert grad == "[0.5, 0.5]"
    assert error.startswith("gradsurg uses torch._C._autograd._top_saved_tensors_default_hooks, ")
    assert f"torch {torch.__version__} lacks" in error
