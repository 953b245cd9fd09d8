"""The global random generators of a process: torch's, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor


class GeneratorStates(TypedDict):
    """The states of all generators, as tensors and plain Python: `weights_only=True` loads them."""

    torch: Tensor
    device: Tensor | None  # CUDA's
    python: tuple[Any, ...]  # Any: as random.getstate() returns
    numpy: dict[str, Any]  # Any: as numpy returns, with its array as a list


def seed(number: int) -> None:
    """Seed all generators; a seed has up to 64 bits."""
    torch.manual_seed(number)
    random.seed(number)
    high, low = divmod(number, 2**32)
    np.random.seed([low, high] if high else low)


def get_states(device: torch.device | None = None) -> GeneratorStates:
    """Return the states of all generators, also of `device` if it is a CUDA device."""
    on_cuda = device is not None and device.type == "cuda"
    numpy: Any = np.random.get_state(legacy=False)
    numpy["state"] |= {"key": numpy["state"]["key"].tolist()}
    return GeneratorStates(
        torch=torch.get_rng_state(),
        device=torch.cuda.get_rng_state(device) if on_cuda and device is not None else None,
        python=random.getstate(),
        numpy=numpy,
    )


def set_states(states: GeneratorStates, device: torch.device | None = None) -> None:
    """Set all generators to earlier states."""
    torch.set_rng_state(states["torch"])
    if states["device"] is not None and device is not None:
        torch.cuda.set_rng_state(states["device"], device)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Restore all generators when the block ends."""
    states = get_states(device)
    try:
        yield
    finally:
        set_states(states, device)


@contextmanager
def untouched(who: str, device: torch.device, way_out: str) -> Iterator[None]:
    """Raise RuntimeError if the block draws from a global generator: runs that are compared would
    no longer have the same batches and the same dropout.
    """
    before = _fingerprint(device)
    yield
    if _fingerprint(device) != before:
        raise RuntimeError(
            f"{who} drew from a global random generator, which training uses too: the arms of a "
            f"comparison would no longer have the same random numbers. {way_out}"
        )


def _fingerprint(device: torch.device) -> tuple[object, ...]:
    on_cuda = device.type == "cuda"
    name, keys, *position = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        torch.cuda.get_rng_state(device).numpy().tobytes() if on_cuda else b"",
        random.getstate(),
        (name, np.asarray(keys).tobytes(), *position),
    )
