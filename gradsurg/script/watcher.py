"""Finds the model and the optimizers that a running script trains, and attaches a surgery in time.

`Optimizer.__init__` is wrapped: there is no public hook for it. `nn.Module.__call__` is wrapped
while an optimizer is new, and restored when its model is found. A global forward pre-hook would not
do: a hook that it adds to the model is not run in that same call, and torch.compile warns of it. A
step with a closure runs the first forward inside: there the public step pre-hook attaches.
"""

import gc
import hashlib
import inspect
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.plugins.messages import shortened

LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
PACKAGE = str(Path(__file__).parents[1])
LAUNCHER = "a launcher goes in front: torchrun .. -m gradsurg.script .. -- train.py"


class Refusal(SystemExit):
    """The script is ended: it cannot be trained with the surgery; the message says why."""


@dataclass(eq=False)
class AttachedModel:
    """A surgery that is attached to one model, with the optimizers that it is bound to."""

    model: nn.Module
    name: str
    surgery: Surgery
    live: Live
    optimizers: list[Optimizer]
    trained: set[int]  # the ids of its parameters that required a gradient
    first_step: int = 0  # steps made with earlier models, such as other folds
    begin: str = ""

    @property
    def step(self) -> int:
        """The steps of all models so far."""
        return self.first_step + self.live.step


