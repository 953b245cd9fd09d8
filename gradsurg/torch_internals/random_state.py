"""The generators of random numbers that a whole process shares: torch's, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor


class Generators(TypedDict):
    """Their states, of tensors and plain Python alone: `torch.load(weights_only=True)` reads it."""

    torch: Tensor
    device: Tensor | None  # CUDA's
    python: tuple[Any, ...]  # Any: as random.getstate() says
    numpy: dict[str, Any]  # Any: as numpy says, its array as a list


def seed(number: int) -> None:
    """Have all of them begin at a seed of up to 64 bits."""
    torch.manual_seed(number)
    random.seed(number)
    high, low = divmod(number, 2**32)
    np.random.seed([low, high] if high else low)


def generators(device: torch.device | None = None) -> Generators:
    """Where they are now; `device` is the one that is computed on besides the CPU."""
    on_cuda = device is not None and device.type == "cuda"
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"] |= {"key": numpy["state"]["key"].tolist()}
    return Generators(
        torch=torch.get_rng_state(),
        device=torch.cuda.get_rng_state(device) if on_cuda and device is not None else None,
        python=random.getstate(),
        numpy=numpy,
    )


def put_back(states: Generators, device: torch.device | None = None) -> None:
    """Have them be where they were."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device is not None:
        torch.cuda.set_rng_state(states["device"], device)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


@contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn in this block, they are where they were when it ends."""
    states = generators(device)
    try:
        yield
    finally:
        put_back(states, device)
