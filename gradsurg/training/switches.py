"""How steps are computed: gradients in parts, in half precision, by a compiled model."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler

from gradsurg.sites.base import Selector

Precision = Literal["float32", "bfloat16", "float16"]
Backend = Literal["eager", "aot_eager", "inductor"]

NOISE = (
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.jit.script_method` is deprecated",
)
"""What PyTorch's compiler warns of about its own doings."""


@dataclass(frozen=True)
class Switches:
    """How steps are computed, whatever the task and the model. `compile` is a backend."""

    accumulate: int = 1
    precision: Precision = "float32"
    compile: Backend | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that a forward is computed in where that is not the model's own."""
        match self.precision:
            case "float32":
                return None
            case "bfloat16":
                return torch.bfloat16
            case "float16":
                return torch.float16

    def scaler(self, device: torch.device) -> GradScaler | None:
        """What scales the loss, where gradients could be too small for the precision."""
        return GradScaler(device.type) if self.precision == "float16" else None

    @contextmanager
    def compiled(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model to train with, in a block inside that of the surgery: compiled code does not
        see hooks that come later. What was compiled is forgotten when the block ends.
        """
        if self.compile is None:
            yield model
            return
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            # PyTorch compiles the same code a few times only, then it runs uncompiled: a process
            # has many runs.
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            compiled: Any = torch.compile(model, backend=self.compile)  # Any: it says a function
            yield compiled


def check_compiled(selector: Selector) -> None:
    """Refuse places that are not in a compiled model what they are in an eager one."""
    for kind in selector.kinds:
        if kind.compile_limit:
            raise ValueError(
                f"{type(kind).__name__} cannot act in a compiled model: {kind.compile_limit}. Choose "
                "Parameters, Outputs, Inputs or Activations, or compile=false"
            )
