"""Activations: what flows forward into or out of a module."""

from contextlib import ExitStack
from typing import ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import validated
from gradsurg.sites._flow import Flow, entering, leaving
from gradsurg.sites._modules import ModuleSelector, names_of
from gradsurg.sites.base import HookRegistry, Stage
from gradsurg.transforms.base import Scope


@validated
class Activations(ModuleSelector):
    """What flows forward out of (`side="output"`) or into (`"input"`) the modules that fit.

    Every floating tensor that a matching module returns or takes, also inside tuples, lists, dicts,
    dataclasses and keyword arguments, is replaced by what the transform makes of it, in training
    and in evaluation. The backward pass goes `through` the transform as autograd has it, or
    `straight`: its derivative is then taken to be one. Site ids are `name#call`, then `.input`, and
    the path of the tensor if there is anything but one tensor: `mix#0.input.1`, `mix#0.input.mask`.

    One tensor, one site: what a matching module hands on as it got it from another one (an
    identity, a container with the output of its last child or the input of its first) is
    transformed once, where it came first; what was changed in place between them is another value.
    A module that writes to its input writes to the transformed one, and its caller's stays.

    The recomputation of a checkpoint is transformed again and counted again. It has to give the
    same values: a transform that remembers or draws random numbers is refused there, and so is one
    that was changed since the forward; and a backward that comes after the block, or after another
    forward in which something else was done to these values.
    """

    side: Literal["output", "input"] = "output"
    backward: Literal["through", "straight"] = "through"

    stages: ClassVar[tuple[Stage, ...]] = ("forward",)

    @property
    def mechanism(self) -> tuple[object, ...]:
        return ("Activations", self.stage, self.side, self.backward)

    def hook(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        stage: Stage,
        scope: Scope,
        gates: HookRegistry,
        stack: ExitStack,
    ) -> None:
        block = ["open"]
        stack.callback(block.clear)
        flow = Flow(names_of(model), self, gates, {}, block)
        flow.calls.hook(model, stack)
        for module in self.hookable(flow.calls.names, gates, flow.tail):
            if self.side == "output":
                handle = module.register_forward_hook(leaving(flow))
            else:
                handle = module.register_forward_pre_hook(entering(flow), with_kwargs=True)
            stack.callback(handle.remove)
