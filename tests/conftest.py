"""Fixtures: the command in this process, in a temporary folder with a user's module."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; subprocesses inherit it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # printed text is folded to it

import pytest
import torch
from torch import distributed

from gradsurg.torch_internals import compiling

THEIRS = """
import sys

from torch import nn

calls = 0


def halve(grad):
    return grad / 2


def total(grad):
    return grad.sum() if _is_training() else grad


def refuses(grad):
    raise RuntimeError("not this one")


def makes_nan(grad):
    return grad * float("nan") if len(grad) == 10 else grad


def interrupts(grad):
    return _late(grad, KeyboardInterrupt())


def fails(grad):
    return _late(grad, RuntimeError("the disk\\nis on fire"))


def _is_training():  # and not in the step that is tried before
    frame = sys._getframe()
    while frame and frame.f_code.co_name != "_train":
        frame = frame.f_back
    return frame is not None


def _late(grad, error):
    global calls
    calls += _is_training()
    if calls > 60 and _is_training():
        raise error
    return grad / 2


def make_model(shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))
"""


gc.disable()  # until all tests are collected: a million objects, and no garbage among them


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` all but each n-th case of a test that has the mark `one_in(n)`."""
    cases: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker("full")
            cases[test] += 1


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collections, which else take a second each."""
    gc.enable()
    if "hypothesis" in sys.modules:  # it looks for referrers when it is imported
        gc.freeze()


@dataclass(frozen=True)
class Ended:
    """Output and exit code of a command."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Here:
    """The command, run in this process in the folder with `their_module`."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Ended:
        # Imported here, so that no test of a transform waits for Hydra.
        from gradsurg import run

        self.monkeypatch.setattr(sys, "argv", ["run.py", *words])
        self.capsys.readouterr()
        code = 0
        try:
            run.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        out, err = self.capsys.readouterr()
        return Ended(code, out, err)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that no test uses data sets that the user has fetched."""
    path = tmp_path_factory.getbasetemp() / "no-data-yet"
    monkeypatch.setenv("GRADSURG_DATA", str(path))
    return path


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Reset `torch.compile` after each test, so that compiled code causes no later warnings."""
    yield
    if compiling.has_compiled():
        torch.compiler.reset()


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """Leave older objects out of garbage collections, which else take a second each."""
    gc.freeze()
    yield
    if "hypothesis" not in sys.modules:  # else the collected tests are frozen, and stay so
        gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave all to reference counts."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, on whose number the rounding of sums depends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it contains a user's module and nothing else."""
    (tmp_path / "their_module.py").write_text(THEIRS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("their_module", "mine"):  # those of earlier tests
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """The command in this process, in an empty folder: what it prints, and says on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # errors come through as they are
    monkeypatch.syspath_prepend(tmp_path)

    # Imported here, so that no test of a transform waits for Hydra.
    from gradsurg import run

    def call(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["gradsurg.run", *words])
        run.main()
        return capsys.readouterr()

    yield call
    for name in ("mine", "fragile"):
        sys.modules.pop(name, None)
