"""Operate on one tensor or one node, without a model."""

from itertools import count
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradsurg.effects import Effects
from gradsurg.gate import Gate, Operation
from gradsurg.intervention import GradCallable, Intervention, labels_of
from gradsurg.ledger import Ledger
from gradsurg.sites.base import through
from gradsurg.transforms.base import Transform
from gradsurg.triggers.always import Always
from gradsurg.triggers.base import Clock

_HOOKS = count()  # tells hooked places apart: two of them draw different noise


def hook(place: Tensor | Node, transform: Transform | GradCallable) -> RemovableHandle:
    """Put a transform on one tensor's gradient, or on what enters one autograd node.

    The handle's `remove()` takes it off; the handle is also a context manager. No step is counted
    here: `context.step` stays 0; the n-th place hooked in a process draws the n-th noise. Raises
    ValueError for a group transform.
    """
    if not isinstance(place, Tensor | Node):
        raise TypeError(f"place: must be a tensor or a node of the graph, found {place!r}")
    intervention = Intervention(transform)
    if intervention.operator.scope == "group":
        raise ValueError(f"{transform!r} needs all gradients of a group at once; a hook has one")
    if intervention.operator.needs_value and not isinstance(place, Tensor):
        raise ValueError(f"{transform!r} needs the value whose gradient it gets; a node has none")
    links = list(zip(labels_of(intervention), intervention.links, strict=True))
    operation = Operation(links, Always(), Effects(every=0), {}, Clock())
    ledger = Ledger()
    if isinstance(place, Tensor):
        gate = Gate(operation, ledger.enter("hook", f"tensor{next(_HOOKS)}"), ref(place))
        return place.register_hook(gate.hook)
    gates = [
        Gate(operation, ledger.enter("hook", f"{place.name()}{next(_HOOKS)}.{index}"), None).hook
        for index in range(len(place._input_metadata))
    ]
    return place.register_prehook(lambda grads: through(gates, grads))