@dataclass
class Watcher:
    """Attaches a new surgery to each model that the script trains.

    `wanted` is the variable or the class of the model, required if there are several. `on_attach`
    gets the attachment, and the arguments of the call that is about to run, if it is a call of
    the model. `on_step` is called after each step that is counted, `on_detach` before a surgery is
    hooked anew to a model with more sites.
    """

    make_surgery: Callable[[], Surgery]
    wanted: str
    effects_every: int
    on_attach: Callable[[nn.Module, object], None]
    on_step: Callable[[AttachedModel], None]
    on_detach: Callable[[AttachedModel], None]
    attached: list[AttachedModel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: dict[str, None] = field(default_factory=dict)
    steps: int = 0  # of any optimizer

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._made: list[weakref.ref[Optimizer]] = []
        self._kinds: list[str] = []  # of all optimizers, also of those that are gone
        self._left_out: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose model is attached
        self._bound: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # bound now or earlier
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._joined: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._module_call: Any = nn.Module.__call__
        self._is_waiting = False
        self._wrap_constructor(Optimizer, self._optimizer_made)
        self._wrap_constructor(torch.amp.GradScaler, self._scaler_made)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def step(self) -> int:
        """The steps that are counted."""
        return self.attached[-1].step if self.attached else 0

    def why_not(self) -> str:
        """Return why nothing is attached; empty if a surgery is."""
        if self.attached:
            return ""
        if self.wanted and self.seen:
            none = f"model={self.wanted}: no trained model has this name or class"
            return f"{none}; seen: {shortened(self.seen)}"
        found = shortened(dict.fromkeys(self._kinds)) or "no optimizer"
        held = f"found {found}; {self.steps} steps"
        return (
            "the surgery was not attached: no module was called with gradients after an optimizer "
            f"was made ({held}). Updates by hand, tensors without a module, and training in a "
            f"process that the script starts are not seen; {LAUNCHER}"
        )

    # Construction.

    def _wrap_constructor(self, cls: type, made: Callable[[Any, FrameType], None]) -> None:
        plain: Any = cls.__init__

        @wraps(plain)
        def init(one: Any, *args: Any, **kwargs: Any) -> None:
            plain(one, *args, **kwargs)
            made(one, sys._getframe(1))

        cls.__init__ = init

    def _scaler_made(self, scaler: torch.amp.GradScaler, _: FrameType) -> None:
        self._scalers.append(weakref.ref(scaler))

    def _optimizer_made(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        self._made.append(weakref.ref(optimizer))
        self._kinds.append(f"{_kind(optimizer)} of {len(_params(optimizer))} tensors")
        self._note_names(frame)
        self._wait()

    def _wait(self) -> None:
        """Look at each call of a module, until the models of all optimizers are known."""
        if self._is_waiting:
            return
        self._is_waiting, watcher, plain = True, self, self._module_call

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Compiled code is traced through this function, and must not have it inside.
            if (
                watcher._is_waiting
                and torch.is_grad_enabled()
                and not torch.compiler.is_compiling()
            ):
                watcher._called(module, args, kwargs)
            return plain(module, *args, **kwargs)

        nn.Module.__call__ = call

    def _end_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            nn.Module.__call__ = self._module_call  # before anything is hooked or compiled

    def _note_names(self, frame: FrameType | None) -> None:
        """Note the variables of the user's functions that hold models, the nearest first."""
        frames = list[FrameType]()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        for each in frames:
            file = each.f_code.co_filename
            if file.startswith((*LIBRARIES, PACKAGE, "<frozen")):
                continue
            for name, value in list(each.f_locals.items()):
                if name == "self" and not _is_module(value):
                    for key, inner in list(getattr(value, "__dict__", {}).items()):
                        self._name(inner, key)
                elif name != "self":
                    self._name(value, name)

    def _name(self, value: object, name: str) -> None:
        if _is_module(value):
            self._names.setdefault(value, name)

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        if os.getpid() != self._process or optimizer in self._left_out or self._is_bound(optimizer):
            return
        if all(ref() is not optimizer for ref in self._made):  # it was copied or unpickled
            self._optimizer_made(optimizer, sys._getframe(1))
        own = _params(optimizer).keys()
        if any(each.live.attachment.steps.is_stepping for each in self.attached):
            self._left_out.add(optimizer)  # called in the step of a wrapper such as SAM
        elif any(own & _ids(each.model) for each in self.attached):
            self._rebind([optimizer])
        elif len(args) > 1 or kwargs.get("closure") is not None:
            whole = self._container(own)
            if whole is not None:
                self._called(whole, (), {}, has_input=False)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        self.steps += 1
        for each in self.attached:
            if each.live.attachment.steps.clock is optimizer:
                self.on_step(each)

    # Models.

    def _is_bound(self, optimizer: Optimizer) -> bool:
        return any(optimizer in each.optimizers for each in self.attached)

    def _new(self) -> list[Optimizer]:
        """The live optimizers whose model is not known yet, without those inside a wrapper."""
        alive = [one for ref in self._made if (one := ref()) is not None]
        inner = {id(value) for one in alive for value in vars(one).values() if value is not one}
        return [
            one
            for one in alive
            if id(one) not in inner
            and one not in self._left_out
            and one not in self._met
            and _params(one)
        ]

    def _called(self, module: nn.Module, args: Any, kwargs: Any, has_input: bool = True) -> None:
        """Attach to the model of new optimizers, of which `module` may be the whole or a part."""
        new = self._new()
        if not new:
            self._end_waiting()
            return
        held = _ids(module)
        touched = [one for one in new if not held.isdisjoint(_params(one))]
        if not touched:
            return  # a teacher, a loss, a metric
        self._note_names(sys._getframe(1))  # a model may be compiled after its optimizer
        if any(held & _ids(each.model) for each in self.attached):
            self._rebind(touched)
            return
        root = self._root(module, touched)
        if root is None:
            return
        example = _arguments(module, args, kwargs) if has_input and root is module else None
        if self.wanted:
            chosen = self._chosen(root)
            self.seen[self._text(root)] = None
            if chosen is None:
                self._left_out.update(touched)
                return
            example = example if chosen is root else None
            own = _ids(chosen)
            others = [one for one in touched if own.isdisjoint(_params(one))]
            self._left_out.update(others)
            touched = [one for one in touched if one not in others]
            if not touched:
                return
            root = chosen
        else:
            root, touched = self._alone(root, touched, new)
        self._met.update(touched)
        self._attach(root, self._disjoint(touched), example)

    def _alone(
        self, root: nn.Module, touched: list[Optimizer], new: list[Optimizer]
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Return the only model that is trained, with its optimizers. Raises Refusal if there are
        several, at once or one after the other, unless the later ones are of the same class.
        """
        others = [one for one in new if one not in touched]
        if others:
            whole = self._container({key for one in new for key in _params(one)})
            if whole is not None:
                return whole, new
            also = [self._root(None, [one]) for one in others]
            self._refuse([root, *(one for one in also if one is not None)], "are trained")
        if self.attached and type(root) is not type(self.attached[0].model):
            models = [self.attached[0].model, root]
            self._refuse(models, "are trained, one after the other")
        return root, touched

    def _refuse(self, models: Sequence[nn.Module], what: str) -> None:
        names = {self._text(one): self._names.get(one) or type(one).__name__ for one in models}
        choices = " or ".join(f"model={name}" for name in dict.fromkeys(names.values()))
        text = f"{len(names)} models" if len(names) > 1 else f"{len(models)} models of one class"
        raise Refusal(f"model: {text} {what}, {shortened(names)}: write {choices}")

    def _chosen(self, root: nn.Module) -> nn.Module | None:
        """Return the root, or the module in it, that is wanted by its variable or class."""
        if self.wanted in (self._names.get(root), type(root).__name__):
            return root
        for name, inner in root.named_modules():
            if inner is not root and self.wanted in (
                name,
                self._names.get(inner),
                type(inner).__name__,
            ):
                return inner
        return None

    def _root(self, module: nn.Module | None, optimizers: list[Optimizer]) -> nn.Module | None:
        """Return the module that holds all parameters of the optimizers.

        This is the called module if it does, otherwise the smallest that does, otherwise a new one
        made of the outermost modules.
        """
        wanted = {key for one in optimizers for key in _params(one)}
        if module is not None and wanted <= _ids(module):
            return module
        whole = self._container(wanted)
        return whole if whole is not None else self._parts(wanted)

    def _container(self, wanted: Iterable[int]) -> nn.Module | None:
        """Return the smallest module that holds all parameters; of equal ones the outermost."""
        wanted, found = {*wanted}, []
        for each in _modules():
            if each not in self._joined and wanted <= (inside := _ids(each)):
                found.append((len(inside), -len(list(each.modules())), each))
        return min(found, key=lambda row: row[:2])[2] if found else None

    def _parts(self, wanted: set[int]) -> nn.Module | None:
        """Return the outermost module that has no other parameters. Several such modules are put
        into a ModuleDict, under the names of their variables.
        """
        inside = [each for each in _modules() if (own := _ids(each)) and own <= wanted]
        inside = [each for each in inside if each not in self._joined]
        within = {id(part) for each in inside for part in each.modules() if part is not each}
        tops: dict[str, nn.Module] = {}
        for each in inside:
            if id(each) not in within:
                name = self._names.get(each) or type(each).__name__.lower()
                tops[f"{name}_{len(tops)}" if name in tops else name] = each
        rest = len(wanted - {key for each in tops.values() for key in _ids(each)})
        if tops and rest:
            self.notes.append(f"{rest} tensors of the optimizer are in no module: without surgery")
        if len(tops) < 2:
            return next(iter(tops.values()), None)
        joined = nn.ModuleDict(tops)
        self._joined.add(joined)
        self._names[joined] = " and ".join(tops)
        return joined

    def _disjoint(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers without those whose parameters an earlier one has.

        The others are bound when they step.
        """
        chosen, held = list[Optimizer](), set[int]()
        for one in optimizers:
            if held.isdisjoint(own := _params(one)):
                chosen.append(one)
                held |= own.keys()
        return chosen

    # Attaching.

    def _attach(self, model: nn.Module, optimizers: list[Optimizer], example: object) -> None:
        self._end_waiting()
        self.on_attach(model, example)
        name = self._text(model)
        self.seen[name] = None
        surgery = self.make_surgery()
        live = self._start(surgery, model, optimizers)
        self._bound.update(optimizers)
        made = AttachedModel(model, name, surgery, live, optimizers, _trained(model), self.step)
        made.begin = digest([*model.parameters(), *_tensors(example)])
        self.attached.append(made)
        told = f"attached to {name} and {', '.join(map(_kind, optimizers))}"
        self.notes.append(
            told if len(self.attached) == 1 else f"{told} (model {len(self.attached)})"
        )
        if self._new():  # those of other models
            self._wait()

    def _start(self, surgery: Surgery, model: nn.Module, optimizers: list[Optimizer]) -> Live:
        scalers = [one for ref in self._scalers if (one := ref()) is not None and one.is_enabled()]
        try:
            return surgery.start(
                model,
                optimizers,
                effects_every=self.effects_every,
                scaler=scalers[-1] if scalers else None,
            )
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            text = error.args[0] if isinstance(error, LookupError) and error.args else error
            raise Refusal(
                f"the surgery cannot be attached to {self._text(model)}: {text}"
            ) from error

    def _rebind(self, optimizers: list[Optimizer]) -> None:
        """Bind an attached surgery to other optimizers of its model, in the place of those that
        have the same parameters; hook it anew if parameters were unfrozen.
        """
        for each in self.attached:
            inside = _ids(each.model)
            mine = [one for one in optimizers if not inside.isdisjoint(_params(one))]
            if not mine:
                continue
            bound = self._disjoint([*mine, *each.optimizers])
            if _trained(each.model) <= each.trained:
                each.live.bind(bound, clock=bound[0])
            else:
                self.on_detach(each)
                each.live.abort()
                each.live = self._start(each.surgery, each.model, bound)
                each.trained = _trained(each.model)
            each.optimizers = bound
            self._met.update(mine)
            if fresh := [one for one in mine if one not in self._bound]:
                told = f"bound to another optimizer of {each.name} from step {each.step}"
                self.notes.append(f"{told}: {', '.join(map(_kind, fresh))}")
                self._bound.update(fresh)
        if not self._new():
            self._end_waiting()

    def _text(self, model: nn.Module) -> str:
        """The class of a model, and its variable."""
        name = self._names.get(model)
        return f"{type(model).__name__} ({name})" if name else type(model).__name__


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the values of tensors; a tensor on a GPU counts with its sum alone."""
    found = hashlib.sha256()
    for each in tensors:
        if each.is_meta or is_lazy(each):
            continue
        plain = each.detach()
        if plain.device.type != "cpu" or plain.layout != torch.strided:
            plain = plain.sum().double().cpu()
        found.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _is_module(value: object) -> TypeGuard[nn.Module]:
    """By its type: `isinstance` asks lazy objects for their class, and some then warn."""
    return issubclass(type(value), nn.Module)


def _modules() -> Iterator[nn.Module]:
    """All modules that are alive."""
    for each in gc.get_objects():
        if _is_module(each) and "_parameters" in vars(each):
            yield each


def _ids(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters()}


def _trained(module: nn.Module) -> set[int]:
    return {id(param) for param in module.parameters() if param.requires_grad}


def _params(optimizer: Optimizer) -> dict[int, Tensor]:
    """The parameters of an optimizer that require a gradient, by their ids."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(one): one for group in groups for one in group["params"] if one.requires_grad}


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Return the arguments of a call as an example input: a tuple, or a dict by names."""
    if not kwargs:
        return args
    try:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return None


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (one for inner in value.values() for one in _tensors(inner))
    elif isinstance(value, tuple | list):
        yield from (one for inner in value for one in _tensors(inner))
