"""Captured: the gradients that `torch.autograd.grad` returns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import NO_GRADIENT, HookRegistry, Place, PlaceTest, Stage
from gradsurg.sites.call_tracker import Calls, tensors_in
from gradsurg.sites.selection import (
    ROOT,
    ModuleSelector,
    Range,
    SiteIds,
    candidates,
    described,
    expect_params,
    find_params,
    fits_param,
    names_of,
    nothing_matched,
    params_of,
    selected_params,
)
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope

NOT_ASKED = "not asked of autograd.grad"
UNUSED = "what was differentiated does not depend on it"
CHANGED = "it was changed in place since its module returned it"


@validated
class Captured(ModuleSelector):
    """What `torch.autograd.grad` returns for parameters and for outputs of modules, by name.

    `pattern` and the rest select parameters, whose site is their name, and modules, whose outputs
    are the sites `name#call`, with a path behind it as those of `Outputs`. `call` leaves outputs
    only; `ndim` and `size` (the number of entries) leave parameters only. The tensor itself has to
    be asked for: other tensors, and gradient edges, get what PyTorch returns.

    It changes what is returned and not what flows on to other inputs: that is `Outputs`. For an
    output with tensor hooks, PyTorch returns the gradient after them if it is asked for alone, and
    the one before them if it is asked for together with what it was made of; here it is always the
    one after them. An input that is not used has no gradient, and none is made; zeros that
    `materialize_grads` makes of it are left alone. `is_grads_batched` is refused, for a transform
    takes one gradient; what `torch.func` asks for is of tensors of its own, and nobody's.

    A mode sees the torch functions of the thread that has opened the block, which costs each of
    them 1.5 to 2.5 us (one core, torch 2.13) and a call of code that Inductor has compiled 4 us;
    calls in other threads are not seen. In compiled code a module whose output is a site breaks
    the graph.
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
        modules = [
            name for names in candidates(named, self.mechanism, test).values() for name in names
        ]
        if not modules and selected_params(self, model, test):
            return find_params(self, model, test)
        params = [
            names[0] for param, names in selected_params(self, model, test) if param.requires_grad
        ]
        if not params and not modules:
            choices = [name for names in named.values() for name in names if name != ROOT]
            choices += params_of(model)
            raise nothing_matched(self, "pattern", described(self), choices)
        return params + modules

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        sites = _Sites(registry)
        for name, param in expect_params(self, model, registry).items():
            sites.add(param, name)
        calls = Calls(names_of(model))
        kept = candidates(calls.names, self.mechanism, registry.selects)
        if kept:  # compiled code stays whole where there are parameters alone
            calls.hook(model, stack)
        for module, names in kept.items():
            registry.expect(f"{names[0]}#{self.call or 0}", skipped=NOT_ASKED)
            hook = _remembering(sites, calls, self.site_ids(registry))
            stack.callback(module.register_forward_hook(hook).remove)
        _watch(sites, stack)


def _remembering(sites: "_Sites", calls: Calls, chosen: SiteIds) -> Callable[..., None]:
    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        call = calls.next(module)
        base = None if call is None else chosen(module, call)
        if base is None:
            return
        for path, tensor in tensors_in(output):
            if path:
                sites.registry.forget(base)
            sites.add(tensor, base + path)

    return hook


class _Watching(TorchFunctionMode):
    """What sees every call of a torch function: kept short, for it is paid each time.

    One for all that is attached, in the order in which it is: of several, each would meet what the
    one below it has made of a gradient, and not what PyTorch has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.all: list[_Sites] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: whatever a torch function takes and returns
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        return self._captured(func, args, kwargs or {})

    def _captured(
        self, grad: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `grad` returns, with the gradients of sites as they are after their transforms."""
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        batched = bool(kwargs.get("is_grads_batched"))
        own = [sites for sites in self.all if sites.admit(inputs, batched)]
        if not own:
            return grad(*args, **kwargs)
        asked = {id(one): one for one in inputs if any(sites.of(one) for sites in own)}
        with _after_hooks(asked) as after:
            grads = grad(*args, **kwargs)
        with torch.set_grad_enabled(bool(kwargs.get("create_graph"))):
            for key, tensor in asked.items():
                for sites in own:
                    sites.pass_on(key, tensor, after)
        return tuple(after.get(id(one), was) for one, was in zip(inputs, grads, strict=True))


