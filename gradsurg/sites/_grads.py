"""Read, transform and write the `.grad`s of parameters, also of sharded ones."""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from gradsurg.sites.base import Attached, GroupFn, Selector, SiteHook
from gradsurg.sites.contexts import refusal
from gradsurg.torch_internals import autograd

Value = Callable[[], Tensor | None]

Act = Callable[[Sequence[Tensor | None]], None]
"""Transforms the `.grad`s of parameters; None stands for one that is left alone."""


def _grad(param: Tensor) -> Tensor | None:
    return param.grad


def _set_grad(param: Tensor, grad: Tensor) -> None:
    param.grad = grad


@dataclass(frozen=True)
class Access:
    """How hooks read a parameter and its gradient, and write a new gradient.

    `around` is entered while they run. If `slow`, a gradient is read when it is needed, each time.
    """

    read: Callable[[Tensor], Tensor | None] = _grad
    write: Callable[[Tensor, Tensor], None] = _set_grad
    value: Callable[[nn.Parameter], Value | None] = ref
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    slow: bool = False


def actor(
    params: Mapping[str, nn.Parameter],
    attached: Attached,
    access: Access,
    skip: Callable[[], None] | None = None,
) -> Act:
    """Return a function that transforms the `.grad`s of the parameters, given in this order.

    A transform of single tensors gets one after the other, a group transform all of them.
    """
    values = [access.value(param) or _no_value for param in params.values()]
    if attached.scope == "group":
        return partial(_together, access, attached.group_hook([*params], values, skip=skip))
    hooks = [attached.hook_at(name, value) for name, value in zip(params, values, strict=True)]
    return partial(_one_by_one, access, hooks, values)


def hook_accumulated(
    params: Mapping[str, nn.Parameter], attached: Attached, access: Access
) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    for name, param in params.items():
        hook = partial(_act_on, actor({name: param}, attached, access))
        attached.stack.callback(param.register_post_accumulate_grad_hook(hook).remove)


def _act_on(act: Act, param: Tensor) -> None:
    act([param])


def _one_by_one(
    access: Access,
    hooks: Sequence[SiteHook],
    values: Sequence[Value],
    params: Sequence[Tensor | None],
) -> None:
    with access.around():
        for param, hook, value in zip(params, hooks, values, strict=True):
            if param is None:
                continue
            # The hook may be older than the parameter, if one of the same name was replaced.
            result = hook(access.read(param), None if access.slow else value())
            if result is not None:
                access.write(param, result)


def _together(access: Access, act: GroupFn, params: Sequence[Tensor | None]) -> None:
    grads = _LateGrads(access, params) if access.slow else _grads(access, params)
    with access.around():
        results = act(grads)
        if results is grads:
            return
        del grads  # `act` frees each gradient when its result is there
        for param, result in zip(params, results, strict=True):
            if param is not None and result is not None:
                access.write(param, result)


def _grads(access: Access, params: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if param is None else access.read(param) for param in params]


class _LateGrads(MutableSequence[Tensor | None]):
    """The gradients of parameters, each read whenever it is asked for."""

    def __init__(self, access: Access, params: Sequence[Tensor | None]) -> None:
        self._read, self._params = access.read, [*params]

    def __len__(self) -> int:
        return len(self._params)

    def __getitem__(self, index: Any) -> Any:  # Any: an int or a slice, as in a list
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        param = self._params[index]
        return None if param is None else self._read(param)

    def __setitem__(self, index: Any, grad: Any) -> None:
        assert grad is None
        self._params[index] = None

    def __delitem__(self, index: Any) -> None:
        raise TypeError("the number of gradients is fixed")

    def insert(self, index: int, value: Tensor | None) -> None:
        raise TypeError("the number of gradients is fixed")


def _no_value() -> None:
    return None


# Parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.


def access_to(selector: Selector, params: Mapping[str, nn.Parameter], attached: Attached) -> Access:
    """Return how to read and write the `.grad`s: as they are, their parts, or gathered.

    Processes communicate at `step`, where all decide alike; not at `accumulated`.
    """
    sharded = [cast(Any, param) for param in params.values() if autograd.is_sharded(param)]
    if not sharded:
        return Access()
    meshes = {param.device_mesh for param in sharded}
    for mesh in meshes:
        if mesh.ndim != 1:
            raise refusal(selector, "FSDP2, meshes", ndim=mesh.ndim)
    mesh = sharded[0].device_mesh
    if attached.stateful:
        processes = mesh.size()
        made = int(attached.state("#parts").setdefault("processes", torch.tensor(processes)))
        if made != processes:
            raise refusal(selector, "FSDP2, resumed", made=made, found=processes)
    are_alike = len(meshes) == 1 and len(sharded) == len(params)
    by_parts = attached.acts_on_shards and are_alike
    if by_parts and not (attached.varies and attached.stage == "accumulated"):
        sizes = {name: param.numel() for name, param in params.items()}
        around = partial(attached.on_shards, mesh.get_group(), sizes)
        return Access(_part, _write_part, _nothing, around)
    if attached.stage == "accumulated":
        reason = attached.varies or "the transform or its trigger needs whole gradients"
        raise refusal(selector, "FSDP2, accumulated", reason=reason)
    attached.note("it needs whole gradients: those of sharded parameters were gathered")
    value = _late_value if attached.needs_value else _nothing
    return Access(_whole_grad, _write_share, value, slow=True)


def _nothing(param: nn.Parameter) -> None:
    """Return no value: none is needed."""


def _late_value(param: nn.Parameter) -> Value:
    return partial(_value, ref(param))


def _value(held: "ref[nn.Parameter]") -> Tensor | None:
    param = held()
    return None if param is None else _whole(param.detach())


def _whole(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).full_tensor() if autograd.is_sharded(tensor) else tensor


def _whole_grad(param: Tensor) -> Tensor | None:
    return None if param.grad is None else _whole(param.grad)


def _part(param: Tensor) -> Tensor | None:
    return None if param.grad is None else cast(Any, param.grad).to_local()


def _write_part(param: Tensor, part: Tensor) -> None:
    """Set the sharded gradient of which this process has `part`."""
    like = cast(Any, param.grad)
    size, stride = like.shape, like.stride()
    param.grad = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride
    )


def _write_share(param: Tensor, whole: Tensor) -> None:
    """Set the gradient, and keep the part of it that is of this process."""
    like = cast(Any, param.grad)
    if not autograd.is_sharded(like):
        param.grad = whole
        return
    mesh, (placement,) = like.device_mesh, like.placements
    parts = whole.chunk(mesh.size(), placement.dim)
    rank = mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    _write_part(param, part.contiguous())
