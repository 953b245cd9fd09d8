"""Tell whether a saved tensor is a parameter, a buffer or an activation."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurg.sites.graph_tracer import plain
from gradsurg.torch_internals import autograd, compiling

VIEWS = {"AsStrided", "Detach", "Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy"}
VIEWS |= {"Transpose", "Unsqueeze", "UnsafeView", "View"}
"""The nodes that return their input in another shape or dtype."""

MARK = "gradsurg.weight"  # metadata key of a node that computes the weight of a module
OLD = (
    "_orig",
    "_g",
    "_v",
)  # parameter suffixes of the deprecated torch.nn.utils reparametrizations

Origin = Literal["parameter", "buffer", "activation"]


class TensorOrigins:
    """Tells the origin of tensors in the calls of one model.

    Parameters include their views and autocast casts, the tensors that replace them during a
    `torch.func.functional_call`, and the weights computed by a parametrization with all tensors
    saved on the way.
    """

    def __init__(self, model: nn.Module, stack: ExitStack) -> None:
        self._model = ref(model)  # a graph holds its hooks, and they hold this object
        self._thread = _Thread()
        self._weights = WeakTensorKeyDictionary()
        self._known: _KnownTensors | None = None
        self._attributes: WeakKeyDictionary[nn.Module, list[_Attributes]] = WeakKeyDictionary()
        lists = [part for part in model.modules() if isinstance(part, ParametrizationList)]
        self._parametrizations = WeakSet(inner for part in lists for inner in part.modules())
        stack.callback(self._attributes.clear)
        stack.callback(model.register_forward_pre_hook(self._begin(), prepend=True).remove)
        for part in lists:
            self._follow(part, stack)

    def is_parametrization(self, module: nn.Module) -> bool:
        """Return whether a module only computes weights from parameters."""
        return module in self._parametrizations

    def update(self, module: nn.Module | None = None) -> None:
        """Record the tensors now in place of parameters, in a module or in the whole model."""
        module = module or self._model()
        if module is None:
            return
        if module not in self._attributes:
            self._attributes[module] = [_Attributes.of(part) for part in module.modules()]
        for attributes in self._attributes[module]:
            for tensor in attributes.params.values():
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    self._add_weight(tensor)
            for name in attributes.old:
                if isinstance(weight := attributes.all.get(name), Tensor):
                    self._add_weight(weight)

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor that has just been saved."""
        base = tensor._base if tensor._base is not None else tensor
        if self._thread.running or isinstance(base, nn.Parameter) or base in self._weights:
            return "parameter"
        if tensor.grad_fn is not None or base.grad_fn is not None:
            # The result of a parametrization may itself be a view.
            views = self._is_view_of_weight(tensor.grad_fn) or self._is_view_of_weight(base.grad_fn)
            return "parameter" if views else "activation"
        # Tensors of torch.func or of a compiler have no memory to compare.
        if base.requires_grad or type(base) is not Tensor or autograd.is_wrapped(base):
            return "activation"
        if self._known is None:
            self._known = _KnownTensors.of(self._model())
        known = self._known
        if (buffer := known.buffers.get(id(base))) is not None and buffer() is base:
            return "buffer"
        weights = [weight for weight in self._weights if not weight.requires_grad]
        if _address(base) in known.addresses | {_address(weight) for weight in weights}:
            return "parameter"
        frozen = [weight() for weight in known.frozen.get(base.shape, ())]
        cast = any(_is_cast(base, of) for of in [*frozen, *weights] if of is not None)
        return "parameter" if cast else "activation"

    def _is_view_of_weight(self, node: Node | None) -> bool:
        while node is not None:
            if MARK in _metadata(node):
                return True
            if plain(node.name()).removesuffix("Backward") not in VIEWS:
                break
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        return isinstance(leaf, nn.Parameter) or (leaf is not None and leaf in self._weights)

    def _add_weight(self, weight: Tensor) -> None:
        self._weights[weight] = None
        if weight.grad_fn is not None:
            _metadata(weight.grad_fn)[MARK] = True

    # Functions, not methods: a model is deep-copied with its hooks and their bound objects.

    def _begin(self) -> Callable[..., None]:
        @compiling.untraced
        def begin(module: nn.Module, args: tuple[object, ...]) -> None:
            if module is self._model():
                self._known = None
                self._thread.running = 0
                self.update()

        return begin

    def _follow(self, part: ParametrizationList, stack: ExitStack) -> None:
        """Record the weight that a parametrization computes, and when it runs."""

        @compiling.untraced
        def enter(module: nn.Module, args: tuple[object, ...]) -> None:
            self._thread.running += self.is_parametrization(module)

        @compiling.untraced
        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if self.is_parametrization(module):
                self._thread.running = max(self._thread.running - 1, 0)
                if isinstance(output, Tensor):
                    self._add_weight(output)

        stack.callback(part.register_forward_pre_hook(enter).remove)
        stack.callback(part.register_forward_hook(leave, always_call=True).remove)


class _Thread(threading.local):
    """The number of nested parametrizations that are running in this thread."""

    def __init__(self) -> None:
        self.running = 0


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The parameters of a module, and the names of attributes computed from them (`old`)."""

    params: dict[str, nn.Parameter | None]
    all: dict[str, object]
    old: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        names = {name.removesuffix(end) for name in module._parameters for end in OLD}
        return cls(module._parameters, vars(module), tuple(names - set(module._parameters)))


@dataclass(frozen=True, slots=True)
class _KnownTensors:
    """The buffers of a model, the addresses of its parameters, and the frozen ones by shape."""

    buffers: dict[int, "ref[Tensor]"] = field(default_factory=dict)
    addresses: set[int] = field(default_factory=set)
    frozen: dict[torch.Size, "list[ref[Tensor]]"] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module | None) -> "_KnownTensors":
        known = cls()
        for buffer in model.buffers() if model is not None else ():
            known.buffers[id(buffer)] = ref(buffer)
        for param in model.parameters() if model is not None else ():
            if type(param) in (Tensor, nn.Parameter) and not autograd.is_wrapped(param):
                known.addresses.add(_address(param))
                if not param.requires_grad:
                    known.frozen.setdefault(param.shape, []).append(ref(param))
        known.addresses.discard(0)  # of a meta tensor, or an empty one
        return known


def _metadata(node: Node) -> dict[str, object]:
    metadata: Any = node.metadata  # Any: PyTorch's type declares a method
    return metadata


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_cast(tensor: Tensor, weight: Tensor) -> bool:
    """Return whether a tensor equals a weight in another dtype: a frozen cast has no graph."""
    alike = tensor.shape == weight.shape and tensor.device == weight.device and not tensor.is_meta
    return (
        alike
        and tensor.dtype != weight.dtype
        and bool(torch.equal(weight.detach().to(tensor.dtype), tensor))
    )
