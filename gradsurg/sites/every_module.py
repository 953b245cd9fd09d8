"""EveryModule: PyTorch's global module hooks, for all modules of the process."""

from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules import module as process

from gradsurg.plugins.fields import validated
from gradsurg.sites.activations import Flow, Records, input_hook, output_hook
from gradsurg.sites.module_calls import Calls, refuse_scripted
from gradsurg.sites.module_gradients import hook_backward, suppress_warning
from gradsurg.sites.places import Attached, Place, PlaceTest, Selector, Stage
from gradsurg.sites.selection import (
    ROOT,
    Pattern,
    Types,
    candidates,
    foreign_hooks,
    matches,
    matches_type,
    names_of,
    site_ids,
)
from gradsurg.torch_internals import compiling, module_hooks
from gradsurg.transforms.base import Scope


@validated
class EveryModule(Selector):
    """Every module of the process whose name fits `pattern`, also outside the model.

    A module of the model has its name there (the model itself is `root`, which a pattern must spell
    out); any other module has the name of its class: a loss is `CrossEntropyLoss#0`. `types` is a
    pattern on the class. Calls are counted within one call of the model; a call outside it is call
    0. `kind` chooses the global hook and the sites: `forward_pre` and `forward` change the
    positional inputs and the outputs of modules, as `Activations` does; `full_backward_pre` and
    `full_backward` change gradients, as `ModuleGradients` does, and its limits then hold for every
    module of the process.

    Calls in all threads are seen, but not those in compiled code, which ignores global hooks
    registered after it was compiled. Modules outside the model are unknown until they are called: a
    name that no module has is reported on detach.
    """

    pattern: Pattern = "*"
    types: Types = "*"
    kind: Literal["forward_pre", "forward", "full_backward_pre", "full_backward"] = "forward"
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("forward", "backward")
    compile_limit: ClassVar[str] = "PyTorch compiles nothing while there are global hooks"

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("EveryModule", self.stage, self.kind)

    @property
    def changed_tensors(self) -> str:
        return "activations" if self.kind in ("forward_pre", "forward") else "gradients"

    def resolve(self, scope: Scope) -> Stage:
        stage = super().resolve(scope) if scope == "group" or self.stage else self._stage
        if stage != self._stage:
            raise ValueError(
                f"EveryModule with kind '{self.kind}' cannot have stage '{stage}'; stages it can "
                f"have: {self._stage}"
            )
        return stage

    def selects(self, place: Place) -> bool | None:
        return (
            place.mechanism == self.mechanism
            and isinstance(place.thing, nn.Module)
            and matches(place.name, self.pattern)
            and self.offers(place)
            and matches_type(place.thing, self.types)
        )

    def offers(self, place: Place) -> bool:
        inside = isinstance(place.thing, nn.Module) and any(place.thing.children())
        return place.name != ROOT or self.pattern == ROOT or not inside

    def place_if_added(self, thing: nn.Module | Tensor) -> Place | None:
        if not isinstance(thing, nn.Module):
            return None
        return Place(self.mechanism, type(thing).__name__, thing)

    def find(self, model: nn.Module, test: PlaceTest | None = None) -> list[str]:
        selected = candidates(names_of(model), self.mechanism, test or self.selects)
        names = [name for names in selected.values() for name in names]
        return names or [f"what fits {self!r} outside the model"]

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        names = _Names(names_of(model))
        first = {module: names[:1] for module, names in names.items()}
        selected = candidates(first, self.mechanism, attached.selects)
        # With global backward hooks PyTorch refuses to call any ScriptModule.
        refuse_scripted(self, selected if self._stage == "forward" else names)
        suffix = ".input" if self.kind in ("forward_pre", "full_backward") else ""
        others = foreign_hooks(*module_hooks.global_hooks())
        for name, *_ in selected.values():
            attached.expect(f"{name}#0{suffix}", foreign=others)
        if self._stage == "backward":
            calls = Calls(names)
            calls.hook(model, stack)
            ids = site_ids(self.mechanism, attached, WeakKeyDictionary(), suffix)
            hook_backward(None, self, self.kind, calls, ids, attached)
            suppress_warning(stack)
            return
        flow = Flow(self, attached, names, Records(), suffix)
        flow.hook(model, stack)
        if self.kind == "forward_pre":
            handle = process.register_module_forward_pre_hook(input_hook(flow))
        else:
            # PyTorch's type allows no return value, but the hook may return a new output.
            hook: Any = output_hook(flow)
            handle = process.register_module_forward_hook(hook)
        stack.callback(handle.remove)

    @property
    def _stage(self) -> Stage:
        return "forward" if self.kind in ("forward_pre", "forward") else "backward"


class _Names(dict[nn.Module, list[str]]):
    """The names of the modules of the model; another module has the name of its class."""

    def __missing__(self, module: nn.Module) -> list[str]:
        return [type(module).__name__]

    def get(self, key: nn.Module, default: None = None) -> list[str] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The wrapper that torch.compile puts around a module has no name.
        return default if key not in self and compiling.is_wrapper(key) else self[key]
