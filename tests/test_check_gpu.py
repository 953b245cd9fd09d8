"""The check of a GPU runs on the CPU too, tells which check fails, and needs a GPU by default."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def check_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("check_gpu")


def test_the_checks_pass_on_the_cpu(
    check_gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["sums", "norms", "waiting", "clip", "amp"]
    assert check_gpu.main([*names, "--device", "cpu"]) == 0
    _, heads, _, *rows = capsys.readouterr().out.splitlines()
    assert heads.split() == ["check", "result", "seconds", "figures"]
    assert [row.split()[:2] for row in rows] == [[name, "passed"] for name in names]


def test_a_failed_check_is_told_and_the_others_go_on(
    check_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = check_gpu.measured

    def wrong(before: Tensor, after: Tensor) -> Tensor:
        return real(before, after) + 1.0

    monkeypatch.setattr(check_gpu, "measured", wrong)
    assert check_gpu.main(["sums", "norms", "--device", "cpu"]) == 1
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["sums", "FAILED"]
    assert "AssertionError: plain, torch.float16" in first
    assert second.split()[:2] == ["norms", "passed"]


def test_without_a_gpu_it_says_so_in_one_line(
    check_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_gpu.main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "check_gpu: PyTorch finds no GPU for CUDA on this machine\n"


def test_an_unknown_check_is_refused(
    check_gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as found:
        check_gpu.main(["sum"])
    assert found.value.code == 2
    assert "must be one of sums, norms" in capsys.readouterr().err


@pytest.mark.full
def test_times_and_compiled_models_are_checked(check_gpu: ModuleType) -> None:
    device = torch.device("cpu")
    assert "effects every step" in check_gpu.step_times(device, rounds=2)
    assert "largest difference" in check_gpu.compiled(device)
