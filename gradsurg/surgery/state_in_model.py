"""A surgery's state that travels inside `model.state_dict()`."""

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
"""Under which it stands, behind the prefix that the model has in what is saved."""

_carrying: WeakSet[nn.Module] = WeakSet()


class Traveller(Protocol):
    """What has a state to carry."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


def travel(traveller: Traveller, model: nn.Module, stack: ExitStack) -> None:
    """Let the state go with that of the model, out and in, until `stack` is closed.

    Raises ValueError if the model carries another one already.
    """
    if model in _carrying:
        raise ValueError(
            "in_state_dict: this model's state_dict carries another surgery's state already, and "
            f"there is one '{KEY}'; put all interventions into one surgery"
        )
    _carrying.add(model)
    stack.callback(_carrying.discard, model)
    # A copy of the model has the same hooks: they are of this model alone, and keep nothing alive.
    held, carried = ref(model), ref(traveller)
    saving = model.register_state_dict_post_hook(_saving(held, carried))
    stack.callback(saving.remove)
    loading = model.register_load_state_dict_pre_hook(_loading(held, carried))
    stack.callback(loading.remove)


def packed(state: Mapping[str, object]) -> Tensor:
    """A state as bytes, for what is saved with a model is taken to be tensors."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(data: Tensor, device: torch.device | None = None) -> dict[str, object]:
    """The state again, its tensors on `device` (None: on those that they were saved from)."""
    buffer = io.BytesIO(data.cpu().numpy().tobytes())
    return torch.load(buffer, map_location=device, weights_only=True)


def _saving(model: ref[nn.Module], traveller: ref[Traveller]) -> Callable[..., None]:
    def hook(
        module: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, metadata: object
    ) -> None:
        own = traveller()
        if own is not None and module is model():
            state_dict[prefix + KEY] = packed(own.state_dict())

    return hook


def _loading(model: ref[nn.Module], traveller: ref[Traveller]) -> Callable[..., None]:
    said: list[str] = []

    def hook(
        module: nn.Module, state_dict: MutableMapping[str, Tensor], prefix: str, *args: object
    ) -> None:
        own = traveller()
        if own is None or module is not model():
            return
        # Taken out of PyTorch's own copy: what was given is left as it is.
        data = state_dict.pop(prefix + KEY, None)
        if data is not None:
            own.load_state_dict(unpacked(data, _device(module)))
        elif not said:
            said.append(KEY)
            warnings.warn(
                f"in_state_dict: what was loaded has no '{prefix + KEY}': the model is as it was "
                "saved, the surgery goes on as it is",
                SurgeryWarning,
                stacklevel=2,
            )

    return hook


def _device(module: nn.Module) -> torch.device | None:
    """Where a model is, if it is in one place: there its gradients meet their states."""
    devices = {tensor.device for tensor in module.parameters()}
    return devices.pop() if len(devices) == 1 else None
