"""Outputs: the gradient with respect to what a module returns."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import ClassVar
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.fields import validated
from gradsurg.sites._modules import Calls, Chosen, ModuleSelector, names_of
from gradsurg.sites._nested import tensors_in
from gradsurg.sites.base import Gates, GradFn, Stage, foreign
from gradsurg.transforms.base import Scope


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: the sum over all uses of that output. Site ids are `name#call`,
    with the path of the tensor behind it where there are several: `encoder.lstm#0.1.0`. Calls are
    counted from 0 within one call of the model. Modules that return one and the same tensor (a
    container and its last child, an identity) are one site, unless it was changed in place between
    them. The recomputation of a checkpoint is not hooked again; that of a reentrant one is, for its
    forward has made no graph.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)
    has_value: ClassVar[bool] = True

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: Gates,
        stack: ExitStack,
    ) -> None:
        tensors = OwnedTensors(names_of(model), {})
        stack.callback(tensors.release)
        tensors.hook(model, stack)
        for module in self.hookable(tensors.names, gates):
            hook = _hook_output(gates, tensors, self.chosen(gates))
            stack.callback(module.register_forward_hook(hook).remove)


def _hook_output(gates: Gates, tensors: "OwnedTensors", chosen: Chosen) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        call = tensors.next(module)
        if call is None:
            return
        base = chosen(module, call)
        if base is not None:
            if isinstance(output, Tensor):
                tensors.hook_tensor(output, base, "", module, gates)
            else:
                for path, tensor in tensors_in(output):
                    tensors.hook_tensor(tensor, base, path, module, gates)

    return hook


class OwnedTensors(Calls):
    """What is known within one call of the model: also which site owns a tensor."""

    def __init__(
        self,
        names: dict[nn.Module, list[str]],
        leaves: dict[int, tuple[ref[Tensor], RemovableHandle]],
    ) -> None:
        super().__init__(names)
        self.owners: dict[int, tuple[ref[Tensor], int, str]] = {}
        self.leaves = leaves  # of all threads

    def begin(self) -> None:
        self.owners.clear()

    def hook_tensor(
        self, tensor: Tensor, base: str, path: str, module: nn.Module, gates: Gates
    ) -> None:
        """Hook a tensor at the site `base` + `path`, unless another site has it already."""
        if not tensor.is_floating_point():
            return
        site = base + path
        if path:
            gates.forget(base)
        owner = self.owner(tensor)
        if owner is not None:
            gates.expect(owner, [site])
        elif not tensor.requires_grad:
            gates.expect(site, skipped="needs no gradient")
            self.without_graph(module)
        else:
            self.own(tensor, site)
            if tensor._backward_hooks:
                gates.expect(site, foreign=foreign(tensor._backward_hooks))
            gate = gates.gate(site)
            if gates.needs_value:
                gate = partial(gate, value=value_of(tensor))
            self.register(tensor, gate)

    def owner(self, tensor: Tensor) -> str | None:
        held, version, site = self.owners.get(id(tensor), (None, 0, ""))
        # An id is used again once its tensor is gone.
        if held is None or held() is not tensor:
            return None
        # What was changed in place is another value, with another gradient.
        return site if version == tensor._version else None

    def own(self, tensor: Tensor, site: str) -> None:
        self.owners[id(tensor)] = ref(tensor), tensor._version, site

    def register(self, tensor: Tensor, gate: GradFn) -> None:
        """Hook a tensor. A leaf, as a parameter that a module returns, outlives the graph: once."""
        if not tensor.is_leaf:
            tensor.register_hook(gate)
            return
        for key in [key for key, (held, _) in self.leaves.items() if held() is None]:
            del self.leaves[key]
        if id(tensor) not in self.leaves:
            self.leaves[id(tensor)] = ref(tensor), tensor.register_hook(gate)

    def release(self) -> None:
        """Unhook the leaves; hooks on other tensors end with their graph."""
        for _, handle in self.leaves.values():
            handle.remove()


def value_of(tensor: Tensor) -> Tensor:
    """What a hook on a tensor may hold of it: were it the tensor itself, neither would be freed.

    An activation is copied, for what comes next may change it in place. A leaf is hooked for many
    steps, and its value is the one of the day.
    """
    return tensor.detach() if tensor.is_leaf else tensor.detach().clone()
