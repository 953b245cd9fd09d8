"""EveryModule: the global hooks of PyTorch, for all modules of the process."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.modules import module as process
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsurg.plugins.fields import validated
from gradsurg.sites.activations import Done, Flow, input_hook, output_hook
from gradsurg.sites.base import HookRegistry, Place, PlaceTest, Selector, Stage
from gradsurg.sites.call_tracker import Calls
from gradsurg.sites.module_gradients import (
    Hook,
    Side,
    forbid_legacy,
    forward_hook,
    forward_pre_hook,
    note_in_place,
    tickets,
    without_warning,
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
    """Every module of the process whose name fits `pattern`, those outside the model too.

    A module of the model goes by its name (the model itself by `root`, spelled out), any other by
    that of its class: a loss is `CrossEntropyLoss#0`. `types` is a pattern on the class's name.
    Calls are counted within one call of the model, outside it each is call 0. Sites are those of
    the kind of hook: `forward_pre` and `forward` change what flows into a module by place and out
    of it, as `Activations` does; `full_backward_pre` and `full_backward` change gradients, as
    `ModuleGradients` does, with its limits, which then hold for every module of the process.

    All threads are seen. Compiled code is not: it keeps no global hook that was registered after
    it was compiled. What is outside the model is known when it is met: a name that never comes is
    told when the block ends.
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
    def side(self) -> str:
        """The side of the module that the hook is at."""
        return "input" if self.kind in ("forward_pre", "full_backward") else "output"

    @property
    def backward(self) -> str:
        """How a gradient passes what was done to a value."""
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
        test = test or self.selects
        kept = candidates(names_of(model), self.mechanism, test)
        found = [name for names in kept.values() for name in names]
        return found or [f"what fits {self!r} outside the model"]

    def site_ids(self, registry: HookRegistry, suffix: str = "") -> SiteIds:
        """A memory of which calls are selected, and of the ids of their sites."""
        # Modules outside the model may come and go.
        return site_ids(self.mechanism, registry, WeakKeyDictionary(), suffix)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        registry: HookRegistry,
        stack: ExitStack,
    ) -> None:
        names = _Names(names_of(model))
        suffix = ".input" if self.side == "input" else ""
        others = foreign_hooks(*(vars(process)[table] for table in TABLES))
        for module, (name, *_) in names.items():
            if registry.selects(Place(self.mechanism, name, module)) is not False:
                registry.expect(f"{name}#0{suffix}", foreign=others)
        match self.kind:
            case "forward_pre" | "forward":
                self._hook_values(model, names, registry, stack)
            case "full_backward_pre" | "full_backward":
                self._hook_gradients(model, names, registry, stack, self.kind)

    @property
    def _stage(self) -> Stage:
        return "forward" if self.kind in ("forward_pre", "forward") else "backward"

    def _hook_values(
        self, model: nn.Module, names: "_Names", registry: HookRegistry, stack: ExitStack
    ) -> None:
        block = ["open"]
        stack.callback(block.clear)
        done: WeakKeyDictionary[nn.Module, list[Done]] = WeakKeyDictionary()
        flow = Flow(names, self, registry, done, block)
        _follow_begin(flow.calls, model, stack)
        if self.kind == "forward_pre":
            handle = process.register_module_forward_pre_hook(_by_place(input_hook(flow)))
        else:
            # PyTorch's type says that such a hook returns nothing; it may return a new output.
            leave: Callable[..., Any] = output_hook(flow)
            handle = process.register_module_forward_hook(leave)
        stack.callback(handle.remove)
        _follow_end(flow.calls, model, stack)

    def _hook_gradients(
        self,
        model: nn.Module,
        names: "_Names",
        registry: HookRegistry,
        stack: ExitStack,
        side: Side,
    ) -> None:
        calls = Calls(names)
        forbid_legacy(process._global_is_full_backward_hook, "the process", "EveryModule")
        one = tickets(self._register(side, stack))
        stack.callback(one.remove)
        _follow_begin(calls, model, stack)
        enter = forward_pre_hook(calls, one, "EveryModule")
        stack.callback(process.register_module_forward_pre_hook(enter).remove)
        suffix = ".input" if side == "full_backward" else ""
        leave = forward_hook(
            calls, one, self.site_ids(registry, suffix), registry, side, refuses=""
        )
        leave_handle = process.register_module_forward_hook(leave, with_kwargs=True)
        stack.callback(autograd.remove_global_forward_hook, leave_handle)
        _follow_end(calls, model, stack)
        note_in_place(model, stack)
        without_warning(stack)

    def _register(self, side: Side, stack: ExitStack) -> Callable[[Hook], RemovableHandle]:
        if side == "full_backward_pre":
            return process.register_module_full_backward_pre_hook
        before = process._global_is_full_backward_hook

        def restore() -> None:
            # PyTorch does not, and would refuse the hooks of the other kind for ever.
            if not process._global_backward_hooks:
                process._global_is_full_backward_hook = before

        stack.callback(restore)
        return process.register_module_full_backward_hook


class _Names(dict[nn.Module, list[str]]):
    """The names of the model's modules; that of a stranger is its class's."""

    def __missing__(self, module: nn.Module) -> list[str]:
        return [type(module).__name__]

    def get(self, key: nn.Module, default: None = None) -> list[str] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # What torch.compile puts around a module is no module of the user's.
        return default if key not in self and COMPILED in key._modules else self[key]


def _by_place(enter: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on all arguments, where PyTorch tells of those by place only. Any: a user's values."""

    @compiling.untraced
    def hook(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...] | None:
        given = enter(module, args, {})
        return None if given is None else given[0]

    return hook


def _follow_begin(calls: Calls, model: nn.Module, stack: ExitStack) -> None:
    """As `Calls.hook`, and in time for global hooks, which run before those of the model."""
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
