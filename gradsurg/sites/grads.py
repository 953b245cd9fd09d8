"""Read, transform and write the `.grad`s of parameters, and act around steps of optimizers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.sites.places import Door, Kind, ListHook, Named, Place, SiteFn
from gradsurg.sites.step_hooks import Member, StepActions
from gradsurg.torch_internals import autograd

Params = Sequence[nn.Parameter | None]
"""The parameters at the places of a list; None for one that is left alone."""

Act = Callable[[Sequence[Tensor | None]], None]
"""Transforms the `.grad`s of parameters; None stands for one that is left alone."""

Copies = dict[nn.Parameter, Tensor]
"""The values of parameters before a step; empty except during one."""


def places_of(
    door: Door, kind: Kind, found: Sequence[Named], takes_shards: bool = False
) -> list[Place]:
    """Return the places of parameters that are picked, without the frozen ones.

    Raises TypeError for a parameter that is sharded, unless the caller `takes_shards`.
    """
    places: list[Place] = []
    for names, param, _ in found:
        assert isinstance(param, Tensor)
        place = Place(kind, names, ref(param))
        if not param.requires_grad:
            door.none(place, "frozen")
        elif door.wants(place):
            if not takes_shards and autograd.is_sharded(param):
                door.refuse("FSDP2", kind, place.site)
            places.append(place)
    return places


def params_at(hook: ListHook) -> list[nn.Parameter]:
    """Return the parameters at which an intervention acts."""
    return [cast(nn.Parameter, place.thing) for place in hook.places]


@dataclass(frozen=True, eq=False)
class Steps:
    """A kind of site at the steps of the optimizers, to which `make` says what is done.

    `copies` gets the values before each step. Without `is_joint`, a group of parameters in several
    optimizers is refused, as well as sharded parameters.
    """

    door: Door
    kind: Kind
    make: Callable[[ListHook, Params, Sequence[Optimizer]], StepActions]
    copies: Copies | None = None
    is_joint: bool = False

    def hook(self, found: Sequence[Named]) -> None:
        """Act around each step, if there are optimizers: else it waits for `bind`.

        Raises ValueError if two optimizers hold a parameter, or if at first none does.
        """
        steps = self.door.steps
        if steps.optimizers:
            steps.hook(self._members(found), self.made_anew, self.door.stack)
            self.door.at_end(self.kind, self._check_held)

    def made_anew(self) -> list[Member]:
        """Return what is done, as the model and the optimizers are now."""
        return self._members(self.door.found(self.kind))

    def _members(self, found: Sequence[Named]) -> list[Member]:
        places, holders = self._places(found), self.door.steps.holders()
        if several := [each.name for each in places if len(holders.get(each.thing, ())) > 1]:
            raise ValueError(f"stage 'step': two optimizers have {', '.join(several)}")
        of = {param: optimizer for param, (optimizer, *_) in holders.items()}
        hooks = self.door.meet_all(places, self.door.steps.skip)
        members = [self._member(hook, of) for hook in hooks]
        return members if self.copies is None else [*members, _copying(self.copies, places, of)]

    def _places(self, found: Sequence[Named]) -> list[Place]:
        return places_of(self.door, self.kind, found, takes_shards=self.is_joint)

    def _member(self, hook: ListHook, of: Mapping[nn.Parameter, Optimizer]) -> Member:
        """Return what an intervention does; `of` has the optimizer of each parameter."""
        missing, params = _not_in(of, hook), params_at(hook)
        if hook.is_new and missing:
            raise ValueError(f"stage 'step': the optimizer does not have {missing}")
        held = {param: of[param] for param in params if param in of}
        optimizers = [*dict.fromkeys(held.values())]
        is_group = hook.scope == "group" and len(optimizers) > 1
        if is_group and not self.is_joint:
            self.door.refuse("several optimizers", self.kind)
        is_lbfgs = any(isinstance(each, LBFGS) for each in optimizers)
        if is_lbfgs and (self.copies is not None or "skip" in hook.asks):
            self.door.refuse("LBFGS", self.kind)
        actions: dict[Optimizer, StepActions] = {}
        for each in [optimizers] if is_group else [[each] for each in optimizers]:
            own = [param if held.get(param) in each else None for param in params]
            actions |= dict.fromkeys(each, self.make(hook, own, each))
        names = tuple(place.name for place in hook.places)
        return Member(hook.order, actions, held if is_group else {}, names)

    def _check_held(self) -> str:
        """Note which parameters no optimizer holds."""
        if self.door.steps.is_hooked(self.made_anew):  # else the kind is watched anew
            holders, places = self.door.steps.holders(), self._places(self.door.found(self.kind))
            for hook in self.door.meet_all(places):
                if missing := _not_in(holders, hook):
                    hook.note(
                        "parameters were replaced, added or unfrozen while the block was open, and "
                        f"no optimizer of the surgery holds {missing}"
                    )
        return ""


def _not_in(held: Mapping[Any, object], hook: ListHook) -> str:
    """The names of the parameters that no optimizer holds. Any: also places have no parameter."""
    return ", ".join(place.name for place in hook.places if place.thing not in held)


def _copying(
    copies: Copies, places: Sequence[Place], of: Mapping[nn.Parameter, Optimizer]
) -> Member:
    """Return what keeps copies of parameters during the steps, until all have acted."""

    def begin(params: Sequence[nn.Parameter]) -> None:
        copies.update((param, param.detach().clone()) for param in params)

    def after(params: Sequence[nn.Parameter]) -> None:
        for param in params:
            copies.pop(param, None)

    held: dict[Optimizer, list[nn.Parameter]] = {each: [] for each in of.values()}
    for param in [cast(nn.Parameter, place.thing) for place in places]:
        if param in of:
            held[of[param]].append(param)
    actions = {
        each: StepActions(begin=partial(begin, own), after=partial(after, own))
        for each, own in held.items()
    }
    return Member(sys.maxsize, actions)


def write_value(
    optimizer: Optimizer | None, param: nn.Parameter, new: Tensor, keeps: Tensor | None = None
) -> None:
    """Set the value of a parameter, but not where `keeps` is True.

    Nor after a step that a fused optimizer has skipped on the device.
    """
    found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler; 1 if skipped
    if found_inf is not None:
        skipped = found_inf.to(param.device) > 0
        keeps = skipped if keeps is None else keeps | skipped
    param.copy_(new if keeps is None else torch.where(keeps, param, new))


def forget_casts() -> None:
    """Clear the cache of autocast, which holds casts of the weights before they were changed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def _grad(param: Tensor) -> Tensor | None:
    return param.grad


