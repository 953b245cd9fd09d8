"""Read, transform and write the `.grad`s of parameters, and act around steps of optimizers."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from gradsurg.plugins.messages import shortened
from gradsurg.plugins.reductions import multiplied
from gradsurg.sites.places import Door, Kind, ListedFn, Named, Place, PlacesHook, ReadTensor
from gradsurg.sites.step_hooks import Act, StepActions
from gradsurg.torch_internals import autograd

Around = Callable[[], AbstractContextManager[object]]


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
            door.note_no_gradient(place, "frozen")
        elif door.picking_at(place):
            if not takes_shards and autograd.is_sharded(cast(Tensor, named.thing)):
                door.refuse("FSDP2", kind, place.site)
            places.append(place)
    return places


def params_at(hook: PlacesHook) -> list[nn.Parameter]:
    """Return the parameters at which an intervention acts."""
    return [cast(nn.Parameter, place.thing) for place in hook.places]


@dataclass(frozen=True, eq=False)
class Steps:
    """A kind of site that acts around steps of the optimizers (unlike the trigger `gs.Steps`).

    `make` gets an intervention and the first of the optimizers that hold its parameters, and
    returns the functions to call before and after a step. `copies` says that the values before the
    step are needed. `is_joint`, for actions on `.grad`s, allows sharded parameters, and a group in
    several optimizers, on which it acts once. Otherwise both are refused.
    """

    door: Door
    kind: Kind
    make: Callable[[PlacesHook, Optimizer], tuple[Act | None, Act | None]]
    copies: bool = False
    is_joint: bool = False

    def hook(self, found: Sequence[Named]) -> None:
        """Act around each step, if there are optimizers, otherwise wait for `bind`.

        Raises ValueError if two optimizers hold a parameter, or if none does on attach or `bind`.
        """
        if self.door.steps.optimizers:
            self.door.steps.hook(self._made, self._made(found), self.door.stack)
            self.door.at_end(self.kind, self._check_held)

    def _places(self, found: Sequence[Named] | None = None) -> list[Place]:
        found = self.door.search_again(self.kind) if found is None else found
        return places_of(self.door, self.kind, found, takes_shards=self.is_joint)

    def _made(self, found: Sequence[Named] | None = None) -> Iterator[StepActions]:
        # An action for each optimizer, with None for the parameters of others; one for a group.
        holders, places = self.door.steps.holders(), self._places(found)
        pairs = [(place.name, cast(Any, place.thing)) for place in places]
        if several := [name for name, param in pairs if len(holders.get(param, ())) > 1]:
            raise ValueError(f"give each parameter to one optimizer: two have {shortened(several)}")
        for hook in self.door.meet_all(places, self.door.steps.skip):
            params = params_at(hook)
            if hook.is_new and (missing := _missing(hook, holders)):
                raise ValueError(f"optimizer: pass one for {missing} too, or narrow the pattern")
            held = (each for param in params for each in holders.get(param, ()))
            optimizers = [*dict.fromkeys(held)]
            is_group = hook.scope == "group" and len(optimizers) > 1
            if is_group and not self.is_joint:
                self.door.refuse("several optimizers", self.kind)
            is_lbfgs = any(isinstance(each, LBFGS) for each in optimizers)
            if is_lbfgs and (self.copies or "skip" in hook.asks):
                self.door.refuse("LBFGS", self.kind)
            for some in [optimizers] if is_group else [[each] for each in optimizers]:
                own = [p if {*some} & {*holders.get(p, ())} else None for p in params]
                before, after = self.make(hook, some[0])
                names = tuple(place.name for place in hook.places)
                yield StepActions(hook.order, some, names, own, before, after, self.copies)

    def _check_held(self) -> str:
        """Note, for each intervention, the parameters that no optimizer holds; return no text."""
        holders = self.door.steps.holders()
        for hook in self.door.meet_all(self._places()):
            if missing := _missing(hook, holders):
                hook.note(
                    "parameters were replaced, added or unfrozen while the block was open, and no "
                    f"optimizer of the surgery holds {missing}"
                )
        return ""


def _missing(hook: PlacesHook, holders: Container[nn.Parameter]) -> str:
    """Return the names of the parameters of an intervention that no optimizer holds."""
    pairs = zip(hook.places, params_at(hook), strict=True)
    return shortened(place.name for place, param in pairs if param not in holders)


def _set_grad(param: Tensor, grad: Tensor) -> None:
    param.grad = grad


def _itself(param: Tensor) -> Tensor:  # the value of a parameter, unless it is sharded
    return param


@dataclass(frozen=True)
class Access:
    """How hooks read a tensor of a parameter (by default its `.grad`) and write the result.

    `value` reads the value of the parameter. `around` is entered while hooks run.
    """

    read: Callable[[Any], Tensor | None] = attrgetter("grad")  # Any: a parameter, here and below
    write: Callable[[Any, Tensor], None] = _set_grad
    value: Callable[[Any], Tensor | None] = _itself
    around: Around = nullcontext


PLAIN = Access()


def actor(hook: PlacesHook, access: Access = PLAIN) -> Act:
    """Return a function that transforms a tensor of each parameter at the places of a hook.

    A transform of single tensors gets one after the other, a group transform all of them.
    """
    hook.values = readers(hook, access.value)
    is_group = hook.scope == "group"
    act = partial(_act_together, hook) if is_group else partial(_act_on_each, hook.calls)
    act = partial(act, access)
    return partial(_scale_or_act, hook, act) if access is PLAIN else act


def readers(hook: PlacesHook, read: Callable[[Any], Tensor | None]) -> list[ReadTensor]:
    """Return functions that read a tensor of each parameter at the places of a hook."""

    def read_of(held: "ref[Any]") -> Tensor | None:
        param = held()
        return None if param is None else read(param)

    return [partial(read_of, place.held) for place in hook.places]


def hook_accumulated(door: Door, places: Sequence[Place]) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    access: dict[Place, Access] = {}  # the same for all interventions at a place, or refused
    for each in door.meet_all(places):
        access |= dict.fromkeys(each.places, access_to(door, each))
    for place in places:
        param, hook = cast(nn.Parameter, place.thing), door.meet(place)
        assert hook is not None
        act = partial(_act_on_each, [hook.call], access.get(place, PLAIN))
        door.stack.callback(param.register_post_accumulate_grad_hook(act).remove)


def _act_on_each(calls: Sequence[ListedFn], access: Access, *params: Tensor | None) -> None:
    read, write, value = access.read, access.write, access.value
    with access.around():
        for param, call in zip(params, calls, strict=True):
            if param is not None:
                result = call(read(param), value(param))
                if result is not None:
                    write(param, result)


def _scale_or_act(hook: PlacesHook, act: Act, *params: Tensor | None) -> None:
    """Multiply each `.grad` by its factor, in place where nothing else holds it; otherwise act."""
    factors = hook.factors([None if param is None else param.grad for param in params])
    if factors is None:
        act(*params)
        return
    held = [factor for factor in factors if factor is not None]
    is_joint = len(held) > 1 and all(factor is held[0] for factor in held)  # one call for all
    owned: list[Tensor] = []
    for param, factor in zip(params, factors, strict=True):
        if param is None or factor is None:
            continue
        grad_is_owned = autograd.owns_grad(param)  # before a name below holds the gradient, too
        grad = cast(Tensor, param.grad)
        if not grad_is_owned:
            param.grad = multiplied(grad, factor)
        elif is_joint:
            owned.append(grad)
        else:
            grad.mul_(factor)
    if owned:
        autograd.foreach_mul_(owned, held[0])


def _act_together(hook: PlacesHook, access: Access, *params: Tensor | None) -> None:
    with access.around():
        before = [None if param is None else access.read(param) for param in params]
        results = hook(before)
        if results is before:
            return
        del before  # the hook frees each tensor when its result is there
        for param, result in zip(params, results, strict=True):
            if param is not None and result is not None:
                access.write(param, result)


def write_value(
    optimizer: Optimizer | None, param: nn.Parameter, new: Tensor, keeps: Tensor | None = None
) -> None:
    """Set a parameter to `new`, except where `keeps`, and if a GradScaler has skipped the step."""
    found_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler; 1 if skipped
    if found_inf is not None:
        skipped = found_inf.to(param.device) > 0
        keeps = skipped if keeps is None else keeps | skipped
    param.copy_(new if keeps is None else torch.where(keeps, param, new))
    if torch.is_autocast_cache_enabled():  # it holds casts of the old value
        torch.clear_autocast_cache()


# Parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.


def access_to(door: Door, hook: PlacesHook) -> Access:
    """Return how to read and write the `.grad`s: as they are, their parts, or gathered.

    They are gathered at `step` alone, where all processes decide alike. At `accumulated` one of
    them may not act, and the others would wait for it.
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


def _part(param: Tensor) -> Tensor | None:
    return None if param.grad is None else cast(Any, param.grad).to_local()


def _write_part(param: Tensor, part: Tensor) -> None:
    """Set the sharded gradient of which this process has `part`."""
    param.grad = autograd.sharded(part, param.grad)


def _write_share(param: Tensor, whole: Tensor) -> None:
    """Set the gradient; of a sharded parameter, the part that belongs to this process."""
    like = cast(Any, param.grad)
    if not autograd.is_sharded(like):
        param.grad = whole
        return
    (placement,), rank = like.placements, like.device_mesh.get_local_rank()
    parts = whole.chunk(like.device_mesh.size(), placement.dim)
    part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    _write_part(param, part)
