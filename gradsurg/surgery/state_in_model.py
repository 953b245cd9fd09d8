"""Store the state of a surgery in `model.state_dict()`."""

import io
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from gradsurg.effects.ledger import SurgeryWarning

KEY = "_gradsurg"
"""The key of the state, after the prefix of the model."""

_models_with_state: WeakSet[nn.Module] = WeakSet()


class HasState(Protocol):
    """An object with a state, as a Surgery."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


def store_in_model(owner: HasState, model: nn.Module, stack: ExitStack) -> None:
    """Save and load the state with that of the model until `stack` is closed.

    Raises ValueError if the model has another surgery's state already.
    """
    if model in _models_with_state:
        raise ValueError(
            "in_state_dict: this model's state_dict has another surgery's state already, and "
            f"there is one '{KEY}'; put all interventions into one surgery"
        )
    _models_with_state.add(model)
    stack.callback(_models_with_state.discard, model)
    # A copy of the model has the same hooks: they are of this model alone, and keep nothing alive.
    held, held_owner = ref(model), ref(owner)
    saving = model.register_state_dict_post_hook(_saving(held, held_owner))
    stack.callback(saving.remove)
    loading = model.register_load_state_dict_pre_hook(_loading(held, held_owner))
    stack.callback(loading.remove)


def packed(state: Mapping[str, object]) -> Tensor:
    """Pack a state into a tensor of bytes: a model's state_dict has tensors only."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor, device: torch.device | None = None) -> dict[str, object]:
    """Unpack a state, with its tensors on `device` (None: the device they were saved from)."""
    buffer = io.BytesIO(data.cpu().numpy().tobytes())
    return torch.load(buffer, map_location=device, weights_only=True)


def _saving(model: ref[nn.Module], owner: ref[HasState]) -> Callable[..., None]:
    def hook(
        module: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, metadata: object
    ) -> None:
        own = owner()
        if own is not None and module is model():
            state_dict[prefix + KEY] = packed(own.state_dict())

    return hook


def _loading(model: ref[nn.Module], owner: ref[HasState]) -> Callable[..., None]:
    said: list[str] = []

    def hook(
        module: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, *args: object
    ) -> None:
        own = owner()
        if own is None or module is not model():
            return
        # Taken out of PyTorch's own copy: what was given is left as it is.
        data = state_dict.pop(prefix + KEY, None)
        if data is not None:
            own.load_state_dict(unpacked(data, _device(module)))
        elif not said:
            said.append(KEY)
            warnings.warn(
                f"in_state_dict: the loaded state has no '{prefix + KEY}': the model is restored, "
                "the surgery keeps its present state",
                SurgeryWarning,
                stacklevel=2,
            )

    return hook


def _device(module: nn.Module) -> torch.device | None:
    """The device of a model's parameters, if they share one: its gradients are there too."""
    devices = {tensor.device for tensor in module.parameters()}
    return devices.pop() if len(devices) == 1 else None