def _set_grad(param: Tensor, grad: Tensor) -> None:
    param.grad = grad


def _self(param: Tensor) -> Tensor:
    return param


@dataclass(frozen=True)
class Access:
    """How hooks read a parameter and its gradient, and write a new gradient.

    `around` is entered while hooks run.
    """

    read: Callable[[Tensor], Tensor | None] = _grad
    write: Callable[[Tensor, Tensor], None] = _set_grad
    value: Callable[[Tensor], Tensor | None] = _self
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def actor(hook: ListHook, access: Access) -> Act:
    """Return a function that transforms the `.grad`s of the parameters at the places of a hook.

    A transform of single tensors gets one after the other, a group transform all of them.
    """
    if hook.scope == "group":
        hook.values = [partial(_read, access.value, place.held) for place in hook.places]
        return partial(_act_together, hook, access)
    if access == Access():
        return partial(_act_on_plain, hook.calls)
    return partial(_act_on_each, hook.calls, access)


def _read(value: Callable[[Tensor], Tensor | None], held: "ref[Any]") -> Tensor | None:
    param = held()
    return None if param is None else value(param)


def _act_together(hook: ListHook, access: Access, params: Sequence[Tensor | None]) -> None:
    grads = [None if param is None else access.read(param) for param in params]
    with access.around():
        results = hook(grads)
        if results is grads:
            return
        del grads  # the hook frees each gradient when its result is there
        for param, result in zip(params, results, strict=True):
            if param is not None and result is not None:
                access.write(param, result)


def _act_on_plain(calls: Sequence[SiteFn], params: Sequence[Tensor | None]) -> None:
    for param, call in zip(params, calls, strict=True):
        if param is not None and (result := call(param.grad, param)) is not None:
            param.grad = result


def _act_on_each(calls: Sequence[SiteFn], access: Access, params: Sequence[Tensor | None]) -> None:
    with access.around():
        for param, call in zip(params, calls, strict=True):
            if param is not None:
                result = call(access.read(param), access.value(param))
                if result is not None:
                    access.write(param, result)


def hook_accumulated(door: Door, places: Sequence[Place]) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    accesses = {hook.order: access_to(door, hook) for hook in door.meet_all(places)}
    is_plain = all(access == Access() for access in accesses.values())
    for place in places:
        param, hook = cast(nn.Parameter, place.thing), door.meet(place)
        assert hook is not None
        replace = partial(_replace_grad, hook.call)
        if not is_plain:
            lists = door.meet_all([place])
            replace = partial(_act_on, [actor(each, accesses[each.order]) for each in lists])
        door.stack.callback(param.register_post_accumulate_grad_hook(replace).remove)


def _replace_grad(call: SiteFn, param: Tensor) -> None:
    result = call(param.grad, param)
    if result is not None:
        param.grad = result


def _act_on(acts: Sequence[Act], param: Tensor) -> None:
    for act in acts:
        act([param])


# Parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.


def access_to(door: Door, hook: ListHook) -> Access:
    """Return how to read and write the `.grad`s: as they are, their parts, or gathered.

    Processes communicate at `step`, where all decide alike; not at `accumulated`.
    """
    params, kind = params_at(hook), hook.places[0].kind
    sharded = [cast(Any, param) for param in params if autograd.is_sharded(param)]
    if not sharded:
        return Access()
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
        sizes = {
            place.name: param.numel() for place, param in zip(hook.places, params, strict=True)
        }
        around = partial(door.on_shards, mesh.get_group(), sizes)
        return Access(_part, _write_part, no_value, around)
    if is_running:
        reason = hook.varies or "the transform or its trigger needs whole gradients"
        door.refuse("FSDP2, accumulated", kind, reason=reason)
    hook.note("it needs whole gradients: those of sharded parameters were gathered")
    return Access(_whole_grad, _write_share, _whole_value if "value" in hook.asks else no_value)


def no_value(param: Tensor) -> None:
    """Return no value: none is needed."""


def _whole_value(param: Tensor) -> Tensor:
    return _whole(param.detach())


def _whole(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).full_tensor() if autograd.is_sharded(tensor) else tensor


def _whole_grad(param: Tensor) -> Tensor | None:
    return None if param.grad is None else _whole(param.grad)


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
