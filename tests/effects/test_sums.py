"""The kernel against the operations that it replaces, and the fallback without it."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gradsurg.effects.sums import CHUNK, NUM_SUMS, SLOW, add_on_cpu, cpu_kernels, eager_sums

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def pair(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=generator).to(dtype)
    after = (before * 1.5).clamp(-1, 1)
    after[: size // 3] *= -1
    after[size // 3 : size // 2] = before[size // 3 : size // 2]
    after[-size // 9 :] = 0
    return before, after


def on_cpu(before: Tensor, after: Tensor) -> np.ndarray:
    result = torch.zeros(2, NUM_SUMS, dtype=torch.float64)
    add_on_cpu(before, after, result, 1)
    assert not result[0].any()
    return result[1].numpy()


def oracle(before: Tensor, after: Tensor) -> np.ndarray:
    return eager_sums(before.double(), after.double()).numpy()


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    cpu_kernels.cache_clear()
    yield
    cpu_kernels.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 2049, 3 * CHUNK + 5])
def test_the_kernel_gives_the_eager_sums_to_a_millionth(size: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba", reason="without numba there is no kernel")
    assert set(cpu_kernels()) == {torch.float32, torch.float64}
    before, after = pair(size, dtype)
    assert on_cpu(before, after) == pytest.approx(oracle(before, after), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_numba_the_sums_are_the_same_and_a_line_says_so_once(
    dtype: torch.dtype, monkeypatch, caplog, fresh_kernels: None
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    before, after = pair(2 * CHUNK + 5, dtype)
    with caplog.at_level(logging.WARNING, logger="gradsurg"):
        for _ in range(2):
            assert on_cpu(before, after) == pytest.approx(oracle(before, after), rel=1e-6)
    (record,) = caplog.records
    assert record.getMessage() == f"{SLOW}; numba is not installed: pip install 'gradsurg[run]'"


def test_without_a_place_for_the_cache_the_sums_are_the_same(
    monkeypatch, caplog, fresh_kernels: None
) -> None:
    numba = pytest.importorskip("numba", reason="without numba there is no cache")

    def unwritable(*args: object, **kwargs: object) -> None:
        raise RuntimeError("cannot cache function 'pair': no locator available")

    monkeypatch.setattr(numba, "cfunc", unwritable)
    before, after = pair(1000, torch.float32)
    assert on_cpu(before, after) == pytest.approx(oracle(before, after), rel=1e-6)
    assert "no locator available" in caplog.text


COMPILED = """
import re
from gradsurg.effects import sums
sums.cpu_kernels()
for compiled in sums._compiled:
    print(len(re.findall(r"fadd [a-z ]*<[0-9]+ x (float|double)>", compiled.inspect_llvm())))
"""


@pytest.mark.slow
def test_the_kernel_is_compiled_to_vector_instructions(tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="without numba there is no kernel")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},  # code from a cache has no text
        capture_output=True,
        text=True,
        check=True,
    )
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 2  # float32 and float64
    assert min(counts) >= 9  # the nine sums of a pair
