"""Read, transform and write the `.grad`s of parameters, and act around steps of optimizers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.sites.places import Door, Kind, Named, Place, PlacesHook, ReadTensor, SiteFn
from gradsurg.sites.step_hooks import Action, Params, StepActions
from gradsurg.torch_internals import autograd

Around = Callable[[], AbstractContextManager[object]]
Act = Callable[[Sequence[Tensor | None]], None]
"""Transforms the `.grad`s of parameters; None stands for one that is left alone."""


def places_of(
    door: Door, kind: Kind, found: Sequence[Named], takes_shards: bool = False
) -> list[Place]:
    """Return the places of parameters that are picked, without the frozen ones.

    Raises TypeError for a parameter that is sharded, unless the caller `takes_shards`.
    """
    places: list[Place] = []
    for named in found:
        place = named.place(kind)
        if named.is_frozen:
            door.none(place, "frozen")
        elif door.wants(place):
            if not takes_shards and autograd.is_sharded(cast(Tensor, named.thing)):
                door.refuse("FSDP2", kind, place.site)
            places.append(place)
    return places


def params_at(hook: PlacesHook) -> list[nn.Parameter]:
    """Return the parameters at which an intervention acts."""
    return [cast(nn.Parameter, place.thing) for place in hook.places]


@dataclass(frozen=True, eq=False)
class Steps:
    """A kind of site at the steps of the optimizers.

    `make` gets an intervention with its parameters in one or several optimizers, and returns the
    functions that run before and after a step. `copies` says that they need the values before the
    step. Without `is_joint`, a group in several optimizers is refused, and sharded parameters too.
    """

    door: Door
    kind: Kind
    make: Callable[[PlacesHook, Params, Optimizer], tuple[Action | None, Action | None]]
    copies: bool = False
    is_joint: bool = False

    def hook(self, found: Sequence[Named]) -> None:
        """Act around each step, if there are optimizers: else it waits for `bind`.

        Raises ValueError if two optimizers hold a parameter, or if at first none does.
        """
        if self.door.steps.optimizers:
            self.door.steps.hook(self._made, self._made(found), self.door.stack)
            self.door.at_end(self.kind, self._check_held)

    def _places(self, found: Sequence[Named] | None = None) -> list[Place]:
        found = self.door.found(self.kind) if found is None else found
        return places_of(self.door, self.kind, found, takes_shards=self.is_joint)

    def _made(self, found: Sequence[Named] | None = None) -> Iterator[StepActions]:
        steps, places = self.door.steps, self._places(found)
        holders = steps.holders()
        of = {place: holders.get(cast(Any, place.thing), []) for place in places}
        if several := [place.name for place in places if len(of[place]) > 1]:
            raise ValueError(f"stage 'step': two optimizers have {', '.join(several)}")
        for hook in self.door.meet_all(places, steps.skip):
            names = tuple(place.name for place in hook.places)
            if hook.is_new and (missing := [each.name for each in hook.places if not of[each]]):
                lacks = ", ".join(missing)
                raise ValueError(f"stage 'step': the optimizer does not have {lacks}")
            optimizers = [*dict.fromkeys(each for place in hook.places for each in of[place])]
            is_group = hook.scope == "group" and len(optimizers) > 1
            if is_group and not self.is_joint:
                self.door.refuse("several optimizers", self.kind)
            is_lbfgs = any(isinstance(each, LBFGS) for each in optimizers)
            if is_lbfgs and (self.copies or "skip" in hook.asks):
                self.door.refuse("LBFGS", self.kind)
            for some in [optimizers] if is_group else [[each] for each in optimizers]:
                pairs = zip(hook.places, params_at(hook), strict=True)
                params = [param if {*of[place]} & {*some} else None for place, param in pairs]
                before, after = self.make(hook, params, some[0])
                yield StepActions(hook.order, some, names, params, before, after, self.copies)

    def _check_held(self) -> str:
        """Note for each intervention which of its parameters no optimizer holds."""
        holders = self.door.steps.holders()
        for hook in self.door.meet_all(self._places()):
            pairs = zip(hook.places, params_at(hook), strict=True)
            if missing := [place.name for place, param in pairs if param not in holders]:
                hook.note(
                    "parameters were replaced, added or unfrozen while the block was open, and no "
                    f"optimizer of the surgery holds {', '.join(missing)}"
                )
        return ""


@torch.no_grad()
def edit(
    hook: PlacesHook,
    params: Params,
    read: Callable[[nn.Parameter], Tensor | None],
    write: Callable[[nn.Parameter, Tensor, Tensor], None],
) -> None:
    """Transform a tensor of each parameter; `write` it and the result once all are there."""
    values = [None if param is None else read(param) for param in params]
    results = list(hook([*values]))
    for param, value, result in zip(params, values, results, strict=True):
        if param is not None and value is not None and not (result is None or result is value):
            write(param, value, result)


def write_value(
    optimizer: Optimizer | None, param: nn.Parameter, new: Tensor, keeps: Tensor | None = None
) -> None:
    """Set the value of a parameter where not `keeps`, unless its step was skipped on the device."""
    found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler; 1 if skipped
    if found_inf is not None:
        skipped = found_inf.to(param.device) > 0
        keeps = skipped if keeps is None else keeps | skipped
    param.copy_(new if keeps is None else torch.where(keeps, param, new))
    if torch.is_autocast_cache_enabled():  # it holds casts of the weights before
        torch.clear_autocast_cache()


def _set_grad(param: Tensor, grad: Tensor) -> None:
    param.grad = grad


def _itself(param: Tensor) -> Tensor:
    return param


@dataclass(frozen=True)
class Access:
    """How hooks read the gradient and the value of a parameter, and write a new gradient.

    `around` is entered while hooks run.
    """

    read: Callable[[Tensor], Tensor | None] = attrgetter("grad")
    write: Callable[[Tensor, Tensor], None] = _set_grad
    value: Callable[[Tensor], Tensor | None] = _itself
    around: Around = nullcontext


PLAIN = Access()


def actor(hook: PlacesHook, access: Access = PLAIN) -> Act:
    """Return a function that transforms the `.grad`s of the parameters at the places of a hook.

    A transform of single tensors gets one after the other, a group transform all of them.
    """
    read, write, value = access.read, access.write, access.value
    calls, scalers, hook.values = hook.calls, hook.scalers, readers(hook, value)

    def act_on_each(params: Sequence[Tensor | None]) -> None:
        with access.around():
            for param, call, scale in zip(params, calls, scalers, strict=True):
                if param is not None and not (access is PLAIN and scale(param)):
                    result = call(read(param), value(param))
                    if result is not None:
                        write(param, result)

    def act_together(params: Sequence[Tensor | None]) -> None:
        grads = [None if param is None else read(param) for param in params]
        with access.around():
            results = hook(grads)
            if results is grads:
                return
            del grads  # the hook frees each gradient when its result is there
            for param, result in zip(params, results, strict=True):
                if param is not None and result is not None:
                    write(param, result)

    return act_together if hook.scope == "group" else act_on_each


def readers(
    hook: PlacesHook, value: Callable[[Tensor], Tensor | None] = _itself
) -> list[ReadTensor]:
    """Return functions that read the values of the parameters at the places of a hook."""

    def read(held: "ref[Any]") -> Tensor | None:
        param = held()
        return None if param is None else value(param)

    return [partial(read, place.held) for place in hook.places]


def hook_accumulated(door: Door, places: Sequence[Place]) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    access_at: dict[Place, Access] = {}
    for each in door.meet_all(places):
        access_at |= dict.fromkeys(each.places, access_to(door, each))
    for place in places:
        param, hook = cast(nn.Parameter, place.thing), door.meet(place)
        assert hook is not None
        act = partial(_replace_grad, hook.call)
        if (access := access_at.get(place, PLAIN)) != PLAIN:
            act = partial(_replace_part, hook.call, access.around)
        door.stack.callback(param.register_post_accumulate_grad_hook(act).remove)


def _replace_grad(call: SiteFn, param: Tensor) -> None:
    result = call(param.grad, param)
    if result is not None:
        param.grad = result


# Parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.


def access_to(door: Door, hook: PlacesHook) -> Access:
    """Return how to read and write the `.grad`s: as they are, their parts, or gathered.

    Processes communicate at `step`, where all decide alike; not at `accumulated`.
    """
    params, kind = params_at(hook), hook.places[0].kind
    sharded = [cast(Any, param) for param in params if autograd.is_sharded(param)]
    if not sharded:
        return PLAIN
    meshes = {param.device_mesh for param in sharded}
    for mesh in meshes:
        if mesh.ndim != 1:
            door.refuse("FSDP2, meshes", kind, ndim=mesh.ndim)
    mesh = sharded[0].device_mesh
    if hook.stateful:
        processes = mesh.size()
        made = int(hook.state("#parts").setdefault("processes", torch.tensor(processes)))
        if made != processes:
            door.refuse("FSDP2, resumed", kind, made=made, found=processes)
    is_running = kind.mode == "accumulated"
    by_parts = "whole" not in hook.asks and len(meshes) == 1 and len(sharded) == len(params)
    if by_parts and not (is_running and hook.varies):
        sizes = {each.name: param.numel() for each, param in zip(hook.places, params, strict=True)}
        around = partial(door.on_shards, mesh.get_group(), sizes)
        return Access(_part, _write_part, lambda _: None, around)
    if is_running:
        reason = hook.varies or "the transform or its trigger needs whole gradients"
        door.refuse("FSDP2, accumulated", kind, reason=reason)
    hook.note("it needs whole gradients: those of sharded parameters were gathered")
    reads = "value" in hook.asks
    return Access(
        lambda param: _whole(param.grad),
        _write_share,
        lambda param: _whole(param.detach()) if reads else None,
    )


def _whole(tensor: Any) -> Tensor | None:  # Any: a DTensor, a tensor or None
    return tensor.full_tensor() if autograd.is_sharded(tensor) else tensor


def _replace_part(call: SiteFn, around: Around, param: Tensor) -> None:
    with around():
        result = call(_part(param))
        if result is not None:
            _write_part(param, result)


def _part(param: Tensor) -> Tensor | None:
    return None if param.grad is None else cast(Any, param.grad).to_local()


def _write_part(param: Tensor, part: Tensor) -> None:
    """Set the sharded gradient of which this process has `part`."""
    param.grad = autograd.sharded(part, param.grad)


def _write_share(param: Tensor, whole: Tensor) -> None:
    """Set the gradient, and keep the part of it that is of this process."""
    like = cast(Any, param.grad)
    if not autograd.is_sharded(like):
        param.grad = whole
        return
    (placement,), rank = like.placements, like.device_mesh.get_local_rank()
    parts = whole.chunk(like.device_mesh.size(), placement.dim)
    part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    _write_part(param, part)
