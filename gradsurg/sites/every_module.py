"""EveryModule: PyTorch's global module hooks, for all modules of the process."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.modules import module as process
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.activations import CallRecord, Flow, input_hook, output_hook
from gradsurg.sites.base import Attached, Place, PlaceTest, Selector, Stage
from gradsurg.sites.call_tracker import Calls
from gradsurg.sites.module_gradients import (
    BackwardHook,
    Kind,
    explain_in_place_error,
    forward_hook,
    forward_pre_hook,
    refuse_legacy_hooks,
    replaced_hook,
    suppress_warning,
)
from gradsurg.sites.selection import (
    COMPILED,
    ROOT,
    Pattern,
    SiteIds,
    Types,
    candidates,
    foreign_hooks,
    matches,
    matches_type,
    names_of,
    site_ids,
)
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Scope

TABLES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


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
        return "activations" if self._stage == "forward" else "gradients"

    @property
    def side(self) -> str:
        """Whether the hook is at the inputs or the outputs of modules."""
        return "input" if self.kind in ("forward_pre", "full_backward") else "output"

    @property
    def backward(self) -> str:
        """The `Activations.backward` of a forward hook."""
        return "through"

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

    def site_ids(self, attached: Attached, suffix: str = "") -> SiteIds:
        """Return a cached function from the calls of modules to site ids."""
        # Weak keys: modules outside the model may be freed.
        return site_ids(self.mechanism, attached, WeakKeyDictionary(), suffix)

    def hook(self, attached: Attached) -> None:
        model, stack = attached.model, attached.stack
        names = _Names(names_of(model))
        suffix = ".input" if self.side == "input" else ""
        others = foreign_hooks(*(vars(process)[table] for table in TABLES))
        for module, (name, *_) in names.items():
            if attached.selects(Place(self.mechanism, name, module)) is not False:
                attached.expect(f"{name}#0{suffix}", foreign=others)
        match self.kind:
            case "forward_pre" | "forward":
                self._hook_activations(model, names, attached, stack)
            case "full_backward_pre" | "full_backward":
                self._hook_gradients(model, names, attached, stack, self.kind)

    @property
    def _stage(self) -> Stage:
        return "forward" if self.kind in ("forward_pre", "forward") else "backward"

    def _hook_activations(
        self, model: nn.Module, names: "_Names", attached: Attached, stack: ExitStack
    ) -> None:
        block = ["open"]
        stack.callback(block.clear)
        records: WeakKeyDictionary[nn.Module, list[CallRecord]] = WeakKeyDictionary()
        flow = Flow(names, self, attached, records, block)
        _follow_begin(flow.calls, model, stack)
        if self.kind == "forward_pre":
            handle = process.register_module_forward_pre_hook(_positional(input_hook(flow)))
        else:
            # PyTorch's type allows no return value, but the hook may return a new output.
            hook: Callable[..., Any] = output_hook(flow)
            handle = process.register_module_forward_hook(hook)
        stack.callback(handle.remove)
        _follow_end(flow.calls, model, stack)

    def _hook_gradients(
        self,
        model: nn.Module,
        names: "_Names",
        attached: Attached,
        stack: ExitStack,
        kind: Kind,
    ) -> None:
        calls = Calls(names)
        refuse_legacy_hooks(process._global_is_full_backward_hook, "the process", "EveryModule")
        replaced = replaced_hook()
        stack.callback(self._registration(kind, stack)(replaced).remove)
        _follow_begin(calls, model, stack)
        pre_hook = forward_pre_hook(calls, "EveryModule")
        stack.callback(process.register_module_forward_pre_hook(pre_hook).remove)
        suffix = ".input" if kind == "full_backward" else ""
        site_ids = self.site_ids(attached, suffix)
        post_hook = forward_hook(calls, replaced, site_ids, attached, kind, refused_by="")
        handle = process.register_module_forward_hook(post_hook, with_kwargs=True)
        stack.callback(autograd.remove_global_forward_hook, handle)
        _follow_end(calls, model, stack)
        explain_in_place_error(model, stack)
        suppress_warning(stack)

    def _registration(
        self, kind: Kind, stack: ExitStack
    ) -> Callable[[BackwardHook], RemovableHandle]:
        if kind == "full_backward_pre":
            return process.register_module_full_backward_pre_hook
        before = process._global_is_full_backward_hook

        def restore() -> None:
            # PyTorch does not reset the flag, and would refuse legacy hooks from then on.
            if not process._global_backward_hooks:
                process._global_is_full_backward_hook = before

        stack.callback(restore)
        return process.register_module_full_backward_hook


class _Names(dict[nn.Module, list[str]]):
    """The names of the modules of the model; another module has the name of its class."""

    def __missing__(self, module: nn.Module) -> list[str]:
        return [type(module).__name__]

    def get(self, key: nn.Module, default: None = None) -> list[str] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # The wrapper that torch.compile puts around a module has no name.
        return default if key not in self and COMPILED in key._modules else self[key]


def _positional(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a pre-hook to global pre-hooks, which get positional arguments only."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...] | None:
        given = enter(module, args, {})
        return None if given is None else given[0]

    return hook


def _follow_begin(calls: Calls, model: nn.Module, stack: ExitStack) -> None:
    """Start counting calls by a global hook: the model's own hooks run after all global ones."""
    held = ref(model)

    @compiling.untraced
    def begin(module: nn.Module, args: tuple[object, ...]) -> None:
        if module is held():
            calls.start()

    stack.callback(process.register_module_forward_pre_hook(begin).remove)


def _follow_end(calls: Calls, model: nn.Module, stack: ExitStack) -> None:
    held = ref(model)

    @compiling.untraced
    def end(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if module is held():
            calls.stop()

    stack.callback(process.register_module_forward_hook(end, always_call=True).remove)
