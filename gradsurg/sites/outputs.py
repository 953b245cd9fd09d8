"""Outputs: the gradient with respect to the output of a module."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, Place, Stage
from gradsurg.sites.module_calls import (
    HookedTensors,
    Shared,
    hookable_modules,
    is_new,
    rebuilt,
    tensors_in,
)
from gradsurg.sites.selection import ModuleSelector, Pattern, matches, unnumbered
from gradsurg.torch_internals import autograd
from gradsurg.transforms.base import Need


@validated
class Outputs(ModuleSelector):
    """The outputs of the modules whose name fits `pattern`, a glob or `re:`; `call` picks one call.

    A tensor hook on every floating tensor that a matching module returns, also inside tuples,
    lists, dicts and dataclasses: its gradient is the sum over all uses of that output. Site ids are
    `name#call`, followed by the path of the tensor if there are several: `encoder.lstm#0.1.0`.
    `item` picks tensors by that path, as "0" or "1.*"; a module without such a tensor is left out.
    Calls are counted from 0 within one call of the model. Modules that return the same tensor (a
    container and its last child) are one site, unless it was changed in place between them. A
    module that returns its input (an identity, dropout in evaluation) returns an alias of it while
    it is hooked: the gradient is that of its output alone, not of other uses of the input. As for
    `Inputs`, sums over several uses may then differ in the last bit. The recomputation of a
    checkpoint is not hooked again; that of a reentrant checkpoint is, since its forward makes no
    graph.
    """

    item: Pattern = "*"

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "error", "labels"})

    def selects(self, place: Place) -> bool | None:
        selected = super().selects(place)
        if not selected or self.item == "*":
            return selected
        return None if place.item is None else matches(place.item, self.item)

    def hook(self, attached: Attached) -> None:
        tensors = _HookedOutputs(self, attached, Shared())
        modules = hookable_modules(self, tensors, attached)
        undecided, known = dict[str, Place](), dict[str, bool]()
        site_ids = self.site_ids(attached, undecided=undecided)
        fast = tensors.shared.fast

        def is_selected(site: str, path: str) -> bool:
            if site not in undecided:
                return True
            if site + path not in known:
                selected = attached.selects(replace(undecided[site], item=path[1:]))
                if selected is None:
                    raise unnumbered(undecided[site].name)
                known[site + path] = selected
                attached.forget(site)
            return known[site + path]

        # Any: a user's values
        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                given = _given(args, kwargs)
                tensors.versions[module] = [autograd.version_of(tensor) for tensor in given]

        def after(
            module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any], output: object
        ) -> object:
            call = tensors.counter.next(module)
            site = None if call is None else site_ids(module, call)
            if site is None:
                return output
            output = tensors.own_output(module, site, _given(args, kwargs), output)
            if site in fast and is_new(output) and not attached.needs_value:
                autograd.hook_first(output, fast[site])
                return output
            bare = isinstance(output, Tensor)  # a complex one has a site too, and is refused there
            for path, tensor in [("", output)] if bare else tensors_in(output):
                if not is_selected(site, path):
                    continue
                if tensors.hook_tensor(tensor, site, path, module) and tensor is output:
                    fast[site] = attached.hook_at(site)
            return output

        tensors.register(modules, before, after)


class _HookedOutputs(HookedTensors):
    """Hooked tensors, with the versions of the inputs of running calls."""

    def __init__(self, selector: ModuleSelector, attached: Attached, shared: Shared) -> None:
        super().__init__(selector, attached, shared)
        self.versions: dict[nn.Module, list[int]] = {}

    def begin(self) -> None:
        super().begin()
        self.versions.clear()

    def own_output(
        self, module: nn.Module, site: str, given: list[Tensor], output: object
    ) -> object:
        """Return an output with an alias in place of each tensor that the module took unchanged."""
        versions = self.versions.pop(module, [])
        if len(given) == 1 and type(output) is Tensor and output is not given[0]:
            return output  # the usual case
        if len(given) != len(versions):
            return output  # it is called by itself, or by a hook of others
        unchanged = [
            tensor
            for tensor, version in zip(given, versions, strict=True)
            if tensor.requires_grad and autograd.version_of(tensor) == version
        ]

        def own(_path: str, tensor: Tensor) -> Tensor:
            if all(tensor is not other for other in unchanged):
                return tensor
            alias = tensor[...]
            if self.counter.inside:
                self.written.append((alias, autograd.version_of(alias), site))
            return alias

        return rebuilt(output, own)


def _given(args: tuple[object, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if len(args) == 1 and type(args[0]) is Tensor and not kwargs:  # the usual call
        return [args[0]]
    return [tensor for _, tensor in tensors_in((args, kwargs), every=True)]
