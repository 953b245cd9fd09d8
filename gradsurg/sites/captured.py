"""Captured: the gradients that `torch.autograd.grad` returns."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.plugins.fields import validated
from gradsurg.sites.contexts import refusal
from gradsurg.sites.graph_tracer import check_called
from gradsurg.sites.module_calls import Calls, tensors_in
from gradsurg.sites.places import NO_GRADIENT, Attached, Place, PlaceTest, Stage
from gradsurg.sites.selection import (
    ROOT,
    ModuleSelector,
    Range,
    all_frozen,
    candidates,
    described,
    expect_params,
    fits_param,
    names_of,
    nothing_matched,
    params_of,
    selected_params,
)
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need

NOT_ASKED = "not asked of autograd.grad"
UNUSED = "what was differentiated does not depend on it"
CHANGED = "it was changed in place since its module returned it"


@validated
class Captured(ModuleSelector):
    """The gradients that `torch.autograd.grad` returns for parameters and module outputs.

    `pattern` and the other fields select parameters, whose site is their name, and modules, whose
    outputs are the sites `name#call`, with a path as for `Outputs`. `call` selects outputs only,
    `ndim` and `size` (the number of entries) parameters only. The tensor itself must be among the
    inputs of the call: for other tensors and for gradient edges the result of PyTorch is unchanged.

    Only the returned gradient changes, not the one that flows on to other inputs: for that use
    `Outputs`. The transform gets the gradient that PyTorch returns: if the inputs also include a
    tensor that an output was computed from, before the hooks of that output, else after them. An
    unused input has no gradient, unless `materialize_grads` makes zeros of it. `is_grads_batched`
    is refused, since a transform takes one gradient. Inside `torch.func` all tensors are wrapped,
    and none is a site.

    A `TorchFunctionMode` sees the torch functions of the thread that opened the block, which costs
    each of them 1.5 to 2.5 us (one core, torch 2.13) and a call of code compiled by Inductor 4 us.
    Calls in other threads are not seen. In compiled code a module whose output is a site breaks the
    graph.
    """

    ndim: Range | None = None
    size: Range | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("captured",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value"})

    def selects(self, place: Place) -> bool | None:
        if isinstance(place.thing, nn.Module):
            if self.ndim is not None or self.size is not None:
                return False
            return super().selects(place)
        return place.mechanism == self.mechanism and self.call is None and fits_param(self, place)

    def offers(self, place: Place) -> bool:
        return not isinstance(place.thing, nn.Module) or super().offers(place)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        test = test or self.selects
        named = names_of(model)
        selected = candidates(named, self.mechanism, test)
        modules = [name for names in selected.values() for name in names]
        params = selected_params(self, model, test)
        trainable = [names[0] for param, names in params if param.requires_grad]
        if not trainable:
            check_called(self, model, selected)
        if not trainable and not modules:
            if params:
                raise all_frozen(self, [names[0] for _, names in params])
            choices = [name for names in named.values() for name in names if name != ROOT]
            choices += params_of(model)
            raise nothing_matched(self, "pattern", described(self), choices)
        return trainable + modules

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        mode = _GradMode(self, attached)
        for name, param in expect_params(self, model, attached).items():
            mode.add(param, name)
        calls, site_ids = Calls(names_of(model)), self.site_ids(attached)

        @compiling.untraced
        def record(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            call = calls.next(module)
            base = None if call is None else site_ids(module, call)
            for path, tensor in tensors_in(output) if base else ():
                if path:
                    attached.forget(f"{base}")
                mode.add(tensor, f"{base}{path}")

        selected = candidates(calls.names, self.mechanism, attached.selects)
        if selected:  # without module hooks, compiled code keeps its graph in one piece
            calls.hook(model, stack)
        for module, names in selected.items():
            attached.expect(f"{names[0]}#{self.call or 0}", skipped=NOT_ASKED)
            stack.callback(module.register_forward_hook(record).remove)
        autograd.push_function_mode(mode)
        stack.callback(autograd.remove_function_mode, mode)


class _GradMode(TorchFunctionMode):
    """Intercepts `torch.autograd.grad`. It runs at every torch function, so it is kept short.

    It knows the tensors that are sites by identity, without holding them. A tensor has one site,
    the first: a parameter that a module returns keeps its own name.
    """

    def __init__(self, selector: Captured, attached: Attached) -> None:
        super().__init__()
        self.selector, self.attached = selector, attached
        self.known = WeakIdKeyDictionary()  # tensor -> (site, version)
        self.entered: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: the arguments and results of any torch function
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._changed(result, args, kwargs or {}) if func is torch.autograd.grad else result

    def add(self, tensor: Tensor, site: str) -> None:
        """Record that a tensor is at this site, unless it already has another one."""
        if autograd.in_functorch() or (site in self.entered and not tensor.requires_grad):
            return
        if not tensor.requires_grad:
            self.attached.expect(site, skipped=NO_GRADIENT)
            return
        owner, is_current = self._known(tensor)
        if not is_current:
            owner = ""
            self.known[tensor] = site, _version(tensor)
        if site not in self.entered:
            self.entered.add(site)
            aliases = [site] if owner not in ("", site) else []
            if not aliases:
                self.attached.hook_at(site)
            self.attached.expect(owner or site, aliases, skipped=NOT_ASKED)

    def _changed(
        self, grads: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the result of `grad`, with transformed gradients of the inputs that are sites."""
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        results: dict[int, Any] = {}
        with torch.set_grad_enabled(bool(kwargs.get("create_graph"))):
            for tensor, grad in zip(inputs, grads, strict=True):
                if id(tensor) not in results:
                    results[id(tensor)] = self._transformed(tensor, grad, kwargs)
        return tuple(results[id(tensor)] for tensor in inputs)

    def _transformed(self, tensor: Any, grad: Any, kwargs: dict[str, Any]) -> Any:
        site, is_current = self._known(tensor)
        if not site:
            return grad
        if not is_current:
            self.attached.note(f"'{site}' was asked for and left alone: {CHANGED}")
            return grad
        if grad is None:
            self.attached.expect(site, skipped=UNUSED)
            return None
        if kwargs.get("is_grads_batched"):
            raise refusal(self.selector, "is_grads_batched", site)
        result = self.attached.hook_at(site)(grad, tensor if self.attached.needs_value else None)
        return grad if result is None else result

    def _known(self, tensor: object) -> tuple[str, bool]:
        """Return the site of an input, empty if it has none, and whether it is still there."""
        known = self.known.get(tensor) if isinstance(tensor, Tensor) else None
        return ("", False) if known is None else (known[0], known[1] == _version(tensor))


def _version(tensor: Any) -> int:
    """Return the version counter; 0 for a leaf, which stays the same site after an update."""
    return 0 if tensor.is_leaf else autograd.version_of(tensor)
