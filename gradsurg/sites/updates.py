"""Updates: the change that the optimizer makes to each parameter in a step."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Shared
from gradsurg.sites.grads import Access, Steps, actor, readers, write_value
from gradsurg.sites.places import Door, Kind, Named, PlacesHook, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.sites.step_hooks import Act
from gradsurg.transforms.base import Need
from gradsurg.transforms.norm_matched import norm_matched


def _watch_updates(door: Door, found: Sequence[Named], shared: Shared) -> None:
    before = door.steps.copies

    def make(hook: PlacesHook, optimizer: Optimizer) -> tuple[None, Act]:
        def read(param: nn.Parameter) -> Tensor | None:
            # There is no copy if it was attached during the step.
            has_update = param.grad is not None and param in before
            return param - before[param] if has_update else None

        def write(param: nn.Parameter, result: Tensor) -> None:
            # before + (after - before) is rounded, and is not `after`
            keeps = result == param - before[param]
            write_value(optimizer, param, before[param] + result, keeps)

        hook.gradients = readers(hook, _gradient)
        return None, actor(hook, Access(read, write, before.get, torch.no_grad))

    Steps(door, UPDATES, make, copies=True).hook(found)


def _watch_matched(door: Door, found: Sequence[Named], shared: Shared) -> None:
    before = door.steps.copies

    def make(hook: PlacesHook, optimizer: Optimizer) -> tuple[Act, Act]:
        names = {cast(nn.Parameter, place.thing): place.name for place in hook.places}
        key = f"optimizer{door.steps.optimizers.index(optimizer)}"
        treated: dict[nn.Parameter, Tensor] = {}  # gradients, transformed by `act`
        act = actor(hook, Access(write=treated.__setitem__))

        def treat(*params: nn.Parameter | None) -> None:
            treated.clear()
            grads = {param: param.grad for param in params if param is not None}
            treated.update({param: grad for param, grad in grads.items() if grad is not None})
            act(*params)

        @torch.no_grad()
        def match(*params: nn.Parameter | None) -> None:
            copies: dict[nn.Parameter, Tensor] = {}
            for param, grad in treated.items():
                if param in before:  # there is no copy if it was attached during the step
                    copies[param] = before[param].clone()
                    copies[param].grad = grad.detach()
            if copies:
                _step_second(optimizer, names, copies, hook.state(key))
            for param, copied in copies.items():
                update, wanted = param - before[param], copied - before[param]
                keeps = (wanted == update).all()  # before + (after - before) is rounded
                write_value(optimizer, param, before[param] + norm_matched(update, wanted), keeps)

        return treat, match

    Steps(door, MATCHED, make, copies=True).hook(found)


UPDATES = Kind("Updates", "step", params_of, _watch_updates, known_at="watch")
MATCHED = Kind("MatchedUpdates", "step", params_of, _watch_matched, known_at="watch")


@validated
class Updates(ParamSelector):
    """Transform the change that the optimizer makes to each selected parameter in a step.

    The update is u = (value after the optimizer's step) - (value before it), with learning rate,
    momentum and weight decay in it. The transform gets u, with the value before the step as
    `context.value` and the gradient that the optimizer used as `context.gradient`. The parameter
    becomes the value before the step + T(u). An entry of u that T leaves as it is keeps the bits
    that the optimizer wrote.

    The fields have the same meaning as those of `Parameters`. A frozen parameter is skipped and
    reported in the ledger, a parameter without a gradient is left alone. The state of the
    optimizer, such as its momentum, is not changed. With a closure the last call determines the
    gradient. LBFGS is refused: it computes curvature from its own updates. Where a `GradScaler`
    skips a step, or a fused optimizer does so on the device, nothing is changed. A copy of the
    selected parameters exists during each step.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step",)
    changes: ClassVar[str] = "updates"
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    copies_params: ClassVar[bool] = True

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "gradient"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return UPDATES


@validated
class MatchedUpdates(ParamSelector):
    """Rescale the update of each selected parameter to the norm of a treated update.

    This is the site of the control `update_norm_matched`. At stage `step` the transform T gets each
    gradient g that the optimizer is about to use. Its result goes to a second optimizer alone, of
    the same class and settings, with its own state, which steps from the same values. With u the
    optimizer's update from g and v the second optimizer's from T(g), the parameter becomes the
    value before the step + u |v| / |u|.

    Where v equals u, nothing is changed, bit for bit; where u is zero, so is the result. In steps
    in which the trigger does not fire the second optimizer gets g. Its state is part of the
    surgery's `state_dict`; it and the copies of the parameters double the optimizer's memory. LBFGS
    is refused, and so is an optimizer whose state holds anything except tensors.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("step",)
    group_stages: ClassVar[tuple[Stage, ...]] = ("step",)
    copies_params: ClassVar[bool] = True

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "examples"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return MATCHED


def _gradient(param: nn.Parameter) -> Tensor | None:
    grad = param.grad
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _step_second(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    copies: Mapping[nn.Parameter, Tensor],
    state: dict[str, Tensor],
) -> None:
    """Step the second optimizer, which has `state`, on copies of the parameters.

    The entries of the state go by the names of the parameters.
    """
    second = copy.copy(optimizer)  # without hooks, because Optimizer.__getstate__ leaves out
    for attribute in ("grad_scale", "found_inf"):  # of a GradScaler, read by fused optimizers
        setattr(second, attribute, getattr(optimizer, attribute, None))
    second.param_groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    second.state = defaultdict(dict)
    by_name = {names[param]: param for param in copies}
    for key, entry in state.items():
        name, _, part = key.rpartition(".")
        param = by_name.get(name)
        if param is not None:  # Adam's `step` is on the CPU, also after loading
            like = optimizer.state[param].get(part, entry)
            # A copy: optimizers write in place, and a `state_dict` has this tensor.
            second.state[copies[param]][part] = entry.to(like.device, copy=True)
    second.step()
    for name, param in by_name.items():
        for part, entry in second.state[copies[param]].items():
            if isinstance(entry, Tensor):
                state[f"{name}.{part}"] = entry
            elif entry is not None:  # as the momentum of SGD without momentum
                raise TypeError(
                    "use control=norm_matched or another optimizer: update_norm_matched needs only "
                    f"tensors as state, {type(optimizer).__name__} has {name}.{part} = {entry!r}"
                )
