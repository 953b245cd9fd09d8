"""EveryModule: PyTorch's global module hooks, for all modules of the process."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar, Literal

from torch import nn
from torch.nn.modules import module as process

from gradsurg.plugins.fields import validated
from gradsurg.sites.activations import Flow
from gradsurg.sites.calls import Shared, modules_of, name_in, refuse_scripted, remove_hook
from gradsurg.sites.module_gradients import BackwardPasses
from gradsurg.sites.places import (
    ELSEWHERE,
    Door,
    Kind,
    Leaf,
    Memory,
    Named,
    Place,
    Stage,
    Things,
    call_id,
)
from gradsurg.sites.selection import Pattern, Types, matches, matches_type
from gradsurg.sites.selectors import offered_names
from gradsurg.torch_internals import compiling
from gradsurg.transforms.base import Scope

Mode = Literal["forward_pre", "forward", "full_backward_pre", "full_backward"]


def _things(model: nn.Module) -> list[Named]:
    """Return the modules of a model, and an entry for all others."""
    return [*modules_of(model), Named((ELSEWHERE,), model, (model,))]


def _watch(mode: Mode, door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook all modules of the process."""
    kind, own_name = _kind(mode), name_in(modules_of(door.model))

    def name_of(module: nn.Module) -> str:
        # The wrapper that torch.compile puts around a module has no name.
        return own_name(module) or ("" if compiling.is_wrapper(module) else type(module).__name__)

    if mode in ("full_backward_pre", "full_backward"):
        # With global backward hooks PyTorch refuses to call any ScriptModule.
        refuse_scripted(door, kind, modules_of(door.model))
        BackwardPasses(kind, door, shared, name_of).hook(None)
        return
    refuse_scripted(door, kind, [named for named in found if named.names != (ELSEWHERE,)])
    like = EveryModule(kind=mode)
    flow = Flow(like, door, shared, name_of)
    if mode == "forward_pre":
        handle = process.register_module_forward_pre_hook(compiling.untraced(flow.on_input))
    else:
        # PyTorch's type allows no return value, but the hook may return a new output.
        after: Any = compiling.untraced(flow.on_output)
        handle = process.register_module_forward_hook(after)
    door.stack.callback(remove_hook, handle)


@cache
def _kind(mode: Mode) -> Kind:
    suffix = ".input" if mode in ("forward_pre", "full_backward") else ""
    return Kind("EveryModule", mode, _things, partial(_watch, mode), suffix, reaches_new=True)


@validated
class EveryModule(Leaf):
    """Act at every module of the process whose name fits `pattern`, also outside the model.

    `types` is a pattern on the class. `kind` chooses the global hook and the sites. `forward_pre`
    and `forward` change the positional inputs and the outputs of modules, like `Activations`.
    `full_backward_pre` and `full_backward` change gradients, like `ModuleGradients`, whose limits
    then hold for every module of the process.

    A module of the model has its name there. The model itself is `root`, which only the pattern
    `root` selects, unless the model has no submodules. Any other module has the name of its class:
    a loss is `CrossEntropyLoss#0`. Calls are counted within one call of the model; a call outside
    it is call 0.

    Calls in all threads are seen, but not those in compiled code, which ignores global hooks
    registered after it was compiled. Modules outside the model are unknown until they are called: a
    name that no module has is reported on detach.
    """

    pattern: Pattern = "*"
    types: Types = "*"
    kind: Mode = "forward"
    stage: Stage | None = None

    stages: ClassVar[tuple[Stage, ...]] = ("forward", "backward")
    compile_limit: ClassVar[str] = "PyTorch compiles nothing while there are global hooks"

    def kind_at(self, stage: Stage | None) -> Kind:
        return _kind(self.kind)

    @property
    def changed_tensors(self) -> str:
        return "activations" if self.kind in ("forward_pre", "forward") else "gradients"

    def resolve(self, scope: Scope) -> Stage:
        own: Stage = "forward" if self.kind in ("forward_pre", "forward") else "backward"
        stage = super().resolve(scope) if scope == "group" or self.stage else own
        if stage != own:
            raise ValueError(
                f"EveryModule with kind '{self.kind}' cannot have stage '{stage}'; stages it can "
                f"have: {own}"
            )
        return stage

    def find(self, model: nn.Module) -> list[str]:
        names = [name for name in super().find(model) if name != ELSEWHERE]
        return names or [f"what fits {self!r} outside the model"]

    def near(self, named: Named) -> Sequence[str]:
        if named.names == (ELSEWHERE,):
            return named.names
        (module, *_) = named.owners
        fitting = [name for name in self.offers(named) if matches(name, self.pattern)]
        return fitting if matches_type(module, self.types) else ()

    def offers(self, named: Named) -> Sequence[str]:
        return offered_names(named, self.pattern)

    def fits(self, place: Place, memory: Memory) -> bool:
        return place.kind == self.kind_at(memory.stage) and self.picks(place)

    def picks(self, place: Place) -> bool:
        # A module outside the model is seen at its first call alone.
        module = place.thing
        return isinstance(module, nn.Module) and bool(
            self.near(Named(place.names, module, (module,)))
        )

    def check(self, things: Things, memory: Memory) -> None:
        """Accept all names: those of modules outside the model are not known yet."""

    def expected(self, name: str) -> str:
        return "" if name == ELSEWHERE else call_id(name, 0) + _kind(self.kind).suffix
