"""How steps are computed: gradients in parts, in half precision, by a compiled model."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import GradScaler

from gradsurg import engine
from gradsurg.sites._untouched import is_ours
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
        """The model to train with, in a block inside that of the surgery.

        gradsurg's own hooks run as they are, between what is compiled: Dynamo would trace their
        Python and lose what they remember. What was compiled is forgotten when the block ends.
        """
        if self.compile is None:
            yield model
            return
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for message in NOISE:
                warnings.filterwarnings("ignore", message)
            for module in model.modules():
                for table in (module._forward_pre_hooks, module._forward_hooks):
                    for key, hook in table.items():
                        if is_ours(hook):
                            stack.callback(partial(_put_back, table, key, hook))
                            table[key] = engine.untraced(hook)
            # PyTorch compiles the same code a few times only, then it runs uncompiled: a process
            # has many runs.
            torch.compiler.reset()
            stack.callback(torch.compiler.reset)
            compiled: Any = torch.compile(
                model, backend=self.compile
            )  # Any: PyTorch says a function
            yield compiled


def check_compiled(selector: Selector) -> None:
    """Refuse places that are not in a compiled model what they are in an eager one."""
    for kind in selector.kinds:
        if kind.uncompiled:
            raise ValueError(
                f"{type(kind).__name__} cannot act in a compiled model: {kind.uncompiled}. Choose "
                "Parameters, Outputs, Inputs or Values, or compile=false"
            )


def _put_back(
    table: dict[int, Callable[..., Any]], key: int, hook: Callable[..., Any]
) -> None:  # Any: a hook
    if key in table:
        table[key] = hook
