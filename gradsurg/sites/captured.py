"""Captured: the gradients that `torch.autograd.grad` returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, Attached, Place, PlaceTest, Stage
from gradsurg.sites.module_calls import Calls, tensors_in
from gradsurg.sites.selection import (
    ROOT,
    ModuleSelector,
    Range,
    SiteIds,
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
    `Outputs`. The transform always gets the gradient after all tensor hooks. (PyTorch returns the
    gradient before an output's hooks if the inputs also include a tensor that the output was
    computed from.) An unused input has no gradient, and the zeros of `materialize_grads` are not
    transformed. `is_grads_batched` is refused, since a transform takes one gradient. Inside
    `torch.func` all tensors are wrapped, and none is a site.

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
        if not trainable and not modules:
            if params:
                raise all_frozen(self, [names[0] for _, names in params])
            choices = [name for names in named.values() for name in names if name != ROOT]
            choices += params_of(model)
            raise nothing_matched(self, "pattern", described(self), choices)
        return trainable + modules

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        sites = _Sites(attached)
        for name, param in expect_params(self, model, attached).items():
            sites.add(param, name)
        calls = Calls(names_of(model))
        selected = candidates(calls.names, self.mechanism, attached.selects)
        if selected:  # without module hooks, compiled code keeps its graph in one piece
            calls.hook(model, stack)
        for module, names in selected.items():
            attached.expect(f"{names[0]}#{self.call or 0}", skipped=NOT_ASKED)
            hook = _output_recorder(sites, calls, self.site_ids(attached))
            stack.callback(module.register_forward_hook(hook).remove)
        _watch(sites, stack)


def _output_recorder(sites: "_Sites", calls: Calls, site_ids: SiteIds) -> Callable[..., None]:
    """Return a forward hook that records the outputs of a module as sites."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        call = calls.next(module)
        base = None if call is None else site_ids(module, call)
        if base is None:
            return
        for path, tensor in tensors_in(output):
            if path:
                sites.attached.forget(base)
            sites.add(tensor, base + path)

    return hook


class _GradMode(TorchFunctionMode):
    """Intercepts `torch.autograd.grad`. It runs at every torch function, so it is kept short.

    One mode serves all attached interventions in order: of several modes, each would get the result
    of the one below and not the gradient that PyTorch has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[_Sites] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: the arguments and results of any torch function
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        return self._transformed(func, args, kwargs or {})

    def _transformed(
        self, grad: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of `grad`, with transformed gradients of the inputs that are sites."""
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        batched = bool(kwargs.get("is_grads_batched"))
        acting = [sites for sites in self.attached if sites.includes_any(inputs, batched)]
        if not acting:
            return grad(*args, **kwargs)
        asked = {
            id(tensor): tensor
            for tensor in inputs
            if any(sites.site_of(tensor) for sites in acting)
        }
        with _after_hooks(asked) as after:
            grads = grad(*args, **kwargs)
        with torch.set_grad_enabled(bool(kwargs.get("create_graph"))):
            for key, tensor in asked.items():
                for sites in acting:
                    sites.transform(key, tensor, after)
        return tuple(after.get(id(tensor), was) for tensor, was in zip(inputs, grads, strict=True))


def _watch(sites: "_Sites", stack: ExitStack) -> None:
    """Apply the transforms at these sites to the `autograd.grad` calls of this thread."""
    modes = [mode for mode in autograd.function_modes() if isinstance(mode, _GradMode)]
    mode = modes[0] if modes else _GradMode()
    if not modes:
        autograd.push_function_mode(mode)
    mode.attached.append(sites)

    def end() -> None:
        mode.attached.remove(sites)
        if not mode.attached:
            autograd.remove_function_mode(mode)

    stack.callback(end)


class _Sites:
    """The tensors that are sites, by identity and without holding them.

    A tensor has one site, the first: a parameter that a module returns keeps its own name.
    """

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self.known = WeakIdKeyDictionary()  # tensor -> (site, version)
        self.entered: set[str] = set()

    def add(self, tensor: Tensor, site: str) -> None:
        """Record that a tensor is at this site, unless it already has another one."""
        if autograd.in_functorch():
            return
        if not tensor.requires_grad:
            if site not in self.entered:
                self.attached.expect(site, skipped=NO_GRADIENT)
            return
        owner = self.site_of(tensor)
        if not owner:
            self.known[tensor] = site, _version(tensor)
        if site not in self.entered:
            self.entered.add(site)
            if owner != site and owner:
                self.attached.expect(owner, [site], skipped=NOT_ASKED)
            else:
                self.attached.hook_at(site)
                self.attached.expect(site, skipped=NOT_ASKED)

    def site_of(self, tensor: object) -> str:
        """Return the site of an input, empty if it has none."""
        if not isinstance(tensor, Tensor) or tensor not in self.known:
            return ""
        site, version = self.known[tensor]
        return site if version == _version(tensor) else ""

    def includes_any(self, inputs: Sequence[object], batched: bool) -> bool:
        """Return whether an input is a site; RuntimeError if its gradients would be batched."""
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor in self.known and not self.site_of(tensor):
                site, _ = self.known[tensor]
                self.attached.note(f"'{site}' was asked for and left alone: {CHANGED}")
        site = next(filter(None, map(self.site_of, inputs)), "")
        if not site:
            return False
        if batched:
            raise RuntimeError(
                f"Captured: site '{site}' gets many gradients at once by is_grads_batched=True, "
                "and a transform takes one; call torch.autograd.grad for each of them"
            )
        return True

    def transform(self, key: int, tensor: Tensor, after: dict[int, Tensor]) -> None:
        """Transform the gradient `after[key]` of a tensor in place in the dict, if it is a site."""
        site = self.site_of(tensor)
        if site and key not in after:  # None, or zeros made by materialize_grads
            self.attached.expect(site, skipped=UNUSED)
        elif site:
            value = tensor if self.attached.needs_value else None
            result = self.attached.hook_at(site)(after[key], value)
            after[key] = after[key] if result is None else result


@contextmanager
def _after_hooks(tensors: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """Collect the gradients of some tensors, by id, after all of their tensor hooks."""
    after: dict[int, Tensor] = {}

    def collector(key: int) -> Callable[[Tensor | None], None]:
        def hook(grad: Tensor | None) -> None:
            if grad is not None:
                after[key] = grad

        return hook

    with ExitStack() as stack:
        for key, tensor in tensors.items():
            if tensor.requires_grad:  # if not, PyTorch raises its own error
                stack.callback(tensor.register_hook(collector(key)).remove)
        yield after


def _version(tensor: Tensor) -> int:
    """Return the version counter; 0 for a leaf, which stays the same site after an update."""
    return 0 if tensor.is_leaf else tensor._version
