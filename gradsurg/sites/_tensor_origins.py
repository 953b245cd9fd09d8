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

LOOKS = {"AsStrided", "Detach", "Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy"}
LOOKS |= {"Transpose", "Unsqueeze", "UnsafeView", "View"}
"""The nodes that give a tensor in another shape or dtype."""

MARK = "gradsurg.weight"  # in the metadata of a node that has made what a module takes as a weight
OLD = ("_orig", "_g", "_v")  # how the parameters behind a weight end in torch.nn.utils' old ways

Sort = Literal["parameter", "buffer", "activation"]


class Sorts:
    """Tells the sort of a tensor, for one model.

    Parameters are also views of them and what autocast makes of them, what stands in their place
    during a `torch.func.functional_call`, and the weights that a parametrization makes, with all
    that is made on the way to them.
    """

    def __init__(self, model: nn.Module, stack: ExitStack) -> None:
        self._model = ref(model)  # a graph keeps its hooks, and with them this
        self._now = _Now()
        self._weights = WeakTensorKeyDictionary()
        self._known: _Known | None = None
        self._attributes: WeakKeyDictionary[nn.Module, list[_Attributes]] = WeakKeyDictionary()
        lists = [own for own in model.modules() if isinstance(own, ParametrizationList)]
        self._makers = WeakSet(inner for own in lists for inner in own.modules())
        stack.callback(self._attributes.clear)
        stack.callback(model.register_forward_pre_hook(self._begin(), prepend=True).remove)
        for own in lists:
            self._follow(own, stack)

    def makes(self, module: nn.Module) -> bool:
        """Whether a module does nothing but make weights of parameters."""
        return module in self._makers

    def look(self, module: nn.Module | None = None) -> None:
        """Note what stands in the place of parameters now, in a module or in the whole model."""
        module = module or self._model()
        if module is None:
            return
        if module not in self._attributes:
            self._attributes[module] = [_Attributes.of(own) for own in module.modules()]
        for own in self._attributes[module]:
            for tensor in own.params.values():
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    self._note(tensor)
            for name in own.old:
                if isinstance(made := own.all.get(name), Tensor):
                    self._note(made)

    def sort(self, tensor: Tensor) -> Sort:
        """What a tensor is that has just been saved."""
        own = tensor._base if tensor._base is not None else tensor
        if self._now.making or isinstance(own, nn.Parameter) or own in self._weights:
            return "parameter"
        if tensor.grad_fn is not None or own.grad_fn is not None:
            # What a parametrization gives may itself be a view.
            looks = self._looks_at_one(tensor.grad_fn) or self._looks_at_one(own.grad_fn)
            return "parameter" if looks else "activation"
        # What a transform of torch.func or a compiler computes with has no memory to look at.
        if own.requires_grad or type(own) is not Tensor or autograd.is_wrapped(own):
            return "activation"
        if self._known is None:
            self._known = _Known.of(self._model())
        known = self._known
        if (buffer := known.buffers.get(id(own))) is not None and buffer() is own:
            return "buffer"
        weights = [weight for weight in self._weights if not weight.requires_grad]
        if _memory(own) in known.memories | {_memory(weight) for weight in weights}:
            return "parameter"
        frozen = [weight() for weight in known.frozen.get(own.shape, ())]
        same = any(_is_cast(own, of) for of in [*frozen, *weights] if of is not None)
        return "parameter" if same else "activation"

    def _looks_at_one(self, node: Node | None) -> bool:
        while node is not None:
            if MARK in _notes(node):
                return True
            if plain(node.name()).removesuffix("Backward") not in LOOKS:
                break
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        return isinstance(leaf, nn.Parameter) or (leaf is not None and leaf in self._weights)

    def _note(self, weight: Tensor) -> None:
        self._weights[weight] = None
        if weight.grad_fn is not None:
            _notes(weight.grad_fn)[MARK] = True

    # Functions, not methods: a model is copied with its hooks, and a method with its object.

    def _begin(self) -> Callable[..., None]:
        @compiling.untraced
        def begin(module: nn.Module, args: tuple[object, ...]) -> None:
            if module is self._model():
                self._known = None
                self._now.making = 0
                self.look()

        return begin

    def _follow(self, own: ParametrizationList, stack: ExitStack) -> None:
        """Note what a parametrization makes, and when it does."""

        @compiling.untraced
        def enter(module: nn.Module, args: tuple[object, ...]) -> None:
            self._now.making += self.makes(module)

        @compiling.untraced
        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            if self.makes(module):
                self._now.making = max(self._now.making - 1, 0)
                if isinstance(output, Tensor):
                    self._note(output)

        stack.callback(own.register_forward_pre_hook(enter).remove)
        stack.callback(own.register_forward_hook(leave, always_call=True).remove)


class _Now(threading.local):
    """How many parametrizations are running in this thread, inside one another."""

    def __init__(self) -> None:
        self.making = 0


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Where a module keeps its parameters, and what it computes of them: the names of these."""

    params: dict[str, nn.Parameter | None]
    all: dict[str, object]
    old: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        names = {name.removesuffix(end) for name in module._parameters for end in OLD}
        return cls(module._parameters, vars(module), tuple(names - set(module._parameters)))


@dataclass(frozen=True, slots=True)
class _Known:
    """The buffers of a model, the memory of its parameters, and by shape those that are frozen."""

    buffers: dict[int, "ref[Tensor]"] = field(default_factory=dict)
    memories: set[int] = field(default_factory=set)
    frozen: dict[torch.Size, "list[ref[Tensor]]"] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module | None) -> "_Known":
        known = cls()
        for buffer in model.buffers() if model is not None else ():
            known.buffers[id(buffer)] = ref(buffer)
        for param in model.parameters() if model is not None else ():
            if type(param) in (Tensor, nn.Parameter) and not autograd.is_wrapped(param):
                known.memories.add(_memory(param))
                if not param.requires_grad:
                    known.frozen.setdefault(param.shape, []).append(ref(param))
        known.memories.discard(0)  # of a meta tensor, or an empty one
        return known


def _notes(node: Node) -> dict[str, object]:
    notes: Any = node.metadata  # Any: PyTorch's type calls it a method
    return notes


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _is_cast(tensor: Tensor, weight: Tensor) -> bool:
    """Whether it is a weight in another dtype: without a graph, its values alone say so."""
    alike = tensor.shape == weight.shape and tensor.device == weight.device and not tensor.is_meta
    return (
        alike
        and tensor.dtype != weight.dtype
        and bool(torch.equal(weight.detach().to(tensor.dtype), tensor))
    )
