"""Models in DistributedDataParallel."""

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls import refusal
from gradsurg.sites.places import Selector
from gradsurg.sites.selection import WRAPPERS
from gradsurg.torch_internals import autograd, compiling


def of_first_process(value: object) -> object:
    """Return the value of process 0; every process calls this function."""
    if isinstance(value, Tensor):
        shared = value.clone()
        distributed.broadcast(shared, 0)
        return shared
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


def refuse_static_graph(at: Selector, model: nn.Module, stack: ExitStack) -> None:
    """Raise RuntimeError if the model is in a DistributedDataParallel with static_graph=True.

    With an aggregator the weights of its ranks drift apart.
    """

    def check(wrapper: DistributedDataParallel) -> None:
        if wrapper.static_graph:
            raise refusal(at, "static_graph")

    when_wrapped(model, stack, check)


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel that is known to be in or around the model."""
    around = WRAPPERS[model]() if model in WRAPPERS else None
    parts = model.modules() if around is None else [around]
    return [part for part in parts if isinstance(part, DistributedDataParallel)]


def when_wrapped(
    model: nn.Module, stack: ExitStack, act: Callable[[DistributedDataParallel], None]
) -> None:
    """Call `act` with each DistributedDataParallel in or around the model.

    A wrapper inside the model is found at once, a wrapper around it when the model is called.
    """
    if wrappers := wrappers_of(model):
        for wrapper in wrappers:
            act(wrapper)
    elif distributed.is_available() and distributed.is_initialized():

        @compiling.untraced
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            wrapper = autograd.active_ddp()
            if wrapper is not None:
                act(wrapper)

        stack.callback(model.register_forward_pre_hook(hook).remove)