def _watch(sites: "_Sites", stack: ExitStack) -> None:
    """Have the calls of this thread pass these sites too."""
    watching = [mode for mode in autograd.function_modes() if isinstance(mode, _Watching)]
    mode = watching[0] if watching else _Watching()
    if not watching:
        autograd.begin_functions(mode)
    mode.all.append(sites)

    def end() -> None:
        mode.all.remove(sites)
        if not mode.all:
            autograd.end_functions(mode)

    stack.callback(end)


class _Sites:
    """The tensors that are sites, known by what they are and not by a name; none of them is held.

    The first site of a tensor is its site: a parameter that a module returns goes by its own name.
    """

    def __init__(self, registry: HookRegistry) -> None:
        self.registry = registry
        self.known = WeakIdKeyDictionary()  # tensor -> (site, version)
        self.met: set[str] = set()

    def add(self, tensor: Tensor, site: str) -> None:
        """A tensor is known to be at this site, unless it is at another one already."""
        if autograd.in_functorch():
            return
        if not tensor.requires_grad:
            if site not in self.met:
                self.registry.expect(site, skipped=NO_GRADIENT)
            return
        owner = self.of(tensor)
        if not owner:
            self.known[tensor] = site, _version(tensor)
        if site not in self.met:
            self.met.add(site)
            if owner != site and owner:
                self.registry.expect(owner, [site], skipped=NOT_ASKED)
            else:
                self.registry.hook_for(site)
                self.registry.expect(site, skipped=NOT_ASKED)

    def of(self, tensor: object) -> str:
        """The site of an input, empty if it is nobody's."""
        if not isinstance(tensor, Tensor) or tensor not in self.known:
            return ""
        site, version = self.known[tensor]
        return site if version == _version(tensor) else ""

    def admit(self, inputs: Sequence[object], batched: bool) -> bool:
        """Whether one of the inputs is a site, and its gradient can go through a transform."""
        for tensor in inputs:
            if isinstance(tensor, Tensor) and tensor in self.known and not self.of(tensor):
                site, _ = self.known[tensor]
                self.registry.note(f"'{site}' was asked for and left alone: {CHANGED}")
        site = next(filter(None, map(self.of, inputs)), "")
        if not site:
            return False
        if batched:
            raise RuntimeError(
                f"Captured: site '{site}' gets many gradients at once by is_grads_batched=True, "
                "and a transform takes one; call torch.autograd.grad for each of them"
            )
        return True

    def pass_on(self, key: int, tensor: Tensor, after: dict[int, Tensor]) -> None:
        """Let the gradient of a tensor through its gate, if it is a site here."""
        site = self.of(tensor)
        if site and key not in after:  # a None, or zeros that were made of it
            self.registry.expect(site, skipped=UNUSED)
        elif site:
            value = tensor if self.registry.needs_value else None
            result = self.registry.hook_for(site)(after[key], value)
            after[key] = after[key] if result is None else result


@contextmanager
def _after_hooks(tensors: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
    """The gradients of some tensors as they are after all of their tensor hooks, by their id."""
    after: dict[int, Tensor] = {}

    def last(key: int) -> Callable[[Tensor | None], None]:
        def hook(grad: Tensor | None) -> None:
            if grad is not None:
                after[key] = grad

        return hook

    with ExitStack() as stack:
        for key, tensor in tensors.items():
            if tensor.requires_grad:  # if not, PyTorch says so itself
                stack.callback(tensor.register_hook(last(key)).remove)
        yield after


def _version(tensor: Tensor) -> int:
    """How often it was written to; a leaf is the same one after a step of the optimizer."""
    return 0 if tensor.is_leaf else tensor._version
