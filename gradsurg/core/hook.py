"""`gs.hook`: apply a transform at one tensor or one autograd node, without a model."""

import warnings
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradsurg.core.attachment import Attachment
from gradsurg.core.intervention import GradCallable, Intervention, labels_of, lack
from gradsurg.core.operation import Operation
from gradsurg.core.site_hook import SiteHook
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger, SurgeryWarning
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need, Transform, as_transform

_numbers = count()  # of the hooked places: random numbers are seeded by (seed, site, step)


class Hooked:
    """The handle of a hook: `remove()`, and the end of a `with` block, remove the hook.

    The block warns if no gradient has passed by its end.
    """

    def __init__(self, handle: RemovableHandle, ledger: Ledger, label: str) -> None:
        self._handle = handle
        self._ledger = ledger
        self._label = label

    def remove(self) -> None:
        """Remove the hook; further calls do nothing."""
        self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
        if error is None and not any(entry.calls for entry in self._ledger):
            warnings.warn(
                f"{self._label}: it was hooked, and no gradient passed before the block "
                "ended. Call backward() inside the block, or remove() after it",
                SurgeryWarning,
                stacklevel=2,
            )


def hook(place: Tensor | Node, transform: Transform | GradCallable) -> Hooked:
    """Apply a transform to the gradient of a tensor, or to the gradients entering a node.

    Return a handle, which is also a context manager; its `remove()` removes the hook. Steps are not
    counted: `context.step` stays 0. Hooks are numbered, and the random numbers of each depend on
    how many the process has made before. Raises ValueError for a group transform.
    """
    if not isinstance(place, Tensor | Node):
        kind = "None" if place is None else f"a {type(place).__name__}"
        raise TypeError(f"place: must be a tensor or a node of the graph, found {kind}")
    wrapped = as_transform(transform)
    provided: set[Need] = {"value"} if isinstance(place, Tensor) else set()
    if isinstance(wrapped, Transform) and (lacks := sorted(wrapped.needs - provided)):
        kind = "tensor" if isinstance(place, Tensor) else "node"
        raise ValueError(f"{wrapped!r}: {lack(f'gs.hook at a {kind}', lacks[0])}")
    intervention = Intervention(wrapped)
    if intervention.scope == "group":
        raise ValueError(f"use gs.Surgery: {transform!r} needs several gradients, a hook has one")
    # A hook works within an attachment, which needs a model: this one is never called.
    attachment = Attachment(nn.Identity(), Effects(every=0))
    operation = Operation(attachment, intervention, labels_of(intervention))
    if isinstance(place, Tensor):
        call, held = SiteHook(operation, f"tensor{next(_numbers)}").call, ref(place)
        # `held` is weak: a tensor whose hook held it would be freed by the garbage collector alone.
        handle = place.register_hook(lambda grad: call(grad, held()))
        return Hooked(handle, attachment.ledger, operation.label)
    name, outputs = place.name(), range(len(autograd.outputs_of(place)))
    calls = [SiteHook(operation, f"{name}{next(_numbers)}.{index}").call for index in outputs]

    def prehook(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        results = [call(grad) for call, grad in zip(calls, grads, strict=True)]
        return tuple(
            grad if result is None else result for result, grad in zip(results, grads, strict=True)
        )

    return Hooked(place.register_prehook(prehook), attachment.ledger, operation.label)
