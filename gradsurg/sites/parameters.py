"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites.base import Attached, GradFn, GroupFn, Stage
from gradsurg.sites.module_calls import tensors_in
from gradsurg.sites.selection import ParamSelector, expect_params
from gradsurg.sites.step_hooks import OptimizerSteps
from gradsurg.torch_internals import autograd, compiling
from gradsurg.transforms.base import Need, Scope


@validated
class Parameters(ParamSelector):
    """The gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    Stages: `backward`, the gradient of one backward pass before it is added to `.grad` (the default
    of tensor transforms); `accumulated`, the running sum in `.grad` after each backward pass;
    `reduced`, all `.grad`s at the end of a backward pass through the output of the model, averaged
    over the processes if DistributedDataParallel does so; `step`, the unscaled and accumulated
    gradient that the optimizer is about to use (the default of group transforms).

    `types` is a pattern on the class of the module that owns the parameter; `depth`, `index`,
    `ndim` and `size` (its number of entries) are a number or a pair (lowest, highest). A tied
    parameter is one site with several names. A frozen parameter is skipped and reported in the
    ledger.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward", "accumulated", "reduced", "step")
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "reduced")

    @property
    def provides(self) -> frozenset[Need]:
        return frozenset({"value", "examples", "skip"})

    def hook(self, attached: Attached) -> None:
        model, steps, stage, scope, stack = (
            attached.model,
            attached.steps,
            attached.stage,
            attached.scope,
            attached.stack,
        )
        shardable = stage in ("accumulated", "step")
        params = expect_params(self, model, attached, takes_shards=shardable)
        if shardable and any(map(autograd.is_sharded, params.values())):
            _hook_shards(params, steps, stage, scope, attached, stack)
            return
        match stage:
            case "backward":
                hooks = [
                    (ref(param), attached.hook_at(name, ref(param)))
                    for name, param in params.items()
                ]

                def register(removals: ExitStack) -> None:
                    for held, hook in hooks:
                        param = held()
                        if param is not None:  # it may have left the model
                            removals.callback(param.register_hook(hook).remove)

                attached.register(register, stack)
            case "accumulated":
                hook_accumulated(params, attached, stack)
            case "reduced":
                values = [ref(param) for param in params.values()]
                _hook_reduced(model, params, attached.group_hook(list(params), values), stack)
            case "step":
                for optimizer, part in steps.split(params, scope):
                    values = [ref(param) for param in part.values()]
                    act = _step_hook(part, values, steps, optimizer, attached)
                    steps.before(optimizer, _before_step(list(part.values()), act), stack)
            case _:
                raise AssertionError(stage)


def _step_hook(
    params: Mapping[str, nn.Parameter],
    values: Sequence[Callable[[], Tensor | None]],
    steps: OptimizerSteps,
    optimizer: Optimizer,
    attached: Attached,
) -> GroupFn:
    if attached.may_skip and isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS also steps without gradients, so that no step of it can be skipped; choose "
            "another optimizer"
        )
    return attached.group_hook(list(params), values, skip=partial(steps.skip, optimizer))


def hook_accumulated(
    params: Mapping[str, nn.Parameter], attached: Attached, stack: ExitStack
) -> None:
    """Hook the `.grad` of each parameter, after each backward pass has added to it."""
    for name, param in params.items():
        hook = _on_grad_attribute(attached.hook_at(name, ref(param)))
        stack.callback(param.register_post_accumulate_grad_hook(hook).remove)


def _on_grad_attribute(hook: GradFn) -> Callable[[Tensor], None]:
    def replace_grad(param: Tensor) -> None:
        result = hook(param.grad)
        if result is not None:
            param.grad = result

    return replace_grad


def _before_step(params: Sequence[nn.Parameter], group_hook: GroupFn) -> Callable[[], None]:
    """Return what runs before a step of the optimizer, which does not outlive the surgery."""

    def replace_grads() -> None:
        grads = [param.grad for param in params]
        results = group_hook(grads)
        if results is not grads:
            for param, result in zip(params, results, strict=True):
                param.grad = result

    return replace_grads


def _hook_shards(
    params: Mapping[str, nn.Parameter],
    steps: OptimizerSteps,
    stage: Stage,
    scope: Scope,
    attached: Attached,
    stack: ExitStack,
) -> None:
    """Hook parameters of `fully_shard`, whose `.grad`s are averages, each process having a part.

    Processes communicate at `step`, where all decide alike; not at `accumulated`.
    """
    sharded = [cast(Any, param) for param in params.values() if autograd.is_sharded(param)]
    meshes = {param.device_mesh for param in sharded}
    for mesh in meshes:
        if mesh.ndim != 1:
            raise TypeError(
                f"Parameters: sharded over a mesh of {mesh.ndim} dimensions, needs one dimension"
            )
    if attached.stateful:
        processes = sharded[0].device_mesh.size()
        made = int(attached.state("#parts").setdefault("processes", torch.tensor(processes)))
        if made != processes:
            raise ValueError(
                f"Parameters: the surgery has the state of {made} processes, each with its part of "
                f"the parameters; found {processes} processes"
            )
    are_alike = len(meshes) == 1 and len(sharded) == len(params)
    by_parts = attached.acts_on_shards and are_alike
    if stage == "accumulated":
        if attached.varies or not by_parts:
            reason = attached.varies or "the transform or its trigger needs whole gradients"
            raise ValueError(
                f"Parameters, stage 'accumulated': the parameters are sharded, and {reason}; use "
                "stage='step'"
            )
        for name, param in params.items():
            act = _on_parts({name: param}, attached.group_hook([name], []), attached)
            hook = _on_grad_attribute(partial(_alone, act))
            stack.callback(param.register_post_accumulate_grad_hook(hook).remove)
        return
    if not by_parts:
        attached.note("it needs whole gradients: those of sharded parameters were gathered")
    for optimizer, part in steps.split(params, scope):
        values = [partial(_whole, ref(param)) for param in part.values()]
        act = _step_hook(part, values if attached.needs_value else [], steps, optimizer, attached)
        act = _on_parts(part, act, attached) if by_parts else _on_whole(act)
        steps.before(optimizer, _before_step(list(part.values()), act), stack)


def _alone(act: GroupFn, grad: Tensor | None) -> Tensor | None:
    return act([grad])[0]


def _whole(held: ref[nn.Parameter]) -> Tensor | None:
    param = held()
    is_sharded = param is not None and autograd.is_sharded(param)
    return cast(Any, param.detach()).full_tensor() if param is not None and is_sharded else param


def _on_parts(params: Mapping[str, nn.Parameter], act: GroupFn, attached: Attached) -> GroupFn:
    """Call `act` with the part of each gradient that this process has."""
    sizes = {name: param.numel() for name, param in params.items()}
    mesh = cast(Any, next(iter(params.values()))).device_mesh

    def act_on_parts(grads: Sequence[Any]) -> Sequence[Tensor | None]:
        parts = [None if grad is None else grad.to_local() for grad in grads]
        with attached.on_shards(mesh.get_group(), sizes):
            results = act(parts)
        return [
            None if result is None else _as_part(result, grad)
            for grad, result in zip(grads, results, strict=True)
        ]

    return act_on_parts


def _on_whole(act: GroupFn) -> GroupFn:
    """Call `act` with whole gradients, and keep the part of each result that is of this process."""

    def act_on_whole(grads: Sequence[Any]) -> Sequence[Tensor | None]:
        wholes = [
            grad.full_tensor() if grad is not None and autograd.is_sharded(grad) else grad
            for grad in grads
        ]
        results = act(wholes)
        return [
            _part_of(result, grad) if result is not None and autograd.is_sharded(grad) else result
            for result, grad in zip(results, grads, strict=True)
        ]

    return act_on_whole


def _part_of(whole: Tensor, like: Any) -> Tensor:  # Any: a DTensor
    mesh, (placement,) = like.device_mesh, like.placements
    parts = whole.chunk(mesh.size(), placement.dim)
    rank = mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    return _as_part(part.contiguous(), like)


def _as_part(part: Tensor, like: Any) -> Tensor:
    """Return the sharded tensor of which a process has this part."""
    size, stride = like.shape, like.stride()
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride
    )


def _hook_reduced(
    model: nn.Module, params: Mapping[str, nn.Parameter], act: GroupFn, stack: ExitStack
) -> None:
    """Call `act` on the `.grad`s of all parameters at the end of each backward pass.

    In DistributedDataParallel that is after the averaging, the same on all ranks, and not in a
    backward pass of `no_sync`. Without it, `act` gets None for a parameter that this backward pass
    has not reached. A backward pass that does not reach the output of the model is left alone.
    """
    passes = _ReducedPasses(params, act)
    wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    hook = compiling.untraced(partial(_watch_output, passes))
    for part in wrappers or [model]:
        stack.callback(part.register_forward_hook(hook).remove)
    for name, param in params.items():
        handle = param.register_post_accumulate_grad_hook(_reach(passes, name))
        stack.callback(handle.remove)
    stack.callback(passes.close)


def _watch_output(
    passes: "_ReducedPasses", module: nn.Module, args: tuple[object, ...], output: object
) -> None:
    # A hook on the output runs on every rank, one on a parameter only on the ranks that use it.
    wrapper = module if isinstance(module, DistributedDataParallel) else autograd.active_ddp()
    if wrapper is not None and not wrapper.require_backward_grad_sync:
        return  # no_sync: the next backward pass averages the sum
    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_begin, passes, wrapper))


def _begin(passes: "_ReducedPasses", wrapper: DistributedDataParallel | None, _: Tensor) -> None:
    passes.begin(wrapper)


def _reach(passes: "_ReducedPasses", name: str) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        passes.reached.add(name)

    return hook


class _ReducedPasses:
    """The running backward pass, and the parameters to whose `.grad` it has added."""

    def __init__(self, params: Mapping[str, nn.Parameter], act: GroupFn) -> None:
        self.params = {name: ref(param) for name, param in params.items()}
        self.act: GroupFn | None = act
        self.task = -1  # the number of the last backward pass
        self.reached: set[str] = set()

    def close(self) -> None:
        """Do nothing from now on, also at the end of a graph that is already built."""
        self.act = None

    def begin(self, wrapper: DistributedDataParallel | None) -> None:
        """Act at the end of the running backward pass; once, however many outputs it has."""
        task = autograd.backward_task()
        if task == self.task:
            return
        self.task = task
        self.reached.clear()
        # DistributedDataParallel averages in a callback of its own, queued after this one. One
        # that is queued when the callbacks run comes last.
        end = partial(self._end, wrapper)
        autograd.at_end_of_backward(partial(autograd.at_end_of_backward, end))

    def _end(self, wrapper: DistributedDataParallel | None) -> None:
        if self.act is None:
            return
        params = [held() for held in self.params.values()]
        grads = [
            param.grad
            if param is not None and (wrapper is not None or name in self.reached)
            else None
            for name, param in zip(self.params, params, strict=True)
        ]
        if all(grad is None for grad in grads):  # autograd.grad adds to no .grad
            return
        graph = any(grad is not None and grad.requires_grad for grad in grads)
        with torch.set_grad_enabled(graph):
            results = self.act(grads)
            for param, grad, result in zip(params, grads, results, strict=True):
                if param is None or result is None or result is grad:
                    continue
                if grad is not None and wrapper is not None and wrapper.gradient_as_bucket_view:
                    grad.copy_(result)  # .grad must stay a view of the bucket
                else:
                    param.grad = result
